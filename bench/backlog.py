"""Changes that wait for a consumer: how long it takes to its first one, how fast they are replayed, and what they take
on the disk while a consumer is dead; beside Debezium's engine and raw pgoutput, as in `peers`.

replicad keeps changes as rows of a table, the two others in the WAL, which holds everything else that was written too,
and which the server keeps for them without a bound (`max_slot_wal_keep_size`). The start of Debezium includes a JVM.
A full run takes 20 minutes; `--only replay` and `--only dead` choose.
"""

from __future__ import annotations

import time

from bench.consumers import TABLE, Consumer, Taken
from bench.peers import WAIT, Peer, lines_of, peers, writing
from bench.report import Figure, amount, percentile
from bench.system import Options, System

DEAD = 300.0  # seconds for which a consumer is dead, at DEAD_RATE
DEAD_RATE = 1_000
REPLAYED = 1_000_000  # changes that wait for a consumer at --scale 1


def run(options: Options) -> list[Figure]:
    """A line for each peer, with ours beside it."""
    with peers() as (ours, found):
        figures = _replay(ours, found, options) if options.picks("replay") else []
        return [*figures, *(_dead(ours, found, options) if options.picks("dead") else [])]


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
                taken = _wait_for(followed, waiting, peer.name)
        finally:
            peer.end()
        rate = waiting / max(taken.last - taken.first, 1e-6)
        first[peer.name] = f"{seconds:.2f} s", seconds
        rates[peer.name] = amount(rate, "changes/s"), rate
    return [
        *lines_of(f"start of a consumer to its first of {waiting:,} changes", first),
        *lines_of(f"replay of {waiting:,} changes", rates),
    ]


def _wait_for(followed: Consumer, wanted: int, name: str) -> Taken:
    """Wait until it has so many changes; asking for them begins its count anew."""
    deadline, changes, first = time.monotonic() + WAIT, 0, 0.0
    while True:
        taken = followed.taken()
        changes, first = changes + taken.changes, first or taken.first
        if changes >= wanted:
            taken.changes, taken.first = changes, first
            return taken
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} has {changes} of {wanted} changes after {WAIT:.0f} s")
        time.sleep(0.1)


def _dead(ours: System, found: list[Peer], options: Options) -> list[Figure]:
    """A consumer is killed, and another one goes on after a while."""
    away = max(5.0, DEAD * min(1.0, options.scale))
    disk: dict[str, tuple[str, float]] = {}
    again: dict[str, tuple[str, float]] = {}
    for peer in found:
        peer.start()
        try:
            with writing(ours, DEAD_RATE, away + 2 * WAIT):
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
    return [
        *lines_of(f"{what}: kept on disk for it", disk),
        *lines_of("  until it is less than 1 s behind again", again),
    ]
