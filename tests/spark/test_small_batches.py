"""A small batch is read, looked up and written on the driver, without a Spark job, and with the guarantees of one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from helpers import options, psql
from pyspark.sql import SparkSession
from test_pipeline import AUDITED, postgres_rows

from replicad.client.blocking_client import Endpoint
from replicad.errors import DownstreamUnavailable, UsageError
from replicad.protocol.tokens import START, Cursor
from replicad.spark import kept_clients, pipeline, small_batches
from replicad.spark.batches import BatchRunner
from replicad.spark.checkpoint import LocalCheckpoint
from replicad.spark.database import connection, forget
from replicad.spark.kept_clients import kept_client
from replicad.spark.offsets import Range
from replicad.spark.options import parse_options
from replicad.spark.reports import BatchReport
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.small_batches import SmallBatches
from replicad.spark.tubes import TubePartition, TubeStreamReader, read_range
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


class Jobs:
    """The Spark jobs of the queries whose batches it was called for."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._groups: set[str] = set()
        self.reports: list[BatchReport] = []

    def __call__(self, report: BatchReport, _: object) -> None:
        self.reports.append(report)
        self._groups.add(str(self._spark.sparkContext.getLocalProperty("spark.jobGroup.id")))

    def count(self) -> int:
        assert self._groups
        tracker = self._spark.sparkContext.statusTracker()
        return sum(len(tracker.getJobIdsForGroup(group)) for group in self._groups)


def allow(monkeypatch: pytest.MonkeyPatch, ids: int) -> None:
    """Let batches of so many ids be small."""
    monkeypatch.setattr(SmallBatches, "most_ids", ids)


def written_twice(url: str) -> int:
    return int(psql(url, "SELECT count(*) FROM (SELECT FROM dw.audit GROUP BY _shard, id, _seq HAVING count(*) > 1) x"))


@pytest.mark.spark
def test_a_small_batch_and_its_garbage_start_no_job_and_a_larger_one_does(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 30)
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path)
    cities.put(1, range(1, 21), 1)
    cities.put(2, range(1, 6), 1)
    jobs = Jobs(spark)
    assert pipeline.run(config, spark, on_batch=jobs).rows_written == 25
    cities.remove(1, [20], touch=False)  # found by the backfill alone
    start = cities.daemon.touch("t", 2, [1])
    cities.daemon.touch("t", 1, [], "B", {"type": "backfill_start", "start_seq": str(start)})
    cities.daemon.touch("t", 1, range(1, 20), "B")
    cities.daemon.touch("t", 1, [], "B", {"type": "backfill_end", "start_seq": str(start)})
    result = pipeline.run(config, spark, on_batch=jobs)
    assert (result.garbage, result.rows_deleted) == (1, 1)
    assert postgres_rows(cities.url) == cities.rows()
    assert jobs.count() == 0

    cities.put(3, range(1, 32), 1)
    jobs = Jobs(spark)
    assert pipeline.run(config, spark, on_batch=jobs).rows_written == 31
    assert jobs.count() > 0
    assert postgres_rows(cities.url) == cities.rows()
    assert cities.daemon.tubes["t"].pods == {}


@pytest.mark.spark
@pytest.mark.parametrize(("first", "again"), [(0, 1000), pytest.param(1000, 0, marks=pytest.mark.long)])
def test_a_batch_that_comes_again_is_recognised_by_the_driver_and_by_tasks(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, again: int
) -> None:
    """The driver ends between the write downstream and Spark's commit log, of two tasks or what is in their place."""
    psql(cities.url, AUDITED)
    allow(monkeypatch, first)
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path)
    for shard in (1, 2, 3):
        cities.put(shard, range(1, 9), 1)

    def crash(*_: object) -> None:
        raise UsageError("the driver ended here")

    with pytest.raises(UsageError, match="ended here"):
        pipeline.run(config, spark, on_batch=crash)
    assert len(cities.daemon.tubes["t"].pods) == 3, "nothing is acked"
    allow(monkeypatch, again)
    jobs = Jobs(spark)
    pipeline.run(config, spark, on_batch=jobs)
    assert [(one.number, one.repeated, one.written) for one in jobs.reports] == [(0, True, 0)]
    assert (jobs.count() == 0) == (again > 0)
    assert written_twice(cities.url) == 0
    assert postgres_rows(cities.url) == cities.rows()
    assert cities.daemon.tubes["t"].pods == {}


