"""A pipeline's configuration: what can be known without Spark and Postgres is refused before either is asked."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pyspark_replicad
from replicad.errors import EnvironmentRefused, SparkWorkerLost, UsageError
from replicad.spark import build_session, pipeline, register
from replicad.spark.explaining import explain
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.pipeline_file import DOWNSTREAMS, KINDS, load_config
from replicad.spark.session import find_java, parse_version
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.source import ReplicadDataSource
from tests import keys_page

WHOLE = """
[source]
tube = "cities"
port = 9010
maxPodsPerTrigger = 500
failOnDataLoss = false
[enrich]
database = "postgresql://me:secret@db/app"
table = "shard_{shard:04d}.cities"
columns = ["name", "population"]
numeric = "float"
[downstream]
kind = "parquet"
folder = "out"
[run]
checkpoint = "state/checkpoint"
trigger = "500ms"
name = "nightly"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "pipeline.toml"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_file_says_all_of_a_pipeline(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, WHOLE))
    assert (config.tube, config.port, config.name, config.trigger) == ("cities", 9010, "nightly", 0.5)
    assert config.sink == ParquetSink(tmp_path / "out")
    assert config.checkpoint == tmp_path / "state/checkpoint"
    assert (config.columns, config.numeric, config.id_column) == (["name", "population"], "float", "id")
    assert (config.source.max_pods, config.source.fail_on_data_loss, config.source.consumer) == (500, False, "nightly")
    assert config.source.include_payload
    assert "secret" not in repr(config)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, WHOLE), database="postgresql://other/db", trigger="available_now")
    assert (config.database, config.trigger) == ("postgresql://other/db", "available_now")


@pytest.mark.parametrize(
    ("downstream", "kind"),
    [
        ('kind = "postgres"\ntable = "dw.cities"', PostgresSink),
        ('kind = "delta"\nuri = "s3://bucket/cities"\nstorage = { region = "eu" }', DeltaSink),
        ('kind = "bulk"\nurl = "https://search:9200"\nindex = "cities"', BulkSink),
    ],
)
def test_every_downstream_can_be_named(tmp_path: Path, downstream: str, kind: type) -> None:
    config = load_config(write(tmp_path, WHOLE.replace('kind = "parquet"\nfolder = "out"', downstream)))
    assert type(config.sink) is kind


