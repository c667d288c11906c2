"""The state of streams for an operator: position, waiting rows, the transaction that holds it back, and problems.

It joins three views: the registry, what running daemons have published and report, and what Postgres shows at
this moment. A stream that cannot be looked at costs the others nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import trio

from replicad.errors import DatabaseError, DatabaseUnavailable, SchemaMissing, StandbyRefused, StreamRefused
from replicad.positions.horizon import Holder, HolderKind, Horizon, Reading
from replicad.postgres.bridge import Database
from replicad.postgres.statements import statement
from replicad.streams.daemons import DaemonReports, Reported
from replicad.streams.picture import STARTING, StreamPicture
from replicad.streams.queries import SCHEMA, Impatient, is_locked
from replicad.streams.registry import Method, Published, Registry, Stream, horizon_source, row_source
from replicad.terminal.failures import as_commands

OK = "ok"
NO_DAEMON = "no_daemon"  # rows wait, and no daemon is connected that could send them
STALLED = "stalled"  # rows wait, a daemon is connected, and no trouble is reported
IDS_AHEAD = "ids_ahead"  # rows have ids that the sequence has not reached
UNRECORDED = "changes_missed"  # changes of a table may not be in its stream
LOCKED = "locked"  # the table cannot be read
SETTLED = 5.0  # seconds without a change of the position, with rows waiting, before it is checked a second time
SECOND_LOOK = 2.5  # seconds until that check; a daemon notes its positions every second

LOADED = 1 << 40  # ids above the sequence's last value that a bulk load can have brought; more were made by a program
_LAST_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Overview:
    """All streams, and general remarks: what could not be read, or that no daemon is connected."""

    streams: tuple[StreamPicture, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The readings for all streams together."""

    published: Mapping[str, Published]
    readings: Mapping[str, Reading]
    whole: DatabaseError | None  # why there are no readings
    lockers: Mapping[int, Holder]
    reported: Mapping[str, Sequence[Reported]]
    daemon: bool
    viewer: (
        str | None
    )  # the role of this session, if it could not serve streams: its rights are no matter of the streams
    now: datetime

    def hides(self, stream: Stream) -> bool:
        """Whether this session may not see for itself; then what daemons publish is all that is known."""
        return self.viewer is not None and stream.denied is not None


async def overview(db: Database, *, schema: str = SCHEMA) -> Overview:
    """All streams by name.

    Raises:
        SchemaMissing: streams are not installed in this database.
    """
    look = _Look(db, schema)
    return await look.at(list((await look.registry.load_streams()).values()))


async def show(db: Database, name: str, *, schema: str = SCHEMA) -> StreamPicture:
    """One stream. Raises UnknownStream besides what `overview` raises."""
    look = _Look(db, schema)
    return (await look.at([await look.registry.load_stream(name)])).streams[0]


