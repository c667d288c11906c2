"""Tube to downstream: deduplicate, enrich, transform, write, ack. The whole of it as two functions, `run` and `start`.

What is done in a micro-batch stands in `batches`; here a query is put together, started, watched and ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from replicad import errors
from replicad.errors import EnvironmentRefused, ReplicadError, UsageError
from replicad.spark.database import forget
from replicad.spark.enrich import Enricher
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW, PipelineConfig
from replicad.spark.reports import BatchReport, PipelineResult
from replicad.spark.session import build_session, check_pyspark
from replicad.spark.sinks.base import Shape
from replicad.spark.tables import find_layout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from replicad.spark.batches import BatchRunner

OnBatch = Callable[[BatchReport, PipelineResult], None]

_PATIENCE = 60.0  # seconds for the batch in hand when a pipeline is to end
_LOOK = 0.2  # seconds between two looks at whether the query has ended or is to end
_KEYS = {"_shard": pa.int32(), "_seq": pa.int64()}


def run(
    config: PipelineConfig,
    spark: SparkSession | None = None,
    until: Callable[[PipelineResult], bool] | None = None,
    on_batch: OnBatch | None = None,
) -> PipelineResult:
    """Run a pipeline to its end and return what it counted.

    With the trigger `available_now` it ends when everything has been read that was there at the start; with an
    interval, when `until` says so (asked after every batch and some times a second), or with KeyboardInterrupt.
    `on_batch` is called after every micro-batch, in another thread. `spark` None: a local session for this run alone.

    Raises:
        UsageError, EnvironmentRefused: before anything runs.
        LeaseHeld: another query has the tube.
        ReplicadError: what ended the query, without Spark's wrapping.
    """
    session = build_session(f"replicad {config.name}") if spark is None else spark
    try:
        query, runner = _start(config, session, on_batch)
        try:
            while not query.awaitTermination(_LOOK):
                if until is not None and until(runner.result):
                    _let_finish(query, runner)
                    break
        except BaseException as error:
            raise explain(error, runner.error) from error
        finally:
            query.stop()
        return runner.result
    finally:
        if spark is None:
            session.stop()


def _let_finish(query: StreamingQuery, runner: BatchRunner) -> None:
    """Give the batch in hand the time to end: one that is cut short comes again."""
    deadline = time.monotonic() + _PATIENCE
    while runner.busy and time.monotonic() < deadline and not query.awaitTermination(_LOOK):
        pass


def start(config: PipelineConfig, spark: SparkSession, on_batch: OnBatch | None = None) -> StreamingQuery:
    """Start a pipeline in a session of yours and return its query; what `run` does, without waiting.

    Raises:
        UsageError, EnvironmentRefused, DatabaseError: it cannot start.
    """
    return _start(config, spark, on_batch)[0]


def _start(config: PipelineConfig, spark: SparkSession, on_batch: OnBatch | None) -> tuple[StreamingQuery, BatchRunner]:
    check_pyspark()
    from replicad.spark import register  # noqa: PLC0415 - PySpark is there, `check_pyspark` says
    from replicad.spark.batches import BatchRunner  # noqa: PLC0415

    register(spark)
    columns = None if config.columns == ALL_COLUMNS else list(config.columns)
    layout = find_layout(config.database, config.rules, config.id_column, columns, config.numeric)
    enricher = Enricher(config.database, layout)
    shape = Shape(enricher.schema, config.id_column)
    if config.transform is not None:
        shape = _shape_after(config, spark, enricher)
    config.sink.prepare(shape)
    forget(config.database)  # this thread does not need it any more
    _make_checkpoint(config)
    runner = BatchRunner(enricher, config.sink, shape, config.transform, on_batch)
    reader = spark.readStream.format("replicad").options(**config.source_options)
    writer = reader.load().writeStream.queryName(config.name).foreachBatch(runner)
    writer = writer.option("checkpointLocation", str(config.checkpoint.absolute()))
    if config.trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(float(config.trigger) * 1000)} milliseconds")
    return writer.start(), runner


def _shape_after(config: PipelineConfig, spark: SparkSession, enricher: Enricher) -> Shape:
    """What rows look like after the transform, found by running it on no rows."""
    from pyspark.sql import DataFrame  # noqa: PLC0415
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    from replicad.spark.batches import spark_schema  # noqa: PLC0415

    assert config.transform is not None
    after = config.transform(spark.createDataFrame([], spark_schema(enricher.schema)))
    if not isinstance(after, DataFrame):
        raise UsageError(f"transform: it returned {type(after).__name__}, not a DataFrame")
    found = {field.name: field.type for field in to_arrow_schema(after.schema, timezone="UTC")}
    for name, kind in ((config.id_column, pa.int64()), *_KEYS.items()):
        if found.get(name) != kind:
            there = f"is {found[name]}" if name in found else "is not there"
            raise UsageError(f"transform: it must keep the column {name} ({kind}), which {there} in what it returned")
    ours = {config.id_column: pa.int64()}
    ours.update({name: kind for name, kind in found.items() if name not in _KEYS})
    return Shape(pa.schema([*ours.items(), *_KEYS.items()]), config.id_column)


def _make_checkpoint(config: PipelineConfig) -> None:
    try:
        config.checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentRefused(f"checkpoint {config.checkpoint} cannot be made: {error.strerror}") from error


# --- what went wrong, in one sentence -------------------------------------------------------------------

_OURS = re.compile(r"replicad\.errors\.([A-Za-z]+): (.+)")


def explain(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error of ours that ended a query: `cause` where it is one, else found in what Spark says;
    else `error` itself."""
    if isinstance(error, (ReplicadError, KeyboardInterrupt, SystemExit)):
        return error
    if isinstance(cause, ReplicadError):
        return cause
    for text in (str(error), str(cause or "")):
        for name, sentence in reversed(_OURS.findall(text)):
            kind: Any = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, ReplicadError):
                return kind(sentence.strip())
    return error