def test_several_tables_feed_one_tube(tmp_path: Path) -> None:
    tables = 'tables = [{ shards = "0-99", table = "s{shard}.cities" }, { shards = "all", table = "public.airports" }]'
    config = load_config(write(tmp_path, WHOLE.replace('table = "shard_{shard:04d}.cities"', tables)))
    assert [(rule.shards.text, rule.of(7)) for rule in config.rules] == [
        ("0-99", "s7.cities"),
        ("all", "public.airports"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[source]", "[sources]", r"unknown section \[sources\]; there are \[source\]"),
        ('tube = "cities"', "", r"\[source\] has no tube"),
        ("maxPodsPerTrigger", "maxPodsPerTriger", "did you mean maxPodsPerTrigger"),
        ("port = 9010", 'port = "http"', r"\[source\] port: 'http' is not valid; give a whole number"),
        ('database = "postgresql://me:secret@db/app"', "", "neither --database nor REPLICAD_DATABASE"),
        ("postgresql://me", "mysql://me", "give a URL such as postgresql"),
        ('table = "shard', 'tabel = "shard', r"\[enrich\] tabel is not known; did you mean table"),
        ('numeric = "float"', 'numeric = "exact"', "numeric: 'exact' is not valid; give decimal, text or float"),
        (
            'columns = ["name", "population"]',
            "columns = []",
            r"columns: \[\] is not valid; give a list of names",
        ),
        ('columns = ["name", "population"]', 'columns = "name"', "give a list of names"),
        ('kind = "parquet"', 'kind = "kafka"', "'kafka' is not valid; give one of parquet, postgres"),
        ('folder = "out"', "", r"\[downstream\] folder is missing; give a text"),
        (
            'folder = "out"',
            'folder = "out"\npath = "x"',
            "path is not known; there are folder, rows_per_file",
        ),
        (
            'kind = "parquet"\nfolder = "out"',
            'kind = "class"\nclass = "nowhere:Sink"',
            "cannot be loaded .*my_module:my_name",
        ),
        (
            'trigger = "500ms"',
            'trigger = "often"',
            "trigger: 'often' is not valid; give available_now, or seconds",
        ),
        ('checkpoint = "state/checkpoint"', "", r"\[run\] checkpoint is missing; give a text"),
        ("{shard:04d}", "{table}", "is not a template"),
        ("[run]", "[run", "is not TOML"),
    ],
)
def test_what_does_not_fit_is_refused_by_file_and_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in WHOLE
    path = write(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(UsageError, match=says) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('tube = "cities"', "tube = [1]", r"\[source\] tube: \[1\] is not valid; give one word"),
        ("port = 9010", "port = {a = 1}", r"\[source\] port: .* is not valid"),
        ("maxPodsPerTrigger = 500", "maxPodsPerTrigger = 2024-01-01", r"\[source\] maxPodsPerTrigger: .* is not valid"),
        (
            'database = "postgresql://me:secret@db/app"',
            "database = 5",
            r"\[enrich\] database: 5 is not valid; give a URL",
        ),
        ('table = "shard_{shard:04d}.cities"', "table = 7", r"\[enrich\] table: 7 is not valid; give a text"),
        (
            'table = "shard_{shard:04d}.cities"',
            'tables = "a"',
            r"\[enrich\] tables: 'a' is not valid; give a list such",
        ),
        ('table = "shard_{shard:04d}.cities"', "tables = [1]", r"\[enrich\] tables: \[1\] is not valid"),
        (
            'table = "shard_{shard:04d}.cities"',
            "tables = [{shards = 1.5, table = 'a'}]",
            r"\[enrich\] tables shards: 1.5 is not valid",
        ),
        (
            'table = "shard_{shard:04d}.cities"',
            "tables = [{table = 'a'}]",
            r"\[enrich\] tables shards is missing; give shards",
        ),
        (
            'columns = ["name", "population"]',
            "columns = [1, 2]",
            r"\[enrich\] columns: \[1, 2\] is not valid; give a list",
        ),
        ('columns = ["name", "population"]', "id = 3", r"\[enrich\] id: 3 is not valid; give a text"),
        ('numeric = "float"', "numeric = true", r"\[enrich\] numeric: true is not valid; give decimal, text or float"),
        ('numeric = "float"', 'out_of_range = "keep"', "'keep' is not valid; give park, null or limits"),
        ('numeric = "float"', 'new_columns = "yes"', "'yes' is not valid; give follow, stop or ignore"),
        ('kind = "parquet"', "kind = 1", r"\[downstream\] kind: 1 is not valid; give one of"),
        ('folder = "out"', "folder = 1", r"\[downstream\] folder: 1 is not valid; give a text"),
        ('folder = "out"', 'folder = "s3://b/c"', "for an object store use the downstream `delta`"),
        (
            'folder = "out"',
            'folder = "out"\nrows_per_file = "many"',
            "rows_per_file: 'many' is not valid; give a whole",
        ),
        ('folder = "out"', 'folder = "out"\nkeep = "often"', "keep: 'often' is not valid; give seconds such as 30"),
        ('checkpoint = "state/checkpoint"', "checkpoint = 5", r"\[run\] checkpoint: 5 is not valid; give a text"),
        ('trigger = "500ms"', "trigger = [1]", r"\[run\] trigger: \[1\] is not valid; give available_now, or seconds"),
        ('name = "nightly"', "name = 5", r"\[run\] name: 5 is not valid; give a text"),
        ('name = "nightly"', 'tries = "5"', r"\[run\] tries: '5' is not valid; give a whole number"),
        ('name = "nightly"', "tries = 1.5", r"\[run\] tries: 1.5 is not valid; give a whole number"),
        ('name = "nightly"', "tries = true", r"\[run\] tries: true is not valid; give a whole number"),
        ('name = "nightly"', "transform = 5", r"\[run\] transform: 5 is not valid; give a text"),
        ('name = "nightly"', '[spark]\nmaster = "yarn"', "give names of Spark's settings in quotes"),
        ('name = "nightly"', '[spark]\n"spark.a" = [1]', r"\[spark\] spark.a: \[1\] is not valid"),
        ("\n[source]", "\nspark = 5\n[source]", r"spark is not a section; write \[spark\]"),
        (
            'kind = "parquet"\nfolder = "out"',
            'kind = "class"\nclass = 5',
            r"\[downstream\] class: 5 is not valid; give a text",
        ),
        (
            'kind = "parquet"\nfolder = "out"',
            'kind = "class"\nclass = "builtins:int"\nx = "y"',
            r"\[downstream\] class: TypeError",
        ),
        (
            'kind = "parquet"\nfolder = "out"',
            'kind = "delta"\nuri = "x"\nstorage = {a = 1}',
            "storage: .* is not valid; give texts by name",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_one_that_fits(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in WHOLE
    with pytest.raises(UsageError, match=says):
        load_config(write(tmp_path, WHOLE.replace(old, new, 1)))


def test_the_page_has_all_keys_as_they_are_declared_and_every_kind_has_those_of_its_class() -> None:
    page = keys_page.PIPELINE.read_text(encoding="utf-8")
    assert keys_page.render(page) == page, "run python -m tests.keys_page"
    assert {name for _, name, _ in keys_page.TABLE.findall(page)} == set(keys_page.PIPELINES)
    for kind, sink in KINDS.items():
        assert {key.name for key in DOWNSTREAMS[kind]} == {one.name for one in fields(sink)} - {"patience", "now"}


def test_a_checkpoint_may_be_a_uri_and_spark_gets_its_settings(tmp_path: Path) -> None:
    text = (
        WHOLE.replace("state/checkpoint", "hdfs://name/state")
        + '[spark]\n"spark.driver.memory" = "2g"\n"spark.x" = true\n'
    )
    config = load_config(write(tmp_path, text))
    assert config.checkpoint == "hdfs://name/state"
    assert config.spark == {"spark.driver.memory": "2g", "spark.x": "true"}
    config = load_config(write(tmp_path, WHOLE.replace("state/checkpoint", f"file://{tmp_path}/state")))
    assert config.checkpoint == tmp_path / "state"
    programs = {"tube": "t", "database": "postgresql://h/d", "table": "t", "sink": ParquetSink(tmp_path)}
    assert PipelineConfig(**programs, checkpoint=Path("s3a://b/c")).checkpoint == "s3a://b/c"  # type: ignore[arg-type]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_config(tmp_path / "nope.toml")


def test_options_and_fields_must_not_contradict(tmp_path: Path) -> None:
    def made(**more: Any) -> PipelineConfig:
        sink = ParquetSink(tmp_path)
        base = {"tube": "t", "database": "postgresql://h/d", "table": "t", "sink": sink, "checkpoint": tmp_path}
        return PipelineConfig(**{**base, **more})

    with pytest.raises(UsageError, match="tube is a field of PipelineConfig"):
        made(options={"TUBE": "x"})
    with pytest.raises(UsageError, match="is not a downstream"):
        made(sink="parquet")
    with pytest.raises(UsageError, match="out of range"):
        made(trigger=-1)
    assert made(trigger=0.25).trigger == 0.25


def test_what_ended_a_query_is_found_in_what_spark_says() -> None:
    wrapped = RuntimeError("Job aborted ...\nreplicad.errors.LeaseHeld: tube t is held by me\n\tat org.apache...")
    found = explain(wrapped)
    assert (type(found).__name__, str(found)) == ("LeaseHeld", "tube t is held by me")
    late = explain(RuntimeError("[STREAM_FAILED] terminated with exception: Python worker failed to connect back."))
    assert isinstance(late, SparkWorkerLost)
    assert explain(RuntimeError("something else")).args == ("something else",)
    assert str(explain(RuntimeError("outer"), UsageError("inner"))) == "inner"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("command not found", None),
    ],
)
def test_the_version_of_java_is_read(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_java_is_found_or_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused, match=r"no java on PATH; install one .*apt install"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(EnvironmentRefused, match="there is no bin/java in it"):
        find_java({"JAVA_HOME": str(tmp_path)})
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'java version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(EnvironmentRefused, match="is Java 11, Spark needs 17"):
        find_java({"PATH": str(tmp_path)})
    java.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(EnvironmentRefused, match=r"-version. failed: broken"):
        find_java({"PATH": str(tmp_path)})
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    assert find_java({"PATH": str(tmp_path)}) == java


def test_what_spark_says_becomes_one_sentence() -> None:
    from py4j.protocol import Py4JNetworkError
    from pyspark.errors import StreamingQueryException

    def said(text: str, cause: BaseException | None = None) -> tuple[str, str]:
        found = explain(StreamingQueryException(text), cause)
        return type(found).__name__, str(found)

    head = "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
    tail = "\n=== Streaming Query ===\nIdentifier: pipeline [id = 1]\n" + "\tat org.apache.spark.X.y(X.scala:1)\n" * 90
    assert said(f"{head}No space left on device SQLSTATE: XXKST{tail}") == (
        "SparkFailed",
        "Spark says: No space left on device SQLSTATE: XXKST",
    )
    python = 'Traceback (most recent call last):\n  File "my.py", line 3, in f\nValueError: not a city\n'
    assert said(f"{head}Job aborted due to stage failure\n{python}{tail}") == ("SparkFailed", "ValueError: not a city")
    assert said(f"{head}x{tail}", KeyError("area")) == ("SparkFailed", "KeyError: 'area'")
    lost = said(f"{head}Job aborted: ExecutorLostFailure (executor 1 exited caused by one of the running tasks){tail}")
    assert lost[0] == "SparkWorkerLost"
    assert len(lost[1]) < 200
    assert type(explain(Py4JNetworkError("Answer from Java side is empty"))).__name__ == "EnvironmentRefused"
    mine = AssertionError("of a test")
    assert explain(mine) is mine


class Session:
    """Of Spark Connect, or of an old Spark."""

    __module__ = "pyspark.sql.connect.session"
    version = "4.1.3"


def test_an_old_spark_and_spark_connect_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write(tmp_path, WHOLE))
    with pytest.raises(UsageError, match="a pipeline cannot run in a session of Spark Connect"):
        pipeline.run(config, Session())  # type: ignore[arg-type]
    with pytest.raises(EnvironmentRefused, match=r"the Spark of this session is 4\.1\.3, replicad needs 4\.2 or newer"):
        register(Session())  # type: ignore[arg-type]
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with pytest.raises(EnvironmentRefused, match="SPARK_REMOTE is set, for Spark Connect"):
        build_session("x")
    monkeypatch.setattr("pyspark.__version__", "4.0.2")
    try:
        found = importlib.reload(pyspark_replicad).DefaultSource
        assert found.name() == "replicad"
        with pytest.raises(RuntimeError, match=r"PySpark is 4\.0\.2, replicad needs 4\.2 or newer"):
            found({"tube": "t"})
    finally:
        monkeypatch.undo()
        assert importlib.reload(pyspark_replicad).DefaultSource is ReplicadDataSource


def test_a_table_in_the_catalog_is_refused_with_what_works_instead() -> None:
    of_catalog = {"provider": "replicad", "owner": "me", "tube": "t", "option.tube": "t"}  # as Spark 4.3 gives them
    with pytest.raises(UsageError, match=r"CREATE TABLE cannot be used .*CREATE TEMPORARY VIEW"):
        ReplicadDataSource(of_catalog)
