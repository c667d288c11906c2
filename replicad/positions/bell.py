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

import trio

from replicad.postgres.bridge import Database, load_sql

SECONDS: Final = 0.5  # that one wait lasts: so long its snapshot may hold back VACUUM, and its locks ALTER SEQUENCE
_EACH: Final = 100e-6  # seconds between two looks for each sequence where others write: a look then reads all of them
_MOST: Final = 0.05  # seconds between two looks
_SESSION = "SET lock_timeout = '15ms'"

LastValues = Mapping[int, int | None]  # by the sequence's oid; None: no id was taken yet
Wait = Callable[[LastValues], Awaitable[int | None]]


class Bell:
    """Waits in the server. `interval`: seconds between two looks."""

    def __init__(self, db: Database, interval: float) -> None:
        self._db = db
        self._interval = interval

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Wait]:
        """Yields a function that returns when a sequence of the list has another last value, and which; None
        after SECONDS without. A look finds the first of several soonest.

        The block keeps one connection to itself. Both raise DatabaseErrors; then poll as if there were no bell.
        """
        async with self._db.connection() as connection:
            await connection.execute(_SESSION)
            crowded = False  # others write, and reading all the sequences at each look would cost much

            async def wait(values: LastValues) -> int | None:
                nonlocal crowded
                slow = max(self._interval, min(_MOST, len(values) * _EACH))
                until = trio.current_time() + SECONDS
                while (left := until - trio.current_time()) > 0:
                    pause = slow if crowded else self._interval
                    looks = max(1, round(left / pause))
                    args = (list(values), list(values.values()), looks, pause, slow > self._interval)
                    sequence: int | None = await connection.fetch_value(load_sql("bell"), *args)
                    crowded = sequence == 0
                    if sequence != 0:
                        return sequence
                return None

            yield wait
