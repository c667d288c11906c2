"""A task needs memory for some chunks of rows, however many it gets: no downstream holds all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import psql
from index_server import IndexServer

from replicad.spark.database import forget
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import BatchId, Shape, Sink
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
