"""What a sender needs of its daemon: rows in linear order, REMOTE_SERVER_UP, and a way to send acks.

`Upstream` is the interface, `client_upstream` makes the real one of `replicad.client`.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import structlog
import trio

from replicad.client.events import Connected, Disconnected, PositionMoved, Reset, RowBatch, StreamStopped
from replicad.client.trio_client import TrioFollower, open_client
from replicad.errors import ConnectionLost, DatabaseError, RemoteError
from replicad.nurseries import open_plain_nursery
from replicad.protocol.commands import RemoteServerUp
from replicad.streams.commands import FederationAck

NOW = "NOW"
EARLIEST = "EARLIEST"
ACK_RETRY = 1.0  # seconds; nothing waits for an ack

_Also = PositionMoved | Connected | Disconnected | StreamStopped | RemoteServerUp
_ALSO: tuple[type[_Also], ...] = (PositionMoved, Connected, Disconnected, StreamStopped, RemoteServerUp)
Told = RowBatch | Reset | _Also

log = structlog.get_logger()


class Upstream(Protocol):
    """A connection to the daemon that is made again when it was lost."""

    def follow(self) -> AsyncIterator[Told]:
        """Rows of every stream in ascending order over all writers, and the other events that a sender needs.

        Never ends by itself. Raises ReplicadError if another try would not help.
        """

    def epoch(self, stream: str) -> str | None:
        """The generation of the stream to which the last event belongs; None before the first answer."""

    def acknowledge(self, sender: str, stream: str, token: int) -> None:
        """Send soon up to which token a stream is recorded. Of each stream the last token counts."""


OpenUpstream = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Upstream]]
"""Connects to the daemon and follows streams, each behind a token: of `Recorded`, a number, NOW or EARLIEST."""


def client_upstream(
    host: str, port: int, *, name: str, token: str | None = None, tls: ssl.SSLContext | None = None
) -> OpenUpstream:
    """How to open upstreams of the daemon at host:port. `name` is our name for the daemon, `token` its secret."""

    @asynccontextmanager
    async def open_upstream(tokens: Mapping[str, str]) -> AsyncIterator[Upstream]:
        async with open_client(host, port, name=name, token=token, tls=tls) as client:
            async with client.follow(tokens, linear=True, also=_ALSO) as follower, open_plain_nursery() as nursery:
                upstream = _ClientUpstream(follower)
                nursery.start_soon(upstream.send_acks)
                yield upstream

    return open_upstream


class _ClientUpstream:
    def __init__(self, follower: TrioFollower[Told]) -> None:
        self._follower = follower
        self._acks: dict[str, FederationAck] = {}  # by stream; not sent yet
        self._said = trio.Event()

    def follow(self) -> AsyncIterator[Told]:
        return self._follower

    def epoch(self, stream: str) -> str | None:
        return self._follower.epoch(stream)

    def acknowledge(self, sender: str, stream: str, token: int) -> None:
        self._acks[stream] = FederationAck(sender, token, stream)
        self._said.set()

    async def send_acks(self) -> None:
        """Send the last ack of each stream; try again if it fails.

        On the connection that follows the streams: after a fork the daemon accepts acks on no other, since only there
        was it said of which generation the rows are.
        """
        while True:
            await self._said.wait()
            self._said = trio.Event()
            acks = [ack for stream, ack in self._acks.items() if self._follower.is_accepted(stream)]
            try:
                if acks:
                    await self._follower.send(*acks)
            except (ConnectionLost, RemoteError, DatabaseError) as error:
                log.debug("ack_not_sent", error=str(error))
            else:
                for ack in acks:
                    if ack.stream is not None and self._acks[ack.stream] is ack:
                        del self._acks[ack.stream]
            if self._acks:
                self._said.set()
                await trio.sleep(ACK_RETRY)
