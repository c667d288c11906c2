"""What `/status` shows beside the daemon's own parts: the server, how many daemons serve the database, and backfills.

They are the statements of `replicad status` and `replicad doctor`, read as all figures are (`Looks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicad.daemon.figures import Detail, Family, Look, Obstacle, Sample
from replicad.postgres.bridge import Database
from replicad.postgres.statements import load_sql, statement

MOST_BACKFILLS = 1000


class Surroundings:
    """`Source` without figures. `db`: a pool for what can wait."""

    def __init__(self, db: Database, tube_schema: str) -> None:
        self._db = db
        self._schema = tube_schema
        self.server: dict[str, object] = {}  # of the last look; empty if it is too old
        self._backfills: list[Mapping[str, Any]] = []

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
        """`Source.details`: a detail for each backfill that is not finished. `kind` says whose name it has."""
        for row in self._backfills:
            fields = {"table": row["table"], "ids": row["ids"], "of": row["approx_ids"], "idle_seconds": row["idle_s"]}
            yield Detail("backfill", row["tube"], {"kind": "tube", **fields})

    def looks(self) -> Sequence[Look]:
        """`Source.looks`."""
        return (
            Look("server", self._look_at_server, self.server.clear),
            Look("backfills", self._look_at_backfills, self._backfills.clear),
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
        found = await self._db.fetch(statement("doctor_backfills", self._schema))
        self._backfills[:] = [dict(row) for row in found[:MOST_BACKFILLS]]
