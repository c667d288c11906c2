"""The pipeline's work in Spark's tasks: Arrow batches of pods in, one summary row per task out.

Without a transform, `run_whole` does all of it. With a transform, `run_enrichment` yields rows, Spark runs the
transform on them, and `run_sink` writes its result. Everything here is pickled to the executors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from replicad.spark.enrich import Changes, Enricher, conform
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink
from replicad.spark.touches import Touches, collect

Batches = Iterator[pa.RecordBatch]

SUMMARY_DDL = (
    "pods bigint, ids bigint, `distinct` bigint, oldest double, controls string, "
    "written bigint, deleted bigint, repeated boolean, note string"
)
_ARROW = {"bigint": pa.int64(), "double": pa.float64(), "string": pa.string(), "boolean": pa.bool_()}
_SUMMARY = pa.schema(
    [(name.strip("`"), _ARROW[kind]) for name, kind in (column.split() for column in SUMMARY_DDL.split(", "))]
)
KIND, NOTE = "_kind", "_note"
WRITE, DELETE, STATISTICS = "W", "D", "S"
_TASK_BITS = 16  # of a task's number; the bits above are the number of tasks that write after a transform


@dataclass(frozen=True, slots=True)
class LookUps(Iterable[Changes]):
    """The changes for some touches. Every iteration looks up the rows again."""

    enricher: Enricher
    touches: pa.Table

    def __iter__(self) -> Iterator[Changes]:
        return self.enricher.changes(self.touches)


def run_whole(enricher: Enricher, sink: Sink, shape: Shape, batch: BatchId) -> Callable[[Batches], Batches]:
    """Deduplicate, look up, write: for `mapInArrow` on the source's rows."""

    def work(batches: Batches) -> Batches:
        touches = collect(batches)
        applied = Applied()
        if touches.table.num_rows:
            applied = sink.apply(shape, batch, _task_number(), LookUps(enricher, touches.table))
        yield _summary(touches, applied)

    return work


def enriched_schema(enricher: Enricher) -> pa.Schema:
    """The schema of what `run_enrichment` yields: the columns of the rows, `_shard`, `_seq`, `_kind`, `_note`."""
    return pa.schema([*enricher.schema, (KIND, pa.string()), (NOTE, pa.string())])


def run_enrichment(enricher: Enricher) -> Callable[[Batches], Batches]:
    """Deduplicate and look up: rows to write, keys to delete, and the task's counts, distinguished by `_kind`."""
    schema = enriched_schema(enricher)

    def labelled(table: pa.Table, kind: str, note: str | None = None) -> Batches:
        count = table.num_rows
        table = table.append_column(KIND, pa.repeat(pa.scalar(kind), count))
        table = table.append_column(NOTE, pa.repeat(pa.scalar(note, pa.string()), count))
        yield from conform(table, schema).to_batches(max_chunksize=20_000)

    def work(batches: Batches) -> Batches:
        touches = collect(batches)
        for change in enricher.changes(touches.table):
            yield from labelled(change.writes, WRITE)
            yield from labelled(change.deletes, DELETE)
        counts = json.dumps(_counts(touches))
        yield from labelled(pa.table({"_shard": pa.array([0], pa.int32())}), STATISTICS, counts)

    return work


def run_sink(sink: Sink, shape: Shape, batch: BatchId, tasks: int) -> Callable[[Batches], Batches]:
    """Write what a transform returned (`_kind` W) and delete the touched ids (`_kind` D) that it did not return.

    All rows of a shard are in one of the `tasks` tasks.
    """

    def work(batches: Batches) -> Batches:
        held = list(batches)
        if not held:
            return
        rows = pa.Table.from_batches(held)
        kind = rows.column(KIND)
        writes = conform(rows.filter(pc.equal(kind, WRITE)), shape.schema)
        touched = conform(rows.filter(pc.equal(kind, DELETE)), shape.keys)
        absent = touched.join(writes.select(["_shard", shape.id]), keys=["_shard", shape.id], join_type="left anti")
        changes = [Changes(writes, conform(absent, shape.keys))]
        applied = sink.apply(shape, batch, tasks << _TASK_BITS | _task_number(), changes)
        yield _summary(None, applied)

    return work


def _task_number() -> int:
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _counts(touches: Touches | None) -> dict[str, object]:
    if touches is None:
        return {"pods": 0, "ids": 0, "distinct": 0, "oldest": None, "controls": "[]"}
    controls = [[control.seq, control.shard, control.payload] for control in touches.controls]
    return {
        "pods": touches.pods,
        "ids": touches.ids,
        "distinct": touches.table.num_rows,
        "oldest": touches.oldest,
        "controls": json.dumps(controls),
    }


def _summary(touches: Touches | None, applied: Applied) -> pa.RecordBatch:
    row = {
        **_counts(touches),
        "written": applied.written,
        "deleted": applied.deleted,
        "repeated": applied.repeated,
        "note": applied.note,
    }
    return pa.RecordBatch.from_pylist([row], schema=_SUMMARY)
