"""What `open_client("redis://...")` needs: connections that come from a daemon first and from Redis afterwards."""

from __future__ import annotations

import socket
from dataclasses import replace
from math import inf

import trio

from replicad.client.sockets import Target
from replicad.client.trio_link import connect
from replicad.config.settings import parse_server
from replicad.errors import ConnectionLost, RedisUnavailable, UsageError
from replicad.redis.address import parse_redis
from replicad.redis.link import RedisLink, open_redis
from replicad.redis.messages import key_of
from replicad.redis.switch import SILENCE, Switch

PATIENCE = 2.0  # seconds for Redis to say where a daemon is, if we know of one


def open_target(url: str, target: Target, nursery: trio.Nursery, daemon: str | None) -> Target:
    """The target of a client over Redis. `daemon`: HOST:PORT of a daemon; without it, what a daemon announces in Redis.

    Raises:
        UsageError: the URL, the address or the name of the server is missing or cannot be used.
    """
    return RedisTransport(url, target, nursery, daemon, SILENCE).target


class RedisTransport:
    """Makes the connections of one client."""

    def __init__(self, url: str, target: Target, nursery: trio.Nursery, daemon: str | None, silence: float) -> None:
        if target.us.server_name is None:
            raise UsageError("a client over Redis needs server_name, which is the name of the channel")
        self._redis = parse_redis(url)
        self._server = target.us.server_name
        self._tcp = target
        self._nursery = nursery
        self._given = daemon is not None
        self._address: str | None = daemon  # where a daemon is; the last one that was announced
        if daemon is not None:
            self._parsed(daemon)
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
        )
        self._nursery.start_soon(switch.run)
        return ours

    async def _connect_redis(self) -> RedisLink:
        return await open_redis(self._redis, name=self._tcp.us.name)

    async def _connect(self) -> trio.abc.Stream:
        host, port = self._parsed(await self._find())
        return await connect(replace(self._tcp, host=host, port=port, dial=None))

    async def _find(self) -> str:
        """The address of a daemon. Raises ConnectionLost and RedisRefused."""
        if not self._given:
            try:
                with trio.move_on_after(inf if self._address is None else PATIENCE):
                    self._address = await self._announced() or self._address
            except RedisUnavailable:
                if self._address is None:
                    raise
        if not self._address:
            raise ConnectionLost(
                f"no daemon announces its address for {self._server} in {self._redis}: start `replicad serve --redis` "
                "with --redis-announce HOST:PORT, or give daemon=HOST:PORT"
            )
        return self._address

    async def _announced(self) -> str | None:
        link = await self._connect_redis()
        try:
            found = await link.call("HGET", key_of(self._server), "address")
        finally:
            await link.aclose()
        return found.decode() if found else None

    @staticmethod
    def _parsed(address: str) -> tuple[str, int]:
        try:
            found = parse_server(address)
        except ValueError as error:
            raise UsageError(f"{address[:100]!r} is not the address of a daemon: {error}") from None
        return found.host, found.port
