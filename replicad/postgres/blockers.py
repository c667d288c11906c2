"""Locks on what a poll reads: who holds them, and for how many of them one poll may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replicad import errors
from replicad.postgres.bridge import Connection, load_sql
from replicad.postgres.watched import Holder, HolderKind, Source, TableSource, holder_of

LOCK_TIMEOUT = "15ms"  # how long one locked sequence or positions table may delay all streams
_WAITS = 3  # such waits in one poll; the rest is read at the next one
_SKIPS = 40  # polls in a row that failed because of locks that are not in pg_locks
_LOOK_AGAIN = 0.25  # seconds between two looks at a locked sequence


class Blockers:
    """The locked sequences and tables among `sources`. `now` is a monotonic clock in seconds."""

    def __init__(self, sources: Callable[[], Iterable[Source]], now: Callable[[], float]) -> None:
        self.holders: dict[int, Holder] = {}  # by the oid of the locked object
        self._sources = sources
        self._now = now
        self._waits_left = 0
        self._skips = 0
        self._look_again_at = 0.0

    @property
    def may_wait(self) -> bool:
        """Whether this poll may wait for one more lock."""
        return self._waits_left > 0

    def begin_poll(self) -> None:
        """From here on the waits count for the next poll."""
        self._waits_left = _WAITS

    def waited(self) -> None:
        """Something was locked, or was dropped while it was read."""
        self._waits_left -= 1

    def none_met(self) -> None:
        """All that is not known as locked could be read."""
        self._skips = 0

    def forget(self) -> None:
        """A new connection: nothing is known of locks."""
        self.holders = {}

    async def look_again(self, connection: Connection) -> None:
        """See whether the locks are still held, if it is time."""
        if self.holders and self._now() >= self._look_again_at:
            await self._look(connection)

    async def may_try_again(self, connection: Connection, error: errors.DatabaseError) -> bool:
        """After a wait for a lock: note the holders of locks on all that is watched. False after enough waits.

        Raises `error` if this happens at many polls in a row and pg_locks lists no holder.
        """
        known = len(self.holders)
        await self._look(connection)
        self.waited()
        if self.may_wait:
            return True
        self._skips = 0 if len(self.holders) > known else self._skips + 1
        if self._skips > _SKIPS:
            raise error
        return False

    async def _look(self, connection: Connection) -> None:
        """It reads the list of locks, so it does not wait for them."""
        sources = list(self._sources())
        sequences = {source.sequence for source in sources if not isinstance(source, TableSource)}
        tables = {source.table for source in sources if isinstance(source, TableSource)}
        rows = await connection.fetch(load_sql("horizon_blockers"), list(sequences), list(tables))
        kinds = dict.fromkeys(tables, HolderKind.TABLE_LOCK)
        self.holders = {
            row["relation"]: holder_of(row, kinds.get(row["relation"], HolderKind.SEQUENCE_LOCK)) for row in rows
        }
        self._look_again_at = self._now() + _LOOK_AGAIN
