"""Changes of triggers, tables and indexes while programs write: each waits only briefly for its locks.

A change needs a lock on a table, and while it waits behind a long transaction, every later writer of the table waits
behind it. If it waits while it holds locks on other tables, Postgres may see a deadlock and end the transaction of a
user. So a change waits for less than half a second, shorter than `deadlock_timeout`, then gives up all its locks, lets
the writers pass, and is tried again. The blocking transaction is reported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from replicad import sqlstates
from replicad.errors import DatabaseError, TubeRefused
from replicad.nurseries import open_plain_nursery
from replicad.postgres.statements import load_sql
from replicad.terminal.failures import say

if TYPE_CHECKING:
    from replicad.postgres.bridge import Connection, Database

LOCK_TIMEOUT = 0.4  # seconds that a try waits for each lock; deadlock_timeout is 1 s unless it was changed
LOOK = 0.2  # seconds after which a try looks for the transactions that block it
PAUSE = 0.6  # seconds between two tries, for the writers that have waited
PATIENCE = 60.0  # seconds of tries in all


async def change_with_locks(
    db: Database,
    work: Callable[[Connection], Awaitable[Any]],
    *,
    what: str,
    patience: float = PATIENCE,
    report: Callable[[str], None] = say,
) -> Any:
    """Run `work` in a transaction of its own, again and again until it gets its locks; returns its result.

    `what` names the change in reports. `report` is called once for each blocking transaction.

    Raises:
        TubeRefused: it did not get its locks within `patience` seconds; the text names the holders.
    """
    deadline = trio.current_time() + patience
    reported: set[str] = set()
    while True:
        seen: list[str] = []
        try:
            return await _try(db, work, seen)
        except DatabaseError as error:
            if not sqlstates.means(error.sqlstate, sqlstates.LOCKED) and error.sqlstate != "40P01":
                raise
            blocking = "; ".join(seen) or "a transaction that has ended meanwhile"
            if trio.current_time() >= deadline:
                raise TubeRefused(
                    f"{what}: no lock within {patience:g} s, because of {blocking}. Nothing was changed. End that "
                    "transaction (SELECT pg_terminate_backend(PID)), or repeat the command when it has ended"
                ) from error
        for one in seen:
            if one.split(" (")[0] not in reported:
                reported.add(one.split(" (")[0])
                report(f"{what}: waiting for {one}")
        await trio.sleep(PAUSE)


async def _try(db: Database, work: Callable[[Connection], Awaitable[Any]], seen: list[str]) -> Any:
    async with db.connection() as connection, open_plain_nursery() as nursery:
        pid = await connection.fetch_value("SELECT pg_backend_pid()")
        nursery.start_soon(_look, db, pid, seen)
        async with connection.transaction(opening=f"SET LOCAL lock_timeout = '{int(LOCK_TIMEOUT * 1000)}ms'"):
            return await work(connection)


async def _look(db: Database, pid: int, seen: list[str]) -> None:
    with suppress(DatabaseError):  # it only reports
        while True:
            await trio.sleep(LOOK)
            for row in await db.fetch(load_sql("tube_blockers"), pid):
                if not any(one.split(" (")[0] == row["blocker"].split(" (")[0] for one in seen):
                    seen.append(row["blocker"])
