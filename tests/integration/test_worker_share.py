"""Workers of one tube divide its partitions by the number of living workers, without an id at two of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
import trio

from replicad.client import sharing
from replicad.client.async_client import AsyncClient, open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.daemons import Daemon

OpenClient = Callable[[], AbstractAsyncContextManager[AsyncClient]]
SETTINGS = WorkerSettings(lease_ttl=6.0, poll=20.0, backoff_first=0.01)
PARTITIONS = 10
HELD = """SELECT coalesce(array_agg(n ORDER BY n), '{}') FROM (
    SELECT count(*)::integer AS n FROM tube.tube_lease WHERE holder NOT LIKE 'other%' GROUP BY holder
) AS h"""


@pytest.fixture
async def queue(database: Database, daemon: Daemon) -> Database:
    """A tube `queue` of ten partitions."""
    await database.execute("SELECT tube.tube_ensure_exists('queue', $1)", PARTITIONS)
    return database


@pytest.fixture
def open_worker_client(daemon: Daemon) -> OpenClient:
    address = daemon.addresses[0]
    return lambda: open_client(address.host, address.port, name="worker")


async def until_held(database: Database, *counts: int) -> None:
    """Wait until the workers hold so many partitions."""
    found = None
    try:
        with trio.fail_after(PATIENCE):
            while (found := await database.fetch_value(HELD)) != sorted(counts):
                await trio.sleep(0.02)
    except trio.TooSlowError:
        raise AssertionError(f"the workers hold {found}, not {sorted(counts)}") from None


class Downstream:
    """Takes ids of all workers, and notes if an id is at two of them at once."""

    def __init__(self, call: float = 0.03) -> None:
        self._call = call
        self._busy: Counter[tuple[int, object]] = Counter()
        self.twice: list[tuple[int, object]] = []
        self.done: set[object] = set()

    async def take(self, batch: Batch) -> None:
        rows = [(touch.shard, touch.id) for touch in batch.touches]
        self._busy.update(rows)
        self.twice += [row for row in rows if self._busy[row] > 1]
        try:
            await trio.sleep(self._call)
        finally:
            self._busy.subtract(rows)
        self.done.update(touch.id for touch in batch.touches)


class Touches:
    """A program that touches ids: a few again and again, and new ones."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self.count = 0

    async def run(self) -> None:
        while True:
            ids = [self.count % 40, 1000 + self.count]
            await self._db.execute("SELECT tube.queue_touch($1, $2, 'T')", self.count % PARTITIONS, ids)
            self.count += 1
            await trio.sleep(0.01)


@asynccontextmanager
async def at_work(queue: Database, downstream: Downstream) -> AsyncIterator[trio.Nursery]:
    """A nursery for workers, beside a program that touches ids. At the end they empty the tube.

    All ids must have arrived then, and none was at two workers at once.
    """
    touches = Touches(queue)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as writing:
            writing.start_soon(touches.run)
            yield nursery
            writing.cancel_scope.cancel()
        with trio.fail_after(PATIENCE):
            while await queue.fetch_value("SELECT count(*) FROM tube.queue"):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert {1000 + number for number in range(touches.count)} <= downstream.done
    assert downstream.twice == []


def worker(open_worker_client: OpenClient, downstream: Downstream, settings: WorkerSettings = SETTINGS) -> Worker:
    return Worker(open_worker_client, "queue", downstream.take, settings=settings)


