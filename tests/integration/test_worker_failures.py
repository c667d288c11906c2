"""What fails with one id or pod, or for ever, does not stop a worker: it is parked, and the rest goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from replicad.client.async_client import AsyncClient
from replicad.client.requests import Pod
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import RemoteError, UnknownTube
from replicad.postgres.bridge import Database
from replicad.protocol.lines import LineTooLong
from tests.conftest import PATIENCE

from .conftest import OpenClient

SETTINGS = WorkerSettings(batch_ids=5, poll=0.2, tries=3, backoff_first=0.01, backoff_cap=0.05)
PARKED = "SELECT array_agg(tries ORDER BY seq) FROM tube.tube_parked_list('queue')"


async def until(database: Database, query: str) -> None:
    with trio.fail_after(PATIENCE):
        while not await database.fetch_value(query):
            await trio.sleep(0.02)


async def until_empty(database: Database) -> None:
    await until(database, "SELECT count(*) = 0 FROM tube.queue")


async def nothing(batch: Batch) -> None:
    """A downstream that takes everything."""


async def test_a_poison_id_that_is_alone_is_parked_after_its_tries_and_only_one_without_a_success(
    queue: Database, open_worker_client: OpenClient
) -> None:
    calls: list[int] = []
    poison = {1, 2}

    async def handle(batch: Batch) -> None:
        calls.extend(touch.id for touch in batch.touches)
        if poison & {touch.id for touch in batch.touches}:
            raise ValueError("no")

    worker = Worker(open_worker_client, "queue", handle, settings=SETTINGS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await queue.execute("SELECT tube.queue_touch(0, '{1}', 'T')")
        await until_empty(queue)
        assert calls == [1, 1, 1]
        await queue.execute("SELECT tube.queue_touch(0, '{2}', 'T')")
        with trio.fail_after(PATIENCE):
            while calls.count(2) < 10:  # the downstream may be unavailable
                await trio.sleep(0.01)
        await queue.execute("SELECT tube.queue_touch(0, '{3}', 'T')")
        await until_empty(queue)
        with trio.fail_after(PATIENCE):
            while worker.statistics.parked < 2:  # the queue is empty a moment before the worker is told
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert (await queue.fetch_value(PARKED))[0] == 3
    assert worker.statistics.parked == 2


async def test_a_call_that_hangs_has_failed_after_its_time(queue: Database, open_worker_client: OpenClient) -> None:
    async def handle(batch: Batch) -> None:
        if {7} & {touch.id for touch in batch.touches}:
            await trio.sleep_forever()

    worker = Worker(open_worker_client, "queue", handle, settings=replace(SETTINGS, call_timeout=0.1))
    await queue.execute("SELECT tube.queue_touch(0, '{5,6,7,8}', 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        nursery.cancel_scope.cancel()
    error = await queue.fetch_value("SELECT error FROM tube.tube_parked_list('queue') WHERE ids = '{7}'")
    assert "longer than 0.1 s" in error


async def test_a_batch_carries_the_term_of_the_lease(queue: Database, open_worker_client: OpenClient) -> None:
    terms: list[tuple[str, int]] = []

    async def handle(batch: Batch) -> None:
        terms.append((str(batch.part), batch.term))

    worker = Worker(open_worker_client, "queue", handle, settings=SETTINGS)
    await queue.execute("SELECT tube.queue_touch(0, '{1}', 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        assert terms == [("0/1", await queue.fetch_value("SELECT term FROM tube.tube_lease"))]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("recovers", [False, True])
async def test_a_control_pod_that_always_fails_is_parked_and_the_pods_behind_it_go_on(
    queue: Database, open_worker_client: OpenClient, recovers: bool
) -> None:
    tries: list[int] = []

    async def control(pod: Pod) -> None:
        tries.append(pod.seq)
        if not recovers or len(tries) < 3:
            raise ValueError("no")

    settings = replace(SETTINGS, tries=4)
    worker = Worker(open_worker_client, "queue", nothing, control=control, settings=settings)
    await queue.execute("SELECT tube.queue_touch(0, '{}', 'T', '{\"mine\": 1}'), tube.queue_touch(0, '{1,2}', 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        nursery.cancel_scope.cancel()
    assert len(tries) == (3 if recovers else 4)
    assert worker.statistics.processed == 2
    payloads = await queue.fetch_value("SELECT array_agg(payload ->> 'mine') FROM tube.tube_parked_list('queue')")
    assert payloads == (None if recovers else ["1"])


@pytest.mark.parametrize("error", [LineTooLong("a line has more than 64 MiB"), RemoteError("internal: failed")])
async def test_a_pod_that_cannot_be_read_is_parked_and_the_others_go_on(
    queue: Database, open_worker_client: OpenClient, error: Exception
) -> None:
    for number in range(1, 6):
        await queue.execute("SELECT tube.queue_touch(0, $1, $2)", [number], "B" if number == 4 else "T")
    bad = await queue.fetch_value("SELECT seq FROM tube.queue WHERE ids IN ('{2}', '{4}') ORDER BY seq LIMIT 1")
    worst = await queue.fetch_value("SELECT seq FROM tube.queue WHERE ids = '{4}'")
    done: list[int] = []

    @asynccontextmanager
    async def open_broken() -> AsyncIterator[AsyncClient]:
        async with open_worker_client() as client:
            pods = client.pods

            async def read(*args: Any, **options: Any) -> Any:
                found = await pods(*args, **options)
                if {pod.seq for pod in found} & {bad, worst}:
                    client._link.close()  # type: ignore[union-attr]
                    raise error
                return found

            client.pods = read  # type: ignore[assignment, method-assign]
            yield client

    async def handle(batch: Batch) -> None:
        done.extend(touch.id for touch in batch.touches)

    worker = Worker(open_broken, "queue", handle, settings=SETTINGS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        nursery.cancel_scope.cancel()
    assert sorted(done) == [1, 3, 5]
    assert await queue.fetch_value(PARKED) == [3, 3]


async def test_failed_calls_are_reported_for_top(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(batch: Batch) -> None:
        raise ValueError("no")

    monkeypatch.setattr("replicad.client.worker.REPORT_INTERVAL", 0.1)
    await queue.execute("SELECT tube.queue_touch(0, '{1,2,3}', 'T')")
    worker = Worker(open_worker_client, "queue", handle, settings=SETTINGS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until(queue, "SELECT count(*) = 1 FROM tube.tube_report WHERE (counts ->> 'failed_calls')::int > 3")
        nursery.cancel_scope.cancel()
    assert (await queue.fetch_value("SELECT reporter FROM tube.tube_report")).startswith("worker.")


async def test_a_worker_for_partitions_that_do_not_exist_asks_for_them_seldom(
    queue: Database, open_worker_client: OpenClient
) -> None:
    opened = 0

    def count() -> AbstractAsyncContextManager[AsyncClient]:
        nonlocal opened
        opened += 1
        return open_worker_client()

    worker = Worker(count, "queue", nothing, partitions={3, 7}, settings=replace(SETTINGS, poll=0.0))
    with trio.move_on_after(3.0):
        await worker.run()
    assert opened == 1


async def test_a_tube_that_is_removed_raises_its_one_error_although_several_partitions_see_it(
    queue: Database, open_worker_client: OpenClient
) -> None:
    await queue.execute("SELECT tube.tube_ensure_exists('queue', 8)")
    worker = Worker(open_worker_client, "queue", nothing, settings=SETTINGS)

    async def run() -> None:
        with pytest.raises(UnknownTube, match="queue"):
            await worker.run()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until(queue, "SELECT count(*) = 8 FROM tube.tube_lease")
            await queue.execute("SELECT tube.tube_ensure_absent('queue')")
