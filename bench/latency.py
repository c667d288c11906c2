"""From commit to client: what a subscriber waits, with nobody else writing and beside 32 writers.

One connection commits a probe now and then and notes when the commit returned; a client in another process notes when
the row arrived. Beside it the usual other way, a trigger that calls pg_notify in the writer's transaction, and what
either costs 32 writers who commit single rows as fast as they can.

The limit when idle, by the times of the daemon's steps: of 2.6 ms, Postgres rings after 0.1, the poll begins after
another 0.2, its two statements take 1.15, the copy of the row 0.7, tasks and sending the rest. In Postgres all three
statements take 0.1 ms. What is left is a way there and back of the driver in Python, three times 0.4 to 0.5 ms; the
goal of 0.8 ms allows for one. At rest some 16 short statements a second see to streams, tubes and rights.

Beside 32 writers, who keep both processors busy, the daemon waits twice as long for a processor as it runs.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import asyncpg

from bench.readers import Door, probes
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import STREAM, Daemon, Options, System, connect, cpu, process, system

PROBES = 500
PAUSES = (0.005, 0.035)  # seconds between two probes, at random so that polls and probes do not fall into step
WRITERS = 32
P50_GOAL, P99_GOAL, CPU_GOAL = 0.0008, 0.002, 0.002  # idle: seconds, seconds, and a share of a processor for polling
BUSY_GOALS, KEPT_GOAL = (0.003, 0.008), 0.9  # beside the writers: seconds, p50 and p99; and what these keep
WATCHED = 15.0  # seconds for which that is measured
WRITING = 5.0  # seconds for each measurement of the writers
_BODY = """'["$~%s~:example.com","!room:example.com","m.room.msg"]'"""
_QUIET = """INSERT INTO {table} (body) VALUES ('["$event:example.com","!room:example.com","m.room.msg"]');\n"""

Times = dict[int, float]


def run(options: Options) -> list[Figure]:
    """Latencies idle and under load, and the writers' throughput."""
    count = options.sized(PROBES)
    with system() as ours:
        with ours.daemon() as daemon:
            ours.make_stream()
            _make_notifying(ours)
            figures = _idle(ours, daemon, count)
            polled = _followed(ours, daemon, count, load=STREAM)
        notified = _notified(ours, count, load="notifying")
        figures.append(_figure(f"beside {WRITERS} writers", polled, notified))
        figures += _to_goals(polled, *BUSY_GOALS)
        return [*figures, *_writers(options, ours)]


def _idle(ours: System, daemon: Daemon, count: int) -> list[Figure]:
    notified = _notified(ours, count)
    followed = _followed(ours, daemon, count)
    used = polling(ours, daemon)
    return [
        _figure("idle", followed, notified),
        *_to_goals(followed, P50_GOAL, P99_GOAL),
        _to_goal("processor time at rest, Postgres' included", used, CPU_GOAL, f"{CPU_GOAL:.1%} of a processor"),
        _figure("idle, with a DOORBELL after the commit", _followed(ours, daemon, count, doorbell=True), notified),
    ]


def _to_goals(seconds: list[float], p50: float, p99: float) -> list[Figure]:
    return [
        _to_goal(name, percentile(seconds, share), goal, f"{goal * 1000:g} ms")
        for name, share, goal in (("p50", 0.5, p50), ("p99", 0.99, p99))
    ]


def _to_goal(what: str, found: float, goal: float, shown: str) -> Figure:
    return Figure(f"  {what}, to its goal", "", shown, Spread.of([found / goal]), at_most=1.0)


def polling(ours: System, daemon: Daemon) -> float:
    """The share of a processor that the daemon, and the processes of Postgres that serve it, use at rest."""
    time.sleep(1.0)  # let what was measured before settle
    serving = ours.serving()

    def used() -> float:
        return daemon.cpu() + sum(map(cpu, serving))

    began = time.monotonic(), used()
    time.sleep(WATCHED)
    return (used() - began[1]) / (time.monotonic() - began[0])


def _figure(what: str, ours: list[float], theirs: list[float]) -> Figure:
    # Of the p99: half of the notifications come before the writer itself hears of its commit.
    ours_late, theirs_late = percentile(ours, 0.99), percentile(theirs, 0.99)
    ratio = Spread.of([ours_late / theirs_late]) if theirs_late > 0 else None
    return Figure(f"{what}: p50 / p99", latency(ours), f"NOTIFY {latency(theirs)}", ratio)


