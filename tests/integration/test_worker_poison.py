"""Ids that always fail, in bursts: they are parked, and the others are processed meanwhile, whatever their share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from replicad.client.requests import Pod
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.lengths import first

from .conftest import OpenClient

PARKED = "SELECT coalesce(sum(cardinality(ids)), 0) FROM tube.tube_parked"


class Downstream:
    """It takes the ids from 0 on and refuses negative ones."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.broken = False

    async def handle(self, batch: Batch) -> None:
        await trio.sleep(0.001)
        ids = {touch.id for touch in batch.touches}
        if self.broken or min(ids) < 0:
            raise ValueError(f"{min(ids)} cannot be written")
        self.done |= ids


async def put(database: Database, ids: list[int], size: int) -> None:
    """Touch these ids, in this order, in pods of `size` ids."""
    await database.execute("SELECT tube.queue_touch(0, $1, 'T', NULL, $2)", ids, size)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.02)


@pytest.mark.parametrize("size", first(1, [50, 1]))
async def test_good_ids_behind_three_hundred_poison_ids_are_processed_and_the_poison_is_parked(
    queue: Database, open_worker_client: OpenClient, size: int
) -> None:
    downstream = Downstream()
    await put(queue, [*range(-300, 0), *range(100)], size)
    worker = Worker(open_worker_client, "queue", downstream.handle, settings=WorkerSettings(backoff_first=0.05))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until(lambda: len(downstream.done) == 100)
        await until(lambda: worker.statistics.parked == 300)
        nursery.cancel_scope.cancel()
    assert await queue.fetch_value(PARKED) == 300
    rows = await queue.fetch("SELECT ids, error FROM tube.tube_parked")
    assert all(f"{row['ids'][0]} cannot be written" in row["error"] for row in rows)
    assert len(rows) < 300 or size == 1, "ids of one pod are parked together, each with its error"


@pytest.mark.long
async def test_good_ids_are_processed_at_a_hundred_in_a_second_beside_nine_times_as_many_poison_ids(
    queue: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream()
    await put(queue, [n if n % 10 == 0 else -n for n in range(1, 1001)], 50)
    worker = Worker(open_worker_client, "queue", downstream.handle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        began = trio.current_time()
        await until(lambda: len(downstream.done) == 100)
        took = trio.current_time() - began
        nursery.cancel_scope.cancel()
    assert took < PATIENCE


async def test_poison_is_parked_although_no_worker_lives_for_two_of_its_tries(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """Each worker ends after its first try, and leaves the number of tries to the next one."""
    settings = WorkerSettings(tries=3, backoff_first=600.0, backoff_cap=600.0)

    async def work(number: int) -> None:
        downstream = Downstream()
        worker = Worker(open_worker_client, "queue", downstream.handle, settings=settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await put(queue, [number], 1)
            await until(lambda: number in downstream.done)
            if number < 2:
                await until(lambda: bool(worker._at_work[0]._triage.failing))
            else:
                await until(lambda: worker.statistics.parked == 1)
            nursery.cancel_scope.cancel()

    await put(queue, [-1], 1)
    for number in range(3):
        await work(number)
        assert await queue.fetch_value(PARKED) == (number == 2)


async def test_poison_that_comes_alone_after_successes_is_parked_and_in_an_outage_nothing_is(
    queue: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream()
    settings = WorkerSettings(tries=3, backoff_first=0.01, backoff_cap=0.05)
    worker = Worker(open_worker_client, "queue", downstream.handle, settings=settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await put(queue, [1, 2, 3], 1)
        await until(lambda: len(downstream.done) == 3)
        downstream.broken = True
        await put(queue, list(range(4, 24)), 1)
        await until(lambda: worker.statistics.failed_calls > 150)  # more than each of them has tries
        assert worker.statistics.parked == 0
        downstream.broken = False
        await until(lambda: len(downstream.done) == 23)
        await put(queue, list(range(-20, 0)), 1)
        await until(lambda: worker.statistics.parked == 20)
        nursery.cancel_scope.cancel()
    assert await queue.fetch_value(PARKED) == 20


async def test_live_ids_are_processed_while_all_calls_of_a_backfill_last(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """All places but one are for the backfill, and half of the memory: neither keeps a live id from the function."""
    live: set[int] = set()
    began = 0

    async def handle(batch: Batch) -> None:
        nonlocal began
        if any(touch.op == "B" for touch in batch.touches):
            began += 1
            await trio.sleep_forever()
        live.update(touch.id for touch in batch.touches)

    await queue.execute("SELECT tube.queue_touch(0, array_agg(n), 'B') FROM generate_series(1, 20000) AS n")
    worker = Worker(open_worker_client, "queue", handle, settings=WorkerSettings(memory=500_000, batch_ids=50))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until(lambda: began == 3)
        for id in range(-5, 0):
            await put(queue, [id], 1)
            await until(lambda id=id: id in live)  # type: ignore[misc]
        nursery.cancel_scope.cancel()
    assert began == 3


@pytest.mark.long
async def test_the_partitions_of_a_worker_share_one_memory(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.worker.READ_IDS", 100)
    await queue.execute("SELECT tube.tube_ensure_exists('queue', 8)")
    for shard in range(8):
        await queue.execute(
            "SELECT tube.queue_touch($1, array_agg(n), 'T', NULL, 10) FROM generate_series(1, 4000) AS n", shard
        )
    held = trio.Event()

    async def handle(batch: Batch) -> None:
        await held.wait()

    worker = Worker(open_worker_client, "queue", handle, settings=WorkerSettings(memory=400_000, batch_ids=10))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        ledgers = worker._work.ledgers
        await until(lambda: len(ledgers) == 8 and all(ledger.pods for ledger in ledgers))
        await trio.sleep(0.5)  # what could still be read would be read by now
        assert sum(ledger.memory for ledger in ledgers) < 500_000
        held.set()
        with trio.fail_after(4 * PATIENCE):
            while await queue.fetch_value("SELECT count(*) FROM tube.queue"):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert worker.statistics.processed == 32_000


async def test_a_control_pod_whose_function_hangs_does_not_keep_ids_from_being_processed(
    queue: Database, open_worker_client: OpenClient
) -> None:
    downstream = Downstream()

    async def control(pod: Pod) -> None:
        await trio.sleep_forever()

    await queue.execute("SELECT tube.queue_touch(0, '{}', 'T', '{}')")
    worker = Worker(open_worker_client, "queue", downstream.handle, control=control)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        for id in range(5):
            await put(queue, [id], 1)
            await until(lambda id=id: id in downstream.done)  # type: ignore[misc]
        nursery.cancel_scope.cancel()
