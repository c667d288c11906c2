"""`replicad top`: every partition of every tube, live; a row is coloured if something is wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from replicad.config.settings import DatabaseSettings, colour_allowed, read_settings
from replicad.errors import DatabaseError, SchemaMissing, SchemaTooNew
from replicad.terminal.command import ReplicadCommand, json_option, option
from replicad.terminal.database import database_url
from replicad.terminal.output import as_json_line, echo, table
from replicad.tubes.cli.islands import island_options

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

Row = dict[str, Any]
COLUMNS = ("tube", "partition", "holder", "pods", "ids", "lag_s", "backfill", "parked", "in_s", "out_s", "state")


@click.command("top", cls=ReplicadCommand, short_help="Watch the tubes live: holders, lag, backfills, rates.")
@option("--once", is_flag=True, help="Print once and end. This is the default if the output is not a terminal.")
@option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    show_default=True,
    help="Time between two looks.",
)
@option(
    "--warn",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Mark a partition whose oldest regular pod is older than this.",
)
@json_option
@island_options
def command(once: bool, interval: float, warn: float, as_json: bool, **options: Any) -> None:
    """Watch every partition of every tube.

    lag_s is the age of the oldest regular pod. in_s and out_s are the pods of the whole tube per second since the last
    look. A partition is marked if pods wait and no worker has its lease; if its lag is above --warn; if a transaction
    that is open for longer than --warn holds its tube back; if ids are parked; and if its tube cannot be served or a
    daemon reports a trouble of it. An island that cannot be reached is shown as such and tried again. Below the table
    are the last counts that a reader of each tube has reported, such as the last micro-batch of a pipeline.
    """
    import trio

    trio.run(_watch, options, once or as_json or not sys.stdout.isatty(), interval, warn, as_json)


async def _watch(options: Mapping[str, Any], once: bool, interval: float, warn: float, as_json: bool) -> None:
    import trio

    urls: Sequence[str | None] = options.get("database") or (None,)
    async with AsyncExitStack() as stack:
        islands = [Island(read_settings(DatabaseSettings, {**options, "database": url}), warn) for url in urls]
        for island in islands:
            island.url = stack.enter_context(database_url(island.settings))
        while True:
            rows = [row for island in islands for row in await island.look()]
            if (error := islands[0].unusable) is not None and all(island.unusable for island in islands):
                raise error
            if len(islands) == 1:
                for row in rows:
                    del row["island"]
            if as_json:
                for row in rows:
                    echo(as_json_line(row))
            else:
                _show(rows, clear=not once)
            if once:
                return
            await trio.sleep(interval)


class Island:
    """One database: its pool, which is opened again when it was lost, and the counts of the last look, for rates."""

    def __init__(self, settings: DatabaseSettings, warn: float) -> None:
        self.settings = settings
        self.url = ""
        self.unusable: DatabaseError | None = None  # why the tubes of this database cannot be read
        self._warn = warn
        self._before: dict[str, tuple[float, int, int]] = {}

    async def look(self) -> list[Row]:
        """One row for each partition. If the database cannot be read, one row with the reason."""
        from replicad.postgres import schema
        from replicad.postgres.statements import statement
        from replicad.tubes.cli.states import tube_states

        query = statement("tube_top", self.settings.tube_schema)
        try:
            async with self._pool() as db:
                await schema.require(db, "tube", self.settings.tube_schema)
                states = await tube_states(db, self.settings.tube_schema, self.settings.stream_schema)
                found = await db.fetch(query)
                name = str(db.target)
        except DatabaseError as error:
            self.unusable = error if isinstance(error, SchemaMissing | SchemaTooNew) else None
            return [{"island": self.settings.shown, "state": str(error), "wrong": True}]
        self.unusable = None
        now = time.monotonic()
        rows = [self._row(name, dict(row), now, states.get(row["tube"])) for row in found]
        self._before = {row["tube"]: (now, row["moved_in"] or 0, row["moved_out"] or 0) for row in found}
        return rows

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[Database]:
        from replicad.postgres.bridge import open_database

        async with open_database(self.url, size=1, application_name="replicad top", connect_timeout=5) as db:
            yield db

    def _row(self, island: str, row: Row, now: float, fault: str | None) -> Row:
        moved_in, moved_out = row.pop("moved_in") or 0, row.pop("moved_out") or 0
        then, came, went = self._before.get(row["tube"], (now, moved_in, moved_out))
        seconds = max(now - then, 0.001)
        trouble = [] if fault is None else [fault]
        if row["pods"] and row["holder"] is None:
            trouble.append("nobody reads")
        if (row["lag_s"] or 0) > self._warn:
            trouble.append("late")
        if row["parked"]:
            trouble.append("parked")
        if (row["writer_s"] or 0) > self._warn:
            trouble.append(f"held back for {row['writer_s']:.0f} s by {row['writer']}")
        row["report"] = json.loads(row["report"] or "null")
        return {
            "island": island,
            **row,
            "in_s": (moved_in - came) / seconds,
            "out_s": (moved_out - went) / seconds,
            "state": ", ".join(trouble) or "ok",
            "wrong": bool(trouble),
        }


def _show(rows: Sequence[Row], *, clear: bool) -> None:
    shown = [{**row, "backfill": _backfill(row)} for row in rows]
    columns = [*(["island"] if any("island" in row for row in rows) else []), *COLUMNS]
    lines = (
        table(columns, shown).split("\n") if rows else ["there are no tubes yet: make one with `replicad tubes create`"]
    )
    if clear:
        click.clear()
        echo(time.strftime("replicad top  %H:%M:%S   (Ctrl-C ends it)\n"))
    echo(lines[0])
    colour = colour_allowed()
    for line, row in zip(lines[1:], rows, strict=False):
        echo(line, fg="red" if row["wrong"] and colour else None)
    reports = {(row.get("island"), row["tube"]): row for row in rows if row.get("report")}
    for row in reports.values():
        echo(_report(row))


def _report(row: Mapping[str, Any]) -> str:
    """The last REPORT of a reader of a tube, with all its counts."""
    counts = ", ".join(f"{name} {_count(value)}" for name, value in row["report"].items() if value is not None)
    return f"{row['tube']}: {row['reporter']} said {max(row['report_s'], 0):.0f} s ago: {counts}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)


def _backfill(row: Mapping[str, Any]) -> str | None:
    """The progress of a backfill: ids written of all ids, and pods that wait."""
    done, total, waiting = row.get("backfill_done"), row.get("backfill_of"), row.get("backfill_pods")
    if done is not None:
        share = f" of {total:,}" if total else ""
        return f"{done:,}{share} ids in, {waiting:,} pods wait"
    return f"{waiting:,} pods wait" if waiting else None
