"""A transaction that stays open delays its own pods and nothing else; each pod is processed once under a lease."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import LocalProtocolError
from replicad.postgres.bridge import Database
from replicad.protocol.tokens import START
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.lengths import first

from .conftest import OpenClient

SETTINGS = WorkerSettings(batch_ids=7, backoff_first=0.01)


class Downstream:
    """What was written, and how often; never an id twice at once."""

    def __init__(self, database: Database) -> None:
        self.rows: dict[int, int] = {}
        self.seqs: Counter[tuple[int, int]] = Counter()  # id and seq
        self.busy: set[int] = set()
        self._database = database

    async def handle(self, batch: Batch) -> None:
        ids = {int(touch.id) for touch in batch.touches}
        assert not ids & self.busy
        self.busy |= ids
        self.seqs.update((int(touch.id), seq) for touch in batch.touches for seq in touch.seqs)
        found = await self._database.fetch("SELECT id, value FROM items WHERE id = ANY($1)", list(ids))
        await trio.sleep(random.random() / 100)
        for id in ids:
            self.rows.pop(id, None)
        self.rows |= {row["id"]: row["value"] for row in found}
        self.busy -= ids


@asynccontextmanager
async def working(open_worker_client: OpenClient, downstream: Downstream) -> AsyncIterator[Worker]:
    worker = Worker(open_worker_client, "items", downstream.handle, settings=SETTINGS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        yield worker
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.01)


async def until_empty(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.items"):
            await trio.sleep(0.02)


@pytest.mark.parametrize("prepared", [False, True])
async def test_an_open_transaction_delays_its_own_pods_only(
    items: Database, open_worker_client: OpenClient, prepared: bool
) -> None:
    downstream = Downstream(items)
    async with working(open_worker_client, downstream), items.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute("INSERT INTO items VALUES (1, 1)")
        if prepared:
            await connection.execute("PREPARE TRANSACTION 'forgotten'")
        for id in range(2, 40):
            await items.execute("INSERT INTO items VALUES ($1, $1::bigint::integer)", id)
            await until(lambda id=id: id in downstream.rows)  # type: ignore[misc]
        assert 1 not in downstream.rows
        await connection.execute("COMMIT PREPARED 'forgotten'" if prepared else "COMMIT")
        await until_empty(items)
    assert downstream.rows == {id: 1 if id == 1 else id for id in range(1, 40)}
    assert set(downstream.seqs.values()) == {1}


async def test_an_open_transaction_does_not_delay_a_backfill(items: Database, open_worker_client: OpenClient) -> None:
    downstream = Downstream(items)
    async with working(open_worker_client, downstream), items.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute("SELECT tube.items_touch(0, '{100}', 'T')")
        await items.execute("ALTER TABLE items DISABLE TRIGGER USER")
        await items.execute("INSERT INTO items SELECT n, n FROM generate_series(2, 60, 2) AS n")
        await items.execute("SELECT tube.items_touch(0, array_agg(id), 'B', NULL, 3) FROM items")
        await until(lambda: len(downstream.rows) == 30)
        await connection.execute("COMMIT")
        await until_empty(items)
    assert set(downstream.seqs.values()) == {1}


async def test_a_cursor_does_not_pass_early_pods_and_control_pods_are_not_among_them(
    items: Database, open_worker_client: OpenClient
) -> None:
    part = Part(0, 2)
    async with open_worker_client() as client, items.connection() as connection:
        lease = await client.claim("items", part)
        await connection.execute("BEGIN")
        await connection.execute("SELECT tube.items_touch(0, '{2}', 'T')")
        await items.execute("SELECT tube.items_touch(0, '{4}', 'T'), tube.items_touch(0, '{}', 'T', '{\"mine\": 1}')")
        await items.execute("SELECT tube.items_touch(0, '{6}', 'B')")
        with trio.fail_after(PATIENCE):
            found = await client.pods("items", part, lease.term, wait=PATIENCE, early=(0,))
        assert [list(map(int, pod.ids)) for pod in found] == [[4], [6]]
        assert (found.end.cursor, found.end.pods) == (START, 2)
        seqs = [pod.seq for pod in found]
        assert [pod.seq for pod in await client.pods("items", part, lease.term, early=(seqs[0],))] == seqs[1:]
        assert [pod.seq for pod in await client.pods("items", part, lease.term, early=(0,), backfill=0)] == seqs[:1]
        assert await client.pods("items", part, lease.term) == []
        await connection.execute("COMMIT")
        with trio.fail_after(PATIENCE):
            while len(found := await client.pods("items", part, lease.term, wait=PATIENCE, early=tuple(seqs))) < 4:
                pass
        assert [list(map(int, pod.ids)) for pod in found] == [[2], [4], [], [6]]
        assert found.end.cursor.backfill == seqs[1]
        with pytest.raises(LocalProtocolError, match="early is for lines"):
            await client.plan("items", part, lease.term, early=(0,))


@pytest.mark.parametrize("seed", first(1, [1, 2, 3]))
async def test_random_transactions_end_in_an_equal_downstream_and_no_pod_is_processed_twice(
    items: Database, open_worker_client: OpenClient, seed: int
) -> None:
    """Transactions commit or roll back in any order, some late; ids meet."""
    chance = random.Random(seed)
    downstream = Downstream(items)

    async def write() -> None:
        for _ in range(12):
            async with items.connection() as connection:
                await connection.execute("BEGIN")
                for id in sorted(chance.sample(range(40), chance.randint(1, 4))):  # in one order: no deadlock
                    await connection.execute(
                        "INSERT INTO items VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                        id,
                        chance.randrange(1000),
                    )
                await trio.sleep(chance.choice([0, 0, 0, 0.01, 0.3]))
                await connection.execute(chance.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))

    async with working(open_worker_client, downstream) as worker:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(write)
        await until_empty(items)
        assert worker.statistics.leases_lost == 0
    assert downstream.rows == {row["id"]: row["value"] for row in await items.fetch("SELECT id, value FROM items")}
    assert set(downstream.seqs.values()) == {1}
