"""A task needs memory for some chunks of rows, however many it gets: no downstream holds all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import psql
from index_server import IndexServer

from replicad.spark import batches
from replicad.spark.batches import DELETE, KIND, WRITE, run_sink
from replicad.spark.database import forget
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink

CHUNK, ROWS, WIDTH = 500, 30_000, 1_000  # a row is a kilobyte
LIMIT = 10_000  # rows in memory at most
KEYS = [("_shard", pa.int32()), ("_seq", pa.int64())]
SHAPE = Shape(pa.schema([("id", pa.int64()), ("text", pa.string()), *KEYS]), "id")


class Nothing:
    def write(self, rows: pa.Table) -> None: ...

    def delete(self, shard: int, ids: Sequence[int]) -> None: ...

    def stale_ids(self, shard: int, before: int) -> list[int]:
        return []


@dataclass
class Rows:
    """Rows of shard 1 and 2 in chunks, as a look-up yields them; `most` is the memory that was used meanwhile."""

    seq: int
    most: int = 0
    begun: int = field(default_factory=pa.total_allocated_bytes)

    def __iter__(self) -> Iterator[EnrichedRows]:
        for start in range(0, ROWS, CHUNK):
            ids = list(range(start, start + CHUNK))
            shard = 1 + 2 * start // ROWS
            columns: list[Any] = [
                pa.array(ids[::-1]),
                pa.array([f"{one:0{WIDTH}}" for one in ids[::-1]]),
                pa.repeat(pa.scalar(shard, pa.int32()), CHUNK),
                pa.repeat(pa.scalar(self.seq, pa.int64()), CHUNK),
            ]
            changes = EnrichedRows(pa.Table.from_arrays(columns, schema=SHAPE.schema), SHAPE.keys.empty_table())
            del columns
            yield changes
            del changes
            self.most = max(self.most, pa.total_allocated_bytes() - self.begun)


@pytest.mark.parametrize("kind", ["parquet", "delta", "postgres", "bulk", "class"])
def test_a_downstream_holds_some_chunks_of_the_rows_of_a_task(database_url: str, tmp_path: Path, kind: str) -> None:
    server = IndexServer()
    sinks: dict[str, Sink] = {
        "parquet": ParquetSink(tmp_path / "lake", rows_per_file=1_000),
        "delta": DeltaSink(str(tmp_path / "delta")),
        "postgres": PostgresSink(database_url, "dw.cities"),
        "bulk": BulkSink(f"http://127.0.0.1:{server.port}", "cities"),
        "class": CustomSink(Nothing()),
    }
    sink = sinks[kind]
    sink.prepare(SHAPE)
    try:
        for number in range(1, 3 if kind == "parquet" else 2):
            gc.collect()
            rows = Rows(number)
            done = sink.apply(SHAPE, BatchId("q", number), 0, rows)
            assert done.written == ROWS
            assert CHUNK * WIDTH // 2 < rows.most < LIMIT * WIDTH, f"{rows.most:,} bytes"
            sink.commit(BatchId("q", number), [done])
    finally:
        server.close()
        forget(database_url)
    if kind == "parquet":
        found = parquet.table(tmp_path / "lake")
        assert sorted(found.column("id").to_pylist()) == list(range(ROWS))
        assert set(found.column("_seq").to_pylist()) == {2}
        sizes = [pa.parquet.read_metadata(file).num_rows for file in parquet.current(tmp_path / "lake")]
        assert min(sizes) >= 1_000
    if kind == "postgres":
        assert psql(database_url, "SELECT count(*) FROM dw.cities") == str(ROWS)


def keys_of(rows: pa.Table) -> list[tuple[int, int]]:
    return list(zip(rows.column("_shard").to_pylist(), rows.column("id").to_pylist(), strict=True))


class Twice(Sink):
    """Goes through the changes twice, as a sink whose first try fails; `most` is the memory that was used meanwhile."""

    def __init__(self) -> None:
        self.most = 0
        self.tries: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def prepare(self, shape: Shape) -> None: ...

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        for _ in range(2):
            written: list[tuple[int, int]] = []
            deleted: list[tuple[int, int]] = []
            for change in changes:
                written += keys_of(change.writes)
                deleted += keys_of(change.deletes)
                self.most = max(self.most, pa.total_allocated_bytes())
            self.tries.append((written, deleted))
        return Applied(len(written), len(deleted))


def transformed(rows: int, of_batch: int, width: int) -> Iterator[pa.RecordBatch]:
    """What Spark hands to a task after a transform that has left out every fifth row."""
    schema = pa.schema([*SHAPE.schema, (KIND, pa.string())])
    ids = [(number // 1000, number, kind) for number in range(rows) for kind in (DELETE, WRITE)]
    ids = [one for one in ids if one[1] % 5 or one[2] == DELETE]
    for start in range(0, len(ids), of_batch):
        yield pa.RecordBatch.from_pylist(
            [
                {"id": id_, "_shard": shard, "_seq": 1, KIND: kind, "text": "x" * width if kind == WRITE else None}
                for shard, id_, kind in ids[start : start + of_batch]
            ],
            schema=schema,
        )


@pytest.mark.parametrize("of_batch", [1, 2, 3, 8])
def test_what_a_transform_returned_is_kept_in_a_file(monkeypatch: pytest.MonkeyPatch, of_batch: int) -> None:
    """Rows of a megabyte, of one task; a touched id and its row may be in two batches of Spark."""
    rows, width = 30, 1 << 20
    monkeypatch.setattr(batches, "KEPT_IN_MEMORY", 2 << 20)
    gc.collect()
    begun, sink = pa.total_allocated_bytes(), Twice()
    [done] = run_sink(sink, SHAPE, BatchId("q", 1), 8)(transformed(rows, of_batch, width))
    expected = [(0, id_) for id_ in range(rows)]
    assert sink.tries == 2 * [([one for one in expected if one[1] % 5], [one for one in expected if not one[1] % 5])]
    assert done.to_pylist()[0]["written"] == len(sink.tries[0][0])
    assert sink.most - begun < rows * width // 2, f"{sink.most - begun:,} bytes"


def test_deletes_and_rows_of_several_shards_after_a_transform() -> None:
    sink = Twice()
    list(run_sink(sink, SHAPE, BatchId("q", 1), 8)(transformed(2_500, 700, 1)))
    expected = [(id_ // 1000, id_) for id_ in range(2_500)]
    assert sink.tries == 2 * [([one for one in expected if one[1] % 5], [one for one in expected if not one[1] % 5])]
    assert list(run_sink(Twice(), SHAPE, BatchId("q", 1), 8)(iter(()))) == []


def test_a_row_without_an_id_costs_no_delete() -> None:
    """A transform has lost the id of a row of the next shard: Spark sorts it to the place behind the touched id."""
    found = [(1, 5, DELETE), (2, None, WRITE), (2, 7, DELETE), (2, 7, WRITE)]
    rows = [{"id": id_, "_shard": shard, "_seq": 1, KIND: kind, "text": "x"} for shard, id_, kind in found]
    schema = pa.schema([*SHAPE.schema, (KIND, pa.string())])
    sink = Twice()
    list(run_sink(sink, SHAPE, BatchId("q", 1), 8)(iter([pa.RecordBatch.from_pylist(rows, schema=schema)])))
    assert sink.tries[0][1] == [(1, 5)]
