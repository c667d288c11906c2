"""Pipelines with `engine = "spark"`: fresh rows with small batches, twelve tables in one driver, and backfills.

The driver is a process of its own with the JVM and the Python workers below it, whose processor time is counted, of
backfills with the start of Spark. The start of twelve queries is a figure of its own: it takes most of a minute of
processor time, and their latency is measured when it is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.local import FOLLOWED, OTHERS, ROWS, TABLES, TRANSACTIONS, WARM, fresh_rows, timed_updates
from bench.local import GOALS as GOALS_OF_LOCAL
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import Daemon, Options, System, cpu_of_all, wait_until
from replicad.postgres.embedded import embedded_postgres

GOALS = (0.100, 0.200)  # seconds from an UPDATE to its row, p50 and p99
RATE = 100_000  # rows for each second of processor time
FRESH = 0.5  # seconds from an UPDATE of one of twelve tables to its row (p50)
DRIVER = """
import sys, time
from pathlib import Path
from replicad.spark import PipelineConfig, build_session, pipeline
from replicad.spark.session import settings_of
from replicad.spark.sinks import DeltaSink, ParquetSink, PostgresSink
url, port, folder, kind, tables, trigger = sys.argv[1:]
config = settings_of(folder, short=trigger == "available_now")
spark = build_session("bench", log_file=Path(folder) / "spark.log", config=config)
sinks = {{
    "parquet": lambda name: ParquetSink(Path(folder) / "parquet" / name),
    "delta": lambda name: DeltaSink(f"{{folder}}/delta/{{name}}"),
    "postgres": lambda name: PostgresSink(url, f"dw.{{name}}"),
}}
queries = [
    pipeline.start(PipelineConfig(
        tube=name, port=int(port), database=url, table=name, sink=sinks[kind](name), name=name,
        checkpoint=Path(folder) / "checkpoints" / kind / name, trigger=trigger,
    ), spark)
    for name in tables.split(",")
]
if trigger == "available_now":
    for query in queries:
        query.awaitTermination()
else:
    spark.streams.awaitAnyTermination()  # raises what has ended one of them
