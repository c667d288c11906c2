"""The pipeline from a tube to its downstreams: enrichment against its floor, backfills, and the time of one change.

Everything is at work: Postgres, the daemon, the JVM and the Python workers, on the same processors.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc

from bench.report import Figure, Spread, amount, latency, percentile, rates
from bench.spark import Bench, bench_on_spark
from bench.system import Options, free_port
from replicad.spark import pipeline
from replicad.spark.database import connection
from replicad.spark.enrich import EnrichedRows, Enricher
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import Known

ROWS = 200_000  # that are enriched
BACKFILL = 1_000_000  # rows that are put into each downstream
TOUCHES = 100  # of which each is timed, one after another
GOAL = 0.5  # seconds from an UPDATE to its row, for 99 of 100
_spawn = get_context("spawn")


def run(options: Options) -> list[Figure]:
    """Start Spark once, then measure."""
    with bench_on_spark() as bench:
        _make_tables(bench, options.sized(ROWS), options.sized(BACKFILL))
        return [
            _enrichment(options, bench),
            *_backfills(options, bench),
            _follow(options, bench),
        ]


def _make_tables(bench: Bench, rows: int, backfill: int) -> None:
    """Tables in two shards, each with a tube of its own: `items`, whose rows are touched, and `stock`."""
    for name, count in (("items", rows), ("stock", backfill)):
        bench.servers.sql(f"SELECT tube.tube_ensure_exists('{name}', 2)")
        for shard in (1, 2):
            table = f"shard_{shard:04d}.{name}"
            bench.servers.sql(
                f"CREATE SCHEMA IF NOT EXISTS shard_{shard:04d}",
                f"CREATE TABLE {table} (id bigint PRIMARY KEY, name text, price float8, at date)",
                f"INSERT INTO {table} SELECT n, 'item ' || n, n, now() FROM generate_series(1, {count // 2}) n",
                f"VACUUM ANALYZE {table}",
                f"SELECT tube.tube_table_ensure_attached('{name}', '{table}')",
            )
    time.sleep(2)  # the daemon looks for new tubes once a second


# --- enrichment ---


class Nowhere:
    """A downstream that takes everything and keeps nothing."""

    def write(self, rows: pa.Table) -> None:
        """Nothing."""

    def delete(self, shard: int, ids: Sequence[int]) -> None:
        """Nothing."""

    def stale_ids(self, shard: int, before: int) -> list[int]:  # noqa: ARG002 - as the pipeline calls it
        """None."""
        return []


@dataclass(frozen=True, slots=True, repr=False)
class Made(Enricher):
    """Rows of the same form, made up in the task: all that enrichment costs but for Postgres."""

    def _look_up(self, shard: int, touched: pa.Table) -> EnrichedRows:
        ids = touched.column("id").combine_chunks()
        columns = {
            "id": ids,
            "name": pc.cast(ids, pa.string()),
            "price": pc.cast(ids, pa.float64()),
            "at": pa.nulls(len(ids), pa.date32()),
            "_shard": pa.repeat(pa.scalar(shard, pa.int32()), len(ids)),
            "_seq": touched.column("seq").combine_chunks(),
        }
        writes = pa.table([columns[name] for name in self.schema.names], schema=self.schema)
        return EnrichedRows(writes, touched.slice(0, 0).rename_columns(["_shard", "id", "_seq"]))


def _enrichment(options: Options, bench: Bench) -> Figure:
    """The same touches through the same pipeline, in turn with rows out of Postgres and with rows out of nothing."""
    rows = options.sized(ROWS)
    real, floor = pipeline.make_enricher, _made_enricher
    mine: list[float] = []
    made: list[float] = []
    for number in range(options.runs + 1):  # the first one warms the workers up
        for found, enricher in ((mine, real), (made, floor)):
            for shard in (1, 2):
                bench.servers.sql(f"SELECT shard_{shard:04d}.items_touch(array_agg(id)) FROM shard_{shard:04d}.items")
            sink = CustomSink(Nowhere())
            config = _config(bench, "items", sink, f"enrich-{enricher.__name__}", "available_now")
            began = time.monotonic()
            with patch.object(pipeline, "make_enricher", enricher):
                result = pipeline.run(config, bench.spark)
            if result.rows_written != rows:
                raise RuntimeError(f"{result.rows_written} rows were written, not {rows}")
            if number:
                found.append(rows / (time.monotonic() - began))
    return Figure(
        f"{rows} touched rows, query started and ended",
        rates(mine, "rows/s"),
        f"rows made up, no look-up {rates(made, 'rows/s')}",
        Spread.of_ratios(mine, made),
    )


def _made_enricher(config: PipelineConfig, known: Known | None = None) -> Enricher:
    enricher = _real_enricher(config, known)
    return Made(enricher.url, enricher.layout, enricher.chunk)


_real_enricher = pipeline.make_enricher


# --- backfills ---


def _backfills(options: Options, bench: Bench) -> list[Figure]:
    """From the moment in which it is asked for until the downstream has every row and the tube is empty."""
    rows = options.sized(BACKFILL)
    with _index() as index:
        sinks: dict[str, Sink] = {
            "Parquet": ParquetSink(bench.folder / "parquet"),
            "a Postgres table": PostgresSink(bench.servers.url, "dw.stock"),
            "Delta": DeltaSink(str(bench.folder / "delta")),
            "an index that forgets, over HTTP": BulkSink(f"http://127.0.0.1:{index}", "stock"),
            "nothing, a class of one's own": CustomSink(Nowhere()),
        }
        return [_backfill(bench, rows, label, sink) for label, sink in sinks.items()]


def _backfill(bench: Bench, rows: int, label: str, sink: Sink) -> Figure:
    began = 0.0

    def until(_: PipelineResult) -> bool:
        nonlocal began
        if not began:
            if not bench.spark.streams.active:
                return False
            began = time.monotonic()
            bench.servers.sql("SELECT tube.tube_backfill_schedule('stock', 'id', 1, 2)")
            return False
        return bench.servers.sql("SELECT count(*) FROM (SELECT FROM tube.stock LIMIT 1) AS x") == "0"

    name = "".join(filter(str.isalpha, label))
    result = pipeline.run(_config(bench, "stock", sink, f"backfill-{name}", 0.0), bench.spark, until)
    took = time.monotonic() - began
    if result.rows_written != rows:
        raise RuntimeError(f"{result.rows_written} rows were written, not {rows}")
    return Figure(f"backfill of {rows} rows into {label}", f"{took:.1f} s, {amount(rows / took, 'rows/s')}")


@contextmanager
def _index() -> Iterator[int]:
    """The port of a process that takes documents as Elasticsearch does, and keeps none."""
    port = free_port()
    here, there = _spawn.Pipe()
    index = _spawn.Process(target=serve_index, args=(there, port), daemon=True)
    index.start()
    here.recv()
    try:
        yield port
    finally:
        index.kill()
        index.join()


def serve_index(pipe: Connection, port: int) -> None:
    """The work of the index's process."""

    async def serve() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", port)
        pipe.send("ready")
        async with server:
            await server.serve_forever()

    asyncio.run(serve())


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := (await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""):
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        body = await reader.readexactly(int(length.partition(b":")[2]))
        answer = b"{}"
        if b"/_bulk" in head.split(b"\r\n", 1)[0]:
            items = (body.count(b'\n{"index"') + body.startswith(b'{"index"')) * [b'{"index":{"status":200}}']
            answer = b'{"items":[' + b",".join(items) + b"]}"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        await writer.drain()


