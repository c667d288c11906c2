"""What daemons report in their database: beats and troubles. Commands and the console of any machine read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from replicad.daemon.figures import ConsoleForm, StateColumn, StateColumns, StateView
from replicad.postgres.statements import Queries, call_rows, call_value
from replicad.streams.queries import SCHEMA, installed

INTERVAL: Final = 5.0  # seconds between two beats
SILENT: Final = 15.0  # seconds without a beat after which a daemon is shown as silent
_COLUMNS = "name, pid, host(host) AS host, addresses, version, started_at, seen_at, silent_s"


@dataclass(frozen=True, slots=True)
class DaemonBeat:
    """A daemon and its last beat. `host` is where Postgres sees it (None: a socket), `addresses` where clients connect.

    `silent_s`: seconds since the beat, by Postgres' clock.
    """

    name: str
    pid: int
    host: str | None
    addresses: tuple[str, ...]
    version: str
    started_at: datetime
    seen_at: datetime
    silent_s: float

    @property
    def alive(self) -> bool:
        """Whether it sends beats."""
        return self.silent_s < SILENT

    @property
    def state(self) -> str:
        """`alive`, or for how long it was silent."""
        return "alive" if self.alive else f"silent for {self.silent_s:.0f} s"

    @property
    def up_s(self) -> float:
        """Seconds from its start to its last beat."""
        return max(0.0, (self.seen_at - self.started_at).total_seconds())


_TOP, _JSON, _STATUS, _CONSOLE = StateView.TOP, StateView.TOP_JSON, StateView.STATUS, StateView.CONSOLE
DAEMON_COLUMNS: StateColumns[DaemonBeat] = StateColumns(
    lambda one: (one.name,),
    (
        StateColumn("daemon", _TOP | _JSON, lambda one: one.name),
        StateColumn("name", _STATUS | _CONSOLE, lambda one: one.name, label="Daemon", form=ConsoleForm.OWN_NAME),
        StateColumn("state", _STATUS | _CONSOLE, lambda one: one.state, label="State", form=ConsoleForm.ALIVE),
        StateColumn("alive", _STATUS, lambda one: one.alive),
        StateColumn(
            "pid", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.pid, label="Pid", form=ConsoleForm.LABEL
        ),
        StateColumn("address", _TOP | _JSON, lambda one: ", ".join(one.addresses)),
        StateColumn(
            "addresses", _STATUS | _CONSOLE, lambda one: one.addresses, label="Address", form=ConsoleForm.LIST
        ),
        StateColumn("host", _JSON | _STATUS | _CONSOLE, lambda one: one.host, label="Seen at", form=ConsoleForm.HOST),
        StateColumn("version", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.version, label="Version", spare=1),
        StateColumn("started_at", _JSON, lambda one: one.started_at.isoformat()),
        StateColumn("since_utc", _TOP, spare=2),  # `top` makes it of started_at
        StateColumn(
            "started_at", _STATUS | _CONSOLE, lambda one: one.started_at.timestamp(),
            label="Since", form=ConsoleForm.TIME,
        ),
        StateColumn("seen_at", _JSON, lambda one: one.seen_at.isoformat()),
        StateColumn("seen_at", _STATUS, lambda one: one.seen_at.timestamp()),
        StateColumn("up_s", _JSON | _STATUS, lambda one: one.up_s),
        StateColumn("beat_s", _TOP),  # `top` makes it of silent_s
        StateColumn(
            "silent_s", _JSON | _STATUS | _CONSOLE, lambda one: one.silent_s, label="Last beat", form=ConsoleForm.AGO
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Life:
    """What a daemon reports of itself. `id` is never used again."""

    id: UUID
    name: str
    pid: int
    addresses: Sequence[str]
    version: str


class Row(NamedTuple):
    """One trouble as a daemon writes it; `age` in seconds."""

    kind: str
    name: str
    cause: str
    code: str
    reason: str
    age: float


@dataclass(frozen=True, slots=True)
class Reported:
    """One trouble that a running daemon reports, of the thing `kind` and `name` (for example a stream and its name)."""

    daemon: str
    kind: str
    name: str
    cause: str
    code: str
    reason: str
    since: datetime


class DaemonReports:
    """What the daemons of a database report there of themselves. Each method raises SchemaMissing."""

    def __init__(self, db: Queries, schema: str = SCHEMA) -> None:
        self._db = db
        self._schema = schema

    async def beat(self, life: Life, age: float) -> None:
        """The sign of life of a daemon that began `age` seconds ago."""
        about = (life.id, life.name, life.pid, list(life.addresses), life.version)
        with installed(self._schema):
            await call_value(self._db, self._schema, "stream_daemon_beat", *about, age)

    async def leave(self, life: Life) -> None:
        """The daemon stops: it is not listed any more."""
        with installed(self._schema):
            await call_value(self._db, self._schema, "stream_daemon_leave", life.id)

    async def daemons(self) -> list[DaemonBeat]:
        """The daemons, by name; daemons that were silent for an hour are left out."""
        with installed(self._schema):
            rows = await call_rows(self._db, self._schema, "stream_daemons", columns=_COLUMNS)
        return [DaemonBeat(**(dict(row) | {"addresses": tuple(row["addresses"])})) for row in rows]

    async def write_troubles(self, daemon: str, rows: Sequence[Row]) -> None:
        """Replace all troubles that the daemon has written before."""
        columns: list[list[object]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], [], [], []]
        with installed(self._schema):
            await call_value(self._db, self._schema, "stream_trouble_write", daemon, *columns)

    async def troubles(self) -> list[Reported]:
        """The troubles of running daemons, the oldest first."""
        columns = "daemon, kind, name, cause, code, reason, since"
        with installed(self._schema):
            rows = await call_rows(self._db, self._schema, "stream_troubles", columns=columns)
        return [Reported(*row) for row in rows]
