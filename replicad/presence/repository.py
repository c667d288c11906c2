"""Presence in Postgres: settings, daemons and their beats, users, addresses. Calls the functions of presence/sql.

Which devices sync at this daemon is in roster.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import trio

from replicad.beats import BeatWatch
from replicad.errors import SchemaMissing
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.presence.roster import Change
from replicad.presence.user_ips import Sighting

LONGEST_GAP = 1.5  # seconds between two looks that count as watched, at most; a daemon looks every second
BATCH = 1000  # users or addresses in one statement: some ten milliseconds of work


@dataclass(frozen=True, slots=True)
class PresenceSettings:
    """The settings (seconds), and a text that changes when rows that were written may be missing."""

    grace: float
    lost_grace: float
    ttl: float
    ip_retention: float
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A daemon's last beat, and for how long (seconds) this watcher has seen it unchanged."""

    daemon: UUID
    beat: int
    silent: float


class PresenceRepository:
    """Reads and writes presence in one database. `now` is a monotonic clock, trio's by default."""

    def __init__(self, db: Database, schema: str, now: Callable[[], float] = trio.current_time) -> None:
        self._db = db
        self._name = schema
        self._schema = quote_ident(schema)
        self._now = now
        self._watch = BeatWatch[tuple[UUID, int]](LONGEST_GAP)

    # --- installation and settings ---

    async def enable(self, **seconds: float | None) -> bool:
        """Install the missing SQL and let daemons make the stream; False if presence was enabled already.

        The settings are `grace`, `lost_grace`, `ttl` and `ip_retention`; None leaves one as it is.

        Raises:
            StreamRefused: another table is the stream `presence`.
        """
        await schemas.install(self._db, "stream", self._name)
        await schemas.install(self._db, "presence", self._name)
        values = [
            None if seconds.get(name) is None else timedelta(seconds=seconds[name] or 0)
            for name in ("grace", "lost_grace", "ttl", "ip_retention")
        ]
        return bool(await call_value(self._db, self._name, "presence_enable", *values))

    async def disable(self) -> bool:
        """Remove the stream, its table and all other data of presence; False if there was none."""
        return await schemas.uninstall(self._db, "presence", self._name)

    async def is_installed(self) -> bool:
        """Whether presence is installed in this database."""
        return bool(
            await self._db.fetch_value("SELECT to_regclass($1) IS NOT NULL", f"{self._schema}.presence_version")
        )

    async def look(self) -> PresenceSettings | None:
        """The settings; None while presence is not enabled."""
        if not await self.is_installed():
            return None
        row = await call_row(self._db, self._name, "presence_look")
        return None if row is None else PresenceSettings(*row)

    async def upgrade(self) -> None:
        """Upgrade an older version of the part. Raises SchemaMissing and SchemaTooNew."""
        await schemas.upgrade(self._db, "presence", self._name)

    # --- daemons ---

    async def enlist(self, name: str) -> UUID:
        """A new id for this daemon; its beat is 1."""
        daemon: UUID = await call_value(self._db, self._name, "presence_enlist", name)
        return daemon

    async def beat(self, daemon: UUID, beat: int) -> int | None:
        """Send a beat. Returns the beat to give next time; None if the daemon must enlist again."""
        beaten: int | None = await call_value(self._db, self._name, "presence_beat", daemon, beat)
        return beaten

    async def beats(self) -> list[Beat]:
        """All daemons. Call it regularly: the time without a change counts from the first look at a beat."""
        rows = await self._db.fetch(f"SELECT id, beat FROM {self._schema}.presence_daemon")
        silent = self._watch.observe(((row["id"], row["beat"]) for row in rows), self._now())
        return [Beat(daemon, beat, seconds) for (daemon, beat), seconds in silent.items()]

    async def clear_expired(self, beat: Beat) -> int | None:
        """Clear some users of a daemon whose beat expired. Returns 0 at the end, None if it has beaten since."""
        users: int | None = await call_value(self._db, self._name, "presence_bury", beat.daemon, beat.beat, BATCH)
        return users

    # --- users ---

    async def apply(self, daemon: UUID, changes: Sequence[Change]) -> bool:
        """Write the state of some users at this daemon. False (nothing is written): it must enlist again."""
        ordered = sorted(changes, key=lambda change: change.user)
        return bool(
            await call_value(
                self._db,
                self._name,
                "presence_apply",
                daemon,
                [change.user for change in ordered],
                [change.online for change in ordered],
                [change.last_sync for change in ordered],
            )
        )

    async def write_again(self) -> None:
        """Write a row again for every online user whose rows were removed."""
        beyond: str | None = ""
        while beyond is not None:
            beyond = await call_value(self._db, self._name, "presence_retell", beyond, BATCH)

    async def users(self, limit: int, *, offline: bool = False) -> list[dict[str, Any]]:
        """The newest row of each online user, by name; with `offline`, of every user in the stream."""
        await self._require()
        rows = await self._db.fetch(
            f"""
            SELECT DISTINCT ON (p.user_id) p.user_id AS user, p.state,
                to_timestamp(p.last_user_sync_ts / 1000.0) AS last_sync,
                to_timestamp(p.last_federation_update_ts / 1000.0) AS since,
                (SELECT count(*) FROM {self._schema}.presence_seen s WHERE s.user_id = p.user_id) AS daemons
            FROM {self._schema}.presence_stream p
            WHERE $2 OR p.user_id IN (SELECT u.user_id FROM {self._schema}.presence_user u WHERE u.told IS NOT NULL)
            ORDER BY p.user_id, p.id DESC LIMIT $1
            """,
            limit,
            offline,
        )
        return [dict(row) for row in rows]

    # --- addresses ---

    async def write_ips(self, sightings: Sequence[Sighting]) -> bool:
        """Store addresses of users; returns True."""
        columns = [[getattr(s, name) for s in sightings] for name in Sighting.COLUMNS]
        keys = [sighting.key for sighting in sightings]
        await call_value(self._db, self._name, "presence_user_ip_write", keys, *columns)
        return True

    async def sweep_ips(self) -> int:
        """Remove some addresses that are older than `ip_retention`; returns how many, 0 if there are none."""
        swept: int = await call_value(self._db, self._name, "presence_user_ip_sweep", BATCH)
        return swept

    async def ips(self, user: str | None, limit: int) -> list[dict[str, Any]]:
        """The addresses of a user, or of all users; the latest first."""
        await self._require()
        rows = await self._db.fetch(
            f"""
            SELECT i.user_id AS user, i.ip, i.device_id AS device, i.user_agent,
                to_timestamp(i.last_seen / 1000.0) AS last_seen
            FROM {self._schema}.presence_user_ip i
            WHERE $1::text IS NULL OR i.user_id = $1 ORDER BY i.last_seen DESC LIMIT $2
            """,
            user,
            limit,
        )
        return [dict(row) for row in rows]

    async def _require(self) -> None:
        if await self.look() is None:
            raise SchemaMissing("presence is not enabled on this database; run: replicad presence enable")
        await schemas.require(self._db, "presence", self._name)
