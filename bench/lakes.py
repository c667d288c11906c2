"""Lakes: small batches into a large table, in each form that a pipeline can keep, for an hour of simulated time.

Each batch changes 20 rows at random places, and the clock is set on by a second. Bytes are those that the files have
when they are written, log included. A reader reads every row, and then sums up one column, against the same rows in a
table that was written at once.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import Options
from replicad.spark.enrich import EnrichedRows
from replicad.spark.lake import Lake
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import BatchId, Shape, Sink
from replicad.spark.sinks.delta import CHANGES, ROWS, DeltaSink
from replicad.spark.sinks.delta_upkeep import TableUpkeep
from replicad.spark.sinks.parquet import ParquetSink

TABLE = 2_000_000  # rows
SECONDS = 3600  # of simulated time, a batch in each
CHANGED = 20  # rows of a batch
LOADED = 200_000  # rows of a batch of the backfill
READS = 5
SHAPE = Shape(
    pa.schema(
        [
            ("id", pa.int64()), ("name", pa.string()), ("mail", pa.string()), ("town", pa.string()),
            ("price", pa.float64()), ("at", pa.timestamp("us")), ("_shard", pa.int32()), ("_seq", pa.int64()),
        ]
    ),
    "id",
)  # fmt: skip
NOTHING = pa.schema([("_shard", pa.int32()), ("id", pa.int64()), ("_seq", pa.int64())]).empty_table()


def run(options: Options) -> list[Figure]:
    """Each form in turn; at most 300 batches for one that writes the files anew, which take long."""
    rows, batches = options.sized(TABLE), options.sized(SECONDS)
    found = []
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        folder = Path(name)
        compacted = _Lake(folder / "compacted", CHANGES)
        compacted.load(rows)
        for label, mode, most in (("changes", CHANGES, batches), ("rows", ROWS, 300), ("parquet", None, 300)):
            if options.picks(label):
                lake = _Lake(folder / label, mode)
                lake.load(rows)
                found += lake.play(label, rows, min(batches, most), compacted)
    return found


def _rows(ids: list[int] | range, seq: int) -> pa.Table:
    """Rows of about 100 bytes."""
    chance, count = np.random.default_rng(seq), len(ids)
    first, last, town = (
        pa.array(words).take(pa.array(chance.integers(len(words), size=count))) for words in (_FIRST, _LAST, _TOWNS)
    )
    mail = pc.cast(pa.array(chance.integers(10**14, 10**15, size=count)), pa.string())
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pc.binary_join_element_wise(first, last, " "),
            "mail": pc.binary_join_element_wise(mail, pa.scalar("@example.org"), ""),
            "town": town,
            "price": chance.integers(100_000, size=count) / 100,
            "at": pa.array(1_700_000_000_000_000 + chance.integers(1 << 44, size=count), pa.timestamp("us")),
            "_shard": pa.repeat(pa.scalar(1, pa.int32()), count),
            "_seq": pa.repeat(pa.scalar(seq, pa.int64()), count),
        },
        schema=SHAPE.schema,
    )


_FIRST = ("Ada", "Bela", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Imre", "Juana")
_LAST = ("Abara", "Berg", "Costa", "Dubois", "Eriksen", "Fischer", "Garcia", "Horvath", "Ivanov", "Jansen")
_TOWNS = tuple(f"town {number}" for number in range(1000))


@dataclass(slots=True)
class _Lake:
    folder: Path
    mode: str | None  # None: the folder of Parquet files
    at: float = field(default_factory=time.time)
    number: int = 0
    sink: Sink = field(init=False)
    upkeep: TableUpkeep | None = None

    def __post_init__(self) -> None:
        if self.mode is None:
            self.sink = ParquetSink(self.folder, keep=60)
        else:
            made = DeltaSink(str(self.folder), mode=self.mode, now=lambda: self.at)
            self.sink, self.upkeep = made, TableUpkeep(made, SHAPE)
        self.sink.prepare(SHAPE)

    def put(self, writes: pa.Table) -> None:
        batch = BatchId("bench", self.number)
        self.sink.commit(batch, [self.sink.apply(SHAPE, batch, 0, [EnrichedRows(writes, NOTHING)])])
        self.number += 1

    def load(self, rows: int) -> None:
        for begin in range(0, rows, LOADED):
            self.put(_rows(range(begin, min(rows, begin + LOADED)), begin))
        self.at += 3600
        self.tidy()

    def tidy(self) -> None:
        if self.upkeep is not None:
            while self.upkeep.step() is not None:
                pass

    def play(self, label: str, rows: int, batches: int, compacted: _Lake) -> list[Figure]:
        base = _size(self.folder)
        chance = random.Random(1)
        process = psutil.Process()
        seconds, disk, changed = [], [base], 0
        written, cpu = _written(process), sum(process.cpu_times()[:2])
        made = 0
        for number in range(batches):
            news = _rows(sorted(chance.sample(range(rows), CHANGED)), number + rows)
            changed += news.nbytes
            self.at += 1
            began = time.monotonic()
            self.put(news)
            seconds.append(time.monotonic() - began)
            made += 1
            self.tidy()
            if number % 50 == 0:
                disk.append(_size(self.folder))
        wrote, cpu = _written(process) - written, sum(process.cpu_times()[:2]) - cpu
        form = f"{label}, {rows:,} rows, {batches} batches of {CHANGED}"
        figures = [
            Figure(
                f"{form}: bytes written to bytes changed",
                f"{amount(wrote / made, 'B')} a batch",
                f"{changed // made} B changed",
                Spread.of([wrote / changed]),
                at_most=10,
            ),
            Figure(f"{form}: most disk to the base", amount(max(disk), "B"), amount(base, "B"),
                   Spread.of([max(disk) / base]), at_most=2),
            Figure(f"{form}: a batch, p50 / p99", latency(seconds),
                   f"{cpu / made * 1000:.0f} ms of a processor, with upkeep",
                   Spread.of([percentile(seconds, 0.5)]), at_most=1),
        ]  # fmt: skip
        for name, read in _readers():
            mine, theirs = [], []
            for _ in range(READS):
                mine.append(_timed(read, self))
                theirs.append(_timed(read, compacted))
            figures.append(
                Figure(
                    f"{form}: {name}",
                    f"{min(mine) * 1000:.0f} ms",
                    f"compacted {min(theirs) * 1000:.0f} ms",
                    Spread.of_ratios(mine, theirs),
                    at_most=1.5,
                )
            )
        return figures


def _readers() -> Iterator[tuple[str, Callable[[_Lake], object]]]:
    def table(lake: _Lake) -> pa.Table:
        return parquet.table(lake.folder) if lake.mode is None else Lake(str(lake.folder)).arrow()

    yield "pandas, all rows", lambda lake: table(lake).to_pandas()
    if find_spec("duckdb"):
        duckdb: Any = import_module("duckdb")

        def duck(lake: _Lake, what: str) -> object:
            connection = duckdb.connect()
            if lake.mode is None:
                rows = connection.sql(f"FROM '{lake.folder}/current/*.parquet'")
            else:
                rows = Lake(str(lake.folder)).duckdb(connection)
            return rows.fetch_arrow_table() if what == "all" else rows.aggregate("sum(price)").fetchall()

        yield "DuckDB, all rows", lambda lake: duck(lake, "all")
        yield "DuckDB, a sum", lambda lake: duck(lake, "sum")
    if find_spec("polars"):
        pl: Any = import_module("polars")

        def polar(lake: _Lake) -> Any:
            if lake.mode is None:
                return pl.scan_parquet(f"{lake.folder}/current/*.parquet")
            return Lake(str(lake.folder)).polars()

        yield "Polars, all rows", lambda lake: polar(lake).collect()
        yield "Polars, a sum", lambda lake: polar(lake).select(pl.col("price").sum()).collect()


def _timed(read: Callable[[_Lake], object], lake: _Lake) -> float:
    began = time.monotonic()
    read(lake)
    return time.monotonic() - began


def _size(folder: Path) -> int:
    """Bytes on disk; a file with several names once."""
    files = {}
    for path in itertools.chain(folder.rglob("*"), folder.rglob(".*")):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        files[status.st_ino] = status.st_size if path.is_file() else 0
    return sum(files.values())


def _written(process: psutil.Process) -> int:
    """Bytes that this process has passed to write(2)."""
    return int(process.io_counters().write_chars)
