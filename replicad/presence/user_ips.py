"""What USER_IP says, checked and gathered until it is written: no I/O. An access token is hashed before it is kept.

Of the same user, address, device and user agent only the latest word counts, so that what waits is bounded by how many
of those there are, and refused beyond a limit.
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
    """Where a user was seen. `key` tells places apart, `seen` is ms since 1970."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("user", "ip", "device", "agent", "token_sha256", "seen")
    key: bytes
    user: str
    ip: str
    device: str | None
    agent: str
    token_sha256: bytes | None
    seen: int


def read(command: UserIp) -> Sighting:
    """What a USER_IP says.

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
    """Whether Postgres can hold it: JSON can also write NUL, and halves of characters."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


class Sightings:
    """What waits to be written, up to `limit` places."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sighting: Sighting) -> None:
        """Keep the latest of a place.

        Raises:
            PresenceRefused: as many places wait as may.
        """
        known = self._waiting.get(sighting.key)
        if known is None and len(self._waiting) >= self.limit:
            raise PresenceRefused(f"USER_IP is not kept: {self.limit} wait for Postgres already")
        if known is None or known.seen <= sighting.seen:
            self._waiting[sighting.key] = sighting

    def take(self, limit: int) -> list[Sighting]:
        """Up to so many of them; they wait on until `written`."""
        return list(itertools.islice(self._waiting.values(), limit))

    def written(self, sightings: list[Sighting]) -> None:
        """These need not wait any more, unless something newer has come meanwhile."""
        for sighting in sightings:
            if self._waiting.get(sighting.key) is sighting:
                del self._waiting[sighting.key]

    def clear(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()
