"""Learns soon that a writer has taken an id, at no cost for the writer, while nothing else happens.

A poll takes about a millisecond of this process and of Postgres, so it cannot be made every few milliseconds for
nothing. But Postgres can look by itself: a statement that sleeps in the server and compares the end of the WAL costs
little more than waking up, some 30 microseconds. It is a hint only. When it has come, or failed, Postgres is polled as
always.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from replicad.postgres.bridge import Database, load_sql

SECONDS: Final = 0.5  # that one wait lasts: so long its snapshot may hold back VACUUM, and its locks ALTER SEQUENCE
_EACH: Final = 100e-6  # seconds between two looks for each sequence: where others write, each look reads them all
_MOST: Final = 0.05
_SESSION = "SET lock_timeout = '15ms'"

LastValues = Mapping[int, int | None]  # by the sequence's oid; None: no id was taken yet
Wait = Callable[[LastValues], Awaitable[None]]


class Bell:
    """Waits in the server. `interval`: seconds between two looks."""

    def __init__(self, db: Database, interval: float) -> None:
        self._db = db
        self._interval = interval

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Wait]:
        """Gives a function that returns when one of these sequences has another last value, or after SECONDS.

        The block keeps one connection to itself. Both raise DatabaseErrors; then poll as if there were no bell.
        """
        async with self._db.connection() as connection:
            await connection.execute(_SESSION)

            async def wait(values: LastValues) -> None:
                pause = max(self._interval, min(_MOST, len(values) * _EACH))
                looks = max(1, round(SECONDS / pause))
                await connection.fetch(load_sql("bell"), list(values), list(values.values()), looks, pause)

            yield wait
