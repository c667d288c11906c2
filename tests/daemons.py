"""A daemon in the test's own process, with every feature, and its parts by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from replicad import features
from replicad.config.settings import Address, ServerSettings
from replicad.daemon import daemon
from replicad.daemon.hub import Hub
from replicad.daemon.relay import Relay
from replicad.daemon.troubles import Troubles
from replicad.presence.service import PresenceService
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.service import StreamService
from replicad.tubes.serving.service import TubeService


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


@asynccontextmanager
async def open_daemon(
    settings: ServerSettings, url: str, recover: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Daemon]:
    """`replicad.daemon.daemon.open_daemon` with all features."""
    async with daemon.open_daemon(settings, url, features.served(), recover) as running:
        yield Daemon(
            running.addresses,
            running.hub,
            running.relay,
            running.troubles,
            cast(StreamService, running.services["streams"]).publisher,
            cast(TubeService, running.services["tubes"]),
            cast(PresenceService, running.services["presence"]),
        )