class _Look:
    """A look at streams of one database, on queries that give up where a table is locked."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self._looks = Impatient(db)
        self.registry = Registry(self._looks, schema)

    async def at(self, streams: list[Stream]) -> Overview:
        """These streams."""
        seen, notes = await self._see(streams)
        found = [await self._status(stream, seen) for stream in streams]
        if any(map(_may_be_stuck, found)):
            found = await self._look_again(found)
        return Overview(tuple(found), notes)

    async def _see(self, streams: list[Stream]) -> tuple[_Seen, tuple[str, ...]]:
        notes: list[str] = []
        published = await self.registry.published()
        lockers = await self._lockers(streams)
        readings: Mapping[str, Reading] = {}
        whole: DatabaseError | None = None
        viewer: str | None = await self._looks.fetch_value(statement("stream_viewer", self._schema))
        hidden = [stream.name for stream in streams if viewer is not None and stream.denied is not None]
        if hidden:
            notes.append(
                f"role {viewer} may look at streams, and not read the tables of {len(hidden)} of them: "
                "what daemons publish is shown, and neither waiting rows nor what holds a stream back"
            )
        try:
            readings = await self._poll([stream for stream in streams if stream.name not in hidden], published)
        except DatabaseUnavailable:
            raise
        except (StandbyRefused, DatabaseError) as error:
            whole = error
        reported: dict[str, list[Reported]] = defaultdict(list)
        try:
            for one in await DaemonReports(self._looks, self._schema).troubles():
                if one.kind == "stream":
                    reported[one.name].append(one)
                elif one.kind == "database":
                    for stream in streams:
                        reported[stream.name].append(one)
        except (DatabaseError, SchemaMissing) as error:
            if isinstance(error, DatabaseUnavailable):
                raise
            notes.append(f"the troubles that daemons report cannot be shown: {error}")
        daemon = await self.registry.daemon_connected()
        if not daemon:
            notes.append("no daemon is connected to this database; start one with `replicad serve`")
        now = await self._looks.fetch_value("SELECT clock_timestamp()")
        return _Seen(published, readings, whole, lockers, reported, daemon, viewer, now), tuple(notes)

    async def _poll(self, streams: list[Stream], published: Mapping[str, Published]) -> Mapping[str, Reading]:
        async with Horizon(self._db) as horizon:
            for stream in streams:
                if stream.fault is None:
                    last = published.get(stream.name) if stream.continues else None
                    horizon.watch(
                        stream.name,
                        horizon_source(stream),
                        published=last.position if last else None,
                        per_writer=last.per_writer if last else None,
                        writers=stream.writers,
                    )
            return await horizon.poll()

    async def _lockers(self, streams: Iterable[Stream]) -> dict[int, Holder]:
        """The sessions that lock tables of these streams against readers, by the table's oid; the oldest of several."""
        rows = await self._looks.fetch(
            statement("stream_lockers", self._schema), [stream.table_oid for stream in streams]
        )
        found: dict[int, Holder] = {}
        for row in rows:
            kind = HolderKind.PREPARED if row["pid"] is None else HolderKind.TRANSACTION
            holder = Holder(kind, row["pid"], row["application_name"], row["age"], row["query"], row["gid"])
            found.setdefault(row["watched"], holder)
        return found

    async def _status(self, stream: Stream, seen: _Seen) -> StreamPicture:
        reading = seen.readings.get(stream.name) or Reading()
        last = seen.published.get(stream.name) if stream.continues else None
        position = last.position if last else None
        locker = seen.lockers.get(stream.table_oid)
        state, problem = _problem(stream, reading, seen)
        waiting: int | None = None
        if stream.fault is None and stream.denied is None and locker is None:
            try:
                waiting = await self._count(stream, position)
            except DatabaseUnavailable:
                raise
            except DatabaseError as error:
                if not is_locked(error):
                    state, problem = (state, problem) if problem else (error.code, str(error))
                else:
                    locker = Holder(HolderKind.TRANSACTION)
        if locker is not None and problem is None:
            state, problem = LOCKED, f"table {stream.table} is locked by another session, so its rows cannot be read"
        held_by = locker or reading.held_by
        if problem is None and waiting and held_by is None:
            state, problem = await self._ids_ahead(stream)
        if problem is None and seen.daemon and position is None and stream.positions_table is not None:
            state = STARTING
            problem = f"no writer has published a position in {stream.positions_table} yet, so no row is sent"
        if problem is None and not seen.daemon and (waiting or seen.hides(stream)):
            rows = "rows wait" if waiting else "rows may wait, which this role cannot see"
            state = NO_DAEMON
            problem = f"{rows}, and no daemon is connected that could send them: start `replicad serve`"
        return StreamPicture(
            stream=stream,
            position=position,
            per_writer=last.per_writer if last else {},
            published_at=last.at if last else None,
            horizon=reading.position,
            last_value=reading.last_value,
            lag_rows=waiting,
            lag_seconds=_lag_seconds(stream, waiting, held_by, last, seen),
            held_by=held_by,
            state=state,
            problem=None if problem is None else as_commands(problem),
        )

    async def _count(self, stream: Stream, position: int | None) -> int:
        """The number of committed rows after the position; all retained rows if nothing was published."""
        after = position if position is not None else stream.trimmed_upto
        # to the end of the table, not to last_value: ids may have been handed out since it was read
        source = row_source(stream, self._schema)
        return await source.count(self._looks, -_LAST_ID if after is None else after, _LAST_ID)

    async def _ids_ahead(self, stream: Stream) -> tuple[str, str | None]:
        """Rows with ids above the sequence's last value, which a writer chose: they wait for the sequence."""
        if stream.method is not Method.LOCK_WATCH or stream.sequence_oid is None:
            return OK, None
        try:
            ends = await row_source(stream, self._schema).ends(self._looks, -_LAST_ID, _LAST_ID)
            # Read after the rows: every id that was taken from the sequence is at or below it.
            last = await self._looks.fetch_value("SELECT pg_sequence_last_value($1::oid)", stream.sequence_oid)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:  # only this stream is concerned; the others are listed
            return (OK, None) if is_locked(error) else (error.code, str(error))
        if ends is None or ends[1] <= (last or 0):
            return OK, None
        found = (
            f"the table has ids up to {ends[1]}, and its sequence stands at {last or 0}: rows above it are sent when "
            "the sequence gets there. "
        )
        if not stream.fed or ends[1] - (last or 0) > LOADED:
            return IDS_AHEAD, (
                f"{found}Programs seem to make ids, or to keep some of the sequence for later: give the rows a column "
                'of their own for the order, and add the stream with it (docs/positions.md, "Ids that programs make")'
            )
        return IDS_AHEAD, (
            f"{found}Writers must take ids from the column's default; after a bulk load with ids of its own "
            f"set the sequence: SELECT setval('{stream.sequence}', {ends[1]})"
        )

    async def _look_again(self, found: list[StreamPicture]) -> list[StreamPicture]:
        """Check a second time whether positions move: a row that was just committed looks like a row that is stuck."""
        stuck = {status.name for status in found if _may_be_stuck(status)}
        before = {status.name: status.position for status in found}
        deadline = trio.current_time() + SECOND_LOOK
        published: Mapping[str, Published] = {}
        while stuck and trio.current_time() < deadline:
            await trio.sleep(0.25)
            published = await self.registry.published()
            stuck = {name for name in stuck if name not in published or published[name].position == before[name]}
        result = []
        for status in found:
            name = status.name
            if name in stuck:
                why = "rows wait, the position does not move, and no daemon reports why: see the daemons' logs"
                result.append(replace(status, state=STALLED, problem=why))
            elif _may_be_stuck(status):
                last = published[name]
                waiting = await self._count(status.stream, last.position)
                result.append(
                    replace(
                        status,
                        position=last.position,
                        per_writer=last.per_writer,
                        published_at=last.at,
                        lag_rows=waiting,
                        lag_seconds=0.0,
                    )
                )
            else:
                result.append(status)
        return result


