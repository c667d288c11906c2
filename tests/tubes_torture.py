"""Random faults around the workers of a tube, from seeds: `python -m tests.tubes_torture --help`.

Each run has two daemons, three workers as processes, and programs that write with transactions of all kinds. Daemons
and workers are killed and suspended, the number of partitions changes, backfills are asked for. At the end the tube
must become empty and the downstream equal to the source, and no id may have been at two workers at once.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from tests.conftest import FAST, install, psql, server_folder
from tests.tubes.world import COUNTS, DIFFERENT, SHARDS, TABLES, TUBE, VIOLATIONS, Program, Writer, free_port

DAEMONS, WORKERS, WRITERS = 2, 3, 3
ROUNDS = 6
DRAINED = 180.0  # seconds for the tube to become empty when the faults are over; only a hang takes so long
KILL, SUSPEND, PARTITIONS, BACKFILL, PAUSE = "kill", "suspend", "partitions", "backfill", "pause"

What = Literal["kill", "suspend", "partitions", "backfill", "pause"]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens. `whom`: a process, or the number of partitions; `seconds` until the next step."""

    what: What
    whom: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.whom} ({self.seconds:.1f} s)".replace("  ", " ")


def make_schedule(seed: int) -> list[Step]:
    """The steps of a seed, always the same."""
    chance = random.Random(seed)
    names = [f"daemon{n}" for n in range(DAEMONS)] + [f"worker{n}" for n in range(WORKERS)] * 2
    steps = []
    for _ in range(ROUNDS):
        what: What = chance.choices((KILL, SUSPEND, PARTITIONS, BACKFILL, PAUSE), (4, 4, 2, 1, 1))[0]
        whom = {
            KILL: chance.choice(names),
            SUSPEND: chance.choice(names),
            PARTITIONS: str(chance.randint(1, SHARDS)),
        }.get(what, "")
        steps.append(Step(what, whom, chance.choice([0.2, 1.0, 2.0, 5.0])))  # a lease lives for 3 s
    return steps


