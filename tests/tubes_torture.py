"""Random faults around the workers of a tube, from seeds: `python -m tests.tubes_torture --help`.

Each run has a server with the source and one with the downstream, two daemons, three workers as processes, and programs
that write with transactions of all kinds, on tables whose keys are of one kind. Daemons and workers are killed and
suspended, the number of partitions and the predicate change, backfills are asked for, triggers are off for a while,
ids fail, a standby that lags is promoted, an older copy of the source is put back. At the end the tube must become
empty and the downstream equal to the source, and no id may have been at two workers at once.

In every second run nothing happens that only a backfill can mend, and none is asked for at the end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from replicad.errors import DatabaseError
from replicad.nurseries import open_plain_nursery
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from tests import clock
from tests.conftest import FAST, install, psql, server_folder
from tests.forks.cluster import Cluster
from tests.shrinking import Enough, shrink
from tests.tubes.world import (
    COUNTS,
    DOWNSTREAM,
    KEYS,
    SHARDS,
    TUBE,
    VIOLATIONS,
    WANTED,
    Program,
    Writer,
    downstream,
    free_port,
    rows,
    tables,
)

DAEMONS, WORKERS, WRITERS = 2, 3, 3
ROUNDS = 6
SHRINKING = 900.0  # seconds for the search of the shortest schedule that fails
TRIES = 2  # of each shorter schedule: not each play of one that can fail does
DRAINED = 180.0  # seconds for the tube to become empty when the faults are over; only a hang takes so long
KILL, SUSPEND, PARTITIONS, BACKFILL, PAUSE = "kill", "suspend", "partitions", "backfill", "pause"
PREDICATE, DISABLE, POISON, RESTORE, PROMOTE, CLOCK = "predicate", "disable", "poison", "restore", "promote", "clock"
WEIGHTS = {
    KILL: 4, SUSPEND: 4, PARTITIONS: 2, BACKFILL: 1, PAUSE: 1, PREDICATE: 1, DISABLE: 1, POISON: 3,
    RESTORE: 1, PROMOTE: 1, CLOCK: 1,
}  # fmt: skip
MENDED = (PREDICATE, DISABLE)  # only a backfill brings in what is missing afterwards


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens. `whom`: a process, for a clock with the seconds by which it is wrong, or a number;
    `seconds` until the next step.
    """

    what: str
    whom: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.whom} ({self.seconds:.1f} s)".replace("  ", " ")


def recorded(seed: int) -> bool:
    """Whether nothing happens that only a backfill can mend."""
    return seed % 2 == 0


def make_schedule(seed: int, only: Collection[str] = ()) -> list[Step]:
    """The steps of a seed, always the same; of the kinds `only` where they are named."""
    chance = random.Random(seed)
    names = [f"daemon{n}" for n in range(DAEMONS)] + [f"worker{n}" for n in range(WORKERS)] * 2
    kinds = [what for what in WEIGHTS if not (recorded(seed) and what in MENDED) and (not only or what in only)]
    weights = {what: WEIGHTS[what] for what in kinds}
    steps = []
    for _ in range(ROUNDS):
        [what] = chance.choices(list(weights), list(weights.values()))
        whom = {
            KILL: chance.choice(names),
            SUSPEND: chance.choice(names),
            PARTITIONS: str(chance.randint(1, SHARDS)),
            PREDICATE: str(chance.choice([0, 2, 3])),
            POISON: str(chance.choice([5, 50, 90])),
            CLOCK: f"{chance.choice(names)}:{chance.choice([-86_400, -3600, 3600, 86_400])}",
        }.get(what, "")
        steps.append(Step(what, whom, chance.choice([0.2, 1.0, 2.0, 5.0])))  # a lease lives for 3 s
    return steps