async def test_partitions_are_divided_among_workers_that_come_and_go(
    queue: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream()
    scopes = [trio.CancelScope() for _ in range(3)]

    async def work(scope: trio.CancelScope) -> None:
        with scope:
            await worker(open_worker_client, downstream).run()

    async with at_work(queue, downstream) as nursery:
        nursery.start_soon(work, scopes[0])
        await until_held(queue, 10)
        nursery.start_soon(work, scopes[1])
        await until_held(queue, 5, 5)
        nursery.start_soon(work, scopes[2])
        await until_held(queue, 3, 3, 4)
        scopes[0].cancel()
        await until_held(queue, 5, 5)


@pytest.mark.long
async def test_workers_join_and_leave_in_masses_and_some_of_them_get_no_partition(
    queue: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream()

    async def work(scope: trio.CancelScope) -> None:
        with scope:
            await worker(open_worker_client, downstream).run()

    async with at_work(queue, downstream) as nursery:
        first, second = [[trio.CancelScope() for _ in range(number)] for number in (3, 8)]
        for scope in first + second:
            nursery.start_soon(work, scope)
        await until_held(queue, *[1] * 10)
        for scope in first:
            scope.cancel()
        await until_held(queue, *[1] * 6, 2, 2)
        for scope in second[2:]:
            scope.cancel()
        await until_held(queue, 5, 5)


async def test_no_partition_stays_free_because_of_workers_that_ended_without_a_word(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """One of them has claimed partitions, the other was counted only, and neither is heard of again."""
    async with open_worker_client() as client:
        for number in (0, 1, 2):
            await client.claim("queue", Part(number, PARTITIONS), ttl=2.0, holder="silent!1")
        await client.share("queue", holder="silent!1", ttl=2.0)
        await client.share("queue", holder="idle!2", ttl=PATIENCE * 10)
        downstream = Downstream()
        async with at_work(queue, downstream) as nursery:
            nursery.start_soon(worker(open_worker_client, downstream).run)
            await until_held(queue, 10)


async def test_partitions_of_a_reader_without_shares_stay_with_it_and_the_rest_is_divided(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """Such a reader is a worker with chosen partitions, or Spark, which holds the whole tube."""
    downstream = Downstream()
    async with open_worker_client() as other:
        spark = await other.claim("queue", Part(0, 1), ttl=600, holder="other!1")
        async with at_work(queue, downstream) as nursery:
            for _ in range(2):
                nursery.start_soon(worker(open_worker_client, downstream).run)
            with trio.fail_after(PATIENCE):
                while await queue.fetch_value("SELECT count(*) FROM tube.tube_worker") < 2:
                    await trio.sleep(0.02)
            await other.release("queue", spark.part, spark.term)
            await until_held(queue, 5, 5)
            chosen = replace(SETTINGS, poll=0.5)
            chosen_worker = Worker(open_worker_client, "queue", downstream.take, partitions={1, 2}, settings=chosen)
            scope = trio.CancelScope()

            async def work() -> None:
                with scope:
                    await chosen_worker.run()

            nursery.start_soon(work)
            await trio.sleep(1)
            scope.cancel()


async def test_a_standby_takes_over_at_once_when_the_worker_before_it_ends(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its next regular SHARE, which is later than the test lasts."""
    monkeypatch.setattr(sharing, "INTERVAL", 10 * PATIENCE)
    await queue.execute("SELECT tube.tube_ensure_exists('queue', 1)")
    settings = replace(SETTINGS, lease_ttl=30 * PATIENCE)
    scope = trio.CancelScope()

    async def work() -> None:
        with scope:
            await worker(open_worker_client, Downstream(), settings).run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await until_held(queue, 1)
        nursery.start_soon(worker(open_worker_client, Downstream(), settings).run)
        with trio.fail_after(PATIENCE):
            while await queue.fetch_value("SELECT count(*) FROM tube.tube_worker") < 2:
                await trio.sleep(0.02)
        holder = await queue.fetch_value("SELECT holder FROM tube.tube_lease")
        scope.cancel()
        with trio.fail_after(PATIENCE):
            while await queue.fetch_value("SELECT holder FROM tube.tube_lease") in (None, holder):
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_a_partition_is_given_back_after_its_present_calls_and_begins_no_others(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """The calls are held until both of one partition are under way and another worker waits for partitions."""
    await queue.execute("SELECT tube.tube_ensure_exists('queue', 2)")
    gate, begun = trio.Event(), Counter[int]()

    async def take(batch: Batch) -> None:
        begun[batch.part.partition] += 1
        await gate.wait()

    await queue.execute("SELECT tube.queue_touch(0, ARRAY[n], 'T') FROM generate_series(1, 20) n")
    await queue.execute("SELECT tube.queue_touch(1, ARRAY[n], 'T') FROM generate_series(1, 20) n")
    settings = replace(SETTINGS, batch_ids=1, parallelism=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "queue", take, settings=settings).run)
        with trio.fail_after(PATIENCE):
            while begun != {0: 2, 1: 2}:
                await trio.sleep(0.02)
        nursery.start_soon(Worker(open_worker_client, "queue", take, settings=settings).run)
        await trio.sleep(2)
        assert begun == {0: 2, 1: 2}, "nothing moves while its calls run"
        assert await queue.fetch_value(HELD) == [2]
        gate.set()
        await until_held(queue, 1, 1)
        with trio.fail_after(PATIENCE):
            while await queue.fetch_value("SELECT count(*) FROM tube.queue"):
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
