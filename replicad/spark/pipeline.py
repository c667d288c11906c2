"""Run a pipeline from a tube to a downstream: `run` and `start` build the query, start it, watch it and end it.

`batches` has the work of one micro-batch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from replicad.errors import (
    ColumnsChanged,
    ConnectionLost,
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    DataLoss,
    DownstreamError,
    DownstreamUnavailable,
    LeaseLost,
    ReplicadError,
    RowsUnproven,
    SparkFailed,
    UsageError,
    ValueUnheld,
)
from replicad.eventlog import get_logger
from replicad.retry import Backoff
from replicad.spark.checkpoint import PARKED, Checkpoint, open_checkpoint
from replicad.spark.columns import TEXT, ColumnType
from replicad.spark.database import forget, quote
from replicad.spark.enrich import KEYS, EnrichedRows, Enricher
from replicad.spark.explaining import explain
from replicad.spark.holding import TubeHold, holder_name
from replicad.spark.options import parse_options
from replicad.spark.parking import SuspectShards, park_refused
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW, PipelineConfig
from replicad.spark.preflight import Attachments, AwaitedBackfills, Watch, check_downstream, wait_until_ready
from replicad.spark.reports import BatchReport, PipelineResult, Reporter, ReportThread, record_batch
from replicad.spark.session import build_session, check_pyspark, quiet_callbacks, refuse_connect, settings_of
from replicad.spark.sinks.base import Shape
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.delta_upkeep import UpkeepThread
from replicad.spark.tables import FOLLOW, IGNORE, STOP, Known, WantedColumns, find_layout

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
    holder: str,
    on_batch: OnBatch | None,
    send_report: Callable[[BatchReport], None],
) -> BatchRunner:
    """What runs the micro-batches of one start, under the lease of `holder`."""
    check_pyspark()
    refuse_connect(spark)
    from replicad.spark import register  # noqa: PLC0415 - after `check_pyspark`
    from replicad.spark.batches import BatchRunner  # noqa: PLC0415
    from replicad.spark.small_batches import SmallBatches  # noqa: PLC0415

    register(spark)
    quiet_callbacks()
    return BatchRunner(
        enricher,
        config.sink,
        shape_of(config, spark, enricher, Known.read(checkpoint)),
        config.transform,
        on_batch,
        checkpoint=checkpoint,
        send_report=send_report,
        span=partial(record_batch, config.tube, config.name),
        term=lambda: lease_term(config, checkpoint, holder),
        small=SmallBatches(parse_options(source_options(config, checkpoint, holder), streaming=True), checkpoint),
    )


def make_enricher(config: PipelineConfig, known: Known | None = None) -> Enricher:
    """Look up the pipeline's tables in Postgres. `known` is what the checkpoint knows of their columns.

    Raises:
        UsageError: a table or column is missing; columns are new or have wider types, and the pipeline shall stop then.
        RowsUnproven: a database is a standby, or does not keep the settings of its sessions.
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
    of_columns = known if config.columns == ALL_COLUMNS else Known(types=known.types, schemas=known.schemas)
    layout = find_layout(
        config.database,
        config.rules,
        WantedColumns(
            config.id_name,
            columns,
            config.reading,
            of_columns,
            config.renamed,
            following,
            keys=config.source.keys,
            key=config.key if len(config.key) > 1 else (),
        ),
    )
    if config.transform is None:  # otherwise its columns are known when it has run
        config.sink.check_columns([*layout.schema.names, *KEYS.names])
    _check_changes(config, known, layout.known)
    for source in layout.sources:
        if source.lacking:
            names = sorted(frozenset().union(*source.lacking.values()))
            log.warning(
                "columns_lacking", columns=", ".join(names), shards=len(source.lacking), table=source.rule.table
            )
    tube = f"{quote(config.tube_schema)}.{quote(config.tube)}"
    made = Enricher(config.database, layout, tube, traceparent=config.traceparent)
    made.prove()
    for url in {config.database, *(rule.database for rule in config.rules if rule.database)}:
        forget(url)  # this thread no longer needs the connection
    return made


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


