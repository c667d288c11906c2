"""The source inside a real Spark, against a daemon in memory: what only Spark's own order of calls can show."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon
from helpers import options
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import PATIENCE

pytestmark = pytest.mark.spark


def wait_until(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Gather:
    """A foreachBatch sink that keeps the ids of every batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = [one for row in frame.select("ids").collect() for one in row[0]]

    @property
    def ids(self) -> list[int]:
        return [one for batch in self.batches.values() for one in batch]


def query(
    spark: SparkSession, daemon: FakeDaemon, folder: Path, sink: Gather, trigger: dict[str, Any], **more: str
) -> Any:
    frame = spark.readStream.format("replicad").options(**options(daemon, **more)).load()
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start()


def test_available_now_reads_everything_acks_everything_and_lets_the_tube_go(
    spark: SparkSession, daemon: FakeDaemon, tmp_path: Path
) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(50):
        daemon.touch("t", number, range(number * 10, number * 10 + 10), op="B" if number % 5 == 0 else "U")
    sink = Gather()
    running = query(spark, daemon, tmp_path, sink, {"availableNow": True}, maxPodsPerTrigger="20")
    assert running.awaitTermination(60)
    assert sorted(sink.ids) == list(range(500))
    assert len(sink.batches) == 3
    assert tube.pods == {}
    wait_until(lambda: tube.leases == [])

    for number in range(50, 55):  # a second run goes on where the first one ended
        daemon.touch("t", number, [number * 10])
    running = query(spark, daemon, tmp_path, again := Gather(), {"availableNow": True})
    assert running.awaitTermination(60)
    assert sorted(again.ids) == [500, 510, 520, 530, 540]
    assert tube.pods == {}


def test_a_running_query_follows_each_pod_as_it_comes(spark: SparkSession, daemon: FakeDaemon, tmp_path: Path) -> None:
    tube = daemon.make_tube("t", 2)
    sink = Gather()
    running = query(spark, daemon, tmp_path, sink, {"processingTime": "0 seconds"}, pollTimeout="5s", leaseTtl="30s")
    for number in range(3):
        daemon.touch("t", number, [number])
        wait_until(lambda number=number: number in sink.ids)  # type: ignore[misc]
    wait_until(lambda: tube.pods == {})
    running.stop()


def test_a_failed_batch_is_not_acked_and_comes_again_whole(
    spark: SparkSession, daemon: FakeDaemon, tmp_path: Path
) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(10):
        daemon.touch("t", number, [number])

    class Failing(Gather):
        def __call__(self, frame: DataFrame, number: int) -> None:
            super().__call__(frame, number)
            raise RuntimeError("the sink is full")

    first = Failing()
    running = query(spark, daemon, tmp_path, first, {"availableNow": True}, leaseTtl="300ms")
    with pytest.raises(Exception, match="the sink is full"):
        running.awaitTermination(60)
    assert len(tube.pods) == 10
    daemon.touch("t", 0, [100])
    second = Gather()
    again = query(spark, daemon, tmp_path, second, {"availableNow": True}, leaseTtl="300ms", leaseWait="10s")
    assert again.awaitTermination(60)
    assert second.batches[0] == first.batches[0]
    assert Counter(second.ids) == Counter([*range(10), 100])
    assert tube.pods == {}


def test_a_batch_read_in_sql_and_in_python(spark: SparkSession, daemon: FakeDaemon) -> None:
    tube = daemon.make_tube("t", 2)
    daemon.touch("t", 1, [1, 2], payload={"a": 1})
    daemon.touch("t", 2, [3])
    frame = spark.read.format("replicad").options(**options(daemon, includePayload="true")).load()
    rows = frame.orderBy("seq").collect()
    assert [(row.op, row.shard, row.ids, row.payload) for row in rows] == [
        ("U", 1, [1, 2], '{"a": 1}'),
        ("U", 2, [3], None),
    ]
    assert rows[0].ts.year == 2026
    assert frame.count() == 2
    given = ", ".join(f"{key} '{value}'" for key, value in options(daemon).items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW pods USING replicad OPTIONS ({given})")
    assert spark.sql("SELECT sum(size(ids)) FROM pods").collect()[0][0] == 3
    assert len(tube.pods) == 2


def test_the_tests_of_the_shared_spark_run_in_one_process(spark: SparkSession, request: pytest.FixtureRequest) -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@spark")


def test_bad_options_are_refused_before_anything_runs(spark: SparkSession, daemon: FakeDaemon, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="did you mean maxPodsPerTrigger"):
        query(spark, daemon, tmp_path, Gather(), {"availableNow": True}, maxPodPerTrigger="5")


def test_the_second_query_is_told_who_has_the_tube(spark: SparkSession, daemon: FakeDaemon, tmp_path: Path) -> None:
    tube = daemon.make_tube("t")
    first = query(spark, daemon, tmp_path, Gather(), {"processingTime": "0 seconds"}, consumer="nightly")
    wait_until(lambda: len(tube.leases) == 1)
    second = query(spark, daemon, tmp_path / "second", Gather(), {"availableNow": True})
    with pytest.raises(Exception, match="LeaseHeld: tube t is held by nightly/query@"):
        second.awaitTermination(60)
    first.stop()


def test_a_daemon_that_restarts_does_not_end_the_query(spark: SparkSession, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.make_tube("t", 2)
    sink = Gather()
    running = query(spark, daemon, tmp_path, sink, {"processingTime": "0 seconds"}, leaseTtl="30s")
    daemon.touch("t", 1, [1])
    wait_until(lambda: 1 in sink.ids)
    daemon.stop()
    daemon.touch("t", 2, [2])
    threading.Timer(0.5, daemon.start).start()
    wait_until(lambda: 2 in sink.ids)
    running.stop()
    assert running.exception() is None


def test_a_stream_is_read_in_micro_batches_of_bounded_length(
    spark: SparkSession, daemon: FakeDaemon, tmp_path: Path
) -> None:
    for number in range(25):
        daemon.append("events", "one" if number % 2 else "two", {"n": number})
    found: dict[int, list[Any]] = {}
    frame = spark.readStream.format("replicad").options(
        port=str(daemon.port), stream="events", maxOffsetsPerTrigger="10"
    )
    writer = frame.load().writeStream.foreachBatch(lambda rows, number: found.update({number: rows.collect()}))
    running = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert running.awaitTermination(60)
    assert [len(rows) for rows in found.values()] == [10, 10, 5]
    rows = [row for batch in found.values() for row in batch]
    assert [row.row for row in rows] == [f'{{"n": {number}}}' for number in range(25)]
    assert {row.instance for row in rows} == {"one", "two"}
    batch = spark.read.format("replicad").options(port=str(daemon.port), stream="events", startingOffsets="20").load()
    assert [row.token for row in batch.collect()] == [21, 22, 23, 24, 25]
