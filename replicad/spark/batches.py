"""One micro-batch of a pipeline, on the driver: run its tasks, commit it downstream, collect garbage, count.

Spark's `foreachBatch` calls it. When it returns, Spark writes its commit log, and the source acks the pods before the
next batch. A small batch is written by the driver itself (small_batches.py), others by tasks.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from replicad.errors import DownstreamError, ReplicadError, TableUnreadable, UsageError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import PARKED, BatchPlan, Checkpoint
from replicad.spark.enrich import EnrichedRows, Enricher, LookUps, conform
from replicad.spark.explaining import explain
from replicad.spark.offsets import last_pod
from replicad.spark.parking import SuspectShards
from replicad.spark.reports import BatchReport, PipelineResult, StepResult
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink
from replicad.spark.small_batches import PATIENCE, NotSmall, SmallBatches, SmallRows
from replicad.spark.touches import Control, Touches, collect
from replicad.tubes.columns import schema as pods_schema
from replicad.tubes.keys import BIGINT, TEXT

Batches = Iterator[pa.RecordBatch]

SUMMARY_DDL = (
    "pods bigint, ids bigint, `distinct` bigint, oldest double, controls string, "
    "written bigint, deleted bigint, repeated boolean, note string, traces string"
)
_ARROW = {"bigint": pa.int64(), "double": pa.float64(), "string": pa.string(), "boolean": pa.bool_()}
_SUMMARY = pa.schema(
    [(name.strip("`"), _ARROW[kind]) for name, kind in (column.split() for column in SUMMARY_DDL.split(", "))]
)
KIND, NOTE = "_replicad_kind", "_replicad_note"
WRITE, DELETE, STATISTICS = "W", "D", "S"  # in this order of letters a touched id comes before its row
KEPT_IN_MEMORY = 16 << 20  # bytes of what a transform returned for a task; beyond that they are kept in a file
_TASK_BITS = 16  # of a task's number; the bits above are the number of tasks that write after a transform


def run_whole(enricher: Enricher, sink: Sink, shape: Shape, batch: BatchId) -> Callable[[Batches], Batches]:
    """Deduplicate, look up, write: for `mapInArrow` on the source's rows."""

    def work(batches: Batches) -> Batches:
        touches = collect(batches)
        applied, looked_up = Applied(), LookUps(enricher, touches.table)
        if touches.table.num_rows:
            applied = sink.apply(shape, batch, _task_number(), looked_up)
        yield _summary(touches, applied, looked_up.traces)

    return work


def enriched_schema(enricher: Enricher) -> pa.Schema:
    """The schema of what `run_enrichment` yields: the columns of the rows, `_shard`, `_seq`, KIND, NOTE."""
    return pa.schema([*enricher.schema, (KIND, pa.string()), (NOTE, pa.string())])


def run_enrichment(enricher: Enricher) -> Callable[[Batches], Batches]:
    """Deduplicate and look up: rows to write, keys to delete, and the task's counts, distinguished by KIND."""
    schema = enriched_schema(enricher)

    def labelled(table: pa.Table, kind: str, note: str | None = None) -> Batches:
        count = table.num_rows
        table = table.append_column(KIND, pa.repeat(pa.scalar(kind), count))
        table = table.append_column(NOTE, pa.repeat(pa.scalar(note, pa.string()), count))
        yield from conform(table, schema).to_batches(max_chunksize=20_000)

    def work(batches: Batches) -> Batches:
        touches = collect(batches)
        looked_up = LookUps(enricher, touches.table)
        for change in looked_up:
            yield from labelled(change.writes, WRITE)
            yield from labelled(change.deletes, DELETE)
        counts = json.dumps(_counts(touches, looked_up.traces))
        yield from labelled(pa.table({"_shard": pa.array([0], pa.int32())}), STATISTICS, counts)

    return work


def run_sink(sink: Sink, shape: Shape, batch: BatchId, tasks: int) -> Callable[[Batches], Batches]:
    """Write the rows that a transform returned (KIND is W) and delete the touched ids (KIND is D) that it did not
    return.

    There are `tasks` tasks. All rows of a shard are in one task, in the order of shard, id and KIND.
    """

    def work(batches: Batches) -> Batches:
        with KeptBatches() as kept:
            for one in batches:
                kept.add(one)
            if not kept.rows:
                return
            applied = sink.apply(shape, batch, tasks << _TASK_BITS | _task_number(), TransformedRows(kept, shape))
        yield _summary(None, applied)

    return work


