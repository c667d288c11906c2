"""The pipeline, from a tube to each downstream: real Spark, real Postgres, a daemon in memory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from helpers import psql
from own_downstream import Fenced, Files
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from replicad.errors import DatabaseError, DownstreamError, LeaseHeld, UsageError
from replicad.spark import pipeline
from replicad.spark.database import forget
from replicad.spark.enrich import conform
from replicad.spark.local.tables import make_work
from replicad.spark.reports import BatchReport, PipelineResult
from replicad.spark.sinks import parquet
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.verify import as_local, transform_of
from replicad.tubes.keys import BIGINT

Rows = dict[tuple[int, int], tuple[str, int]]

pytestmark = pytest.mark.spark


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


def parquet_rows(folder: Path) -> Rows:
    rows = parquet.table(folder).to_pylist()
    found = {(row["_shard"], row["id"]): (row["name"], row["people"]) for row in rows}
    assert len(found) == len(rows)
    return found


def postgres_rows(url: str) -> Rows:
    lines = psql(url, "SELECT _shard, id, name, people FROM dw.cities").splitlines()
    return {(int(s), int(i)): (name, int(people)) for s, i, name, people in (line.split("|") for line in lines)}


def test_a_parquet_folder_follows_backfill_inserts_updates_and_deletes(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    for shard in (1, 2, 3):
        cities.put(shard, range(1, 101), 10, "B")
    config = cities.config(ParquetSink(tmp_path / "out", rows_per_file=20), tmp_path)
    reports: list[BatchReport] = []
    result = pipeline.run(config, spark, on_batch=lambda report, _: reports.append(report))
    assert parquet_rows(tmp_path / "out") == cities.rows()
    assert (result.pods, result.ids, result.rows_written, result.rows_deleted) == (3, 300, 300, 0)
    assert [(one.pods, one.repeated, one.lag) for one in reports] == [(3, False, None)]  # backfill waits by design

    cities.put(1, [1, 2, 500], 20)
    cities.put(1, [2], 30)
    cities.remove(2, [7, 8])
    cities.remove(3, [999])
    result = pipeline.run(config, spark)
    assert parquet_rows(tmp_path / "out") == cities.rows()
    assert (result.pods, result.ids, result.distinct) == (4, 7, 6)
    assert (result.rows_written, result.rows_deleted) == (3, 2)
    assert cities.daemon.tubes["t"].pods == {}
    [told] = cities.daemon.tubes["t"].reports.values()  # what `replicad top` shows
    assert (told["pods"], told["written"], told["deleted"]) == (4, 3, 2)
    assert told["lag"] > 0
    frame = parquet.read(spark, tmp_path / "out")
    assert frame.where("id = 2 AND _shard = 1").select("people", "area").collect() == [(30, "0.20000000000000000000")]
    assert frame.count() == len(cities.rows())
    assert spark.read.parquet(str(tmp_path / "out/current")).count() == len(cities.rows())


@pytest.mark.long
def test_a_batch_is_a_span_in_the_traces_of_its_rows(
    spark: SparkSession, cities: Cities, tmp_path: Path, finished: Any
) -> None:
    texts = {shard: f"00-{digit * 32}-{digit * 16}-01" for shard, digit in ((1, "a"), (2, "b"))}
    for name, transform in (("whole", None), ("transformed", lambda rows: rows)):
        finished.clear()
        config = cities.config(
            PostgresSink(cities.url, f"dw.{name}"), tmp_path / name, transform=transform, traceparent="name"
        )
        for shard, text in texts.items():
            cities.put(shard, [1, 2], 1)
            psql(cities.url, f"UPDATE shard_{shard:04d}.cities SET name = '{text}'")
        pipeline.run(config, spark)
        [batch] = finished.get_finished_spans()
        assert (batch.name, batch.attributes["messaging.batch.message_count"]) == ("replicad batch", 4)
        found = {f"{span.trace_id:032x}" for span in (batch.parent, *(link.context for link in batch.links))}
        assert found == {"a" * 32, "b" * 32}


def test_a_transform_sees_rows_and_what_it_leaves_out_is_deleted(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    def big_ones(rows: DataFrame) -> DataFrame:
        return rows.where("people >= 100").withColumn("label", F.upper("name")).drop("area", "name")

    sink = PostgresSink(cities.url, "dw.big")
    config = cities.config(sink, tmp_path, transform=big_ones)
    cities.put(1, range(1, 11), 100)
    cities.put(2, range(1, 11), 50)
    result = pipeline.run(config, spark)
    assert (result.pods, result.ids, result.rows_written, result.rows_deleted) == (2, 20, 10, 0)
    cities.put(1, [3, 4], 99)
    cities.put(2, [5], 101)
    cities.remove(1, [10])
    result = pipeline.run(config, spark)
    assert (result.rows_written, result.rows_deleted) == (1, 3)
    found = psql(cities.url, "SELECT _shard, id, label FROM dw.big ORDER BY 1, 2").splitlines()
    assert found == [f"1|{one}|CITY {one}" for one in (1, 2, 5, 6, 7, 8, 9)] + ["2|5|CITY 5"]
    with pytest.raises(UsageError, match=r"must keep the column _seq .* missing"):
        pipeline.run(cities.config(sink, tmp_path / "b", transform=lambda rows: rows.drop("_seq")), spark)


def test_rows_are_compared_as_the_transform_makes_them(spark: SparkSession, cities: Cities, tmp_path: Path) -> None:
    """`replicad pipeline verify` gives pages of the source to the transform (tests/integration/test_verify.py)."""

    def big_ones(rows: DataFrame) -> DataFrame:
        return rows.where("people >= 100").withColumn("label", F.upper("name")).drop("name", "area")

    cities.put(1, [1, 2], 100)
    cities.put(1, [3], 50)
    config = cities.config(PostgresSink(cities.url, "dw.big"), tmp_path, transform=big_ones)
    work = make_work(as_local(config), "downstream", None, BIGINT, prepare=False)
    transform = transform_of(config, spark)
    shape = transform.shape(work.enricher)
    assert shape.schema.names == ["id", "people", "label", "_shard", "_seq"]
    seen = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"], "people": [100, 100, 50], "area": ["1", "2", None]})
    seen = seen.append_column("_shard", pa.array([1, 1, 1], pa.int32())).append_column("_seq", pa.array([0, 0, 0]))
    page = transform.rows(shape, conform(seen, work.shape.schema))
    assert page.select(["id", "label"]).to_pylist() == [{"id": 1, "label": "A"}, {"id": 2, "label": "B"}]


def test_an_own_class_gets_everything_and_garbage_is_collected_after_a_backfill(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    own = Files(str(tmp_path / "out"))
    config = cities.config(CustomSink(own), tmp_path)
    cities.put(1, range(1, 31), 1)
    cities.put(2, range(1, 6), 1)
    pipeline.run(config, spark)
    cities.remove(1, range(20, 31), touch=False)  # nobody was told: only a backfill finds out
    cities.execute("UPDATE shard_0001.cities SET people = 77 WHERE id = 19")
    start = cities.daemon.touch("t", 2, [1])
    cities.daemon.touch("t", 1, [], "B", {"type": "backfill_start", "start_seq": str(start)})
    cities.daemon.touch("t", 1, range(1, 19), "B")  # 19 came into being after the backfill had passed its place
    cities.daemon.touch("t", 1, [], "B", {"type": "backfill_end", "start_seq": str(start)})
    result = pipeline.run(config, spark)
    assert own.rows() == cities.rows()
    assert result.garbage == 12
    assert result.rows_deleted == 11
    assert cities.daemon.tubes["t"].pods == {}


def test_a_running_pipeline_ends_when_it_is_told_to_and_names_what_ended_it(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    sink = PostgresSink(cities.url, "dw.cities")
    config = cities.config(sink, tmp_path, trigger=0, name="follower", options={"leaseTtl": "30s"})
    cities.put(1, [1], 1)
    told: list[PipelineResult] = []

    def until(result: PipelineResult) -> bool:
        told.append(result)
        if result.pods == 1 and cities.daemon.tubes["t"].pods == {}:
            with pytest.raises(LeaseHeld, match="held by follower/query@"):
                pipeline.run(cities.config(sink, tmp_path / "b", options={"leaseWait": "0"}), spark)
            cities.put(2, [2], 2)
        return result.pods == 2

    assert pipeline.run(config, spark, until).pods == 2
    assert postgres_rows(cities.url) == cities.rows()
    assert len(told) > 2


@pytest.mark.long
def test_a_column_that_is_dropped_everywhere_ends_the_pipeline_with_a_sentence_and_acks_nothing(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    sink = PostgresSink(cities.url, "dw.cities")
    config = cities.config(sink, tmp_path, trigger=0, tries=1)
    cities.put(1, [1], 1)

    def until(result: PipelineResult) -> bool:
        if result.pods == 1 and not cities.daemon.tubes["t"].pods:
            psql(cities.url, "".join(f"ALTER TABLE shard_000{one}.cities DROP COLUMN people;" for one in (1, 2, 3)))
            cities.daemon.touch("t", 2, [1])
        return False

    with pytest.raises(DatabaseError, match='column "people" does not exist'):
        pipeline.run(config, spark, until)
    assert len(cities.daemon.tubes["t"].pods) == 1


@pytest.mark.long
def test_what_cannot_be_read_is_parked_and_the_others_go_on(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FIRST_PAUSE", 0.01)
    psql(
        cities.url,
        "ALTER TABLE shard_0003.cities RENAME TO raw; CREATE VIEW shard_0003.cities AS "
        "SELECT id, name, 100 / (people - 13) AS people, area FROM shard_0003.raw; "
        "INSERT INTO shard_0003.raw SELECT i, 'city ' || i, i, 1 FROM generate_series(1, 40) i",
    )
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path, tries=1)
    tube = cities.daemon.tubes["t"]
    cities.put(1, range(1, 11), 1)
    cities.put(2, range(1, 11), 1)
    cities.daemon.touch("t", 3, range(1, 41))
    lost = cities.daemon.touch("t", 3, [13])
    psql(cities.url, "ALTER TABLE shard_0002.cities RENAME COLUMN people TO inhabitants")
    result = pipeline.run(config, spark)
    assert result.rows_written == 10 + 39
    assert tube.pods == {}
    assert sorted((seq, len(ids)) for seq, ids, _ in tube.parked) == [(2, 10), (3, 1), (lost, 1)]
    errors = {seq: error for seq, _, error in tube.parked}
    assert 'column "people" does not exist' in errors[2]
    assert "division by zero" in errors[lost]
    assert not (tmp_path / "checkpoint" / "replicad.parked").exists()
    cities.put(1, [11], 1)
    assert pipeline.run(config, spark).rows_written == 1


@pytest.mark.long
def test_an_own_class_gets_the_term_of_the_lease_and_the_batch(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    (tmp_path / "f").mkdir()
    config = cities.config(CustomSink(Fenced(str(tmp_path / "f"))), tmp_path)
    for number in range(2):
        cities.put(1, [number], number)
        assert pipeline.run(config, spark).rows_written == 1
    begun = [tuple(map(int, line.split())) for line in (tmp_path / "f.begun").read_text().splitlines()]
    assert [batch for _, batch in begun] == [0, 1]
    assert 0 < begun[0][0] < begun[1][0], "the second driver has a later term"


def test_a_downstream_that_fails_is_named(spark: SparkSession, cities: Cities, tmp_path: Path) -> None:
    cities.put(1, [1], 1)
    config = cities.config(CustomSink(Files(str(tmp_path / "nowhere"))), tmp_path, tries=2)
    with pytest.raises(DownstreamError, match="Files did not take batch 0: FileNotFoundError"):
        pipeline.run(config, spark)
    assert len(cities.daemon.tubes["t"].pods) == 1


AUDITED = """
CREATE SCHEMA dw;
CREATE TABLE dw.cities (id bigint, name text, people integer, area text, _shard integer, _seq bigint,
  PRIMARY KEY (_shard, id));
