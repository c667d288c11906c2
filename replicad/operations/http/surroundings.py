"""What `/status` shows beside the daemon's own parts: the server, all daemons of the database, and backfills.

They are the statements of `replicad status` and `replicad doctor`, read as all figures are (`Looks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import trio

from replicad.config.settings import DatabaseSettings
from replicad.daemon.figures import Detail, Family, FigureQuery, Obstacle, Sample, StateView
from replicad.postgres.bridge import Database
from replicad.postgres.statements import load_sql, statement
from replicad.streams.daemons import DAEMON_COLUMNS, DaemonBeat, DaemonReports, Reported
from replicad.streams.serving.service import daemon_name

MOST = 1000  # backfills, reports, and daemons


class Surroundings:
    """`Source` without figures. `db`: a pool for what can wait. `own`: how the reports of this daemon begin."""

    def __init__(self, db: Database, settings: DatabaseSettings, own: str) -> None:
        self._db = db
        self._settings = settings
        self._own = own
        self.server: dict[str, object] = {}  # of the last look; empty if it is too old
        self._backfills: list[Mapping[str, Any]] = []
        self._reports: list[Reported] = []
        self._daemons: list[DaemonBeat] = []
        self._read_at = 0.0  # when the daemons were read, by this daemon's clock

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return ()

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        return ()

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        return ()

    def details(self) -> Iterable[Detail]:
        """`Source.details`: each backfill that is not finished, and each trouble that another daemon reports. `kind`
        says whose name it has. And each daemon with its last beat; `own`: it is this one.
        """
        passed = trio.current_time() - self._read_at
        for daemon in self._daemons:
            aged = replace(daemon, silent_s=daemon.silent_s + passed)
            fields = DAEMON_COLUMNS.fields(StateView.STATUS, aged)
            yield Detail("daemon", daemon.name, {**fields, "own": self._is_own(daemon)})
        for row in self._backfills:
            fields = {"table": row["table"], "ids": row["ids"], "of": row["approx_ids"], "idle_seconds": row["idle_s"]}
            yield Detail("backfill", row["tube"], {"kind": "tube", **fields})
        now = datetime.now(UTC)
        for one in self._reports:
            lasting = round(max(0.0, (now - one.since).total_seconds()), 1)
            what = {"kind": one.kind, "cause": one.cause, "code": one.code, "reason": one.reason}
            yield Detail("report", one.name, {"daemon": one.daemon, **what, "lasting_seconds": lasting})

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (
            FigureQuery("server", self._look_at_server, self.server.clear),
            FigureQuery("backfills", self._look_at_backfills, self._backfills.clear),
            FigureQuery("reports", self._look_at_reports, self._reports.clear),
            FigureQuery("daemons", self._look_at_daemons, self._daemons.clear),
        )

    async def _look_at_server(self) -> None:
        row = (await self._db.fetch(load_sql("doctor_server")))[0]
        self.server.update(
            database=self._db.target.database,
            host=self._db.target.host,
            version=row["version"],
            role=row["role"],
            standby=row["standby"],
            sessions=row["sessions"],
            max_sessions=row["max_sessions"],
            daemons=row["daemons"],
        )

    async def _look_at_backfills(self) -> None:
        found = await self._db.fetch(statement("doctor_backfills", self._settings.tube_schema))
        self._backfills[:] = [dict(row) for row in found[:MOST]]

    async def _look_at_reports(self) -> None:
        found = await DaemonReports(self._db, self._settings.stream_schema).troubles()
        self._reports[:] = [one for one in found if not one.daemon.startswith(self._own)][:MOST]

    async def _look_at_daemons(self) -> None:
        self._daemons[:] = (await DaemonReports(self._db, self._settings.stream_schema).daemons())[:MOST]
        self._read_at = trio.current_time()

    def _is_own(self, one: DaemonBeat) -> bool:
        return self._own == daemon_name(one.name, one.pid)
