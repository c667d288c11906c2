"""A checkpoint on this machine, and one that only Hadoop reads (`viewfs`, which needs no server)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from pyspark.sql import SparkSession

from replicad.errors import EnvironmentRefused, UsageError
from replicad.spark import pipeline
from replicad.spark.checkpoint import DOWNSTREAM, PARKED, open_checkpoint
from replicad.spark.database import forget
from replicad.spark.session import settings_of
from replicad.spark.sinks import parquet
from replicad.spark.sinks.parquet import ParquetSink

pytestmark = pytest.mark.spark


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


@pytest.fixture
def uri(spark: SparkSession, tmp_path: Path) -> str:
    """A folder that has no path for Python."""
    (tmp_path / "mounted").mkdir()
    key = f"fs.viewfs.mounttable.{tmp_path.name.replace('_', '-')}.link./data"
    spark._jsc.hadoopConfiguration().set(key, (tmp_path / "mounted").as_uri())
    return f"viewfs://{tmp_path.name.replace('_', '-')}/data/state"


def test_only_a_checkpoint_of_this_machine_is_written_without_programs_for_each_file(tmp_path: Path) -> None:
    assert settings_of("s3a://bucket/state") == settings_of("hdfs://name/state") == {}
    assert settings_of(tmp_path) == settings_of(tmp_path.as_uri()) != {}
    options = "spark.driver.defaultJavaOptions"  # Spark puts a user's own options behind them
    assert options in settings_of(tmp_path, short=True)
    assert settings_of("s3a://bucket/state", short=True).keys() == {options}
    assert options not in settings_of(tmp_path)
    name = settings_of(tmp_path)["spark.sql.streaming.checkpointFileManagerClass"]
    [jar] = (Path(pyspark.__file__).parent / "jars").glob("spark-sql_*.jar")
    with zipfile.ZipFile(jar) as classes:
        assert f"{name.replace('.', '/')}.class" in classes.namelist(), "Spark has renamed it"


def test_a_checkpoint_keeps_small_files_wherever_it_is(spark: SparkSession, tmp_path: Path, uri: str) -> None:
    for place in (tmp_path / "local", uri):
        checkpoint = open_checkpoint(place, spark)
        checkpoint.make()
        checkpoint.make()
        assert checkpoint.read(DOWNSTREAM) is None
        checkpoint.write(DOWNSTREAM, "first å\n")
        checkpoint.write(DOWNSTREAM, "second å\n")
        checkpoint.write(PARKED, "")
        assert (checkpoint.read(DOWNSTREAM), checkpoint.read(PARKED)) == ("second å\n", "")
        for _ in range(2):
            checkpoint.remove(PARKED)
        assert checkpoint.read(PARKED) is None
    assert (tmp_path / "mounted/state" / DOWNSTREAM).read_text() == "second å\n"


def test_a_place_that_cannot_be_is_refused_with_a_sentence(spark: SparkSession, tmp_path: Path) -> None:
    for uri in ("s3://bucket/x", "s3a://bucket/x", "nothing://x/y"):
        with pytest.raises(
            UsageError, match=r"Spark has no file system for \w+://; give a path or hdfs://, or the jars"
        ):
            open_checkpoint(uri, spark)
    with pytest.raises(EnvironmentRefused, match=r"checkpoint viewfs://nowhere/x cannot be used"):
        open_checkpoint("viewfs://nowhere/x", spark).make()
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentRefused, match="cannot be made: Not a directory"):
        open_checkpoint(tmp_path / "file" / "below", spark).make()


@pytest.mark.long
def test_a_pipeline_goes_on_from_a_checkpoint_that_hadoop_reads(
    spark: SparkSession, cities: Cities, tmp_path: Path, uri: str
) -> None:
    sink = ParquetSink(tmp_path / "out")
    config = cities.config(sink, tmp_path, place=uri)
    cities.put(1, [1, 2], 1)
    assert pipeline.run(config, spark).pods == 1
    cities.put(1, [3], 1)
    assert pipeline.run(config, spark).pods == 1
    assert len(parquet.table(tmp_path / "out")) == 3
    assert (tmp_path / "mounted/state/commits").is_dir()
    assert (tmp_path / "mounted/state" / DOWNSTREAM).read_text().strip() == sink.identity()
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("viewfs")]
