"""Writers that reserve ids in every way there is, well and badly, in a process of their own.

Usage: reserving.py URL SECONDS WRITERS NUMBER. Writes to the stream `facts` of test_reservations.py and prints a JSON
object: how often each kind of writing has succeeded, how often ids were refused, and how many backends were killed.
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

from replicad.errors import DatabaseError, DatabaseUnavailable, StreamRefused
from replicad.postgres.bridge import Connection, Database, open_database
from replicad.streams.writer import Writer, open_writer

NAMES = ("A", "B", "C")  # writers that the horizon knows
KILLS_PER_SECOND = 4
AT_LEAST = 200  # writes, however long they take
PATIENCE = 60  # seconds beyond the time; what has not happened by then will not
REFUSED = ("keep_over_a_savepoint", "outlive_the_transaction", "insert_after_the_session", "insert_in_another_name")


@dataclass
class Run:
    """What has happened so far. `sessions` writers keep reservations of their own and are shared by all tasks."""

    db: Database
    over: float
    number: int
    done: Counter[str] = field(default_factory=Counter)
    gids: count[int] = field(default_factory=count)
    sessions: list[Writer] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Until the time is over and everything has happened, which takes a busy machine longer."""
        late = trio.current_time() - self.over
        return late < 0 or (late < PATIENCE and not self.is_complete)

    @property
    def is_complete(self) -> bool:
        everything = {*SUCCEED, *(f"refused {kind}" for kind in REFUSED), "killed"}
        return everything <= self.done.keys() and self.done.total() >= AT_LEAST


async def main(url: str, seconds: float, writers: int, number: int) -> None:
    async with open_database(url, size=writers + len(NAMES) + 1, application_name="inserter") as db:
        run = Run(db, trio.current_time() + seconds, number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_now_and_then, run)
            async with trio.open_nursery() as opened:
                for name in NAMES:
                    await opened.start(keep_session, run, name)
                async with trio.open_nursery() as writing:
                    for _ in range(writers):
                        writing.start_soon(write, run)
                opened.cancel_scope.cancel()
    print(json.dumps(run.done))


async def keep_session(run: Run, name: str, task_status: trio.TaskStatus[None]) -> None:
    while True:
        with suppress(DatabaseUnavailable):  # killed while it connects
            async with open_writer(run.db, "facts", name) as writer:
                run.sessions.append(writer)
                task_status.started()
                await trio.sleep_forever()


async def kill_now_and_then(run: Run) -> None:
    """Kill a session that writes, whatever it is doing; its own connection survives, and the reader's."""
    sql = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name NOT IN ('reader', 'replicad test') AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1"
    )
    while run.goes_on:
        await trio.sleep(random.expovariate(KILLS_PER_SECOND))
        with suppress(DatabaseUnavailable):
            run.done["killed"] += bool(await run.db.fetch_value(sql))


async def write(run: Run) -> None:
    """One writer: connects, works, is killed, connects again."""
    while run.goes_on:
        with suppress(DatabaseUnavailable):
            async with run.db.connection() as connection:
                name = random.choice((*NAMES, "x", "y"))
                await connection.fetch_value("SELECT set_config('application_name', $1, false)", name)
                for _ in range(random.randrange(1, 40)):
                    if run.goes_on:
                        kind = random.choice(KINDS)
                        try:
                            await kind(run, connection)
                            run.done[kind.__name__] += 1
                        except StreamRefused:
                            run.done[f"refused {kind.__name__}"] += 1


async def linger() -> None:
    if random.random() < 0.6:
        await trio.sleep(random.expovariate(1 / 0.01))


async def insert(connection: Connection, *ids: int, instance: str | None = None) -> None:
    """Insert rows, of that writer or of the one that this session is called after."""
    await connection.execute(
        "INSERT INTO facts SELECT unnest($1::bigint[]), coalesce($2, current_setting('application_name'))",
        list(ids),
        instance,
    )


