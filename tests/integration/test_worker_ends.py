"""An id for which the user's function ends the process is found by the workers after it, and parked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from replicad.client.attempts import Attempts
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import LeaseLost
from replicad.postgres.bridge import Database
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import OpenClient

SCRIPT = Path(__file__).with_name("ended_worker.py")
NOTE = "SELECT note ->> 'clean' FROM tube.tube_attempt WHERE partition = 0"


@pytest.fixture
async def queue(database: Database, daemon: Daemon) -> Database:
    """A tube `queue` of two partitions."""
    await database.execute("SELECT tube.tube_ensure_exists('queue', 2)")
    return database


async def run_until_empty(database: Database, daemon: Daemon, *words: str) -> tuple[int, list[int]]:
    """Start workers, one after another, until the tube is empty. How many have ended, and the processed ids."""
    host, port = daemon.addresses[0].host, str(daemon.addresses[0].port)
    ended = 0
    done: list[int] = []
    with trio.fail_after(2 * PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.queue"):
            process = await trio.lowlevel.open_process(
                [sys.executable, str(SCRIPT), host, port, "queue", *words], stdout=-1, stderr=None
            )
            assert process.stdout is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill_at_the_end, database, process)
                async for block in process.stdout:
                    done += map(int, block.split())
                ended += await process.wait() == 9
                nursery.cancel_scope.cancel()
    return ended, done


async def _kill_at_the_end(database: Database, process: trio.Process) -> None:
    while await database.fetch_value("SELECT count(*) FROM tube.queue"):
        await trio.sleep(0.05)
    process.kill()


async def test_an_id_that_ends_the_process_is_parked_after_a_few_workers_and_all_others_are_processed(
    queue: Database, daemon: Daemon
) -> None:
    ids = list(range(1, 301))
    await queue.execute("SELECT tube.queue_touch(0, $1, 'T', NULL, 20)", ids)
    await queue.execute("SELECT tube.queue_touch(1, $1, 'T', NULL, 1)", [id + 1000 for id in ids])
    ended, done = await run_until_empty(queue, daemon, "150")
    assert ended == 4, "unknown, in a call with others, and twice alone"
    assert {*done} == {*ids, *(id + 1000 for id in ids)} - {150}
    parked = await queue.fetch("SELECT ids, error FROM tube.tube_parked")
    assert [row["ids"] for row in parked] == [[150]]
    assert "2 processes of workers have ended" in parked[0]["error"]


@pytest.mark.long
async def test_a_control_pod_that_ends_the_process_is_parked(queue: Database, daemon: Daemon) -> None:
    await queue.execute("SELECT tube.queue_touch(0, '{1,2,3}', 'T')")
    await queue.execute("SELECT tube.queue_touch(0, '{}', 'T', '{\"mine\": 1}')")
    ended, done = await run_until_empty(queue, daemon, "0", "control")
    assert ended <= 5
    assert {*done} >= {1, 2, 3}
    assert await queue.fetch_value("SELECT payload ->> 'mine' FROM tube.tube_parked") == "1"


async def test_a_worker_that_ends_cleanly_leaves_nothing_to_be_careful_about(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """Also if a call was cancelled: it has returned, so it has not ended the process."""
    began = trio.Event()

    async def handle(batch: Batch) -> None:
        began.set()
        await trio.sleep_forever()

    worker = Worker(open_worker_client, "queue", handle, settings=WorkerSettings())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await queue.execute("SELECT tube.queue_touch(0, '{1}', 'T')")
        await began.wait()
        assert await queue.fetch_value(NOTE) == "false"
        nursery.cancel_scope.cancel()
    assert await queue.fetch_value(NOTE) == "true"


async def test_a_worker_that_ends_while_it_is_careful_leaves_the_suspects_to_the_next_one(
    queue: Database, open_worker_client: OpenClient
) -> None:
    """Also a worker that ends before it has read the note, and one that gives the lease back at once."""
    note = {"clean": False, "calls": ["0/7"], "alone": True, "ends": {"0/9": 1}}
    part = Part(0, 2)
    async with open_worker_client() as client:
        lease = await client.claim("queue", part, holder="a!1")
        await client.attempt("queue", part, lease.term, note)
        await client.release("queue", part, lease.term)
        for _ in range(2):
            attempts = Attempts(client, "queue", part, {})
            assert attempts.last_note() is None, "the note before was not read"
            lease = await client.claim("queue", part, holder="b!1")
            await attempts.begin(lease.term)
            assert attempts.careful
            assert attempts.is_suspect("0/7")
            assert attempts._ends == {"0/7": 1, "0/9": 1}
            await client.attempt("queue", part, lease.term, attempts.last_note())
            await client.release("queue", part, lease.term)


async def test_a_note_is_refused_under_another_term_and_returned_to_the_next_lease(
    queue: Database, open_worker_client: OpenClient
) -> None:
    part = Part(0, 2)
    async with open_worker_client() as client:
        first = await client.claim("queue", part, holder="a!1")
        assert await client.attempt("queue", part, first.term, {"calls": ["0/1"]}) is None
        await client.release("queue", part, first.term)
        second = await client.claim("queue", part, holder="b!2")
        with pytest.raises(LeaseLost):
            await client.attempt("queue", part, first.term, {"clean": True})
        assert await client.attempt("queue", part, second.term) == {"calls": ["0/1"]}
        assert await client.attempt("queue", part, second.term) == {"calls": ["0/1"]}
