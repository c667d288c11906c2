"""One database as operators look at it, again and again: its tubes, its streams, its daemons."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from replicad.beats import BeatWatch
from replicad.config.settings import DatabaseSettings
from replicad.daemon.state_columns import StateView
from replicad.errors import DatabaseError, DatabaseUnavailable, SchemaMissing, SchemaTooNew

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.streams.picture import StreamPicture
    from replicad.streams.troubles import Reported

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
        from replicad.streams import status, troubles

        try:
            overview = await status.overview(db, schema=self.settings.stream_schema)
            reported = await troubles.load(db, schema=self.settings.stream_schema)
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
        from replicad.streams import daemons
        from replicad.streams.daemons import DAEMON_COLUMNS

        try:
            found = await daemons.load(db, schema=self.settings.stream_schema)
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
        elif one.lag_rows and one.lag_seconds > self.warn and not trouble:
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