class KeptBatches(Iterable[pa.RecordBatch]):
    """Batches that come once and can be gone through several times: in memory, or in a file if they are large."""

    def __init__(self) -> None:
        self.rows = 0
        self._held: list[pa.RecordBatch] = []
        self._size = 0
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # it has no name, so it is gone

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch. All have one schema, and none is added any more when they are gone through."""
        self.rows += batch.num_rows
        self._size += batch.nbytes
        self._held.append(batch)
        if self._size <= KEPT_IN_MEMORY:
            return
        if self._file is None:
            folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None  # of a worker of Spark
            self._file = tempfile.TemporaryFile(prefix="replicad-", dir=folder)  # noqa: SIM115 - see __exit__
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        for one in self._held:
            self._writer.write_batch(one)
        self._held.clear()

    def __iter__(self) -> Batches:
        if self._file is None:
            yield from self._held
            return
        self._file.seek(0)
        yield from pa.ipc.open_stream(self._file)


@dataclass(frozen=True, slots=True)
class TransformedRows(Iterable[EnrichedRows]):
    """The changes that a transform has left of touches, a batch at a time; within a shard their ids ascend."""

    batches: KeptBatches
    shape: Shape

    def __iter__(self) -> Iterator[EnrichedRows]:
        last: pa.Table | None = None  # whether a touched id is deleted depends on the row behind it
        for batch in self.batches:
            rows = pa.table(batch)
            if last is not None:
                rows = pa.concat_tables([last, rows])
            touched = rows.num_rows > 0 and rows.column(KIND)[-1].as_py() == DELETE
            last = rows.take([rows.num_rows - 1]) if touched else None  # a slice would keep all of the batch
            yield self._changes(rows, rows.num_rows - touched)
        if last is not None:
            yield self._changes(last, 1)

    def _changes(self, rows: pa.Table, count: int) -> EnrichedRows:
        """The changes of the first `count` rows."""
        same = [pa.array([False])]
        if rows.num_rows > 1:
            pairs = [
                pc.equal(column.slice(0, rows.num_rows - 1), column.slice(1))
                for column in (rows.column("_shard").combine_chunks(), rows.column(self.shape.id).combine_chunks())
            ]
            same.insert(0, pc.fill_null(pc.and_(*pairs), False))  # a row without an id has no touched id
        behind = pa.concat_arrays(same).slice(0, count)  # whether the next row has the same key
        rows = rows.slice(0, count)
        kind = rows.column(KIND)
        writes = rows.filter(pc.equal(kind, WRITE))
        deletes = rows.filter(pc.and_(pc.equal(kind, DELETE), pc.invert(behind)))
        return EnrichedRows(conform(writes, self.shape.schema), conform(deletes, self.shape.keys))


def _task_number() -> int:
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _counts(touches: Touches | None, traces: Iterable[str] = ()) -> dict[str, object]:
    if touches is None:
        return {"pods": 0, "ids": 0, "distinct": 0, "oldest": None, "controls": "[]", "traces": ""}
    controls = [[control.seq, control.shard, control.payload] for control in touches.controls]
    return {
        "pods": touches.pods,
        "ids": touches.ids,
        "distinct": touches.table.num_rows,
        "oldest": touches.oldest,
        "controls": json.dumps(controls),
        "traces": " ".join(traces),
    }


def _summary(touches: Touches | None, applied: Applied, traces: Iterable[str] = ()) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([_summed(touches, applied, traces)], schema=_SUMMARY)


def _summed(touches: Touches | None, applied: Applied, traces: Iterable[str] = ()) -> dict[str, Any]:
    return {
        **_counts(touches, traces),
        "written": applied.written,
        "deleted": applied.deleted,
        "repeated": applied.repeated,
        "note": applied.note,
    }


GARBAGE_PER_STEP = 100_000  # stale ids per request to the downstream: bounds the driver's memory
_FRUITLESS_STEPS = 10  # steps of garbage collection after which the downstream may still return the same ids
TASKS_AFTER_TRANSFORM = 8  # tasks that write what a transform returned; a repeated task is recognised by it

log = get_logger("replicad.spark")


@dataclass(slots=True)
class BatchRunner:
    """Runs micro-batches, one after another, and adds up their reports.

    `busy`: a batch is running. `error` is the exception that ended the last batch, if any. The mark PARKED of
    `checkpoint` is removed when the second batch starts: the first batch is then in Spark's commit log. `send_report`
    sends each report to the daemon. `suspects`: shards whose ids are parked while their tables cannot be read.
    `unreadable` has the shards of the batch that failed because of such tables. `term` asks for the term of the lease.
    `span`, a `record_batch` of this pipeline, records a batch as a span. `small` reads the pods of small batches; None:
    every batch is a Spark job.
    """

    enricher: Enricher
    sink: Sink
    shape: Shape
    transform: Callable[[DataFrame], DataFrame] | None = None
    on_batch: Callable[[BatchReport, PipelineResult], None] | None = None
    result: PipelineResult = field(default_factory=PipelineResult)
    checkpoint: Checkpoint | None = None
    send_report: Callable[[BatchReport], None] | None = None
    span: Callable[..., None] | None = None
    error: BaseException | None = None
    busy: bool = False
    first: int | None = None  # number of the first batch since the start
    suspects: SuspectShards | None = None
    unreadable: dict[int, str] = field(default_factory=dict)
    term: Callable[[], int] | None = None
    small: SmallBatches | None = None
    _unmarked: bool = False
    _done: int | None = None  # the last batch that ended well

    def __call__(self, pods: DataFrame, number: int) -> None:
        """Run one micro-batch of the source's rows (with payloads)."""
        started = time.monotonic()
        self.busy = True
        if self.first is None:
            self.first = number
        else:
            self.unmark()
        try:
            plan = None if self.checkpoint is None else self.checkpoint.plan(number)
            batch = self._identified(pods.sparkSession, number, plan)
            outcome = self._run_small(batch, plan)
            if outcome is None:
                with self._readable(pods) as readable:
                    outcome = self._run(readable, batch)
            garbage = self._collect_garbage(pods.sparkSession, batch, outcome.controls)
        except BaseException as error:
            self.error = error
            if self.span is not None:
                self.span(time.monotonic() - started, 0, (), failure=str(explain(error)))
            if isinstance(explain(error), TableUnreadable):
                self._find_unreadable(pods)
            raise
        finally:
            self.busy = False
        self._done = number
        if not outcome.pods:  # Spark also makes batches without data
            return
        report = BatchReport(
            number=number,
            pods=outcome.pods,
            ids=outcome.ids,
            distinct=outcome.distinct,
            written=outcome.written + garbage.written,
            deleted=outcome.deleted + garbage.deleted,
            garbage=garbage.ids,
            repeated=outcome.repeated,
            seconds=time.monotonic() - started,
            lag=None if outcome.oldest is None else max(0.0, time.time() - outcome.oldest),
        )
        if self.span is not None:
            self.span(report.seconds, report.ids, outcome.traces)
        self.result = self.result.plus(report)
        log.info("batch_done", **report.counts())
        if self.send_report is not None:
            self.send_report(report)
        if self.on_batch is not None:
            self.on_batch(report, self.result)

    def _identified(self, spark: SparkSession, number: int, plan: BatchPlan | None) -> BatchId:
        """The batch as downstreams know it.

        Raises:
            DownstreamError: the downstream was put back to a state before the batch that this run wrote last.
        """
        query = _query_id(spark)
        if self.checkpoint is None or plan is None:
            return BatchId(query, number)
        name = query + self.checkpoint.recorded_as().suffix
        term = self.term() if self.sink.fenced and self.term is not None else 0
        batch = BatchId(name, number, mark=plan.mark, last_pod=last_pod(plan.end), term=term)
        last = self.sink.last_batch(batch.query)
        if last is not None and self._done is not None and (last.restored or last.whole < self._done):
            raise DownstreamError(
                f"the downstream was restored while the pipeline ran: it has batch {last.whole} of this query, and "
                f"batch {self._done} was written; start with --rebuild, which schedules a backfill of all rows"
            )
        return batch

    def close(self) -> None:
        """Close the connections to daemons."""
        if self.small is not None:
            self.small.close()

    def unmark(self) -> None:
        """Remove the mark PARKED: no batch will be replayed that lacks parked pods. Safe to repeat."""
        if self.checkpoint is not None and not self._unmarked:
            self.checkpoint.remove(PARKED)
            self._unmarked = True

    @contextmanager
    def _readable(self, pods: DataFrame) -> Iterator[DataFrame]:
        """The pods of shards whose tables can be read. The others are parked."""
        if self.suspects is None or not self.suspects.reasons:
            yield pods
            return
        pods = pods.persist()
        try:
            readable, parked = self.suspects.take_out(pods, self.enricher)
            self._unmarked = self._unmarked and not parked
            yield readable
        finally:
            pods.unpersist()

    def _find_unreadable(self, pods: DataFrame) -> None:
        try:
            shards = [row[0] for row in pods.select("shard").distinct().collect()]
            self.unreadable = self.enricher.unreadable(sorted(shards))
        except Exception as error:  # noqa: BLE001 - the next try looks again
            log.warning("shards_unknown", error=str(explain(error)))

    # --- a step on the driver ---

    def _run_small(self, batch: BatchId, plan: BatchPlan | None) -> StepResult | None:
        """Run a small batch without a Spark job. None: it must be one."""
        if self.small is None or plan is None or self.transform is not None:
            return None
        if self.suspects is not None and self.suspects.reasons:
            return None
        touches = self.small.read(batch.number, plan)
        return None if touches is None else self._write_small(touches, batch)

    def _write_small(self, touches: list[Touches], batch: BatchId, purged: int | None = None) -> StepResult | None:
        """Write what each task of a step would write, with its number. None: a Spark job must do it."""
        assert self.small is not None
        enricher, sink = replace(self._enricher_of(purged), patience=PATIENCE), self.sink.impatient(PATIENCE)
        rows = SmallRows()
        try:
            looked_up = [LookUps(enricher, task.table) for task in touches]
            changes = {
                number: rows.held(looked_up[number]) for number, task in enumerate(touches) if task.table.num_rows
            }
            applied, deleted = sink.write_small(self.shape, batch, changes)
        except NotSmall:
            self.small.measured(rows.size, rows.ids)
            return None
        except ReplicadError as error:  # the job meets the same, or tries it again as Spark is told to
            log.debug("batch_not_small", batch=batch.number, error=str(error))
            return None
        self.small.measured(rows.size, sum(task.table.num_rows for task in touches))
        done = [
            _summed(task, applied.get(number, Applied()), looked_up[number].traces)
            for number, task in enumerate(touches)
        ]
        outcome = StepResult.of(done)
        return outcome if deleted is None else replace(outcome, deleted=deleted)

    # --- a step as a Spark job ---

    def _run(self, pods: DataFrame, batch: BatchId, purged: int | None = None) -> StepResult:
        enricher = self._enricher_of(purged)
        if self.transform is None:
            work = run_whole(enricher, self.sink, self.shape, batch)
            outcome = StepResult.of(_collect(pods.mapInArrow(work, SUMMARY_DDL)))
        else:
            outcome = self._run_with_transform(pods, batch, self.transform, enricher)
        deleted = self.sink.commit(batch, outcome.applied)
        return outcome if deleted is None else replace(outcome, deleted=deleted)

    def _enricher_of(self, purged: int | None) -> Enricher:
        return self.enricher if purged is None else replace(self.enricher, purged=frozenset({purged}))

    def _run_with_transform(
        self, pods: DataFrame, batch: BatchId, transform: Callable[[DataFrame], DataFrame], enricher: Enricher
    ) -> StepResult:
        enriched = pods.mapInArrow(run_enrichment(enricher), spark_schema(enriched_schema(enricher))).persist()
        try:
            is_row = F.col(KIND).isin(WRITE, DELETE)
            touched = enriched.where(is_row).select("_shard", self.shape.id, "_seq")
            writes = transform(enriched.where(F.col(KIND) == WRITE).drop(KIND, NOTE)).select(*self.shape.schema.names)
            both = writes.withColumn(KIND, F.lit(WRITE)).unionByName(
                touched.withColumn(KIND, F.lit(DELETE)), allowMissingColumns=True
            )
            work = run_sink(self.sink, self.shape, batch, TASKS_AFTER_TRANSFORM)
            placed = both.repartition(TASKS_AFTER_TRANSFORM, "_shard")
            placed = placed.sortWithinPartitions("_shard", self.shape.id, KIND)
            rows = _collect(placed.mapInArrow(work, SUMMARY_DDL))
            notes = enriched.where(F.col(KIND) == STATISTICS).select(NOTE).collect()
            blank = {"written": 0, "deleted": 0, "repeated": False, "note": ""}
            return StepResult.of([*rows, *({**json.loads(row[0]), **blank} for row in notes)])
        finally:
            enriched.unpersist()

    # --- garbage ---

    def _collect_garbage(self, spark: SparkSession, batch: BatchId, controls: tuple[Control, ...]) -> _Garbage:
        """After the end of a backfill, treat the ids that the downstream holds from before it like touches."""
        done = _Garbage()
        for control in controls:
            log.info("control_pod", kind=control.kind, shard=control.shard, seq=control.seq)
            if control.start_seq is not None:
                self._collect_shard(spark, batch, control, done)
        return done

    def _collect_shard(self, spark: SparkSession, batch: BatchId, control: Control, done: _Garbage) -> None:
        assert control.start_seq is not None
        seen: pa.Array | None = None
        fruitless, settled = 0, False
        if (why := self.enricher.unreadable([control.shard])) and not control.purges:
            log.warning("garbage_kept", shard=control.shard, why=why[control.shard])
            return
        while True:
            stale = self.sink.stale_ids(self.shape, control.shard, control.start_seq, GARBAGE_PER_STEP)
            if stale is None:
                log.warning("garbage_kept", shard=control.shard, why="the downstream cannot list stale ids")
                return
            if not len(stale):
                if settled or not self.sink.settle:
                    return
                settled = True
                time.sleep(self.sink.settle)
                continue
            settled = False
            done.step += 1
            step = replace(batch, step=done.step)
            outcome = self._touch(spark, step, control, stale)
            if outcome.repeated:  # the step was done before a crash, with other ids
                continue
            fruitless = fruitless + 1 if seen is not None and stale.equals(seen) else 0
            if fruitless >= _FRUITLESS_STEPS:
                raise DownstreamError(
                    f"the downstream still lists {len(stale)} stale ids of shard {control.shard}, e.g. {stale[0]}, "
                    "after they were written or deleted; does it store _seq with its rows, and is `settle` long enough?"
                )
            if self.sink.settle and fruitless:
                time.sleep(self.sink.settle)
            seen = stale
            done.ids += len(stale)
            done.written += outcome.written
            done.deleted += outcome.deleted

    def _touch(self, spark: SparkSession, step: BatchId, control: Control, ids: pa.Array) -> StepResult:
        """Treat ids as the ids of one pod of operation G, in one task."""
        row = {"seq": control.seq, "op": "G", "shard": control.shard, "ids": ids.to_pylist()}
        keys = TEXT if pa.types.is_string(ids.type) else BIGINT
        pod = pa.Table.from_pylist([{**row, "payload": None, "ts": None}], schema=pods_schema(payload=True, keys=keys))
        purged = control.shard if control.purges else None
        done = None
        if self.small is not None and self.transform is None and len(ids) <= self.small.most_ids:
            done = self._write_small([collect(pod.to_batches())], step, purged)
        return self._run(spark.createDataFrame(pod).coalesce(1), step, purged) if done is None else done


@dataclass(slots=True)
class _Garbage:
    step: int = 0
    ids: int = 0
    written: int = 0
    deleted: int = 0


def transform_changes(
    spark: SparkSession, transform: Callable[[DataFrame], DataFrame], shape: Shape, changes: EnrichedRows
) -> EnrichedRows:
    """The changes after the transform, on the driver, without the deletes of rows that it leaves out."""
    rows = transform(spark.createDataFrame(changes.writes)).select(*shape.schema.names).toArrow()
    return EnrichedRows(conform(rows, shape.schema), changes.deletes)


def _collect(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in frame.collect()]


def _query_id(spark: SparkSession) -> str:
    """The query's id, which is in the checkpoint and survives restarts."""
    found = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not found:
        raise UsageError("not within a streaming query: Spark has no local property sql.streaming.queryId")
    return str(found)


def spark_schema(schema: pa.Schema) -> Any:
    """Convert an Arrow schema to Spark's."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - needs pandas, which is slow to import

    return from_arrow_schema(schema)
