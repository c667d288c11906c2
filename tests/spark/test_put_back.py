"""A checkpoint or a downstream that was put back from an older copy is noticed, in both directions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import deltalake
import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from helpers import make_pods, psql
from pyspark.sql import SparkSession
from test_sinks import SHAPE, changes

from replicad.errors import DownstreamError, EnvironmentRefused, UsageError
from replicad.spark import pipeline
from replicad.spark.checkpoint import open_checkpoint
from replicad.spark.database import forget
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.preflight import check_downstream, request_backfill
from replicad.spark.sinks.base import BatchId, Sink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    make_pods(database_url, 0)
    yield database_url
    forget(database_url)


class Written:
    """A checkpoint as Spark writes it, and a downstream with the same batches."""

    def __init__(self, url: str, sink: Sink, folder: Path) -> None:
        self.url, self.sink, self.checkpoint = url, sink, folder / "checkpoint"
        for log in ("offsets", "commits"):
            (self.checkpoint / log).mkdir(parents=True)
        (self.checkpoint / "metadata").write_text('{"id":"q"}')
        sink.prepare(SHAPE)

    def plan(self, number: int, what: str = "") -> None:
        (self.checkpoint / "offsets" / str(number)).write_text(json.dumps({"batch": number, "what": what}))

    def batch(self, number: int, *, step: int = 0, rows: bool = True) -> bool:
        """Write a batch as the runner does; whether it was one that the downstream has."""
        checkpoint = open_checkpoint(self.checkpoint)
        batch = BatchId("q" + checkpoint.recorded_as().suffix, number, step, checkpoint.plan(number).mark)
        done = [self.sink.apply(SHAPE, batch, 0, changes({(1, number): "row"}, seq=number + 1))] if rows else []
        self.sink.commit(batch, done)
        return any(one.repeated for one in done)

    def run(self, *numbers: int, rows: bool = True) -> None:
        for number in numbers:
            self.plan(number)
            assert not self.batch(number, rows=rows)
            (self.checkpoint / "commits" / str(number)).write_text("{}")

    def start(self, *, rebuild: bool = False) -> None:
        self.sink.prepare(SHAPE)
        config = PipelineConfig("t", self.url, "public.cities", self.sink, self.checkpoint, rebuild=rebuild)
        check_downstream(config, open_checkpoint(self.checkpoint))


def scheduled(url: str) -> int:
    return int(psql(url, "SELECT count(*) FROM tube.t WHERE payload->>'type' = 'backfill_schedule'"))


@pytest.fixture(params=["postgres", "parquet", "delta"])
def written(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Written:
    psql(
        url,
        "CREATE TABLE public.cities (id bigint PRIMARY KEY); SELECT tube.tube_table_ensure_attached('t', 'cities', 1)",
    )
    folder = tmp_path / "downstream"
    sinks: dict[str, Callable[[], Sink]] = {
        "postgres": lambda: PostgresSink(url, "dw.cities"),
        "parquet": lambda: ParquetSink(folder),
        "delta": lambda: DeltaSink(str(folder)),
    }
    return Written(url, sinks[request.param](), tmp_path)


def test_a_checkpoint_that_is_put_back_is_noticed_and_rebuilding_goes_on(written: Written, tmp_path: Path) -> None:
    written.start()
    written.run(0, 1)
    written.start()
    shutil.copytree(written.checkpoint, tmp_path / "copy")
    written.run(2, 3)
    written.start()
    shutil.rmtree(written.checkpoint)
    shutil.copytree(tmp_path / "copy", written.checkpoint)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"has batch 3, and the checkpoint has planned .* to 1 only.*--rebuild"):
            written.start()
    assert scheduled(written.url) == 0
    written.start(rebuild=True)
    assert scheduled(written.url) == 1
    written.start(rebuild=True)
    assert scheduled(written.url) == 1, "once"
    written.run(2, 3)  # the numbers come again, and each batch is written
    written.start()


def test_a_role_that_may_not_schedule_the_backfill_of_a_rebuild_is_told_the_command(
    url: str,
) -> None:
    """A role with the rights that the pipeline needs, and no more."""
    reader = f"reader_{psql(url, 'SELECT current_database()')}"
    psql(
        url,
        f"CREATE TABLE public.cities (id bigint PRIMARY KEY); CREATE ROLE {reader};"
        f"GRANT USAGE ON SCHEMA tube TO {reader}; GRANT SELECT ON tube.t, public.cities TO {reader}",
    )
    try:
        with pytest.raises(UsageError, match=r"role of the pipeline may not schedule .*tube t .*--rebuild --database"):
            request_backfill(f"{url}{'&' if '?' in url else '?'}options=-crole%3D{reader}", "tube", "t", "id")
        assert scheduled(url) == 0
    finally:
        psql(url, f"DROP OWNED BY {reader} CASCADE; DROP ROLE {reader}")


def test_a_batch_that_was_planned_when_the_copy_was_made_is_repeated_only_if_it_is_the_same(
    written: Written, tmp_path: Path
) -> None:
    written.run(0)
    written.plan(1, "first")
    assert not written.batch(1)
    written.start()
    assert written.batch(1), "the same plan, after a crash"
    assert written.batch(1, step=0)
    written.plan(1, "of another copy of the checkpoint")
    written.start()  # the numbers agree
    with pytest.raises(DownstreamError, match="batch 1 comes, and the downstream has another batch 1"):
        written.batch(1)
    with pytest.raises(DownstreamError, match="another driver runs from a copy of the checkpoint"):
        written.batch(1, step=3)


def test_batches_without_rows_and_a_crash_before_the_commit_log_are_no_restore(written: Written) -> None:
    written.run(0)
    written.run(1, 2, rows=False)
    written.start()
    written.plan(3)
    written.start()
    written.batch(3)
    written.batch(3, step=1)
    written.start()


def put_back_postgres(written: Written) -> Callable[[], None]:
    psql(
        written.url,
        "CREATE SCHEMA kept; CREATE TABLE kept.c AS TABLE dw.cities; CREATE TABLE kept.b AS TABLE dw.replicad_batches",
    )
    return lambda: (
        psql(
            written.url,
            "DELETE FROM dw.cities; INSERT INTO dw.cities TABLE kept.c; "
            "DELETE FROM dw.replicad_batches; INSERT INTO dw.replicad_batches TABLE kept.b",
        )
        and None
    )


def put_back_folder(written: Written) -> Callable[[], None]:
    folder = Path(getattr(written.sink, "folder", None) or written.sink.uri)
    copy = folder.with_name("kept")
    shutil.copytree(folder, copy, symlinks=True)

    def put_back() -> None:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder, symlinks=True)

    return put_back


def test_a_downstream_that_is_put_back_is_noticed_and_rebuilding_goes_on(written: Written) -> None:
    written.run(0, 1)
    put_back = put_back_postgres(written) if isinstance(written.sink, PostgresSink) else put_back_folder(written)
    written.run(2, 3)
    written.start()
    put_back()
    forget(written.url)
    with pytest.raises(
        UsageError, match=r"has batch 1 as its last one, and batch 3 was acked, .*older copy.*--rebuild"
    ):
        written.start()
    written.start(rebuild=True)
    assert scheduled(written.url) == 1
    written.start()
    written.run(4)
    written.start()


def test_a_restore_of_delta_is_noticed_also_behind_other_commits(url: str, tmp_path: Path) -> None:
    """RESTORE keeps the numbers of transactions."""
    sink = DeltaSink(str(tmp_path / "d"))
    written = Written(url, sink, tmp_path)
    written.run(0, 1)
    table = deltalake.DeltaTable(sink.uri)
    table.optimize.compact()
    written.start()
    written.run(2)
    version = deltalake.DeltaTable(sink.uri).version()
    deltalake.DeltaTable(sink.uri).restore(version - 1)
    deltalake.DeltaTable(sink.uri).alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
    with pytest.raises(UsageError, match=r"batch 2 was acked, so it was put back from an older copy"):
        written.start()


def test_a_checkpoint_whose_log_lacks_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused, match="has no offsets/3"):
        open_checkpoint(tmp_path).plan(3)


@pytest.mark.spark
def test_a_pipeline_does_not_ack_unread_what_an_older_checkpoint_plans_again(
    spark: SparkSession, database_url: str, daemon: FakeDaemon, tmp_path: Path
) -> None:
    """With the copy, batch 1 came again with a new row, and was taken for the batch 1 that was there."""
    cities = Cities(database_url, daemon)
    psql(database_url, "SELECT tube.tube_table_ensure_attached('t', 'shard_0001.cities', 1)")
    psql(database_url, "SELECT setval('tube.tube_seq', 1000)")  # the daemon in memory counts from 1
    config = cities.config(PostgresSink(database_url, "dw.cities"), tmp_path)
    checkpoint = tmp_path / "checkpoint"
    cities.put(1, [1], 1)
    assert pipeline.run(config, spark).rows_written == 1
    shutil.copytree(checkpoint, tmp_path / "copy")
    cities.put(1, [2], 1)
    pipeline.run(config, spark)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "copy", checkpoint)
    cities.put(1, [3], 1)
    with pytest.raises(UsageError, match="has batch 1, and the checkpoint has planned batches up to 0 only"):
        pipeline.run(config, spark)
    assert len(daemon.tubes["t"].pods) == 1, "nothing was acked"
    again = cities.config(PostgresSink(database_url, "dw.cities"), tmp_path, rebuild=True)
    # the daemon in memory makes no backfill, for which the run would wait
    result = pipeline.run(again, spark, until=lambda result: result.batches > 0)
    assert (result.rows_written, result.batches) == (1, 1)
    assert psql(database_url, "SELECT string_agg(id::text, ',' ORDER BY id) FROM dw.cities") == "1,2,3"
    forget(database_url)


@pytest.mark.spark
def test_a_downstream_that_is_put_back_while_the_pipeline_runs_is_noticed(
    spark: SparkSession, database_url: str, daemon: FakeDaemon, tmp_path: Path
) -> None:
    """As by a failover of the warehouse to a standby that lagged."""
    cities = Cities(database_url, daemon)
    config = cities.config(
        PostgresSink(database_url, "dw.cities"), tmp_path, options={"maxPodsPerTrigger": "1"}, tries=2
    )
    for number in range(3):
        cities.put(1, [number], 1)

    def put_back(report: object, result: object) -> None:
        psql(database_url, "DELETE FROM dw.cities WHERE id = 0; UPDATE dw.replicad_batches SET batch = -1")

    with pytest.raises(UsageError, match="it was put back from an older copy"):
        pipeline.run(config, spark, on_batch=put_back)
    assert len(daemon.tubes["t"].pods) == 2, "only the first batch was acked"
    forget(database_url)
