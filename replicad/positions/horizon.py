"""Asks Postgres how far each watched stream may be read. docs/positions.md explains why the answer is safe.

One poll has these statements, in READ COMMITTED. Each begins when the one before has been answered:
 1. the last values of the sequences, and how far the WAL is written and flushed;
 2. the holders of the locks of all streams whose sequence has moved, or which had a holder at the last poll; left
    out if there is no such stream; sent once more if a transaction that was not listed before holds a position back;
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
from replicad.positions.lockwatch import LockWatch
from replicad.positions.polled import LOCK_TIMEOUT, Blockers, LastValues, by_source, fetch_holders, holders_key
from replicad.positions.watched import (
    RESERVATION_BAND,
    Fork,
    Holder,
    HolderKind,
    Identity,
    LockSource,
    Reading,
    ReservationSource,
    SequenceValue,
    Source,
    TableSource,
    Watched,
    reservation_key,
)
from replicad.postgres.bridge import Backend, Connection, Database, Row, load_sql, quote_ident, quote_literal
from replicad.postgres.owners import as_owner
from replicad.sqlstates import means

__all__ = [
    "RESERVATION_BAND",
    "Fork",
    "Holder",
    "HolderKind",
    "Horizon",
    "Identity",
    "LockSource",
    "Reading",
    "ReservationSource",
    "Source",
    "TableSource",
    "reservation_key",
]

FEW = 64  # sequences that each poll reads; of more, only sequences that have moved
IN_TURN = 16  # streams that each check looks at for no other reason than that it is their turn
STUCK_AFTER = 60.0  # seconds after which a holder that keeps a position back is an alarm
_INSPECT_EVERY = 5.0  # seconds between two checks of tables and sequences
_LIKELY = 2.0  # seconds for which each poll reads a sequence that has moved
_PAUSE_OF_ALL = 4  # after a look for moved sequences among many, none is made for so many times as long
_BARRIER_EVERY = 0.02  # seconds between forced flushes: up to PostgreSQL 16 each costs a transaction id

# The barrier must not wait for a standby that is down: only the local disk matters after a crash. If a standby that
# lags is promoted, readers get a reset.
_SESSION = f"SET lock_timeout = '{LOCK_TIMEOUT}'; SET synchronous_commit = local"
_BARRIER = "SELECT pg_logical_emit_message(true, 'replicad', '')"
_BARRIER_17 = "SELECT pg_logical_emit_message(false, 'replicad', '', true)"  # without a transaction id

_Fed = tuple[Watched, LockWatch, SequenceValue]  # a stream whose last value was read


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
    ) -> None:
        """`own_backends`: sessions that only delete from tables which are watched with `own_deletes`."""
        self._db = db
        self._own_backends = own_backends
        self._now = now
        self._stuck_after = stuck_after
        self._watched: dict[str, Watched] = {}
        self._busy: dict[str, Watched] = {}  # streams that each poll reads, whether their sequence moves or not
        self._sharing: dict[int, dict[str, Watched]] = {}  # streams of each sequence or positions table, by its oid
        self._readings: dict[str, Reading] = {}
        self._held_open = AsyncExitStack()
        self._connection: Connection | None = None
        self._barrier = _BARRIER
        self._names: dict[int, str] = {}
        self._blockers = Blockers(self._sources, now)
        self._values = LastValues(self._blockers, inspect=self._inspect, inspect_soon=self._inspect_soon)
        self._likely: dict[int, float] = {}  # until when each poll reads these sequences
        self._turn_at = 0  # the stream with which the next check begins
        self._doubtful: set[int] = set()  # tables and sequences (oids) that the next check looks at in any case
        self._all_at = 0.0  # from when on the next poll looks which of many sequences have moved
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
        self.unwatch(name)
        watched = self._watched[name] = Watched(name, source, published, per_writer, writers, file=file)
        self._busy[name] = self._sharing.setdefault(watched.relation, {})[name] = watched
        self._inspect_at = 0.0

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        """Set the writers of a stream. A holder whose application_name is the name of a writer holds back that writer
        only.
        """
        self._watched[name].writers = frozenset(writers)

    def unwatch(self, name: str) -> None:
        """End the watch of a stream. An unknown name is ignored."""
        watched = self._watched.pop(name, None)
        self._readings.pop(name, None)
        self._busy.pop(name, None)
        if watched is not None:
            sharing = self._sharing[watched.relation]
            del sharing[name]
            if not sharing:
                del self._sharing[watched.relation]
                self._values.drop(watched.relation)

    async def poll(self) -> Mapping[str, Reading]:
        """One round for all watched streams. The mapping is the same object until something changes, and so is each
        Reading.

        Of more than FEW sequences, a round reads the sequences that have moved lately or are `expected` to have. A
        query for other moved sequences is sent so often that it takes a fifth of the time.

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
            await connection.confirm()
            await self._read_again(connection)
            await self._inspect(connection)
        await self._blockers.look_again(connection)
        due = await self._due(connection, now)  # only checked streams; watches may begin and end while we wait
        await self._poll_sequences(connection, due, now)
        await self._poll_tables(connection, due)
        await self._flush(connection, due, now)
        self._update_readings([*due, *self._busy.values()], now)
        return self._readings

    async def _due(self, connection: Connection, now: float) -> list[Watched]:
        """The streams that this poll reads."""
        if len(self._watched) <= FEW:
            return [watched for watched in self._watched.values() if watched.inspected]
        if now >= self._all_at:
            for sequence in await self._values.find_moved(connection, self._sharing.keys()):
                self.expect(sequence)
            self._all_at = self._now() + _PAUSE_OF_ALL * (self._now() - now)
        self._likely = {sequence: until for sequence, until in self._likely.items() if until > now}
        likely = [self._sharing.get(sequence, {}) for sequence in self._likely]
        due = {name: watched for some in (self._busy, *likely) for name, watched in some.items()}
        return [watched for watched in due.values() if watched.inspected]

    def expect(self, sequence: int | None) -> None:
        """Have the next poll read this sequence, whatever else it leaves out; None: have it look which have moved."""
        if sequence is None:
            self._all_at = 0.0
        else:
            self._likely[sequence] = self._now() + _LIKELY

    def _update_readings(self, looked_at: Iterable[Watched], now: float) -> None:
        """Make a reading of each stream that has changed; the others keep theirs."""
        readings = None
        for watched in looked_at:
            if self._watched.get(watched.name) is not watched or not watched.inspected:
                continue
            if watched.stale or watched.name not in self._readings:
                readings = readings or dict(self._readings)
                watched.stale = False
                readings[watched.name] = watched.reading(now, self._stuck_after)
            if watched.unsettled or watched.restless or watched.blocked_by is not None:
                self._busy[watched.name] = watched
            else:
                self._busy.pop(watched.name, None)
        self._readings = readings or self._readings

    def at_rest(self) -> Mapping[int, int | None] | None:
        """The last value of each sequence (None: unused), if only another value can move a position.

        Sequences that have moved lately come first. None if something else can move a position: a holder, a flush, the
        end of a lock, a writer that publishes its position.
        """
        read = self._values.read
        if not self._watched or self._blockers.holders:
            return None
        if any(w.restless or w.sequence not in read for w in self._busy.values()):
            return None
        likely = sorted(self._likely.keys() & self._sharing.keys(), key=lambda sequence: -self._likely[sequence])
        return {sequence: read[sequence] for some in (likely, self._sharing) for sequence in some}

    async def _pinned(self) -> Connection:
        """Our connection. After a new connection is made, readings that were not published are dropped: Postgres may
        have crashed.
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
            watched.restart()
        self._busy = dict(self._watched)
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

    def _inspect_soon(self, *relations: int) -> None:
        """Have the next poll check the streams of these tables and sequences (oids)."""
        self._doubtful.update(relations)
        self._inspect_at = 0.0

    async def _inspect(self, connection: Connection, *relations: int) -> None:
        """Check streams: refuse streams that cannot be served, accept streams that were repaired.

        Of many streams that work, some are checked in turn: the first poll that moves one of them compares its name and
        its sequence (the query horizon_holders), and differences are checked at once. `relations`: as in
        `_inspect_soon`.
        """
        looked_at = self._to_inspect(relations)
        tables = [w.source.table for w in looked_at]
        sequences = [w.source.sequence for w in looked_at if not isinstance(w.source, TableSource)]
        rows = await connection.fetch(load_sql("horizon_inspect"), tables, sequences)
        found = {row["oid"]: row for row in rows}
        await self._identify(connection, looked_at, found)
        for oid in (*tables, *sequences):
            self._names.pop(oid, None)
        self._names |= {oid: row["name"] for oid, row in found.items()}
        self._values.inspected(self._names)
        for watched in looked_at:
            watched.inspected = True
            reason = watched.unfit(found)
            known = None if watched.refused is None else str(watched.refused)
            if reason is None:
                watched.accept()
            elif reason != known:
                watched.refuse(reason)
            if watched.stale and self._watched.get(watched.name) is watched:
                self._busy[watched.name] = watched

    def _to_inspect(self, relations: Iterable[int]) -> list[Watched]:
        every, doubtful = list(self._watched.values()), self._doubtful.union(relations)
        self._doubtful.clear()
        begin = self._turn_at if self._turn_at < len(every) else 0
        self._turn_at = begin + IN_TURN
        return [
            watched
            for place, watched in enumerate(every)
            if place in range(begin, self._turn_at)
            or not watched.inspected
            or watched.refused is not None
            or watched.strayed is not None
            or isinstance(watched.source, TableSource)
            or not doubtful.isdisjoint((watched.source.table, watched.relation))
        ]

    async def _identify(
        self, connection: Connection, asked: list[Watched], found: Mapping[int, Mapping[str, object]]
    ) -> None:
        """Find out which streams' ids may be rows of another table now. Column defaults were read before: the next poll
        notices a default that is made after this look.
        """
        strayed: dict[int, str | None] = {}
        for home in {w.source.identity.home for w in asked if w.source.identity is not None}:
            query = load_sql("horizon_identity").replace("{home}", home)
            numbers = [w.source.identity.number for w in asked if w.source.identity is not None]
            strayed |= {row["number"]: row["reason"] for row in await connection.fetch(query, numbers)}
        for watched in asked:
            if watched.source.identity is not None:
                watched.strayed = strayed.get(watched.source.identity.number)
                if not isinstance(watched.source, TableSource) and watched.sequence in found:
                    watched.feeds = int(str(found[watched.sequence]["feeds"]))

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

    async def _poll_sequences(self, connection: Connection, due: list[Watched], now: float) -> None:
        """Steps 1 and 2 for the streams of which that is `due`."""
        active = [w for w in due if w.locks is not None and w.refused is None]
        read = await self._values.fetch(connection, active)
        values = read or {}
        active = [w for w in active if w.refused is None]
        for watched in active:
            watched.block(self._blockers.holders.get(watched.sequence))
        fed = [(w, w.locks, values[w.sequence]) for w in active if w.locks is not None and w.sequence in values]
        missing = [w.sequence for w in active if w.sequence not in values and w.blocked_by is None]
        if read is not None and missing:
            self._inspect_soon(*missing)  # they were removed: the next poll finds out
        fed = [(w, locks, value) for w, locks, value in fed if not w.check_file(value.file)]
        flushed = max((value.flushed for _, _, value in fed), default=0)
        moved = [one for one in fed if one[1].someone_holds or one[0].moves_to(one[2])]
        if moved:
            self._likely |= dict.fromkeys((w.sequence for w, _, _ in moved), now + _LIKELY)
            flushed = await self._feed(connection, moved, now)
            if any(locks.held_newly for _, locks, _ in moved):  # mostly by a short transaction, which ends meanwhile
                flushed = await self._feed(connection, moved, now)
        for watched, locks, _ in fed:
            watched.stale |= locks.waits_for_flush
            locks.flushed_upto(flushed)

    async def _feed(self, connection: Connection, fed: list[_Fed], now: float) -> int:
        """Step 2; returns how far the WAL is flushed. Our own sessions are listed before it is sent; a session that
        begins meanwhile counts as a holder.
        """
        watched = [w for w, _, _ in fed]
        sources, sequences = [w.source for w in watched], [w.sequence for w in watched]
        feeds = {w.sequence: w.feeds for w in watched if w.source.identity is not None}
        rows = await fetch_holders(connection, sources, sequences, self._own_backends(), feeds)
        if rows[0]["unfit"]:
            await self._inspect(connection, *rows[0]["unfit"])
        listed = by_source(rows)
        for one, locks, value in fed:
            given_out = await self._given_out(connection, one, value) if one.refused is None else None
            if given_out is not None:
                one.feed(value, given_out, listed.get(holders_key(one.source), ()), now)
                locks.flushed_upto(rows[0]["flushed"])
        return int(rows[0]["flushed"])

    async def _given_out(self, connection: Connection, watched: Watched, value: SequenceValue) -> int | None:
        """`Watched.given_out`, after the list of holders was made: no row can appear below it unless a holder writes
        it. None: the rows cannot be read now.
        """
        source, known = watched.source, watched.given_out(value)
        watched.waits_for_rows = False
        if known is not None or isinstance(source, TableSource):
            return known
        watched.waits_for_rows = True
        name = self._names.get(source.table)
        if name is None or not self._blockers.may_wait:
            return None
        query = load_sql("horizon_last_row").format(
            table=name, id=quote_ident(source.id_column), name=quote_literal(name)
        )
        try:
            rows = as_owner(connection, source.reader, source.table)
            row = await rows.fetch_row(query, value.last_value, source.sequence)
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError as error:
            if means(error.sqlstate, sqlstates.LOCKED):
                self._blockers.waited()
            else:
                watched.cannot_read(error, "table")
            return None
        if row is None or row["found"] != source.table:
            self._inspect_soon(source.table)  # it was renamed
            return None
        watched.waits_for_rows = False
        watched.last_row = row["last_row"]
        return watched.given_out(value)

    async def _poll_tables(self, connection: Connection, all_watched: list[Watched]) -> None:
        """Poll the streams whose writers publish their positions."""
        for watched in all_watched:
            source = watched.source
            if not isinstance(source, TableSource) or watched.table is None or watched.refused is not None:
                continue
            name = self._names.get(source.table)
            if name is None:  # unwatched while we waited
                continue
            watched.block(self._blockers.holders.get(source.table))
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
                    watched.block(self._blockers.holders.get(source.table))
                else:
                    watched.cannot_read(error)
                continue
            watched.table.feed({row["writer"]: row["position"] for row in rows}, _highest(rows, "inserted"))
            watched.stale |= watched.table.waits_for_flush
            watched.table.flushed_upto(_highest(rows, "flushed"))

    async def _flush(self, connection: Connection, all_watched: list[Watched], now: float) -> None:
        """Step 3, at most every _BARRIER_EVERY seconds; in between, commits of writers usually flush the WAL."""
        waiting = [w for w in all_watched if w.watch.waits_for_flush]
        if not waiting or now < self._barrier_at:
            return
        await connection.fetch_value(self._barrier)
        self._barrier_at = now + _BARRIER_EVERY
        for watched in waiting:
            watched.watch.all_flushed()
            watched.stale = True


def _highest(rows: list[Row], column: str) -> int:
    return max((row[column] for row in rows), default=0)
