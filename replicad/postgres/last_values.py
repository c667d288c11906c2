"""Reads the last values of the sequences that are watched: together, or one by one when a sequence cannot be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Final

from replicad import errors, sqlstates
from replicad.postgres.blockers import Blockers
from replicad.postgres.bridge import Connection, load_sql
from replicad.postgres.owners import as_owner
from replicad.postgres.watched import SequenceValue, Watched
from replicad.sqlstates import means

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
