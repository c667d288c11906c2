"""What one start of a pipeline's query needs: its tables looked up, its downstream prepared, its options.

A run starts its query again after each failure. `pipeline` decides when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from replicad.errors import UsageError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import PARKED, Checkpoint
from replicad.spark.column_types import ColumnType
from replicad.spark.database import forget
from replicad.spark.downstream import check_downstream
from replicad.spark.enrich import KEYS, Enricher
from replicad.spark.layouts import Wanted, find_layout
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW, PipelineConfig
from replicad.spark.reading_columns import TEXT
from replicad.spark.reports import BatchReport, PipelineResult
from replicad.spark.session import check_pyspark, quiet_callbacks, refuse_connect
from replicad.spark.sinks.base import Shape
from replicad.spark.survey import FOLLOW, IGNORE, STOP, Known

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from replicad.spark.batches import BatchRunner

OnBatch = Callable[[BatchReport, PipelineResult], None]

log = get_logger("replicad.spark")


def start_query(
    config: PipelineConfig,
    spark: SparkSession,
    made: BatchRunner,
    checkpoint: Checkpoint,
    *,
    holder: str | None = None,
) -> StreamingQuery:
    """Prepare the downstream for the rows of `made.shape`, and start the query that calls `made` for each micro-batch.

    Raises:
        UsageError, EnvironmentRefused, DatabaseError: it cannot start.
    """
    config.sink.prepare(made.shape)
    checkpoint.make()
    check_downstream(config, checkpoint)
    made.enricher.layout.known.write(checkpoint)
    forget(config.database)  # this thread no longer needs the connection
    reader = spark.readStream.format("replicad").options(**source_options(config, checkpoint, holder))
    writer = reader.load().writeStream.queryName(config.name).foreachBatch(made)
    writer = writer.option("checkpointLocation", checkpoint.location)
    if config.trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(float(config.trigger) * 1000)} milliseconds")
    return writer.start()


def make_runner(
    config: PipelineConfig,
    spark: SparkSession,
    enricher: Enricher,
    checkpoint: Checkpoint,
    *,
    on_batch: OnBatch | None,
    send_report: Callable[[BatchReport], None],
) -> BatchRunner:
    """What runs the micro-batches of one start."""
    check_pyspark()
    refuse_connect(spark)
    from replicad.spark import register  # noqa: PLC0415 - after `check_pyspark`
    from replicad.spark.batches import BatchRunner  # noqa: PLC0415

    register(spark)
    quiet_callbacks()
    shape = shape_of(config, spark, enricher, Known.read(checkpoint))
    return BatchRunner(
        enricher, config.sink, shape, config.transform, on_batch, checkpoint=checkpoint, send_report=send_report
    )


def make_enricher(config: PipelineConfig, known: Known | None = None) -> Enricher:
    """Look up the pipeline's tables in Postgres. `known` is what the checkpoint knows of their columns.

    Raises:
        UsageError: a table or column is missing; columns are new or have wider types, and the pipeline shall stop then.
        DatabaseError: Postgres cannot be used.
    """
    known = known or Known()
    columns, following = None, False
    if config.columns != ALL_COLUMNS:
        columns = list(config.columns)
    elif config.new_columns != IGNORE:
        following = True
    elif known.columns:
        columns = list(known.columns)
    of_columns = known if config.columns == ALL_COLUMNS else Known(types=known.types)
    layout = find_layout(
        config.database,
        config.rules,
        Wanted(config.id_column, columns, config.reading, of_columns, config.renamed, following),
    )
    _check_changes(config, known, layout.known)
    for source in layout.sources:
        if source.lacking:
            names = sorted(frozenset().union(*source.lacking.values()))
            log.warning(
                "columns_lacking", columns=", ".join(names), shards=len(source.lacking), table=source.rule.table
            )
    for url in {config.database, *(rule.database for rule in config.rules if rule.database)}:
        forget(url)  # this thread no longer needs the connection
    return Enricher(config.database, layout)


def _check_changes(config: PipelineConfig, before: Known, now: Known) -> None:
    """Raise UsageError if there is a change at which the pipeline shall stop."""
    new = [name for name in now.columns if before.columns and name not in before.columns]
    if new and config.new_columns == STOP and config.columns == ALL_COLUMNS:
        raise UsageError(
            f"the tables have new columns ({', '.join(new)}), and new_columns is `{STOP}`; set it to `{FOLLOW}` or "
            f"`{IGNORE}`, or list `columns` (docs/schema-changes.md)"
        )
    wider = [f"{name} is {now.types[name]}" for name in sorted(before.widened(now.types))]
    if wider and config.wider_types == STOP:
        raise UsageError(
            f"columns have got wider types ({', '.join(wider)}), and wider_types is `{STOP}`; widen them downstream, "
            f"and set it to `{FOLLOW}` (docs/schema-changes.md)"
        )
    if wider:
        log.warning("columns_widened", columns=", ".join(wider))


def source_options(config: PipelineConfig, checkpoint: Checkpoint, holder: str | None) -> dict[str, str]:
    """The options of the source for one start of the query."""
    options = config.source_options
    if holder is not None:
        options = {key: value for key, value in options.items() if key.lower() != "consumer"}
        options["holder"] = holder
    if checkpoint.read(PARKED) is not None:  # the batch that is replayed lacks the parked pods
        options = {key: value for key, value in options.items() if key.lower() != "failondataloss"}
        options["failOnDataLoss"] = "false"
    return options


def shape_of(config: PipelineConfig, spark: SparkSession, enricher: Enricher, known: Known) -> Shape:
    """The shape of the rows that go downstream. `known` is what the checkpoint knows from the last start."""
    now = enricher.layout.known
    schema, types = enricher.schema, dict(enricher.layout.types)
    if config.transform is not None:
        schema, types = _after_transform(config, spark, enricher)
    if config.numeric == TEXT and not config.sink.casts:  # whatever could make a number of it must not
        types = {name: type for name, type in types.items() if ColumnType.parse(type).name != "numeric"}
    return Shape(
        schema,
        config.id_column,
        types,
        added=frozenset(now.columns).difference(known.columns) if known.columns else frozenset(),
        widened=known.widened(now.types),
    )


def _after_transform(
    config: PipelineConfig, spark: SparkSession, enricher: Enricher
) -> tuple[pa.Schema, dict[str, str]]:
    """The schema of rows after the transform, found by running it on an empty DataFrame, and the known types."""
    from pyspark.sql import DataFrame  # noqa: PLC0415
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    from replicad.spark.batches import spark_schema  # noqa: PLC0415

    assert config.transform is not None
    after = config.transform(spark.createDataFrame([], spark_schema(enricher.schema)))
    if not isinstance(after, DataFrame):
        raise UsageError(f"transform: it returned {type(after).__name__}, not a DataFrame")
    found = {field.name: field.type for field in to_arrow_schema(after.schema, timezone="UTC")}
    for name, kind in ((config.id_column, pa.int64()), *zip(KEYS.names, KEYS.types, strict=True)):
        if found.get(name) != kind:
            state = f"is {found[name]}" if name in found else "is missing"
            raise UsageError(f"transform: it must keep the column {name} ({kind}), which {state} in its result")
    ours = {config.id_column: pa.int64()}
    ours.update({name: kind for name, kind in found.items() if name not in KEYS.names})
    before = dict(zip(enricher.schema.names, enricher.schema.types, strict=True))
    types = {name: type for name, type in enricher.layout.types.items() if ours.get(name) == before[name]}
    return pa.schema([*ours.items(), *KEYS]), types
