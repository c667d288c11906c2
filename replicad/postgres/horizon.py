"""Asks Postgres how far each watched stream may be read. docs/positions.md explains why the answer is safe.

One poll has these statements, in READ COMMITTED. Each begins when the one before has been answered:
 1. the last values of all sequences, and how far the WAL is written and flushed;
 2. the holders of all locks; left out if no sequence has moved and there was no holder at the last poll;
 3. a flush of the WAL, if a position could be published but is not on disk yet.
After `poll` has returned, any connection may read the rows up to the new positions.

It knows tables and sequences by their oids only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

import trio

from replicad import errors, sqlstates
from replicad.postgres.bridge import Backend, Connection, Database, Row, load_sql
from replicad.postgres.holders import by_source, fetch_holders, holders_key
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
    holder_of,
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
_LOOK_AGAIN = 0.25  # seconds between two looks at a locked sequence
_BARRIER_EVERY = 0.02  # seconds between forced flushes: up to PostgreSQL 16 each costs a transaction id
_LOCK_TIMEOUT = "15ms"  # how long one locked sequence or positions table may delay all streams
_WAITS = 3  # such waits in one poll; the rest is read at the next one
_SKIPS = 40  # polls in a row that failed because of locks that are not in pg_locks

# The barrier must not wait for a standby that is down: only the local disk matters after a crash. If a standby that
# lags is promoted, readers get a reset.
_SESSION = f"SET lock_timeout = '{_LOCK_TIMEOUT}'; SET synchronous_commit = local"
_BARRIER = "SELECT pg_logical_emit_message(true, 'replicad', '')"
_BARRIER_17 = "SELECT pg_logical_emit_message(false, 'replicad', '', true)"  # without a transaction id


@dataclass(frozen=True, slots=True)
class _Value:
    """A sequence's last value, and what was read after it: ends of the WAL, and the sequence's file."""

    last_value: int
    inserted: int
    flushed: int
    file: int | None


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
        self._read: dict[int, int | None] = {}  # the last values of sequences, as they were read last
        self._unused: dict[int, int] = {}  # unused sequences: the value below their first one
        self._blocked: dict[int, Holder] = {}  # locked sequences and tables, and the holder of the lock
        self._waits_left = 0  # of this poll
        self._skips = 0
        self._refusals_changed = False  # a check has refused or accepted a stream, and no reading shows it yet
        self._inspect_at = 0.0
        self._look_again_at = 0.0
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
        self._waits_left = _WAITS
        if now >= self._inspect_at:
            self._inspect_at = now + _INSPECT_EVERY  # before looking: a watch that begins meanwhile sets it back
            await self._read_again(connection)
            await self._inspect(connection)
        # Only checked streams; watches may begin and end while we wait for Postgres.
        watched = [w for w in self._watched.values() if w.inspected]
        changed = bool(self._blocked)
        if self._blocked and now >= self._look_again_at:
            await self._find_blockers(connection)
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
        busy = self._blocked or any(
            w.locks is None
            or not w.inspected
            or w.refused is not None
            or w.unreadable is not None
            or w.watch.lowest is not None
            or w.watch.waits_for_flush
            or _sequence(w) not in self._read
            for w in watched
        )
        return None if busy or not watched else {_sequence(w): self._read[_sequence(w)] for w in watched}

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
        self._blocked = {}
        self._read = {}
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

    async def _inspect(self, connection: Connection) -> None:
        """Check all streams: refuse those that cannot be served, accept those that were mended."""
        looked_at = list(self._watched.values())
        tables = [w.source.table for w in looked_at if not isinstance(w.source, ReservationSource)]
        sequences = [w.source.sequence for w in looked_at if not isinstance(w.source, TableSource)]
        rows = await connection.fetch(load_sql("horizon_inspect"), tables, sequences)
        found = {row["oid"]: row for row in rows}
        self._names = {oid: row["name"] for oid, row in found.items()}
        self._unused = {}
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
            if watched.unreadable is None or self._waits_left <= 0:
                continue
            try:
                if not isinstance(watched.source, TableSource):  # these are read one by one anyway
                    await self._read_values(connection, [watched.source.sequence])
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                self._waits_left -= means(error.sqlstate, sqlstates.LOCKED)
            else:
                watched.unreadable = None

    async def _poll_sequences(self, connection: Connection, all_watched: list[Watched], now: float) -> bool:
        """Steps 1 and 2; True if a reading may have changed."""
        active = [w for w in all_watched if w.locks is not None and w.refused is None]
        read = await self._last_values(connection, active)
        values = read or {}
        refused = [w for w in active if w.refused is not None]
        active = [w for w in active if w.refused is None]
        for watched in active:
            watched.blocked_by = self._blocked.get(_sequence(watched))
        fed = [(w, w.locks, values[_sequence(w)]) for w in active if w.locks is not None and _sequence(w) in values]
        if read is not None and any(_sequence(w) not in values and w.blocked_by is None for w in active):
            self._inspect_at = now  # it was removed: the next poll finds out
        replaced = [w for w, _, value in fed if w.check_file(value.file)]
        fed = [one for one in fed if one[0] not in replaced]
        changed = any(locks.someone_holds or locks.last_value != value.last_value for _, locks, value in fed)
        rests = not changed
        flushed = max((value.flushed for _, _, value in fed), default=0)
        if changed:
            rows = await self._holders(connection, [w for w, _, _ in fed], list(values))
            flushed = rows[0]["flushed"]
            if rows[0]["unfit"]:
                await self._inspect(connection)
            listed = by_source(rows)
            for watched, _, value in fed:
                if watched.refused is None:
                    watched.feed(value.last_value, value.inserted, listed.get(holders_key(watched.source), ()), now)
        for _, locks, _ in fed:
            changed |= locks.waits_for_flush
            locks.flushed_upto(flushed)
        for watched, _, value in fed:
            watched.flushed = flushed
            if rests:
                watched.seen = Seen(value.last_value, value.inserted, ())
        return changed or bool(self._blocked or refused or replaced)

    async def _holders(self, connection: Connection, fed: list[Watched], sequences: list[int]) -> list[Row]:
        """Step 2. Our own sessions are listed before it is sent; one that begins meanwhile counts as a holder."""
        return await fetch_holders(connection, [w.source for w in fed], sequences, self._own_backends())

    async def _last_values(self, connection: Connection, active: list[Watched]) -> dict[int, _Value] | None:
        """Step 1 for all sequences that exist, may be read and are not locked. None: try again at the next poll.

        If Postgres refuses to read a sequence, only its own stream is refused.
        """
        while True:
            sequences = list({_sequence(w) for w in active} - self._blocked.keys())
            if not sequences:
                return {}
            try:
                values = await self._read_values(connection, sequences)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.GONE_MEANWHILE) and self._waits_left > 0:
                    self._waits_left -= 1  # dropped just now: the next try does not see it
                elif not means(error.sqlstate, sqlstates.LOCKED):
                    return await self._read_one_by_one(connection, active)
                elif not await self._may_try_again(connection, error):
                    return None
            else:
                self._skips = 0
                return values

    async def _read_one_by_one(self, connection: Connection, active: list[Watched]) -> dict[int, _Value]:
        """They cannot be read together: read each alone, to find the one that fails."""
        values: dict[int, _Value] = {}
        for watched in active:
            sequence = _sequence(watched)
            if sequence in values or sequence in self._blocked:
                continue
            try:
                values |= await self._read_values(connection, [sequence])
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.LOCKED):
                    if not await self._may_try_again(connection, error):
                        break
                elif not means(error.sqlstate, sqlstates.GONE_MEANWHILE):
                    watched.cannot_read(error)
        return values

    async def _may_try_again(self, connection: Connection, error: errors.DatabaseError) -> bool:
        """After a wait for a lock: note the holders of locks on all that is watched. False after enough waits.

        Raises the error if this happens at many polls in a row and pg_locks lists no holder.
        """
        known = len(self._blocked)
        await self._find_blockers(connection)
        self._waits_left -= 1
        if self._waits_left > 0:
            return True
        self._skips = 0 if len(self._blocked) > known else self._skips + 1
        if self._skips > _SKIPS:
            raise error
        return False

    async def _read_values(self, connection: Connection, sequences: list[int]) -> dict[int, _Value]:
        values: dict[int, _Value] = {}
        for row in await connection.fetch(load_sql("horizon_last_values"), sequences):
            sequence = row["sequence"]
            self._read[sequence] = row["last_value"]
            if row["last_value"] is not None:
                self._unused.pop(sequence, None)
                values[sequence] = _Value(row["last_value"], row["inserted"], row["flushed"], row["file"])
            elif not row["readable"]:
                await self._inspect(connection)  # refuses the streams that need it
            elif sequence in self._unused:
                values[sequence] = _Value(self._unused[sequence], row["inserted"], row["flushed"], row["file"])
            elif (value := await self._read_unused(connection, sequence)) is not None:
                values[sequence] = value
        return values

    async def _read_unused(self, connection: Connection, sequence: int) -> _Value | None:
        """The value at which an unused sequence begins. Not always its START: it may have been restarted or set."""
        name = self._names.get(sequence)
        if name is None:
            return None
        try:
            query = load_sql("horizon_unused_sequence").replace("{sequence}", name)
            first = await as_owner(connection, self._sequence_reader(sequence), sequence).fetch_row(query)
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError:  # it was renamed, or we may not read it any more: the next check will find out
            self._inspect_at = 0.0
            return None
        after = await connection.fetch_row(load_sql("horizon_last_values"), [sequence])
        if first is None or after is None or not after["readable"]:
            return None
        last_value = after["last_value"]
        if last_value is None:
            if first["is_called"]:
                return None  # used and set back between the two: the next poll finds out
            last_value = self._unused[sequence] = first["last_value"] - 1
        return _Value(last_value, after["inserted"], after["flushed"], after["file"])

    def _sequence_reader(self, sequence: int) -> str | None:
        sources = (watched.source for watched in self._watched.values())
        readers = (
            one.sequence_reader for one in sources if not isinstance(one, TableSource) and one.sequence == sequence
        )
        return next(readers, None)

    async def _find_blockers(self, connection: Connection) -> None:
        """The holders of locks on what is read here. It reads the list of locks, so it does not wait for them."""
        sources = [w.source for w in self._watched.values()]
        sequences = {source.sequence for source in sources if not isinstance(source, TableSource)}
        tables = {source.table for source in sources if isinstance(source, TableSource)}
        rows = await connection.fetch(load_sql("horizon_blockers"), list(sequences), list(tables))
        kinds = dict.fromkeys(tables, HolderKind.TABLE_LOCK)
        self._blocked = {
            row["relation"]: holder_of(row, kinds.get(row["relation"], HolderKind.SEQUENCE_LOCK)) for row in rows
        }
        self._look_again_at = self._now() + _LOOK_AGAIN

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
            watched.blocked_by = self._blocked.get(source.table)
            if watched.blocked_by is not None or self._waits_left <= 0:
                continue
            query = load_sql("horizon_positions_table").replace("{table}", name)
            try:
                rows = await as_owner(connection, source.reader, source.table).fetch(query, source.stream_name)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.LOCKED):
                    await self._may_try_again(connection, error)
                    watched.blocked_by = self._blocked.get(source.table)
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


def _sequence(watched: Watched) -> int:
    assert not isinstance(watched.source, TableSource)
    return watched.source.sequence


def _highest(rows: list[Row], column: str) -> int:
    return max((row[column] for row in rows), default=0)
