"""Ranges of a stream as RDATA lines that Postgres renders, and a few cheap queries about a range.

A `RowSource` reads one stream's table; `row_text` says how its rows become lines. Its callers give it the positions
that are safe to read (horizon.py). No row is touched in Python; chunks are only cut at line ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from replicad.errors import DatabaseError, RowTooLong
from replicad.postgres.owners import AsOwner
from replicad.postgres.statements import Queries, load_sql
from replicad.streams.chunks import Chunk, Enough, LineCutter, chunk_of, lines_of_block, no_longer, whole_ids
from replicad.streams.row_text import MASTER, Range, RowText, is_one

COUNT_LIMIT: Final = 1_000_000  # rows; counting more would take seconds
FEW: Final = 256  # ids; so many rows, and fewer FEW_BYTES, come faster by a prepared statement than by a COPY
FEW_BYTES: Final = 64 * 1024
BLOCK: Final = 4 << 20  # bytes that a reader (AsOwner) gives at a time; Postgres holds them until they are complete
BLOCK_MAX: Final = 16 << 20  # the same for one piece of old rows, which has bounds of its own
GROWTH: Final = 8  # the next block has so many times the bytes when not even one complete id had room

ChunkSink = Callable[["Chunk"], Awaitable[None]]


def _above(begin: int, span: Range) -> Range:
    """The part of a range above an id; it may be empty."""
    low, high = span
    return max(low, begin), max(high, begin)


@dataclass(frozen=True, slots=True)
class RowSource(RowText):
    """The rows of one stream."""

    async def copy_range(
        self,
        db: Queries,
        after: int,
        upto: int,
        sink: ChunkSink,
        timeout: float | None = None,
        *,
        limit: int | None = None,
    ) -> int:
        """Send the lines of `range_sql` to `sink` in chunks; returns how many there were. With `limit` the last line
        may be within a batch.

        Raises:
            TokenExpired: within the same snapshot as the rows, when rows above `after` were trimmed.
            TableReplaced: the name leads to another table, or ids belong to other rows; nothing was sent.
            RowTooLong, DatabaseError: a row failed; all whole lines that Postgres sent before it went to `sink`.
            Enough: with `limit`, and there are many bytes; more rows may follow.
        """
        rows = await self._copy_few(db, after, upto, sink, limit)
        if rows is not None:
            return rows

        def query(begin: int) -> str:
            return self.range_sql(begin, upto, limit)

        return await self._copy(db, query, after, sink, timeout, once=limit is not None)

    async def copy_vector(
        self,
        db: Queries,
        ranges: Mapping[str, Range],
        sink: ChunkSink,
        timeout: float | None = None,
        *,
        others: Range | None = None,
        limit: int | None = None,
    ) -> int:
        """Send the lines of `vector_sql` to `sink` in chunks; returns how many there were. Raises as `copy_range`."""
        if not ranges and others is None:
            return 0
        one = ranges.get(MASTER) if self.instance_column is None else others
        rows = None
        if one is not None and (self.instance_column is None or is_one(ranges, others)):
            rows = await self._copy_few(db, *one, sink, limit)
        if rows is not None:
            return rows

        def query(begin: int) -> str:
            rest = None if others is None else _above(begin, others)
            return self.vector_sql({name: _above(begin, span) for name, span in ranges.items()}, rest, limit)

        lowest = min(low for low, _ in (*ranges.values(), *([] if others is None else [others])))
        return await self._copy(db, query, lowest, sink, timeout, once=limit is not None)

    async def copy_blocks(
        self,
        db: Queries,
        after: int,
        upto: int,
        sink: ChunkSink,
        timeout: float | None = None,
        *,
        step: int,
        max_line: int,
    ) -> int:
        """Send the lines of `range_sql` to `sink`, one chunk for the rows of `step` ids; returns how many there were.

        Where most ids have rows, and these are small, Postgres takes half the time of `copy_range`. Only if ids are
        unique. Postgres holds up to `step` lines of `max_line` bytes.

        Raises what `copy_range` raises, but no error says which row is at fault, and RowTooLong for a line of more than
        `max_line` bytes. What went to `sink` before is whole.
        """
        most = min(max_line, self.max_row)
        total = 0

        async def take(value: bytes) -> None:
            nonlocal total
            rows, lines = lines_of_block(value)
            if not no_longer(lines, most):
                raise RowTooLong(f"a line has more than {most} bytes")
            total += rows
            await sink(chunk_of(lines, rows))

        query = self.blocks_sql(after, upto, step, max_line)
        if self.reader is None:
            await db.copy_values(query, sink=take, timeout=timeout, lock=self.lock)
        elif await self._as_owner(db, BLOCK_MAX).copy_values(query, take, timeout):
            raise Enough
        return total

    async def last_tokens(self, db: Queries, after: int, upto: int) -> dict[str, int]:
        """The last id of each writer that has rows in (after, upto]. Queries the range; without instances, its end."""
        if self.instance_column is None:
            token = await self._looks(db).fetch_value(self._look("rows_last_token"), after, upto)
            return {} if token is None else {MASTER: token}
        rows = await self._looks(db).fetch(self._look("rows_last_tokens", skip=self._skip(after, upto)), after, upto)
        return {row["writer"]: row["token"] for row in rows}

    async def earliest(self, db: Queries) -> int | None:
        """The oldest token after which nothing was trimmed; None when the stream was removed."""
        token: int | None = await self._looks(db).fetch_value(self._look("rows_earliest"), self.number)
        return token

    async def count(self, db: Queries, after: int, upto: int, limit: int = COUNT_LIMIT) -> int:
        """The number of rows in (after, upto], at most `limit`."""
        return int(await self._looks(db).fetch_value(self._look("rows_count"), after, upto, limit))

    async def ends(self, db: Queries, after: int, upto: int) -> tuple[int, int] | None:
        """The first and the last id in (after, upto]; None if there is none."""
        [row] = await self._looks(db).fetch(self._look("rows_ends"), after, upto)
        return None if row["first"] is None else (row["first"], row["last"])

    def _looks(self, db: Queries) -> Queries | AsOwner:
        return db if self.reader is None else self._as_owner(db)

    def _as_owner(self, db: Queries, bound: int = BLOCK) -> AsOwner:
        assert self.reader is not None
        assert self.table_oid is not None
        return AsOwner(db, self.reader, self.table_oid, bound)

    async def _copy(
        self,
        db: Queries,
        query: Callable[[int], str],
        after: int,
        sink: ChunkSink,
        timeout: float | None,
        *,
        once: bool,
    ) -> int:
        """Copy the rows that `query` gives, which takes the id above which it begins. A reader gives them in blocks,
        unless `once`.
        """
        if self.reader is None or once:
            return await self._copy_query(db, query(after), sink, timeout, BLOCK_MAX)
        total, bound = 0, BLOCK
        while True:
            chunks: list[Chunk] = []

            async def collect(chunk: Chunk, chunks: list[Chunk] = chunks) -> None:
                chunks.append(chunk)

            failure: Exception | None = None
            try:
                total += await self._copy_query(db, query(after), collect, timeout, bound)
            except Enough:
                chunks = whole_ids(chunks, unique=self.unique_ids)
                total += sum(chunk.rows for chunk in chunks)
                failure = Enough()
            except (DatabaseError, RowTooLong) as error:
                failure = error
            for chunk in chunks:
                await sink(chunk)
            if failure is None:
                return total
            if not isinstance(failure, Enough):
                raise failure
            if chunks and chunks[-1].token is not None:
                after, bound = chunks[-1].token, BLOCK
            else:
                bound *= GROWTH

    async def _copy_query(self, db: Queries, query: str, sink: ChunkSink, timeout: float | None, bound: int) -> int:
        """Copy the rows of one query. Raises Enough if a reader gave no more than `bound` bytes of them."""
        cutter = LineCutter(max_row=self.max_row)
        given = 0

        async def pass_on(chunk: Chunk) -> None:
            nonlocal given
            given += chunk.rows
            await sink(chunk)

        async def cut(data: bytes) -> None:
            for chunk in cutter.feed(data):
                await pass_on(chunk)

        more = False
        try:
            if self.reader is None:
                rows = await db.copy_out(query, sink=cut, timeout=timeout, lock=self.lock)
            else:
                rows, more = await self._as_owner(db, bound).copy_out(query, cut, timeout)
            for chunk in cutter.finish():
                await pass_on(chunk)
        except (DatabaseError, RowTooLong):
            for chunk in cutter.rescue():
                await sink(chunk)
            raise
        if rows != given:
            raise DatabaseError(f"a COPY of stream {self.stream} had {rows} rows, and {given} of them arrived")
        if more:
            raise Enough
        return rows

    async def _copy_few(self, db: Queries, after: int, upto: int, sink: ChunkSink, limit: int | None) -> int | None:
        """`copy_range` of a few rows by a prepared statement. None, and nothing is sent, if they are not so few."""
        most = FEW if limit is None else min(FEW, limit)
        if not self.unique_ids or not 0 < upto - after <= most or self._skip(after, upto):
            return None
        data = await self._few_lines(db, after, upto)
        if data is None:
            return None
        cutter = LineCutter(max_row=self.max_row)
        try:
            chunks = [*cutter.feed(data), *cutter.finish()]
        except RowTooLong:
            for chunk in cutter.rescue():
                await sink(chunk)
            raise
        for chunk in chunks:
            await sink(chunk)
        return data.count(b"\n")

    async def _few_lines(self, db: Queries, after: int, upto: int) -> bytes | None:
        """The lines of a range; None if they are too many bytes."""
        if self.reader is not None:
            found, more = await self._as_owner(db, FEW_BYTES).lines(self.range_sql(after, upto))
            return None if more else "".join(f"{line}\n" for line in found).encode()
        lines = self._lines("$1::bigint", "$2::bigint", "true", None)
        [row] = await db.fetch(load_sql("rows_few").format(lines=lines, most=FEW_BYTES), after, upto)
        return None if row["more"] else row["data"] or b""
