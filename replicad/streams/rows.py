"""Ranges of a stream as finished RDATA lines, written by Postgres itself, and a few cheap looks at a range.

A `RowSource` knows one stream's table and how its rows become lines. It does not know how far it is safe to read:
whoever calls it brings positions (horizon.py). No row is touched in Python; chunks are cut at line ends, no more.

Each statement checks that the table is the one that the stream was loaded with. Why the name and the check cannot lead
to different tables: Postgres resolves the name in FROM first and locks that table (ACCESS SHARE) until the statement
ends, then it resolves the same name for the check. Renaming a table, moving it to another schema and dropping it need a
lock that excludes ours, so the second look finds the table that is locked, or the check fails. Renaming a schema locks
no table: the two looks could differ then, and they do so unnoticed only if the schema is renamed and renamed back in
between, which are microseconds. A cached statement is analysed anew after each of these commands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from replicad.errors import DatabaseError, RowTooLong
from replicad.postgres.bridge import Sink, load_sql, quote_ident, quote_literal
from replicad.streams import writer_ranges

MASTER: Final = "master"  # the writer of rows that name none, as in Synapse
CHUNK: Final = 128 * 1024  # bytes; sending more at once gained nothing (measured)
MAX_INSTANCE: Final = 200  # characters of a writer's name
MAX_ROW: Final = 64 << 20  # bytes of a line without its end, where a stream has no smaller bound: what clients take
COUNT_LIMIT: Final = 1_000_000  # rows; beyond it "more" says as much, and counting would take seconds
_CASES: Final = 16  # writers told apart by comparison; beyond that the general form is cheaper
_VARHDRSZ: Final = 4  # what Postgres adds to the length of a varchar to get its type's modifier
_HEAD: Final = 4096  # bytes in which the words before the JSON end: two names of 200 characters and a token
_BLANKS: Final = str.maketrans(dict.fromkeys([*range(1, 33), 127], "_"))

Range = tuple[int, int]  # (after, upto]: ids above the first, up to the second
ChunkSink = Callable[["Chunk"], Awaitable[None]]


class Reads(Protocol):
    """A `Database` or a `Connection`: whatever rows can be read through."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    async def fetch_value(self, sql: str, *args: object) -> Any: ...

    async def copy_out(self, query: str, *args: object, sink: Sink, timeout: float | None = None) -> int: ...


