"""What `open_client("redis://...")` needs: connections that come from a daemon first and from Redis afterwards."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import structlog
import trio

from replicad.client.link import DaemonTarget
from replicad.client.trio_link import connect
from replicad.config.settings import Address, parse_server
from replicad.errors import ConnectionLost, RedisUnavailable, UsageError
from replicad.redis.handover import SILENCE, Switch
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.messages import key_of

PATIENCE = 2.0  # seconds for Redis to say where a daemon is, if we know of one

log = structlog.get_logger()


def open_target(
    url: str, target: DaemonTarget, nursery: trio.Nursery, daemon: str | Sequence[str] | None
) -> DaemonTarget:
    """The target of a client over Redis. `daemon`: HOST:PORT of a daemon, or of several, of which the announced daemon
    is used; without it, any announced daemon, to which no secret is sent.

    Raises:
        UsageError: the URL, an address or the name of the server is missing or cannot be used; or there is a secret
            and no daemon to which it may be sent.
    """
    return RedisTransport(url, target, nursery, daemon, SILENCE).target


class RedisTransport:
    """Makes the connections of one client."""

    def __init__(
        self, url: str, target: DaemonTarget, nursery: trio.Nursery, daemon: str | Sequence[str] | None, silence: float
    ) -> None:
        if target.us.server_name is None:
            raise UsageError("a client over Redis needs server_name, which is the name of the channel")
        if target.us.token is not None and not daemon:
            raise UsageError(
                "whoever may write to Redis could have the token sent to an address of his own: name the daemons that "
                "may have it, by daemon='db1:9009' or daemon=['db1:9009', 'db2:9009']"
            )
        self._redis = parse_redis(url)
        self._server = target.us.server_name
        self._tcp = target
        self._nursery = nursery
        self._given = tuple(_given(one) for one in ([daemon] if isinstance(daemon, str) else daemon or ()))
        self._address = self._given[0] if self._given else None  # of a daemon; the last address that was announced
        self._silence = silence
        self.target = replace(target, host=f"{self._server} over {self._redis}", port=0, dial=self._dial)

    async def _dial(self) -> trio.abc.Stream:
        daemon = await self._connect()
        ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in socket.socketpair())
        switch = Switch(
            theirs,
            daemon,
            self._server,
            connect=self._connect,
            connect_redis=self._connect_redis,
            silence=self._silence,
            named=not self._given,
        )
        self._nursery.start_soon(switch.run)
        return ours

    async def _connect_redis(self) -> RedisLink:
        return await open_redis(self._redis, name=self._tcp.us.name)

    async def _connect(self) -> trio.abc.Stream:
        found = await self._find()
        try:
            return await connect(replace(self._tcp, host=found.host, port=found.port, dial=None))
        except ConnectionLost:
            if found in self._given:  # the next of them, if Redis names none
                self._address = self._given[(self._given.index(found) + 1) % len(self._given)]
            raise

    async def _find(self) -> Address:
        """The address of a daemon. Raises ConnectionLost and RedisRefused."""
        if len(self._given) != 1:
            try:
                with trio.move_on_after(inf if self._address is None else PATIENCE):
                    self._address = await self._announced() or self._address
            except RedisUnavailable:
                if self._address is None:
                    raise
        if self._address is None:
            raise ConnectionLost(
                f"no daemon announces its address for {self._server} in {self._redis}: start `replicad serve --redis` "
                "with --redis-announce HOST:PORT, or give daemon=HOST:PORT"
            )
        return self._address

    async def _announced(self) -> Address | None:
        """What Redis names, if the program allows it. Raises RedisUnavailable and RedisRefused."""
        link = await self._connect_redis()
        try:
            text = await link.call_text("HGET", key_of(self._server), "address")
        finally:
            await link.aclose()
        if not text:
            return None
        try:
            found = parse_server(text)
        except ValueError as error:
            raise RedisUnavailable(
                f"{self._redis} names {text[:100]!a} as the address of a daemon, which is none: {error}"
            ) from None
        if self._given and found not in self._given:
            log.warning("redis_names_other_daemon", server=self._server, address=str(found))
            return None
        return found


def _given(text: str) -> Address:
    try:
        return parse_server(text)
    except ValueError as error:
        raise UsageError(f"{text[:100]!r} is not the address of a daemon: {error}") from None
