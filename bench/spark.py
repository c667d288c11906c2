"""Spark: reading a tube against Spark JDBC reading the same table in order, and the pipeline from commit to downstream.

Everything is at work in every figure: Postgres, the daemon, the JVM and the Python workers, on the same processors.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Figure, Spread, latency, rates
from bench.system import Daemon, Options, System, free_port
from replicad.postgres.embedded import embedded_postgres
from replicad.spark import build_session, pipeline, register
from replicad.spark.database import connection
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink

IDS = 50  # in each pod of the tubes that are read whole
PODS = (1_000_000, 200_000)  # the second shows what Spark's own beginning and end cost; the JVM is warm by then
ROWS = 200_000  # that a pipeline enriches
TOUCHES = 100  # of which each is timed, one after another
READER = "reader"
JDBC = Path("/usr/share/java/postgresql.jar")  # Debian's libpostgresql-jdbc-java


def run(options: Options) -> list[Figure]:
    """Start Spark once, then measure."""
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        folder, tcp = Path(name), str(free_port())  # JDBC knows no Unix sockets
        settings = {"listen_addresses": "127.0.0.1", "port": tcp}
        with embedded_postgres(folder / "postgres", settings) as url, System(url, folder).daemon() as daemon:
            servers = System(url, folder)
            servers.sql(f"CREATE ROLE {READER} LOGIN SUPERUSER PASSWORD '{READER}'")
            more = {"spark.jars": str(JDBC)} if JDBC.exists() else {}
            spark = build_session("bench", log_file=folder / "spark.log", config=more)
            register(spark)
            try:
                return [
                    *(_read(options.sized(pods), options, servers, daemon, spark, tcp) for pods in PODS),
                    *_enrich(options, servers, daemon, spark, folder),
                    _follow(options, servers, daemon, spark, folder),
                ]
            finally:
                spark.stop()


def _read(pods: int, options: Options, servers: System, daemon: Daemon, spark: object, tcp: str) -> Figure:
    """The same action on the same table, in turn: a tube of two partitions, and a query in the order of a tube."""
    servers.sql(
        "SELECT tube.tube_ensure_absent('read')",
        "SELECT tube.tube_ensure_exists('read', 2)",
        "INSERT INTO tube.read (op, shard, ids) SELECT 'U', n % 2, ARRAY(SELECT n::bigint * 50 + i "
        f"FROM generate_series(1, {IDS}) i) FROM generate_series(1, {pods}) n",
        "VACUUM ANALYZE tube.read",
    )
    time.sleep(2)  # the daemon looks for new tubes once a second

    def ours() -> int:
        frame = spark.read.format("replicad").options(port=str(daemon.port), tube="read").load()  # type: ignore[attr-defined]
        return int(frame.selectExpr("sum(size(ids))").collect()[0][0])

    def theirs() -> int:
        query = "(SELECT seq, op, shard, ids, ts FROM tube.read ORDER BY op = 'B', seq) AS pods"
        url = f"jdbc:postgresql://127.0.0.1:{tcp}/postgres?user={READER}&password={READER}"
        # fetchsize: 0 (all at once), 100, 1000 and 10000 rows differ by no more than the noise
        frame = spark.read.jdbc(url, query, properties={"driver": "org.postgresql.Driver", "fetchsize": "10000"})  # type: ignore[attr-defined]
        return int(frame.selectExpr("sum(size(ids))").collect()[0][0])

    mine: list[float] = []
    other: list[float] = []
    for _ in range(options.runs + 1):  # the first one warms the workers up
        mine.append(_rate(ours, pods * IDS))
        if JDBC.exists():
            other.append(_rate(theirs, pods * IDS))
    mine, other = mine[1:], other[1:]
    return Figure(
        f"a tube of {pods} pods of {IDS} ids, two tasks",
        rates(mine, "ids/s"),
        f"Spark JDBC, in order: {rates(other, 'ids/s')}" if other else f"Spark JDBC: no {JDBC}",
        Spread.of_ratios(mine, other) if other else None,
        at_least=2.0,
    )


def _rate(work: Callable[[], int], expected: int) -> float:
    began = time.monotonic()
    found = work()
    if found != expected:
        raise RuntimeError(f"{found} ids came, not {expected}")
    return expected / (time.monotonic() - began)


def _enrich(options: Options, servers: System, daemon: Daemon, spark: object, folder: Path) -> list[Figure]:
    rows = options.sized(ROWS)
    servers.sql(
        "CREATE SCHEMA shard_0001",
        "CREATE SCHEMA shard_0002",
        *(
            statement
            for shard in (1, 2)
            for statement in (
                f"CREATE TABLE shard_{shard:04d}.items (id bigint PRIMARY KEY, name text, price float8, at date)",
                f"INSERT INTO shard_{shard:04d}.items SELECT n, 'item ' || n, n, now() "
                f"FROM generate_series(1, {rows // 2}) n",
            )
        ),
        "SELECT tube.tube_ensure_exists('items', 2)",
        "SELECT tube.tube_table_ensure_attached('items', 'shard_0001.items')",
        "SELECT tube.tube_table_ensure_attached('items', 'shard_0002.items')",
    )
    time.sleep(2)
    figures = []
    for label, sink in (
        ("Parquet", ParquetSink(folder / "parquet")),
        ("a Postgres table", PostgresSink(servers.url, "dw.items")),
    ):
        found: list[float] = []
        for _ in range(options.runs + 1):
            for shard in (1, 2):
                servers.sql(f"SELECT shard_{shard:04d}.items_touch(array_agg(id), 'B') FROM shard_{shard:04d}.items")
            began = time.monotonic()
            result = pipeline.run(_config(servers, daemon, sink, folder / label, "available_now"), spark)  # type: ignore[arg-type]
            if result.rows_written != rows:
                raise RuntimeError(f"{result.rows_written} rows were written, not {rows}")
            found.append(rows / (time.monotonic() - began))
        figures.append(
            Figure(f"{rows} rows from the tube to {label}, query started and ended", rates(found[1:], "rows/s"))
        )
    return figures


def _follow(options: Options, servers: System, daemon: Daemon, spark: object, folder: Path) -> Figure:
    """One touch after another, each from before its commit until its row is downstream."""
    sink = PostgresSink(servers.url, "dw.items")
    seconds: list[float] = []
    started, done = threading.Event(), threading.Event()

    def touch() -> None:
        started.wait()
        for number in range(max(10, options.sized(TOUCHES))):
            with connection(servers.url).cursor() as cursor:
                began = time.monotonic()
                cursor.execute(
                    "UPDATE shard_0001.items SET name = $1 WHERE id = $2", parameters=(f"new {number}", number + 1)
                )
                arrived = False
                while not arrived and time.monotonic() < began + 30:
                    cursor.execute(
                        "SELECT EXISTS (SELECT FROM dw.items WHERE _shard = 1 AND id = $1 AND name = $2)",
                        parameters=(number + 1, f"new {number}"),
                    )
                    arrived = cursor.fetchone()[0]
                    time.sleep(0.002)
                seconds.append(time.monotonic() - began)
            time.sleep(0.05)
        done.set()

    def until(_: PipelineResult) -> bool:
        started.set()
        return done.is_set()

    thread = threading.Thread(target=touch)
    thread.start()
    pipeline.run(_config(servers, daemon, sink, folder / "follow", 0.0), spark, until)  # type: ignore[arg-type]
    thread.join()
    return Figure("from an UPDATE to its row in a Postgres table, p50 / p99", latency(seconds[5:]), at_most=0.5)


def _config(servers: System, daemon: Daemon, sink: Sink, folder: Path, trigger: str | float) -> PipelineConfig:
    return PipelineConfig(
        tube="items",
        port=daemon.port,
        database=servers.url,
        table="shard_{shard:04d}.items",
        sink=sink,
        checkpoint=folder / "checkpoint",
        trigger=trigger,
        options={"maxBackfillPodsPerTrigger": "10000"},
    )
