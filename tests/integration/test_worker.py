"""A worker without Spark on a real daemon: a downstream that ends up equal, whatever fails on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from replicad.client.async_client import AsyncClient
from replicad.client.requests import Pod
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from replicad.protocol.connection import CloseReason
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import OpenClient

QUICK = WorkerSettings(batch_ids=5, parallelism=3, memory=20_000, poll=1.0, lease_ttl=2.0, tries=3, backoff_first=0.01)


class Downstream:
    """What workers wrote, checked while they write: never an id twice at once."""

    def __init__(self, database: Database) -> None:
        self.rows: dict[int, int] = {}
        self.seqs: dict[int, int] = {}  # id: the seq that it was written for
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
                self.seqs.pop(id, None)
            self.rows |= {row["id"]: row["value"] for row in found}
            seq_of = {touch.id: touch.seq for touch in batch.touches}
            self.seqs |= {row["id"]: seq_of[row["id"]] for row in found}
        finally:
            self.busy.subtract(ids)

    async def stale_ids(self, shard: int, before: int, limit: int) -> list[int]:
        return [id for id, seq in self.seqs.items() if id % 2 == shard and seq < before][:limit]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with trio.fail_after(PATIENCE):
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


@pytest.mark.parametrize("waiting", [False, True], ids=["alone", "another waits for the tube"])
async def test_a_worker_of_a_tube_with_one_partition_notices_that_there_are_more(
    items: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    """No request under its lease shows it: 0/1 is always the whole tube. An idle worker must notice it too."""
    monkeypatch.setattr("replicad.client.worker.PARTITIONS_ASKED", 0.2)
    await items.execute("SELECT tube.tube_ensure_exists('items', 1)")
    downstream = Downstream(items)

    async def held() -> list[str]:
        rows = await items.fetch("SELECT partition || '/' || partitions AS part FROM tube.tube_lease ORDER BY 1")
        return [row["part"] for row in rows]

    async def is_held(*parts: str) -> bool:
        return await held() == list(parts)

    async with trio.open_nursery() as nursery:
        for _ in range(2 if waiting else 1):
            nursery.start_soon(Worker(open_worker_client, "items", downstream.handle, settings=QUICK).run)
        await until(lambda: is_held("0/1"))
        await items.execute("SELECT tube.tube_ensure_exists('items', 3)")
        await until(lambda: is_held("0/3", "1/3", "2/3"))
        await change(items, 30)
        await until(lambda: is_empty(items))
        assert await held() == ["0/3", "1/3", "2/3"]
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
        with trio.fail_after(PATIENCE):
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
        with trio.fail_after(PATIENCE):
            while len(downstream.rows) < 10:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert await items.fetch_value("SELECT array_agg(op) FROM tube.items WHERE op = 'B'") == ["B"]


async def test_a_worker_that_is_stopped_while_idle_lets_go_of_its_leases_at_once(
    items: Database, open_worker_client: OpenClient
) -> None:
    claimed = []

    @asynccontextmanager
    async def open_client() -> AsyncIterator[AsyncClient]:
        async with open_worker_client() as client:
            claim = client.claim

            async def note(*args: Any, **options: Any) -> Any:
                claimed.append(await claim(*args, **options))
                return claimed[-1]

            client.claim = note  # type: ignore[method-assign]
            yield client

    worker = Worker(open_client, "items", Downstream(items).handle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(PATIENCE):
            while len(claimed) < 2:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    async with open_worker_client() as client:
        for partition in (0, 1):
            await client.claim("items", Part(partition, 2))


async def test_after_a_backfill_what_the_downstream_holds_of_deleted_rows_goes_though_workers_die(
    items: Database, open_worker_client: OpenClient
) -> None:
    await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(1, 1000) AS id")
    await items.execute("DELETE FROM tube.items")  # nobody was listening
    downstream = Downstream(items)
    downstream.rows = dict.fromkeys(range(500, 2000), 0)
    downstream.seqs = dict.fromkeys(range(500, 2000), 0)
    assert await items.fetch_value("SELECT tube.tube_backfill_schedule('items', 'id', 0, 9)") == 1
    marks: list[str] = []
    collecting = trio.Event()

    async def control(pod: Pod) -> None:
        marks.append(pod.payload["type"])

    async def stale_ids(shard: int, before: int, limit: int) -> list[int]:
        found = await downstream.stale_ids(shard, before, limit)
        if found:
            assert not {id for id in range(1, 1001) if id % 2 == shard} - downstream.rows.keys()  # the backfill is done
            collecting.set()
        return found

    settings = replace(QUICK, lease_ttl=30.0, memory=64 << 20, garbage_ids=20, garbage_settle=0.1)
    killed, worker = (
        Worker(open_worker_client, "items", downstream.handle, control=control, stale_ids=stale_ids, settings=settings)
        for _ in range(2)
    )
    async with trio.open_nursery() as nursery:  # killed while it collects
        nursery.start_soon(killed.run)
        with trio.fail_after(PATIENCE):
            await collecting.wait()
        nursery.cancel_scope.cancel()
    assert len(downstream.rows) > 1000
    assert await items.fetch_value("SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'")
    await items.execute("DELETE FROM tube.tube_lease")  # what CLAIM does to one that has run out
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    assert downstream.rows == await table(items)
    assert set(marks) == {"backfill_start", "backfill_end"}
    assert killed.statistics.garbage + worker.statistics.garbage <= 1000


async def test_garbage_that_cannot_be_collected_is_parked_with_the_reason(
    items: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream(items)
    downstream.poison = {7}
    for_ever = [8]

    async def stale_ids(shard: int, before: int, limit: int) -> list[int]:
        assert (before, limit) == (5, 1000)
        return for_ever if shard == 0 else [7] if 7 not in parked_once else []

    parked_once: set[int] = set()

    async def handle(batch: Batch) -> None:
        if {touch.id for touch in batch.touches} == {7}:
            assert [touch.op for touch in batch.touches] == (["G"] if downstream.poison else ["T"])
            tries.append(7)
            if len(tries) == QUICK.tries:
                parked_once.add(7)
        await downstream.handle(batch)

    tries: list[int] = []
    worker = Worker(
        open_worker_client,
        "items",
        handle,
        stale_ids=stale_ids,
        settings=replace(QUICK, lease_ttl=30.0, garbage_settle=0.01),
    )
    end = '{"type": "backfill_end", "start_seq": "5"}'
    for shard in (0, 1):
        await items.execute("SELECT tube.items_touch($1, ARRAY[]::bigint[], 'B', $2)", shard, end)
    await items.execute("SELECT tube.items_touch(1, ARRAY[11], 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        while len(tries) < QUICK.tries - 1:  # an id is parked only while others succeed
            await items.execute("SELECT tube.items_touch(1, ARRAY[11], 'T')")
            await trio.sleep(0.01)
        await items.execute("SELECT tube.items_touch(1, ARRAY[11], 'T')")
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
    parked = await items.fetch("SELECT * FROM tube.tube_parked_list('items') ORDER BY shard")
    assert [(row["shard"], row["op"], row["ids"]) for row in parked] == [(0, "B", []), (1, "T", [7])]
    assert "still names 1 stale ids of shard 0, e.g. 8" in parked[0]["error"]
    assert await items.fetch_value("SELECT tube.tube_parked_replay('items')") == 2
    downstream.poison, for_ever = set(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until(lambda: is_empty(items))
        nursery.cancel_scope.cancel()