def lease_term(config: PipelineConfig, checkpoint: Checkpoint, holder: str) -> int:
    """The term under which the query of this holder has its tube; of several tubes the sum, which grows with each.

    Raises:
        LeaseHeld: another query has taken a tube over.
    """
    options = parse_options({**source_options(config, checkpoint, holder), "leaseWait": "0"}, streaming=True)
    total = 0
    for one in options.by_island().values():
        with TubeHold(one, holder=holder, renewing=False) as hold:
            total += hold.term()
    return total


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
        config.id_name,
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
    by_case: dict[str, str] = {}
    for name in enricher.schema.names:
        other = by_case.setdefault(name.lower(), name)
        if other != name and spark.conf.get("spark.sql.caseSensitive") != "true":
            raise UsageError(
                f'columns "{other}" and "{name}" differ in case only, which Spark ignores in a transform; '
                'set "spark.sql.caseSensitive" = "true" in [spark], or list the `columns` that you need'
            )
    after = config.transform(spark.createDataFrame([], spark_schema(enricher.schema)))
    if not isinstance(after, DataFrame):
        raise UsageError(f"transform: it returned {type(after).__name__}, not a DataFrame")
    found = {field.name: field.type for field in to_arrow_schema(after.schema, timezone="UTC")}
    ids = enricher.layout.ids
    for name, kind in ((config.id_name, ids), *zip(KEYS.names, KEYS.types, strict=True)):
        if found.get(name) != kind:
            state = f"is {found[name]}" if name in found else "is missing"
            raise UsageError(f"transform: it must keep the column {name} ({kind}), which {state} in its result")
    ours = {config.id_name: ids}
    ours.update({name: kind for name, kind in found.items() if name not in KEYS.names})
    before = dict(zip(enricher.schema.names, enricher.schema.types, strict=True))
    types = {name: type for name, type in enricher.layout.types.items() if ours.get(name) == before[name]}
    return pa.schema([*ours.items(), *KEYS]), types


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a batch that failed is tried again; each pause doubles
_PATIENCE = 60.0  # seconds to wait for the current batch when a pipeline ends
_PATIENCE_FAILING = 5.0  # the same for a batch that failed before
_BEGINS = 60.0  # seconds for a query of one's own session to begin before the next one may
_LOOK = 0.2  # seconds between two checks whether the query has ended or must end
_AWAITED = 1.0  # seconds between two looks whether a backfill has put pods into the tube
_BACKFILL = "rows that were written before have NULL in new columns; if they should not: replicad tubes backfill {tube}"
_OUTAGES = (ConnectionLost, DatabaseUnavailable, DownstreamUnavailable)
_RETRIED = (ConnectionLost, DatabaseError, DataLoss, DownstreamError, LeaseLost, SparkFailed)  # others end the run


def run(
    config: PipelineConfig,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    until: Callable[[PipelineResult], bool] | None = None,
    on_batch: OnBatch | None = None,
) -> PipelineResult:
    """Run a pipeline to its end and return its counts.

    With the trigger `available_now` it ends when all pods that were there at the start have been read, and all
    backfills that were scheduled. With an interval it ends when `until` returns True (called several times a second) or
    with KeyboardInterrupt. A batch that fails is tried again, see `PipelineConfig.tries`. `on_batch` is called after
    every micro-batch, in another thread.
    `spark` is a session, or a function that makes one for this run alone; None: a local one. It is called when the
    daemon and the databases have answered.

    Raises:
        UsageError, EnvironmentRefused: before anything runs.
        LeaseHeld: another query has the tube.
        ReplicadError: the error that ended the query, without Spark's wrapping.
    """
    check_pyspark()
    refuse_connect(spark)
    made = _Run(config, until or (lambda _: False), on_batch)
    if not made.wait_until_ready():
        return PipelineResult()
    if spark is not None and not callable(spark):
        return made.to_the_end(spark)
    settings = {**settings_of(config.checkpoint, short=config.trigger == AVAILABLE_NOW), **config.spark}
    session = build_session(f"replicad {config.name}", config=settings) if spark is None else spark()
    try:
        return made.to_the_end(session)
    finally:
        session.stop()


