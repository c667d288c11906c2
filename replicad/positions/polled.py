"""What a poll reads: the last values of the sequences, who holds locks on tables, and which locks are in the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from replicad import errors, sqlstates
from replicad.positions.watched import (
    Holder,
    HolderKind,
    LockSource,
    ReservationSource,
    SequenceValue,
    Source,
    TableSource,
    Watched,
    holder_of,
)
from replicad.postgres.bridge import Backend, Connection, Row, load_sql
from replicad.postgres.owners import as_owner
from replicad.sqlstates import means

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


_MOVED = "$9::oid[], $10::text[], $11::text[], $12::oid[], $13::bigint[]"
_UNKNOWN = "NULL::bytea"  # the secret, if it cannot be read


async def fetch_holders(
    connection: Connection,
    sources: Sequence[Source],
    sequences: list[int],
    own: Collection[Backend],
    feeds: Mapping[int, int],
) -> list[Row]:
    """The rows of the query horizon_holders. `own`: sessions that only delete from tables with `own_deletes`. `feeds`:
    by sequence, `Watched.feeds`.
    """
    tables = [source for source in sources if isinstance(source, LockSource)]
    keys = {source.proof_key for source in sources if isinstance(source, ReservationSource)}
    args = (
        [source.table for source in tables],
        sequences,
        [source.table for source in tables if source.own_deletes],
        [backend.pid for backend in own],
        [backend.started for backend in own],
    )
    alone = [source for source in tables if source.has_sequence]
    taken = [source.sequence for source in alone], [source.table for source in alone]
    known = [source.identity for source in sources if source.identity is not None]
    names = [name for identity in known for name in identity.names]
    after: tuple[list[object], ...] = ()
    if known:
        columns = zip(*names, strict=True) if names else ((), (), ())
        after = (*map(list, columns), list(feeds), list(feeds.values()))
    moved = f"{known[0].home}.stream_moved({_MOVED})" if known else "'{}'::oid[]"
    sql = load_sql("horizon_holders").replace("{moved}", moved)
    key = keys.pop() if len(keys) == 1 else None
    if key is not None:
        try:
            return await connection.fetch(
                sql.replace("{key}", f"(SELECT s.key FROM {key} AS s)"), *args, True, *taken, *after
            )
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError as error:
            # The right was revoked, or the table was dropped. The registry notices it within a second.
            if not means(error.sqlstate, (*sqlstates.NO_RIGHT, *sqlstates.MISSING)):
                raise
    return await connection.fetch(sql.replace("{key}", _UNKNOWN), *args, False, *taken, *after)


def holders_key(source: Source) -> tuple[str, int]:
    """Under which key `by_source` has the holders of this source."""
    if isinstance(source, ReservationSource):
        return ("number", source.number)
    return ("watched", source.table)


def by_source(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Holders by table or by the number of the stream. The row for 'no holder' is left out."""
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row["watched"] is not None:
            found["watched", row["watched"]].append(row)
        elif row["number"] is not None:
            found["number", row["number"]].append(row)
    return found


REREAD: Final = 16  # unused sequences; so many are read again after each check, by two statements each