class Run:
    """One run. `source`: the server with the tables and the tube; `down`: the address of the downstream."""

    def __init__(self, seed: int, steps: Sequence[Step], source: Cluster, down: str, folder: Path) -> None:
        self.seed, self.steps, self.source, self.url, self.down_url = seed, steps, source, source.url, down
        self.folder = folder
        kind = seed // 2 % len(KEYS)
        self.key = KEYS[kind]
        install(self.url, "stream", "tube")
        psql(self.url, tables(self.key))
        psql(down, downstream(self.key))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(DAEMONS)]
        serve = ["replicad", "serve", "--log-format", "json", "--listen"]
        environment = {"REPLICAD_DATABASE": self.url}
        self.programs = {
            f"daemon{n}": Program(f"daemon{n}", [*self._clock(f"daemon{n}"), *serve, address], folder, environment)
            for n, address in enumerate(addresses)
        }
        worker = str(Path(__file__).with_name("tubes") / "worker.py")
        for n in range(WORKERS):
            words = [worker, self.url, down, f"worker{n}", TUBE, str(seed * 10 + n), str(kind), *addresses]
            self.programs[f"worker{n}"] = Program(f"worker{n}", [*self._clock(f"worker{n}"), *words], folder)

    def _clock(self, name: str) -> list[str]:
        """The words that give a program a clock of its own."""
        clock.step(self.folder / f"{name}.clock", 0)
        return ["-m", "tests.clock", str(self.folder / f"{name}.clock")]

    async def play(self) -> list[str]:
        """Play the schedule; returns what went wrong."""
        opened = partial(open_database, application_name="checker", connect_timeout=5)
        try:
            for program in self.programs.values():
                program.start()
            async with opened(self.url, size=WRITERS + 2) as db, opened(self.down_url, size=2) as down:
                return await self._play(db, down)
        finally:
            for program in self.programs.values():
                program.send(signal.SIGKILL)

    async def _keep(self) -> None:
        """Start programs again that have ended because something was away when they began."""
        while True:
            for program in self.programs.values():
                program.keep()
            await trio.sleep(0.2)

    async def _play(self, db: Database, down: Database) -> list[str]:
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._keep)
            return await self._play_steps(db, down)

    async def _play_steps(self, db: Database, down: Database) -> list[str]:
        pure = recorded(self.seed)
        writers = [Writer(db, self.key, self.seed * 100 + n, recorded=pure) for n in range(WRITERS)]
        async with trio.open_nursery() as nursery:
            for writer in writers:
                nursery.start_soon(writer.run)
            with trio.fail_after(DRAINED):  # so that the faults meet workers that work
                while not await down.fetch_value("SELECT count(*) FROM down.rows"):
                    await trio.sleep(0.1)
            for one in self.steps:
                await self._take(one, db, down)
            for writer in writers:
                writer.stop.set()
        await _end_prepared(db, older="0 s")
        await down.execute("DELETE FROM down.poison")
        if not pure:
            await _backfill(db)
        wrong = []
        if not await _drained(db):
            [(left,)] = await rows(db, f"SELECT count(*) FROM tube.{TUBE}")
            leases = await rows(db, "SELECT partition, partitions, split_part(holder, '!', 1) FROM tube.tube_lease")
            wrong.append(f"the tube still has {left} pods; leases: {[tuple(row) for row in leases]}")
        for program in self.programs.values():
            program.keep()
        wrong += [str(row["text"]) for row in await down.fetch(VIOLATIONS)]
        wrong += await self._differences(db, down)
        done, failed = sum(writer.done for writer in writers), sum(writer.failed for writer in writers)
        [counts] = await down.fetch(COUNTS)
        print(
            f"  {self.key.type}: {done} transactions, {failed} failed; "
            + ", ".join(f"{n} {what}" for what, n in counts.items()),
            flush=True,
        )
        return wrong

    async def _differences(self, db: Database, down: Database) -> list[str]:
        """Rows that the two sides do not have alike, at most twenty."""
        wanted = f"SELECT {self.key.column}::text AS id, value FROM source, setting WHERE {WANTED}"
        there = {row["id"]: row["value"] for row in await rows(db, wanted)}
        here = {row["id"]: row["value"] for row in await down.fetch(DOWNSTREAM)}
        return [
            f"differs: {id}: source {there.get(id)}, downstream {here.get(id)}"
            for id in sorted(there.keys() | here.keys())
            if there.get(id) != here.get(id)
        ][:20]

    async def _take(self, one: Step, db: Database, down: Database) -> None:
        program = self.programs.get(one.whom)
        began = await down.fetch_value("SELECT clock_timestamp()")
        now = f"SELECT partitions, predicate INTO p, q FROM tube.tube_registry WHERE tube = '{TUBE}'"
        ensure = (
            "DO $$ DECLARE p integer; q text; BEGIN {0}; PERFORM tube.tube_ensure_exists('{1}', {2}, {3}); {4} END $$"
        )
        if one.what == PARTITIONS:
            await _change(db, ensure.format(now, TUBE, one.whom, "q", ""))
        elif one.what == PREDICATE:
            predicate = f"'value % {one.whom} <> 0'" if one.whom != "0" else "NULL"
            setting = f"UPDATE setting SET m = {one.whom};"
            await _change(db, ensure.format(now, TUBE, "p", predicate, setting))
        elif one.what == BACKFILL:
            await _backfill(db)
        elif one.what == DISABLE:
            await _change(db, "ALTER TABLE items DISABLE TRIGGER USER")
        elif one.what == POISON:
            await down.execute("INSERT INTO down.poison VALUES ($1)", int(one.whom))
        elif one.what in (RESTORE, PROMOTE):
            await trio.to_thread.run_sync(self._fork, one)
        elif one.what == CLOCK:
            name, seconds = one.whom.split(":")
            clock.step(self.folder / f"{name}.clock", float(seconds))
        elif program is not None:
            program.keep()
            program.send(signal.SIGKILL if one.what == KILL else signal.SIGSTOP)
        await trio.sleep(one.seconds)
        if one.what == DISABLE:
            await _change(db, "ALTER TABLE items ENABLE TRIGGER USER")
        elif one.what == POISON:
            await down.execute("DELETE FROM down.poison")
        elif program is not None and one.what == KILL:
            program.start()
        elif program is not None:
            program.send(signal.SIGCONT)
            await down.execute("INSERT INTO down.pause VALUES ($1, $2, clock_timestamp())", one.whom, began)

    def _fork(self, step: Step) -> None:
        """Put the source back to what it was some seconds ago, or promote a standby that lags as much."""
        source = self.source
        if step.what == RESTORE:
            source.stop(signal.SIGINT)
            copy = source.copy()
            source.start()
            time.sleep(step.seconds)
            source.stop(signal.SIGQUIT)
            source.put_back(copy)
            source.start()
        else:
            standby = source.make_standby()
            source.cut(standby)
            time.sleep(step.seconds)
            source.end(source.promote(standby))


