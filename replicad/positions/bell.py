"""Learns soon that a writer has taken an id, at no cost for the writer, while nothing else happens.

A poll takes about a millisecond of this process and of Postgres, so it cannot be made every few milliseconds for
nothing. There are two cheaper ways to learn when one is worth making. Both are hints: positions come from polls only.

- Postgres sends its WAL over a replication connection when it is flushed (`WalListener`). That takes 0.1 ms, and costs
  nothing while nothing is written.
- A statement that sleeps in the server compares the end of the WAL at each look, which costs little more than waking
  up, some 30 microseconds. It works for every role. Beside a listener a look is made five times a second: for commits
  whose WAL is not flushed at once (`synchronous_commit = off`), and in case the listener hears nothing. Once a look was
  first, looks are frequent for some seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio

from replicad.nurseries import open_plain_nursery
from replicad.postgres.bridge import Connection, Database, load_sql
from replicad.postgres.wal import WalListener

SECONDS: Final = 0.5  # that one wait lasts: so long its snapshot may hold back VACUUM, and its locks ALTER SEQUENCE
ANY: Final = 0  # a wait's result: something was written, it is not known what
_EACH: Final = 100e-6  # seconds between two looks for each sequence where others write: a look then reads all of them
_MOST: Final = 0.05  # seconds between two looks
_SELDOM: Final = 0.2  # seconds between two looks beside a listener; and 1 ms for each sequence at least
_LATE: Final = 10.0  # seconds with frequent looks, after a look was sooner than the listener by more than
_SOON: Final = 0.1  # so many seconds; an id is taken some time before its WAL is flushed
_IDLE_RINGS: Final = 20  # rings in a second after which nothing had moved, so others write: then WAL does not ring for
_DEAF: Final = 10.0  # so many seconds
_READ: Final = 2000  # sequences that polls may read in a second after such rings, where there are many
_SESSION = "SET lock_timeout = '15ms'"

LastValues = Mapping[int, int | None]  # by the sequence's oid; None: no id was taken yet
Wait = Callable[[LastValues, float], Awaitable[int | None]]


class Bell:
    """Waits in the server. `interval`: seconds between two looks. `wal`: rings as well, while it hears."""

    def __init__(self, db: Database, interval: float, wal: WalListener | None = None) -> None:
        self._db = db
        self._interval = interval
        self._wal = wal
        self._frequent_until = float("-inf")
        self._looked_at: float | None = None  # when a look was first, until it is known whether WAL came soon after
        self._deaf_until = float("-inf")

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Wait]:
        """Yields a function `wait(values, since)`. It returns when a sequence of the list has another last value, and
        which (a look finds the first of several soonest); ANY when WAL has come later than `since`, the time at which
        the poll that has read the values began; None after SECONDS without either.

        The block keeps one connection to itself. Both raise DatabaseErrors; then poll as if there were no bell.
        """
        async with self._db.connection() as connection:
            await connection.execute(_SESSION)
            async with open_plain_nursery() as nursery:
                waits = _Waits(self, connection, nursery)
                if self._wal is not None:
                    self._wal.on_wal = waits.wake
                yield waits.wait

    @property
    def interval(self) -> float:
        """Seconds between two looks, where they are frequent."""
        return self._interval

    def looks_often(self) -> bool:
        """Whether looks are frequent now."""
        if self._looked_at is not None and self._wal is not None:
            if self._wal.heard_at >= self._looked_at:
                self._looked_at = None
            elif trio.current_time() > self._looked_at + _SOON:
                self._frequent_until, self._looked_at = self._looked_at + _LATE, None
        return not self.hears() or trio.current_time() < self._frequent_until

    def hears(self) -> bool:
        """Whether WAL rings now."""
        return self._wal is not None and self._wal.hears and trio.current_time() >= self._deaf_until

    def look_was_first(self) -> None:
        """WAL had not come when a look found something."""
        if self.hears() and self._looked_at is None:
            self._looked_at = trio.current_time()

    def heard_since(self, since: float) -> bool:
        """Whether WAL has come since then, and rings."""
        if self._wal is None:
            return False
        self._wal.want()
        return self.hears() and self._wal.heard_at >= since

    def be_deaf(self) -> None:
        """WAL is of others mostly: to look is cheaper."""
        self._deaf_until = trio.current_time() + _DEAF


class _Waits:
    """The waits on one connection, one at a time. The statement that looks goes on when WAL has ended a wait, as it
    costs less than to cancel it; what it finds then counts for no later wait.
    """

    def __init__(self, bell: Bell, connection: Connection, nursery: trio.Nursery) -> None:
        self._bell = bell
        self._connection = connection
        self._nursery = nursery
        self._values: LastValues = {}
        self._found: int | None = None
        self._looking = False
        self._waiting = False
        self._woken = trio.Event()
        self._crowded = False  # others write, and reading all the sequences at each look would cost much
        self._rung_for: LastValues | None = None  # these values, by WAL; if they are still the values, for nothing
        self._idle_rings: deque[float] = deque(maxlen=_IDLE_RINGS)

    def wake(self) -> None:
        """WAL has come, or the listener has changed."""
        self._woken.set()

    async def wait(self, values: LastValues, since: float) -> int | None:
        """As `Bell.waiting`."""
        self._values, self._found, self._waiting = values, None, True
        try:
            with trio.move_on_after(SECONDS):
                while True:
                    self._woken = trio.Event()
                    if self._bell.heard_since(since):
                        self._note_ring(values)
                        return ANY
                    if self._found is not None:
                        self._bell.look_was_first()
                        return self._found
                    if not self._looking:
                        self._looking = True
                        self._nursery.start_soon(self._look)
                    await self._woken.wait()
        finally:
            self._waiting = False
        return None

    def _note_ring(self, values: LastValues) -> None:
        now = trio.current_time()
        if self._rung_for == values:
            self._idle_rings.append(now)
        self._rung_for = values
        most = max(4, min(_IDLE_RINGS, _READ // max(1, len(values))))
        if len([at for at in self._idle_rings if at > now - 1]) >= most:
            self._idle_rings.clear()
            self._bell.be_deaf()

    async def _look(self) -> None:
        """Look while somebody waits, until one of the values that are waited for differs, or SECONDS without that."""
        try:
            while self._waiting:
                values, pause = self._values, self._bell.interval
                if self._bell.looks_often():
                    slow = max(pause, min(_MOST, len(values) * _EACH))
                    each = slow if self._crowded else pause
                    times = max(1, round(SECONDS / each)), each, slow > pause
                else:  # alone, so that no lock on a sequence is held while a poll lists holders
                    await trio.sleep(max(_SELDOM, len(values) / 1000))
                    if not self._waiting:
                        return
                    values, times = self._values, (0, 0.0, False)
                args = (list(values), list(values.values()), *times)
                found: int | None = await self._connection.fetch_value(load_sql("bell"), *args)
                self._crowded = found == 0
                if values is self._values and not self._crowded and (found is not None or times[0]):
                    self._found = found
                    return
        finally:
            self._looking = False
            self._woken.set()
