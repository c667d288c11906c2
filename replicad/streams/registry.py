"""The registry of streams: add, load, remove; writers; published positions; generations; acks, skipped ids, trimming.

The rules are SQL functions (streams/sql), so that users of psql get the same refusals; `Registry` calls them. It has no
state: everything is in Postgres, for all daemons.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final

from replicad.errors import BadToken, DatabaseError, StreamRefused, UnknownStream, UsageError
from replicad.positions.horizon import Identity, LockSource, ReservationSource, Source, TableSource
from replicad.postgres.statements import HOW, Queries, find_relation, rows_call, statement, value_call
from replicad.protocol.tokens import Vector
from replicad.streams.chunks import MAX_ROW
from replicad.streams.lineage import Generation, Lineage, lineage_of
from replicad.streams.queries import SCHEMA, installed
from replicad.streams.row_text import wire_instance
from replicad.streams.rows import RowSource

QUIET = 60.0  # seconds without a row before a writer may be retired
CHUNK: Final = 2000  # rows of a snapshot in a transaction: some 20 ms, for which the stream's position waits
CHUNK_PATIENCE: Final = 10.0  # seconds that a chunk waits for open transactions before it gives up, to report them
BATCH: Final = 10_000  # rows per transaction of a trim: some 50 ms, during which updates of these rows wait


class Method(enum.StrEnum):
    """How the positions of a stream are found."""

    LOCK_WATCH = "lock_watch"
    RESERVATION = "reservation"
    POSITIONS_TABLE = "positions_table"


@dataclass(frozen=True, slots=True)
class Stream:
    """A registered stream. `table`, `sequence` and `positions_table` are qualified and quoted, columns are as they are.

    `fault`: why the stream can no longer be served, with the remedy, or None; names of removed objects are None then.
    `plain`: this role may lock the whole table, which has no partitions. `reader`, `sequence_reader`,
    `positions_reader`: the functions that read its table, sequence and positions as their owners (postgres/owners.py);
    None if our own role reads them.
    `identity`: by which name the user meant the table. `fed`: the sequence fed the id column when the table was added.
    `shares_sequence`: other tables have ids of the sequence, too, as was accepted then.
    `denied`: what this role may not read, with the GRANT that it needs, or None. `proof_key`: the table by which proofs
    of reservations are checked; None if this role may not read it. `keep_for` and `keep_rows`: the rules by which
    daemons remove old rows; None: no such rule. Ids up to `trimmed_upto` were removed
    by trimming, those in `skipped` are never sent, and no line is longer than `max_row` bytes. `writers`: the numbers
    of writers in vector tokens. `epoch`: the id of the present generation; `continues`: whether it is still valid. If
    not, `continue_streams` begins the next one. `sequence_file`: the sequence's file (as of pg_relation_filenode) in
    that generation. `noted`: the position that was published last. `source`: the table whose changes the stream has;
    None for a stream of rows. `unrecorded`: why changes of it may not have been recorded, with the remedy.
    `filters`: the columns by whose values readers may ask for a part; None for one that was dropped.
    """

    number: int
    name: str
    table: str | None
    table_oid: int
    id_column: str
    instance_column: str | None
    row: str | None
    row_type: str
    method: Method
    sequence: str | None
    sequence_oid: int
    positions_table: str | None
    positions_oid: int | None
    identity: Identity | None
    fed: bool
    shares_sequence: bool
    unique_ids: bool
    plain: bool
    reader: str | None
    sequence_reader: str | None
    positions_reader: str | None
    epoch: str
    continues: bool
    sequence_file: int | None
    noted: int | None
    fault: str | None
    denied: str | None
    proof_key: str | None
    trimmed_upto: int | None
    keep_for: timedelta | None
    keep_rows: int | None
    max_row: int
    skipped: tuple[int, ...]
    created_at: datetime
    writers: Mapping[str, int]
    source: str | None = None
    unrecorded: str | None = None
    filters: tuple[str | None, ...] = ()

    @property
    def lacks_reader(self) -> bool:
        """Whether a reader of it has to be made (`ensure_readers`)."""
        readers = (self.reader, self.sequence_reader, self.positions_reader)
        return any(one is not None and one.endswith(".stream_reader_missing") for one in readers)


# Fields that change while a stream is served and that serving it does not depend on. `differences` compares all others.
_PASSING = frozenset({"fed", "fault", "denied", "trimmed_upto", "writers", "continues", "noted", "unrecorded"})

# Names and how rows become lines: new values can be taken over between two reads. `proof_key` counts from the next
# watch on; until then the horizon goes on with what it has, which is right with any value.
RENEWABLE = frozenset(
    {
        *("table", "sequence", "positions_table", "row", "row_type"),
        *("source", "filters", "unique_ids", "plain", "max_row", "skipped", "proof_key", "identity", "shares_sequence"),
        *("keep_for", "keep_rows"),
    }
)

# What another generation may change: the rows that ids belong to, and where they are. The daemon can take it over.
GENERATION = frozenset({"epoch", "table_oid", "sequence_oid", "sequence_file", "positions_oid"})


def differences(served: Stream, found: Stream) -> frozenset[str]:
    """The fields that serving depends on and in which the registry differs from the served stream."""
    if served is found:
        return frozenset()
    names = (field.name for field in fields(Stream) if field.name not in _PASSING)
    return frozenset(name for name in names if getattr(served, name) != getattr(found, name))


@dataclass(frozen=True, slots=True)
class Added:
    """A stream, and remarks for the person who added it. `new`: it was not registered just like that before."""

    stream: Stream
    notes: tuple[str, ...]
    new: bool = True


@dataclass(frozen=True, slots=True)
class Published:
    """The last published positions: linear, per writer, and when the linear one last changed."""

    position: int
    per_writer: Mapping[str, int]
    at: datetime


@dataclass(frozen=True, slots=True)
class RecordedChanges:
    """What of a table is recorded in its stream of changes (docs/changes.md). Columns are named exactly as they are.

    `key`: the columns that name a row; None for the primary key. `columns`: what is sent of a row, with the key; None
    for all. `where`: SQL on a row, called t, for the rows that are in the stream. `old`: send the row before a change
    too. `omit`: leave large columns out of an UPDATE that did not change them. `filters`: columns by whose values
    readers may ask for a part of the stream.
    """

    key: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    old: bool = False
    omit: bool = False
    filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot has come. `waits_for`: the transactions that it waited for in vain, as pg_locks names them."""

    number: int
    rows: int
    finished: bool
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of the stream with the number `stream`, and the rows that it has sent. `finished_at`: None if it goes
    on.
    """

    stream: int
    number: int
    rows: int
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Rewound:
    """The result of a `rewind`. `generation`: the new generation; None if nothing was done. `wait`: then the
    seconds after which it may be tried again; None if history has forked, so that rows are read anew.
    """

    generation: str | None
    wait: float | None


@dataclass(frozen=True, slots=True)
class RetentionChange:
    """What `keep` found out: up to which id rows were removed, and after which id rows exist again that were taken for
    removed; None if that is not news.
    """

    gone: int | None
    back: int | None


@dataclass(frozen=True, slots=True)
class StreamWriter:
    """One writer. `position`: its last published position, or None."""

    number: int
    name: str
    position: int | None
    created_at: datetime
    retired_at: datetime | None

    @property
    def retired(self) -> bool:
        """Whether it is no longer listed to readers."""
        return self.retired_at is not None


@dataclass(frozen=True, slots=True)
class ReaderAck:
    """One ack: `instance` has delivered `stream` up to `token`, in the generation `epoch`."""

    stream: str
    epoch: str
    instance: str
    token: int


@dataclass(frozen=True, slots=True)
class SenderAck:
    """The last ack of a sender; `token` is None if it has sent none in the present generation."""

    instance: str
    token: int | None
    acked_at: datetime | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """An id that an operator has left out of a stream: the reason, the role of Postgres, and the time."""

    id: int
    reason: str
    by: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Trimmed:
    """How many rows were removed; tokens below `upto` are expired from now on (None: nothing was ever trimmed)."""

    rows: int
    upto: int | None


class Registry:
    """The registry of one database, in one schema. `db`: a pool, or a connection in a transaction of the caller."""

    def __init__(self, db: Queries, schema: str = SCHEMA, *, looks: Queries | None = None) -> None:
        """`looks`: for what daemons read again and again, if these queries are to give up where a table is locked."""
        self.schema = schema
        self._db = db
        self._looks = db if looks is None else looks

    async def _value(self, function: str, *args: object) -> Any:
        with installed(self.schema):
            return await self._db.fetch_value(value_call(self.schema, function, len(args)), *args)

    async def _rows(self, function: str, *args: object, columns: str = "*") -> list[Any]:
        with installed(self.schema):
            return await self._db.fetch(rows_call(self.schema, function, len(args), columns), *args)

    async def _row(self, function: str, *args: object) -> Any:
        with installed(self.schema):
            return await self._db.fetch_row(rows_call(self.schema, function, len(args)), *args)

    async def _fetch(self, query: str, *args: object) -> list[Any]:
        with installed(self.schema):
            return await self._db.fetch(statement(query, self.schema), *args)

    async def _fetch_value(self, query: str, *args: object) -> Any:
        with installed(self.schema):
            return await self._db.fetch_value(statement(query, self.schema), *args)

    async def _look(self, query: str, *args: object) -> list[Any]:
        with installed(self.schema):
            return await self._looks.fetch(statement(query, self.schema), *args)

    async def add(
        self,
        name: str,
        table: str,
        id_column: str,
        *,
        instance_column: str | None = None,
        row: str | None = None,
        method: Method | str = Method.LOCK_WATCH,
        positions_table: str | None = None,
        sequence: str | None = None,
        max_row: int = MAX_ROW,
    ) -> Added:
        """Make a table a stream. If it is one already, with the same arguments, nothing is changed.

        Tables and sequences are named as in SQL (`public.events`), columns exactly as they are. `row` is an SQL
        expression over the table, called t, that yields JSON. `sequence` is needed only where the application itself
        draws ids from a sequence that neither belongs to the column nor is named in its default. `max_row` bounds the
        lines of the stream, in bytes: the stream stops before a row that is longer.

        Raises:
            StreamRefused: it cannot be a stream; the message has the reason and the remedy.
            UsageError: so has this one; no database would take the name, the method or the bound.
            SchemaMissing: streams are not installed in this database.
        """
        oids = [await _resolve(self._db, what) for what in (table, positions_table, sequence)]
        wanted = (oids[0], id_column, instance_column, row, str(method), oids[1], max_row)
        try:
            notes = await self._fetch_value("stream_add", name, *wanted[:5], *oids[1:], max_row)
        except StreamRefused:
            present = await self._present(name)
            if present is None or present.fault is not None or _arguments(present) != wanted:
                raise
            if oids[2] not in (None, present.sequence_oid):
                raise
            return Added(present, (), new=False)
        return Added(await self.load_stream(name), tuple(notes))

    async def _present(self, name: str) -> Stream | None:
        """The stream of that name; None if there is none, or it cannot be read, as in a transaction that has failed."""
        try:
            return (await self.load_streams()).get(name)
        except DatabaseError:
            return None

    async def add_changes(self, name: str, table: str, recorded: RecordedChanges, *, max_row: int = MAX_ROW) -> Added:
        """Record the changes of a table from now on, in a stream. If it is so already, nothing is changed.

        Raises:
            StreamRefused: they cannot be recorded; the message has the reason and the remedy.
            SchemaMissing: streams are not installed in this database.
        """
        columns = None if recorded.columns is None else list(recorded.columns)
        key = None if recorded.key is None else list(recorded.key)
        wanted = (
            await _resolve(self._db, table),
            *(key, columns, recorded.where, recorded.old, recorded.omit, list(recorded.filters), max_row),
        )
        try:
            notes = await self._fetch_value("stream_add_changes", name, *wanted)
        except StreamRefused:
            present = await self._present(name)
            if present is None or not await self._fetch_value("stream_changes_same", name, *wanted):
                raise
            return Added(present, (), new=False)
        return Added(await self.load_stream(name), tuple(notes))

    async def request_snapshot(self, name: str, *, where: str | None = None, anew: bool = False) -> int:
        """Ask for the rows of the table whose changes the stream has: `snapshot_step` sends them. `anew`: readers drop
        what they have before. Returns the number of the snapshot. Raises UnknownStream, StreamRefused.
        """
        number: int = await self._value("stream_snapshot_request", name, where, anew)
        return number

    async def snapshot_step(self, stream: int, *, size: int = CHUNK) -> SnapshotProgress | None:
        """Send the next rows of the oldest unfinished snapshot of a stream, which is named by its number. None: there
        is no such snapshot, or another process is at it.
        """
        for row in await self._fetch("stream_snapshot_step", stream, size, CHUNK_PATIENCE):
            return SnapshotProgress(row["number"], row["sent"], row["finished"], tuple(row["waits_for"] or ()))
        return None

    async def snapshots(self) -> list[Snapshot]:
        """The snapshots of all streams in their order, the latest finished ones too."""
        return [Snapshot(*row) for row in await self._rows("stream_snapshots")]

    async def look_after_changes(self) -> list[tuple[str, str, str]]:
        """Look after all streams of changes: partitions, shapes of tables, triggers that are off. Returns the
        streams that may have missed changes, or for which this was not possible: the name, a code
        (`changes_missed`, `denied` or `locked`), and the reason. To be called regularly.
        """
        while await self._value("stream_changes_extend"):
            pass
        return [(row["name"], row["code"], row["problem"]) for row in await self._rows("stream_changes_look")]

    async def descriptions(self, stream: Stream) -> list[tuple[int, str]]:
        """What describes the columns of the rows of a stream of changes, newest first: the id from which on it counts,
        and its JSON. Descriptions stay when old changes are removed.
        """
        return [(row["since"], row["line"]) for row in await self._look("stream_descriptions", stream.number)]

    async def remove(self, name: str) -> None:
        """Unregister a stream; its table and rows stay. Raises UnknownStream."""
        await self._value("stream_remove", name)

    async def set_max_row(self, name: str, max_row: int) -> None:
        """Bound the lines of a stream, in bytes. Raises UnknownStream, and UsageError above MAX_ROW."""
        await self._value("stream_max_row", name, max_row)

    async def set_keep(self, name: str, *, keep_for: timedelta | None, keep_rows: int | None) -> None:
        """Let daemons remove the rows that are older than `keep_for` and not among the `keep_rows` newest. None: no
        such rule.

        Raises UnknownStream, UsageError, and StreamRefused: the removal would run code of the table's owner.
        """
        await self._value("stream_keep_rules", name, keep_for, keep_rows)

    async def trim_kept(self, name: str, batch: int) -> int:
        """Remove a bounded piece of the rows that the rules let go. Returns how many rows or partitions.

        Raises UnknownStream, and StreamRefused: the removal would run code of the table's owner.
        """
        rows = await self._fetch("stream_trim_kept", name, batch)
        return int(rows[0]["partitions"] + rows[0]["removed"])

    async def alter_table(
        self,
        name: str,
        table: str,
        *,
        same_rows: bool = False,
        sequence: str | None = None,
        positions_table: str | None = None,
    ) -> tuple[str, ...]:
        """Go on with another table, or with the same one under its present name; returns notes.

        With another table a generation begins. `same_rows`: the new table has the rows of the old one up to the noted
        position, so that readers go on there. Else they get all rows. `sequence`, `positions_table`: as in `add`.

        Raises:
            UnknownStream, StreamRefused.
        """
        oids = [await _resolve(self._db, what) for what in (table, sequence, positions_table)]
        notes = await self._fetch_value("stream_alter", name, oids[0], same_rows, *oids[1:])
        return tuple(notes)

    async def sequence_changed(self, name: str, what: str) -> None:
        """Say what a change of the stream's sequence did: `same`, every row has the id that it had; `restarted`, ids
        begin again, and readers get all rows anew. Without such a change, `same` does nothing.

        Raises:
            UnknownStream, StreamRefused.
        """
        await self._value("stream_sequence_changed", name, what)

    async def load_streams(self, names: Collection[str] | None = None) -> dict[str, Stream]:
        """All streams by name, or the existing streams of these `names`."""
        rows = await self._look("stream_load", None if names is None else list(names))
        return {row["name"]: _stream(row) for row in rows}

    async def load_stream(self, name: str) -> Stream:
        """One stream. Raises UnknownStream."""
        rows = await self._fetch("stream_load", [name])
        if not rows:
            raise UnknownStream(f"there is no stream {name!r}; `replicad streams list` shows all streams.")
        return _stream(rows[0])

    async def ensure_readers(self) -> None:
        """Make the readers that streams lack, where our role may. Load the streams again afterwards."""
        await self._value("stream_readers_ensure")

    async def continue_streams(self) -> int:
        """Begin a generation of each stream whose present generation is not valid any more; returns how many. Load the
        streams again afterwards.
        """
        begun: int = await self._value("stream_continue")
        return begun

    async def fork(self, stream: Stream, reason: str) -> Stream:
        """History has forked since `stream` was loaded: begin a generation. Returns the stream as loaded again.

        Several daemons that find the same begin one generation. Raises UnknownStream where the stream was removed.
        """
        await self._value("stream_fork", stream.number, stream.epoch, reason)
        return await self.load_stream(stream.name)

    async def rewind(self, stream: Stream, upto: int) -> Rewound:
        """Rows above `upto` were not sent to readers: begin a generation that shares what there is up to `upto`, so
        that they get all rows above it again. Every daemon takes it over. Raises UnknownStream where the stream was
        removed.
        """
        row = await self._row("stream_rewind", stream.number, stream.epoch, upto)
        return Rewound(row["begun"], row["wait"])

    async def keep(self, stream: Stream, lowest: int | None, position: int, trimmed: int | None) -> RetentionChange:
        """Note the lowest id of a stream's table (None: it is empty), read after `position` was published. Where it has
        grown since the last note, tokens below are expired from now on. Where it lies at or below `trimmed`, the
        `trimmed_upto` of the same snapshot, tokens from there on are good again.
        """
        row = await self._row("stream_keep", stream.number, stream.epoch, lowest, position, trimmed)
        return RetentionChange(row["gone"], row["back"])

    async def lineages(self, name: str | None = None) -> dict[str, Lineage]:
        """The generations of all streams, or of one, by the name of the stream."""
        rows = await self._look("stream_lineage", name)
        found: dict[str, list[Generation]] = {}
        for row in rows:
            began = Vector(row["began_at"], dict(zip(row["writers"], row["positions"], strict=True)))
            one = Generation(row["number"], row["id"], began, row["reason"], row["created_at"])
            found.setdefault(row["name"], []).append(one)
        return {stream: lineage_of(generations) for stream, generations in found.items()}

    async def published(self) -> dict[str, Published]:
        """The last published positions by the name of the stream; without streams that were never published."""
        rows = await self._look("stream_published")
        return {
            row["name"]: Published(
                row["position"],
                dict(zip(row["writers"], row["positions"], strict=True)),
                row["published_at"],
            )
            for row in rows
        }

    async def publish(self, stream: Stream, position: int, per_writer: Mapping[str, int]) -> bool:
        """Store published positions, for daemons that start later; positions only grow. About once a second will do.

        Writers without a number are left out. Returns False, with nothing written, when another generation has begun
        since the stream was loaded, when its generation is not valid on the server that answers, or when it was
        removed.
        """
        known = {stream.writers[name]: at for name, at in per_writer.items() if name in stream.writers}
        return bool(
            await self._value(
                "stream_note",
                stream.number,
                stream.epoch,
                position,
                list(known),
                list(known.values()),
            )
        )

    async def taken(self, stream: Stream, after: int) -> int:
        """An id that no committed row is above, and that positions come to: the last row's, or `after`, a position that
        was published. Not the last value of the sequence, which may lie above all ids that were given out
        (docs/positions.md).

        Raises:
            StreamRefused: the sequence cannot be read, or was set back since the stream was loaded.
        """
        [row] = await self._fetch("stream_taken", stream.sequence_oid) or [{"upto": None}]
        if row["upto"] is None:
            raise StreamRefused(
                f"the sequence of stream {stream.name} was removed, or this role may not read it: "
                "GRANT USAGE ON SEQUENCE."
            )
        if stream.sequence_file not in (None, row["file"]):
            raise StreamRefused(
                f"stream {stream.name} is about to begin a generation: its sequence was restarted; try again"
            )
        ends = (
            None if row["upto"] <= after else await row_source(stream, self.schema).ends(self._db, after, row["upto"])
        )
        return min(after, row["upto"]) if ends is None else ends[1]

    async def daemon_connected(self) -> bool:
        """Whether a session of a daemon (by application_name) is connected to this database."""
        return bool(await self._fetch_value("stream_daemons"))

    async def ensure_writers(self, stream: Stream, names: Iterable[str]) -> dict[str, int]:
        """The numbers of these writers; a new name gets the next one, until the stream is removed.

        Called before the first row of a new writer is sent, so that a token can name it.
        """
        wanted = sorted({wire_instance(name) for name in names})
        rows = await self._rows("stream_writers_ensure", stream.number, wanted)
        return {row["writer"]: row["writer_number"] for row in rows}

    async def writers(self, stream: str) -> list[StreamWriter]:
        """All writers of a stream by number, including retired ones. Raises UnknownStream."""
        rows = await self._rows(
            "stream_writers", stream, columns="number, writer AS name, position, created_at, retired_at"
        )
        return [StreamWriter(**dict(row)) for row in rows]

    async def writers_numbered(self, stream: Stream, numbers: Collection[int]) -> list[StreamWriter]:
        """The writers that have these numbers."""
        rows = await self._fetch("stream_writers_numbered", stream.number, list(numbers))
        return [StreamWriter(**dict(row)) for row in rows]

    async def retire_writers(self, stream: str, names: Collection[str], *, quiet: float = QUIET) -> int:
        """Retire writers, all of them or none; returns how many were not retired yet.

        `quiet`: seconds for which they must have written nothing.

        Raises:
            UnknownStream, StreamRefused: a writer is unknown, may still be writing, or none would be left.
        """
        return int(await self._value("stream_writers_retire", stream, list(names), quiet))

    async def idle_writers(self, stream: str, token: int) -> list[str]:
        """The writers that are not retired and have no row above `token`; one writer is always left out.

        Raises UnknownStream.
        """
        rows = await self._rows("stream_writers_idle", stream, token)
        return [row["writer"] for row in rows]

    async def note_acks(self, acks: Sequence[ReaderAck]) -> None:
        """Store acks; at most one for each stream and instance."""
        await self._value(
            "stream_ack_note",
            [ack.stream for ack in acks],
            [ack.epoch for ack in acks],
            [ack.instance for ack in acks],
            [ack.token for ack in acks],
        )

    async def acks(self, stream: str) -> list[SenderAck]:
        """All known senders of a stream, the lowest token first. Raises UnknownStream."""
        return [SenderAck(*row) for row in await self._rows("stream_acks", stream)]

    async def acked(self, stream: str) -> int | None:
        """The lowest token of all known senders; None if a sender has sent no ack, or none is known."""
        token: int | None = await self._value("stream_acked", stream)
        return token

    async def forget_acks(self, stream: str, instance: str) -> bool:
        """Remove a sender, so that it no longer holds trimming back; False if it has never sent an ack.

        Raises UnknownStream.
        """
        return bool(await self._value("stream_ack_forget", stream, instance))

    async def skip(self, name: str, row_id: int, reason: str) -> int | None:
        """Leave an id out of a stream; the row stays in its table. Returns the position published so far.

        Raises UnknownStream.
        """
        published: int | None = await self._value("stream_skip_id", name, row_id, reason)
        return published

    async def unskip(self, name: str, row_id: int) -> bool:
        """Undo `skip` for readers that have not passed the id; False if it was not skipped. Raises UnknownStream."""
        return bool(await self._value("stream_skip_undo", name, row_id))

    async def skips(self, name: str) -> list[Skipped]:
        """The skipped ids of a stream, ascending. Raises UnknownStream."""
        rows = await self._rows("stream_skips", name, columns="id, reason, skipped_by, skipped_at")
        return [Skipped(*row) for row in rows]

    async def trim(
        self,
        name: str,
        *,
        before: str | int | None = None,
        older_than: timedelta | None = None,
        acked: bool = False,
        batch: int = BATCH,
    ) -> Trimmed:
        """Remove rows up to token `before`, or those published longer than `older_than` ago, or those `acked` by every
        known sender (none while a sender has sent no ack).

        The age comes from positions that daemons note while they serve the stream (to the minute for a day, to the hour
        before). Where these notes do not go back so far, nothing is removed. Each batch is a transaction of its own, so
        the batches before an interruption stay removed. The position waits for a batch, as for any other transaction.

        Raises:
            UsageError: `before`, `older_than` and `acked` are all absent, or more than one of the three is given.
            UnknownStream: there is no such stream.
            BadToken: the token does not parse, or belongs to another epoch.
            StreamRefused: it lies beyond the published position; rows that no reader was sent must stay.
        """
        if sum((before is not None, older_than is not None, acked)) != 1:
            raise UsageError("trim takes exactly one of before, older_than and acked.")
        stream = await self.load_stream(name)
        upto: int | None
        if before is not None:
            token = Vector.parse(str(before))
            if token.epoch not in (None, stream.epoch):
                raise BadToken(f"token {before} is of another epoch than stream {name}, which is in {stream.epoch}.")
            upto = token.minimum
        elif acked:
            upto = await self.acked(name)
        else:
            upto = await self._fetch_value("stream_position_at", name, older_than)
        rows = 0
        while upto is not None:
            deleted = await self._value("stream_trim", name, upto, batch)
            if not deleted:
                break
            rows += deleted
        return Trimmed(rows, (await self.load_stream(name)).trimmed_upto)


def _arguments(stream: Stream) -> tuple[object, ...]:
    """What `add` was called with, but for the sequence, which may have been found."""
    columns = stream.id_column, stream.instance_column, stream.row
    return stream.table_oid, *columns, str(stream.method), stream.positions_oid, stream.max_row


async def _resolve(db: Queries, relation: str | None) -> int | None:
    if relation is None:
        return None
    oid = await find_relation(db, relation)
    if oid is None:
        raise StreamRefused(f"there is no table or sequence {relation} in this database: {HOW}.")
    return oid


def row_source(stream: Stream, schema: str = SCHEMA) -> RowSource:
    """The RowSource of this stream. Raises StreamRefused if the stream can no longer be served."""
    if stream.fault is not None or stream.table is None:
        raise StreamRefused(f"stream {stream.name} cannot be served: {stream.fault}")
    return RowSource(
        number=stream.number,
        stream=stream.name,
        table=stream.table,
        id_column=stream.id_column,
        instance_column=stream.instance_column,
        row=stream.row,
        row_type=stream.row_type,
        unique_ids=stream.unique_ids,
        writers=tuple(stream.writers),
        schema=schema,
        table_oid=stream.table_oid,
        sequence_oid=stream.sequence_oid,
        sequence_file=stream.sequence_file,
        skipped=stream.skipped,
        max_row=stream.max_row,
        reader=stream.reader,
        plain=stream.plain,
    )


def horizon_source(stream: Stream) -> Source:
    """How the horizon finds the positions of this stream."""
    if stream.method is Method.RESERVATION:
        return ReservationSource(
            stream.number,
            stream.sequence_oid,
            stream.proof_key,
            sequence_reader=stream.sequence_reader,
            identity=stream.identity,
            table=stream.table_oid,
            id_column=stream.id_column,
            reader=stream.reader,
        )
    if stream.method is Method.POSITIONS_TABLE:
        assert stream.positions_oid is not None  # a constraint of adding it
        return TableSource(
            table=stream.positions_oid,
            stream_name=stream.name,
            reader=stream.positions_reader,
            identity=stream.identity,
        )
    return LockSource(
        table=stream.table_oid,
        sequence=stream.sequence_oid,
        reader=stream.reader,
        sequence_reader=stream.sequence_reader,
        identity=stream.identity,
        id_column=stream.id_column,
        has_sequence=not stream.shares_sequence,
    )


def _stream(row: Any) -> Stream:
    values = dict(row)
    names, numbers = values.pop("writer_names"), values.pop("writer_numbers")
    values["method"] = Method(values["method"])
    values["skipped"] = tuple(values["skipped"])
    values["filters"] = tuple(values["filters"] or ())
    home, named = values.pop("home"), values.pop("relation_named")
    sequence_named, positions_named = values.pop("sequence_named"), values.pop("positions_named")
    given = [(values["table_oid"], *named)] if named else []
    if sequence_named and not values["fed"]:
        given.append((values["sequence_oid"], *sequence_named))
    if positions_named:
        given.append((values["positions_oid"], *positions_named))
    values["identity"] = None if named is None else Identity(home, values["number"], tuple(given))
    return Stream(**values, writers=dict(zip(names, numbers, strict=True)))