@pytest.mark.spark
def test_a_write_that_fails_after_one_range_goes_on_as_a_job_and_nothing_is_written_twice(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psql(cities.url, AUDITED)
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path)
    for shard in (1, 2):
        cities.put(shard, range(1, 9), 1)
    monkeypatch.setattr(PostgresSink, "write_small", Sink.write_small)  # a transaction for each range
    apply, calls = PostgresSink.apply, []

    def fail(sink: PostgresSink, shape: Any, batch: Any, task: int, changes: Any) -> Any:
        calls.append(task)
        if len(calls) == 2:
            raise DownstreamUnavailable("for a moment")
        return apply(sink, shape, batch, task, changes)

    monkeypatch.setattr(PostgresSink, "apply", fail)  # of this process: tasks have their own
    jobs = Jobs(spark)
    result = pipeline.run(config, spark, on_batch=jobs)
    assert calls == [0, 1]
    assert jobs.count() > 0
    assert [(one.repeated, one.written) for one in jobs.reports] == [(True, 8)], "the first range was written before"
    assert (result.pods, written_twice(cities.url)) == (2, 0)
    assert postgres_rows(cities.url) == cities.rows()


@pytest.mark.spark
def test_long_rows_are_written_by_tasks(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psql(cities.url, AUDITED)
    monkeypatch.setattr(small_batches, "MOST_BYTES", 100_000)
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path, options={"maxPodsPerTrigger": "1"})
    cities.put(2, range(1, 9), 1)  # the first partition's turn comes first
    psql(cities.url, "UPDATE shard_0002.cities SET name = repeat('x', 50000) WHERE id < 5")
    cities.put(1, [1], 1)
    jobs = Jobs(spark)
    pipeline.run(config, spark, on_batch=jobs)
    assert [one.written for one in jobs.reports] == [8, 1]
    assert jobs.count() == 1, "of the first batch"
    assert written_twice(cities.url) == 0
    assert postgres_rows(cities.url) == cities.rows()


# --- without Spark: a batch that became a job would fail ---


class Query:
    """A query whose offsets are logged as Spark logs them, and its runner. There is no Spark that could run a job."""

    def __init__(self, cities: Cities, folder: Path, **more: Any) -> None:
        config = cities.config(PostgresSink(cities.url, "dw.cities"), folder, **more)
        self.checkpoint = LocalCheckpoint(folder / "checkpoint")
        (folder / "checkpoint" / "offsets").mkdir(parents=True, exist_ok=True)
        enricher = pipeline.make_enricher(config)
        shape = Shape(enricher.schema, "id", enricher.layout.types)
        config.sink.prepare(shape)
        options = replace(config.source, consumer=None, holder="us!key")
        self.reader = TubeStreamReader(options)
        self.runner = BatchRunner(
            enricher, config.sink, shape, checkpoint=self.checkpoint, small=SmallBatches(options, self.checkpoint)
        )
        self.end = self.reader.initialOffset()
        self.number = 0

    def plan(self) -> None:
        """Log the offsets of the next batch."""
        self.end = self.reader.latestOffset(self.end, self.reader.getDefaultReadLimit())
        text = f"v1\n{{}}\n{json.dumps(self.end)}"
        (Path(self.checkpoint.location) / "offsets" / str(self.number)).write_text(text)

    def run(self, runner: BatchRunner | None = None) -> None:
        """Run the batch that is planned."""
        context = SimpleNamespace(getLocalProperty=lambda _: "q")
        (runner or self.runner)(SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context)), self.number)

    def batch(self) -> None:
        self.plan()
        self.run()
        self.number += 1


def test_the_driver_reads_looks_up_writes_and_collects_garbage_by_itself(cities: Cities, tmp_path: Path) -> None:
    psql(cities.url, AUDITED)
    query = Query(cities, tmp_path)
    for shard in (1, 2):
        cities.put(shard, range(1, 6), 1)
    query.batch()
    cities.remove(1, [5])
    cities.remove(2, [5], touch=False)
    start = cities.daemon.touch("t", 1, [1])
    cities.daemon.touch("t", 2, [], "B", {"type": "backfill_start", "start_seq": str(start)})
    cities.daemon.touch("t", 2, range(1, 5), "B")
    cities.daemon.touch("t", 2, [], "B", {"type": "backfill_end", "start_seq": str(start)})
    query.batch()
    result = query.runner.result
    assert (result.batches, result.rows_deleted, result.garbage) == (2, 2, 1)
    assert postgres_rows(cities.url) == cities.rows()
    assert written_twice(cities.url) == 0
    query.reader.stop()


@pytest.mark.parametrize("transactions", ["one for each task", "one"])
def test_the_driver_recognises_a_batch_that_comes_again_after_a_kill_at_any_step(
    cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: str
) -> None:
    """Two ranges. The driver ends before the first write, between the two, before the commit and after it; or before
    the one transaction, in it, before its commit and after it.
    """
    psql(cities.url, AUDITED)
    if transactions != "one":
        monkeypatch.setattr(PostgresSink, "write_small", Sink.write_small)
    query = Query(cities, tmp_path)
    steps: list[str] = []
    dies_at: int | None = None
    names = ("_write_small", "load", "upsert") if transactions == "one" else ("apply", "commit")
    doing = {name: getattr(PostgresSink, name) for name in names}

    def at(name: str, *given: Any) -> Any:
        steps.append(name)
        if len(steps) == dies_at:
            raise KeyboardInterrupt
        return doing[name](*given)

    for name in doing:
        monkeypatch.setattr(PostgresSink, name, partialmethod(lambda sink, what, *rest: at(what, sink, *rest), name))
    for step in (1, 2, 3, None):
        for shard in (1, 2):
            cities.put(shard, range(1, 6), step or 0)
        query.plan()
        steps.clear()
        dies_at = step
        if step is not None:
            with pytest.raises(KeyboardInterrupt):
                query.run()
            dies_at = None
            forget(cities.url)  # the connections end with the process
        query.run()
        query.run(replace(query.runner))  # after the commit downstream, and before Spark's commit log
        query.number += 1
        assert postgres_rows(cities.url) == cities.rows()
    assert written_twice(cities.url) == 0
    query.reader.stop()