class _Run:
    """One call of `run`: starts the query as often as necessary, always with the same holder of the lease."""

    def __init__(
        self,
        config: PipelineConfig,
        until: Callable[[PipelineResult], bool],
        on_batch: OnBatch | None,
    ) -> None:
        self._config = config
        self._until = until
        self._on_batch = on_batch
        self._holder = holder_name(config.source.consumer, "query", f"{os.getpid()}-{secrets.token_hex(4)}")
        self._result = PipelineResult()
        self._reports = ReportThread(Reporter(config.source, config.name))
        self._enricher: Enricher | None = None
        self._checkpoint: Checkpoint | None = None
        self._shape: Shape | None = None  # known after the first start
        self._attachments = Attachments(config)
        self._suspects: dict[int, str] = {}  # shards whose tables could not be read, with the reasons
        self._failures = 0  # since the last batch that succeeded
        urls = dict.fromkeys([config.database, *(rule.database for rule in config.rules if rule.database)])
        self._awaited = {url: AwaitedBackfills(url, config.tube_schema, config.tube) for url in urls}

    def wait_until_ready(self) -> bool:
        """Wait until everything that is read can be reached. False if the run must end first."""
        if not wait_until_ready(self._config, lambda: self._until(self._result)):
            return False
        if self._enricher is None:  # made once: a column that is dropped later must not change the downstream
            known = Known() if self._checkpoint is None else Known.read(self._checkpoint)
            self._enricher = make_enricher(self._config, known)
        return True

    def to_the_end(self, spark: SparkSession) -> PipelineResult:
        self._spark = spark
        self._attachments.look()
        self._checkpoint = open_checkpoint(self._config.checkpoint, spark)
        self._enricher = None  # with what the checkpoint knows
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.0)
        while True:
            batches = self._result.batches
            if self._until(self._result) or not self.wait_until_ready():
                return self._result
            try:
                self._once()
                if not self._awaits_backfill(batches):
                    return self._result
                backoff.reset()
            except _RETRIED as error:
                if isinstance(error, DatabaseRefused) or (
                    isinstance(error, DataLoss) and self._checkpoint.read(PARKED) is None
                ):
                    raise
                learnt = self._enricher is None  # of shards that cannot be read: the next try leaves them out
                if isinstance(error, ColumnsChanged):
                    self._enricher = None
                    log.warning("columns_changed", error=str(error), hint=_BACKFILL.format(tube=self._config.tube))
                if self._result.batches > batches:
                    self._failures = 0
                    backoff.reset()
                self._failures += not learnt
                unheld = isinstance(error, ValueUnheld)  # no later try ends otherwise
                failed = unheld or (self._failures >= self._config.tries and not learnt)
                if failed and not self._waits_for(error):
                    if not self._park(error):
                        raise
                    self._failures = 0
                    backoff.reset()
                pause = backoff.next_delay()
                log.warning("batch_failed", tries=self._failures, retry_in=pause, error=str(error))
                if self._pause(pause):
                    return self._result

    def _awaits_backfill(self, batches: int) -> bool:
        """Wait for pods of the backfills that were scheduled, which come while the daemon reads the tables. False:
        there are no more, or the run must end. `batches`: that there were before the query.
        """
        if self._config.trigger != AVAILABLE_NOW:
            return False
        busy, waited, awaited = self._result.batches > batches, False, list(self._awaited.values())
        try:
            while [one for one in awaited if one.look(busy=busy)]:  # each of them looks
                if any(one.there for one in awaited) and (busy or waited):  # an open transaction may hold them back
                    return True
                if self._pause(_AWAITED):
                    return False
                busy, waited = False, True
            return False
        finally:
            for url in self._awaited:
                forget(url)

    def _once(self) -> None:
        """Start the query and wait for its end."""
        runner = make_runner(
            self._config,
            self._spark,
            self._made_enricher(),
            self._opened(),
            holder=self._holder,
            on_batch=self._on_batch,
            send_report=self._reports.post,
        )
        runner.result, self._shape = self._result, runner.shape
        options = source_options(self._config, self._opened(), self._holder)
        suspects = SuspectShards(parse_options(options, streaming=True), self._opened(), self._suspects)
        runner.suspects = suspects
        query = start_query(self._config, self._spark, runner, self._opened(), holder=self._holder)
        upkeep = self._start_upkeep()
        try:
            while not query.awaitTermination(_LOOK):
                self._attachments.look()
                if self._until(runner.result):
                    self._let_finish(query, runner)
                    break
        except Exception as error:
            with contextlib.suppress(DatabaseError):  # the next try looks again
                if suspects.add(runner.unreadable, self._made_enricher()):
                    self._enricher = None  # perhaps a column was renamed, and it is known how
            found = explain(error, runner.error)
            if found is error:
                raise
            raise found from error
        finally:
            _stop(query)
            runner.close()
            upkeep.stop()
            self._reports.close()
            self._result = runner.result
        if not runner.busy:
            self._release()
        if self._config.trigger == AVAILABLE_NOW:
            runner.unmark()

    def _start_upkeep(self) -> UpkeepThread:
        """Keep a Delta table small, beside the batches."""
        upkeep = UpkeepThread(lambda: [] if self._shape is None else [(self._config.sink, self._shape)])
        if isinstance(self._config.sink, DeltaSink):
            upkeep.start()
        return upkeep

    def _opened(self) -> Checkpoint:
        assert self._checkpoint is not None
        return self._checkpoint

    def _made_enricher(self) -> Enricher:
        assert self._enricher is not None
        return self._enricher

    def _let_finish(self, query: StreamingQuery, runner: BatchRunner) -> None:
        """Wait until the current batch has ended: a batch that is interrupted must be repeated.

        A batch that failed before, or that waits for what cannot be reached, is given up soon.
        """
        if not runner.busy:
            return
        deadline = time.monotonic() + (_PATIENCE_FAILING if self._failures else _PATIENCE)
        with contextlib.closing(Watch(self._config)) as watch:
            while runner.busy and time.monotonic() < deadline and not query.awaitTermination(_LOOK):
                if watch.trouble is not None:
                    log.warning("batch_given_up", error=watch.trouble)
                    return

    def _waits_for(self, error: ReplicadError) -> bool:
        """Whether the run goes on until this is over: an outage, which says nothing about rows."""
        return isinstance(error, _OUTAGES) and self._config.trigger != AVAILABLE_NOW

    def _park(self, error: ReplicadError) -> bool:
        """Park the ids that cannot be read or written. False if they are not the reason for the failures."""
        if not isinstance(error, (DatabaseError, DownstreamError)) or isinstance(
            error, (*_OUTAGES, ColumnsChanged, RowsUnproven)
        ):
            return False
        options = parse_options(source_options(self._config, self._opened(), self._holder), streaming=True)
        try:
            parked = [
                park_refused(one, self._made_enricher(), self._try_out, self._failures, self._opened())
                for one in options.by_island().values()
            ]
        except _OUTAGES as outage:
            log.warning("parking_failed", error=str(outage))
            return True  # tried again after the next failure
        return any(parked)

    def _try_out(self, changes: EnrichedRows) -> None:
        """Try one piece of rows out downstream, as a batch would write it."""
        assert self._shape is not None
        if self._config.transform is not None:
            from replicad.spark.batches import transform_changes  # noqa: PLC0415 - needs Spark

            changes = transform_changes(self._spark, self._config.transform, self._shape, changes)
        self._config.sink.try_out(self._shape, changes)

    def _pause(self, pause: float) -> bool:
        """Wait before the next try. True if the run must end instead."""
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            if self._until(self._result):
                return True
            time.sleep(min(_LOOK, pause))
        return False

    def _release(self) -> None:
        """Release the tube. The reader mostly cannot: Spark kills its process when a query stops."""
        options = parse_options(
            {**source_options(self._config, self._opened(), self._holder), "leaseWait": "0"}, streaming=True
        )
        for one in options.by_island().values():
            with contextlib.suppress(ReplicadError), TubeHold(one, holder=self._holder, renewing=False) as hold:
                hold.term()
                hold.release()


