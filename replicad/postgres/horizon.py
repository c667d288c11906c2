"""The poller: asks Postgres how far each watched stream may be read, in the order that makes the answer true.

One poll, each statement begun when the one before is answered, in READ COMMITTED (design: positions):
 1. last values of all sequences, and how far the WAL is written and flushed;
 2. holders of all locks, unless nothing moved and nobody held at the last poll;
 3. a flush of the WAL, where something could be published but is not on disk yet.
The rows up to the new positions may be read by any connection after `poll` has returned.

Knows tables and sequences by oid only; what a stream is, who registered it and who reads it are not its business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import trio

from replicad import errors
from replicad.postgres.bridge import Connection, Database, Row, load_sql
from replicad.postgres.watched import (
    RESERVATION_BAND,
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

__all__ = [
    "RESERVATION_BAND",
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

STUCK_AFTER = 60.0  # seconds that one holder may keep a position back before that is an alarm
_INSPECT_EVERY = 5.0  # seconds between looks at what tables and sequences are like
_LOOK_AGAIN = 0.25  # seconds between looks at a sequence that somebody had locked
_BARRIER_EVERY = 0.02  # seconds between forced flushes: up to PostgreSQL 16 each costs a transaction id
_LOCK_TIMEOUT = "50ms"  # how long one sequence that somebody alters may keep all streams waiting
_LOCK_NOT_AVAILABLE = "55P03"
_RELATION_GONE = "XX000"  # "could not open relation with OID", by a function that was given an oid
_TRIES = 3

# The barrier must not wait for a standby that is down: local disk is what a crash leaves us. A standby that
# lags and is promoted makes a reset, which is told.
_SESSION = f"SET lock_timeout = '{_LOCK_TIMEOUT}'; SET synchronous_commit = local"
_BARRIER = "SELECT pg_logical_emit_message(true, 'replicad', '')"
_BARRIER_17 = "SELECT pg_logical_emit_message(false, 'replicad', '', true)"  # without a transaction id


@dataclass(frozen=True, slots=True)
class _Value:
    """A sequence's last value, and ends of the WAL read after it."""

    last_value: int
    inserted: int
    flushed: int