def wire_instance(name: str | None) -> str:
    """A writer's name as one word, as SQL's stream_instance() writes it.

    NULL and '' are `master`; white space and control characters become `_`, since they would break the line; the rest
    is cut at 200 characters. Names that become the same word are the same writer.
    """
    return (name or "").translate(_BLANKS)[:MAX_INSTANCE] or MASTER


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of one stream, and what the last of them says; `token` is None where it ends within a batch."""

    data: bytes
    instance: str
    token: int | None

    @property
    def rows(self) -> int:
        """How many lines there are."""
        return self.data.count(b"\n")


class LineCutter:
    """Bytes in, cut anywhere; chunks of whole lines out, each ended by the first line that makes it `size` bytes long.

    Takes linear time and holds at most one chunk, one unfinished line of at most `max_row` bytes and one piece of data.
    """

    def __init__(self, size: int = CHUNK, max_row: int = MAX_ROW) -> None:
        self._size = size
        self._max_row = max_row
        self._pieces: list[bytes] = []
        self._length = 0  # of all pieces
        self._unfinished = 0  # bytes of the last line, where the pieces do not end it
        self._left: list[Chunk] = []  # completed by the data in which a line was too long

    def feed(self, data: bytes) -> list[Chunk]:
        """The chunks that these bytes complete.

        Raises:
            RowTooLong: a line is longer than it may be; the whole lines before it are left for `rescue`.
        """
        chunks: list[Chunk] = []
        at = 0
        try:
            while at < len(data):
                enough = max(at, at + self._size - self._length - 1)
                end = data.find(b"\n", enough) + 1
                if not end:
                    break
                self._add(data[at:end] if at or end < len(data) else data)
                chunks.append(self._cut())
                at = end
            if at < len(data):
                self._add(data[at:] if at else data)
                if self._unfinished > self._max_row:
                    self._refuse(b"".join(self._pieces), self._length - self._unfinished)
        except RowTooLong:
            self._left = chunks
            raise
        return chunks

    def finish(self) -> list[Chunk]:
        """The rest. Raises DatabaseError when it does not end a line (Postgres broke off), and what `feed` raises."""
        if self._unfinished:
            raise DatabaseError("Postgres ended a COPY in the middle of a line.")
        return [self._cut()] if self._pieces else []

    def rescue(self) -> list[Chunk]:
        """After a failure: the whole lines that were not handed out, without those of a batch whose end did not
        come.
        """
        data = b"".join(self._pieces)
        end = data.rfind(b"\n") + 1
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            if _token(data[start : start + _HEAD]) is not None:
                self._pieces, self._length, self._unfinished = [data[:end]], end, 0
                return [*self._left, self._cut()]
            end = start
        return self._left

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        after_end = len(piece) - (piece.rfind(b"\n") + 1)
        self._unfinished = after_end if after_end < len(piece) else self._unfinished + after_end

    def _cut(self) -> Chunk:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        if len(data) > self._max_row:  # else no line of it can be too long
            self._check(data)
        self._pieces.clear()
        self._length = self._unfinished = 0
        start = data.rfind(b"\n", 0, len(data) - 1) + 1
        head = data[start : start + _HEAD]
        return Chunk(data, head.split(b" ", 3)[2].decode(), _token(head))

    def _check(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            end = data.index(b"\n", start)
            if end - start > self._max_row:
                self._refuse(data, start)
            start = end + 1

    def _refuse(self, data: bytes, start: int) -> None:
        """Raise because of the line that begins at `start`; only what is before it is kept."""
        self._pieces, self._length, self._unfinished = [data[:start]] if start else [], start, 0
        raise RowTooLong(f"a line has more than {self._max_row} bytes", row_id=_token(data[start : start + _HEAD]))


def _token(head: bytes) -> int | None:
    """The token of a line that begins so, None for `batch`."""
    token = head.split(b" ", 4)[3]
    return None if token == b"batch" else int(token)


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where the rows of one stream are, and how they become lines. Names are unquoted but for `table`.

    `row` is the row expression with `row_type` json, jsonb or text; None for the whole row as an object. `unique_ids`
    says that no two rows share an id, which spares the look at the next row for `batch`. `writers` are names that are
    likely to occur: they make lines cheaper and are allowed to be wrong. `table_oid` is the table that the name must
    lead to (None: whatever it leads to), `sequence_oid` the sequence whose file must be `sequence_file` (None: whatever
    it is), `skipped` are ascending ids that are left out, `max_row` bounds lines, in bytes.
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

    def range_sql(self, after: int, upto: int) -> str:
        """The query for (after, upto] of all writers, ascending by id: one linear stream."""
        return self._lines(after, upto, "true")

    def vector_sql(self, ranges: Mapping[str, Range], others: Range | None = None) -> str:
        """The query for a range per writer, ascending by id over all.

        Writers that are not named have the range `others`, or send nothing. `ranges` must not be empty, unless there
        are others.
        """
        spans = [*ranges.values(), *([] if others is None else [others])]
        after = min(low for low, _ in spans)
        upto = max(high for _, high in spans)
        if self.instance_column is None:
            after, upto = ranges.get(MASTER, (upto, upto))
            return self._lines(after, upto, "true")
        return self._lines(after, upto, self._within(ranges, others))

    async def copy_range(self, db: Reads, after: int, upto: int, sink: ChunkSink, timeout: float | None = None) -> int:
        """Send the lines of `range_sql` to `sink` in chunks; returns how many there were.

        Raises:
            TokenExpired: within the same snapshot as the rows, when rows above `after` were trimmed.
            TableReplaced: the name leads to another table, or ids mean other rows; nothing was sent.
            RowTooLong, DatabaseError: a row failed; all whole lines before it that Postgres had sent went to `sink`.
        """
        return await self._copy(db, self.range_sql(after, upto), sink, timeout)

    async def copy_vector(
        self,
        db: Reads,
        ranges: Mapping[str, Range],
        sink: ChunkSink,
        timeout: float | None = None,
        *,
        others: Range | None = None,
    ) -> int:
        """Send the lines of `vector_sql` to `sink` in chunks; returns how many there were. Raises as `copy_range`."""
        if not ranges and others is None:
            return 0
        return await self._copy(db, self.vector_sql(ranges, others), sink, timeout)

    async def last_tokens(self, db: Reads, after: int, upto: int) -> dict[str, int]:
        """The last id of each writer that has rows in (after, upto]. Reads the range; without instances, its end."""
        if self.instance_column is None:
            token = await db.fetch_value(self._look("rows_last_token"), after, upto)
            return {} if token is None else {MASTER: token}
        rows = await db.fetch(self._look("rows_last_tokens", skip=self._skip(after, upto)), after, upto)
        return {row["writer"]: row["token"] for row in rows}

    async def earliest(self, db: Reads) -> int | None:
        """The oldest token after which nothing was trimmed; None when the stream was removed."""
        token: int | None = await db.fetch_value(self._look("rows_earliest"), self.number)
        return token

    async def count(self, db: Reads, after: int, upto: int, limit: int = COUNT_LIMIT) -> int:
        """How many rows (after, upto] has; `limit` when it has that many or more."""
        return int(await db.fetch_value(self._look("rows_count"), after, upto, limit))

    async def ends(self, db: Reads, after: int, upto: int) -> tuple[int, int] | None:
        """The first and the last id that the table has in (after, upto], None where it has none."""
        [row] = await db.fetch(self._look("rows_ends"), after, upto)
        return None if row["first"] is None else (row["first"], row["last"])

    async def _copy(self, db: Reads, query: str, sink: ChunkSink, timeout: float | None) -> int:
        cutter = LineCutter(max_row=self.max_row)

        async def cut(data: bytes) -> None:
            for chunk in cutter.feed(data):
                await sink(chunk)

        try:
            rows = await db.copy_out(query, sink=cut, timeout=timeout)
            for chunk in cutter.finish():
                await sink(chunk)
        except (DatabaseError, RowTooLong):
            for chunk in cutter.rescue():
                await sink(chunk)
            raise
        return rows

    def _lines(self, after: int, upto: int, writers: str) -> str:
        return load_sql("rows_copy").format(
            head=self._head(),
            token=self._token(),
            row=self._row(),
            table=self.table,
            id=quote_ident(self.id_column),
            after=int(after),
            upto=int(upto),
            writers=writers,
            skip=self._skip(after, upto),
            same=self._same(),
            cut=self.max_row + 1 + _VARHDRSZ,  # one more than allowed: enough to see that it is too much
            retained=f"{quote_ident(self.schema)}.stream_retained({self.number}, {int(after)})",
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
        """The condition that the name leads to the right table, and that its ids still mean the same rows.

        It is constant, so Postgres looks at it once for each statement. By then the table is locked against TRUNCATE,
        and what is committed later is not seen: so all rows of a statement are of one generation.
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
        """The condition that leaves skipped ids out, where the range has any."""
        low, high = bisect_right(self.skipped, after), bisect_right(self.skipped, upto)
        if low >= high:
            return ""
        ids = ",".join(str(int(skipped)) for skipped in self.skipped[low:high])
        return f" AND t.{quote_ident(self.id_column)} <> ALL ('{{{ids}}}'::bigint[])"

    def _head(self) -> str:
        """Everything before the token. A name that is compared costs a tenth of one that is cleaned."""
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
        # A batch is consecutive and of one writer: a row whose neighbour is another's closes its own.
        line = f"OVER (ORDER BY {column})"
        same = f"lead({column}) {line} = {column}"
        if self.instance_column is not None:
            same += f" AND lead({self._instance()}) {line} = {self._instance()}"
        return f"CASE WHEN {same} THEN 'batch' ELSE {column}::text END"

    def _row(self) -> str:
        """The row as JSON on one line: between tokens, values of type json keep the line ends they came with."""
        if self.row is None:
            return r"replace(replace(row_to_json(t.*)::text, E'\n', ' '), E'\r', ' ')"
        # The line end closes a comment that the expression may end in.
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
        """The column as it is, compared byte by byte whatever its collation calls equal."""
        return f't.{quote_ident(self.instance_column or "")}::text COLLATE "C"'

    def _instance(self) -> str:
        if self.instance_column is None:
            return quote_literal(MASTER)
        return f"{quote_ident(self.schema)}.stream_instance({self._raw_instance()})"
