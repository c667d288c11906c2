"""Ranges of a stream as RDATA lines that Postgres renders, and a few cheap queries about a range.

A `RowSource` knows one stream's table and how its rows become lines. Its callers give it the positions that are safe to
read (horizon.py). No row is touched in Python; chunks are only cut at line ends.

Each statement checks that the table is the one that the stream was loaded with. Why the name and the check cannot lead
to different tables: Postgres resolves the name in FROM first and locks that table (ACCESS SHARE) until the statement
ends. Then it resolves the same name for the check. To rename, move or drop a table needs a lock that conflicts with
ours, so the second resolution finds the locked table, or the check fails. Renaming a schema locks no table: the two
could differ unnoticed only if the schema is renamed and renamed back in the microseconds between. Postgres analyses a
cached statement again after each of these commands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from replicad.errors import DatabaseError, RowTooLong
from replicad.postgres.bridge import Sink, load_sql, quote_ident, quote_literal
from replicad.postgres.failures import Target
from replicad.postgres.owners import AsOwner
from replicad.streams import writer_ranges
from replicad.streams.chunks import MAX_ROW, Chunk, Enough, LineCutter, whole_ids

MASTER: Final = "master"  # the writer of rows that name none, as in Synapse
MAX_INSTANCE: Final = 200  # characters of a writer's name
COUNT_LIMIT: Final = 1_000_000  # rows; counting more would take seconds
FEW: Final = 256  # ids; so many rows, and fewer FEW_BYTES, come faster by a prepared statement than by a COPY
FEW_BYTES: Final = 64 * 1024
BLOCK: Final = 4 << 20  # bytes that a reader (AsOwner) gives at a time; Postgres holds them until they are complete
BLOCK_MAX: Final = 16 << 20  # the same for one piece of old rows, which has bounds of its own
GROWTH: Final = 8  # the next block has so many times the bytes when not even one complete id had room
_CASES: Final = 16  # writers told apart by comparison; beyond that the general form is cheaper
_VARHDRSZ: Final = 4  # Postgres adds it to the length of a varchar to get the type's modifier
_BLANKS: Final = str.maketrans(dict.fromkeys([*range(1, 33), 127], "_"))

Range = tuple[int, int]  # (after, upto]: ids above the first, up to the second
ChunkSink = Callable[["Chunk"], Awaitable[None]]


class Reads(Protocol):
    """A `Database` or a `Connection`."""

    @property
    def target(self) -> Target: ...

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    async def fetch_value(self, sql: str, *args: object) -> Any: ...

    async def copy_out(self, query: str, *args: object, sink: Sink, timeout: float | None = None) -> int: ...


def _above(begin: int, span: Range) -> Range:
    """The part of a range above an id; it may be empty."""
    low, high = span
    return max(low, begin), max(high, begin)


def wire_instance(name: str | None) -> str:
    """A writer's name as one word, as SQL's stream_instance() writes it.

    NULL and '' are `master`; white space and control characters become `_`, since they would break the line; the rest
    is cut at 200 characters. Names that become the same word are the same writer.
    """
    return (name or "").translate(_BLANKS)[:MAX_INSTANCE] or MASTER


@dataclass(frozen=True, slots=True)
class RowSource:
    """The table of one stream and how its rows become lines. Names are unquoted, except `table`.

    `row`: the row expression, of `row_type` json, jsonb or text; None for the whole row as an object. `unique_ids`: no
    two rows have the same id, so `batch` need not be computed. `writers`: names that are likely to occur; they make
    lines cheaper and may be wrong. `table_oid`: the table that the name must lead to (None: not checked).
    `sequence_oid`: the sequence whose file must be `sequence_file` (None: not checked). `skipped`: ascending ids that
    are left out. `max_row`: bound of a line in bytes. `reader`: the function that runs statements as the owner of the
    table (postgres/owners.py); None if they run as our own role.
    """

    number: int
    stream: str
    table: str
    id_column: str
    instance_column: str | None = None
    row: str | None = None
    row_type: str = "json"
    unique_ids: bool = False
    writers: tuple[str, ...] = ()
    schema: str = "replicad"
    table_oid: int | None = None
    sequence_oid: int | None = None
    sequence_file: int | None = None
    skipped: tuple[int, ...] = ()
    max_row: int = MAX_ROW
    reader: str | None = None

    def range_sql(self, after: int, upto: int, limit: int | None = None) -> str:
        """The query for the first `limit` rows of (after, upto] of all writers, ascending by id: one linear stream."""
        return self._lines(after, upto, "true", limit)

    def vector_sql(self, ranges: Mapping[str, Range], others: Range | None = None, limit: int | None = None) -> str:
        """The query for a range per writer, ascending by id over all.

        Writers that are not named have the range `others`, or send nothing. `ranges` must not be empty, unless there
        are others.
        """
        spans = [*ranges.values(), *([] if others is None else [others])]
        after = min(low for low, _ in spans)
        upto = max(high for _, high in spans)
        if self.instance_column is None:
            after, upto = ranges.get(MASTER, (upto, upto))
            return self._lines(after, upto, "true", limit)
        return self._lines(after, upto, self._within(ranges, others), limit)

    async def copy_range(
        self,
        db: Reads,
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
        db: Reads,
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
        if one is not None and (self.instance_column is None or writer_ranges.is_one(ranges, others)):
            rows = await self._copy_few(db, *one, sink, limit)
        if rows is not None:
            return rows

        def query(begin: int) -> str:
            rest = None if others is None else _above(begin, others)
            return self.vector_sql({name: _above(begin, span) for name, span in ranges.items()}, rest, limit)

        lowest = min(low for low, _ in (*ranges.values(), *([] if others is None else [others])))
        return await self._copy(db, query, lowest, sink, timeout, once=limit is not None)

    async def last_tokens(self, db: Reads, after: int, upto: int) -> dict[str, int]:
        """The last id of each writer that has rows in (after, upto]. Reads the range; without instances, its end."""
        if self.instance_column is None:
            token = await self._looks(db).fetch_value(self._look("rows_last_token"), after, upto)
            return {} if token is None else {MASTER: token}
        rows = await self._looks(db).fetch(self._look("rows_last_tokens", skip=self._skip(after, upto)), after, upto)
        return {row["writer"]: row["token"] for row in rows}

    async def earliest(self, db: Reads) -> int | None:
        """The oldest token after which nothing was trimmed; None when the stream was removed."""
        token: int | None = await self._looks(db).fetch_value(self._look("rows_earliest"), self.number)
        return token

    async def count(self, db: Reads, after: int, upto: int, limit: int = COUNT_LIMIT) -> int:
        """The number of rows in (after, upto], at most `limit`."""
        return int(await self._looks(db).fetch_value(self._look("rows_count"), after, upto, limit))

    def count_above(self, after: int, limit: int) -> str:
        """The query that counts the rows above an id, at most `limit`: to be a part of another statement."""
        return (
            self._look("rows_count")
            .replace("$1", str(int(after)))
            .replace("$2", str((1 << 63) - 1))
            .replace("$3", str(int(limit)))
        )

    async def ends(self, db: Reads, after: int, upto: int) -> tuple[int, int] | None:
        """The first and the last id in (after, upto]; None if there is none."""
        [row] = await self._looks(db).fetch(self._look("rows_ends"), after, upto)
        return None if row["first"] is None else (row["first"], row["last"])

    def _looks(self, db: Reads) -> Reads | AsOwner:
        return db if self.reader is None else self._as_owner(db)

    def _as_owner(self, db: Reads, bound: int = BLOCK) -> AsOwner:
        assert self.reader is not None
        assert self.table_oid is not None
        return AsOwner(db, self.reader, self.table_oid, bound)

    async def _copy(
        self, db: Reads, query: Callable[[int], str], after: int, sink: ChunkSink, timeout: float | None, *, once: bool
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

    async def _copy_query(self, db: Reads, query: str, sink: ChunkSink, timeout: float | None, bound: int) -> int:
        """Copy the rows of one query. Raises Enough if a reader gave no more than `bound` bytes of them."""
        cutter = LineCutter(max_row=self.max_row)

        async def cut(data: bytes) -> None:
            for chunk in cutter.feed(data):
                await sink(chunk)

        more = False
        try:
            if self.reader is None:
                rows = await db.copy_out(query, sink=cut, timeout=timeout)
            else:
                rows, more = await self._as_owner(db, bound).copy_out(query, cut, timeout)
            for chunk in cutter.finish():
                await sink(chunk)
        except (DatabaseError, RowTooLong):
            for chunk in cutter.rescue():
                await sink(chunk)
            raise
        if more:
            raise Enough
        return rows

    async def _copy_few(self, db: Reads, after: int, upto: int, sink: ChunkSink, limit: int | None) -> int | None:
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

    async def _few_lines(self, db: Reads, after: int, upto: int) -> bytes | None:
        """The lines of a range; None if they are too many bytes."""
        if self.reader is not None:
            found, more = await self._as_owner(db, FEW_BYTES).lines(self.range_sql(after, upto))
            return None if more else "".join(f"{line}\n" for line in found).encode()
        lines = self._lines("$1::bigint", "$2::bigint", "true", None)
        [row] = await db.fetch(load_sql("rows_few").format(lines=lines, most=FEW_BYTES), after, upto)
        return None if row["more"] else row["data"] or b""

    def _lines(self, after: int | str, upto: int | str, writers: str, limit: int | None) -> str:
        """The query; a bound that is no number is an expression, and no id is left out then."""
        return load_sql("rows_copy").format(
            head=self._head(),
            token=self._token(),
            row=self._row(),
            table=self.table,
            id=quote_ident(self.id_column),
            after=after,
            upto=upto,
            writers=writers,
            skip=self._skip(after, upto) if isinstance(after, int) and isinstance(upto, int) else "",
            same=self._same(),
            limit="" if limit is None else f" LIMIT {int(limit)}",
            cut=self.max_row + 1 + _VARHDRSZ,  # one more than allowed, so that LineCutter finds it too long
            retained=f"{quote_ident(self.schema)}.stream_retained({self.number}, {after})",
        )

    def _look(self, name: str, skip: str = "") -> str:
        return load_sql(name).format(
            table=self.table,
            same=self._same(),
            skip=skip,
            id=quote_ident(self.id_column),
            instance=self._instance(),
            schema=quote_ident(self.schema),
        )

    def _same(self) -> str:
        """The condition that the name leads to the right table and that its ids still belong to the same rows.

        It is constant, so Postgres evaluates it once for each statement. By then the table is locked against TRUNCATE,
        and later commits are not visible. So all rows of a statement are of one generation.
        """
        if self.table_oid is None:
            return "true"
        found = f"{quote_literal(self.table)}::regclass::oid"
        same = f"{found} = {self.table_oid}::oid"
        if self.sequence_file is not None:
            same += f" AND pg_relation_filenode({self.sequence_oid}::oid) = {self.sequence_file}::oid"
        fails = f"{quote_ident(self.schema)}.stream_is_same({self.number}, {found}, {self.table_oid}::oid)"
        return f"CASE WHEN {same} THEN true ELSE {fails} END"

    def _skip(self, after: int, upto: int) -> str:
        """The condition that leaves out the skipped ids in the range; empty if there are none."""
        low, high = bisect_right(self.skipped, after), bisect_right(self.skipped, upto)
        if low >= high:
            return ""
        ids = ",".join(str(int(skipped)) for skipped in self.skipped[low:high])
        return f" AND t.{quote_ident(self.id_column)} <> ALL ('{{{ids}}}'::bigint[])"

    def _head(self) -> str:
        """The line before the token. A comparison with a known name costs a tenth of stream_instance()."""
        start = f"RDATA {self.stream} "
        if self.instance_column is None:
            return quote_literal(f"{start}{MASTER} ")
        general = f"{quote_literal(start)} || {self._instance()} || ' '"
        plain = list(islice((name for name in self.writers if wire_instance(name) == name), _CASES))
        cases = "".join(f" WHEN {quote_literal(name)} THEN {quote_literal(f'{start}{name} ')}" for name in plain)
        return f"CASE {self._raw_instance()}{cases} ELSE {general} END" if cases else f"({general})"

    def _token(self) -> str:
        column = f"t.{quote_ident(self.id_column)}"
        if self.unique_ids:
            return f"{column}::text"
        # A batch is consecutive and of one writer: it ends where the next row has another id or writer.
        line = f"OVER (ORDER BY {column})"
        same = f"lead({column}) {line} = {column}"
        if self.instance_column is not None:
            same += f" AND lead({self._instance()}) {line} = {self._instance()}"
        return f"CASE WHEN {same} THEN 'batch' ELSE {column}::text END"

    def _row(self) -> str:
        """The row as JSON on one line. Values of type json may contain newlines, which are replaced."""
        if self.row is None:
            return r"replace(replace(row_to_json(t.*)::text, E'\n', ' '), E'\r', ' ')"
        # The newline ends a comment at the end of the expression.
        text = f"({self.row}\n)::text"
        if self.row_type == "text":
            text = f"{quote_ident(self.schema)}.stream_json({text})"
        if self.row_type != "jsonb":
            text = rf"replace(replace({text}, E'\n', ' '), E'\r', ' ')"
        return f"coalesce({text}, 'null')"

    def _within(self, ranges: Mapping[str, Range], others: Range | None) -> str:
        column = f"t.{quote_ident(self.id_column)}"
        if writer_ranges.is_one(ranges, others):
            return "true"
        if len(ranges) > _CASES:
            return writer_ranges.condition(ranges, others, column, self._instance())
        cases = {
            name: f" WHEN {quote_literal(name)} THEN {writer_ranges.within(column, span)}"
            for name, span in ranges.items()
        }
        rest = "false" if others is None else writer_ranges.within(column, others)
        general = f"CASE {self._instance()}{''.join(cases.values())} ELSE {rest} END" if cases else rest
        plain = "".join(case for name, case in cases.items() if wire_instance(name) == name)
        return f"CASE {self._raw_instance()}{plain} ELSE {general} END" if plain else general

    def _raw_instance(self) -> str:
        """The unchanged column, compared byte by byte instead of by its collation."""
        return f't.{quote_ident(self.instance_column or "")}::text COLLATE "C"'

    def _instance(self) -> str:
        if self.instance_column is None:
            return quote_literal(MASTER)
        return f"{quote_ident(self.schema)}.stream_instance({self._raw_instance()})"
