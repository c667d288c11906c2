"""A worker without Spark on a real daemon: a downstream that ends up equal, whatever fails on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio

from replicad.client.trio_client import TrioClient, open_client
from replicad.postgres.bridge import Database
from replicad.protocol.states import CloseReason
from replicad.server.daemon import Daemon
from replicad.tubes.worker import Batch, Worker, WorkerSettings

OpenClient = Callable[[], AbstractAsyncContextManager[TrioClient]]
QUICK = WorkerSettings(batch_ids=5, parallelism=3, max_pods=20, poll=1.0, lease_ttl=2.0, tries=3, backoff_first=0.01)


@pytest.fixture
async def items(database: Database, daemon: Daemon) -> Database:
    """A table `items` attached to the tube `items` of two partitions; even ids are in shard 0, odd ones in shard 1."""
    await database.execute("SELECT tube.tube_ensure_exists('items', 2)")
    await database.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, value int);"
        "SELECT tube.tube_table_ensure_attached('items', 'items', 0, routing => '(id % 2)::integer')"
    )
    return database


@pytest.fixture
def open_worker_client(daemon: Daemon) -> OpenClient:
    address = daemon.addresses[0]
    return lambda: open_client(address.host, address.port, name="worker")


class Downstream:
    """What workers wrote, checked while they write: never an id twice at once."""

    def __init__(self, database: Database) -> None:
        self.rows: dict[int, int] = {}
        self.busy: Counter[int] = Counter()
        self.calls = 0
        self.broken = False
        self.poison: set[int] = set()
        self._database = database

    async def handle(self, batch: Batch) -> None:
        self.calls += 1
        ids = [touch.id for touch in batch.touches]
        assert len(set(ids)) == len(ids)
        self.busy.update(ids)
        assert max(self.busy.values()) == 1
        try:
            if self.broken or self.poison & set(ids):
                raise ValueError("cannot be written")
            found = await self._database.fetch("SELECT id, value FROM items WHERE id = ANY($1)", ids)
            await trio.sleep(random.random() / 500)
            for id in ids:
                self.rows.pop(id, None)
            self.rows |= {row["id"]: row["value"] for row in found}
        finally:
            self.busy.subtract(ids)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with trio.fail_after(30):
        while not await condition():
            await trio.sleep(0.05)


async def is_empty(database: Database) -> bool:
    return not await database.fetch_value("SELECT count(*) FROM tube.items")


async def table(database: Database) -> dict[int, int]:
    return {row["id"]: row["value"] for row in await database.fetch("SELECT id, value FROM items")}


async def change(database: Database, rounds: int) -> None:
    chance = random.Random(5)
    for _ in range(rounds):
        ids = [chance.randrange(200) for _ in range(chance.randint(1, 10))]
        if chance.random() < 0.2:
            await database.execute("DELETE FROM items WHERE id = ANY($1)", ids)
        else:
            await database.execute(
                "INSERT INTO items SELECT DISTINCT id, $2::int FROM unnest($1::bigint[]) AS id "
                "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                ids,
                chance.randrange(1000),
            )


async def test_the_downstream_follows_through_workers_that_come_and_go(
    items: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream(items)

    async def work(lifetime: float) -> None:
        with trio.move_on_after(lifetime):
            await Worker(open_worker_client, "items", downstream.handle, settings=QUICK).run()

    async with trio.open_nursery() as nursery:
        for lifetime in (0.5, 1.0, 60.0):
            nursery.start_soon(work, lifetime)
        await change(items, 200)
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert downstream.rows == await table(items)
    assert downstream.calls > 20


async def test_a_changed_number_of_partitions_and_a_killed_connection_lose_nothing(
    items: Database, open_worker_client: OpenClient, daemon: Daemon
) -> None:
    downstream = Downstream(items)
    worker = Worker(open_worker_client, "items", downstream.handle, settings=QUICK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await change(items, 30)
        await items.execute("SELECT tube.tube_ensure_exists('items', 3)")
        await change(items, 30)
        for session in list(daemon.hub):
            session.hang_up(CloseReason.PEER_LOST)
        await change(items, 30)
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert downstream.rows == await table(items)


async def test_one_poison_id_is_parked_and_the_shard_goes_on(items: Database, open_worker_client: OpenClient) -> None:
    downstream = Downstream(items)
    downstream.poison = {42}
    worker = Worker(open_worker_client, "items", downstream.handle, settings=QUICK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(0, 99) AS id")
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert downstream.rows.keys() == set(range(100)) - {42}
    [parked] = await items.fetch("SELECT * FROM tube.tube_parked_list('items')")
    assert (parked["ids"], parked["tries"], parked["error"]) == ([42], 3, "ValueError('cannot be written')")
    assert worker.statistics.parked == 1


async def test_while_everything_fails_nothing_is_parked_and_it_recovers_by_itself(
    items: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream(items)
    downstream.broken = True
    settings = WorkerSettings(batch_ids=5, tries=2, poll=1.0, backoff_first=0.01, backoff_cap=0.02)
    worker = Worker(open_worker_client, "items", downstream.handle, settings=settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(0, 19) AS id")
        with trio.fail_after(20):
            while downstream.calls < 200:
                await trio.sleep(0.01)
        downstream.broken = False
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert downstream.rows == await table(items)
    assert worker.statistics.parked == 0


async def test_backfill_can_be_left_for_later(items: Database, open_worker_client: OpenClient) -> None:
    downstream = Downstream(items)
    settings = WorkerSettings(exclude_backfill=True, poll=0.5)
    worker = Worker(open_worker_client, "items", downstream.handle, settings=settings)
    await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(0, 9) AS id")
    await items.execute("SELECT tube.items_touch(0, ARRAY[2, 4], 'B')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(20):
            while len(downstream.rows) < 10:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert await items.fetch_value("SELECT array_agg(op) FROM tube.items WHERE op = 'B'") == ["B"]


async def test_a_scheduled_backfill_reaches_the_downstream_between_its_marks(
    items: Database, open_worker_client: OpenClient
) -> None:
    await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(1, 1000) AS id")
    await items.execute("DELETE FROM tube.items")
    assert await items.fetch_value("SELECT tube.tube_backfill_schedule('items', 'id', 0, 9)") == 1
    downstream = Downstream(items)
    marks: list[str] = []

    async def control(pod: object) -> None:
        marks.append(pod.payload["type"])  # type: ignore[attr-defined]

    worker = Worker(open_worker_client, "items", downstream.handle, control=control)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(30):
            while len(downstream.rows) < 1000 or marks.count("backfill_end") < 2:
                await trio.sleep(0.05)
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert sorted(marks) == ["backfill_end"] * 2 + ["backfill_start"] * 2
