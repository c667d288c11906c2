"""Random faults against whole installations, from seeds: `make torture`, or `python -m tests.torture --help`.

Each schedule has a Postgres, two daemons, writers of all kinds and clients of all kinds: over TCP, Redis and HTTP
(pages and events), `replicad tail`, the source for Spark, a sender, a cache and a worker that reports who is online.
Faults come between what operators do every day. It prints what was lost, repeated, out of order or kept though gone,
with the schedule and what was sent. `--seed N --schedules 1` plays it again. REPLICAD_FORKS_POSTGRES names the folder
of the programs of another PostgreSQL.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog
import trio

from tests import redis_servers
from tests.conftest import server_folder
from tests.forks.cluster import NAMED
from tests.forks.schedule import DAEMONS, KINDS, Player, make_schedule
from tests.forks.tables import EVERYDAY, TABLES
from tests.forks.template import made_template
from tests.forks.world import open_world


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule (default 1)")
    parser.add_argument("--schedules", type=int, default=10, help="how many, one seed after another (default 10)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--only", default="", help=f"kinds of faults, with commas: {','.join(KINDS)}")
    parser.add_argument("--verbose", action="store_true", help="print what happened when, where nothing is wrong too")
    parser.add_argument("--show", action="store_true", help="print the schedules and play none")
    options = parser.parse_args()
    only = [kind for kind in options.only.split(",") if kind]
    if unknown := set(only) - set(KINDS):
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(KINDS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # of clients in here
    seeds = range(options.seed, options.seed + options.schedules)
    if options.show:
        for seed in seeds:
            show(seed, only)
        return
    failed = torture(seeds, options.seconds, only, verbose=options.verbose)
    sys.exit(f"{len(failed)} schedules failed: {' '.join(map(str, failed))}" if failed else 0)


def show(seed: int, only: Collection[str] = ()) -> None:
    """Print a schedule."""
    print(f"seed {seed}")
    for number, steps in enumerate(make_schedule(seed, only), 1):
        print(f"  round {number}: {', '.join(map(str, steps))}")


def torture(
    seeds: range, seconds: float = float("inf"), only: Collection[str] = (), *, verbose: bool = False
) -> list[int]:
    """Play the schedules of the seeds; returns those that failed."""
    began, failed, played = time.monotonic(), [], 0
    if redis_servers.PROGRAM is None:
        print("no reader over Redis: there is no redis-server on this machine (apt-get install redis-server)")
    with server_folder() as template:
        made_template(template)
        for seed in seeds:
            if time.monotonic() - began > seconds:
                break
            played += 1
            with server_folder() as folder:
                if not trio.run(partial(play, seed, folder, template, only, verbose=verbose)):
                    failed.append(seed)
    print(f"{played} schedules in {time.monotonic() - began:.0f} s, {len(failed)} failed {failed or ''}")
    return failed


async def play(seed: int, folder: Path, template: Path, only: Collection[str] = (), *, verbose: bool = False) -> bool:
    """Play one schedule and report on it; whether it passed."""
    began = time.monotonic()
    rounds = make_schedule(seed, only)
    tables = (*TABLES, *EVERYDAY)
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_servers.real_redis(folder)).url if redis_servers.PROGRAM else None
        more = () if redis is None else ("--redis", redis)
        opened = open_world(folder, template, daemons=DAEMONS, tables=tables, seed=seed, more=more)
        world = await stack.enter_async_context(opened)
        world.read_all_ways(folder, redis)
        player = Player(world)
        try:
            await player.play(seed, rounds)
        except Exception as failed:  # noqa: BLE001 - reported, and the next schedule is played
            _report_failure(seed, player, failed)
            return False
        if verbose:
            print("\n".join(f"  {line}" for line in player.played))
        told: Counter[str] = Counter()
        for client in (*world.holders, *world.readers):
            told.update(client.counts())
        words = ", ".join(f"{what} {times}" for what, times in sorted(told.items()))
        writes = sum(world.writing.done.values())
        print(
            f"seed {seed} passed in {time.monotonic() - began:.1f} s: {sum(map(len, rounds))} faults, "
            f"{writes} transactions; {words}",
            flush=True,
        )
    return True


def _report_failure(seed: int, player: Player, failed: Exception) -> None:
    named = f"REPLICAD_FORKS_POSTGRES={NAMED} " if NAMED else ""
    print(f"seed {seed} FAILED; again: {named}python -m tests.torture --seed {seed} --schedules 1")
    print("\n".join(f"  {line}" for line in player.played))
    for failure in _leaves(failed):
        print(f"{type(failure).__name__}: {failure}")
    for server in player.world.servers:
        print(f"  daemon {server.number} said at last:\n{server.said()}")
    sys.stdout.flush()


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        for one in failure.exceptions:
            yield from _leaves(one)
    else:
        yield failure


if __name__ == "__main__":
    main()
