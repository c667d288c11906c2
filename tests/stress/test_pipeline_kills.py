"""A pipeline whose parts are killed, again and again, under live writers; at the end the downstream equals the table.

Driver, executors, Python workers, daemon and Postgres get SIGKILL in random order for REPLICAD_STRESS_SECONDS. The
downstream takes a batch and its number in one transaction and audits every write: no touch may be written twice. Only
`make stress` runs it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from replicad.postgres.embedded import EmbeddedPostgres
from replicad.spark.database import connection, forget
from tests.conftest import PATIENCE

from ..conftest import psql

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "0"))
SHARDS = (1, 2, 3)
ROWS = 3000
WRITERS = 3
PARTS = ("driver", "executor", "python_worker", "daemon", "postmaster")
PAUSE = (2.0, 8.0)  # seconds between two kills
THERE = 60.0  # seconds for what is to be killed to be there: a driver takes some to start
CALM = 180.0  # seconds for everything to arrive at the end

pytestmark = [
    pytest.mark.stress,
    pytest.mark.spark,
    pytest.mark.timeout(SECONDS + 600),
    pytest.mark.long,
]

TABLES = "".join(
    f"CREATE SCHEMA shard_{shard:04d}; CREATE TABLE shard_{shard:04d}.cities (id bigint PRIMARY KEY, people integer);"
    f"INSERT INTO shard_{shard:04d}.cities SELECT n, 0 FROM generate_series(1, {ROWS}) AS n;"
    f"SELECT tube.tube_table_ensure_attached('cities', 'shard_{shard:04d}.cities');"
    for shard in SHARDS
)
AUDITED = """
CREATE SCHEMA dw;
CREATE TABLE dw.cities (id bigint, people integer, _shard integer, _seq bigint, PRIMARY KEY (_shard, id));
CREATE TABLE dw.audit (_shard integer, id bigint, _seq bigint);
CREATE FUNCTION dw.note() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN INSERT INTO dw.audit VALUES (NEW._shard, NEW.id, NEW._seq); RETURN NULL; END';
CREATE TRIGGER note AFTER INSERT OR UPDATE ON dw.cities FOR EACH ROW EXECUTE FUNCTION dw.note();
"""
DRIVER = """
from pathlib import Path
from replicad.spark import build_session, pipeline
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.postgres import PostgresSink
folder = Path({folder!r})
spark = build_session("driver", master="local-cluster[2,1,1024]", log_file=folder / "spark.log")
pipeline.run(PipelineConfig(
    tube="cities", port={port}, database={url!r}, table="shard_{{shard:04d}}.cities",
    sink=PostgresSink({url!r}, "dw.cities"), checkpoint=folder / "checkpoint", trigger="0s", tries=20,
    options={{"leaseTtl": "3s", "leaseWait": "60s", "maxPodsPerTrigger": "60", "maxBackfillPodsPerTrigger": "5",
             "numRetries": "30"}},
), spark)
"""


class World:
    """All processes: Postgres (which the daemon starts again), the daemon, the driver with what is below it."""

    def __init__(self, folder: Path, postgres: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.postgres_folder = postgres
        self.daemon: subprocess.Popen[bytes] | None = None
        self.driver: subprocess.Popen[bytes] | None = None
        self.killed: Counter[str] = Counter()
        self.ended: list[int] = []  # exit statuses of drivers that nobody killed
        self.start_daemon()
        self.server = EmbeddedPostgres(postgres)
        self.server.__enter__()
        self.url = self.server.url

    def start_daemon(self) -> None:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "replicad", "serve", "--data-folder", str(self.postgres_folder)]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*command, "--listen", f"127.0.0.1:{self.port}", "--ready-file", str(ready)], stderr=log
            )
        deadline = time.monotonic() + PATIENCE
        while not ready.exists() and self.daemon.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def start_driver(self) -> None:
        script = DRIVER.format(folder=str(self.folder), port=self.port, url=self.url)
        with (self.folder / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-c", script], stdout=log, stderr=log, start_new_session=True
            )

    def mend(self) -> None:
        """What a supervisor does: start again what has ended."""
        if self.daemon is None or self.daemon.poll() is not None:
            self.start_daemon()
        if self.driver is not None and self.driver.poll() is not None:
            self.ended.append(self.driver.returncode)
        if self.driver is None or self.driver.poll() is not None:
            self.start_driver()

    def kill(self, what: str, chance: random.Random) -> None:
        deadline = time.monotonic() + THERE
        while not (victims := getattr(self, f"_{what}")()):
            assert time.monotonic() < deadline, f"no {what} is there"
            self.mend()
            time.sleep(0.2)
        if what == "driver":
            self.driver = None
        chosen = victims if what == "driver" else [chance.choice(victims)]
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(chosen, timeout=PATIENCE)
        self.killed[what] += 1

    def _below(self, word: str) -> list[psutil.Process]:
        found = []
        for process in self._driver()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _driver(self) -> list[psutil.Process]:
        if self.driver is None or self.driver.poll() is not None:
            return []
        first = psutil.Process(self.driver.pid)
        return [first, *first.children(recursive=True)]

    def _executor(self) -> list[psutil.Process]:
        return self._below("CoarseGrainedExecutorBackend")

    def _python_worker(self) -> list[psutil.Process]:
        return [process for process in self._below("pyspark.daemon") if process.ppid() != 1]

    def _daemon(self) -> list[psutil.Process]:
        return [psutil.Process(self.daemon.pid)] if self.daemon is not None and self.daemon.poll() is None else []

    def _postmaster(self) -> list[psutil.Process]:
        pid = self.server.pid()
        return [] if pid is None else [psutil.Process(pid)]

    def close(self) -> None:
        for what in ("driver", "daemon"):
            for process in getattr(self, f"_{what}")():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.server.__exit__(None, None, None)


@pytest.fixture
def world(tmp_path: Path, postgres_folder: Path) -> Iterator[World]:
    made = World(tmp_path, postgres_folder)
    yield made
    made.close()


def write(url: str, number: int, stop: threading.Event, done: Counter[str]) -> None:
    """An application: whatever fails is tried again as something else."""
    chance = random.Random(number)
    while not stop.is_set():
        table = f"shard_{chance.choice(SHARDS):04d}.cities"
        ids = chance.sample(range(1, ROWS + 200), chance.randint(1, 20))
        try:
            with connection(url).cursor() as cursor:
                if chance.random() < 0.2:
                    cursor.execute(f"DELETE FROM {table} WHERE id = ANY($1::bigint[])", parameters=(ids,))
                else:
                    cursor.execute(
                        f"INSERT INTO {table} SELECT id, $2::int FROM unnest($1::bigint[]) AS id "
                        "ON CONFLICT (id) DO UPDATE SET people = excluded.people",
                        parameters=(ids, chance.randrange(1000)),
                    )
            done["written"] += 1
        except Exception:  # noqa: BLE001 - Postgres is away: nobody knows what was committed
            forget(url)
            done["failed"] += 1
            time.sleep(0.2)
        time.sleep(0.02)


def rows(url: str, sql: str) -> set[str]:
    return set(psql(url, sql).splitlines())


def patiently(ask: Any) -> Any:
    """An answer of a Postgres that may just be starting."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_whatever_is_killed_the_downstream_equals_the_table_and_no_touch_was_written_twice(world: World) -> None:
    psql(world.url, AUDITED)
    psql(world.url, f"SELECT tube.tube_ensure_exists('cities', 2); {TABLES}")
    psql(world.url, "SELECT tube.tube_backfill_schedule('cities', 'id', 0, 9)")
    chance, stop, done = random.Random(5), threading.Event(), Counter[str]()
    writers = [threading.Thread(target=write, args=(world.url, n, stop, done)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        world.mend()
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for what in chance.sample(PARTS, len(PARTS)):
                world.kill(what, chance)
                time.sleep(chance.uniform(*PAUSE))
                world.mend()
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    deadline = time.monotonic() + CALM
    waiting = "SELECT sum(inc_count + backfill_count + control_count) FROM tube.tube_stats()"
    while patiently(lambda: psql(world.url, waiting)) != "0":
        world.mend()
        assert time.monotonic() < deadline, "it did not catch up"
        time.sleep(0.5)
    print(dict(world.killed), dict(done), f"drivers that ended by themselves: {world.ended}")
    upstream = " UNION ALL ".join(f"SELECT {s}, id, people FROM shard_{s:04d}.cities" for s in SHARDS)
    assert rows(world.url, "SELECT _shard, id, people FROM dw.cities") == rows(world.url, upstream)
    twice = "SELECT count(*) FROM (SELECT FROM dw.audit GROUP BY _shard, id, _seq HAVING count(*) > 1) x"
    assert psql(world.url, twice) == "0"
    assert psql(world.url, "SELECT count(*) FROM tube.tube_parked") == "0"
    assert world.killed.keys() == set(PARTS)
