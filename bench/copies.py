"""A whole table, then its changes, into Parquet files and another Postgres: beside dlt, Sling, and a program by hand.

Every program runs as a process of its own, and ends when it has everything: first all rows, then the rows that were
changed since. dlt finds these by a column `changed` and an index on it, and does not see rows that were deleted; the
program by hand (psycopg, COPY, pyarrow) copies all rows again. Processor time is that of the program with its children,
ours with the daemon's; Postgres' is left out for all of them. `dlt` is used if REPLICAD_BENCH_DLT names a Python that
has it: pip install 'dlt[parquet,postgres,sql_database]' psycopg2-binary 'sqlalchemy<2.1'. Sling is used if
REPLICAD_BENCH_SLING names its program, which is in the package sling-linux-amd64, and only into Postgres: for files
it loads another program. Like dlt it finds changes by the column `changed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pyarrow.dataset import dataset

from bench.report import Figure, Spread, amount
from bench.system import Daemon, Options, System, cpu, system

ROWS = 1_000_000
CHANGED = 10_000
GOAL = 300_000  # rows for each second of processor time, of the copy
LOOK = 0.05  # seconds between two looks at the memory of a program
TARGETS = ("parquet", "postgres")
FILE = "copy.toml"  # that `replicad pipeline init` writes

TABLE = """
CREATE TABLE item (id bigint PRIMARY KEY, name text, price float8, day date, changed timestamptz DEFAULT now());
INSERT INTO item SELECT n, 'item ' || n, n * 1.5, date '2026-01-01' + n % 365 FROM generate_series(1, {rows}) n;
CREATE INDEX ON item (changed);
"""
CHANGE = "UPDATE item SET price = price + 1, changed = clock_timestamp() WHERE id % {every} = 0"

DLT = """
import sys, dlt
from dlt.sources.sql_database import sql_table
source, target, place, folder = sys.argv[1:]
where = dlt.destinations.filesystem(place) if target == "parquet" else dlt.destinations.postgres(place)
line = dlt.pipeline("bench", pipelines_dir=folder, destination=where, dataset_name="bench")
since = dlt.sources.incremental("changed")
table = sql_table(source, table="item", backend="pyarrow", incremental=since, chunk_size=50000)
table.apply_hints(primary_key="id", write_disposition="merge" if target == "postgres" else "append")
line.run(table, loader_file_format="parquet" if target == "parquet" else "csv")
"""

HAND = """
import sys, psycopg, pyarrow as pa, pyarrow.csv as csv, pyarrow.parquet as pq
source, target, place, folder = sys.argv[1:]
with psycopg.connect(source) as reads, reads.cursor() as cursor:
    if target == "parquet":
        with open(folder + "/rows.csv", "wb") as kept, cursor.copy("COPY item TO STDOUT (FORMAT csv, HEADER)") as rows:
            for data in rows:
                kept.write(data)
        with pq.ParquetWriter(place + "/item.parquet", csv.open_csv(folder + "/rows.csv").schema) as writer:
            for batch in csv.open_csv(folder + "/rows.csv"):
                writer.write_batch(batch)
    else:
        with psycopg.connect(place) as writes, writes.cursor() as other:
            other.execute("CREATE TABLE IF NOT EXISTS item (id bigint PRIMARY KEY, name text, price float8, day date, changed timestamptz)")
            other.execute("TRUNCATE item")
            with cursor.copy("COPY item TO STDOUT (FORMAT binary)") as rows, other.copy("COPY item FROM STDIN (FORMAT binary)") as sink:
                for data in rows:
                    sink.write(data)
"""  # noqa: E501 - it is counted by its lines


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a program took: seconds, seconds of processor time, and the most bytes that it and its children had."""

    took: float
    used: float
    memory: int


