"""`replicad top` and `replicad status`: streams, tubes and daemons with their problems, live and once.

An `Island` is one database as operators look at it, again and again: its tubes, its streams, its daemons. `render`
makes lines for a terminal of any width out of the pictures of databases, and does no I/O.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from replicad.beats import BeatWatch
from replicad.config.declaring import SECONDS
from replicad.config.settings import DatabaseSettings, colour_allowed, read_settings
from replicad.daemon.figures import StateView
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, SchemaMissing, SchemaTooNew
from replicad.terminal.command import ReplicadCommand, ValueType, database_options, json_option, option
from replicad.terminal.database import database_url, run_async
from replicad.terminal.failures import DONE, exit_of
from replicad.terminal.output import as_json_line, echo, table
from replicad.tubes.cli.islands import island_options

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.streams.daemons import Reported
    from replicad.streams.picture import StreamPicture

WIDE = 1000  # columns of an output that is no terminal: nothing is cut

STATE = 24  # characters that the state has at least
SHORT_STATE = 15  # of a daemon: `silent for 47 s`
NARROW = 20  # characters of a name, where lines are too long all the same
CUT = "..."


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """One look. `tubes` has a row for each partition, `streams` one for each stream, `remarks` are sentences."""

    name: str
    tubes: Sequence[Row] = ()
    streams: Sequence[Row] = ()
    daemons: Sequence[Row] = ()  # one for each daemon that has reported itself
    connected: int | None = None  # daemons by their sessions; None: unknown
    remarks: Sequence[str] = ()
    unusable: DatabaseError | None = None  # why the tubes of this database cannot be read at all
    error: DatabaseError | None = None  # why this look failed
    server: str = ""


@dataclass(slots=True)
class Island:
    """One database. It remembers the counts of the last look, for rates, and the beats of leases.

    `warn`: seconds from which waiting is marked.
    """

    settings: DatabaseSettings
    warn: float
    longest_gap: float = 5.0  # seconds between two looks that count for a beat
    url: str = ""
    _before: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    _beats: BeatWatch[int] | None = None

    async def look(self) -> Picture:
        """A picture of the present moment. If the database cannot be read, one row with the reason."""
        from replicad.postgres.bridge import open_database

        try:
            async with open_database(self.url, size=1, application_name="replicad top", connect_timeout=5) as db:
                return await self._picture(db)
        except DatabaseError as error:
            unusable = error if isinstance(error, SchemaMissing | SchemaTooNew) else None
            row = {"kind": "partition", "tube": None, "state": str(error), "wrong": True}
            return Picture(self.settings.shown, [row], unusable=unusable, error=error)

    async def _picture(self, db: Database) -> Picture:
        from replicad.postgres import schema
        from replicad.postgres.statements import load_sql, statement
        from replicad.tubes.cli.islands import tube_states
        from replicad.tubes.serving.leases import LEASE_EXPIRED

        tube_schema, stream_schema = self.settings.tube_schema, self.settings.stream_schema
        await schema.require(db, "tube", tube_schema)
        faults = await tube_states(db, tube_schema, stream_schema, without=(LEASE_EXPIRED,))
        found = await db.fetch(statement("tube_top", tube_schema))
        server = (await db.fetch(load_sql("doctor_server")))[0]
        streams, reported, remarks = await self._streams(db)
        daemons, unseen = await self._daemons(db)
        now, clock = time.monotonic(), await db.fetch_value("SELECT clock_timestamp()")
        silent = self._silent(found, reported, now, clock)
        rows = [self._row(dict(row), now, faults.get(row["tube"]), silent) for row in found]
        self._before = {row["tube"]: (now, row["moved_in"] or 0, row["moved_out"] or 0) for row in found}
        return Picture(
            str(db.target), rows, streams, daemons, server["daemons"], [*remarks, *unseen], server=server["version"]
        )

    async def _streams(self, db: Database) -> tuple[list[Row], Sequence[Reported], list[str]]:
        """The rows of streams, what daemons report, and sentences. Without the streams' SQL: none."""
        from replicad.streams import status
        from replicad.streams.daemons import DaemonReports

        try:
            overview = await status.overview(db, schema=self.settings.stream_schema)
            reported = await DaemonReports(db, self.settings.stream_schema).troubles()
        except DatabaseUnavailable:
            raise
        except SchemaMissing:
            return [], (), []
        except DatabaseError as error:
            return [], (), [f"the streams cannot be shown: {error}"]
        remarks = [f"{one.kind} {one.name}: {one.reason}" for one in reported if one.kind not in ("stream", "tube")]
        return [self._stream(one) for one in overview.streams], reported, list(dict.fromkeys(remarks))

    async def _daemons(self, db: Database) -> tuple[list[Row], list[str]]:
        """The rows of daemons, by name, and sentences. Without the streams' SQL: none."""
        from replicad.streams.daemons import DAEMON_COLUMNS, DaemonReports

        try:
            found = await DaemonReports(db, self.settings.stream_schema).daemons()
        except DatabaseUnavailable:
            raise
        except SchemaMissing:
            return [], []
        except DatabaseError as error:
            return [], [f"the daemons cannot be listed: {error}"]
        rows = [
            {
                "kind": "daemon",
                "tube": None,
                **DAEMON_COLUMNS.fields(StateView.TOP_JSON, one),
                "state": one.state,
                "wrong": not one.alive,
            }
            for one in found
        ]
        return rows, []

    def _stream(self, one: StreamPicture) -> Row:
        from replicad.streams.picture import COLUMNS
        from replicad.terminal.holders import who

        trouble = [] if one.problem is None else [f"{one.state}: {one.problem}"]
        holder = one.held_by
        if holder is not None and (holder.age_s or 0) > self.warn:
            trouble.append(f"held back for {holder.age_s:.0f} s by {who(holder)}")
        elif one.lag_rows and (one.lag_seconds or 0) > self.warn and not trouble:
            trouble.append("late")
        return {
            "kind": "stream",
            "tube": None,
            **COLUMNS.fields(StateView.TOP_JSON, one),
            "state": ", ".join(trouble) or "ok",
            "wrong": bool(trouble),
        }

    def _silent(
        self, rows: Sequence[Any], reported: Sequence[Reported], now: float, clock: datetime
    ) -> Mapping[int, float]:
        """For how many seconds each beat has not changed: as seen here, and as daemons have seen it for longer."""
        from replicad.tubes.serving.leases import LEASE_EXPIRED

        if self._beats is None:
            self._beats = BeatWatch(self.longest_gap)
        silent = self._beats.observe({row["beat"] for row in rows if row["beat"] is not None}, now)
        since = {(one.name, one.cause): one.since for one in reported if one.code == LEASE_EXPIRED}
        for row in rows:
            began = since.get((row["tube"], row["lease"]))
            if began is not None:
                told = max(0.0, (clock - began).total_seconds()) + row["ttl"]
                silent[row["beat"]] = max(silent.get(row["beat"], 0.0), told)
        return silent

    def _row(self, row: Row, now: float, fault: str | None, silent: Mapping[int, float]) -> Row:
        from replicad.tubes.picture import PARTITION_COLUMNS, PartitionPicture

        moved_in, moved_out = row.pop("moved_in") or 0, row.pop("moved_out") or 0
        beat, ttl, _ = row.pop("beat"), row.pop("ttl"), row.pop("lease")
        then, came, went = self._before.get(row["tube"], (now, moved_in, moved_out))
        seconds = max(now - then, 0.001)
        dead = beat is not None and silent.get(beat, 0.0) >= ttl
        trouble = [] if fault is None else [fault]
        if dead:
            trouble.append(f"silent for {silent[beat]:.0f} s")
        elif row["pods"] and row["holder"] is None:
            trouble.append("no reader")
        if row["backfill_pods"] and (dead or row["holder"] is None):
            trouble.append("no reader for the backfill")
        if (row["lag_s"] or 0) > self.warn:
            trouble.append("late")
        if row["parked"]:
            trouble.append("parked")
        if (row["writer_s"] or 0) > self.warn:
            trouble.append(f"held back for {row['writer_s']:.0f} s by {row['writer']}")
        row["report"] = json.loads(row["report"] or "null")
        row |= {"in_s": (moved_in - came) / seconds, "out_s": (moved_out - went) / seconds}
        picture = PartitionPicture(
            tube=row["tube"],
            partition=row["partition"],
            holder=row["holder"],
            silent_s=None if beat is None else silent.get(beat),
            pods=row["pods"],
            age_s=row["lag_s"],
            backfill_pods=row["backfill_pods"],
            backfill_age_s=row["backfill_lag_s"],
            parked=row["parked"],
            row=row,
        )
        return {
            "kind": "partition",
            **PARTITION_COLUMNS.fields(StateView.TOP_JSON, picture),
            "state": ", ".join(trouble) or "ok",
            "wrong": bool(trouble),
        }


