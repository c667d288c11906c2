"""Convert pods into touches: the ids of a micro-batch, each once per shard. Knows neither databases nor Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.client.requests import garbage_before


def touch_schema(ids: pa.DataType) -> pa.Schema:
    """The columns of touches, for ids of this type: int64, or string (tubes/keys.py)."""
    return pa.schema([("shard", pa.int32()), ("id", ids), ("seq", pa.int64())])


TOUCH_SCHEMA = touch_schema(pa.int64())


_FEW = 200  # touches below which Arrow's grouping takes longer than a dictionary


@dataclass(frozen=True, slots=True)
class Control:
    """A control pod: it has no ids; its payload marks a step of a backfill of the shard."""

    seq: int
    shard: int
    payload: Any

    @property
    def kind(self) -> str:
        """`backfill_start`, `backfill_end`, `backfill_schedule`; empty if the payload has another form."""
        found = self.payload.get("type") if isinstance(self.payload, dict) else None
        return found if isinstance(found, str) else ""

    @property
    def start_seq(self) -> int | None:
        """Where the backfill began that this pod ends. Rows downstream with a lower `_seq` are garbage."""
        return garbage_before(self.payload)

    @property
    def purges(self) -> bool:
        """Whether all rows of the shard are garbage if there is no table for it: `replicad tubes purge`."""
        return isinstance(self.payload, dict) and self.payload.get("purge") is True


@dataclass(frozen=True, slots=True)
class Touches:
    """The work of one task of a micro-batch. `ids` counts all ids; `table` has each once per shard.

    `table` has the columns shard, id, seq (the highest seq that touched the id), sorted by shard and id.
    `oldest` is when the oldest regular pod was made, in seconds since the epoch; None without any.
    """

    table: pa.Table
    controls: tuple[Control, ...]
    pods: int
    ids: int
    oldest: float | None


def collect(batches: Iterable[pa.RecordBatch]) -> Touches:
    """Convert rows of the source (seq, op, shard, ids, payload, ts) into touches."""
    parts: list[pa.Table] = []
    controls: list[Control] = []
    pods = ids = 0
    oldest: float | None = None
    for batch in batches:
        pods += batch.num_rows
        flat = pc.list_flatten(batch.column("ids"))
        ids += len(flat)
        rows = pc.list_parent_indices(batch.column("ids"))
        columns = [batch.column("shard").take(rows), flat, batch.column("seq").take(rows)]
        parts.append(pa.Table.from_arrays(columns, schema=touch_schema(flat.type)))
        controls.extend(_controls(batch))
        regular = batch.filter(pc.not_equal(batch.column("op"), "B"))
        first = pc.min(regular.column("ts")).as_py()
        if first is not None:
            oldest = min(oldest or first.timestamp(), first.timestamp())
    table = pa.concat_tables(parts) if parts else TOUCH_SCHEMA.empty_table()
    return Touches(deduplicate(table), tuple(controls), pods, ids, oldest)


def deduplicate(touches: pa.Table) -> pa.Table:
    """Each (shard, id) once with its highest seq. Sorted, so that a query reads neighbours in the table's index."""
    if touches.num_rows < _FEW:
        newest: dict[tuple[int, Any], int] = {}
        for shard, id_, seq in zip(*(touches.column(name).to_pylist() for name in TOUCH_SCHEMA.names), strict=True):
            newest[shard, id_] = max(seq, newest.get((shard, id_), seq))
        keys = sorted(newest)  # texts by their characters, which is by their bytes
        columns = [[shard for shard, _ in keys], [id_ for _, id_ in keys], [newest[key] for key in keys]]
        return pa.Table.from_arrays(
            [pa.array(column, type) for column, type in zip(columns, touches.schema.types, strict=True)],
            schema=touches.schema,
        )
    if _is_sorted(touches):  # the pods of a backfill are
        return touches
    once = touches.group_by(["shard", "id"]).aggregate([("seq", "max")])
    once = once.rename_columns([name.removesuffix("_max") for name in once.column_names]).select(TOUCH_SCHEMA.names)
    return once.sort_by([("shard", "ascending"), ("id", "ascending")]).cast(touches.schema)


def _is_sorted(touches: pa.Table) -> bool:
    """Whether touches are of one shard, and their ids ascend."""
    low = pc.min_max(touches.column("shard")).as_py()
    ids = touches.column("id")
    return low["min"] == low["max"] and bool(pc.all(pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py())


def chunks_by_shard(touches: pa.Table, size: int) -> Iterator[tuple[int, pa.Table]]:
    """Split sorted touches into pieces of one shard and at most `size` ids."""
    shards = touches.column("shard")
    at = 0
    for counted in pc.value_counts(shards.combine_chunks()).to_pylist():  # in order of appearance: sorted
        for start in range(at, at + counted["counts"], size):
            yield counted["values"], touches.slice(start, min(size, at + counted["counts"] - start))
        at += counted["counts"]


def _controls(batch: pa.RecordBatch) -> Iterator[Control]:
    empty = pc.equal(pc.fill_null(pc.list_value_length(batch.column("ids")), 0), 0)
    for row in batch.filter(empty).select(["seq", "shard", "payload"]).to_pylist():
        try:
            payload = json.loads(row["payload"]) if row["payload"] is not None else None
        except ValueError:
            payload = row["payload"]
        yield Control(row["seq"], row["shard"], payload)
