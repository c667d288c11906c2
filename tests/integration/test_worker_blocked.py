"""Functions that block the worker's event loop, or whose thread does not return."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE

from .conftest import OpenClient


@asynccontextmanager
async def in_a_thread(worker: Worker) -> AsyncIterator[None]:
    """Run a worker in a loop of its own, as in a process of its own: the test's loop is the daemon's."""
    scope = trio.CancelScope()
    token: list[trio.lowlevel.TrioToken] = []

    async def run() -> None:
        token.append(trio.lowlevel.current_trio_token())
        with scope:
            await worker.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, trio.run, run)
        try:
            yield
        finally:
            token[0].run_sync_soon(scope.cancel)


async def until_empty(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.queue"):
            await trio.sleep(0.05)


async def test_a_function_that_blocks_the_loop_for_longer_than_the_lease_keeps_it_and_is_reported(
    queue: Database, open_worker_client: OpenClient
) -> None:
    calls: list[int] = []

    async def handle(batch: Batch) -> None:
        time.sleep(2.5)  # noqa: ASYNC251 - what is tested
        calls.extend(touch.id for touch in batch.touches)

    worker = Worker(open_worker_client, "queue", handle, settings=WorkerSettings(lease_ttl=1.0))
    await queue.execute("SELECT tube.queue_touch(0, '{1,2}', 'T')")
    async with in_a_thread(worker):
        await until_empty(queue)
    assert calls == [1, 2]
    assert (worker.statistics.leases_lost, worker.statistics.blocked_loops) == (0, 1)


async def test_an_id_that_blocks_the_loop_for_longer_than_a_call_may_take_is_parked(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """The lease is given up after `call_timeout`; a lease that is lost in a call counts like the end of a process."""
    done: set[int] = set()

    async def handle(batch: Batch) -> None:
        ids = {touch.id for touch in batch.touches}
        if 7 in ids:
            time.sleep(2.5)  # noqa: ASYNC251 - what is tested
        await trio.lowlevel.checkpoint()
        done.update(ids - {7})

    settings = WorkerSettings(lease_ttl=1.0, call_timeout=0.5, poll=0.5)
    worker = Worker(open_worker_client, "queue", handle, settings=settings)
    await queue.execute("SELECT tube.queue_touch(0, '{5,6,7,8,9}', 'T')")
    async with in_a_thread(worker):
        await until_empty(queue)
    assert await queue.fetch_value("SELECT ids::text[] FROM tube.tube_parked") == ["7"]
    assert done == {5, 6, 8, 9}


async def test_a_thread_that_does_not_return_is_a_failed_call_and_its_place_is_given_back(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.calls.GRACE", 0.1)
    release = threading.Event()
    done: set[int] = set()

    def write(ids: set[int]) -> None:
        if 7 in ids:
            release.wait(PATIENCE)
        done.update(ids)

    async def handle(batch: Batch) -> None:
        await trio.to_thread.run_sync(write, {touch.id for touch in batch.touches})

    settings = WorkerSettings(call_timeout=0.2, parallelism=2, backoff_first=0.01)
    worker = Worker(open_worker_client, "queue", handle, settings=settings)
    await queue.execute("SELECT tube.queue_touch(0, '{1,2,3,4,5,6,7,8,9}', 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        assert done == {1, 2, 3, 4, 5, 6, 8, 9}
        release.set()
        nursery.cancel_scope.cancel()
    assert "cannot be cancelled" in await queue.fetch_value("SELECT error FROM tube.tube_parked")
    assert 2 <= worker.statistics.lost_calls <= 4