@click.command("top", cls=ReplicadCommand, short_help="Watch streams, tubes and daemons live, with their problems.")
@option("--once", is_flag=True, help="Print once and end. This is the default if the output is not a terminal.")
@option(
    "--interval",
    type=ValueType(SECONDS, 0.2, 3600),
    default="2",
    show_default=True,
    help="Time between two looks.",
)
@option(
    "--warn",
    type=ValueType(SECONDS),
    default="60",
    show_default=True,
    help="Mark rows and pods that have waited for longer than this.",
)
@json_option
@island_options
def command(once: bool, interval: float, warn: float, as_json: bool, **options: Any) -> int:
    """Watch the streams, every partition of every tube, and the daemons.

    lag_s is the age of the oldest regular pod, or how long rows of a stream may have been waiting. in_s and out_s are
    the pods of the whole tube per second since the last look. A partition is marked if its worker is silent for longer
    than its lease, as a daemon or this command has seen it; if pods, or pods of a backfill, wait and no worker has the
    lease; if its lag is above --warn; if a transaction that is open for longer than --warn holds its tube back; if ids
    are parked; and if its tube cannot be served or a daemon reports a trouble of it. A stream is marked if it cannot be
    served, or waits. An island that cannot be reached is shown as such and tried again; with --once, and if none can,
    the exit status says why. Below the tables are the daemons, their own troubles, and the last counts that a reader of
    each tube has reported, such as the last micro-batch of a pipeline. Columns for which the terminal is too narrow are
    left out.
    """
    once = once or as_json or not sys.stdout.isatty()
    with ExitStack() as stack:
        islands = []
        for url in options.get("database") or (None,):
            settings = read_settings(DatabaseSettings, {**options, "database": url})
            island = Island(settings, warn, longest_gap=interval + 5)
            island.url = stack.enter_context(database_url(settings))
            islands.append(island)
        error = run_async(partial(_watch, islands, once, interval, as_json))
    return DONE.status if error is None else exit_of(type(error)).status


