"""Everything real: tables with triggers, a daemon in a process of its own, Spark, and a downstream;
and what is killed of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import psql
from pyspark.sql import SparkSession

from replicad.spark import pipeline
from replicad.spark.database import connection, forget
from replicad.spark.local.engine import run_local
from replicad.spark.local.file import load_local
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.postgres import PostgresSink
from tests.conftest import PATIENCE
from tests.roles import as_daemon

SHARDS = (1, 2, 3)
ROWS = 2000  # in each shard

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


class Served:
    """A daemon as a process on a fixed port, so that it can be killed and started again."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.ready, self.log = url, folder / "ready", folder / "daemon.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "replicad", "serve", "--database", as_daemon(self.url)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(self.ready), "--listen", f"127.0.0.1:{self.port}"], stderr=log
            )
        deadline = time.monotonic() + PATIENCE
        while not self.ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def served(database_url: str, tmp_path: Path) -> Iterator[Served]:
    made = Served(database_url, tmp_path)
    yield made
    made.kill()
    forget(database_url)


def make_cities(url: str) -> None:
    """Tables in three shards, attached to tube `cities` of two partitions."""
    tables = "".join(
        f"CREATE SCHEMA shard_{shard:04d}; CREATE TABLE shard_{shard:04d}.cities (id bigint PRIMARY KEY, name text, "
        f"people integer); INSERT INTO shard_{shard:04d}.cities SELECT i, 'city ' || i, 0 "
        f"FROM generate_series(1, {ROWS}) i;"
        f"SELECT tube.tube_table_ensure_attached('cities', 'shard_{shard:04d}.cities');"
        for shard in SHARDS
    )
    psql(url, f"SELECT tube.tube_ensure_exists('cities', 2); {tables}")


def upstream(url: str) -> set[str]:
    sql = " UNION ALL ".join(f"SELECT {s}, id, name, people FROM shard_{s:04d}.cities" for s in SHARDS)
    return set(psql(url, sql).splitlines())


def downstream(url: str) -> set[str]:
    return set(psql(url, "SELECT _shard, id, name, people FROM dw.cities").splitlines())


def waiting(url: str) -> int:
    return int(psql(url, "SELECT sum(inc_count + backfill_count + control_count) FROM tube.tube_stats()") or 0)


def config(served: Served, folder: Path, sink: Sink, trigger: str) -> PipelineConfig:
    return PipelineConfig(
        tube="cities",
        port=served.port,
        database=served.url,
        table="shard_{shard:04d}.cities",
        sink=sink,
        checkpoint=folder / "checkpoint",
        trigger=trigger,
        options={
            "leaseTtl": "5s",
            "maxPodsPerTrigger": "100",
            "maxBackfillPodsPerTrigger": "10",
            "pollTimeout": "500ms",
        },
    )


def change(url: str, go_on: threading.Event, failures: list[BaseException]) -> None:
    """What an application does meanwhile: inserts, updates, deletes; half of it before `go_on`, half after."""
    try:
        for number in range(1, 101):
            if number == 50:
                go_on.wait(200)
            shard = number % 3 + 1
            table = f"shard_{shard:04d}.cities"
            with connection(url).cursor() as cursor:
                cursor.execute(f"UPDATE {table} SET people = people + 1 WHERE id % 97 = $1", parameters=(number % 97,))
                cursor.execute(f"DELETE FROM {table} WHERE id = $1", parameters=(number,))
                cursor.execute(f"INSERT INTO {table} VALUES ($1, 'new', 1)", parameters=(100_000 + number,))
    except BaseException as error:  # noqa: BLE001 - told to the test
        failures.append(error)


@pytest.mark.timeout(300)
def test_a_backfill_and_live_writes_arrive_although_the_daemon_is_killed(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    make_cities(served.url)
    sink = PostgresSink(served.url, "dw.cities")
    killed, failures = threading.Event(), list[BaseException]()
    writer = threading.Thread(target=change, args=(served.url, killed, failures))
    deadline = time.monotonic() + 250

    def until(result: PipelineResult) -> bool:
        assert failures == []
        assert time.monotonic() < deadline, f"not caught up: {result}"
        if result.pods and not killed.is_set():
            served.kill()
            served.start()
            killed.set()
        return killed.is_set() and not writer.is_alive() and waiting(served.url) == 0

    psql(served.url, "SELECT tube.tube_backfill_schedule('cities', 'id', 0, 9)")
    writer.start()
    try:
        result = pipeline.run(config(served, tmp_path, sink, "0s"), spark, until=until)
    finally:
        killed.set()
        writer.join()
    assert downstream(served.url) == upstream(served.url)
    assert result.distinct >= 3 * ROWS + 100
    again = pipeline.run(config(served, tmp_path, sink, "available_now"), spark)
    assert (again.pods, waiting(served.url)) == (0, 0)


def test_a_pipeline_moves_from_one_engine_to_the_other_without_a_backfill(
    spark: SparkSession, served: Served, database_url: str, tmp_path: Path
) -> None:
    make_cities(database_url)
    first, second, third = ("shard_0001.cities", "shard_0002.cities", "shard_0003.cities")
    sink = PostgresSink(database_url, "dw.cities")
    on_spark = config(served, tmp_path, sink, "available_now")
    psql(database_url, f"UPDATE {first} SET people = 1; UPDATE {second} SET people = 1; UPDATE {third} SET people = 1")
    pipeline.run(on_spark, spark)
    assert downstream(database_url) == upstream(database_url)

    psql(database_url, f"UPDATE {first} SET people = 2 WHERE id <= 10; DELETE FROM {second} WHERE id <= 5")
    file = tmp_path / "cities.toml"
    file.write_text(
        f'[source]\ntube = "cities"\nport = {served.port}\n'
        f'[enrich]\ndatabase = "{database_url}"\ntable = "shard_{{shard:04d}}.cities"\n'
        '[downstream]\nkind = "postgres"\ntable = "dw.cities"\n'
        '[run]\nengine = "local"\ncheckpoint = "checkpoint"\n'
    )
    moved = run_local(load_local(file))
    assert (moved.rows_written, moved.rows_deleted) == (10, 5)
    assert downstream(database_url) == upstream(database_url)
    assert waiting(database_url) == 0

    psql(database_url, f"UPDATE {third} SET people = 3 WHERE id <= 7; DELETE FROM {first} WHERE id <= 3")
    back = pipeline.run(replace(on_spark, checkpoint=tmp_path / "new"), spark)
    assert (back.rows_written, back.rows_deleted) == (7, 3)
    assert downstream(database_url) == upstream(database_url)


def test_a_run_that_ends_by_itself_has_every_backfill_that_was_scheduled(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    """It is scheduled when the query has planned its end, and has done all that it planned."""
    make_cities(served.url)
    sink = PostgresSink(served.url, "dw.cities")
    scheduled: list[str] = []

    def schedule(*_: object) -> None:
        if not scheduled:
            scheduled.append(psql(served.url, "SELECT tube.tube_backfill_schedule('cities', 'id', 0, 9)"))

    psql(served.url, "UPDATE shard_0002.cities SET people = 1 WHERE id = 1")
    result = pipeline.run(config(served, tmp_path, sink, "available_now"), spark, on_batch=schedule)
    assert scheduled == ["3"]
    assert downstream(served.url) == upstream(served.url)
    assert (result.distinct, waiting(served.url)) == (3 * ROWS + 1, 0)
