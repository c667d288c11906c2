"""Addresses from USER_IP: checked, and gathered until they are written. No I/O. Access tokens are hashed at once.

For the same user, address, device and user agent only the latest time is kept. So memory grows with the number of
different ones. Beyond a limit further ones are refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import ClassVar

from replicad.errors import PresenceRefused
from replicad.presence.commands import UserIp
from replicad.presence.roster import MAX_NAME

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
