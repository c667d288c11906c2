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
RATE = 300_000  # rows for each second of the engine's processor time
FILE = """
[source]
tube = "pipeline"
port = {port}
[tables]
database = "{url}"
include = ["public.item"]
[downstream.out]
{downstream}
[run]
engine = "local"
name = "{name}"
checkpoint = "checkpoint-{name}"
trigger = 0
"""


def run(options: Options) -> list[Figure]:
    """A backfill into each kind of downstream, and then updates into Postgres."""
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
                "parquet": 'kind = "parquet"\nfolder = "lake/{schema}.{table}"',
                "delta": 'kind = "delta"\nuri = "delta/{schema}.{table}"',
                "postgres": f'kind = "postgres"\nurl = "{url}"\ntable = "dw.{{table}}"',
            }
            found = []
            for kind, downstream in downstreams.items():
                if options.picks(kind):
                    found.append(_backfill(servers, daemon, kind, downstream, rows))
            if options.picks("updates"):
                found += _updates(servers, daemon, downstreams["postgres"], options)
            return found


@contextmanager
def _engine(servers: System, daemon: Daemon, name: str, downstream: str) -> Iterator[psutil.Popen]:
    file = servers.folder / f"{name}.toml"
    file.write_text(FILE.format(port=daemon.port, url=servers.url, downstream=downstream, name=name), encoding="utf-8")
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


def _attach(servers: System, daemon: Daemon, downstream: str) -> None:
    """The tube and its table, once."""
    if servers.sql("SELECT count(*) FROM tube.tube_registry WHERE tube = 'pipeline'") == "0":
        file = servers.folder / "attach.toml"
        file.write_text(
            FILE.format(port=daemon.port, url=servers.url, downstream=downstream, name="attach"), encoding="utf-8"
        )
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
