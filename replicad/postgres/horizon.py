"""Asks Postgres how far each watched stream may be read. docs/positions.md explains why the answer is safe.

One poll has these statements, in READ COMMITTED. Each begins when the one before has been answered:
 1. the last values of all sequences, and how far the WAL is written and flushed;
 2. the holders of all locks; left out if no sequence has moved and there was no holder at the last poll; sent once more
    if one that was not listed before holds a position back;
 3. a flush of the WAL, if a position could be published but is not on disk yet.
After `poll` has returned, any connection may read the rows up to the new positions.

It knows tables and sequences by their oids only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

import trio

from replicad import errors, sqlstates
from replicad.postgres.blockers import LOCK_TIMEOUT, Blockers
from replicad.postgres.bridge import Backend, Connection, Database, Row, load_sql
from replicad.postgres.holders import by_source, fetch_holders, holders_key
from replicad.postgres.last_values import LastValues, Value
from replicad.postgres.lockwatch import LockWatch
from replicad.postgres.owners import as_owner
from replicad.postgres.recording import ALL, Recorder, Seen
from replicad.postgres.watched import (
    RESERVATION_BAND,
    Fork,
    Holder,
    HolderKind,
    LockSource,
    Reading,
    ReservationSource,
    Source,
    TableSource,
    Watched,
    reservation_key,
)
from replicad.sqlstates import means

__all__ = [
    "RESERVATION_BAND",
    "Fork",
    "Holder",
    "HolderKind",
    "Horizon",
    "LockSource",
    "Reading",
    "ReservationSource",
    "Source",
    "TableSource",
    "reservation_key",
]

STUCK_AFTER = 60.0  # seconds after which a holder that keeps a position back is an alarm
_INSPECT_EVERY = 5.0  # seconds between two checks of tables and sequences
_BARRIER_EVERY = 0.02  # seconds between forced flushes: up to PostgreSQL 16 each costs a transaction id

# The barrier must not wait for a standby that is down: only the local disk matters after a crash. If a standby that
# lags is promoted, readers get a reset.
_SESSION = f"SET lock_timeout = '{LOCK_TIMEOUT}'; SET synchronous_commit = local"
_BARRIER = "SELECT pg_logical_emit_message(true, 'replicad', '')"
_BARRIER_17 = "SELECT pg_logical_emit_message(false, 'replicad', '', true)"  # without a transaction id

_Fed = tuple[Watched, LockWatch, Value]  # a stream whose last value was read


class Horizon:
    """Positions of any number of streams. An async context manager that keeps one connection of `db` to itself.

    `now` is a monotonic clock in seconds. Only one task at a time may call `poll`.
    """

    def __init__(
        self,
        db: Database,
        *,
        now: Callable[[], float] = trio.current_time,
        stuck_after: float = STUCK_AFTER,
        own_backends: Callable[[], Collection[Backend]] = tuple,
        recorder: Recorder | None = None,
    ) -> None:
        """`own_backends`: sessions that only delete from tables which are watched with `own_deletes`. `recorder`: where
        all polls of sequences are recorded.
        """
        self._db = db
        self._recorder = recorder
        self._own_backends = own_backends
        self._now = now
        self._stuck_after = stuck_after
        self._watched: dict[str, Watched] = {}
        self._readings: dict[str, Reading] = {}
        self._held_open = AsyncExitStack()
        self._connection: Connection | None = None
        self._barrier = _BARRIER
        self._names: dict[int, str] = {}
        self._blockers = Blockers(self._sources, now)
        self._values = LastValues(self._blockers, inspect=self._inspect, inspect_soon=self._inspect_soon)
        self._refusals_changed = False  # a check has refused or accepted a stream, and no reading shows it yet
        self._inspect_at = 0.0
        self._barrier_at = 0.0
        self._before_polling: list[Callable[[], Awaitable[None]]] = []

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call `look` on every new connection before anything is read from it.

        The new connection may lead to another server, or to a restored one. `look` may begin and end watches. While it
        fails, polls fail too.
        """
        self._before_polling.append(look)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._let_go()

    def watch(
        self,
        name: str,
        source: Source,
        *,
        published: int | None = None,
        per_writer: Mapping[str, int] | None = None,
        writers: Iterable[str] = (),
        file: int | None = None,
    ) -> None:
        """Watch a stream from the next poll on. If the name is watched already, its watch begins again.

        `published` and `per_writer` are the positions that were published before, if any. They are trusted: readers can
        continue while transactions older than this watch are still open. They hold as long as the sequence has this
        `file`. `writers` as in `set_writers`. Nothing is checked here: a stream that cannot be watched gets a Reading
        that is `refused`.
        """
        self._watched[name] = Watched(name, source, published, per_writer, writers, file=file)
        self._readings.pop(name, None)
        self._inspect_at = 0.0
        self._record_begin("watch", self._watched[name])

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        """Set the writers of a stream. A holder whose application_name is one of them holds back that writer only."""
        self._watched[name].writers = frozenset(writers)

    def unwatch(self, name: str) -> None:
        """End the watch of a stream. An unknown name is ignored."""
        self._watched.pop(name, None)
        self._readings.pop(name, None)

    async def poll(self) -> Mapping[str, Reading]:
        """One round for all watched streams. The mapping is the same object until something changes.

        Raises DatabaseUnavailable and other DatabaseErrors (poll again later: no position was lost or is too high) and
        StandbyRefused.
        """
        connection = await self._pinned()
        return await connection.together(partial(self._poll_on, connection))

    async def _poll_on(self, connection: Connection) -> Mapping[str, Reading]:
        now = self._now()
        self._blockers.begin_poll()
        if now >= self._inspect_at:
            self._inspect_at = now + _INSPECT_EVERY  # before looking: a watch that begins meanwhile sets it back
            await self._read_again(connection)
            await self._inspect(connection)
        # Only checked streams; watches may begin and end while we wait for Postgres.
        watched = [w for w in self._watched.values() if w.inspected]
        changed = bool(self._blockers.holders)
        await self._blockers.look_again(connection)
        try:
            changed |= await self._poll_sequences(connection, watched, now)
            changed |= await self._poll_tables(connection, watched)
            changed |= await self._flush(connection, watched, now)
        finally:
            if self._recorder is not None:
                self._record(watched)  # also what was read before a step failed: the next poll may build on it
        changed |= self._refusals_changed
        self._refusals_changed = False
        if changed or len(self._readings) != len(watched):
            current = [w for w in watched if self._watched.get(w.name) is w]
            self._readings = {w.name: w.reading(now, self._stuck_after) for w in current}
        return self._readings

    def at_rest(self) -> Mapping[int, int | None] | None:
        """The last value of each sequence (None: unused), if only another one can move a position. None if more can:
        a holder, a flush, the end of a lock, a writer that publishes its position.
        """
        watched = self._watched.values()
        read = self._values.read
        busy = self._blockers.holders or any(
            w.locks is None
            or not w.inspected
            or w.refused is not None
            or w.unreadable is not None
            or w.watch.lowest is not None
            or w.watch.waits_for_flush
            or w.sequence not in read
            for w in watched
        )
        return None if busy or not watched else {w.sequence: read[w.sequence] for w in watched}

    async def _pinned(self) -> Connection:
        """Our connection. After a new one is made, readings that were not published are dropped: Postgres may have
        crashed.
        """
        strayed = self._db.fence is not None and self._db.fence.strayed
        if self._connection is not None and not self._connection.is_closed and not strayed:
            return self._connection
        await self._let_go()
        connection = await self._held_open.enter_async_context(self._db.connection(leader=True))
        try:
            await self._greet(connection)
            for look in self._before_polling:
                await look()
        except BaseException:
            await self._let_go()
            raise
        for watched in self._watched.values():
            watched.watch.restart()
            self._record_begin("connection", watched)
        self._blockers.forget()
        self._values.forget()
        self._inspect_at = 0.0
        self._connection = connection
        return connection

    async def _greet(self, connection: Connection) -> None:
        await connection.execute(_SESSION)
        [server] = await connection.fetch(load_sql("horizon_session"))
        if server["standby"]:
            raise errors.StandbyRefused(
                f"Postgres at {self._db.target} is a standby and shows no locks of writers: connect to its primary."
            )
        self._barrier = _BARRIER_17 if server["version"] >= 170000 else _BARRIER

    async def _let_go(self) -> None:
        self._connection = None
        await self._held_open.aclose()

    def _sources(self) -> list[Source]:
        return [watched.source for watched in self._watched.values()]

    def _inspect_soon(self) -> None:
        self._inspect_at = 0.0

    async def _inspect(self, connection: Connection) -> None:
        """Check all streams: refuse those that cannot be served, accept those that were mended."""
        looked_at = list(self._watched.values())
        tables = [w.source.table for w in looked_at if not isinstance(w.source, ReservationSource)]
        sequences = [w.source.sequence for w in looked_at if not isinstance(w.source, TableSource)]
        rows = await connection.fetch(load_sql("horizon_inspect"), tables, sequences)
        found = {row["oid"]: row for row in rows}
        self._names = {oid: row["name"] for oid, row in found.items()}
        self._values.inspected(self._names)
        for watched in looked_at:
            watched.inspected = True
            reason = watched.unfit(found)
            known = None if watched.refused is None else str(watched.refused)
            self._refusals_changed |= reason != known
            if reason is None:
                watched.accept()
            elif reason != known:
                watched.refuse(reason)

    async def _read_again(self, connection: Connection) -> None:
        """Try again to read what Postgres has refused to read."""
        for watched in list(self._watched.values()):
            if watched.unreadable is None or not self._blockers.may_wait:
                continue
            try:
                if not isinstance(watched.source, TableSource):  # these are read one by one anyway
                    await self._values.fetch_one(connection, watched)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.LOCKED):
                    self._blockers.waited()
            else:
                watched.unreadable = None

    async def _poll_sequences(self, connection: Connection, all_watched: list[Watched], now: float) -> bool:
        """Steps 1 and 2; True if a reading may have changed."""
        active = [w for w in all_watched if w.locks is not None and w.refused is None]
        read = await self._values.fetch(connection, active)
        values = read or {}
        refused = [w for w in active if w.refused is not None]
        active = [w for w in active if w.refused is None]
        for watched in active:
            watched.blocked_by = self._blockers.holders.get(watched.sequence)
        fed = [(w, w.locks, values[w.sequence]) for w in active if w.locks is not None and w.sequence in values]
        if read is not None and any(w.sequence not in values and w.blocked_by is None for w in active):
            self._inspect_at = now  # it was removed: the next poll finds out
        replaced = [w for w, _, value in fed if w.check_file(value.file)]
        fed = [one for one in fed if one[0] not in replaced]
        changed = any(locks.someone_holds or locks.last_value != value.last_value for _, locks, value in fed)
        rests = not changed
        flushed = max((value.flushed for _, _, value in fed), default=0)
        if changed:
            flushed = await self._feed(connection, fed, now)
            if any(locks.held_newly for _, locks, _ in fed):  # mostly by a short transaction, which ends meanwhile
                self._record([w for w, _, _ in fed])
                flushed = await self._feed(connection, fed, now)
        for _, locks, _ in fed:
            changed |= locks.waits_for_flush
            locks.flushed_upto(flushed)
        for watched, _, value in fed:
            watched.flushed = flushed
            if rests:
                watched.seen = Seen(value.last_value, value.inserted, ())
        return changed or bool(self._blockers.holders or refused or replaced)

    async def _feed(self, connection: Connection, fed: list[_Fed], now: float) -> int:
        """Step 2; returns how far the WAL is flushed. Our own sessions are listed before it is sent; one that begins
        meanwhile counts as a holder.
        """
        watched = [w for w, _, _ in fed]
        sources, sequences = [w.source for w in watched], [w.sequence for w in watched]
        rows = await fetch_holders(connection, sources, sequences, self._own_backends())
        if rows[0]["unfit"]:
            await self._inspect(connection)
        listed = by_source(rows)
        for one, locks, value in fed:
            if one.refused is None:
                one.feed(value.last_value, value.inserted, listed.get(holders_key(one.source), ()), now)
                locks.flushed_upto(rows[0]["flushed"])
                one.flushed = rows[0]["flushed"]
        return int(rows[0]["flushed"])

    async def _poll_tables(self, connection: Connection, all_watched: list[Watched]) -> bool:
        """Poll the streams whose writers publish their positions; True if one of them has changed."""
        changed = False
        for watched in all_watched:
            source = watched.source
            if not isinstance(source, TableSource) or watched.table is None or watched.refused is not None:
                continue
            name = self._names.get(source.table)
            if name is None:  # unwatched while we waited
                continue
            watched.blocked_by = self._blockers.holders.get(source.table)
            if watched.blocked_by is not None or not self._blockers.may_wait:
                continue
            query = load_sql("horizon_positions_table").replace("{table}", name)
            try:
                rows = await as_owner(connection, source.reader, source.table).fetch(query, source.stream_name)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.LOCKED):
                    await self._blockers.may_try_again(connection, error)
                    watched.blocked_by = self._blockers.holders.get(source.table)
                else:
                    watched.cannot_read(error)
                changed = True
                continue
            watched.table.feed({row["writer"]: row["position"] for row in rows}, _highest(rows, "inserted"))
            changed |= watched.table.waits_for_flush
            watched.table.flushed_upto(_highest(rows, "flushed"))
        return changed

    async def _flush(self, connection: Connection, all_watched: list[Watched], now: float) -> bool:
        """Step 3, at most every _BARRIER_EVERY seconds; in between, commits of writers usually flush the WAL."""
        waiting = [w for w in all_watched if w.watch.waits_for_flush]
        if not waiting or now < self._barrier_at:
            return False
        await connection.fetch_value(self._barrier)
        self._barrier_at = now + _BARRIER_EVERY
        for watched in waiting:
            watched.watch.all_flushed()
            watched.flushed = ALL
        return True

    def _record_begin(self, what: str, watched: Watched) -> None:
        if self._recorder is not None and watched.locks is not None:
            self._recorder.begin(watched.name, what, watched.locks.position, watched.locks.per_writer)

    def _record(self, all_watched: list[Watched]) -> None:
        for watched in all_watched:
            seen, watched.seen = watched.seen, None
            if self._recorder is not None and seen is not None and watched.locks is not None and watched.fork is None:
                locks = watched.locks
                self._recorder.poll(
                    watched.name,
                    seen,
                    watched.flushed,
                    writers=watched.writers,
                    position=locks.position,
                    per_writer=locks.per_writer,
                )


def _highest(rows: list[Row], column: str) -> int:
    return max((row[column] for row in rows), default=0)