CREATE TABLE dw.audit (_shard integer, id bigint, _seq bigint);
CREATE FUNCTION dw.note() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN INSERT INTO dw.audit VALUES (NEW._shard, NEW.id, NEW._seq); RETURN NULL; END';
CREATE TRIGGER note AFTER INSERT OR UPDATE ON dw.cities FOR EACH ROW EXECUTE FUNCTION dw.note();
"""

DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from conftest import FAST
from replicad.spark import build_session, pipeline
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.postgres import PostgresSink
spark = build_session("driver", master={master!r}, log_file=Path({folder!r}) / "spark.log", config=FAST)
pipeline.run(PipelineConfig(
    tube="t", port={port}, database={url!r}, table="shard_{{shard:04d}}.cities", sink=PostgresSink({url!r},
    "dw.cities"), checkpoint=Path({folder!r}) / "checkpoint", trigger="0s", options={{"leaseTtl": "1s", "leaseWait":
    "30s", "maxPodsPerTrigger": "40"}},
), spark, on_batch=lambda report, result: print(report.number, flush=True))
"""


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Drivers that a test started; what is left of them is killed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for driver in started:
        kill(driver)


def kill(driver: subprocess.Popen[str]) -> None:
    """SIGKILL to a driver, its JVM and its Python workers."""
    for pid in [driver.pid, *children(driver.pid)] if driver.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):  # a helper of the JVM that is through already
            os.kill(pid, signal.SIGKILL)
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()