# --- a single change ---


def _follow(options: Options, bench: Bench) -> Figure:
    """One touch after another, each from before its commit until its row is downstream."""
    sink = PostgresSink(bench.servers.url, "dw.items")
    seconds: list[float] = []
    done = threading.Event()

    def touch_all() -> None:
        try:
            _wait_for_table(bench, "dw.items")
            for number in range(max(10, options.sized(TOUCHES))):
                seconds.append(_touched(bench, number))
                time.sleep(0.05)
        finally:
            done.set()

    thread = threading.Thread(target=touch_all)
    thread.start()
    pipeline.run(_config(bench, "items", sink, "follow", 0.0), bench.spark, lambda _: done.is_set())
    thread.join()
    return Figure(
        "from an UPDATE to its row in a Postgres table, p50 / p99",
        latency(seconds[5:]),
        f"goal for p99 {GOAL * 1000:.0f} ms",
        Spread.of([percentile(seconds[5:], 0.99) / GOAL]),
        at_most=1.0,
    )


def _wait_for_table(bench: Bench, name: str) -> None:
    """The pipeline makes the table when it starts."""
    deadline = time.monotonic() + 60
    with connection(bench.servers.url).cursor() as cursor:
        while time.monotonic() < deadline:
            cursor.execute("SELECT to_regclass($1) IS NOT NULL", parameters=(name,))
            if cursor.fetchone()[0]:
                return
            time.sleep(0.1)
    raise RuntimeError(f"the pipeline has not made {name} within 60 s")


def _touched(bench: Bench, number: int) -> float:
    """Change one row; returns the seconds until it is downstream (30 at most)."""
    with connection(bench.servers.url).cursor() as cursor:
        began = time.monotonic()
        cursor.execute("UPDATE shard_0001.items SET name = $1 WHERE id = $2", parameters=(f"new {number}", number + 1))
        arrived = False
        while not arrived and time.monotonic() < began + 30:
            cursor.execute(
                "SELECT EXISTS (SELECT FROM dw.items WHERE _shard = 1 AND id = $1 AND name = $2)",
                parameters=(number + 1, f"new {number}"),
            )
            arrived = cursor.fetchone()[0]
            time.sleep(0.002)
        return time.monotonic() - began


def _config(bench: Bench, tube: str, sink: Sink, name: str, trigger: str | float) -> PipelineConfig:
    return PipelineConfig(
        tube=tube,
        port=bench.daemon.port,
        database=bench.servers.url,
        table=f"shard_{{shard:04d}}.{tube}",
        sink=sink,
        checkpoint=bench.folder / "checkpoints" / name,
        trigger=trigger,
    )