async def choose_session(run: Run, connection: Connection) -> Writer:
    """The writer that this session is called after; a session of another name may insert for any."""
    name = await connection.fetch_value("SELECT current_setting('application_name')")
    return next((w for w in run.sessions if w.instance == name), None) or random.choice(run.sessions)


async def take(connection: Connection) -> int:
    return int(await connection.fetch_value("SELECT replicad.stream_next('facts')"))


async def at_once(run: Run, connection: Connection) -> None:
    await connection.execute(
        "INSERT INTO facts VALUES (replicad.stream_next('facts'), current_setting('application_name'))"
    )


async def in_reverse(run: Run, connection: Connection) -> None:
    async with connection.transaction():
        ids = await connection.fetch_value("SELECT replicad.stream_next_mult('facts', $1)", random.randrange(1, 30))
        await linger()
        for number in reversed(ids[::2]):  # the others are never used
            await insert(connection, number)
        await linger()


async def roll_back(run: Run, connection: Connection) -> None:
    await connection.execute("BEGIN")
    await insert(connection, await take(connection))
    await linger()
    await connection.execute("ROLLBACK")


async def keep_over_a_savepoint(run: Run, connection: Connection) -> None:
    async with connection.transaction():
        if random.random() < 0.5:
            await take(connection)
        await connection.execute("SAVEPOINT s")
        number = await take(connection)
        await connection.execute("ROLLBACK TO s")
        await linger()
        await insert(connection, number)  # refused where nothing was taken before the savepoint
        await linger()


async def two_phases(run: Run, connection: Connection) -> None:
    gid = f"r{run.number}_{next(run.gids)}"
    await connection.execute("BEGIN")
    await insert(connection, await take(connection))
    await linger()
    await connection.execute(f"PREPARE TRANSACTION '{gid}'")
    await linger()
    await connection.execute(f"{random.choice(('COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")


async def outlive_the_transaction(run: Run, connection: Connection) -> None:
    number = await take(connection)  # complete at the end of this statement
    await linger()
    await insert(connection, number)


async def in_a_session(run: Run, connection: Connection) -> None:
    session = await choose_session(run, connection)
    async with session.get_next_mult(random.randrange(1, 4)) as ids:
        await linger()
        await insert(connection, *reversed(ids), instance=session.instance)
        await linger()


async def commit_after_the_session(run: Run, connection: Connection) -> None:
    session = await choose_session(run, connection)
    async with connection.transaction():
        async with session.get_next() as number:
            await linger()
            await insert(connection, number, instance=session.instance)
        await linger()


async def insert_after_the_session(run: Run, connection: Connection) -> None:
    session = await choose_session(run, connection)
    async with session.get_next() as number:
        await linger()
    await insert(connection, number, instance=session.instance)


async def fail_in_a_session(run: Run, connection: Connection) -> None:
    session = await choose_session(run, connection)
    with suppress(DatabaseError):
        async with session.get_next() as number, connection.transaction():
            await insert(connection, number, instance=session.instance)
            await linger()
            await connection.execute("SELECT 1 / 0")


async def insert_in_another_name(run: Run, connection: Connection) -> None:
    """Refused where the session is called after one writer and the id is another's."""
    async with random.choice(run.sessions).get_next() as number:
        await linger()
        await insert(connection, number)
        await linger()


KINDS = (
    at_once,
    in_reverse,
    roll_back,
    keep_over_a_savepoint,
    two_phases,
    outlive_the_transaction,
    in_a_session,
    commit_after_the_session,
    insert_after_the_session,
    fail_in_a_session,
    insert_in_another_name,
)
# An id that is used after its transaction may always find its cover gone.
SUCCEED = frozenset(kind.__name__ for kind in KINDS) - {"outlive_the_transaction"}

if __name__ == "__main__":
    arguments = sys.argv[1:]
    trio.run(main, arguments[0], float(arguments[1]), int(arguments[2]), int(arguments[3]))