def _stop(query: StreamingQuery) -> None:
    """Stop a query. A query that does not stop in time, see session.py, ends with the session."""
    try:
        query.stop()
    except Exception as error:  # noqa: BLE001 - what ended the run is more important
        log.warning("query_not_stopped", error=str(error).partition("\n")[0])


def start(config: PipelineConfig, spark: SparkSession, on_batch: OnBatch | None = None) -> StreamingQuery:
    """Start a pipeline in your own session and return its query when it has begun, after a minute at most; without
    retries.

    Raises:
        UsageError, EnvironmentRefused, DatabaseError: it cannot start.
    """
    checkpoint = open_checkpoint(config.checkpoint, spark)
    enricher = make_enricher(config, Known.read(checkpoint))
    send = ReportThread(Reporter(config.source, config.name)).post
    holder = holder_name(config.source.consumer, "query", f"{os.getpid()}-{secrets.token_hex(4)}")
    runner = make_runner(config, spark, enricher, checkpoint, holder=holder, on_batch=on_batch, send_report=send)
    query = start_query(config, spark, runner, checkpoint, holder=holder)
    _wait_until_begun(query)
    return query


def _wait_until_begun(query: StreamingQuery) -> None:
    """Wait until the Python process of its source answers. Spark gives it ten seconds to begin, which are too few where
    many queries of one driver begin at once: so they begin one after another.
    """
    deadline = time.monotonic() + _BEGINS
    while query.isActive and time.monotonic() < deadline:
        if not str(query.status["message"]).startswith(("Initializing", "Getting offsets")):
            return
        time.sleep(0.05)
