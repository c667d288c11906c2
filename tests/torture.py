"""Random faults against whole installations, from seeds: `make torture`, or `python -m tests.torture --help`.

Each schedule has a Postgres, two daemons, writers of all kinds and clients of all kinds: over TCP, Redis and HTTP
(pages and events), `replicad tail`, the source for Spark, a sender, a cache and a worker that reports who is online.
Faults come between what operators do every day. It prints what was lost, repeated, out of order or kept though gone,
with the schedule and what was sent, and then the shortest part of the schedule that still fails. `--seed N --schedules
1` plays it again. REPLICAD_FORKS_POSTGRES names the folder of the programs of another PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

import structlog
import trio

from tests import redis_servers
from tests.conftest import server_folder
from tests.forks.cluster import NAMED
from tests.forks.schedule import DAEMONS, KINDS, Player, Step, make_schedule, playable, written
from tests.forks.tables import EVERYDAY, TABLES
from tests.forks.template import made_template
from tests.forks.world import open_world
from tests.shrinking import Enough, shrink

SHRINKING = 900.0  # seconds for the search of the shortest schedule that fails
TRIES = 2  # of each shorter schedule: not each play of one that can fail does
Rounds = list[list[Step]]
Placed = tuple[int, Step]  # the number of its round


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule (default 1)")
    parser.add_argument("--schedules", type=int, default=10, help="how many, one seed after another (default 10)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--only", default="", help=f"kinds of faults, with commas: {','.join(KINDS)}")
    parser.add_argument("--verbose", action="store_true", help="print what happened when, where nothing is wrong too")
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--steps", default="", metavar="JSON", help="play these rounds of steps in place of the seed's")
    text = f"after a failure, look for so long for the shortest schedule that fails (default {SHRINKING}; 0: do not)"
    parser.add_argument("--shrink", type=float, default=SHRINKING, metavar="SECONDS", help=text)
    parser.add_argument("--show", action="store_true", help="print the schedules and play none")
    parser.add_argument(
        "--cluster", action="store_true", help="a pipeline on a cluster of Spark (tests/cluster_torture.py)"
    )
    options = parser.parse_args()
    if options.cluster:
        from tests import cluster_torture

        seeds = range(options.seed, options.seed + options.schedules)
        failed = cluster_torture.torture(seeds, options.seconds)
        sys.exit(f"{len(failed)} schedules failed: {' '.join(map(str, failed))}" if failed else 0)
    only = [kind for kind in options.only.split(",") if kind]
    if unknown := set(only) - set(KINDS):
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(KINDS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # of clients in here
    seeds = range(options.seed, options.seed + options.schedules)
    try:
        steps = written(options.steps) if options.steps else None
    except ValueError as error:
        parser.error(str(error))
    if options.show:
        for seed in seeds:
            show(seed, only)
        return
    failed = torture(
        seeds,
        options.seconds,
        only,
        first=options.first,
        verbose=options.verbose,
        shrinking=options.shrink,
        steps=steps,
    )
    sys.exit(f"{len(failed)} schedules failed: {' '.join(map(str, failed))}" if failed else 0)


def show(seed: int, only: Collection[str] = ()) -> None:
    """Print a schedule."""
    print(f"seed {seed}")
    for number, steps in enumerate(make_schedule(seed, only), 1):
        print(f"  round {number}: {', '.join(map(str, steps))}")


def torture(
    seeds: range,
    seconds: float = float("inf"),
    only: Collection[str] = (),
    *,
    first: bool = False,
    verbose: bool = False,
    shrinking: float = 0,
    steps: Rounds | None = None,
) -> list[int]:
    """Play the schedules of the seeds, or these `steps` for each; returns those that failed."""
    began, failed, played = time.monotonic(), [], 0
    if redis_servers.PROGRAM is None:
        print("no reader over Redis: there is no redis-server on this machine (apt-get install redis-server)")
    with server_folder() as template:
        made_template(template)

        async def fails(rounds: Rounds, *, report: bool = True) -> bool:
            with server_folder() as folder:
                return not await play(seed, folder, template, rounds, verbose=verbose, report=report)

        for seed in seeds:
            if time.monotonic() - began > seconds or (first and failed):
                break
            played += 1
            rounds = steps or make_schedule(seed, only)
            if trio.run(fails, rounds):
                failed.append(seed)
                if shrinking > 0:
                    trio.run(_shrink, seed, rounds, partial(fails, report=False), shrinking)
    print(f"{played} schedules in {time.monotonic() - began:.0f} s, {len(failed)} failed {failed or ''}")
    return failed


async def _shrink(seed: int, rounds: Rounds, fails: Callable[[Rounds], Awaitable[bool]], seconds: float) -> None:
    """Print the shortest schedule that failed within the time."""
    deadline, tried = trio.current_time() + seconds, 0

    def together(steps: Sequence[Placed]) -> Rounds:
        return [[step for _, step in part] for _, part in groupby(steps, key=lambda placed: placed[0])]

    async def still(steps: Sequence[Placed]) -> bool:
        nonlocal tried
        for _ in range(TRIES):
            if trio.current_time() > deadline:
                raise Enough
            tried += 1
            if await fails(together(steps)):
                return True
        return False

    placed = [(number, step) for number, steps in enumerate(rounds) for step in steps]
    found = together(await shrink(placed, still, lambda steps: playable(together(steps))))
    plain = json.dumps([[step.plain() for step in steps] for steps in found], separators=(",", ":"))
    print(f"seed {seed}: the shortest that failed in {tried} tries has {sum(map(len, found))} of {len(placed)} steps:")
    print(f"  python -m tests.torture --seed {seed} --schedules 1 --steps '{plain}'", flush=True)


async def play(
    seed: int, folder: Path, template: Path, rounds: Rounds, *, verbose: bool = False, report: bool = True
) -> bool:
    """Play one schedule and report on it; whether it passed."""
    began = time.monotonic()
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
            if report:
                _report_failure(seed, player, failed)
            return False
        if not report:
            return True
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
