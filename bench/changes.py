"""Streams of changes: what they cost writers, beside an audit trigger and a tube; and many readers, each of one value.

Writers: the same table four times, in turns, without a trigger, with an audit trigger for each row (`to_jsonb`),
attached to a tube, and with a stream of changes; the throughput, Postgres' processor time for each statement, and the
WAL of each row. Readers: each follows the changes with its own value of a filter; the latency is from the time of the
statement (`at` in the change) to the client, on one machine.
"""

from __future__ import annotations

import re
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from bench.report import Figure, Spread, rates
from bench.system import Daemon, Options, System, allow_files, connect, system

ROWS = 50_000
SECONDS = 3.0  # for each measurement of writers
COPIED = 5_000
READERS = 10_000
RATE = 1_000  # changes a second
READ_SECONDS = 15.0
P99 = 0.050  # seconds: the goal
IDLE = 10e-6  # seconds of processor time for a commit and a reader without matches: the goal
SPARE = 500  # files that processes open besides
AT = re.compile(rb'{"op":"u"[^\n]*"at":"([^"]+)"')
TABLES = ("plain", "audited", "attached", "recorded")


def run(options: Options) -> list[Figure]:
    """Throughput that writers keep; then latency, and the processor time of the daemon."""
    with system() as ours:
        ours.sql("CREATE SCHEMA shard_0001")
        with ours.daemon():  # it installs the schemas, and makes partitions of the table of changes
            ours.sql("SELECT tube.tube_ensure_exists('bench', 4)")
            writers = _writers(options, ours)
        return [*writers, *_readers(options, ours)]


def _writers(options: Options, ours: System) -> list[Figure]:
    for table in TABLES:
        ours.sql(
            f"CREATE TABLE shard_0001.{table} (id bigserial PRIMARY KEY, body text NOT NULL, n int DEFAULT 0) "
            "WITH (fillfactor = 80, autovacuum_enabled = false)",
            f"INSERT INTO shard_0001.{table} (body) SELECT md5(g::text) FROM generate_series(1, {ROWS}) AS g",
        )
    ours.sql(
        "CREATE TABLE audit (id bigserial PRIMARY KEY, op text, old jsonb, new jsonb, at timestamptz DEFAULT now())",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN "
        "INSERT INTO audit (op, new) VALUES (TG_OP, to_jsonb(NEW)); RETURN NULL; END'",
        "CREATE TRIGGER note AFTER INSERT OR UPDATE ON shard_0001.audited FOR EACH ROW EXECUTE FUNCTION note()",
        "SELECT tube.tube_table_ensure_attached('bench', 'shard_0001.attached')",
    )
    ours.replicad("streams", "add", "recorded", "--table", "shard_0001.recorded", "--changes")
    kinds = (
        (
            "UPDATE of one row",
            f"\\set id random(1, {ROWS})\nUPDATE shard_0001.{{t}} SET n = n + 1 WHERE id = :id;\n",
            0.7,
        ),
        (
            "UPDATE of 1,000 rows",
            f"\\set id :client_id * {ROWS // 2} + random(0, {ROWS // 2000 - 1}) * 1000\n"
            "UPDATE shard_0001.{t} SET n = n + 1 WHERE id > :id AND id <= :id + 1000;\n",
            0.6,
        ),
        (
            f"INSERT of {COPIED:,} rows",
            f"INSERT INTO shard_0001.{{t}} (body) SELECT md5(g::text) FROM generate_series(1, {COPIED}) AS g;\n",
            0.5,
        ),
    )
    written = [figure for what, script, goal in kinds for figure in _written(options, ours, what, script, goal)]
    return [*written, _wal(ours)]


def _wal(ours: System) -> Figure:
    """Bytes of WAL that each row of an INSERT of 1,000 takes more than without a trigger. What an UPDATE takes depends
    on the space that is free in the pages of the table.
    """
    found: dict[str, float] = {}
    for table in TABLES:
        insert = f"INSERT INTO shard_0001.{table} (body) SELECT md5(g::text) FROM generate_series(1, 1000) AS g"
        ours.sql(*[insert] * 5)  # whole pages come first
        begin = ours.sql("SELECT pg_current_wal_insert_lsn()")
        ours.sql(*[insert] * 10)
        found[table] = float(ours.sql(f"SELECT pg_current_wal_insert_lsn() - '{begin}'")) / 10_000
    more = {table: found[table] - found["plain"] for table in TABLES}
    return Figure(
        "WAL of an inserted row, more than without a trigger",
        f"{more['recorded']:.0f} bytes",
        f"an audit trigger {more['audited']:.0f} bytes, a tube {more['attached']:.0f}; the INSERT itself "
        f"{found['plain']:.0f}",
        Spread.of([more["recorded"] / more["audited"]]),
    )