class LastValues:
    """The last readings, and how to read again.

    `inspect` checks the streams of a sequence (oid) and refuses streams that cannot be served; `inspect_soon` asks for
    that at the next poll.
    """

    def __init__(
        self,
        blockers: Blockers,
        *,
        inspect: Callable[[Connection, int], Awaitable[None]],
        inspect_soon: Callable[[int], None],
    ) -> None:
        self.read: dict[int, int | None] = {}  # by sequence, as they were read last; None: unused
        self._blockers = blockers
        self._inspect = inspect
        self._inspect_soon = inspect_soon
        self._names: Mapping[int, str] = {}
        self._unused: dict[tuple[int, int | None], int] = {}  # the value below the first one of a sequence and its file
        self._files: dict[int, int | None] = {}  # by sequence, as `read`
        self._first: dict[int, int | None] = {}  # what this connection has read first, as long as it stays
        self._moved: set[int] = set()  # sequences that have had another value since

    def inspected(self, names: Mapping[int, str]) -> None:
        """A check has found these relations: quoted names by oid. The unused sequences that were read longest ago are
        to be read again: setval() may have changed where they begin, and only reading them shows it.
        """
        self._names = names
        for oldest in list(islice(self._unused, REREAD)):
            del self._unused[oldest]

    def forget(self) -> None:
        """A new connection, perhaps to another server: nothing was read from it."""
        self.read = {}
        self._files = {}
        self._unused = {}
        self._first = {}
        self._moved = set()

    async def fetch(self, connection: Connection, active: list[Watched]) -> dict[int, SequenceValue] | None:
        """The last values of all sequences that exist, may be read and are not locked. None: try again at the next
        poll.

        If Postgres refuses to read a sequence, only its own stream is refused.
        """
        readers = {watched.sequence: watched.sequence_reader for watched in active}
        while True:
            free = {sequence: readers[sequence] for sequence in readers.keys() - self._blockers.holders.keys()}
            if not free:
                return {}
            try:
                values = await self._fetch(connection, free)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.GONE_MEANWHILE) and self._blockers.may_wait:
                    self._blockers.waited()  # dropped just now: the next try does not see it
                elif not means(error.sqlstate, sqlstates.LOCKED):
                    return await self._one_by_one(connection, active)
                elif not await self._blockers.may_try_again(connection, error):
                    return None
            else:
                self._blockers.none_met()
                return values

    async def find_moved(self, connection: Connection, sequences: Iterable[int]) -> list[int]:
        """The sequences that have another value or file than when they were read; all of them if Postgres refuses."""
        read = [sequence for sequence in sequences if sequence in self.read and sequence not in self._blockers.holders]
        known = [self.read[sequence] for sequence in read], [self._files[sequence] for sequence in read]
        try:
            return [row["sequence"] for row in await connection.fetch(load_sql("horizon_moved"), read, *known)]
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError:  # one of them is locked, say: to read them shows which
            return read

    def drop(self, sequence: int) -> None:
        """Nobody watches it any more."""
        self.read.pop(sequence, None)
        self._files.pop(sequence, None)

    async def fetch_one(self, connection: Connection, watched: Watched) -> dict[int, SequenceValue]:
        """Only that of this stream. Raises DatabaseError if Postgres refuses."""
        return await self._fetch(connection, {watched.sequence: watched.sequence_reader})

    async def _one_by_one(self, connection: Connection, active: list[Watched]) -> dict[int, SequenceValue]:
        """They cannot be read together: read each alone, to find the sequence that fails."""
        values: dict[int, SequenceValue] = {}
        for watched in active:
            if watched.sequence in values or watched.sequence in self._blockers.holders:
                continue
            try:
                values |= await self.fetch_one(connection, watched)
            except errors.DatabaseUnavailable:
                raise
            except errors.DatabaseError as error:
                if means(error.sqlstate, sqlstates.LOCKED):
                    if not await self._blockers.may_try_again(connection, error):
                        break
                elif not means(error.sqlstate, sqlstates.GONE_MEANWHILE):
                    watched.cannot_read(error)
        return values

    async def _fetch(self, connection: Connection, readers: Mapping[int, str | None]) -> dict[int, SequenceValue]:
        """`readers`: by sequence, the function that reads it as its owner (owners.py), or None."""
        values: dict[int, SequenceValue] = {}
        for row in await connection.fetch(load_sql("horizon_last_values"), list(readers)):
            sequence, file = row["sequence"], row["file"]
            self.read[sequence], self._files[sequence] = row["last_value"], file
            if row["last_value"] is not None:
                self._unused.pop((sequence, file), None)
                moved = self._has_moved(sequence, row["last_value"])
                values[sequence] = SequenceValue(row["last_value"], row["inserted"], row["flushed"], file, moved)
            elif not row["readable"]:
                await self._inspect(connection, sequence)  # refuses the streams that need it
            elif (first := self._unused.get((sequence, file))) is not None:
                self._has_moved(sequence, None)
                values[sequence] = SequenceValue(first, row["inserted"], row["flushed"], file)
            elif (value := await self._fetch_unused(connection, sequence, file, readers[sequence])) is not None:
                values[sequence] = value
        return values

    async def _fetch_unused(
        self, connection: Connection, sequence: int, file: int | None, reader: str | None
    ) -> SequenceValue | None:
        """The value at which an unused sequence begins. Not always its START: it may have been restarted or set."""
        name = self._names.get(sequence)
        if name is None:
            return None
        try:
            query = load_sql("horizon_unused_sequence").replace("{sequence}", name)
            first = await as_owner(connection, reader, sequence).fetch_row(query)
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError:  # it was renamed, or we may not read it any more
            self._inspect_soon(sequence)
            return None
        if first is None or first["found"] != sequence:  # another one has the name
            self._inspect_soon(sequence)
            return None
        after = await connection.fetch_row(load_sql("horizon_last_values"), [sequence])
        if after is None or not after["readable"] or after["file"] != file:
            return None
        last_value = after["last_value"]
        if last_value is None:
            if first["is_called"]:
                return None  # used and set back between the two: the next poll finds out
            self._has_moved(sequence, None)
            last_value = self._unused[sequence, file] = first["last_value"] - 1
        return SequenceValue(last_value, after["inserted"], after["flushed"], after["file"])

    def _has_moved(self, sequence: int, last_value: int | None) -> bool:
        """Whether the sequence has had another value on this connection; None: it was unused."""
        if sequence not in self._moved and self._first.setdefault(sequence, last_value) != last_value:
            self._moved.add(sequence)
            del self._first[sequence]
        return sequence in self._moved
