"""The worker on trio, on asyncio and in threads, each in a loop of its own as in a process of its own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import psycopg
import pytest
import trio

from replicad.client.blocking_worker import BlockingWorker
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import UnknownTube
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.lengths import first
from tests.loops import LOOPS, run_on

from .conftest import OpenClient

QUICK = WorkerSettings(batch_ids=5, parallelism=3, memory=20_000, poll=1.0, lease_ttl=2.0, tries=3, backoff_first=0.01)
KINDS = (*LOOPS, "blocking")


class Copier:
    """A downstream that plain functions write, in whatever thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self.rows: dict[int, int] = {}
        self.calls = 0

    def handle(self, batch: Batch) -> None:
        ids = [touch.id for touch in batch.touches]
        with self._lock, psycopg.connect(self._url) as source:
            found = source.execute("SELECT id, value FROM items WHERE id = ANY (%s)", [ids]).fetchall()
            for id in ids:
                self.rows.pop(id, None)
            self.rows.update(found)
            self.calls += 1


def in_thread(function: Callable[[Batch], None]) -> Any:
    async def call(batch: Batch) -> None:
        await anyio.to_thread.run_sync(function, batch)

    return call


@asynccontextmanager
async def at_work(kind: str, connect: OpenClient, tube: str, handle: Any, **options: Any) -> AsyncIterator[Any]:
    """A worker of that kind in a thread, until it is cancelled natively (asyncio), by a scope (trio) or closed."""
    end: list[Callable[[], object]] = []
    began = threading.Event()
    if kind == "blocking":
        worker: Any = BlockingWorker(connect, tube, handle, **options)
        end.append(worker.close)
        began.set()
        run: Callable[[], None] = worker.run
    else:
        worker = Worker(connect, tube, handle, **options)

        async def on_asyncio() -> None:
            task = asyncio.current_task()
            assert task is not None
            end.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
            began.set()
            with suppress(asyncio.CancelledError):
                await worker.run()

        async def on_trio() -> None:
            with trio.CancelScope() as scope:
                end.append(partial(trio.lowlevel.current_trio_token().run_sync_soon, scope.cancel))
                began.set()
                await worker.run()

        run = partial(run_on, kind, on_asyncio if kind == "asyncio" else on_trio)
    ended = trio.Event()

    async def live() -> None:
        await trio.to_thread.run_sync(run)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await trio.to_thread.run_sync(began.wait)
        try:
            yield worker
        finally:
            end[0]()
            with trio.fail_after(PATIENCE, shield=True):
                await ended.wait()


async def until_empty(database: Database, tube: str) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value(f"SELECT count(*) FROM tube.{tube}"):
            await trio.sleep(0.05)


@pytest.mark.parametrize("kind", first(1, KINDS))
async def test_workers_that_are_cancelled_again_and_again_lose_nothing(
    kind: str, items: Database, open_worker_client: OpenClient, database_url: str
) -> None:
    copier, chance = Copier(database_url), random.Random(3)
    handle = copier.handle if kind == "blocking" else in_thread(copier.handle)

    async def change(rounds: int) -> None:
        for _ in range(rounds):
            ids = [chance.randrange(60) for _ in range(chance.randint(1, 8))]
            await items.execute("DELETE FROM items WHERE id = ANY ($1)", ids[:2])
            await items.execute(
                "INSERT INTO items SELECT DISTINCT id, $2::int FROM unnest($1::bigint[]) AS id "
                "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                ids,
                chance.randrange(1000),
            )

    for _ in range(4):
        async with at_work(kind, open_worker_client, "items", handle, settings=QUICK):
            calls = copier.calls
            await change(10)
            with trio.fail_after(PATIENCE):
                while copier.calls == calls:
                    await trio.sleep(0.01)
    async with at_work(kind, open_worker_client, "items", handle, settings=QUICK) as worker:
        await until_empty(items, "items")
    assert copier.rows == {row["id"]: row["value"] for row in await items.fetch("SELECT id, value FROM items")}
    assert worker.statistics.processed > 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_function_that_blocks_for_longer_than_the_lease_keeps_it(
    kind: str, queue: Database, open_worker_client: OpenClient
) -> None:
    calls: list[int] = []

    def block(batch: Batch) -> None:
        time.sleep(1.5)
        calls.extend(touch.id for touch in batch.touches)

    async def handle(batch: Batch) -> None:
        block(batch)

    await queue.execute("SELECT tube.queue_touch(0, '{1,2}', 'T')")
    settings = WorkerSettings(lease_ttl=1.0)
    function = block if kind == "blocking" else handle
    async with at_work(kind, open_worker_client, "queue", function, settings=settings) as worker:
        await until_empty(queue, "queue")
    assert calls == [1, 2]
    assert worker.statistics.leases_lost == 0
    assert worker.statistics.blocked_loops == (0 if kind == "blocking" else 1)


async def test_a_function_that_awaits_something_cancelled_has_failed(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """On asyncio that raises CancelledError, which is not the end of the worker, and by no means a success."""
    awaited: list[int] = []

    async def handle(batch: Batch) -> None:
        ids = [touch.id for touch in batch.touches]
        if 2 in ids and awaited.count(2) < 2:
            awaited.extend(ids)
            inner = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner
        awaited.extend(ids)

    await queue.execute("SELECT tube.queue_touch(0, '{1,2,3}', 'T')")
    settings = WorkerSettings(backoff_first=0.01, tries=9)
    async with at_work("asyncio", open_worker_client, "queue", handle, settings=settings) as worker:
        await until_empty(queue, "queue")
    assert awaited.count(2) == 3
    assert (worker.statistics.failed_calls, worker.statistics.processed, worker.statistics.parked) == (2, 3, 0)


async def test_a_blocking_worker_may_be_closed_by_its_function_and_raises_what_no_try_helps_against(
    queue: Database, open_worker_client: OpenClient
) -> None:
    handled: list[int] = []

    def handle(batch: Batch) -> None:
        handled.extend(touch.id for touch in batch.touches)
        worker.close()

    await queue.execute("SELECT tube.queue_touch(0, '{1}', 'T')")
    worker = BlockingWorker(open_worker_client, "queue", handle)
    with trio.fail_after(PATIENCE):
        await trio.to_thread.run_sync(worker.run)
        await trio.to_thread.run_sync(worker.run)  # closed: returns at once
        with pytest.raises(UnknownTube):
            await trio.to_thread.run_sync(BlockingWorker(open_worker_client, "nowhere", handle).run)
    assert handled == [1]