def start_driver(cities: Cities, folder: Path, master: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    script = DRIVER.format(tests=here, folder=str(folder), port=cities.daemon.port, url=cities.url, master=master)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)


def children(pid: int) -> list[int]:
    """The processes below one, the JVM and the Python workers."""
    done = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        mine = [child for child, above in pairs if above == parent]
        found.extend(mine)
        todo.extend(mine)
    return found


def executors(driver: subprocess.Popen[str]) -> list[int]:
    """The executors' JVMs of a local cluster."""
    found = []
    for pid in children(driver.pid):
        with contextlib.suppress(OSError):
            if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_executors_and_drivers_lose_nothing_and_write_nothing_twice(
    spark: SparkSession, cities: Cities, tmp_path: Path, drivers: list[subprocess.Popen[str]]
) -> None:
    """SIGKILL of an executor with its Python workers, then of a driver with all that is its, with live writers."""
    stop, chance = threading.Event(), random.Random(7)

    def write() -> None:
        number = 0
        while not stop.is_set():
            if len(cities.daemon.tubes["t"].pods) < 150:
                number += 1
                cities.change_at_random(chance, number)
            time.sleep(0.002)

    psql(cities.url, AUDITED)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        driver = start_driver(cities, tmp_path, "local-cluster[2,1,1024]")
        drivers.append(driver)
        assert driver.stdout is not None
        assert driver.stdout.readline(), "the driver ended by itself"
        os.kill(executors(driver)[0], signal.SIGKILL)
        for _ in range(2):
            assert driver.stdout.readline(), "the driver ended by itself"
        kill(driver)
    finally:
        stop.set()
        writer.join()
    pipeline.run(cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path), spark)
    assert postgres_rows(cities.url) == cities.rows()
    assert cities.daemon.tubes["t"].pods == {}
    twice = "SELECT count(*) FROM (SELECT FROM dw.audit GROUP BY _shard, id, _seq HAVING count(*) > 1) x"
    assert psql(cities.url, twice) == "0"
    assert int(psql(cities.url, "SELECT count(*) FROM dw.audit")) > 100
