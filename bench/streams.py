"""A thousand streams beside ten: from commit to client, and what the daemon and Postgres take while nothing happens.

One stream gets probes; a client that follows it notes when each row arrived. The other streams are registered, served
and silent, as most tables of a large database are.
"""

from __future__ import annotations

import asyncio
import time

from bench.latency import commit_probes, polling
from bench.readers import Door, probes
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import STREAM, Options, System, system, wait_until

FEW, MANY = 10, 1000
PROBES = 300
P50_GOAL, IDLE_GOAL = 1.5, 0.02  # times the p50 beside FEW streams; share of a processor
_AT_ONCE = 100  # streams that one transaction adds
_SERVED = 120.0  # seconds for all streams to be served


def run(options: Options) -> list[Figure]:
    """The latency and the idle processor time with FEW streams, then with MANY."""
    with system() as ours:
        ours.make_stream()
        beside_few, idle_few = _measure(ours, FEW, options)
        beside_many, idle_many = _measure(ours, MANY, options)
    p50 = [percentile(found, 0.5) for found in (beside_few, beside_many)]
    ratio = Spread.of([p50[1] / p50[0]])
    return [
        Figure(f"{MANY:,} streams: p50 / p99", latency(beside_many), f"{FEW} streams {latency(beside_few)}", ratio),
        Figure(
            "  p50, as a share of its goal",
            "",
            f"{P50_GOAL:g} times that of {FEW}",
            Spread.of([p50[1] / p50[0] / P50_GOAL]),
            at_most=1.0,
        ),
        Figure(
            f"idle, {MANY:,} streams: processors, as a share of the goal",
            amount(idle_many, "processors"),
            f"{FEW} streams {amount(idle_few, 'processors')}",
            Spread.of([idle_many / IDLE_GOAL]),
            at_most=1.0,
        ),
    ]


def _measure(ours: System, count: int, options: Options) -> tuple[list[float], float]:
    """Seconds from commit to client, and the share of a processor that is used while idle, with so many streams."""
    _add_streams(ours, count)
    with ours.daemon() as daemon:
        wait_until(lambda: _served(ours) == count, f"{count} streams to be served", seconds=_SERVED)
        door = Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")
        with probes(door) as listening:
            committed = asyncio.run(commit_probes(ours, STREAM, options.sized(PROBES)))
            time.sleep(1.0)
            seen = listening.stop()
        missing = committed.keys() - seen.keys()
        if missing:
            raise RuntimeError(f"{len(missing)} probes were not seen within a second")
        return [seen[number][0] - at for number, at in committed.items()], polling(ours, daemon)


def _served(ours: System) -> int:
    """How many streams have a noted position."""
    return int(ours.sql("SELECT count(*) FROM replicad.stream_position WHERE writer = 0"))


def _add_streams(ours: System, count: int) -> None:
    """Silent streams s1, s2, ... until there are so many in all."""
    there = int(ours.sql("SELECT count(*) FROM replicad.stream"))
    for first in range(there, count, _AT_ONCE):
        ours.sql(
            *(
                f"CREATE TABLE s{n} (id bigserial PRIMARY KEY, body text); "
                f"SELECT FROM replicad.stream_add('s{n}', 's{n}', 'id')"
                for n in range(first, min(first + _AT_ONCE, count))
            )
        )
