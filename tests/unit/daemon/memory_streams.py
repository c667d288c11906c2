"""Streams in memory: a registry, rows, notes and positions, as the services of streams ask for them.

`tests/store_suite.py` has claims that this store and the one in Postgres both fulfil.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import trio

from replicad.errors import DatabaseError, RowTooLong, RowUnreadable, StreamRefused, TokenExpired, UnknownStream
from replicad.positions.horizon import Reading, Source
from replicad.protocol.tokens import Vector
from replicad.streams.chunks import MAX_ROW, Chunk, chunk_of, no_longer
from replicad.streams.daemons import Row
from replicad.streams.lineage import Generation, Lineage
from replicad.streams.registry import Method, Published, ReaderAck, RetentionChange, Rewound, Stream, StreamWriter
from replicad.streams.row_pieces import Segment
from replicad.streams.row_text import MASTER, Range, wire_instance
from replicad.streams.rows import ChunkSink
from replicad.streams.serving.windows import Attached, CountedRange, Look, Window

CHUNK_ROWS = 3  # in one chunk, so that a few rows take several
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def stream_of(name: str, number: int, *, by_writer: bool) -> Stream:
    """A registered stream whose writers are known by a column, or not at all."""
    return Stream(
        number=number,
        name=name,
        table=f"public.{name}",
        table_oid=1000 + number,
        id_column="id",
        instance_column="writer" if by_writer else None,
        row="body",
        row_type="json",
        method=Method.LOCK_WATCH,
        sequence=f"public.{name}_id_seq",
        sequence_oid=2000 + number,
        positions_table=None,
        positions_oid=None,
        identity=None,
        fed=True,
        shares_sequence=False,
        unique_ids=True,
        plain=True,
        reader=None,
        sequence_reader=None,
        positions_reader=None,
        epoch=f"{number:04x}{0:04x}",
        continues=True,
        sequence_file=None,
        noted=None,
        fault=None,
        denied=None,
        proof_key=None,
        trimmed_upto=None,
        keep_for=None,
        keep_rows=None,
        max_row=MAX_ROW,
        skipped=(),
        created_at=BEGAN,
        writers={},
    )


@dataclass
class Table:
    """The rows of one stream: (id, writer, JSON). `poison` are ids that cannot be read."""

    rows: list[tuple[int, str, str]] = field(default_factory=list)
    poison: set[int] = field(default_factory=set)
    trimmed_upto: int | None = None
    retired: set[str] = field(default_factory=set)
    attached: dict[int, tuple[str, Attached]] = field(default_factory=dict)


class MemoryRows:
    """`TableRows` of a table in memory."""

    def __init__(self, store: MemoryStore, stream: Stream) -> None:
        if stream.fault is not None:
            raise StreamRefused(f"stream {stream.name} cannot be served: {stream.fault}")
        self._store = store
        self._stream = stream

    @property
    def names_writers(self) -> bool:
        return self._stream.instance_column is not None

    @property
    def unique_ids(self) -> bool:
        return self._stream.unique_ids

    @property
    def sends_blocks(self) -> bool:
        return self._stream.unique_ids

    async def copy_range(self, after: int, upto: int, sink: ChunkSink, *, limit: int | None = None) -> int:
        return await self._copy(after, lambda id, _: after < id <= upto, sink, limit)

    async def copy_vector(
        self, ranges: Mapping[str, Range], sink: ChunkSink, *, others: Range | None = None, limit: int | None = None
    ) -> int:
        if not self.names_writers:
            after, upto = ranges.get(MASTER, (0, 0))
            return await self.copy_range(after, upto, sink, limit=limit)
        low = min(after for after, _ in [*ranges.values(), *([others] if others else ())])

        def wanted(id: int, writer: str) -> bool:
            span = ranges.get(writer, others)
            return span is not None and span[0] < id <= span[1]

        return await self._copy(low, wanted, sink, limit)

    async def _copy(self, after: int, wanted: Callable[[int, str], bool], sink: ChunkSink, limit: int | None) -> int:
        table = await self._table()
        if table.trimmed_upto is not None and after < table.trimmed_upto:
            raise TokenExpired(f"rows up to {table.trimmed_upto} were removed")
        chosen = [row for row in sorted(table.rows) if wanted(row[0], self._writer(row[1]))][:limit]
        bad = next((at for at, row in enumerate(chosen) if row[0] in table.poison), None)
        lines = [
            (f"RDATA {self._stream.name} {self._writer(writer)} {id} {body}\n".encode(), self._writer(writer), id)
            for id, writer, body in chosen[:bad]
        ]
        for begin in range(0, len(lines), CHUNK_ROWS):
            part = lines[begin : begin + CHUNK_ROWS]
            await sink(Chunk(b"".join(line for line, _, _ in part), part[-1][1], part[-1][2]))
        if bad is not None:
            raise DatabaseError("invalid input syntax", sqlstate="22P02")
        return len(lines)

    async def copy_blocks(
        self, after: int, upto: int, sink: ChunkSink, timeout: float | None = None, *, step: int, max_line: int
    ) -> int:
        chunks: list[Chunk] = []

        async def keep(chunk: Chunk) -> None:
            chunks.append(chunk)

        await self._copy(after, lambda id, _: after < id <= upto, keep, None)
        lines = b"".join(chunk.data for chunk in chunks).splitlines(keepends=True)
        for low in range(after, upto, step):
            block = b"".join(line for line in lines if low < int(line.split()[3]) <= low + step)
            if not no_longer(block, max_line):
                raise RowTooLong("a line is too long for a block")
            if block:
                await sink(chunk_of(block))
        return len(lines)

    async def last_tokens(self, after: int, upto: int) -> dict[str, int]:
        table = await self._table()
        found = [row for row in sorted(table.rows) if after < row[0] <= upto]
        if not self.names_writers:
            return {MASTER: found[-1][0]} if found else {}
        return {self._writer(writer): id for id, writer, _ in found}

    async def earliest(self) -> int | None:
        table = await self._table()
        if self._stream.name not in self._store.streams:
            return None
        return table.trimmed_upto or 0

    async def find_unreadable(
        self, wanted: Range | Mapping[str, Range], others: Range | None = None
    ) -> RowUnreadable | None:
        table = await self._table()
        by_writer = {} if isinstance(wanted, tuple) else wanted
        rest = wanted if isinstance(wanted, tuple) else others
        bad = [
            id
            for id, writer, _ in sorted(table.rows)
            if id in table.poison and (span := by_writer.get(self._writer(writer), rest)) and span[0] < id <= span[1]
        ]
        return self.unreadable(bad[0], DatabaseError("invalid input syntax")) if bad else None

    async def try_row(self, row_id: int) -> RowUnreadable | None:
        table = await self._table()
        return self.unreadable(row_id, DatabaseError("invalid input syntax")) if row_id in table.poison else None

    def unreadable(self, row_id: int, error: Exception) -> RowUnreadable:
        name = self._stream.name
        return RowUnreadable(f"stream {name} stops before id {row_id}: {error}", stream=name, row_id=row_id)

    def _writer(self, writer: str) -> str:
        return wire_instance(writer) if self.names_writers else MASTER

    async def _table(self) -> Table:
        await self._store.answer("rows")
        return self._store.tables[self._stream.name]


class MemoryStore:
    """`DaemonRegistry`, `DaemonReports` and `Windows` in memory.

    `fails[what]` is raised by every call of that kind: `registry`, `rows`, ...
    """

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.tables: dict[str, Table] = {}
        self.notes: dict[str, Published] = {}
        self.generations: dict[str, list[Generation]] = {}  # behind the first
        self._begun = 0
        self.acks: list[ReaderAck] = []
        self.troubles: dict[str, Sequence[Row]] = {}
        self.fails: dict[str, Exception] = {}
        self.looks = 0  # at the registry

    # --- what tests do ---

    def add(self, name: str, *, by_writer: bool = False) -> Stream:
        """Register a stream on a new table."""
        self.streams[name] = stream_of(name, len(self.tables) + 1, by_writer=by_writer)
        self.tables[name] = Table()
        return self.streams[name]

    def change(self, name: str, **changes: object) -> None:
        """Change what is registered."""
        self.streams[name] = replace(self.streams[name], **changes)  # type: ignore[arg-type]

    def insert(self, name: str, *ids: int, writer: str = MASTER, body: str = "1") -> None:
        """Commit rows."""
        self.tables[name].rows += [(id, writer, body) for id in ids]

    async def answer(self, kind: str) -> None:
        """What every call begins with."""
        await trio.lowlevel.checkpoint()
        if kind in self.fails:
            raise self.fails[kind]

    # --- `DaemonRegistry` ---

    def rows(self, stream: Stream) -> MemoryRows:
        return MemoryRows(self, stream)

    catchup_rows = rows

    async def look(self, suspects: object = ()) -> dict[str, Stream]:
        self.looks += 1
        await self.answer("registry")
        return dict(self.streams)

    async def published(self) -> Mapping[str, Published]:
        await self.answer("registry")
        return dict(self.notes)

    async def lineages(self, name: str | None = None) -> Mapping[str, Lineage]:
        await self.answer("registry")
        return {one: self._lineage(one) for one in self.streams if name in (None, one)}

    async def continue_streams(self) -> int:
        await self.answer("registry")
        forked = [stream for stream in self.streams.values() if not stream.continues]
        for stream in forked:
            self._begin(stream, "restarted")
        return len(forked)

    async def ensure_readers(self) -> None:
        raise AssertionError("no stream lacks a reader")

    async def publish(self, stream: Stream, position: int, per_writer: Mapping[str, int]) -> bool:
        await self.answer("publish")
        if self.streams.get(stream.name, stream).epoch != stream.epoch:
            return False
        self.notes[stream.name] = Published(position, dict(per_writer), BEGAN)
        self.change(stream.name, noted=position)
        return True

    async def fork(self, stream: Stream, reason: str) -> Stream:
        await self.answer("registry")
        if stream.name not in self.streams:
            raise UnknownStream(stream.name)
        if self.streams[stream.name].epoch == stream.epoch:
            self._begin(stream, reason)
        return self.streams[stream.name]

    async def rewind(self, stream: Stream, upto: int) -> Rewound:
        await self.answer("registry")
        if self.streams[stream.name].epoch != stream.epoch:
            return Rewound(None, None)
        self._begin(stream, "rows_skipped", Vector(upto))
        return Rewound(self.streams[stream.name].epoch, None)

    async def keep(self, stream: Stream, lowest: int | None, position: int, trimmed: int | None) -> RetentionChange:
        return RetentionChange(None, None)

    async def taken(self, stream: Stream, after: int) -> int:
        await self.answer("registry")
        return max((row[0] for row in self.tables[stream.name].rows if row[0] > after), default=after)

    async def ensure_writers(self, stream: Stream, names: Iterable[str]) -> dict[str, int]:
        await self.answer("writers")
        known = dict(self.streams[stream.name].writers)
        for name in sorted({wire_instance(name) for name in names} - known.keys()):
            known[name] = len(known) + 1
        self.change(stream.name, writers=known)
        self.tables[stream.name].retired -= set(names)
        return {wire_instance(name): known[wire_instance(name)] for name in names}

    async def writers_numbered(self, stream: Stream, numbers: Collection[int]) -> Sequence[StreamWriter]:
        await self.answer("writers")
        retired = self.tables[stream.name].retired
        return [
            StreamWriter(number, name, None, BEGAN, BEGAN if name in retired else None)
            for name, number in self.streams[stream.name].writers.items()
            if number in numbers
        ]

    def _lineage(self, name: str) -> Lineage:
        stream = self.streams[name]
        first = Generation(1, f"{stream.number:04x}{0:04x}", Vector(0), "added", BEGAN)
        return Lineage((first, *self.generations.get(name, ())))

    def _begin(self, stream: Stream, reason: str, upto: Vector | None = None) -> None:
        """The next generation, as `stream_fork` begins it, or `stream_rewind`."""
        stream, note = self.streams[stream.name], self.notes.get(stream.name)
        if note is None or reason in {"sequence_restarted", "ids_went_back"}:
            shared = Vector(0)
        else:
            shared = Vector(note.position, {stream.writers[name]: at for name, at in note.per_writer.items()})
            shared = shared if upto is None else Vector(min(shared.minimum, upto.minimum))
        if note is not None:
            kept = {name: min(at, shared.at(stream.writers[name])) for name, at in note.per_writer.items()}
            self.notes[stream.name] = Published(min(note.position, shared.minimum), kept, BEGAN)
            self.change(stream.name, noted=min(note.position, shared.minimum))
        self._begun += 1  # an id is never given twice
        epoch = f"{stream.number:04x}{self._begun:04x}"
        number = self._lineage(stream.name).present.number + 1
        begun = Generation(number, epoch, shared, reason, BEGAN)
        self.generations.setdefault(stream.name, []).append(begun)
        self.change(stream.name, epoch=epoch, continues=True)

    async def note_acks(self, some: Sequence[ReaderAck]) -> None:
        await self.answer("acks")
        self.acks += some

    # --- `DaemonReports` ---

    async def write_troubles(self, daemon: str, rows: Sequence[Row]) -> None:
        await self.answer("troubles")
        self.troubles[daemon] = list(rows)

    # --- `Windows` ---

    @asynccontextmanager
    async def looking(self, stream: Stream) -> AsyncIterator[Look]:
        await self.answer("windows")
        look = MemoryLook(self.tables[stream.name], stream)
        yield look
        look.whole = True


class MemoryLook:
    """`Look` at a table in memory."""

    def __init__(self, table: Table, stream: Stream) -> None:
        self.whole = False
        self.elsewhere: str | None = None
        self._table = table
        self._stream = stream

    @property
    def tree(self) -> Mapping[int, str]:
        attached = {oid: table for oid, (table, _) in self._table.attached.items()}
        return {self._stream.table_oid: self._stream.table or "", **attached}

    async def window(self, after: int, upto: int, apart: Collection[int] = (), *, since: int | None = None) -> Window:
        ids = sorted(row[0] for row in self._table.rows if after < row[0] <= upto)
        distinct = sorted(set(ids))
        return Window(after, upto, array("q", distinct), array("q", [ids.count(id) for id in distinct]))

    async def counts(
        self, segment: Segment, bounds: Sequence[int], limit: int, apart: Collection[int], skipped: Collection[int]
    ) -> list[int]:
        found = [0] * (len(bounds) + 1)
        for id, writer, _ in self._table.rows:
            low, high = segment.after, segment.upto
            if segment.ranges is not None:
                low, high = dict(segment.ranges).get(wire_instance(writer), segment.others or (high, high))
            if low < id <= high and id not in skipped:
                found[bisect_left(bounds, id)] += 1
        return found

    async def count(
        self, after: int, upto: int, limit: int, apart: Collection[int], skipped: Collection[int]
    ) -> CountedRange:
        return CountedRange(
            after, upto, sum(after < row[0] <= upto and row[0] not in skipped for row in self._table.rows)
        )

    async def lowest(self) -> tuple[int | None, int | None]:
        return min((row[0] for row in self._table.rows), default=None), None

    async def attached(self, table: str, before: int, position: int) -> Sequence[Attached]:
        return [rows for name, rows in self._table.attached.values() if name == table]


class MemoryPositions:
    """`Positions` where the test says how far tables may be read."""

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[str, Reading], None]] = {}
        self.sources: dict[str, Source] = {}
        self.published: dict[str, tuple[int | None, Mapping[str, int] | None]] = {}
        self.writers: dict[str, tuple[str, ...]] = {}
        self.rings = 0
        self.before: list[Callable[[], Awaitable[None]]] = []

    def tell(self, name: str, position: int | None, **per_writer: int) -> None:
        """A reading: `per_writer` are the writers that are ahead of the position."""
        self.say(name, Reading(position=position, per_writer=per_writer))

    def say(self, name: str, reading: Reading) -> None:
        """Any reading."""
        if name in self.listeners:
            self.listeners[name](name, reading)

    # --- `Positions` ---

    def watch(
        self,
        name: str,
        source: Source,
        on_reading: Callable[[str, Reading], float | None],
        *,
        published: int | None = None,
        per_writer: Mapping[str, int] | None = None,
        writers: Iterable[str] = (),
        file: int | None = None,
    ) -> None:
        self.listeners[name] = on_reading
        self.sources[name] = source
        self.published[name] = (published, per_writer)
        self.writers[name] = tuple(writers)

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None:
        self.before.append(look)

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        self.writers[name] = tuple(writers)

    def unwatch(self, name: str) -> None:
        self.listeners.pop(name, None)

    def ring(self) -> None:
        self.rings += 1
