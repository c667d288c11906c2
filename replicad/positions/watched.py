"""One watched stream: its state between two polls, and the `Reading` after each poll. Sends no statements.

A source describes how the positions of a stream are found. A `Reading` has the same form for all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from replicad import sqlstates
from replicad.errors import DatabaseError, StreamRefused
from replicad.positions.lockwatch import Hold, LockWatch, TableWatch

NO_ID = -(1 << 63)  # below all ids
RESERVATION_BAND = 0x5200  # advisory locks whose top 16 bits lie in 0x5201..0x71FF are reservations
RESERVATION_NUMBER_MAX = 0x1FFF
RESERVATION_BOUND_MAX = (1 << 48) - 1


def reservation_key(number: int, bound: int) -> int:
    """The key (bigint) of the shared advisory lock that a writer of stream `number` holds: its ids are above `bound`.

    Top 16 bits: RESERVATION_BAND + number. The other 48 bits: the bound. A writer reads the sequence's last value as
    the bound, then takes the lock, then calls nextval(). The lock is shared, so that writers with the same bound do not
    wait for each other. In pg_locks the key is classid (high half) and objid (low half) with objsubid 1. Raises
    ValueError for values out of range.
    """
    if not 1 <= number <= RESERVATION_NUMBER_MAX or not 0 <= bound <= RESERVATION_BOUND_MAX:
        raise ValueError(f"no reservation can carry stream number {number} and bound {bound}")
    return (RESERVATION_BAND + number) << 48 | bound


@dataclass(frozen=True, slots=True)
class Identity:
    """Which table the user meant, by the name that was given when the stream was added.

    `home`: the quoted schema of the functions that look: `stream_strayed` takes `number` and says why ids may be rows
    of another table now, `stream_moved` whether that has to be asked. `names`: oids with the schema and the name that
    must not lead to another relation.
    """

    home: str
    number: int
    names: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LockSource:
    """Lock-watch: `table` (oid; its partitions and children count too) whose ids come from `sequence` (oid) and are in
    the column `id_column` (not quoted).

    `own_deletes`: the horizon's `own_backends` only delete from this table, so they do not hold its position back.
    `has_sequence`: no other table has ids of the sequence, so that every transaction that drew such an id counts.
    `reader`, `sequence_reader`: the functions that read the table and the sequence as their owner (owners.py); None if
    our own role reads them.
    """

    table: int
    sequence: int
    own_deletes: bool = False
    reader: str | None = None
    sequence_reader: str | None = None
    identity: Identity | None = None
    id_column: str = "id"
    has_sequence: bool = False


@dataclass(frozen=True, slots=True)
class ReservationSource:
    """Ids of `sequence` (oid) are reserved under advisory locks that carry the stream's `number` (reservation_key).
    They are written into the column `id_column` (not quoted) of `table` (oid).

    `proof_key`: the quoted name of the table with the secret by which the proofs of such locks are checked. None: it
    may not be read, so every lock counts, whoever holds it. `reader`, `sequence_reader`: as in LockSource.
    """

    number: int
    sequence: int
    proof_key: str | None = None
    sequence_reader: str | None = None
    identity: Identity | None = None
    table: int = 0
    id_column: str = "id"
    reader: str | None = None


@dataclass(frozen=True, slots=True)
class TableSource:
    """The writers keep a table (oid) of (stream_name, instance_name, stream_id). Its positions are trusted.

    `reader`: as in LockSource.
    """

    table: int
    stream_name: str
    reader: str | None = None
    identity: Identity | None = None


Source = LockSource | ReservationSource | TableSource


class HolderKind(StrEnum):
    """How a position is held back."""

    TRANSACTION = "transaction"  # open, and may have written
    PREPARED = "prepared"  # by PREPARE TRANSACTION; its owner may have forgotten it
    RESERVATION = "reservation"  # an id was reserved and is not complete
    SEQUENCE_LOCK = "sequence_lock"  # the sequence itself is being altered, restarted or dropped
    TABLE_LOCK = "table_lock"  # the positions table is locked against readers
    WRITER = "writer"  # publishes its own position, and that is the lowest


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds a position back. `age_s` is the age of its transaction in seconds; None if unknown."""

    kind: HolderKind
    pid: int | None = None
    application_name: str | None = None
    age_s: float | None = None
    query: str | None = None
    gid: str | None = None
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Why positions that were published may not hold any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One stream after one poll. Rows at or below `position`, and a writer's own below its position, are there.

    `position` None: unknown, because transactions older than the first poll are open, or because of a fork; publish
    nothing. `per_writer` has the known writers; `maximum` is the highest of all positions. `last_value` is the last id
    that the sequence gave out. `fork` stays until the watch begins again. `refused`: this stream cannot be served as it
    is; its position stays. `alarms` are sentences for the log. They stay the same as long as their cause lasts.
    """

    position: int | None = None
    per_writer: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    maximum: int | None = None
    last_value: int | None = None
    held_by: Holder | None = None
    fork: Fork | None = None
    refused: StreamRefused | None = None
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """A sequence's last value, and readings after it: ends of the WAL, and the sequence's file.

    `moved`: the value has changed since this connection read it first. So an id was drawn, or a value was set, in the
    present run of the server, and the WAL has it. Before that no writer may have got the value: Postgres
    logs a sequence up to 32 values ahead, and a promoted standby, or a server after a crash, shows the logged value.
    """

    last_value: int
    inserted: int
    flushed: int
    file: int | None
    moved: bool = True


class Watched:
    """One watched stream: its source, the pure part that computes its positions, and its holders."""

    def __init__(
        self,
        name: str,
        source: Source,
        published: int | None,
        per_writer: Mapping[str, int] | None,
        writers: Iterable[str],
        *,
        file: int | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.file = file  # of the sequence, in which the published positions hold; None: any
        self.file_replaced = False
        self.locks = None if isinstance(source, TableSource) else LockWatch(published, per_writer)
        self.table = TableWatch(published, per_writer) if isinstance(source, TableSource) else None
        self.writers = frozenset(writers)
        self.inspected = False  # whether its table and sequence have been checked
        self.refused: StreamRefused | None = None
        self.unreadable: str | None = None  # the error of Postgres when it is read, until it can be read again
        self.strayed: str | None = None  # why its ids may be rows of another table
        self.feeds = 0  # identifies the column defaults that drew from its sequence when `strayed` was found out
        self.blocked_by: Holder | None = None
        self.stale = True  # its last `Reading` may not be true any more
        self.last_row: int | None = None  # the highest row that is there; None: to be looked up
        self.waits_for_rows = False  # it could not be looked up yet
        self._holders: dict[str, Holder] = {}
        self._since: dict[str, float] = {}
        self._foreign: tuple[str, ...] = ()

    @property
    def sequence(self) -> int:
        """The oid of the sequence that gives its ids; not for a source of positions that writers publish."""
        assert not isinstance(self.source, TableSource)
        return self.source.sequence

    @property
    def sequence_reader(self) -> str | None:
        """The function that reads the sequence as its owner, if not our own role does. As `sequence`."""
        assert not isinstance(self.source, TableSource)
        return self.source.sequence_reader

    @property
    def relation(self) -> int:
        """The oid of the sequence or positions table from which its positions are read."""
        return self.source.table if isinstance(self.source, TableSource) else self.source.sequence

    @property
    def unsettled(self) -> bool:
        """Whether its position may move though its sequence does not: a holder, a flush, nothing read yet, a fork."""
        locks = self.locks
        return locks is not None and (
            locks.last_value is None or locks.someone_holds or locks.waits_for_flush or self.fork is not None
        )

    @property
    def restless(self) -> bool:
        """Whether more than another value of its sequence can move its position or change its state."""
        if self.locks is None or not self.inspected or self.refused is not None or self.unreadable is not None:
            return True
        return self.waits_for_rows or self.locks.lowest is not None or self.locks.waits_for_flush

    @property
    def watch(self) -> LockWatch | TableWatch:
        """The lock-watch or the table reader, depending on the stream's method."""
        watch = self.locks or self.table
        assert watch is not None
        return watch

    def given_out(self, value: SequenceValue) -> int | None:
        """The highest id that is known to have been issued, and logged. None: it must be read from the table's rows.

        A value that has not moved in this run of the server may lie up to 32 above the last issued id. A published
        position was issued, and so were the ids of rows. Higher ids may be issued again for other rows, on this server
        or on a server that takes over.
        """
        published = self._published()
        if value.moved or value.last_value <= published:
            return value.last_value
        return None if self.last_row is None else max(published, self.last_row)

    def moves_to(self, value: SequenceValue) -> bool:
        """Whether the value says more than the last poll, or its rows have to be looked up."""
        assert self.locks is not None
        given_out = self.given_out(value)
        return given_out is None or given_out != self.locks.last_value

    def _published(self) -> int:
        assert self.locks is not None
        known = (self.locks.position, *self.locks.per_writer.values())
        return max((position for position in known if position is not None), default=NO_ID)

    def restart(self) -> None:
        """A new connection, perhaps to another server: drop readings that were not published."""
        self.last_row = None
        self.inspected = False
        self.watch.restart()

    def refuse(self, reason: str) -> None:
        """Do not serve the stream until `accept`. The data about its holders is dropped."""
        self.refused = StreamRefused(reason)
        self.stale = True
        self.watch.restart()
        self._holders = {}
        self._since = {}

    def cannot_read(self, error: DatabaseError, what: str = "sequence") -> None:
        """Postgres refuses to read the sequence or a table, for any reason. Refuse this stream only."""
        table = isinstance(self.source, TableSource)
        what = "positions table" if table else what
        reason = f'the {what} of stream "{self.name}" cannot be read: {error}'
        if sqlstates.means(error.sqlstate, sqlstates.NO_RIGHT):
            reason += " GRANT replicad's role USAGE on its schema, and SELECT on itself."
        elif table:
            reason += " It needs the columns stream_name, instance_name and stream_id."
        self.unreadable = reason
        self.refuse(reason)

    def accept(self) -> None:
        """The reason for the refusal, if there was one, no longer exists."""
        self.stale |= self.refused is not None
        self.refused = None

    def block(self, holder: Holder | None) -> None:
        """Its sequence or positions table is locked by `holder`; None: it is not locked."""
        self.stale |= holder is not None or self.blocked_by is not None
        self.blocked_by = holder

    def unfit(self, found: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Why this stream cannot be served, with the remedy, or None. `found`: rows of horizon_inspect by oid."""
        stream = f'stream "{self.name}"'
        if self.strayed is not None:
            return f"{stream} waits: {self.strayed}"
        if not isinstance(self.source, ReservationSource):
            table = found.get(self.source.table)
            if table is None:
                return f"the table of {stream} was dropped: remove the stream, or add it again for another table."
            reason = _unfit_table(table, stream, ours=self.source.reader is None)
            if reason is not None:
                return reason
        if isinstance(self.source, TableSource):
            return self.unreadable
        sequence = found.get(self.source.sequence)
        if sequence is None or sequence["cache"] is None:
            return f"the sequence of {stream} was dropped: remove the stream, or add it again with another one."
        return _unfit_sequence(sequence, stream) or self.unreadable

    @property
    def fork(self) -> Fork | None:
        """Why there is no position until the watch begins again."""
        if self.file_replaced:
            return Fork("sequence_changed")  # whether it begins again is seen from its table
        return Fork("ids_went_back") if self.watch.went_back else None

    def check_file(self, file: int | None) -> bool:
        """Compare the sequence's file with the one in which the published positions hold; True where it is another."""
        if self.file is not None and file != self.file:
            self.file_replaced = self.stale = True
        return self.file_replaced

    def feed(self, value: SequenceValue, given_out: int, listed: Iterable[Mapping[str, Any]], now: float) -> None:
        """One poll of a sequence-fed stream; `listed` are the rows of the query horizon_holders that concern it."""
        assert self.locks is not None
        self._note_foreign_reservations(value.last_value)
        holds: list[Hold] = []
        self._holders = {}
        for row in listed:
            prepared, bound = row["pid"] is None, row["bound"]
            key = row["holder"] if bound is None else f"{row['pid'] or row['holder']}:{bound}"
            holds.append(Hold(key=key, writer=row["application_name"], prepared=prepared, bound=bound))
            self._holders[key] = holder_of(row, _kind(prepared=prepared, reserved=bound is not None), bound)
        self._since = {key: self._since.get(key, now) for key in self._holders}
        if holds:
            self.last_row = None  # their rows may come without another id being taken: look again
        self.stale = True
        self.locks.feed(given_out, value.inserted, holds, self.writers)

    def reading(self, now: float, stuck_after: float) -> Reading:
        """The reading after this poll."""
        watch, fork = self.watch, self.fork
        position = watch.position if fork is None else None
        per_writer = dict(watch.per_writer) if position is not None else {}
        last_value = self.locks.last_value if self.locks is not None else None
        return Reading(
            position=position,
            per_writer=MappingProxyType(per_writer),
            maximum=None if position is None else max([position, *per_writer.values()]),
            last_value=last_value,
            held_by=self._held_by(),
            fork=fork,
            refused=self.refused,
            alarms=self._alarms(now, stuck_after),
        )

    def _held_by(self) -> Holder | None:
        if self.blocked_by is not None:
            return self.blocked_by
        lowest = self.watch.lowest
        if lowest is None:
            return None
        if self.table is not None:
            return Holder(HolderKind.WRITER, application_name=lowest, bound=self.table.position)
        return self._holders.get(lowest)

    def _note_foreign_reservations(self, last_value: int) -> None:
        """Find reservations that are not ours: the bound of a real reservation is at most the present last value."""
        self._foreign = tuple(
            f"stream {self.name}: pid {holder.pid} ({holder.application_name}) holds an advisory lock in the band of "
            f"the reservations with bound {holder.bound}, which the sequence has not reached: the lock is not one of "
            "ours, or the sequence was set back."
            for holder in self._holders.values()
            if holder.bound is not None and holder.bound > last_value
        )

    def _alarms(self, now: float, stuck_after: float) -> tuple[str, ...]:
        lowest = self.watch.lowest
        since = self._since.get(lowest, now) if lowest is not None else now
        holder = self._holders.get(lowest) if lowest is not None else None
        if holder is None or now - since < stuck_after:
            return self._foreign
        if holder.gid is not None:
            stuck = (
                f"stream {self.name}: prepared transaction '{holder.gid}' holds the position back: "
                f"COMMIT PREPARED or ROLLBACK PREPARED it."
            )
        else:
            stuck = (
                f"stream {self.name}: pid {holder.pid} ({holder.application_name}) holds the position back: "
                f"end its transaction, or SELECT pg_terminate_backend({holder.pid})."
            )
        return (*self._foreign, stuck)


def holder_of(row: Mapping[str, Any], kind: HolderKind, bound: int | None = None) -> Holder:
    """The holder that a row of the list describes."""
    return Holder(
        kind=kind,
        pid=row["pid"],
        application_name=row["application_name"],
        age_s=row["age"],
        query=row["query"],
        gid=row["gid"],
        bound=bound,
    )


def _kind(*, prepared: bool, reserved: bool) -> HolderKind:
    if prepared:
        return HolderKind.PREPARED
    return HolderKind.RESERVATION if reserved else HolderKind.TRANSACTION


def _unfit_table(table: Mapping[str, Any], stream: str, *, ours: bool) -> str | None:
    """`ours`: our own role reads it."""
    name, role = table["name"], table["role"]
    if table["persistence"] != "p":
        return f"table {name} of {stream} is not logged, a crash empties it: ALTER TABLE {name} SET LOGGED."
    if ours and not table["reachable"]:
        return (
            f"table {name} of {stream} is in a schema that we may not use: "
            f"GRANT USAGE ON SCHEMA {table['schema']} TO {role}."
        )
    if ours and not table["readable"]:
        return f"table {name} of {stream} may not be read: GRANT SELECT ON {name} TO {role}."
    return None


def _unfit_sequence(sequence: Mapping[str, Any], stream: str) -> str | None:
    name = sequence["name"]
    if sequence["cache"] > 1:
        return (
            f"sequence {name} of {stream} hands out ids in batches of {sequence['cache']}, so low ids turn up late: "
            f"ALTER SEQUENCE {name} CACHE 1."
        )
    if sequence["increment"] < 1:
        return f"sequence {name} of {stream} runs downwards: ALTER SEQUENCE {name} INCREMENT BY 1."
    if sequence["cycle"]:
        return f"sequence {name} of {stream} begins again at its end: ALTER SEQUENCE {name} NO CYCLE."
    if sequence["persistence"] != "p":
        return f"sequence {name} of {stream} is not logged, a crash sets it back: ALTER SEQUENCE {name} SET LOGGED."
    if not sequence["readable"]:
        role, owner = sequence["role"], sequence["owner"]
        grant = f"GRANT SELECT ON SEQUENCE {name} TO {role}"
        if owner is not None:  # a stream's table is read as its owner, so membership is what the daemon had
            grant = f"role {role} is no member of role {owner}, its owner: GRANT {owner} TO {role} (or {grant})"
        return f"sequence {name} of {stream} may not be read: {grant}."
    return None