def _writers(options: Options, ours: System) -> list[Figure]:
    """Throughput of the writers: followed by a daemon with a client, and with NOTIFY, each to nobody looking."""
    alone, followed, notifying = [], [], []
    for _ in range(options.runs):
        alone.append(_throughput(options, ours, STREAM))
        with ours.daemon() as daemon, probes(_door(daemon)):
            followed.append(_throughput(options, ours, STREAM))
        notifying.append(_throughput(options, ours, "notifying"))
    return [
        Figure(
            f"{WRITERS} writers while {how}",
            amount(Spread.of(found).middle, "commits/s"),
            f"nobody looks {amount(Spread.of(alone).middle, 'commits/s')}",
            Spread.of_ratios(found, alone),
            at_least=goal,
        )
        for how, found, goal in (
            ("replicad serves them", followed, KEPT_GOAL),
            ("a trigger calls pg_notify", notifying, None),
        )
    ]


def _throughput(options: Options, ours: System, table: str) -> float:
    return ours.transactions_per_second(_QUIET.format(table=table), WRITING * min(1, options.scale), clients=WRITERS)


def _make_notifying(ours: System) -> None:
    """The same table once more, with a trigger that notifies."""
    ours.sql(
        "CREATE TABLE notifying (id bigserial PRIMARY KEY, body json NOT NULL) WITH (autovacuum_enabled = false)",
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM pg_notify('bench', NEW.body::text); RETURN NULL; END$$",
        "CREATE TRIGGER tell AFTER INSERT ON notifying FOR EACH ROW EXECUTE FUNCTION tell()",
    )


def _door(daemon: Daemon) -> Door:
    return Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")


@contextmanager
def writers(ours: System, table: str | None) -> Iterator[None]:
    """The writers at work on a table during the block, if one is named."""
    if table is None:
        yield
        return
    with process(ours.pgbench(_QUIET.format(table=table), "-T", "600", clients=WRITERS)):
        time.sleep(1.0)  # until all of them are connected
        yield


def _followed(
    ours: System, daemon: Daemon, count: int, *, doorbell: bool = False, load: str | None = None
) -> list[float]:
    """Seconds from commit to a client of the daemon."""
    bell = connect(daemon.host, daemon.port) if doorbell else nullcontext()
    with probes(_door(daemon)) as listening, writers(ours, load), bell as link:
        committed = asyncio.run(commit_probes(ours, STREAM, count, _ring(link)))
        time.sleep(0.5)
        seen = listening.stop()
    missing = committed.keys() - seen.keys()
    if missing:
        raise RuntimeError(f"{len(missing)} probes were not seen within half a second")
    return [seen[number][0] - at for number, at in committed.items()]


def _ring(link: socket.socket | None) -> Callable[[], None]:
    return (lambda: None) if link is None else lambda: link.sendall(b"DOORBELL\n")


async def commit_probes(
    ours: System,
    table: str,
    count: int,
    after: Callable[[], None] = lambda: None,
    pauses: tuple[float, float] = PAUSES,
) -> Times:
    """Commit so many probes on a connection of their own; the monotonic time at which each commit returned."""
    committed: Times = {}
    connection = await asyncpg.connect(ours.url)
    for number in range(count):
        await connection.execute(f"INSERT INTO {table} (body) VALUES ({_BODY % number})")
        committed[number] = time.monotonic()
        after()
        await asyncio.sleep(random.uniform(*pauses))
    await connection.close()
    return committed


def _notified(ours: System, count: int, load: str | None = None) -> list[float]:
    """Seconds from commit to a LISTENing connection, on a thread and a loop of its own."""
    seen: Times = {}
    ready, stop = threading.Event(), threading.Event()
    listener = threading.Thread(target=lambda: asyncio.run(_listen(ours, seen, ready, stop)), daemon=True)
    listener.start()
    if not ready.wait(30):
        raise RuntimeError("could not LISTEN")
    with writers(ours, load):
        committed = asyncio.run(commit_probes(ours, "notifying", count))
        time.sleep(0.5)
    stop.set()
    listener.join()
    return [seen[number] - at for number, at in committed.items() if number in seen]


async def _listen(ours: System, seen: Times, ready: threading.Event, stop: threading.Event) -> None:
    connection = await asyncpg.connect(ours.url)

    def note(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        if "~" in payload:
            seen[int(payload.split("~")[1])] = time.monotonic()

    await connection.add_listener("bench", note)
    ready.set()
    while not stop.is_set():
        await asyncio.sleep(0.05)
    await connection.close()
