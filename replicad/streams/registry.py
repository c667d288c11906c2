"""The registry of streams: add, load, remove; numbers for writers; published positions; generations.

The rules are SQL functions (streams/sql), so that users of psql get the same refusals; this file calls them. It has no
state: everything is in Postgres, for all daemons.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from replicad.errors import DatabaseError, StreamRefused, UnknownStream
from replicad.positions.horizon import Identity, LockSource, ReservationSource, Source, TableSource
from replicad.postgres.bridge import Database
from replicad.postgres.statements import HOW, Queries, call_row, call_rows, call_value, find_relation, statement
from replicad.protocol.tokens import Vector
from replicad.streams.chunks import MAX_ROW
from replicad.streams.lineage import Generation, Lineage, lineage_of
from replicad.streams.queries import SCHEMA, installed
from replicad.streams.row_text import wire_instance
from replicad.streams.rows import RowSource


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
    of reservations are checked; None if this role may not read it. Ids up to `trimmed_upto` were removed
    by trimming, those in `skipped` are never sent, and no line is longer than `max_row` bytes. `writers`: the numbers
    of writers in vector tokens. `epoch`: the id of the present generation; `continues`: whether it is still valid. If
    not, `continue_streams` begins the next one. `sequence_file`: the sequence's file (as of pg_relation_filenode) in
    that generation. `noted`: the position that was published last.
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
    max_row: int
    skipped: tuple[int, ...]
    created_at: datetime
    writers: Mapping[str, int]

    @property
    def lacks_reader(self) -> bool:
        """Whether a reader of it has to be made (`ensure_readers`)."""
        readers = (self.reader, self.sequence_reader, self.positions_reader)
        return any(one is not None and one.endswith(".stream_reader_missing") for one in readers)


# Fields that change while a stream is served and that serving it does not depend on. `differences` compares all others.
_PASSING = frozenset({"fed", "fault", "denied", "trimmed_upto", "writers", "continues", "noted"})

# Names and how rows become lines: new values can be taken over between two reads. `proof_key` counts from the next
# watch on; until then the horizon goes on with what it has, which is right with any value.
RENEWABLE = frozenset(
    {
        *("table", "sequence", "positions_table", "row", "row_type"),
        *("unique_ids", "plain", "max_row", "skipped", "proof_key", "identity", "shares_sequence"),
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


async def add(
    db: Queries,
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
    schema: str = SCHEMA,
) -> Added:
    """Make a table a stream. If it is one already, with the same arguments, nothing is changed.

    Tables and sequences are named as in SQL (`public.events`), columns exactly as they are. `row` is an SQL expression
    over the table, called t, that yields JSON. `sequence` is needed only where the application itself draws ids from a
    sequence that neither belongs to the column nor is named in its default. `max_row` bounds the lines of the stream,
    in bytes: the stream stops before a row that is longer.

    Raises:
        StreamRefused: it cannot be a stream; the message has the reason and the remedy.
        UsageError: so has this one; no database would take the name, the method or the bound.
        SchemaMissing: streams are not installed in this database.
    """
    oids = [await _resolve(db, what) for what in (table, positions_table, sequence)]
    wanted = (oids[0], id_column, instance_column, row, str(method), oids[1], max_row)
    try:
        with installed(schema):
            notes = await db.fetch_value(statement("stream_add", schema), name, *wanted[:5], *oids[1:], max_row)
    except StreamRefused:
        present = await _present(db, name, schema)
        if present is None or present.fault is not None or _arguments(present) != wanted:
            raise
        if oids[2] not in (None, present.sequence_oid):
            raise
        return Added(present, (), new=False)
    return Added(await load_stream(db, name, schema=schema), tuple(notes))


async def _present(db: Queries, name: str, schema: str) -> Stream | None:
    """The stream of that name; None if there is none, or it cannot be read, as in a transaction that has failed."""
    try:
        return (await load_streams(db, schema=schema)).get(name)
    except DatabaseError:
        return None


def _arguments(stream: Stream) -> tuple[object, ...]:
    """What `add` was called with, but for the sequence, which may have been found."""
    columns = stream.id_column, stream.instance_column, stream.row
    return stream.table_oid, *columns, str(stream.method), stream.positions_oid, stream.max_row


async def remove(db: Queries, name: str, *, schema: str = SCHEMA) -> None:
    """Unregister a stream; its table and rows stay. Raises UnknownStream."""
    with installed(schema):
        await call_value(db, schema, "stream_remove", name)


async def set_max_row(db: Queries, name: str, max_row: int, *, schema: str = SCHEMA) -> None:
    """Bound the lines of a stream, in bytes. Raises UnknownStream, and UsageError above MAX_ROW."""
    with installed(schema):
        await call_value(db, schema, "stream_max_row", name, max_row)


async def alter_table(
    db: Queries,
    name: str,
    table: str,
    *,
    same_rows: bool = False,
    sequence: str | None = None,
    positions_table: str | None = None,
    schema: str = SCHEMA,
) -> tuple[str, ...]:
    """Go on with another table, or with the same one under its present name; returns notes.

    With another table a generation begins. `same_rows`: the new table has the rows of the old one up to the noted
    position, so that readers go on there. Else they get all rows. `sequence`, `positions_table`: as in `add`.

    Raises:
        UnknownStream, StreamRefused.
    """
    oids = [await _resolve(db, what) for what in (table, sequence, positions_table)]
    with installed(schema):
        notes = await db.fetch_value(statement("stream_alter", schema), name, oids[0], same_rows, *oids[1:])
    return tuple(notes)


async def sequence_changed(db: Queries, name: str, what: str, *, schema: str = SCHEMA) -> None:
    """Say what a change of the stream's sequence did: `same`, every row has the id that it had; `restarted`, ids begin
    again, and readers get all rows anew. Without such a change, `same` does nothing.

    Raises:
        UnknownStream, StreamRefused.
    """
    with installed(schema):
        await call_value(db, schema, "stream_sequence_changed", name, what)


async def load_streams(db: Queries, names: Collection[str] | None = None, *, schema: str = SCHEMA) -> dict[str, Stream]:
    """All streams by name, or the existing streams of these `names`."""
    with installed(schema):
        rows = await db.fetch(statement("stream_load", schema), None if names is None else list(names))
    return {row["name"]: _stream(row) for row in rows}


async def load_stream(db: Queries, name: str, *, schema: str = SCHEMA) -> Stream:
    """One stream. Raises UnknownStream."""
    with installed(schema):
        row = await db.fetch_row(statement("stream_load", schema), [name])
    if row is None:
        raise UnknownStream(f"there is no stream {name!r}; `replicad streams list` shows all streams.")
    return _stream(row)


def row_source(stream: Stream, *, schema: str = SCHEMA) -> RowSource:
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


async def ensure_writers(db: Queries, stream: Stream, names: Iterable[str], *, schema: str = SCHEMA) -> dict[str, int]:
    """The numbers of these writers; a new name gets the next one, until the stream is removed.

    Called before the first row of a new writer is sent, so that a token can name it.
    """
    wanted = sorted({wire_instance(name) for name in names})
    with installed(schema):
        rows = await call_rows(db, schema, "stream_writers_ensure", stream.number, wanted)
    return {row["writer"]: row["writer_number"] for row in rows}


async def continue_streams(db: Queries, *, schema: str = SCHEMA) -> int:
    """Begin a generation of each stream whose present generation is not valid any more; returns how many. Load the
    streams again afterwards.
    """
    with installed(schema):
        begun: int = await call_value(db, schema, "stream_continue")
    return begun


async def ensure_readers(db: Queries, *, schema: str = SCHEMA) -> None:
    """Make the readers that streams lack, where our role may. Load the streams again afterwards."""
    with installed(schema):
        await call_value(db, schema, "stream_readers_ensure")


async def fork(db: Queries, stream: Stream, reason: str, *, schema: str = SCHEMA) -> Stream:
    """History has forked since `stream` was loaded: begin a generation. Returns the stream as loaded again.

    Several daemons that find the same begin one generation. Raises UnknownStream where the stream was removed.
    """
    with installed(schema):
        await call_value(db, schema, "stream_fork", stream.number, stream.epoch, reason)
    return await load_stream(db, stream.name, schema=schema)


@dataclass(frozen=True, slots=True)
class Rewound:
    """The result of a `rewind`. `generation`: the new generation; None if nothing was done. `wait`: then the
    seconds after which it may be tried again; None if history has forked, so that rows are read anew.
    """

    generation: str | None
    wait: float | None


async def rewind(db: Queries, stream: Stream, upto: int, *, schema: str = SCHEMA) -> Rewound:
    """Rows above `upto` were not sent to readers: begin a generation that shares what there is up to `upto`, so that
    they get all rows above it again. Every daemon takes it over. Raises UnknownStream where the stream was removed.
    """
    with installed(schema):
        row = await call_row(db, schema, "stream_rewind", stream.number, stream.epoch, upto)
    return Rewound(row["begun"], row["wait"])


@dataclass(frozen=True, slots=True)
class RetentionChange:
    """What `keep` found out: up to which id rows were removed, and after which id rows exist again that were taken for
    removed; None if that is not news.
    """

    gone: int | None
    back: int | None


async def keep(
    db: Queries, stream: Stream, lowest: int | None, position: int, trimmed: int | None, *, schema: str = SCHEMA
) -> RetentionChange:
    """Note the lowest id of a stream's table (None: it is empty), read after `position` was published. Where it has
    grown since the last note, tokens below are expired from now on. Where it lies at or below `trimmed`, the
    `trimmed_upto` of the same snapshot, tokens from there on are good again.
    """
    with installed(schema):
        row = await call_row(db, schema, "stream_keep", stream.number, stream.epoch, lowest, position, trimmed)
    return RetentionChange(row["gone"], row["back"])


async def load_lineages(db: Queries, name: str | None = None, *, schema: str = SCHEMA) -> dict[str, Lineage]:
    """The generations of all streams, or of one, by the name of the stream."""
    with installed(schema):
        rows = await db.fetch(statement("stream_lineage", schema), name)
    found: dict[str, list[Generation]] = {}
    for row in rows:
        began = Vector(row["began_at"], dict(zip(row["writers"], row["positions"], strict=True)))
        one = Generation(row["number"], row["id"], began, row["reason"], row["created_at"])
        found.setdefault(row["name"], []).append(one)
    return {stream: lineage_of(generations) for stream, generations in found.items()}


async def publish(
    db: Queries, stream: Stream, position: int, per_writer: Mapping[str, int], *, schema: str = SCHEMA
) -> bool:
    """Store published positions, for daemons that start later; positions only grow. About once a second will do.

    Writers without a number are left out. Returns False, with nothing written, when another generation has begun since
    the stream was loaded, when its generation is not valid on the server that answers, or when it was removed.
    """
    known = {stream.writers[name]: at for name, at in per_writer.items() if name in stream.writers}
    with installed(schema):
        return bool(
            await call_value(
                db,
                schema,
                "stream_note",
                stream.number,
                stream.epoch,
                position,
                list(known),
                list(known.values()),
            )
        )


async def daemon_connected(db: Queries, *, schema: str = SCHEMA) -> bool:
    """Whether a session of a daemon (by application_name) is connected to this database."""
    return bool(await db.fetch_value(statement("stream_daemons", schema)))


async def taken(db: Database, stream: Stream, after: int, *, schema: str = SCHEMA) -> int:
    """An id that no committed row is above, and that positions come to: the last row's, or `after`, a position that was
    published. Not the last value of the sequence, which may lie above all ids that were given out (docs/positions.md).

    Raises:
        StreamRefused: the sequence cannot be read, or was set back since the stream was loaded.
    """
    with installed(schema):
        row = await db.fetch_row(statement("stream_taken", schema), stream.sequence_oid)
    if row is None or row["upto"] is None:
        raise StreamRefused(
            f"the sequence of stream {stream.name} was removed, or this role may not read it: GRANT USAGE ON SEQUENCE."
        )
    if stream.sequence_file not in (None, row["file"]):
        raise StreamRefused(
            f"stream {stream.name} is about to begin a generation: its sequence was restarted; try again"
        )
    ends = None if row["upto"] <= after else await row_source(stream, schema=schema).ends(db, after, row["upto"])
    return min(after, row["upto"]) if ends is None else ends[1]


async def published(db: Queries, *, schema: str = SCHEMA) -> dict[str, Published]:
    """The last published positions by the name of the stream; without streams that were never published."""
    with installed(schema):
        rows = await db.fetch(statement("stream_published", schema))
    return {
        row["name"]: Published(
            row["position"],
            dict(zip(row["writers"], row["positions"], strict=True)),
            row["published_at"],
        )
        for row in rows
    }


async def _resolve(db: Queries, relation: str | None) -> int | None:
    if relation is None:
        return None
    oid = await find_relation(db, relation)
    if oid is None:
        raise StreamRefused(f"there is no table or sequence {relation} in this database: {HOW}.")
    return oid


def _stream(row: Any) -> Stream:
    values = dict(row)
    names, numbers = values.pop("writer_names"), values.pop("writer_numbers")
    values["method"] = Method(values["method"])
    values["skipped"] = tuple(values["skipped"])
    home, named = values.pop("home"), values.pop("relation_named")
    sequence_named, positions_named = values.pop("sequence_named"), values.pop("positions_named")
    given = [(values["table_oid"], *named)] if named else []
    if sequence_named and not values["fed"]:
        given.append((values["sequence_oid"], *sequence_named))
    if positions_named:
        given.append((values["positions_oid"], *positions_named))
    values["identity"] = None if named is None else Identity(home, values["number"], tuple(given))
    return Stream(**values, writers=dict(zip(names, numbers, strict=True)))