def _problem(stream: Stream, reading: Reading, seen: _Seen) -> tuple[str, str | None]:
    """The state of a stream before its rows are counted: the registry's fault first, then what daemons report."""
    if stream.fault is not None:
        return StreamRefused.code, stream.fault
    if seen.whole is not None:
        return seen.whole.code, str(seen.whole)
    if stream.denied is not None and not seen.hides(stream):
        return "denied", stream.denied
    if reading.refused is not None:
        return StreamRefused.code, str(reading.refused)
    found = seen.reported.get(stream.name, ())
    if not found:
        return (OK, None) if stream.unrecorded is None else (UNRECORDED, stream.unrecorded)
    return found[0].code, " Also: ".join(dict.fromkeys(one.reason for one in found))


def _lag_seconds(
    stream: Stream, waiting: int | None, held_by: Holder | None, last: Published | None, seen: _Seen
) -> float | None:
    """How long rows may have been waiting: since the position or its obstacle last changed, the later of the two. None:
    it cannot be seen whether rows wait.
    """
    if waiting is None and seen.hides(stream):
        return None
    if waiting == 0:
        return 0.0
    since = last.at if last is not None else stream.created_at
    if reported := seen.reported.get(stream.name):
        since = max(since, min(one.since for one in reported))
    age = (seen.now - since).total_seconds()
    if not reported and held_by is not None and held_by.age_s is not None:
        age = min(age, held_by.age_s)
    return max(age, 0.0)


def _may_be_stuck(status: StreamPicture) -> bool:
    """Whether rows wait although no problem is known and the position has not changed for SETTLED seconds."""
    could_move = status.horizon is not None and (status.position is None or status.position < status.horizon)
    return status.state == OK and bool(status.lag_rows) and could_move and (status.lag_seconds or 0) > SETTLED
