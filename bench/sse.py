"""Server-sent events beside TCP: what a reader of each kind costs the daemon in memory and in processor time.

Each round starts a daemon for each kind, so that neither inherits memory. Processor time is the daemon's alone, for one
row to one reader: of a large transaction, and of single commits.

Of the memory half is the connection, as over TCP. The other half is the request: its task, its parsed head and the
objects that answer it, which live as long as the reader does.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.readers import Door, crowd, idle
from bench.report import Figure, Spread, amount
from bench.system import BODY, STREAM, Daemon, Options, System, allow_files, free_port, system

READERS = 200
ROWS = 10_000  # of one transaction
COMMITS = 200
GOAL = 25_000  # bytes for each reader
_SPARE = 500  # files that processes open besides


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes for each reader; seconds of processor time for a row to one reader: of many rows, of single commits."""

    memory: float
    many: float
    single: float


def run(options: Options) -> list[Figure]:
    """Three figures: memory, many rows, single commits."""
    readers = min(options.sized(READERS), allow_files(2 * READERS + _SPARE) - _SPARE) // 2 * 2
    lines: list[Cost] = []
    events: list[Cost] = []
    with system() as ours:
        ours.make_stream()
        for _ in range(options.runs):
            for live, costs in ((False, lines), (True, events)):
                port = free_port()
                with ours.daemon("--http", f"127.0.0.1:{port}") as daemon:
                    costs.append(_cost(ours, daemon, _door(daemon, port, live=live), readers))
    return [
        _figure(
            f"memory for each of {readers} readers", "bytes", [c.memory for c in events], [c.memory for c in lines]
        ),
        _figure("processor time, a row of many", "s", [c.many for c in events], [c.many for c in lines]),
        _figure("processor time, a row of a commit", "s", [c.single for c in events], [c.single for c in lines], 1.1),
        Figure(
            "memory for each, to its goal",
            "",
            f"{GOAL:,} bytes",
            Spread.of(c.memory / GOAL for c in events),
            at_most=1.0,
        ),
    ]


def _door(daemon: Daemon, http: int, *, live: bool) -> Door:
    if live:
        ask = f"GET /streams/{STREAM}/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        return Door(daemon.host, http, ask.encode(), b"event: position")
    return Door(daemon.host, daemon.port, f"REPLICATE {STREAM} NOW\n".encode(), b"POSITION")


def _cost(ours: System, daemon: Daemon, door: Door, readers: int) -> Cost:
    with idle(door, 2):  # what the first readers load for all
        before = daemon.memory()
    with idle(door, readers):
        memory = (daemon.memory() - before) / readers
    with crowd(door, readers, ROWS) as some:
        many = daemon.cpu()
        ours.commit_rows(ROWS)
        if some.wait().lost:
            raise RuntimeError("readers were cut off")
        many = daemon.cpu() - many
    with crowd(door, readers, COMMITS) as some:
        single = daemon.cpu()
        insert = f"INSERT INTO {STREAM} (body) SELECT {BODY} FROM generate_series(1, 1) AS n"
        ours.sql(*[insert] * COMMITS)
        if some.wait().lost:
            raise RuntimeError("readers were cut off")
        single = daemon.cpu() - single
    return Cost(memory, many / ROWS / readers, single / COMMITS / readers)


def _figure(what: str, unit: str, events: list[float], lines: list[float], goal: float | None = None) -> Figure:
    def shown(values: list[float]) -> str:
        middle = Spread.of(values).middle
        return amount(middle, unit) if unit == "bytes" else amount(middle * 1e6, "microseconds")

    return Figure(what, f"SSE {shown(events)}", f"TCP {shown(lines)}", Spread.of_ratios(events, lines), at_most=goal)
