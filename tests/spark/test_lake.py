"""A Delta table with `mode = "changes"` that Spark writes, and that Spark reads as one version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from pyspark.sql import SparkSession

from replicad.spark import pipeline
from replicad.spark.database import forget
from replicad.spark.lake import Lake
from replicad.spark.sinks import delta
from replicad.spark.sinks.delta import CHANGES, DeltaSink
from replicad.spark.sinks.delta_files import files_of

pytest.importorskip("deltalake")

pytestmark = pytest.mark.spark


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


def test_spark_appends_changes_and_reads_the_rows_over_the_base(
    spark: SparkSession, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_DIRECT", 50)  # in the driver, which says what goes into the base
    sink = DeltaSink(str(tmp_path / "lake"), mode=CHANGES)
    config = cities.config(sink, tmp_path)
    for shard in (1, 2, 3):
        cities.put(shard, range(1, 101), 10, "B")
    for _ in range(2):
        pipeline.run(config, spark)
        lake = Lake(sink.uri)
        rows = lake.spark(spark).collect()
        found = {(row["_shard"], row["id"]): (row["name"], row["people"]) for row in rows}
        assert len(found) == len(rows), "an id is there twice"
        assert found == cities.rows()
        assert sorted(lake.spark(spark).columns) == sorted(lake.schema.names)
        assert lake.spark(spark).where("people = 20").count() == len([1 for row in rows if row["people"] == 20])
        cities.put(1, [1, 2, 500], 20)
        cities.remove(2, [7, 8])
    layers = {one.layer for one in files_of(sink.current(), "id")}
    assert layers == {"base", "changes"}, "the claim is about changes over a base"
