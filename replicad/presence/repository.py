"""Presence in Postgres: settings, daemons and their beats, users, addresses. Calls the functions of presence/sql.

Which devices sync at this daemon is in roster.py. SECTION is the part of presence in a file for `replicad apply`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

import trio

from replicad.beats import BeatWatch
from replicad.config.declaring import SECONDS
from replicad.errors import PresenceRefused, SchemaMissing
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.presence.commands import UserIp
from replicad.presence.roster import MAX_NAME, OnlineChange
from replicad.terminal.desired import Section, SectionKey, TargetDatabase, Values, as_it_stands

# Addresses from USER_IP: checked, and gathered until they are written. No I/O. Access tokens are hashed at once.
#
# For the same user, address, device and user agent only the latest time is kept. So memory grows with the number of
# different ones. Beyond a limit further ones are refused.

MAX_IP = 64  # characters; an IPv6 address with a zone has fewer
MAX_AGENT = 512  # characters of a user agent that are kept
_BIGINT = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Sighting:
    """An address at which a user was seen. `key` identifies the place, `seen` is in ms since 1970."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("user", "ip", "device", "agent", "token_sha256", "seen")
    key: bytes
    user: str
    ip: str
    device: str | None
    agent: str
    token_sha256: bytes | None
    seen: int


def read(command: UserIp) -> Sighting:
    """The sighting that a USER_IP reports.

    Raises:
        PresenceRefused: a value is of the wrong kind or too long; no value is in the message.
    """
    token, ip, agent, device, seen = json.loads(command.data)
    for name, value, optional in (
        ("access_token", token, True),
        ("ip", ip, False),
        ("user_agent", agent, True),
        ("device_id", device, True),
    ):
        if not (_is_text(value) or (optional and value is None)):
            raise PresenceRefused(f"USER_IP is not kept: {name} is not a string that Postgres can hold")
    if not isinstance(seen, int) or isinstance(seen, bool) or seen not in _BIGINT:
        raise PresenceRefused("USER_IP is not kept: last_seen is not a number of milliseconds")
    if not ip or len(ip) > MAX_IP or max(len(text.encode()) for text in (command.user_id, device or "")) > MAX_NAME:
        raise PresenceRefused(f"USER_IP is not kept: names have up to {MAX_NAME} bytes, an address up to {MAX_IP}")
    agent = (agent or "")[:MAX_AGENT]
    place = json.dumps([command.user_id, ip, device, agent])
    hashed = None if token is None else hashlib.sha256(token.encode()).digest()
    return Sighting(hashlib.sha256(place.encode()).digest(), command.user_id, ip, device, agent, hashed, seen)


def _is_text(value: object) -> bool:
    """Whether Postgres can store it. JSON can also contain NUL and unpaired surrogates."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


class Sightings:
    """The sightings that wait to be written, of at most `limit` places."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sighting: Sighting) -> None:
        """Add a sighting; of each place the latest is kept.

        Raises:
            PresenceRefused: `limit` places wait already.
        """
        known = self._waiting.get(sighting.key)
        if known is None and len(self._waiting) >= self.limit:
            raise PresenceRefused(f"USER_IP is not kept: {self.limit} wait for Postgres already")
        if known is None or known.seen <= sighting.seen:
            self._waiting[sighting.key] = sighting

    def take(self, limit: int) -> list[Sighting]:
        """Up to `limit` of them. They stay in the queue until `written` is called."""
        return list(itertools.islice(self._waiting.values(), limit))

    def written(self, sightings: list[Sighting]) -> None:
        """Remove these from the queue, unless a newer sighting of the same place has come."""
        for sighting in sightings:
            if self._waiting.get(sighting.key) is sighting:
                del self._waiting[sighting.key]

    def clear(self) -> None:
        """Remove all of them."""
        self._waiting.clear()


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

    async def apply(self, daemon: UUID, changes: Sequence[OnlineChange]) -> bool:
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


# Presence in a file for `replicad apply`: enabled, with these settings.

_DAY = 86_400
_KEYS = ("grace", "lost_grace", "ttl", "ip_retention")


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The settings, if presence is enabled."""
    look = await PresenceRepository(place.db, place.settings.stream_schema).look()
    return {} if look is None else {"": {key: getattr(look, key) for key in _KEYS}}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Enable presence with these settings; install what it needs."""
    await PresenceRepository(place.db, place.settings.stream_schema).enable(**{key: wanted[key] for key in _KEYS})


SECTION = Section(
    name="presence",
    one="presence",
    keys=(  # the defaults are those of presence_setting in presence/sql/presence.sql
        SectionKey("grace", SECONDS, 30.0, minimum=0, maximum=_DAY),
        SectionKey("lost_grace", SECONDS, 30.0, minimum=0, maximum=_DAY),
        SectionKey("ttl", SECONDS, 15.0, minimum=0.3, maximum=3600),
        SectionKey("ip_retention", SECONDS, 28.0 * _DAY, minimum=1, maximum=3660 * _DAY),
    ),
    present=present,
    normal=as_it_stands,
    change=change,
    removal=lambda _: "to disable it: replicad presence disable",
    named=False,
)
