"""Catching up: all rows of a stream to one TCP client, against psql writing the very same COPY to a pipe."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time

from bench.report import Figure, Spread, rates
from bench.system import MARK, STREAM, Daemon, Options, System, connect, system
from replicad.streams.rows import RowSource

ROWS = 2_000_000
BUFFER = 256 * 1024
GOAL = 1.0
_FORMAT = "(FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"  # as the daemon copies
_PIPE = 1 << 20  # bytes of psql's pipe: as wide as Linux lets it be


def run(options: Options) -> list[Figure]:
    """The rate, and what of the time is ours."""
    rows = options.sized(ROWS)
    with system() as ours:
        ours.make_stream()
        ours.commit_rows(rows)
        ours.sql(f"VACUUM ANALYZE {STREAM}")  # both sides read what nobody has to tidy up any more
        number = int(ours.sql(f"SELECT number FROM replicad.stream WHERE name = '{STREAM}'"))
        source = RowSource(number, STREAM, f"public.{STREAM}", "id", row="t.body", unique_ids=True)
        copy = f"COPY ({source.range_sql(0, rows)}) TO STDOUT {_FORMAT}"
        mine, psql, spent = [], [], []
        for _ in range(options.runs):
            with ours.daemon() as daemon:  # another one each time: it keeps what it has read for a few seconds
                before = daemon.cpu()
                mine.append(rows / _by_daemon(daemon, rows))
                spent.append((daemon.cpu() - before) / rows)
            psql.append(rows / _by_psql(ours, copy, rows))
    return [
        Figure(
            f"{rows:,} rows to one client",
            rates(mine, "rows/s"),
            f"psql to a pipe {rates(psql, 'rows/s')}",
            Spread.of_ratios(mine, psql),
            at_least=GOAL,
        ),
        Figure("  processor time of the daemon", f"{Spread.of(spent).middle * 1e6:.3f} s/M rows"),
    ]


def _by_daemon(daemon: Daemon, rows: int) -> float:
    """Seconds from asking to the last row."""
    buffer = bytearray(BUFFER)
    with connect(daemon.host, daemon.port) as link:
        began = time.monotonic()
        link.sendall(f"REPLICATE {STREAM} 0\n".encode())
        while rows > 0:
            size = link.recv_into(buffer)
            if not size:
                raise ConnectionError(f"closed with {rows} rows to come: {bytes(buffer[:200])!r}")
            rows -= buffer.count(MARK, 0, size)
        return time.monotonic() - began


def _by_psql(ours: System, copy: str, rows: int) -> float:
    """Seconds from the statement to the last row; psql is connected before the clock starts."""
    buffer = bytearray(BUFFER)
    with subprocess.Popen(ours.psql(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as psql:
        assert psql.stdin is not None
        assert psql.stdout is not None
        fcntl.fcntl(psql.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
        psql.stdin.write(b"SET jit = off; SELECT 'ready';\n")
        assert os.read(psql.stdout.fileno(), 100) == b"ready\n"
        began = time.monotonic()
        psql.stdin.write(f"{copy};\n".encode())
        while rows > 0:
            size = psql.stdout.readinto(buffer)
            if not size:
                raise RuntimeError("psql ended early")
            rows -= buffer.count(MARK, 0, size)
        took = time.monotonic() - began
        psql.stdin.close()
    return took
