"""A long backfill through a daemon that is killed on the way: bounded memory, a bounded tube, and no id missed.

Takes REPLICAD_STRESS_ROWS (20,000 in the suite; `make stress` has ten million).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from replicad.client.blocking_client import BlockingClient
from replicad.errors import ConnectionLost, DatabaseError, LeaseHeld, LeaseLost
from replicad.protocol.tokens import START
from replicad.tubes.commands import Part

from ..conftest import psql
from ..integration.test_faults_daemon import ServeProcess

ROWS = int(os.environ.get("REPLICAD_STRESS_ROWS", "20_000"))
KILLS = 3
GROWTH = 64 << 20  # bytes that the daemon may grow by, from what it has when it is ready
BACKLOG = 10_000 + 400 + 3  # pods: the backfiller's bound, a piece more, and the control pods

pytestmark = pytest.mark.stress


class Serving:
    """The daemon, its peak of memory since it was started last, and the client of the one that runs."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self.growth = 0
        self.start()

    def start(self) -> None:
        self._process = ServeProcess(self._folder, "--database", self._url)
        while not self._process.ready.exists():
            time.sleep(0.02)
        host, _, port = self._process.ready.read_text().strip().rpartition(":")
        self.client = BlockingClient(host, int(port), name="reader")
        self._resident = psutil.Process(self._process.process.pid)
        self._at_first = self._resident.memory_info().rss

    def look(self) -> None:
        self.growth = max(self.growth, self._resident.memory_info().rss - self._at_first)

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)
        self.client.close()

    def stop(self) -> None:
        self.client.close()
        assert self._process.end(signal.SIGTERM) == 0


@pytest.fixture
def serving(tmp_path: Path, database_url: str) -> Iterator[Serving]:
    made = Serving(tmp_path, database_url)
    yield made
    made.stop()


@pytest.mark.timeout(900)
def test_any_number_of_rows_is_backfilled_in_bounded_memory_through_kills(serving: Serving, database_url: str) -> None:
    psql(database_url, f"CREATE TABLE items AS SELECT g::bigint AS id FROM generate_series(1, {ROWS}) AS g")
    psql(database_url, "ALTER TABLE items ADD PRIMARY KEY (id)")
    psql(database_url, "SELECT tube.tube_ensure_exists('items')")
    psql(database_url, "SELECT tube.tube_table_ensure_attached('items', 'items', 0)")
    psql(database_url, "SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    seen = bytearray(ROWS + 1)
    last = count = repeated = most = 0
    kills = [ROWS * (n + 1) // (KILLS + 1) for n in range(KILLS)]
    ended = False
    part, term, cursor = Part(0, 1), 0, START
    began = time.monotonic()
    while not ended:
        try:
            if not term:
                term = serving.client.claim("items", part, ttl=5, wait=10, holder="reader").term
                cursor = START
            answer = serving.client.pods("items", part, term, cursor, limit=400, wait=5)
            for pod in answer:
                ended = ended or (not pod.ids and pod.payload["type"] == "backfill_end")
                for id in pod.ids:
                    if seen[id]:
                        repeated += 1
                    else:
                        assert id > last, "not in order"
                        last, count, seen[id] = id, count + 1, 1
            assert answer.end is not None
            serving.client.ack_upto("items", part, term, cursor, answer.end.cursor)
            cursor = answer.end.cursor
        except (ConnectionLost, DatabaseError, LeaseHeld, LeaseLost):
            term = 0
        if kills and count >= kills[0]:
            kills.pop(0)
            serving.kill()
            serving.start()
            term = 0
        if count % 500_000 < 100_000:
            serving.look()
            most = max(most, int(psql(database_url, "SELECT count(*) FROM tube.items")))
    seconds = time.monotonic() - began
    print(
        f"{ROWS:,} ids in {seconds:.0f} s ({ROWS / seconds:,.0f} ids/s with {KILLS} kills), {repeated:,} came again, "
        f"at most {most:,} pods in the tube, the daemon grew by {serving.growth / 1e6:.1f} MB"
    )
    assert count == ROWS
    assert repeated <= KILLS * 400 * 250
    assert most <= BACKLOG
    assert serving.growth < GROWTH