async def _backfill(db: Database) -> None:
    await _change(db, f"SELECT tube.tube_backfill_request('{TUBE}', NULL, 0, {SHARDS})")


async def _change(db: Database, query: str) -> None:
    """A change that locks tables, tried again as `replicad tubes` does it."""
    with trio.fail_after(DRAINED):
        while True:
            try:
                async with db.connection() as connection:
                    await connection.execute("SET lock_timeout = '400ms'")
                    await connection.execute(query)
            except DatabaseError:
                await _end_prepared(db, older="3 s")
                await trio.sleep(0.2)
            else:
                return


async def _end_prepared(db: Database, *, older: str) -> None:
    """Roll back transactions that were prepared by writers whose server went away."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - $1::text::interval"
    with suppress(DatabaseError):  # the server may be away, or a writer ends the transaction itself
        for (gid,) in await db.fetch(query, older):
            await db.execute(f"ROLLBACK PREPARED '{gid}'")


async def _drained(db: Database) -> bool:
    """Whether the tube becomes empty, with all parked ids put back, and its backfills end."""
    left = (
        f"SELECT EXISTS (SELECT FROM tube.{TUBE}) OR EXISTS (SELECT FROM tube.tube_backfill AS b WHERE NOT b.finished) "
        "OR EXISTS (SELECT FROM tube.tube_parked)"
    )
    with trio.move_on_after(DRAINED):
        while (await rows(db, left))[0][0]:
            numbers = [row["parked"] for row in await rows(db, "SELECT parked FROM tube.tube_parked")]
            if numbers:
                await rows(db, f"SELECT tube.tube_parked_replay('{TUBE}', ARRAY{numbers}::bigint[])")
            await trio.sleep(0.2)
        return True
    return False


def play(seed: int, folder: Path, steps: Sequence[Step] | None = None) -> list[str]:
    """Make the servers of a run and play these steps, or those of the seed; returns what went wrong."""
    with server_folder() as place, EmbeddedPostgres(place / "down", FAST) as down:
        (place / "source").mkdir()
        source = Cluster(place / "source")
        try:
            return trio.run(Run(seed, make_schedule(seed) if steps is None else steps, source, down.url, folder).play)
        finally:
            source.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tubes_torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default 1)")
    parser.add_argument("--runs", type=int, default=10, help="how many, one seed after another (default 10)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--only", default="", help=f"kinds of faults, with commas: {','.join(WEIGHTS)}")
    text = "play these steps in place of the seed's: WHAT, WHOM or nothing, and SECONDS, with slashes"
    parser.add_argument("--steps", nargs="+", default=None, metavar="WHAT/WHOM/SECONDS", help=text)
    text = f"after a failure, look for so long for the shortest schedule that fails (default {SHRINKING}; 0: do not)"
    parser.add_argument("--shrink", type=float, default=SHRINKING, metavar="SECONDS", help=text)
    options = parser.parse_args()
    only = [kind for kind in options.only.split(",") if kind]
    if unknown := set(only) - WEIGHTS.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(WEIGHTS)}")
    if only and recorded(options.seed) and set(only) <= set(MENDED):
        parser.error(f"in runs of an even seed no {' and no '.join(MENDED)} happens")
    try:
        steps = None if options.steps is None else [read_step(text) for text in options.steps]
    except ValueError as error:
        parser.error(str(error))
    began, failed, runs = time.monotonic(), [], 0
    for seed in range(options.seed, options.seed + options.runs):
        if time.monotonic() - began > options.seconds:
            break
        runs += 1
        at = time.monotonic()
        present = make_schedule(seed, only) if steps is None else steps
        print(f"seed {seed}: {', '.join(map(str, present))}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"replicad-tubes-{seed}-"))  # kept if the run fails
        try:
            wrong = play(seed, folder, present)
        except Exception:  # noqa: BLE001 - the next seeds are played; this one has failed
            wrong = traceback.format_exc().splitlines()
        for text in wrong:
            print(f"  {text}", flush=True)
        print(
            f"  {'failed; logs in ' + str(folder) if wrong else 'passed'}, {time.monotonic() - at:.0f} s",
            flush=True,
        )
        if wrong:
            failed.append(seed)
            if options.shrink > 0:
                _shrink(seed, present, options.shrink)
        else:
            shutil.rmtree(folder)
    print(f"{runs} runs in {time.monotonic() - began:.0f} s, {len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


def read_step(text: str) -> Step:
    """A step as `--steps` takes it. Raises ValueError."""
    what, _, rest = text.partition("/")
    whom, _, seconds = rest.rpartition("/")
    if what not in WEIGHTS:
        raise ValueError(f"{text}: there is no fault {what!r}; there are {', '.join(WEIGHTS)}")
    return Step(what, whom, float(seconds))


def _differs(seed: int, steps: Sequence[Step]) -> bool:
    with tempfile.TemporaryDirectory(prefix=f"replicad-tubes-{seed}-") as folder:
        return bool(play(seed, Path(folder), steps))


def _shrink(seed: int, steps: Sequence[Step], seconds: float) -> None:
    """Print the shortest schedule that failed within the time."""
    deadline, tried = time.monotonic() + seconds, 0

    async def fails(shorter: Sequence[Step]) -> bool:
        nonlocal tried
        for _ in range(TRIES):
            if time.monotonic() > deadline:
                raise Enough
            tried += 1
            if await trio.to_thread.run_sync(_differs, seed, shorter):
                return True
        return False

    found = trio.run(shrink, steps, fails, lambda _: True)
    words = " ".join(f"{one.what}/{one.whom}/{one.seconds:g}" for one in found)
    print(f"  the shortest that failed in {tried} tries has {len(found)} of {len(steps)} steps:")
    print(f"  python -m tests.tubes_torture --seed {seed} --runs 1 --steps {words}", flush=True)


if __name__ == "__main__":
    main()
