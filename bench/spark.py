"""Spark: reading a tube against Spark JDBC reading the same table in order.

Everything is at work: Postgres, the daemon, the JVM and the Python workers, on the same processors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Figure, Spread, rates
from bench.system import Daemon, Options, System, free_port
from replicad.postgres.embedded import embedded_postgres
from replicad.spark import build_session, register

IDS = 50  # in each pod of the tubes that are read whole
PODS = (1_000_000, 200_000)  # the second shows what Spark's own beginning and end cost; the JVM is warm by then
READER = "reader"
JDBC = Path("/usr/share/java/postgresql.jar")  # Debian's libpostgresql-jdbc-java


@dataclass(frozen=True, slots=True)
class Bench:
    """What the benchmarks on Spark run on. `tcp`: the port of Postgres, for who knows no Unix sockets."""

    folder: Path
    servers: System
    daemon: Daemon
    spark: Any
    tcp: str


@contextmanager
def bench_on_spark() -> Iterator[Bench]:
    """A fresh Postgres, a daemon, and a Spark of two cores, all gone at the end."""
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        folder, tcp = Path(name), str(free_port())
        folder.chmod(0o711)  # the account of root's Postgres passes through
        settings = {"listen_addresses": "127.0.0.1", "port": tcp}
        with embedded_postgres(folder / "postgres", settings) as url, System(url, folder).daemon() as daemon:
            more = {"spark.jars": str(JDBC)} if JDBC.exists() else {}
            spark = build_session("bench", log_file=folder / "spark.log", config=more)
            register(spark)
            try:
                yield Bench(folder, System(url, folder), daemon, spark, tcp)
            finally:
                spark.stop()


def run(options: Options) -> list[Figure]:
    """Start Spark once, then read."""
    with bench_on_spark() as bench:
        bench.servers.sql(f"CREATE ROLE {READER} LOGIN SUPERUSER PASSWORD '{READER}'")
        return [_read(options.sized(pods), options, bench) for pods in PODS]


def _read(pods: int, options: Options, bench: Bench) -> Figure:
    """The same action on the same table, in turn: a tube of two partitions, and a query in the order of a tube."""
    bench.servers.sql(
        "SELECT tube.tube_ensure_absent('read')",
        "SELECT tube.tube_ensure_exists('read', 2)",
        "INSERT INTO tube.read (op, shard, ids) SELECT 'U', n % 2, ARRAY(SELECT n::bigint * 50 + i "
        f"FROM generate_series(1, {IDS}) i) FROM generate_series(1, {pods}) n",
        "VACUUM ANALYZE tube.read",
    )
    time.sleep(2)  # the daemon looks for new tubes once a second

    def ours() -> int:
        frame = bench.spark.read.format("replicad").options(port=str(bench.daemon.port), tube="read").load()
        return int(frame.selectExpr("sum(size(ids))").collect()[0][0])

    def theirs() -> int:
        query = "(SELECT seq, op, shard, ids, ts FROM tube.read ORDER BY op = 'B', seq) AS pods"
        url = f"jdbc:postgresql://127.0.0.1:{bench.tcp}/postgres?user={READER}&password={READER}"
        # fetchsize: 0 (all at once), 100, 1000 and 10000 rows differ by no more than the noise
        frame = bench.spark.read.jdbc(url, query, properties={"driver": "org.postgresql.Driver", "fetchsize": "10000"})
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
