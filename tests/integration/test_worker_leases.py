"""The leases of a worker: none is trusted that may be over, and none is waited for that is its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
import trio

from replicad.client.async_client import AsyncClient, open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from replicad.protocol.connection import CloseReason
from replicad.tubes.commands import Lease
from replicad.tubes.leases import LeaseBook
from tests.conftest import PATIENCE
from tests.daemons import Daemon

OpenClient = Callable[[], AbstractAsyncContextManager[AsyncClient]]
SETTINGS = WorkerSettings(backoff_first=0.01)


@pytest.fixture
async def queue(database: Database, daemon: Daemon) -> Database:
    """A tube `queue` of one partition."""
    await database.execute("SELECT tube.tube_ensure_exists('queue')")
    return database


@pytest.fixture
def open_worker_client(daemon: Daemon) -> OpenClient:
    address = daemon.addresses[0]
    return lambda: open_client(address.host, address.port, name="a worker")


async def until_empty(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.queue"):
            await trio.sleep(0.02)


async def handle(batch: Batch) -> None:
    """A downstream that takes everything."""


async def test_a_claim_that_waits_longer_than_the_lease_lives_gives_a_lease_that_is_used(
    queue: Database, open_worker_client: OpenClient
) -> None:
    settings = replace(SETTINGS, lease_ttl=1.5, poll=20.0)
    await queue.execute("SELECT tube.tube_lease_claim('queue', 1, 0, 'a killed worker', '4 seconds', '{}')")
    await queue.execute("SELECT tube.queue_touch(0, '{1,2,3}', 'T')")
    worker = Worker(open_worker_client, "queue", handle, settings=settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        nursery.cancel_scope.cancel()
    assert (worker.statistics.processed, worker.statistics.leases_lost) == (3, 0)


async def test_a_worker_does_not_wait_for_its_own_lease_after_it_was_disconnected(
    queue: Database, open_worker_client: OpenClient, daemon: Daemon
) -> None:
    worker = Worker(open_worker_client, "queue", handle, settings=replace(SETTINGS, lease_ttl=10 * PATIENCE))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        terms = []
        for number in range(3):
            await queue.execute("SELECT tube.queue_touch(0, $1, 'T')", [number])
            await until_empty(queue)
            terms.append(await queue.fetch_value("SELECT term FROM tube.tube_lease"))
            for session in list(daemon.hub):
                session.hang_up(CloseReason.PEER_LOST)
        nursery.cancel_scope.cancel()
    assert terms == sorted(terms)  # it goes on under its term, or under a later one if a request was cut off


async def test_a_call_that_was_cut_off_is_not_repeated_before_its_lease_has_expired(
    queue: Database, open_worker_client: OpenClient, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut between two renewals is made good by the client: only renewals that do not come through end a call."""
    began: list[float] = []
    cut_off: list[float] = []

    async def hang_once(batch: Batch) -> None:
        began.append(trio.current_time())
        if len(began) == 1:
            try:
                await trio.sleep_forever()
            finally:
                cut_off.append(trio.current_time())

    keep = LeaseBook.keep

    async def keep_or_cut(book: LeaseBook, *args: Any) -> list[Lease]:
        if not cut_off:  # no renewal arrives until the worker has noticed
            for session in list(daemon.hub):
                session.hang_up(CloseReason.PEER_LOST)
            await trio.sleep_forever()
        return await keep(book, *args)

    monkeypatch.setattr(LeaseBook, "keep", keep_or_cut)
    worker = Worker(open_worker_client, "queue", hang_once, settings=replace(SETTINGS, lease_ttl=3.0))
    await queue.execute("SELECT tube.queue_touch(0, '{1}', 'T')")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        nursery.cancel_scope.cancel()
    assert cut_off[0] < began[0] + 3.0 <= began[1] + 0.2, "the lease lasts 3 s, from a moment before the first call"


@pytest.mark.long
async def test_many_partitions_with_short_leases_are_drained_over_few_connections(
    queue: Database, open_worker_client: OpenClient, daemon: Daemon
) -> None:
    await queue.execute("SELECT tube.tube_ensure_exists('queue', 64)")
    for shard in range(64):
        await queue.execute("SELECT tube.queue_touch($1, '{1,2}', 'T')", shard)
        await queue.execute(
            "SELECT tube.tube_lease_claim('queue', 64, $1, 'a killed worker', '3 seconds', '{}')", shard
        )
    worker = Worker(open_worker_client, "queue", handle, settings=replace(SETTINGS, lease_ttl=3.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await until_empty(queue)
        assert len(list(daemon.hub)) <= 8  # for pods, claims, renewals, and perhaps a report and a question
        nursery.cancel_scope.cancel()
    assert worker.statistics.processed >= 128


async def test_a_worker_that_is_cancelled_before_it_reads_the_answer_to_its_claim_gives_the_lease_back(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted, gate = trio.Event(), trio.Event()
    claim = LeaseBook.claim

    async def claim_and_wait(book: LeaseBook, *args: Any) -> Lease:
        lease = await claim(book, *args)
        granted.set()
        await gate.wait()
        return lease

    monkeypatch.setattr(LeaseBook, "claim", claim_and_wait)
    note = {"clean": False, "calls": ["0/7"]}
    await queue.execute("INSERT INTO tube.tube_attempt VALUES ('queue', 1, 0, $1)", json.dumps(note))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "queue", handle, settings=SETTINGS).run)
        await granted.wait()
        assert await queue.fetch_value("SELECT count(*) FROM tube.tube_lease") == 1
        nursery.cancel_scope.cancel()
        gate.set()
    assert await queue.fetch_value("SELECT count(*) FROM tube.tube_lease") == 0
    assert await queue.fetch_value("SELECT count(*) FROM tube.tube_worker") == 0
    assert json.loads(await queue.fetch_value("SELECT note FROM tube.tube_attempt")) == note


async def test_a_worker_that_is_cancelled_ends_although_its_claim_is_not_answered(
    queue: Database, open_worker_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.leases.LAST_ANSWER", 0.1)
    asked = trio.Event()

    async def claim(*_: Any) -> Lease:
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(LeaseBook, "claim", claim)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Worker(open_worker_client, "queue", handle, settings=SETTINGS).run)
            await asked.wait()
            nursery.cancel_scope.cancel()
