"""What a table has at one moment, for the audit to compare: the ids of a window below a position, and counts of rows.

The statements are plain SELECTs of their own, and not those by which rows are read for clients. They share one snapshot
and see the table as its owner does, without row security. It is the table that has the registered name, even where
rows are read from another one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, Self

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database, load_sql, quote_ident
from replicad.postgres.owners import as_owner
from replicad.sqlstates import LOCKED, means
from replicad.streams.registry import Stream
from replicad.streams.row_pieces import Segment

# How many rows a table has far below the position, by ranges of ids, for the audit to find rows that turn up there.
#
# Nearer to the position the audit compares ids. Of all rows below it keeps numbers. Each range is counted in turn; what
# is more than at the count before has turned up since. Fewer rows are no fault: some were removed. Does no I/O.

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1  # the bounds of all ids
GRAIN = 10_000  # rows up to which a range is joined with the next one
MOST_RANGES = 2048  # of one stream, some 400 kB; with more, two that follow one another become one


class CountedRange(NamedTuple):
    """The ids in (after, upto]. `rows`: how many rows there were at the last count, None before the first.

    `since`: transactions with lower numbers had ended at that count.
    """

    after: int
    upto: int
    rows: int | None = None
    since: int = 0

    def joined(self, later: CountedRange) -> CountedRange:
        """This range and the one that follows it, as one. It was counted if both were."""
        rows = None if self.rows is None or later.rows is None else self.rows + later.rows
        return CountedRange(self.after, later.upto, rows, min(self.since, later.since))


@dataclass(slots=True)
class CountedRanges:
    """All ids up to `upto`, in ranges that follow one another. `turn`: where the next one to be counted begins."""

    ranges: list[CountedRange] = field(default_factory=list)
    turn: int = LOWEST

    def copy(self) -> Self:
        """A copy to be changed."""
        return type(self)(list(self.ranges), self.turn)

    @property
    def upto(self) -> int:
        """The last id."""
        return self.ranges[-1].upto if self.ranges else LOWEST

    def reach(self, upto: int) -> None:
        """All ids up to here belong to ranges, the new ones to one that was not counted."""
        if upto > self.upto:
            self.ranges.append(CountedRange(self.upto, upto))
            if len(self.ranges) > MOST_RANGES:
                self.ranges[:] = list(_halved(self.ranges))

    def cut(self, upto: int) -> None:
        """Forget all ids above this one. What is left of a range was not counted."""
        kept = [one for one in self.ranges if one.upto <= upto]
        rest = self.ranges[len(kept) : len(kept) + 1]
        self.ranges = kept + [CountedRange(one.after, upto) for one in rest if one.after < upto]

    def forget(self, after: int, upto: int) -> None:
        """Forget how many rows the ranges have with ids in (after, upto]."""
        self.ranges = [
            CountedRange(one.after, one.upto) if one.after < upto and after < one.upto else one for one in self.ranges
        ]

    def due(self) -> Iterable[int]:
        """Where the ranges begin, in the order in which they are to be counted: by turns one that never was, the last
        first, and one of the others.
        """
        new = [one.after for one in reversed(self.ranges) if one.rows is None]
        known = [one.after for one in self.ranges if one.rows is not None]
        first = bisect_left(known, self.turn)
        both = zip_longest(new, [*known[first:], *known[:first]])
        return [after for pair in both for after in pair if after is not None]

    def beginning(self, after: int) -> CountedRange | None:
        """The range that begins there; None if it was joined with the one before."""
        at = bisect_left(self.ranges, after, key=attrgetter("after"))
        return self.ranges[at] if at < len(self.ranges) and self.ranges[at].after == after else None

    def note(self, counted: CountedRange) -> None:
        """A range was counted, or its lower part; then the upper one was not."""
        at = bisect_left(self.ranges, counted.after, key=attrgetter("after"))
        whole = self.ranges[at]
        if whole.rows is not None:
            self.turn = whole.upto
        found = [counted] if counted.upto == whole.upto else [counted, CountedRange(counted.upto, whole.upto)]
        joined = self.ranges[at - 1].joined(counted) if at else counted
        if at and joined.rows is not None and joined.rows <= GRAIN:
            self.ranges[at - 1 : at + 1] = [joined, *found[1:]]
        else:
            self.ranges[at : at + 1] = found
        if len(self.ranges) > MOST_RANGES:
            self.ranges[:] = list(_halved(self.ranges))


def _halved(ranges: list[CountedRange]) -> Iterator[CountedRange]:
    for first in range(0, len(ranges), 2):
        pair = ranges[first : first + 2]
        yield pair[0].joined(pair[1]) if len(pair) > 1 else pair[0]


MAX_COUNTED = 1_000_000  # rows of an attached table that are counted

# A table with row security that counts for its owner too is an error, and not a table with fewer rows.
_SESSION = "SET lock_timeout = '50ms'; SET statement_timeout = '5s'; SET row_security = off"


@dataclass(frozen=True, slots=True)
class Window:
    """The ids in (after, upto], ascending, and the number of rows of each (None: one)."""

    after: int
    upto: int
    ids: array[int]
    counts: array[int] | None

    def rows(self) -> Iterator[tuple[int, int]]:
        """Each id, and its number of rows."""
        return zip(self.ids, self.counts or repeat(1), strict=False)

    def upto_id(self, upto: int) -> Window:
        """The part up to an id."""
        end = bisect_right(self.ids, upto)
        return Window(self.after, upto, self.ids[:end], None if self.counts is None else self.counts[:end])

    def late(self, now: Window) -> dict[int, int]:
        """The ids that have more rows in `now` than in this window, and how many more."""
        after = max(self.after, now.after)
        before = dict(self.rows())
        return {
            one: count - before.get(one, 0)
            for one, count in now.rows()
            if after < one <= self.upto and count > before.get(one, 0)
        }


class Attached(NamedTuple):
    """Rows of an attached table at or below a position: how many (at most MAX_COUNTED), the first and the last id.

    `fresh`: they were written in the transaction that attached the table, or later.
    """

    rows: int
    first: int
    last: int
    fresh: bool = False


class Windows:
    """Makes looks. A look is not whole, and raises nothing, where a table is locked, was rewritten, or got or lost a
    partition meanwhile, or where ids belong to other rows by now.
    """

    def __init__(self, db: Database, max_rows: int, schema: str) -> None:
        """`max_rows`: rows of a window that are read."""
        self._db = db
        self._max_rows = max_rows
        self._schema = schema

    @asynccontextmanager
    async def looking(self, stream: Stream) -> AsyncIterator[Look]:
        """A look at the table of a stream.

        The files are compared before the snapshot is taken and when all is read. A statement that waits for a command
        which rewrites the table reads the new file with a snapshot in which it is empty.
        """
        look = Look(None, stream, self._max_rows, self._schema)
        try:
            async with self._db.connection() as connection:
                await connection.execute(_SESSION)
                tree = await _tree(connection, stream)
                there = ((oid, name) for oid, (name, _) in tree.items() if name)
                look.root, look.table = next(there, (stream.table_oid, str(stream.table)))
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    look.connection, look.tree = connection, {oid: name for oid, (name, _) in tree.items() if name}
                    yield look
                    files = {oid: file for oid, (_, file) in tree.items()}
                    after = {oid: file for oid, (_, file) in (await _tree(connection, stream)).items()}
                    same = stream.sequence_file in (None, files.get(stream.sequence_oid))
                    look.whole = same and files == after
        except DatabaseError as error:
            if not means(error.sqlstate, LOCKED):  # another session alters the table
                raise


async def _tree(connection: Connection, stream: Stream) -> dict[int, tuple[str | None, int | None]]:
    """Names and files by oid; the table that has the registered name comes first."""
    schema, name = (None, None) if stream.identity is None else stream.identity.names[0][1:]
    rows = await connection.fetch(load_sql("late_tree"), stream.table_oid, stream.sequence_oid, schema, name)
    return {row["oid"]: (row["name"], row["file"]) for row in rows}


@dataclass(slots=True)
class Look:
    """One look at the table of a stream. What it has found counts only if it is `whole` in the end.

    `tree`: the names of the table, its partitions and its children, by oid.
    """

    connection: Connection | None
    stream: Stream
    max_rows: int
    schema: str
    tree: Mapping[int, str] = field(default_factory=dict)
    root: int = 0
    table: str = ""
    whole: bool = False

    @property
    def elsewhere(self) -> str | None:
        """The relation to which the name of the stream's table leads now, if that is another one: the look is at it."""
        return None if self.root == self.stream.table_oid else self.table

    async def window(self, after: int, upto: int, apart: Collection[int] = (), *, since: int | None = None) -> Window:
        """The ids in (after, upto] in all tables of the tree except those in `apart` (oids). `since`: only of rows that
        this transaction or a later one has written, or changed.
        """
        left_out = self._apart(apart)
        if since is not None:
            left_out += f" AND age(t.xmin) <= age('{since}'::xid8::xid)"
        [row] = await self._fetch("late_ids", after, upto, self.max_rows, apart=left_out)
        ids = array("q", row["ids"])
        counts = None if row["counts"] is None else array("q", row["counts"])
        if row["rows"] == self.max_rows:  # the lowest id may have been cut
            after = ids[0]
            ids, counts = ids[1:], None if counts is None else counts[1:]
        return Window(after, upto, ids, counts)

    async def counts(
        self, segment: Segment, bounds: Sequence[int], limit: int, apart: Collection[int], skipped: Collection[int]
    ) -> list[int]:
        """How many rows the segment has, without skipped ids: in each of the parts into which the ascending ids
        `bounds` divide it; with ranges for each writer it is not divided. At most `limit`, from the lower end.
        """
        left_out = self._apart(apart, [id for id in skipped if segment.after < id <= segment.upto])
        if segment.ranges is None:
            above = [bound + 1 for bound in bounds]
            rows = await self._fetch("audit_counts", segment.after, segment.upto, above, limit, apart=left_out)
            found = {row["part"]: row["rows"] for row in rows}
            return [found.get(part, 0) for part in range(len(bounds) + 1)]
        names = [name for name, _ in segment.ranges]
        low, high = ([span[at] for _, span in segment.ranges] for at in (0, 1))
        others = segment.others or (segment.upto, segment.upto)
        [row] = await self._fetch(
            "audit_writers", segment.after, segment.upto, names, low, high, *others, limit, apart=left_out
        )
        return [row["rows"]]

    async def count(
        self, after: int, upto: int, limit: int, apart: Collection[int], skipped: Collection[int]
    ) -> CountedRange:
        """How many rows there are in (after, upto], without skipped ids; or in the lower part of it that ends with the
        id of the row number `limit`.
        """
        left_out = self._apart(apart, [id for id in skipped if after < id <= upto])
        [row] = await self._fetch("audit_range", after, upto, limit, apart=left_out)
        return CountedRange(after, upto if row["rows"] < limit else row["last"], row["rows"], row["since"])

    async def lowest(self) -> tuple[int | None, int | None]:
        """The lowest id (None if the table is empty), and the id up to which rows were removed at that moment by the
        registry.
        """
        assert self.connection is not None
        [row] = await self._fetch("audit_lowest")
        query = load_sql("audit_trimmed").format(schema=quote_ident(self.schema))
        return row["lowest"], await self.connection.fetch_value(query, self.stream.number)

    async def attached(self, table: str, before: int, position: int) -> Sequence[Attached]:
        """The rows of an attached table that were not sent to readers, the fresh ones apart.

        `before`: the earlier position of readers, `position`: the present one.
        """
        rows = await self._fetch("late_attached", before, position, MAX_COUNTED, table=table)
        return [Attached(row["rows"], row["first"], row["last"], bool(row["fresh"])) for row in rows]

    async def _fetch(self, query: str, *args: object, table: str | None = None, apart: str = "") -> list[Any]:
        assert self.connection is not None
        stream = self.stream
        sql = load_sql(query).format(
            table=table or self.table,
            id=quote_ident(stream.id_column),
            instance=quote_ident(stream.instance_column or stream.id_column),
            schema=quote_ident(self.schema),
            apart=apart,
        )
        return list(await as_owner(self.connection, stream.reader, self.root).fetch(sql, *args))

    def _apart(self, tables: Collection[int], ids: Collection[int] = ()) -> str:
        found = f" AND t.tableoid NOT IN ({', '.join(str(int(one)) for one in sorted(tables))})" if tables else ""
        if ids:
            some = ",".join(str(int(one)) for one in sorted(ids))
            found += f" AND t.{quote_ident(self.stream.id_column)} <> ALL ('{{{some}}}'::bigint[])"
        return found
