"""Tubes while a transaction holds an old snapshot, so that VACUUM may not remove the pods that were acked.

A daemon's workers read and ack pods, in rounds; then the same is measured as before that: a read from the start of a
partition over TCP, `tube_plan` for it, and `tube_stats` for the tube. Beside it stands what they take without the
low-water marks (`tube_low`). The rounds make as many dead pods as ten minutes at 800 pods a second, only faster.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

import asyncpg

from bench.report import Figure, Spread
from bench.system import Daemon, Options, System, connect, system
from bench.tubes import by_daemon, fill, take, wait_for

DEAD = 480_000  # pods that are acked under the snapshot: ten minutes at 800 a second
ROUNDS = 8
WAITING = 4_000  # pods that wait while something is measured
PARTITIONS = 4
TIMES = 30  # of each measurement; the median counts
GOAL = 1.2
TUBE = "bench"

Found = dict[str, float]  # milliseconds by what was measured


def run(options: Options) -> list[Figure]:
    """Three figures: each the median time under the snapshot, to that before it."""
    with system() as ours, ours.daemon() as daemon:
        ours.sql(f"SELECT tube.tube_ensure_exists('{TUBE}', {PARTITIONS})")
        fill(ours, TUBE, WAITING, 1)
        by_daemon(ours, daemon, TUBE, PARTITIONS, 1)
        quiet, held, unmarked = asyncio.run(_measured(options, ours, daemon))
    return [
        Figure(
            f"{what}, {options.sized(DEAD):,} dead pods",
            f"{held[what]:.2f} ms",
            f"none {quiet[what]:.2f} ms; without marks {unmarked[what]:.2f} ms",
            Spread.of([held[what] / quiet[what]]),
            at_most=GOAL,
        )
        for what in quiet
    ]


async def _measured(options: Options, ours: System, daemon: Daemon) -> tuple[Found, Found, Found]:
    connection, snapshot = await asyncpg.connect(ours.url), await asyncpg.connect(ours.url)
    fill(ours, TUBE, WAITING, 1)
    quiet = await _times(connection, daemon)
    await snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()")
    by_daemon(ours, daemon, TUBE, PARTITIONS, 1)
    for _ in range(ROUNDS):
        fill(ours, TUBE, options.sized(DEAD) // ROUNDS, 1)
        by_daemon(ours, daemon, TUBE, PARTITIONS, 1)
    fill(ours, TUBE, WAITING, 1)
    held = await _times(connection, daemon)
    await connection.execute("DELETE FROM tube.tube_low")
    unmarked = await _times(connection, daemon)
    await snapshot.close()
    await connection.close()
    return quiet, held, unmarked


async def _times(connection: asyncpg.Connection, daemon: Daemon) -> Found:
    """The median of each, one after the other in turns."""
    found: dict[str, list[float]] = {}
    where = f"{TUBE} 0/{PARTITIONS}"
    with connect(daemon.host, daemon.port, f"CLAIM {where}\n".encode()) as link:
        term = int(wait_for(link, b"LEASE")[3])
        last = await connection.fetchval("SELECT last_value FROM tube.tube_seq")
        plan = f"SELECT * FROM tube.tube_plan('{TUBE}', {PARTITIONS}, 0, {term}, 0, 0, {last}, 100)"
        for wait in (1, *[0] * TIMES):  # the first waits for the tube's position
            began = time.perf_counter()
            link.sendall(f"PODS {where} {term} after=0.0 limit=100 wait={wait}\n".encode())
            pods, _ = take(link)
            _note(found, "a read of 100 pods from the start", began)
            if not pods:
                raise RuntimeError("the read from the start returned no pods")
            for what, statement in (("tube_plan", plan), ("tube_stats", "SELECT * FROM tube.tube_stats()")):
                began = time.perf_counter()
                await connection.fetch(statement)
                _note(found, what, began)
        link.sendall(f"RELEASE {where} {term}\n".encode())
        wait_for(link, b"RELEASE")
    return {what: median(times[1:]) for what, times in found.items()}


def _note(found: dict[str, list[float]], what: str, began: float) -> None:
    found.setdefault(what, []).append((time.perf_counter() - began) * 1000)