spark.stop()
"""


def run(options: Options) -> list[Figure]:
    """Backfills, then single updates beside others, then twelve tables."""
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # the account of root's Postgres passes through
        with embedded_postgres(folder / "postgres") as url, System(url, folder).daemon() as daemon:
            servers = System(url, folder)
            rows = options.sized(ROWS)
            kinds = [kind for kind in ("parquet", "delta", "postgres") if options.picks(kind)]
            if kinds or options.picks("updates"):
                _make_table(servers, "item", rows)
            found: list[Figure] = []
            for kind in kinds:
                found += _said([_backfill(servers, daemon, kind, rows)])
            if options.picks("updates"):
                found += _said(_updates(servers, daemon, options))
            if options.picks("tables"):
                found += _said(_tables(servers, daemon))
            return found


def _said(figures: list[Figure]) -> list[Figure]:
    """Print figures at once: the whole takes minutes, and may be broken off."""
    for one in figures:
        print(f"  {one.what}: {one.ours}; {one.beside}", file=sys.stderr, flush=True)
    return figures


def _make_table(servers: System, name: str, rows: int) -> None:
    servers.sql(
        f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text, price float8, at date)",
        f"INSERT INTO {name} SELECT n, 'item ' || n, n, now() FROM generate_series(1, {rows}) n",
        f"VACUUM ANALYZE {name}",
        f"SELECT tube.tube_ensure_exists('{name}', 2)",
        f"SELECT tube.tube_table_ensure_attached('{name}', '{name}', 0)",
    )


@contextmanager
def _driver(servers: System, daemon: Daemon, kind: str, tables: str, trigger: str) -> Iterator[psutil.Popen]:
    words = [servers.url, str(daemon.port), str(servers.folder), kind, tables, trigger]
    with (servers.folder / "driver.log").open("ab") as out:
        started = psutil.Popen([sys.executable, "-c", DRIVER.format(), *words], stdout=out, stderr=subprocess.STDOUT,
                               cwd=Path.cwd(), env=dict(os.environ))  # fmt: skip
    try:
        yield started
    except RuntimeError as error:
        if started.poll() is None:
            raise
        said = (servers.folder / "driver.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{error}; the driver has ended: {said[-3000:]}") from error
    finally:
        below = started.children(recursive=True) if started.poll() is None else []
        for one in (started, *below):
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        started.wait(60)


def _backfill(servers: System, daemon: Daemon, kind: str, rows: int) -> Figure:
    """All pods are there when Spark starts. It ends with `available_now`, so nothing but its work is counted."""
    servers.sql("SELECT count(*) FROM tube.tube_backfill_schedule('item', 'id', 0, 0)")
    wait_until(
        lambda: (
            servers.sql("SELECT NOT EXISTS (SELECT FROM tube.tube_backfill WHERE tube = 'item' AND NOT finished)")
            == "t"
        ),
        "the pods of the backfill",
        seconds=60,
    )
    began = time.monotonic()
    used = 0.0
    with _driver(servers, daemon, kind, "item", "available_now") as driver:
        while driver.poll() is None and time.monotonic() < began + 280:
            used = max(used, cpu_of_all(driver))
            time.sleep(0.05)
    took = time.monotonic() - began
    if servers.sql("SELECT count(*) FROM (SELECT FROM tube.item LIMIT 1) x") != "0":
        raise RuntimeError(f"the backfill into {kind} did not end; see {servers.folder}")
    return Figure(
        f"backfill of {rows} rows into {kind}, Spark's start too",
        f"{took:.1f} s, {used:.1f} s of a processor, {amount(rows / used, 'rows')} for each",
        f"goal {amount(RATE, 'rows')}",
        Spread.of([rows / used / RATE]),
        at_least=1.0,
    )


def _updates(servers: System, daemon: Daemon, options: Options) -> list[Figure]:
    with _driver(servers, daemon, "postgres", "item", "0") as driver:
        wait_until(lambda: servers.sql("SELECT to_regclass('dw.item') IS NOT NULL") == "t", "the table", driver, 150)
        seconds, used = timed_updates(servers, driver, options)
    p50, p99 = (percentile(seconds, share) for share in (0.5, 0.99))
    what = f"from an UPDATE to its row in Postgres, {OTHERS} others a second, "
    goals = f"goals {GOALS[0] * 1000:.0f} / {GOALS[1] * 1000:.0f} ms; of the local engine {GOALS_OF_LOCAL[0]:g} s"
    return [
        Figure(what + "p50", latency(seconds), f"{used:.2f} of a processor", Spread.of([p50 / GOALS[0]]), at_most=1.0),
        Figure(what + "p99", "", goals, Spread.of([p99 / GOALS[1]]), at_most=1.0),
    ]


def _tables(servers: System, daemon: Daemon) -> list[Figure]:
    """Each transaction updates a row of one of the tables; every fifth is timed until its row is downstream."""
    names = [f"table_{number:02d}" for number in range(TABLES)]
    for name in names:
        _make_table(servers, name, 1000)
    began = time.monotonic()
    with _driver(servers, daemon, "postgres", ",".join(names), "0") as driver:
        made = " AND ".join(f"to_regclass('dw.{name}') IS NOT NULL" for name in names)
        wait_until(lambda: servers.sql(f"SELECT {made}") == "t", "the tables", driver, 150)
        for name in names:
            servers.sql(f"UPDATE {name} SET price = -1 WHERE id = 1")
        there = " + ".join(f"(SELECT count(*) FROM dw.{name} WHERE id = 1 AND price = -1)" for name in names)
        wait_until(lambda: servers.sql(f"SELECT {there}") == str(TABLES), "a row of each table", driver, 150)
        started, spent = time.monotonic() - began, cpu_of_all(driver)
        warm = range(int(WARM * TRANSACTIONS))
        fresh_rows(servers.url, names, warm)
        before, at = cpu_of_all(driver), time.monotonic()
        seconds = fresh_rows(servers.url, names, range(len(warm), len(warm) + int(FOLLOWED * TRANSACTIONS)))
        if driver.poll() is not None:
            raise RuntimeError("followed in vain")
        used = (cpu_of_all(driver) - before) / (time.monotonic() - at)
    start = Figure(
        f"start of one driver with {TABLES} tables, to the first row of each",
        f"{started:.1f} s",
        f"{spent:.1f} s of a processor",
    )
    fresh = Figure(
        f"{TABLES} tables in one driver, {TRANSACTIONS} transactions/s, from an UPDATE to its row",
        latency(seconds),
        f"goal for p50 {FRESH * 1000:.0f} ms; {used:.2f} of a processor; after {WARM:.0f} s at that rate",
        Spread.of([percentile(seconds, 0.5) / FRESH]),
        at_most=1.0,
    )
    return [start, fresh]
