"""What serving streams needs of the database.

A test gives objects in memory with the same methods. The rules are in `registry`, `rows` and `rows_probe`; this file
only binds them to the pool that each of them uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from replicad.errors import RowUnreadable
from replicad.postgres.bridge import Database
from replicad.postgres.statements import Queries, statement
from replicad.streams import acks, registry, rows_probe, stream_writers, troubles
from replicad.streams.acks import ReaderAck
from replicad.streams.lineage import Lineage
from replicad.streams.queries import SCHEMA, Impatient, installed
from replicad.streams.registry import Published, RetentionChange, Rewound, Stream, load_streams
from replicad.streams.row_text import Range
from replicad.streams.rows import ChunkSink, Reads, RowSource
from replicad.streams.stream_writers import StreamWriter

CATALOGS = 16  # streams whose rows in the catalogs are looked at each time
LOOKS = 8  # so many looks, after a row of the catalogs was written, read the catalogs of all streams
IN_TURN = 5  # looks, of which one loads a stream for no other reason than that it is its turn
SUSPECTS = 32  # streams that are loaded each time because the caller suspects them


@dataclass(frozen=True, slots=True)
class _Marks:
    own: int | None = None
    catalogs: int | None = None


class RegistryView:
    """All streams by name, as of the last look. The cost of a look hardly grows with the number of streams.

    To load one stream takes Postgres some three milliseconds: it asks the catalogs for everything that serving the
    stream depends on. So a look loads only three kinds: streams whose rows in our tables or in the catalogs were
    written since (the query stream_marks), streams that the caller suspects, and one in turn, for changes that no mark
    shows. The rows in the catalogs are compared in turn as well, more at a time after the statistics have shown that
    any was written. No position depends on a look: polls and reads check the oids and files of tables and sequences
    themselves (docs/positions.md).
    """

    def __init__(self, schema: str = SCHEMA) -> None:
        self._schema = schema
        self._streams: dict[str, Stream] = {}
        self._marks: dict[str, _Marks] = {}
        self._whole: int | None = None  # the mark of our tables together
        self._written: int | None = None  # rows of the catalogs that were written, by the statistics
        self._sweeping = 0  # looks that look at the catalogs' rows of many streams
        self._catalogs_at = 0  # where the next look goes on in the order of the names
        self._looks = 0
        self._turn_at = 0
        self._suspects_at = 0
        self._looking = trio.Lock()  # results of an earlier look must not replace results of a later look

    async def look(self, db: Queries, suspects: Collection[str] = ()) -> dict[str, Stream]:
        """The streams. A stream that has not changed is the same object as before.

        `suspects`: streams that do not work, so that their entries may have changed in a way that no mark shows.

        Raises:
            SchemaMissing: streams are not installed in this database.
        """
        async with self._looking:
            await self._look(db, suspects)
        return dict(self._streams)

    async def _look(self, db: Queries, suspects: Collection[str]) -> None:
        if not self._streams:
            self._marks, self._whole = {}, None
            whole, marks = await self._find_changed(db, [], None)
            self._streams = await load_streams(db, schema=self._schema)
            self._marks = {name: mark for name, mark in marks.items() if name in self._streams}
            self._whole = whole
            return
        names = sorted(self._streams)
        share = -(-len(names) // LOOKS) if self._sweeping else 0
        self._sweeping = max(0, self._sweeping - 1)
        self._catalogs_at, some = _next(names, self._catalogs_at, max(CATALOGS, share))
        self._looks += 1
        self._turn_at, wanted = _next(names, self._turn_at, int(self._looks % IN_TURN == 0))
        self._suspects_at, doubtful = _next(sorted(self._streams.keys() & suspects), self._suspects_at, SUSPECTS)
        whole, marks = await self._find_changed(db, names, some)  # of before the streams are loaded
        chosen = {*wanted, *doubtful, *marks}
        loaded = await load_streams(db, chosen, schema=self._schema) if chosen else {}
        for name in chosen - loaded.keys():  # removed
            self._streams.pop(name, None)
            self._marks.pop(name, None)
        self._streams |= self._same(loaded)
        self._marks |= {name: mark for name, mark in marks.items() if name in loaded}
        self._whole = whole  # last: where anything has failed, the next look compares all marks again

    async def _find_changed(
        self, db: Queries, names: list[str], some: Collection[str] | None
    ) -> tuple[int | None, dict[str, _Marks]]:
        """The mark of our tables together, and the streams of which a row was written, in the catalogs only of `some`
        (None: of all), with their marks. Takes over the noted positions of the others.
        """
        marks = [self._marks.get(name, _Marks()) for name in names]
        with installed(self._schema):
            rows = await db.fetch(
                statement("stream_marks", self._schema),
                names,
                [mark.own for mark in marks],
                [mark.catalogs for mark in marks],
                [self._streams[name].noted for name in names],
                None if some is None else list(some),
                self._whole,
            )
        whole, changed = None, {}
        for row in rows:
            if row["name"] is None:
                whole = row["own"]
                if row["catalogs"] != self._written:
                    self._written, self._sweeping = row["catalogs"], LOOKS + 1
                continue
            name, known = row["name"], self._marks.get(row["name"], _Marks())
            now = _Marks(row["own"], known.catalogs if row["catalogs"] is None else row["catalogs"])
            if now != known or name not in self._streams:
                changed[name] = now
            else:
                self._streams[name] = replace(self._streams[name], noted=row["noted"])
        return whole, changed

    def _same(self, loaded: dict[str, Stream]) -> dict[str, Stream]:
        """The loaded streams; the present object for each that has not changed."""
        known = self._streams
        return {name: known[name] if known.get(name) == stream else stream for name, stream in loaded.items()}


def _next(names: list[str], begin: int, count: int) -> tuple[int, list[str]]:
    """Where the next turn begins, and so many names in turn, from a place on."""
    begin %= max(1, len(names))
    return begin + count, [*names[begin:], *names[:begin]][:count]


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one stream: copies use `db`, other queries `looks`.

    `RowSource` and `rows_probe` have the docstrings of the methods.
    """

    source: RowSource
    db: Reads
    looks: Reads

    @property
    def names_writers(self) -> bool:
        """Whether rows have the name of their writer."""
        return self.source.instance_column is not None

    @property
    def unique_ids(self) -> bool:
        """Whether no two rows have the same id."""
        return self.source.unique_ids

    async def copy_range(self, after: int, upto: int, sink: ChunkSink, *, limit: int | None = None) -> int:
        """`RowSource.copy_range`."""
        return await self.source.copy_range(self.db, after, upto, sink, limit=limit)

    async def copy_vector(
        self, ranges: Mapping[str, Range], sink: ChunkSink, *, others: Range | None = None, limit: int | None = None
    ) -> int:
        """`RowSource.copy_vector`."""
        return await self.source.copy_vector(self.db, ranges, sink, others=others, limit=limit)

    async def copy_blocks(
        self, after: int, upto: int, sink: ChunkSink, timeout: float | None = None, *, step: int, max_line: int
    ) -> int:
        """`RowSource.copy_blocks`."""
        return await self.source.copy_blocks(self.db, after, upto, sink, timeout, step=step, max_line=max_line)

    async def last_tokens(self, after: int, upto: int) -> dict[str, int]:
        """`RowSource.last_tokens`."""
        return await self.source.last_tokens(self.looks, after, upto)

    async def earliest(self) -> int | None:
        """`RowSource.earliest`."""
        return await self.source.earliest(self.looks)

    async def find_unreadable(
        self, wanted: Range | Mapping[str, Range], others: Range | None = None
    ) -> RowUnreadable | None:
        """`rows_probe.find_unreadable`."""
        return await rows_probe.find_unreadable(self.source, self.db, wanted, others)

    async def try_row(self, row_id: int) -> RowUnreadable | None:
        """`rows_probe.try_row`."""
        return await rows_probe.try_row(self.source, self.db, row_id)

    def unreadable(self, row_id: int, error: Exception) -> RowUnreadable:
        """`rows_probe.unreadable`."""
        return rows_probe.unreadable(self.source, row_id, error)