def _written(options: Options, ours: System, what: str, script: str, goal: float) -> Iterator[Figure]:
    found: dict[str, list[float]] = {table: [] for table in TABLES}
    costs: dict[str, list[float]] = {table: [] for table in TABLES}
    seconds = max(1.0, SECONDS * min(1, options.scale))
    for number in range(options.runs):
        for table in TABLES[number % len(TABLES) :] + TABLES[: number % len(TABLES)]:
            before = ours.cpu_of_ended()
            rate = ours.transactions_per_second(script.format(t=table), seconds, clients=2)
            costs[table].append((ours.cpu_of_ended() - before) / (rate * max(1, round(seconds))) * 1e6)
            found[table].append(rate)
            ours.sql(
                f"DELETE FROM shard_0001.{table} WHERE id > {ROWS}", f"VACUUM shard_0001.{table}", "TRUNCATE audit"
            )
        ours.sql("TRUNCATE tube.bench", "CHECKPOINT")
    kept = {table: Spread.of_ratios(found[table], found["plain"]) for table in TABLES}
    paid = {table: f"{Spread.of(costs[table]).middle:,.0f} us" for table in TABLES}
    yield Figure(
        f"{what}, 2 clients: throughput that is kept",
        f"{rates(found['recorded'], '/s')}, {paid['recorded']}",
        f"without {rates(found['plain'], '/s')}, {paid['plain']}; a tube, {paid['attached']}, keeps "
        f"{kept['attached'].middle:.2f}",
        kept["recorded"],
        at_least=goal,
    )
    yield Figure(
        "  to an audit trigger for each row",
        "",
        f"{paid['audited']}, which keeps {kept['audited'].middle:.2f}",
        Spread.of_ratios(found["recorded"], found["audited"]),
        at_least=1.0,
    )


def _readers(options: Options, ours: System) -> list[Figure]:
    readers = min(options.sized(READERS), allow_files(2 * READERS + SPARE) - SPARE)
    ours.sql(
        "CREATE TABLE shop (id bigint PRIMARY KEY, customer_id bigint, n integer)",
        f"INSERT INTO shop SELECT i, i, 0 FROM generate_series(1, {2 * readers}) AS i",
    )
    ours.replicad("streams", "add", "shop", "--table", "public.shop", "--changes", "--filter", "customer_id")
    matching, idle = f"random(1, {readers})", f"random({readers + 1}, {2 * readers})"
    with ours.daemon() as daemon:
        with _crowd(daemon, 1) as few:
            alone, commits = _follow(ours, daemon, few, idle)[1:]
            base = alone / commits
        with _crowd(daemon, readers) as crowd:
            _, busy, commits = _follow(ours, daemon, crowd, idle)
            late, load, _ = _follow(ours, daemon, crowd, matching)
    cost = (busy / commits - base) / readers
    late.sort()
    return [
        Figure(
            f"{readers:,} readers with {readers:,} values, {RATE:,} changes/s: p99",
            f"p50 {late[len(late) // 2] * 1e3:.1f} ms, p99 {late[len(late) * 99 // 100] * 1e3:.1f} ms",
            f"goal {P99 * 1e3:.0f} ms",
            Spread.of([late[len(late) * 99 // 100] / P99]),
            at_most=1.0,
        ),
        Figure(
            "  cores of the daemon",
            f"{load / READ_SECONDS:.2f}",
            "goal: one",
            Spread.of([load / READ_SECONDS]),
            at_most=1.0,
        ),
        Figure(
            "  a reader without matches, for each commit",
            f"{cost * 1e6:.3f} us",
            f"goal {IDLE * 1e6:.0f} us",
            Spread.of([max(cost, 0.0) / IDLE]),
            at_most=1.0,
        ),
    ]


@contextmanager
def _crowd(daemon: Daemon, readers: int) -> Iterator[dict[int, socket.socket]]:
    """So many readers, each of its value, that have been sent their position."""
    links: dict[int, socket.socket] = {}
    try:
        for value in range(1, readers + 1):
            link = connect(daemon.host, daemon.port, f"REPLICATE shop NOW where=customer_id={value}\n".encode())
            links[link.fileno()] = link
        for link in links.values():
            received = b""
            while b"POSITION shop" not in received:
                if not (data := link.recv(65536)):
                    raise RuntimeError(f"a reader was refused: {received[-200:]!r}")
                received += data
            link.setblocking(False)
        yield links
    finally:
        for link in links.values():
            link.close()


def _follow(ours: System, daemon: Daemon, links: dict[int, socket.socket], ids: str) -> tuple[list[float], float, int]:
    """Write to rows with these ids, and read. Returns the latencies, the daemon's processor time, and the commits."""
    script = f"\\set id {ids}\nUPDATE shop SET n = n + 1 WHERE id = :id;\n"
    command = ours.pgbench(script, "-T", str(int(READ_SECONDS)), "-R", str(RATE), clients=4)
    late: list[float] = []
    poll = select.epoll()
    for number in links:
        poll.register(number, select.EPOLLIN)
    before = daemon.cpu()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as writer:
        ends: float | None = None
        while ends is None or time.monotonic() < ends:
            for number, _ in poll.poll(0.2, 4096):
                data = links[number].recv(262_144)
                now = time.time()
                if not data:
                    raise RuntimeError("a reader was cut off")
                late += [now - datetime.fromisoformat(at.decode()).timestamp() for at in AT.findall(data)]
            if ends is None and writer.poll() is not None:
                ends = time.monotonic() + 0.5
        assert writer.stdout is not None
        output = writer.stdout.read()
    used = daemon.cpu() - before
    poll.close()
    found = re.search(r"transactions actually processed: (\d+)", output)
    if found is None:
        raise RuntimeError(f"pgbench failed: {output[-300:]}")
    return late, used, int(found[1])