class Horizon:
    """Positions of any number of streams. An async context manager that keeps one connection of `db` to itself.

    `now` is a monotonic clock in seconds. Not to be polled by two tasks at once.
    """

    def __init__(
        self, db: Database, *, now: Callable[[], float] = trio.current_time, stuck_after: float = STUCK_AFTER
    ) -> None:
        self._db = db
        self._now = now
        self._stuck_after = stuck_after
        self._watched: dict[str, Watched] = {}
        self._readings: dict[str, Reading] = {}
        self._held_open = AsyncExitStack()
        self._connection: Connection | None = None
        self._barrier = _BARRIER
        self._names: dict[int, str] = {}
        self._unused: dict[int, int] = {}  # sequences that have handed out nothing yet: the value below their first
        self._blocked: dict[int, Holder] = {}  # sequences that cannot be read now, and who is in the way
        self._inspect_at = 0.0
        self._look_again_at = 0.0
        self._barrier_at = 0.0
        self._before_polling: list[Callable[[], Awaitable[None]]] = []

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None:
        """Have `look` called on every new connection before anything is read from it.

        The connection may lead to another server, or to one that was restored. `look` may begin and end watches; while
        it fails, so do polls.
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
    ) -> None:
        """Watch a stream from the next poll on; one of that name that is watched already is begun anew.

        `published` and `per_writer` are the positions that were really published before, if any: they are trusted, and
        let readers go on while transactions older than this watch are still open. `writers` as in `set_writers`. Checks
        nothing itself: what cannot be watched has a Reading that is `refused`.
        """
        self._watched[name] = Watched(name, source, published, per_writer, writers)
        self._readings.pop(name, None)
        self._inspect_at = 0.0

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        """Name the writers of a stream: a holder whose application_name is one of them holds back that one only."""
        self._watched[name].writers = frozenset(writers)

    def unwatch(self, name: str) -> None:
        """Forget a stream; no such stream is no error."""
        self._watched.pop(name, None)
        self._readings.pop(name, None)

    async def poll(self) -> Mapping[str, Reading]:
        """One round for all watched streams. The mapping is the same object as long as there is nothing new to say.

        Raises DatabaseUnavailable and other DatabaseErrors (poll again later: no position was lost or is too high) and
        StandbyRefused.
        """
        connection = await self._pinned()
        now = self._now()
        if now >= self._inspect_at:
            self._inspect_at = now + _INSPECT_EVERY  # before looking: a watch that begins meanwhile sets it back
            await self._inspect(connection)
        # Only what has been looked at; others may begin and end watches while we wait for Postgres.
        watched = [w for w in self._watched.values() if w.inspected]
        changed = bool(self._blocked)
        if self._blocked and now >= self._look_again_at:
            self._blocked = await self._blockers(connection, list(self._blocked))
            self._look_again_at = now + _LOOK_AGAIN
        changed |= await self._poll_sequences(connection, watched, now)
        changed |= await self._poll_tables(connection, watched)
        changed |= await self._flush(connection, watched, now)
        if changed or len(self._readings) != len(watched) or any(r.reset for r in self._readings.values()):
            current = [w for w in watched if self._watched.get(w.name) is w]
            self._readings = {w.name: w.reading(now, self._stuck_after) for w in current}
        return self._readings

    async def _pinned(self) -> Connection:
        """Our connection. On a new one nothing that was read and not published counts: Postgres may have crashed."""
        if self._connection is not None and not self._connection.is_closed:
            return self._connection
        await self._let_go()
        connection = await self._held_open.enter_async_context(self._db.connection())
        try:
            await self._greet(connection)
            for look in self._before_polling:
                await look()
        except BaseException:
            await self._let_go()
            raise
        for watched in self._watched.values():
            watched.watch.restart()
        self._blocked = {}
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
        """Refuse what cannot be served, accept what was mended."""
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
            if reason is None:
                watched.accept()
            elif watched.refused is None or str(watched.refused) != reason:
                watched.refuse(reason)

    async def _poll_sequences(self, connection: Connection, all_watched: list[Watched], now: float) -> bool:
        """Steps 1 and 2; True when there may be something new to say."""
        active = [w for w in all_watched if w.locks is not None and w.refused is None]
        values = await self._last_values(connection, {_sequence(w) for w in active})
        for watched in active:
            watched.blocked_by = self._blocked.get(_sequence(watched))
        fed = [(w, w.locks, values[_sequence(w)]) for w in active if w.locks is not None and _sequence(w) in values]
        if any(_sequence(w) not in values and w.blocked_by is None for w in active):
            self._inspect_at = now  # gone: the next poll says so
        changed = any(locks.someone_holds or locks.last_value != value.last_value for _, locks, value in fed)
        flushed = max((value.flushed for _, _, value in fed), default=0)
        if changed:
            tables = [w.source.table for w, _, _ in fed if isinstance(w.source, LockSource)]
            rows = await connection.fetch(load_sql("horizon_holders"), tables, list(values))
            flushed = rows[0]["flushed"]
            if rows[0]["unfit"]:
                await self._inspect(connection)
            listed = _by_source(rows)
            for watched, _, value in fed:
                if watched.refused is None:
                    watched.feed(value.last_value, value.inserted, listed.get(_holders_key(watched.source), ()), now)
        for _, locks, _ in fed:
            if not changed:
                locks.rest()
            changed |= locks.waits_for_flush
            locks.flushed_upto(flushed)
        return changed or bool(self._blocked)

    async def _last_values(self, connection: Connection, wanted: set[int]) -> dict[int, _Value]:
        """Step 1 for all sequences that exist and that nobody has locked."""
        for _ in range(_TRIES):
            sequences = [sequence for sequence in wanted if sequence not in self._blocked]
            if not sequences:
                return {}
            try:
                return await self._read_values(connection, sequences)
            except errors.DatabaseError as error:
                if error.sqlstate == _LOCK_NOT_AVAILABLE:
                    self._blocked |= await self._blockers(connection, sequences)
                    self._look_again_at = self._now() + _LOOK_AGAIN
                elif error.sqlstate != _RELATION_GONE:
                    raise
                failure = error
        raise failure

    async def _read_values(self, connection: Connection, sequences: list[int]) -> dict[int, _Value]:
        values: dict[int, _Value] = {}
        for row in await connection.fetch(load_sql("horizon_last_values"), sequences):
            sequence = row["sequence"]
            if row["last_value"] is not None:
                self._unused.pop(sequence, None)
                values[sequence] = _Value(row["last_value"], row["inserted"], row["flushed"])
            elif sequence in self._unused:
                values[sequence] = _Value(self._unused[sequence], row["inserted"], row["flushed"])
            elif (value := await self._read_unused(connection, sequence)) is not None:
                values[sequence] = value
        return values

    async def _read_unused(self, connection: Connection, sequence: int) -> _Value | None:
        """Where an unused sequence begins. Not simply at its START: it may have been restarted or set elsewhere."""
        name = self._names.get(sequence)
        if name is None:
            return None
        try:
            first = await connection.fetch_row(load_sql("horizon_unused_sequence").replace("{sequence}", name))
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError:  # it was renamed, or we may not read it any more: the next inspection says so
            self._inspect_at = 0.0
            return None
        after = await connection.fetch_row(load_sql("horizon_last_values"), [sequence])
        if first is None or after is None:
            return None
        last_value = after["last_value"]
        if last_value is None:
            if first["is_called"]:
                return None  # used and set back between the two: the next poll will know
            last_value = self._unused[sequence] = first["last_value"] - 1
        return _Value(last_value, after["inserted"], after["flushed"])

    async def _blockers(self, connection: Connection, sequences: list[int]) -> dict[int, Holder]:
        rows = await connection.fetch(load_sql("horizon_blockers"), sequences)
        return {row["sequence"]: holder_of(row, HolderKind.SEQUENCE_LOCK) for row in rows}

    async def _poll_tables(self, connection: Connection, all_watched: list[Watched]) -> bool:
        """The streams whose writers publish their own positions; True when one of them has something new."""
        changed = False
        for watched in all_watched:
            source = watched.source
            if not isinstance(source, TableSource) or watched.table is None or watched.refused is not None:
                continue
            name = self._names.get(source.table)
            if name is None:  # unwatched while we waited
                continue
            query = load_sql("horizon_positions_table").replace("{table}", name)
            try:
                rows = await connection.fetch(query, source.stream_name)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                watched.refuse(
                    f'the positions table of stream "{watched.name}" cannot be read: {error} It needs the columns '
                    "stream_name, instance_name and stream_id."
                )
                changed = True
                continue
            watched.table.feed({row["writer"]: row["position"] for row in rows}, _highest(rows, "inserted"))
            changed |= watched.table.waits_for_flush
            watched.table.flushed_upto(_highest(rows, "flushed"))
        return changed

    async def _flush(self, connection: Connection, all_watched: list[Watched], now: float) -> bool:
        """Step 3, at most every _BARRIER_EVERY seconds; in between the writers' own commits usually do it."""
        waiting = [w.watch for w in all_watched if w.watch.waits_for_flush]
        if not waiting or now < self._barrier_at:
            return False
        await connection.fetch_value(self._barrier)
        self._barrier_at = now + _BARRIER_EVERY
        for watch in waiting:
            watch.all_flushed()
        return True


def _sequence(watched: Watched) -> int:
    assert not isinstance(watched.source, TableSource)
    return watched.source.sequence


def _holders_key(source: Source) -> tuple[str, int]:
    if isinstance(source, ReservationSource):
        return ("number", source.number)
    return ("watched", source.table)


def _by_source(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Holders by the table or the stream's number that they concern; the row that says nobody holds is left out."""
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row["watched"] is not None:
            found["watched", row["watched"]].append(row)
        elif row["number"] is not None:
            found["number", row["number"]].append(row)
    return found


def _highest(rows: list[Row], column: str) -> int:
    return max((row[column] for row in rows), default=0)
