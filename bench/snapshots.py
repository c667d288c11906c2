"""A table's changes to 1, 10 and 200 readers; and a snapshot of a million rows beside 500 writes a second.

An UPDATE of many rows is one transaction, and each reader gets a change for each of them: the rate is that between the
first and the last change that readers got, all readers together. The snapshot is `replicad streams snapshot` with a
daemon beside it. What it costs writers is the time of their statements during it, beside the time before.
"""

from __future__ import annotations

import re
import subprocess
import time
from statistics import median

from bench.readers import Door, crowd
from bench.report import Figure, Spread, amount, rates
from bench.system import Daemon, Options, System, system

CHANGES = {1: 100_000, 10: 50_000, 200: 5_000}  # by readers
ROWS = 1_000_000
RATE = 500  # writes a second
ALONE = 10.0  # seconds of writing before the snapshot
PROGRESS = re.compile(r"progress: [\d.]+ s, ([\d.]+) tps, lat ([\d.]+) ms.* lag ([\d.]+) ms")


def run(options: Options) -> list[Figure]:
    """Changes per second by readers, with the processor time; then the snapshot, and its writers."""
    with system() as ours:
        ours.install()
        rows = options.sized(max(CHANGES.values()))
        ours.sql(
            "CREATE TABLE t (id integer PRIMARY KEY, body text, n integer DEFAULT 0) WITH (fillfactor = 50)",
            f"INSERT INTO t SELECT i, md5(i::text) || '~' FROM generate_series(1, {rows}) AS i",
        )
        ours.replicad("streams", "add", "t", "--table", "public.t", "--changes")
        with ours.daemon() as daemon:
            delivered = [figure for clients in CHANGES for figure in _delivered(options, ours, daemon, clients)]
            return [*delivered, *_snapshot(options, ours)]


def _delivered(options: Options, ours: System, daemon: Daemon, clients: int) -> list[Figure]:
    changes = options.sized(CHANGES[clients])
    door = Door(daemon.host, daemon.port, b"REPLICATE t NOW\n", b"POSITION t")
    found, costs = [], []
    for _ in range(options.runs):
        with crowd(door, clients, changes) as readers:
            ours.sql(f"UPDATE t SET n = n + 1 WHERE id <= {changes}")
            before, postgres = daemon.cpu(), ours.cpu()
            heard = readers.wait()
            used = daemon.cpu() - before + ours.cpu_since(postgres)
        if heard.lost:
            raise RuntimeError(f"{heard.lost} readers were cut off or got too little: {heard}")
        found.append(heard.rows / (heard.last - heard.first))
        costs.append(used / heard.rows * 1e6)
    return [
        Figure(f"changes/s to {clients} reader{'s' if clients > 1 else ''}", rates(found, "changes/s")),
        Figure("  processor time of a delivered change, Postgres included", f"{median(costs):.2f} us"),
    ]


def _snapshot(options: Options, ours: System) -> list[Figure]:
    rows = options.sized(ROWS)
    ours.sql(
        "CREATE TABLE big (id integer PRIMARY KEY, body text, n integer DEFAULT 0) WITH (fillfactor = 90)",
        f"INSERT INTO big SELECT i, md5(i::text) FROM generate_series(1, {rows}) AS i",
        "CHECKPOINT",
    )
    ours.replicad("streams", "add", "big", "--table", "public.big", "--changes")
    script = f"\\set id random(1, {rows})\nUPDATE big SET n = n + 1 WHERE id = :id;\n"
    command = ours.pgbench(script, "-T", "3600", "-R", str(RATE), "-P", "1", clients=4)
    log = ours.folder / "writers.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output) as writers:
        try:
            time.sleep(ALONE)
            alone = PROGRESS.findall(log.read_text())
            began, postgres = time.monotonic(), ours.cpu()
            ours.replicad("streams", "snapshot", "big")
            seconds, used = time.monotonic() - began, ours.cpu_since(postgres)
        finally:
            writers.terminate()
    beside = PROGRESS.findall(log.read_text())[len(alone) :]
    if not alone or not beside:
        raise RuntimeError(f"pgbench wrote no progress: {log.read_text()[-300:]}")
    sent = int(ours.sql("SELECT sum(rows) FROM replicad.stream_snapshot WHERE finished_at IS NOT NULL"))
    before, during = (median(float(late) - float(lag) for _, late, lag in found) for found in (alone, beside))
    return [
        Figure(
            f"snapshot of {sent:,} rows beside {RATE} writes/s",
            amount(sent / seconds, "rows/s"),
            f"{seconds:.0f} s; Postgres takes {used / seconds:.2f} cores, the writers included",
        ),
        Figure(
            "  time of a write",
            f"{during:.2f} ms",
            f"before it {before:.2f} ms",
            Spread.of([during / before]),
        ),
        Figure(
            "  writes/s",
            f"{median(float(rate) for rate, *_ in beside):.0f}",
            f"before it {median(float(rate) for rate, *_ in alone):.0f}",
        ),
    ]
