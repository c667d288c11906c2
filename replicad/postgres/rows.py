"""Ranges of a stream as finished RDATA lines, written by Postgres itself (fan-out), and a few cheap looks at a range.

A `RowSource` knows one stream's table and how its rows become lines. It does not know how far it is safe to read:
whoever calls it brings positions (horizon.py). No row is touched in Python; chunks are cut at line ends, no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from replicad.errors import DatabaseError
from replicad.postgres import writer_ranges
from replicad.postgres.bridge import Sink, load_sql, quote_ident, quote_literal

MASTER: Final = "master"  # the writer of rows that name none, as in Synapse
CHUNK: Final = 128 * 1024  # bytes; sending more at once gained nothing (fan-out)
MAX_INSTANCE: Final = 200  # characters of a writer's name
COUNT_LIMIT: Final = 1_000_000  # rows; beyond it "more" says as much, and counting would take seconds
_CASES: Final = 16  # writers told apart by comparison; beyond that the general form is cheaper
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

    Takes linear time and holds at most one chunk and one unfinished line.
    """

    def __init__(self, size: int = CHUNK) -> None:
        self._size = size
        self._pieces: list[bytes] = []
        self._length = 0  # of all pieces
        self._open = False  # the last piece does not end a line

    def feed(self, data: bytes) -> list[Chunk]:
        """The chunks that these bytes complete."""
        chunks: list[Chunk] = []
        at = 0
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
        return chunks

    def finish(self) -> list[Chunk]:
        """The rest. Raises DatabaseError when it does not end a line: Postgres broke off."""
        if self._open:
            raise DatabaseError("Postgres ended a COPY in the middle of a line.")
        return [self._cut()] if self._pieces else []

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        self._open = not piece.endswith(b"\n")

    def _cut(self) -> Chunk:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._length = 0
        start = data.rfind(b"\n", 0, len(data) - 1) + 1
        _, _, instance, token, _ = data[start : start + _HEAD].split(b" ", 4)
        return Chunk(data, instance.decode(), None if token == b"batch" else int(token))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where the rows of one stream are, and how they become lines. Names are unquoted but for `table`.

    `row` is the row expression with `row_type` json, jsonb or text; None for the whole row as an object. `unique_ids`
    says that no two rows share an id, which spares the look at the next row for `batch`. `writers` are names that are
    likely to occur: they make lines cheaper and are allowed to be wrong.
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

        Raises TokenExpired, within the same snapshot as the rows, when rows above `after` were trimmed.
        """
        return await _copy(db, self.range_sql(after, upto), sink, timeout)

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
        return await _copy(db, self.vector_sql(ranges, others), sink, timeout)

    async def last_tokens(self, db: Reads, after: int, upto: int) -> dict[str, int]:
        """The last id of each writer that has rows in (after, upto]. Reads the range; without instances, its end."""
        if self.instance_column is None:
            token = await db.fetch_value(self._look("rows_last_token"), after, upto)
            return {} if token is None else {MASTER: token}
        rows = await db.fetch(self._look("rows_last_tokens"), after, upto)
        return {row["writer"]: row["token"] for row in rows}

    async def earliest(self, db: Reads) -> int | None:
        """The oldest token after which nothing was trimmed; None when the stream was removed."""
        token: int | None = await db.fetch_value(self._look("rows_earliest"), self.number)
        return token

    async def count(self, db: Reads, after: int, upto: int, limit: int = COUNT_LIMIT) -> int:
        """How many rows (after, upto] has; `limit` when it has that many or more."""
        return int(await db.fetch_value(self._look("rows_count"), after, upto, limit))

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
            retained=f"{quote_ident(self.schema)}.stream_retained({self.number}, {int(after)})",
        )

    def _look(self, name: str) -> str:
        return load_sql(name).format(
            table=self.table,
            id=quote_ident(self.id_column),
            instance=self._instance(),
            schema=quote_ident(self.schema),
        )

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


async def _copy(db: Reads, query: str, sink: ChunkSink, timeout: float | None) -> int:
    cutter = LineCutter()

    async def cut(data: bytes) -> None:
        for chunk in cutter.feed(data):
            await sink(chunk)

    rows = await db.copy_out(query, sink=cut, timeout=timeout)
    for chunk in cutter.finish():
        await sink(chunk)
    return rows