class PostgresStore:
    """The registry of streams, and their rows. `registry` has the docstrings of most methods.

    `db`: short statements. `catchup_db`: for clients that catch up.
    """

    def __init__(self, db: Database, catchup_db: Database, schema: str) -> None:
        self._db = db
        self._catchup_db = catchup_db
        self._looks = Impatient(db)
        self._view = RegistryView(schema)
        self._schema = schema

    def rows(self, stream: Stream) -> TableRows:
        """The rows for all readers: queries give up quickly if the table is locked. Raises StreamRefused."""
        return TableRows(registry.row_source(stream, schema=self._schema), self._db, self._looks)

    def catchup_rows(self, stream: Stream) -> TableRows:
        """The rows for clients that catch up, on connections of their own. Raises StreamRefused."""
        return TableRows(registry.row_source(stream, schema=self._schema), self._catchup_db, self._catchup_db)

    async def load_streams(self, suspects: Collection[str] = ()) -> dict[str, Stream]:
        """`RegistryView.look`."""
        return await self._view.look(self._looks, suspects)

    async def published(self) -> Mapping[str, Published]:
        """`registry.published`."""
        return await registry.published(self._looks, schema=self._schema)

    async def lineages(self, name: str | None = None) -> Mapping[str, Lineage]:
        """`registry.load_lineages`."""
        return await registry.load_lineages(self._looks, name, schema=self._schema)

    async def continue_streams(self) -> int:
        """`registry.continue_streams`."""
        return await registry.continue_streams(self._db, schema=self._schema)

    async def ensure_readers(self) -> None:
        """`registry.ensure_readers`."""
        await registry.ensure_readers(self._db, schema=self._schema)

    async def publish(self, stream: Stream, position: int, per_writer: Mapping[str, int]) -> bool:
        """`registry.publish`."""
        return await registry.publish(self._db, stream, position, per_writer, schema=self._schema)

    async def fork(self, stream: Stream, reason: str) -> Stream:
        """`registry.fork`."""
        return await registry.fork(self._db, stream, reason, schema=self._schema)

    async def rewind(self, stream: Stream, upto: int) -> Rewound:
        """`registry.rewind`."""
        return await registry.rewind(self._db, stream, upto, schema=self._schema)

    async def keep(self, stream: Stream, lowest: int | None, position: int, trimmed: int | None) -> RetentionChange:
        """`registry.keep`."""
        return await registry.keep(self._db, stream, lowest, position, trimmed, schema=self._schema)

    async def taken(self, stream: Stream, after: int) -> int:
        """`registry.taken`."""
        return await registry.taken(self._db, stream, after, schema=self._schema)

    async def ensure_writers(self, stream: Stream, names: Iterable[str]) -> dict[str, int]:
        """`registry.ensure_writers`."""
        return await registry.ensure_writers(self._db, stream, names, schema=self._schema)

    async def named(self, stream: Stream, numbers: Collection[int]) -> Sequence[StreamWriter]:
        """`stream_writers.named`."""
        return await stream_writers.named(self._db, stream, numbers, schema=self._schema)


class PostgresNotes:
    """Writes acks and troubles of a daemon. `acks` and `troubles` have the docstrings of the methods."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema

    async def note_acks(self, some: Sequence[ReaderAck]) -> None:
        """`acks.note`."""
        await acks.note(self._db, some, schema=self._schema)

    async def write_troubles(self, daemon: str, rows: Sequence[troubles.Row]) -> None:
        """`troubles.write`."""
        await troubles.write(self._db, daemon, rows, schema=self._schema)
