"""Puts together what a daemon does for Redis."""

from __future__ import annotations

import os
import secrets

import trio

from replicad.config.settings import ServerSettings
from replicad.daemon.service import Host
from replicad.nurseries import open_plain_nursery
from replicad.redis.hearing import Hearing
from replicad.redis.intake import Intake
from replicad.redis.intervals import RedisIntervals
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.publisher import RedisOutlet, RedisPublisher
from replicad.redis.role import PublisherBook, RoleKeeper, Turn

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
USER_IPS = "USER_IP"  # Synapse says this command on a channel of its own, below that of the server


class RedisWork:
    """One daemon's work: it hears always, and publishes while it has the role."""

    def __init__(self, host: Host, url: str, pace: RedisIntervals) -> None:
        """Raises UsageError if the URL is not for a Redis."""
        settings = host.settings
        self.address = parse_redis(url, password=settings.redis_password, ca=settings.redis_ca)
        self._host = host
        self._pace = pace
        self._server = settings.server_name
        book = PublisherBook(host.pools.own, settings.database.stream_schema, self._server, claims=host.pools.short)
        holder = f"{self._server} pid {os.getpid()} {secrets.token_hex(4)}"
        self.turns = RoleKeeper(
            book,
            holder,
            is_fit=lambda: self.hearing.connected,
            begin=self._begin,
            troubles=host.troubles,
            pace=pace,
        )
        self.hearing = Hearing(
            (self._server, f"{self._server}/{USER_IPS}"),
            connect=self._connect,
            inside=host.inside,
            vocabulary=host.vocabulary,
            publisher=lambda: self.turns.publisher,
            troubles=host.troubles,
            max_line=settings.limits.max_line,
            pace=pace,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self.hearing.run)
            nursery.start_soon(self.turns.run)
            await trio.sleep_forever()

    async def _connect(self) -> RedisLink:
        return await open_redis(self.address, name="replicad", timeout=self._pace.answer)

    def _begin(self, turn: Turn) -> RedisPublisher:
        host = self._host
        announced = announced_address(host.settings)

        async def connect() -> RedisOutlet:
            return RedisOutlet(await self._connect(), self._server, turn.term, announced)

        intake = Intake(host.inside, turn.tokens, host.troubles, self._pace)
        return RedisPublisher(intake, connect, turn.tokens, host.troubles, self._pace)


def announced_address(settings: ServerSettings) -> str:
    """The address for followers that miss rows; empty if it is not known."""
    if settings.redis_announce is not None:
        return str(settings.redis_announce)
    known = settings.listen.port != 0 and settings.listen.host not in WILDCARDS
    return str(settings.listen) if known else ""