async def _watch(islands: Sequence[Island], once: bool, interval: float, as_json: bool) -> ReplicadError | None:
    """Watch until Ctrl-C. With `once`: look once, and return why the first island cannot be shown, if none can."""
    import trio

    with trio.open_signal_receiver(signal.SIGWINCH) as resized:
        while True:
            pictures = [await island.look() for island in islands]
            error = pictures[0].unusable
            if error is not None and all(one.unusable for one in pictures):
                raise error
            if as_json:
                _print_json(pictures)
            else:
                show(pictures, live=not once)
            if once:
                return pictures[0].error if all(one.error for one in pictures) else None
            with trio.move_on_after(interval):
                async for _ in resized:
                    show(pictures, live=True)


def _print_json(pictures: Sequence[Picture]) -> None:
    """A row for each partition, stream and daemon; with several islands each names its own."""
    for one in pictures:
        for row in (*one.tubes, *one.streams, *one.daemons):
            island: Mapping[str, Any] = {"island": one.name} if len(pictures) > 1 else {}
            echo(as_json_line({**island, **row}))


def show(pictures: Sequence[Picture], *, live: bool, heading: Sequence[str] = ()) -> None:
    """Print the pictures. `live`: on the whole of the terminal, as it is now."""
    size = shutil.get_terminal_size()
    lines = render(pictures, size.columns if sys.stdout.isatty() else WIDE)
    if live:
        title = time.strftime("replicad top  %H:%M:%S   (Ctrl-C ends it)")
        lines = [Line(title[: size.columns]), Line(""), *lines]
        if not is_dumb():
            if len(lines) >= size.lines:
                more = len(lines) - size.lines + 2
                lines = [*lines[: max(0, size.lines - 2)], Line(f"and {more} lines more")]
            click.clear()
    colour = colour_allowed() and not is_dumb()
    for line in (*map(Line, heading), *lines):
        echo(line.text, fg="red" if line.wrong and colour else None)


def is_dumb() -> bool:
    """Whether the terminal knows no colours and cannot be cleared: pictures then follow one another."""
    return os.environ.get("TERM", "") in ("dumb", "")


@click.command("status", cls=ReplicadCommand, short_help="Show the database, daemons, streams and tubes once.")
@json_option
@database_options
def status(as_json: bool, **options: Any) -> int:
    """Show the name of the database, the daemons that serve it, and all streams and tubes with their problems.

    It is `replicad top --once` with the server's version. `replicad doctor` checks more, and says what to do. If the
    database cannot be used, the exit status says why (docs/command-line.md). --json prints one object.
    """
    settings = read_settings(DatabaseSettings, options)
    with database_url(settings) as url:
        picture = run_async(Island(settings, 60.0, url=url).look)
    if picture.unusable is not None:
        raise picture.unusable
    if as_json:
        fields = {
            "database": picture.name,
            "version": picture.server or None,
            "connected": picture.connected,
            "daemons": list(picture.daemons),
            "remarks": list(picture.remarks),
            "streams": list(picture.streams),
            "tubes": list(picture.tubes),
        }
        echo(as_json_line(fields))
    else:
        version = f" (PostgreSQL {picture.server})" if picture.server else ""
        show([picture], live=False, heading=[f"database: {picture.name}{version}", ""])
    return DONE.status if picture.error is None else exit_of(type(picture.error)).status


class Line(NamedTuple):
    """A line, and whether something is wrong."""

    text: str
    wrong: bool = False


