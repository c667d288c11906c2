"""Writers that do everything a writer may do, in a process of their own so that they do not wait for the reader.

Usage: writers.py URL SECONDS WRITERS NUMBER. Writes to the table `t` of test_positions.py and prints a JSON object: how
often each kind of writing has succeeded, and how many backends were killed.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import trio

from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.postgres.bridge import Connection, Database, open_database

PARTITIONS = 4
NAMES = ("A", "B", "C")  # writers that the horizon knows; half of the connections have one of these names
KILLS_PER_SECOND = 3
AT_LEAST = 200  # writes, however long they take
PATIENCE = 60  # seconds beyond the time; what has not happened by then will not


@dataclass
class Run:
    """What has happened so far."""

    writers: Database
    over: float
    number: int
    done: Counter[str] = field(default_factory=Counter)
    gids: count[int] = field(default_factory=count)
    pids: dict[int, int] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Until the time is over and everything has happened, which takes a busy machine longer."""
        late = trio.current_time() - self.over
        return late < 0 or (late < PATIENCE and not self.is_complete)

    @property
    def is_complete(self) -> bool:
        everything = {*(kind.__name__ for kind in KINDS), "killed"}
        return everything <= self.done.keys() and self.done.total() >= AT_LEAST


async def main(url: str, seconds: float, writers: int, number: int) -> None:
    async with open_database(url, size=writers + 1, application_name="writer") as db:
        run = Run(db, trio.current_time() + seconds, number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_now_and_then, run, db)
            for writer in range(writers):
                nursery.start_soon(write, run, writer)
    print(json.dumps(run.done))


async def kill_now_and_then(run: Run, db: Database) -> None:
    while run.goes_on:
        await trio.sleep(random.expovariate(KILLS_PER_SECOND))
        if run.pids:
            await db.fetch_value("SELECT pg_terminate_backend($1)", random.choice(list(run.pids.values())))
            run.done["killed"] += 1


async def write(run: Run, number: int) -> None:
    """One writer: connects, works, is killed, connects again."""
    while run.goes_on:
        with suppress(DatabaseUnavailable):
            async with run.writers.connection() as connection:
                name = random.choice((*NAMES, "x", "y", "z"))
                await connection.fetch_value("SELECT set_config('application_name', $1, false)", name)
                run.pids[number] = await connection.fetch_value("SELECT pg_backend_pid()")
                for _ in range(random.randrange(1, 40)):
                    if run.goes_on:
                        kind = random.choice(KINDS)
                        await kind(run, connection)
                        run.done[kind.__name__] += 1
        run.pids.pop(number, None)


async def linger() -> None:
    if random.random() < 0.7:
        await trio.sleep(random.expovariate(1 / 0.01))


def insert(rows: int = 1) -> str:
    leaf = random.choice(("t", *(f"t{k}" for k in range(PARTITIONS))))
    return f"INSERT INTO {leaf} (id) SELECT nextval('t_id_seq') FROM generate_series(1, {rows})"


async def one_row(run: Run, connection: Connection) -> None:
    await connection.execute("INSERT INTO t DEFAULT VALUES")
    await linger()


async def many_rows_slowly(run: Run, connection: Connection) -> None:
    async with connection.transaction():
        for _ in range(random.randrange(1, 5)):
            await connection.execute(insert(random.randrange(1, 30)))
            await linger()


async def roll_back(run: Run, connection: Connection) -> None:
    await connection.execute("BEGIN; " + insert(random.randrange(1, 40)))
    await linger()
    await connection.execute("ROLLBACK")


async def roll_back_a_savepoint(run: Run, connection: Connection) -> None:
    async with connection.transaction():
        await linger()
        with suppress(ZeroDivisionError):
            async with connection.transaction():
                await connection.execute(insert())
                await linger()
                raise ZeroDivisionError
        await linger()
        await connection.execute(insert())
        await linger()


async def fail_half_way(run: Run, connection: Connection) -> None:
    with suppress(DatabaseError):
        async with connection.transaction():
            await connection.execute(insert(3))
            await linger()
            await connection.execute("SELECT 1 / 0")


async def commit_without_flush(run: Run, connection: Connection) -> None:
    await connection.execute("BEGIN; SET LOCAL synchronous_commit = off; " + insert(2))
    await linger()
    await connection.execute("COMMIT")


async def copy(run: Run, connection: Connection) -> None:
    await connection.copy_in("t", columns=["k"], records=[(random.randrange(PARTITIONS),) for _ in range(20)])


async def update_and_delete(run: Run, connection: Connection) -> None:
    async with connection.transaction():
        await connection.execute("UPDATE t0 SET k = k WHERE id = (SELECT max(id) FROM t0)")
        await linger()


async def two_phases(run: Run, connection: Connection) -> None:
    gid = f"g{run.number}_{next(run.gids)}"
    await connection.execute("BEGIN; " + insert(random.randrange(1, 4)))
    await linger()
    await connection.execute(f"PREPARE TRANSACTION '{gid}'")
    await linger()
    await connection.execute(f"{random.choice(('COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")


KINDS = (
    one_row,
    many_rows_slowly,
    roll_back,
    roll_back_a_savepoint,
    fail_half_way,
    commit_without_flush,
    copy,
    update_and_delete,
    two_phases,
)

if __name__ == "__main__":
    arguments = sys.argv[1:]
    trio.run(main, arguments[0], float(arguments[1]), int(arguments[2]), int(arguments[3]))