@pytest.mark.parametrize("what", ["another driver", "no plan before", "a lost tube", "too many ids"])
def test_whatever_is_unusual_becomes_a_job(
    cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    query = Query(cities, tmp_path, options={"leaseTtl": "100ms"})
    cities.put(1, [1], 1)
    query.batch()
    cities.put(1, range(1, 9), 2)
    query.plan()
    if what == "another driver":
        query.reader.stop()
        query.runner.close()
        _term(cities.daemon, wait=5)
    elif what == "no plan before":
        (Path(query.checkpoint.location) / "offsets" / "0").unlink()
    elif what == "a lost tube":
        cities.daemon.stop()
    else:
        allow(monkeypatch, 7)
    assert query.runner.small is not None
    assert query.runner.small.read(1, query.checkpoint.plan(1)) is None
    assert postgres_rows(cities.url) == {(1, 1): ("city 1", 1)}
    query.reader.stop()
    if what == "a lost tube":
        cities.daemon.start()


# --- connections that are kept ---


def read_pods(daemon: FakeDaemon, upto: int) -> int:
    wanted = parse_options(options(daemon), streaming=True)
    part = TubePartition(wanted, Range(Part(0, 1), START, Cursor(upto, 0), upto), _term(daemon))
    return sum(batch.num_rows for batch in read_range(part))


def _term(daemon: FakeDaemon, wait: float = 0) -> int:
    with Endpoint("127.0.0.1", daemon.port).connect("claim") as client:
        return int(client.claim("t", Part(0, 1), ttl=10, wait=wait, holder="q!k").term)


@pytest.fixture
def tube(daemon: FakeDaemon) -> FakeDaemon:
    daemon.make_tube("t")
    for number in range(5):
        daemon.touch("t", 1, [number])
    return daemon


def connections(daemon: FakeDaemon, name: str = "task/spark") -> int:
    return daemon.requests.count(f"NAME {name}")


def test_a_process_keeps_one_connection_between_its_tasks(tube: FakeDaemon) -> None:
    for _ in range(3):
        assert read_pods(tube, 5) == 5
    assert connections(tube) == 1


def test_a_connection_that_has_ended_is_opened_again(tube: FakeDaemon) -> None:
    assert read_pods(tube, 5) == 5
    tube.stop()
    tube.start()
    assert read_pods(tube, 5) == 5
    assert connections(tube) == 2


def test_a_connection_is_not_kept_after_a_failure_and_few_are_kept(tube: FakeDaemon) -> None:
    endpoint = Endpoint("127.0.0.1", tube.port)
    used = []

    def fail() -> None:
        with kept_client(endpoint, "a") as client:
            used.append(client)
            client.tube_made("t")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fail()
    with kept_client(endpoint, "a") as other:
        assert other is not used[0]
    made = []
    for number in range(kept_clients.MOST_IDLE + 2):
        with kept_client(endpoint, f"b{number}") as client:
            client.tube_made("t")
            made.append(client)
    assert [client._closed for client in made] == [True] * 2 + [False] * kept_clients.MOST_IDLE


def test_a_forked_process_does_not_use_the_connection_of_its_parent(tube: FakeDaemon) -> None:
    endpoint = Endpoint("127.0.0.1", tube.port)
    with kept_client(endpoint, "a") as ours:
        ours.tube_made("t")
    child = os.fork()
    if not child:
        with kept_client(endpoint, "a") as theirs:
            os._exit(theirs is ours)
    assert os.waitpid(child, 0)[1] == 0
    with kept_client(endpoint, "a") as again:
        assert again is ours


def test_connections_to_postgres_of_threads_that_have_ended_are_closed(database_url: str) -> None:
    def opened() -> int:
        return int(psql(database_url, f"SELECT count(*) FROM pg_stat_activity WHERE {ours}"))

    ours = "application_name = 'replicad spark' AND datname = current_database()"
    for _ in range(3):  # as the threads of queries that are started again
        thread = threading.Thread(target=connection, args=(database_url,))
        thread.start()
        thread.join()
    connection(database_url)
    deadline = time.monotonic() + PATIENCE
    while opened() != 1:
        assert time.monotonic() < deadline, f"{opened()} connections are open"
    forget(database_url)
