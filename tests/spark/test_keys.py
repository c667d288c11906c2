"""Pipelines of tubes with ids of kind text: tables with keys of all types, several columns among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import psql
from pyspark.sql import SparkSession

from replicad.errors import UsageError
from replicad.spark import pipeline
from replicad.spark.database import forget
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from tests.spark.test_end_to_end import Served

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@dataclass(frozen=True, slots=True)
class Kind:
    """A table by its columns; SQL on the number n for a row; the columns of the key; and SQL for the id."""

    columns: str
    row: str
    key: str
    id: str


KINDS = {
    "uuid": Kind("k uuid PRIMARY KEY, v integer, name text", "md5(n::text)::uuid, n, 'n' || n", "k", "k::text"),
    "date": Kind("k date PRIMARY KEY, v integer, name text", "'2026-01-01'::date + n, n, 'n' || n", "k", "k::text"),
    "bytea": Kind("k bytea PRIMARY KEY, v integer, name text", "sha256(n::text::bytea), n, 'n' || n", "k", "k::text"),
    "several": Kind(
        "a text, b smallint, v integer, name text, PRIMARY KEY (a, b)",
        "'é \"' || n % 7, n, n, 'n' || n",
        "a,b",
        "json_build_array(a::text, b::text)::text",
    ),
}


@pytest.fixture
def served(database_url: str, tmp_path: Path) -> Iterator[Served]:
    made = Served(database_url, tmp_path)
    yield made
    made.kill()
    forget(database_url)


def config(served: Served, folder: Path, kind: Kind, sink: Sink, **options: str) -> PipelineConfig:
    return PipelineConfig(
        tube="docs", port=served.port, database=served.url, table="docs", id_column=kind.key, sink=sink,
        checkpoint=folder / "checkpoint", options={"keys": "text", "leaseTtl": "5s", **options},
    )  # fmt: skip


def sink_of(name: str, served: Served, folder: Path) -> Sink:
    if name == "postgres":
        return PostgresSink(served.url, "dw.docs")
    return ParquetSink(folder / "out") if name == "parquet" else DeltaSink(str(folder / "out"))


def rows_of(spark: SparkSession, served: Served, folder: Path, sink: Sink, id_name: str) -> dict[str, int]:
    if isinstance(sink, PostgresSink):
        found = psql(served.url, f"SELECT {id_name}, v FROM dw.docs").splitlines()
        return {row.rpartition("|")[0]: int(row.rpartition("|")[2]) for row in found}
    if isinstance(sink, DeltaSink):
        import deltalake

        table = deltalake.DeltaTable(sink.uri).to_pyarrow_table()
        return dict(zip(table.column(id_name).to_pylist(), table.column("v").to_pylist(), strict=True))
    found = spark.read.parquet(str(folder / "out" / "current")).select(id_name, "v").collect()
    return {row[0]: row[1] for row in found}


def source(served: Served, kind: Kind) -> dict[str, int]:
    found = psql(served.url, f"SELECT {kind.id}, v FROM docs").splitlines()
    return {row.rpartition("|")[0]: int(row.rpartition("|")[2]) for row in found}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "downstream"),
    [
        ("uuid", "postgres"),
        pytest.param("several", "parquet", marks=pytest.mark.long),
        pytest.param("several", "postgres", marks=pytest.mark.long),
        pytest.param("date", "delta", marks=pytest.mark.long),
        pytest.param("bytea", "parquet", marks=pytest.mark.long),
    ],
)
def test_writes_deletes_and_garbage_reach_the_downstream(
    spark: SparkSession, served: Served, tmp_path: Path, name: str, downstream: str
) -> None:
    kind = KINDS[name]
    psql(
        served.url,
        f"CREATE TABLE docs ({kind.columns}); INSERT INTO docs SELECT {kind.row} FROM generate_series(1, 300) n;"
        "SELECT tube.tube_ensure_exists('docs', 2); SELECT tube.tube_table_ensure_attached('docs', 'docs', 1);"
        "SELECT tube.tube_backfill_schedule('docs', NULL, 0, 9)",
    )
    sink = sink_of(downstream, served, tmp_path)
    made = config(served, tmp_path, kind, sink)

    def equal() -> None:
        def drained(_: object) -> bool:
            return psql(served.url, "SELECT count(*) FROM tube.docs") == "0"

        pipeline.run(PipelineConfig(**{**_fields(made), "trigger": "0s"}), spark, until=drained)
        assert rows_of(spark, served, tmp_path, sink, made.id_name) == source(served, kind)

    equal()
    psql(served.url, "UPDATE docs SET v = v + 1000 WHERE v % 3 = 0; DELETE FROM docs WHERE v % 5 = 0")
    equal()
    psql(
        served.url,
        "SET session_replication_role = replica; DELETE FROM docs WHERE v < 100; RESET ALL;"
        "SELECT tube.tube_backfill_schedule('docs', NULL, 0, 9)",
    )
    equal()


def _fields(config: PipelineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in PipelineConfig.__dataclass_fields__}


@pytest.mark.timeout(300)
def test_a_pipeline_of_the_wrong_kind_of_ids_is_refused_with_the_setting(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    psql(
        served.url,
        "CREATE TABLE docs (k integer PRIMARY KEY, v integer);"
        "SELECT tube.tube_ensure_exists('docs', 2, keys => 'text');"
        "SELECT tube.tube_table_ensure_attached('docs', 'docs', 1); INSERT INTO docs VALUES (1, 1)",
    )
    kind = Kind("", "", "k", "k::text")
    with pytest.raises(UsageError, match='keys = "text" in'):
        pipeline.run(config(served, tmp_path, kind, ParquetSink(tmp_path / "out"), keys="bigint"), spark)
