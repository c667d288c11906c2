"""A daemon in the test's own process, with every feature, and its parts by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import trio

from replicad import features
from replicad.config.settings import Address, ServerSettings
from replicad.daemon import daemon
from replicad.daemon.access import AccessControl
from replicad.daemon.daemon import DaemonIntervals
from replicad.daemon.hub import Hub
from replicad.daemon.relay import Relay, RelayKey
from replicad.daemon.troubles import Troubles
from replicad.operations.serving import Http
from replicad.presence import service as presence
from replicad.presence.service import PresenceIntervals, PresenceService
from replicad.redis import service as redis
from replicad.redis.service import RedisIntervals, RedisService
from replicad.redis.work import RedisWork
from replicad.streams.serving import service as streams
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.service import StreamService
from replicad.tubes.serving import service as tubes
from replicad.tubes.serving.service import TubeService
from replicad.tubes.serving.waiting import TubeIntervals
from tests.roles import as_daemon


@dataclass(frozen=True)
class Paces:
    """How often a daemon does what: those of its parts."""

    daemon: DaemonIntervals = DaemonIntervals()
    streams: StreamIntervals = StreamIntervals()
    tubes: TubeIntervals = TubeIntervals()
    presence: PresenceIntervals = PresenceIntervals()
    redis: RedisIntervals = RedisIntervals()


@dataclass(frozen=True)
class Daemon:
    """A running daemon and what is in it."""

    addresses: tuple[Address, ...]
    hub: Hub
    relay: Relay
    troubles: Troubles
    publisher: Publisher
    tubes: TubeService
    presence: PresenceService
    reload: Callable[[], Awaitable[bool]]
    access: AccessControl
    http: Address | None = None
    redis: RedisWork | None = None


@asynccontextmanager
async def open_daemon(
    settings: ServerSettings,
    url: str,
    recover: Callable[[], Awaitable[None]] | None = None,
    paces: Paces = Paces(),
    *,
    least: bool = True,
) -> AsyncIterator[Daemon]:
    """`replicad.daemon.daemon.open_daemon` with all features.

    `least`: in the least role (tests/roles.py), where the URL is a superuser's.
    """
    paced = {
        "streams": streams.feature(paces.streams),
        "tubes": tubes.feature(paces.tubes),
        "presence": presence.feature(paces.presence),
        "redis": redis.feature(paces.redis),
    }
    served = [paced.get(feature.name, feature) for feature in features.served()]
    async with daemon.open_daemon(settings, as_daemon(url) if least else url, served, recover, paces.daemon) as running:
        yield Daemon(
            running.addresses,
            running.hub,
            running.relay,
            running.troubles,
            cast(StreamService, running.services["streams"]).publisher,
            cast(TubeService, running.services["tubes"]),
            cast(PresenceService, running.services["presence"]),
            running.reload,
            running.access,
            None if settings.http is None else cast(Http, running.services["http"]).server.addresses[0],
            cast(RedisService, running.services["redis"]).work,
        )


RELAY_CHANNEL = "relay"
_RELAY_SECRET = b"of tests"


async def relay_key() -> RelayKey:
    """The key of relays that are tested without a schema."""
    await trio.lowlevel.checkpoint()
    return RelayKey(RELAY_CHANNEL, _RELAY_SECRET, 1e9 + trio.current_time())


def relayed(sender: str, number: int, *lines: str, age: float = 0.0) -> str:
    """A message as another daemon with that key would send it now."""
    return RelayKey(RELAY_CHANNEL, _RELAY_SECRET).sign(sender, number, int(1e9 + trio.current_time() - age), lines)
