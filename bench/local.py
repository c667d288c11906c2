"""The local engine: from an UPDATE to its row in Postgres with other updates beside it, and backfills.

The engine is a process of its own, so that its processor time is known.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import Daemon, Options, System, cpu, cpu_of_all, wait_until
from replicad.postgres.embedded import embedded_postgres
from replicad.spark.database import connection

ROWS = 1_000_000
TOUCHES = 200  # updates that are timed, one after another
OTHERS = 250  # updates a second beside them
GOALS = (0.030, 0.080)  # seconds, p50 and p99
TABLES, TRANSACTIONS = 12, 50  # tables of one process, and transactions in a second for all
WARM, FOLLOWED = 15.0, 30.0  # seconds for which they run before they are followed, and are followed
FRESH, SHARE, MEMORY = 0.3, 0.25, 250  # goals for them: seconds (p50), of a processor, and MB
RATE = 300_000  # rows for each second of the engine's processor time
FILE = """
[source]
tube = "{tube}"
port = {port}
[tables]
database = "{url}"
include = ["{tables}"]
{downstream}
[run]
engine = "local"
name = "{name}"
checkpoint = "checkpoint-{name}"
trigger = 0
"""


def run(options: Options) -> list[Figure]:
    """A backfill into each kind of downstream, then updates into Postgres, then twelve tables into two downstreams."""
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # the account of root's Postgres passes through
        with embedded_postgres(folder / "postgres") as url, System(url, folder).daemon() as daemon:
            servers = System(url, folder)
            rows = options.sized(ROWS)
            servers.sql(
                "CREATE TABLE item (id bigint PRIMARY KEY, name text, price float8, at date)",
                f"INSERT INTO item SELECT n, 'item ' || n, n, now() FROM generate_series(1, {rows}) n",
                "VACUUM ANALYZE item",
            )
            downstreams = {
                "parquet": '[downstream.out]\nkind = "parquet"\nfolder = "lake/{schema}.{table}"',
                "delta": '[downstream.out]\nkind = "delta"\nuri = "delta/{schema}.{table}"',
                "postgres": f'[downstream.out]\nkind = "postgres"\nurl = "{url}"\ntable = "dw.{{table}}"',
            }
            found = []
            for kind, downstream in downstreams.items():
                if options.picks(kind):
                    found.append(_backfill(servers, daemon, kind, downstream, rows))
            if options.picks("updates"):
                found += _updates(servers, daemon, downstreams["postgres"], options)
            if options.picks("tables"):
                found += _tables(servers, daemon)
            return found


@contextmanager
def _engine(
    servers: System, daemon: Daemon, name: str, downstream: str, tube: str = "pipeline", tables: str = "public.item"
) -> Iterator[psutil.Popen]:
    file = _file(servers, daemon, name, downstream, tube, tables)
    with (servers.folder / f"{name}.log").open("ab") as out:
        started = psutil.Popen(
            [sys.executable, "-m", "replicad", "pipeline", "run", str(file)],
            stdout=out, stderr=subprocess.STDOUT, cwd=Path.cwd(), env=dict(os.environ),
        )  # fmt: skip
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def _file(servers: System, daemon: Daemon, name: str, downstream: str, tube: str, tables: str) -> Path:
    file = servers.folder / f"{name}.toml"
    text = FILE.format(port=daemon.port, url=servers.url, downstream=downstream, name=name, tube=tube, tables=tables)
    file.write_text(text, encoding="utf-8")
    return file


def _attach(
    servers: System, daemon: Daemon, downstream: str, tube: str = "pipeline", tables: str = "public.item"
) -> None:
    """The tube and its tables, once."""
    if servers.sql(f"SELECT count(*) FROM tube.tube_registry WHERE tube = '{tube}'") == "0":
        file = _file(servers, daemon, "attach", downstream, tube, tables)
        from replicad.spark.local.file import load_local  # noqa: PLC0415 - needs the extra
        from replicad.spark.local.tables import attach_new  # noqa: PLC0415 - likewise

        attach_new(load_local(file), create=True, backfill=False)


def _backfill(servers: System, daemon: Daemon, kind: str, downstream: str, rows: int) -> Figure:
    _attach(servers, daemon, downstream)
    servers.sql("SELECT count(*) FROM tube.tube_backfill_request('pipeline', NULL, 0, 2147483647)")
    began = time.monotonic()
    with _engine(servers, daemon, kind, downstream) as engine:
        done = (
            "SELECT NOT EXISTS (SELECT FROM tube.tube_backfill WHERE tube = 'pipeline' AND NOT finished) "
            "AND NOT EXISTS (SELECT FROM tube.pipeline)"
        )
        wait_until(lambda: servers.sql(done) == "t", "the backfill to end", engine, 280)
        took, used = time.monotonic() - began, cpu(psutil.Process(engine.pid))
    return Figure(
        f"backfill of {rows} rows into {kind}, its start too",
        f"{took:.1f} s, {used:.1f} s of a processor, {amount(rows / used, 'rows')} for each",
        f"goal {amount(RATE, 'rows')}",
        Spread.of([rows / used / RATE]),
        at_least=1.0,
    )


def _updates(servers: System, daemon: Daemon, downstream: str, options: Options) -> list[Figure]:
    _attach(servers, daemon, downstream)
    with _engine(servers, daemon, "postgres", downstream) as engine:
        made = "SELECT to_regclass('dw.item') IS NOT NULL"
        wait_until(lambda: servers.sql(made) == "t", "the table downstream", engine)
        seconds, used = timed_updates(servers, engine, options)
    p50, p99 = (percentile(seconds, share) for share in (0.5, 0.99))
    what = f"from an UPDATE to its row in Postgres, {OTHERS} others a second, "
    return [
        Figure(what + "p50", latency(seconds), f"{used:.2f} of a processor", Spread.of([p50 / GOALS[0]]), at_most=1.0),
        Figure(what + "p99", "", f"goals {GOALS[0] * 1000:.0f} / {GOALS[1] * 1000:.0f} ms", Spread.of([p99 / GOALS[1]]),
               at_most=1.0),
    ]  # fmt: skip


def timed_updates(servers: System, engine: psutil.Popen, options: Options) -> tuple[list[float], float]:
    """The seconds from single updates of `item` to their rows in `dw.item`, with others beside them, and the
    processors that the engine takes meanwhile.
    """
    rows = options.sized(ROWS)
    ending = threading.Event()

    def others() -> None:
        with connection(servers.url).cursor() as cursor:
            number, begun = 0, time.monotonic()
            while not ending.is_set():
                number += 1
                cursor.execute(
                    "UPDATE item SET price = price + 1 WHERE id = $1", parameters=(number % (rows // 2) + 1,)
                )
                ahead = begun + number / OTHERS - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)

    seconds = []
    thread = threading.Thread(target=others)
    thread.start()
    try:
        with connection(servers.url).cursor() as source, connection(servers.url).cursor() as target:
            before, at = 0.0, 0.0
            for number in range(10 + max(20, options.sized(TOUCHES))):
                if number == 10:
                    before, at = cpu_of_all(engine), time.monotonic()
                name, id_ = f"new {number}", rows // 2 + number + 1
                began = time.monotonic()
                source.execute("UPDATE item SET name = $1 WHERE id = $2", parameters=(name, id_))
                while time.monotonic() < began + 30:
                    target.execute("SELECT count(*) FROM dw.item WHERE id = $1 AND name = $2", parameters=(id_, name))
                    if target.fetchone()[0]:
                        break
                    time.sleep(0.002)
                seconds.append(time.monotonic() - began)
                time.sleep(0.03)
            used = (cpu_of_all(engine) - before) / (time.monotonic() - at)
    finally:
        ending.set()
        thread.join()
    return seconds[10:], used


def _tables(servers: System, daemon: Daemon) -> list[Figure]:
    """One process for twelve tables into Postgres and Delta. Each transaction updates a row of one of the tables;
    every fifth is timed until its row is in Postgres.
    """
    names = [f"table_{number:02d}" for number in range(TABLES)]
    for name in names:
        servers.sql(
            f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text, price float8, at date)",
            f"INSERT INTO {name} SELECT n, 'item ' || n, n, now() FROM generate_series(1, 1000) n",
        )
    downstreams = (
        f'[downstream.warehouse]\nkind = "postgres"\nurl = "{servers.url}"\ntable = "dw.{{table}}"\n'
        '[downstream.lake]\nkind = "delta"\nuri = "lake/{schema}.{table}"'
    )
    _attach(servers, daemon, downstreams, "twelve", "public.table_*")
    servers.sql("SELECT count(*) FROM tube.tube_backfill_request('twelve', NULL, 0, 2147483647)")
    began = time.monotonic()
    with _engine(servers, daemon, "twelve", downstreams, "twelve", "public.table_*") as engine:
        made = " AND ".join(f"to_regclass('dw.{name}') IS NOT NULL" for name in names)
        wait_until(lambda: servers.sql(f"SELECT {made}") == "t", "the tables", engine, 150)
        rows = " + ".join(f"(SELECT count(*) FROM dw.{name})" for name in names)
        wait_until(lambda: servers.sql(f"SELECT {rows}") == str(1000 * TABLES), "the rows", engine, 150)
        started = time.monotonic() - began
        warm = range(int(WARM * TRANSACTIONS))
        fresh_rows(servers.url, names, warm)
        before, at = cpu_of_all(engine), time.monotonic()
        seconds = fresh_rows(servers.url, names, range(len(warm), len(warm) + int(FOLLOWED * TRANSACTIONS)))
        used = (cpu_of_all(engine) - before) / (time.monotonic() - at)
        memory = engine.memory_info().rss / 1e6
    what = f"{TABLES} tables into Postgres and Delta, {TRANSACTIONS} transactions/s"
    lines = len([line for line in FILE.format(
        port=1, url="", downstream=downstreams, name="", tube="", tables=""
    ).splitlines() if line])  # fmt: skip
    return [
        Figure(f"{what}: from an UPDATE to its row in Postgres", latency(seconds),
               f"goal for p50 {FRESH * 1000:.0f} ms; the rows that were there took {started:.1f} s, with the start",
               Spread.of([percentile(seconds, 0.5) / FRESH]), at_most=1.0),
        Figure(f"{what}: processor time", f"{used:.2f} of a processor", f"goal {SHARE}", Spread.of([used / SHARE]),
               at_most=1.0),
        Figure(f"{what}: memory of the one process", f"{memory:.0f} MB, a file of {lines} lines", f"goal {MEMORY} MB",
               Spread.of([memory / MEMORY]), at_most=1.0),
    ]  # fmt: skip


def fresh_rows(url: str, names: list[str], numbers: range) -> list[float]:
    """Update rows at the rate, with these values; the seconds that the timed updates took."""
    seconds: list[float] = []
    waiting: dict[tuple[str, int], float] = {}
    ending, lock = threading.Event(), threading.Lock()

    def look() -> None:
        with connection(url).cursor() as cursor:
            while not ending.is_set() or waiting:
                with lock:
                    seen = dict(waiting)
                for (name, number), began in seen.items():
                    cursor.execute(f"SELECT price FROM dw.{name} WHERE id = {number % 1000 + 1}")
                    found = cursor.fetchone()
                    if (found is not None and found[0] == float(number)) or time.monotonic() > began + 30:
                        seconds.append(time.monotonic() - began)
                        del waiting[name, number]
                time.sleep(0.005)

    looking = threading.Thread(target=look)
    looking.start()
    begun = time.monotonic()
    with connection(url).cursor() as cursor:
        for number in numbers:
            name = names[number % len(names)]
            began = time.monotonic()
            cursor.execute(f"UPDATE {name} SET price = {number} WHERE id = {number % 1000 + 1}")
            if number % 5 == 0:
                with lock:
                    waiting[name, number] = began
            ahead = begun + (number - numbers.start + 1) / TRANSACTIONS - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
    ending.set()
    looking.join()
    return seconds
