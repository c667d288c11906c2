"""One query over several daemons: each pod once, acks at its own island, kills, islands that come, go and are away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from harness import QUERIES, Query, make_source
from helpers import psql
from pyspark.sql import SparkSession

from replicad.errors import LeaseHeld, UsageError
from replicad.spark import pipeline
from replicad.spark.database import forget
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks import parquet
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.tables import TableRule
from replicad.tubes.shards import ShardSet
from tests.conftest import PATIENCE

QUICK = {"pollTimeout": "0", "retryInterval": "10ms", "leaseTtl": "1s", "leaseWait": "0", "numRetries": "3"}


@pytest.fixture
def other() -> Iterator[FakeDaemon]:
    with FakeDaemon() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_query_outlives_its_test() -> Iterator[None]:
    yield
    while QUERIES:
        QUERIES.pop().die()


def islands(**daemons: FakeDaemon) -> str:
    return ",".join(f"{name}=127.0.0.1:{daemon.port}" for name, daemon in daemons.items())


def options(text: str, **more: str) -> dict[str, str]:
    return {"tube": "t", "islands": text, **QUICK, **more}


def test_pods_of_all_islands_are_read_once_and_acked_where_they_came_from(
    daemon: FakeDaemon, other: FakeDaemon
) -> None:
    tubes = [daemon.make_tube("t", 2), other.make_tube("t", 3)]
    for number in range(6):
        daemon.touch("t", number, [number])
        other.touch("t", 10 + number, [100 + number])
    query = Query(options(islands(east=daemon, west=other), maxPodsPerTrigger="4"))
    assert query.trigger()
    assert [sum(id < 100 for id in query.ids), sum(id >= 100 for id in query.ids)] == [4, 4]  # the limit is an island's
    assert [len(tube.pods) for tube in tubes] == [6, 6]
    query.drain()
    assert sorted(query.ids) == [*range(6), *range(100, 106)]
    assert [tube.pods for tube in tubes] == [{}, {}]


def test_a_killed_driver_replays_the_batch_of_each_island_exactly(daemon: FakeDaemon, other: FakeDaemon) -> None:
    for one in (daemon, other):
        one.make_tube("t", 2)
        one.touch("t", 1, [1])
    query = Query(options(islands(east=daemon, west=other)))
    query.before_commit = lambda: (_ for _ in ()).throw(InterruptedError)
    with pytest.raises(InterruptedError):
        query.trigger()
    query.die()
    for one in (daemon, other):
        one.touch("t", 1, [2])
    again = Query(options(islands(east=daemon, west=other), leaseWait="5s"), query.offsets, query.commits)
    assert again.ids == [1, 1]
    again.drain()
    assert again.ids == [1, 1, 2, 2]


def test_a_replay_has_the_same_tasks_whatever_the_order_in_which_the_islands_are_named(
    daemon: FakeDaemon, other: FakeDaemon
) -> None:
    """Downstreams know a task that was done already by its number."""
    for number, one in enumerate((daemon, other)):
        one.make_tube("t", 2)
        for shard in (0, 1):
            one.touch("t", shard, [10 * number + shard])
    before = Query(options(islands(west=daemon, east=other)))
    assert before.trigger()
    before.die()
    after = Query(options(islands(east=other, west=daemon), leaseWait="5s"), before.offsets, commits=0)
    assert after.ids == before.ids


def test_a_trigger_waits_for_the_first_pod_of_any_island(daemon: FakeDaemon, other: FakeDaemon) -> None:
    for one in (daemon, other):
        one.make_tube("t", 2)
    query = Query(options(islands(east=daemon, west=other), pollTimeout="300s"))
    began = time.monotonic()
    threading.Timer(0.3, lambda: other.touch("t", 1, [7])).start()
    assert query.trigger()
    assert query.ids == [7]
    assert time.monotonic() - began < PATIENCE


def test_an_island_may_join_move_to_another_port_and_not_be_forgotten(daemon: FakeDaemon, other: FakeDaemon) -> None:
    for one in (daemon, other):
        one.make_tube("t", 2)
        one.touch("t", 1, [1])
    query = Query(options(islands(east=daemon)))
    query.drain()
    query.die()
    more = Query(options(islands(east=daemon, west=other), leaseWait="5s"), query.offsets, query.commits)
    more.drain()
    assert more.ids == [1]
    more.die()
    with pytest.raises(UsageError, match="has an island 'east'"):
        Query(options(islands(west=other), leaseWait="5s"), more.offsets, more.commits).trigger()


def test_a_query_ends_at_what_all_islands_had_and_lets_them_all_go(daemon: FakeDaemon, other: FakeDaemon) -> None:
    for one in (daemon, other):
        one.make_tube("t", 2)
        one.touch("t", 1, [1])
    query = Query(options(islands(east=daemon, west=other)), available_now=True)
    query.trigger()
    daemon.touch("t", 1, [2])  # too late for this one
    query.drain()
    assert query.ids == [1, 1]
    Query(options(islands(east=daemon, west=other))).drain()  # nobody holds them any more


def test_an_island_that_somebody_else_reads_is_named(daemon: FakeDaemon, other: FakeDaemon) -> None:
    for one in (daemon, other):
        one.make_tube("t", 2)
    first = Query({"tube": "t", "port": str(other.port), "consumer": "somebody", **QUICK})
    first.trigger()
    with pytest.raises(LeaseHeld, match="somebody"):
        Query(options(islands(east=daemon, west=other))).trigger()
    first.die()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("east", "give daemons such as"),
        ("east=db1:0", "give daemons such as"),
        ("a=db1:1,a=db2:1", "a different name"),
        ("db1:1,db1:1", "a different name"),
        (",".join(f"db{n}:1" for n in range(65)), "at most 64"),
    ],
)
def test_what_are_no_islands_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_source(options(text))


def test_islands_contradict_host_and_port() -> None:
    with pytest.raises(UsageError, match="leave host and port out"):
        make_source(options("db1:1", port="2"))


def test_a_pipeline_reads_two_islands_with_a_database_each(
    spark: SparkSession, database_url: str, daemon: FakeDaemon, other: FakeDaemon, tmp_path: Path
) -> None:
    here = Cities(database_url, daemon)
    far = f"{database_url}&application_name=far"  # the same server by another URL
    psql(database_url, "CREATE SCHEMA far; CREATE TABLE far.cities (id bigint PRIMARY KEY, name text, people integer)")
    psql(database_url, "INSERT INTO far.cities SELECT n, 'far ' || n, n FROM generate_series(1, 5) AS n")
    other.make_tube("t", 1)
    other.touch("t", 9, range(1, 8), "B")
    here.put(1, range(1, 4), 10)
    config = PipelineConfig(
        tube="t",
        database=database_url,
        table=[
            TableRule("shard_{shard:04d}.cities", ShardSet.parse("1-3")),
            TableRule("far.cities", ShardSet.parse("9"), far),
        ],
        columns=["name", "people"],
        sink=ParquetSink(tmp_path / "out"),
        checkpoint=tmp_path / "checkpoint",
        options={"islands": islands(here=daemon, far=other), "leaseTtl": "1s"},
    )
    result = pipeline.run(config, spark)
    assert (result.rows_written, result.rows_deleted) == (8, 0)
    rows = {(row["_shard"], row["id"]): row["name"] for row in parquet.table(tmp_path / "out").to_pylist()}
    assert rows == {(1, n): f"city {n}" for n in (1, 2, 3)} | {(9, n): f"far {n}" for n in range(1, 6)}
    assert daemon.tubes["t"].pods == other.tubes["t"].pods == {}
    assert daemon.tubes["t"].reports.keys() == other.tubes["t"].reports.keys() == {"pipeline"}
    for url in (database_url, far):
        forget(url)