def run(options: Options) -> list[Figure]:
    """For each target: rows of the copy for a second of processor time, of the changes, and memory."""
    rows = options.sized(ROWS)
    every = max(1, rows // options.sized(CHANGED))
    figures: list[Figure] = []
    for target in TARGETS:
        found: dict[str, tuple[_Ran, _Ran]] = {}
        lines = {"dlt": _lines(DLT), "Sling": 1, "by hand": _lines(HAND)}
        for name in ("replicad", "dlt", *(["Sling"] if target == "postgres" else []), "by hand"):
            with system() as ours:
                ours.install()
                ours.sql(TABLE.format(rows=rows), "VACUUM ANALYZE item", "CREATE DATABASE copy")
                ran = _runs(ours, name, target, every)
                if ran is not None:
                    found[name] = ran
                if name == "replicad":
                    lines[name] = _lines((ours.folder / FILE).read_text(encoding="utf-8"))
        figures += _figures(target, rows, rows // every, found)
        beside = ", ".join(f"{name} {lines[name]}" for name in found)
        figures.append(Figure("  lines of the file, of the program or of commands", f"{lines['replicad']}", beside))
    return figures


def _lines(text: str) -> int:
    """Those that say something."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def _figures(target: str, rows: int, changed: int, found: dict[str, tuple[_Ran, _Ran]]) -> list[Figure]:
    mine = found.pop("replicad")

    def beside(number: int, count: int) -> str:
        return ", ".join(f"{name} {amount(count / ran[number].used, 'rows/s')}" for name, ran in found.items())

    speed = rows / mine[0].used
    best = [max(rows / ran[0].used for name, ran in found.items() if name != "by hand")] if len(found) > 1 else []
    memory = ", ".join(f"{name} {amount(max(each.memory for each in ran), 'B')}" for name, ran in found.items())
    took = ", ".join(f"{name} {ran[0].took:.1f} and {ran[1].took:.1f} s" for name, ran in found.items())
    return [
        Figure(
            f"{rows:,} rows into {target}, for a second of processor time",
            amount(speed, "rows/s"), beside(0, rows), Spread.of([speed / one for one in best]) if best else None,
        ),
        Figure("  to its goal", "", amount(GOAL, "rows/s"), Spread.of([speed / GOAL]), at_least=1.0),
        Figure(f"  {changed:,} changed rows", amount(changed / mine[1].used, "rows/s"), beside(1, changed)),
        Figure("  memory at most", amount(max(each.memory for each in mine), "B"), memory),
        Figure("  seconds in all", f"{mine[0].took:.1f} and {mine[1].took:.1f} s", took),
    ]  # fmt: skip


def _runs(ours: System, name: str, target: str, every: int) -> tuple[_Ran, _Ran] | None:
    """The copy, and the changes. None: the program is not here."""
    place = ours.folder / "out"
    place.mkdir()
    to = str(place) if target == "parquet" else ours.url.replace("/postgres?", "/copy?", 1)
    with _program(ours, name, target, to) as begun:
        if begun is None:
            return None
        command, daemon = begun
        first = _measured(command, daemon)
        if name == "replicad":
            _check(ours, target, place, to)
        ours.sql(CHANGE.format(every=every))
        second = _measured(command, daemon)
        if name == "replicad":
            _check(ours, target, place, to)
        return first, second


def _check(ours: System, target: str, place: Path, to: str) -> None:
    """Raises RuntimeError: the copy is not equal to the table, so that it counts for nothing."""
    wanted = ours.sql("SELECT count(*), sum(price) FROM item")
    if target == "postgres":
        found = replace(ours, url=to).sql("SELECT count(*), sum(price) FROM item")
    else:
        [current] = place.rglob("current")
        table = dataset(str(current)).to_table(columns=["price"])
        found = f"{table.num_rows}|{sum(table.column('price').to_pylist()):g}"
        wanted = f"{wanted.partition('|')[0]}|{float(wanted.partition('|')[2]):g}"
    if found != wanted:
        raise RuntimeError(f"the copy into {target} has {found}, and the table {wanted}")


@contextmanager
def _program(ours: System, name: str, target: str, to: str) -> Iterator[tuple[list[str], Daemon | None] | None]:
    if name == "replicad":
        with ours.daemon() as daemon:
            file = ours.folder / FILE
            option = f"parquet:{to}" if target == "parquet" else to
            ours.replicad("pipeline", "init", str(file), "--to", option, "--port", str(daemon.port))
            command = [sys.executable, "-m", "replicad", "pipeline", "run", str(file), "--trigger", "available_now"]
            yield [*command, "--log-level", "warning"], daemon
        return
    peers = {"dlt": os.environ.get("REPLICAD_BENCH_DLT"), "Sling": os.environ.get("REPLICAD_BENCH_SLING")}
    python = peers.get(name, sys.executable)
    if python is None:
        print(f"{name} is not here and not compared with: see bench/copies.py", file=sys.stderr)
        yield None
        return
    if name == "Sling":
        into = ["--tgt-conn", to, "--tgt-object", "public.item"]
        newer = ["--mode", "incremental", "--primary-key", "id", "--update-key", "changed"]
        yield [python, "run", "--src-conn", ours.url, "--src-stream", "public.item", *into, *newer], None
        return
    file = ours.folder / "program.py"
    file.write_text(DLT if name == "dlt" else HAND, encoding="utf-8")
    if name == "dlt":  # by way of SQLAlchemy, with the driver psycopg2
        source = ours.url.replace("postgresql://", "postgresql+psycopg2://", 1)
        # it asks for a host and a password; the host in the parameters counts, which trusts us
        to = f"file://{to}" if target == "parquet" else to.replace("postgres@/", "postgres:none@localhost/", 1)
    else:
        source = ours.url
    yield [python, str(file), source, target, to, str(ours.folder)], None


def _measured(command: list[str], daemon: Daemon | None) -> _Ran:
    """Run it to its end."""
    before = 0.0 if daemon is None else cpu(daemon.process)
    began = time.monotonic()
    variables = {**os.environ, "RUNTIME__DLTHUB_TELEMETRY": "false", "DLT_TELEMETRY": "0"}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables)
    most = [0]
    watching = threading.Thread(target=_watch, args=(started.pid, most), daemon=True)
    watching.start()
    assert started.stdout is not None
    said = started.stdout.read()
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    watching.join()
    if started.returncode:
        raise RuntimeError(f"{Path(command[0]).name} {command[1:4]}: {said.decode(errors='replace')[-2000:]}")
    own = 0.0 if daemon is None else cpu(daemon.process) - before
    return _Ran(time.monotonic() - began, used.ru_utime + used.ru_stime + own, most[0])


def _watch(pid: int, most: list[int]) -> None:
    try:
        root = psutil.Process(pid)
        while root.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for one in [root, *root.children(recursive=True)]:
                try:
                    total += one.memory_info().rss
                except psutil.Error:
                    continue
            most[0] = max(most[0], total)
            time.sleep(LOOK)
    except psutil.Error:
        return
