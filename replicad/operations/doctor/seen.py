"""What the checks look at. Each look is made once, when the first check asks for it; a failure is raised to each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from replicad.config.settings import DatabaseSettings
from replicad.errors import ReplicadError
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import load_sql, statement
from replicad.remedies import Remedy, Who
from replicad.streams import status
from replicad.streams.daemons import DaemonReports
from replicad.tubes.cli.islands import tube_states
from replicad.tubes.pods import TubeInfo, load_tubes
from replicad.tubes.serving.leases import LEASE_EXPIRED

if TYPE_CHECKING:
    from replicad.streams.daemons import DaemonBeat, Reported
    from replicad.streams.status import Overview

MOST_PARKED = 10_000  # items that senders have parked and that are counted

T = TypeVar("T")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From when on something is reported: seconds, and shares of what there is."""

    lag: float = 60.0  # of a stream or a tube
    held: float = 60.0  # a transaction that holds a position back
    held_long: float = 900.0  # the same, failing
    backfill: float = 300.0  # in which a backfill has added nothing
    used: float = 0.8  # of a sequence or of the sessions of the server
    used_up: float = 0.95
    disk: float = 0.1  # free
    disk_full: float = 0.03
    clock: float = 5.0  # between this machine and the database
    destination: float = 3600.0  # in which a destination has accepted no request


class Evidence:
    """The looks. `db`: why it could not be opened, if it could not. `folder`: of the embedded Postgres, if that is the
    database. `daemon`: asks a daemon for /clients, if its address is known.
    """

    def __init__(
        self,
        db: Database | ReplicadError,
        settings: DatabaseSettings,
        thresholds: Thresholds = Thresholds(),
        *,
        folder: Path | None = None,
        daemon: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._db = db
        self.settings = settings
        self.thresholds = thresholds
        self.folder = folder
        self.daemon = daemon
        self.skew = 0.0  # seconds that the database's clock is ahead of ours, set by `server`
        self.answered_in = 0.0  # seconds, set by `server`
        self._known: dict[str, Any] = {}

    @property
    def db(self) -> Database:
        """The database. Raises what its opening has raised."""
        if isinstance(self._db, ReplicadError):
            raise self._db
        return self._db

    async def _once(self, name: str, look: Callable[[], Awaitable[T]]) -> T:
        if name not in self._known:
            try:
                self._known[name] = await look()
            except ReplicadError as error:
                self._known[name] = error
        found = self._known[name]
        if isinstance(found, ReplicadError):
            raise found
        return found  # type: ignore[no-any-return]

    async def server(self) -> Row:
        """The row of the query doctor_server."""

        async def look() -> Row:
            query = load_sql("doctor_server")
            await self.db.fetch_value("SELECT 1")  # connects, and is not measured
            began, wall = time.monotonic(), time.time()
            row: Row = dict((await self.db.fetch(query))[0])
            self.answered_in = time.monotonic() - began
            self.skew = row["now"] - (wall + self.answered_in / 2)
            return row

        return await self._once("server", look)

    async def others_who_may(self, remedy: str) -> str:
        """Who may run a remedy, if the role of this session may not; else an empty text."""
        if not isinstance(remedy, Remedy) or remedy.who in (Who.ANYONE, Who.MACHINE) or isinstance(self._db, Exception):
            return ""
        look = partial(
            self.db.fetch_row, load_sql("doctor_may"), remedy.who.name, remedy.of, self.settings.stream_schema
        )
        try:
            row = await self._once(f"may {remedy.who} {remedy.of}", look)
        except ReplicadError:  # the finding is shown without it
            return ""
        if row is None or row["may"]:
            return ""
        return f"{remedy.who} ({row['role']})" if row["role"] else str(remedy.who)

    async def streams(self) -> Overview:
        """All streams, as `replicad streams list` shows them."""
        return await self._once("streams", lambda: status.overview(self.db, schema=self.settings.stream_schema))

    async def sequences(self) -> Sequence[Row]:
        """How far the sequences of the streams are used up."""
        query = statement("doctor_sequences", self.settings.stream_schema)
        return await self._once("sequences", lambda: self.db.fetch(query))

    async def tube_faults(self) -> Mapping[str, str]:
        """Why tubes cannot be served, or what daemons report of them, but for expired leases."""
        schemas = self.settings.tube_schema, self.settings.stream_schema
        return await self._once("tube_faults", lambda: tube_states(self.db, *schemas, without=(LEASE_EXPIRED,)))

    async def tubes(self) -> Sequence[TubeInfo]:
        """All tubes."""
        return await self._once("tubes", lambda: load_tubes(self.db, self.settings.tube_schema))

    async def partitions(self) -> Sequence[Row]:
        """Every partition of every tube, as `replicad top` shows them."""
        query = statement("tube_top", self.settings.tube_schema)
        return await self._once("partitions", lambda: self.db.fetch(query))

    async def backfills(self) -> Sequence[Row]:
        """The backfills that are not finished."""
        query = statement("doctor_backfills", self.settings.tube_schema)
        return await self._once("backfills", lambda: self.db.fetch(query))

    async def senders(self) -> Sequence[Row]:
        """The rows of the query doctor_senders; none where the tables of senders are not installed."""

        async def look() -> Sequence[Row]:
            schema = self.settings.stream_schema
            installed = "SELECT to_regclass($1) IS NOT NULL"
            if not await self.db.fetch_value(installed, f"{quote_ident(schema)}.federation_parked"):
                return ()
            longest = self.thresholds.destination
            return await self.db.fetch(statement("doctor_senders", schema), MOST_PARKED, longest)

        return await self._once("senders", look)

    async def misowned_triggers(self) -> Sequence[Row]:
        """Attached tables whose triggers run with the rights of another role than their owner."""
        schema = self.settings.tube_schema
        return await self._once("triggers", lambda: self.db.fetch(statement("doctor_triggers", schema), schema))

    async def strangers(self) -> Sequence[Row]:
        """Code of third roles in tables that are read directly."""

        async def look() -> Sequence[Row]:
            streams = (await self.streams()).streams
            tables = [oid for one in streams for oid in (one.stream.table_oid, one.stream.positions_oid) if oid]
            return await self.db.fetch(statement("doctor_strangers", self.settings.tube_schema), tables)

        return await self._once("strangers", look)

    async def daemons(self) -> Sequence[DaemonBeat]:
        """The daemons of the database, with their beats."""
        return await self._once("daemons", lambda: DaemonReports(self.db, self.settings.stream_schema).daemons())

    async def troubles(self) -> Sequence[Reported]:
        """What running daemons report."""
        return await self._once("troubles", lambda: DaemonReports(self.db, self.settings.stream_schema).troubles())