def render(pictures: Sequence[Picture], width: int) -> list[Line]:
    """Everything, in lines of at most `width` characters. States that do not fit follow in full."""
    from replicad.streams.daemons import DAEMON_COLUMNS
    from replicad.streams.picture import COLUMNS
    from replicad.tubes.picture import PARTITION_COLUMNS

    several = len(pictures) > 1
    lines: list[Line] = []
    for columns, room, rows in (
        (COLUMNS, STATE, [(one, row) for one in pictures for row in one.streams]),
        (PARTITION_COLUMNS, STATE, [(one, row) for one in pictures for row in one.tubes]),
        (DAEMON_COLUMNS, SHORT_STATE, [(one, row) for one in pictures for row in one.daemons]),
    ):
        shown = [
            {**row, **_about(row), "backfill": backfill(row), "island": one.name if several else None}
            for one, row in rows
        ]
        headings = [*(["island"] if several else []), *columns.headings(StateView.TOP, shown), "state"]
        if shown:
            lines += [*_fitted(headings, [*columns.spare(StateView.TOP), "island"], shown, width, room), Line("")]
        elif columns is PARTITION_COLUMNS:
            lines += [*_wrapped("there are no tubes yet: make one with `replicad tubes create`", width), Line("")]
    for one in pictures:
        of = f" of {one.name}" if several else ""
        if one.connected is not None:
            lines += _wrapped(f"daemons{of}: {one.connected or 'none'} connected", width, wrong=not one.connected)
        for remark in one.remarks:
            lines += _wrapped(remark, width, wrong=True)
    reports = {(one.name, row["tube"]): row for one in pictures for row in one.tubes if row.get("report")}
    for row in reports.values():
        lines += _wrapped(_report(row), width)
    return lines


def _about(row: Row) -> Row:
    """Values that are shown otherwise than in JSON: of daemons the pid (it counts nothing), the start, and the age of
    the last beat. Numbers of pods and ids that are estimates are marked with ~.
    """
    if row.get("kind") == "daemon":
        since = str(row["started_at"])[:16].replace("T", " ")
        return {"pid": str(row["pid"]), "since_utc": since, "beat_s": row["silent_s"]}
    if not row.get("estimated"):
        return {}
    return {name: f"~{row[name]:,}" for name in ("pods", "ids")}


def _fitted(columns: Sequence[str], spare: Sequence[str], rows: Sequence[Row], width: int, room: int) -> Iterator[Line]:
    """The table, with the columns for which there is room beside `room` characters of the state. `spare`: columns that
    may be left out, in this order.
    """
    left = list(columns)
    drop = [one for one in spare if one in left]
    lines = table(left, rows).split("\n")
    while lines[0].rindex("state") + room > width and drop:
        left.remove(drop.pop(0))
        lines = table(left, rows).split("\n")
    if lines[0].rindex("state") + room > width:
        rows = [
            {**row, **{one: _short(row.get(one)) for one in ("tube", "stream", "holder", "daemon", "address")}}
            for row in rows
        ]
        lines = table(left, rows).split("\n")
    yield Line(_cut(lines[0], width))
    for line, row in zip(lines[1:], rows, strict=True):
        yield Line(_cut(line, width), bool(row["wrong"]))
    full = dict.fromkeys(
        f"{_name(row)}: {row['state']}" for line, row in zip(lines[1:], rows, strict=True) if len(line) > width
    )
    for sentence in full:
        yield from _wrapped(sentence, width, wrong=True)


def _name(row: Row) -> str:
    if row.get("stream"):
        return f"stream {row['stream']}"
    if row.get("daemon"):
        return f"daemon {row['daemon']}"
    return f"tube {row['tube']}" if row.get("tube") else str(row.get("island") or "database")


def _short(value: object) -> object:
    return f"{value[: NARROW - len(CUT)]}{CUT}" if isinstance(value, str) and len(value) > NARROW else value


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - len(CUT))] + CUT


def _wrapped(text: str, width: int, *, wrong: bool = False) -> list[Line]:
    return [Line(one, wrong) for one in textwrap.wrap(" ".join(text.split()), max(width, 20), subsequent_indent="  ")]


def _report(row: Row) -> str:
    """The last REPORT of a reader of a tube, with all its counts."""
    counts = ", ".join(f"{name} {_count(value)}" for name, value in row["report"].items() if value is not None)
    return f"{row['tube']}: {row['reporter']} reported {max(row['report_s'], 0):.0f} s ago: {counts}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)


def backfill(row: Row) -> str | None:
    """The progress of a backfill: ids written of all ids, and pods that wait."""
    done, total, waiting = row.get("backfill_done"), row.get("backfill_of"), row.get("backfill_pods")
    if done is not None:
        share = f" of {total:,}" if total else ""
        return f"{done:,}{share} ids in, {waiting or 0:,} pods wait"
    return f"{waiting:,} pods wait" if waiting else None