async def play(seed: int, url: str, folder: Path) -> list[str]:
    """Play the schedule of a seed in an empty database that has our schema; returns what went wrong."""
    psql(url, TABLES)
    ports = [free_port() for _ in range(DAEMONS)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    programs = {
        f"daemon{n}": Program(
            f"daemon{n}",
            ["-m", "replicad", "serve", "--listen", address, "--log-format", "json"],
            folder,
            {"REPLICAD_DATABASE": url},
        )
        for n, address in enumerate(addresses)
    }
    worker = str(Path(__file__).with_name("tubes") / "worker.py")
    for n in range(WORKERS):
        words = [worker, url, f"worker{n}", TUBE, str(seed * 10 + n), *addresses]
        programs[f"worker{n}"] = Program(f"worker{n}", words, folder)
    try:
        for program in programs.values():
            program.start()
        async with open_database(url, size=WRITERS + 2, application_name="checker") as db:
            return await _play(seed, db, programs)
    finally:
        for program in programs.values():
            program.send(signal.SIGKILL)


async def _play(seed: int, db: Database, programs: dict[str, Program]) -> list[str]:
    writers = [Writer(db, seed * 100 + n) for n in range(WRITERS)]
    async with trio.open_nursery() as nursery:
        for writer in writers:
            nursery.start_soon(writer.run)
        await _wait_copied(db)
        for step in make_schedule(seed):
            await _take(step, db, programs)
        for writer in writers:
            writer.stop.set()
    await _backfill(db)  # finds what was deleted without a trigger
    wrong = []
    if not await _drained(db):
        left = await db.fetch_value(f"SELECT count(*) FROM tube.{TUBE}")
        leases = await db.fetch("SELECT partition, partitions, split_part(holder, '!', 1) FROM tube.tube_lease")
        wrong.append(f"the tube still has {left} pods; leases: {[tuple(row) for row in leases]}")
    for program in programs.values():
        program.check()
    wrong += [str(row["text"]) for row in await db.fetch(VIOLATIONS)]
    wrong += [f"differs: {dict(row)}" for row in await db.fetch(DIFFERENT)]
    done, failed = sum(writer.done for writer in writers), sum(writer.failed for writer in writers)
    [counts] = await db.fetch(COUNTS)
    print(
        f"  {done} transactions, {failed} failed; " + ", ".join(f"{n} {what}" for what, n in counts.items()), flush=True
    )
    return wrong


async def _take(step: Step, db: Database, programs: dict[str, Program]) -> None:
    program = programs.get(step.whom)
    began = await db.fetch_value("SELECT clock_timestamp()")
    if step.what == PARTITIONS:
        await _change(db, f"SELECT tube.tube_ensure_exists('{TUBE}', {step.whom})")
    elif step.what == BACKFILL:
        await _backfill(db)
    elif program is not None:
        program.check()
        program.send(signal.SIGKILL if step.what == KILL else signal.SIGSTOP)
    await trio.sleep(step.seconds)
    if program is not None and step.what == KILL:
        program.start()
    elif program is not None:
        program.send(signal.SIGCONT)
        await db.execute("INSERT INTO down.pause VALUES ($1, $2, clock_timestamp())", step.whom, began)


async def _backfill(db: Database) -> None:
    await _change(db, f"SELECT tube.tube_backfill_schedule('{TUBE}', 'id', 0, {SHARDS})")


async def _change(db: Database, query: str) -> None:
    """A change that locks tables, tried again as `replicad tubes` does it."""
    with trio.fail_after(DRAINED):
        while True:
            try:
                async with db.connection() as connection:
                    await connection.execute("SET lock_timeout = '400ms'")
                    await connection.execute(query)
            except DatabaseError:
                await trio.sleep(0.2)
            else:
                return


async def _wait_copied(db: Database) -> None:
    """Until the first row is downstream, so that the faults meet workers that work."""
    with trio.fail_after(DRAINED):
        while not await db.fetch_value("SELECT count(*) FROM down.rows"):
            await trio.sleep(0.1)


async def _drained(db: Database) -> bool:
    """Whether the tube becomes empty and its backfills end."""
    left = (
        f"SELECT EXISTS (SELECT FROM tube.{TUBE}) OR EXISTS (SELECT FROM tube.tube_backfill AS b WHERE NOT b.finished)"
    )
    with trio.move_on_after(DRAINED):
        while await db.fetch_value(left):
            await trio.sleep(0.2)
        return True
    return False


@contextmanager
def fresh_database(server: str, name: str) -> Iterator[str]:
    """A database with our schema, for one run."""
    psql(server, f"CREATE DATABASE {name}")
    url = urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    install(url, "stream", "tube")
    yield url
    psql(server, f"DROP DATABASE {name} WITH (FORCE)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tubes_torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default 1)")
    parser.add_argument("--runs", type=int, default=10, help="how many, one seed after another (default 10)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    options = parser.parse_args()
    began, failed, runs = time.monotonic(), [], 0
    with server_folder() as place, EmbeddedPostgres(place, FAST) as server:
        for seed in range(options.seed, options.seed + options.runs):
            if time.monotonic() - began > options.seconds:
                break
            runs += 1
            at = time.monotonic()
            print(f"seed {seed}: {', '.join(map(str, make_schedule(seed)))}", flush=True)
            folder = Path(tempfile.mkdtemp(prefix=f"replicad-tubes-{seed}-"))  # kept if the run fails
            with fresh_database(server.url, f"seed_{seed}") as url:
                wrong = trio.run(play, seed, url, folder)
            for text in wrong:
                print(f"  {text}", flush=True)
            print(
                f"  {'failed; logs in ' + str(folder) if wrong else 'passed'}, {time.monotonic() - at:.0f} s",
                flush=True,
            )
            if wrong:
                failed.append(seed)
            else:
                shutil.rmtree(folder)
    print(f"{runs} runs in {time.monotonic() - began:.0f} s, {len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
