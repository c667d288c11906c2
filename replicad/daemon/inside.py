"""Connections of services to their own daemon: they follow streams and send commands as any other client does.

So what a service passes on to somewhere else has the bounds, the tokens and the way to catch up that clients have. A
service that speaks another protocol serves its clients in the same way: as a session whose stream translates.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from replicad.daemon.fairness import Asker
from replicad.errors import ConnectionLost

if TYPE_CHECKING:
    from replicad.daemon.access import ClientAccess

Serve = Callable[[trio.abc.Stream, str, "ClientAccess | None"], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Asks for at most `limit` rows of a stream after `token` (or the word EARLIEST), for a client with that access.

    `asker`: whose turn it is to use a connection to Postgres.
    """

    stream: str
    token: str
    limit: int
    asker: Asker
    access: ClientAccess


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows of a stream as lines of RDATA without their ends, in the order of ids, and the token to go on with.

    `closed`: more rows follow, so this page is the same as long as the generation lasts. `named`: the token of the
    request named the generation.
    """

    lines: tuple[bytes, ...]
    token: str
    closed: bool
    named: bool


class Pages(Protocol):
    """Reads streams page by page."""

    async def page(self, wanted: PageRequest) -> RowPage:
        """A page. It has no rows if there are none after the token yet.

        Raises:
            StreamError: the stream is unknown, refused, stops before an unreadable row, or the token is not valid.
            DatabaseError: Postgres cannot answer.
        """


class Inside:
    """Made before the services; `admit` is called when clients are accepted. `pages`: set by the service of streams."""

    def __init__(self) -> None:
        self.pages: Pages | None = None
        self._ready = trio.Event()
        self._sessions: trio.Nursery | None = None
        self._serve: Serve | None = None

    def admit(self, sessions: trio.Nursery, serve: Serve) -> None:
        """From now on connections are served by `serve(stream, name, access)` in `sessions`; None is all rights."""
        self._sessions, self._serve = sessions, serve
        self._ready.set()

    async def connect(self, name: str) -> trio.SocketStream:
        """A connection to this daemon with all rights, shown to operators under the name. Waits until it serves.

        Raises:
            ConnectionLost: the daemon stops.
        """
        await self._ready.wait()
        assert self._sessions is not None
        assert self._serve is not None
        ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in socket.socketpair())
        try:
            self._sessions.start_soon(self._serve, theirs, name, None)
        except RuntimeError as error:  # the nursery is closed
            theirs.socket.close()
            ours.socket.close()
            raise ConnectionLost("the daemon is stopping") from error
        return ours

    async def serve(self, stream: trio.abc.Stream, name: str, access: ClientAccess) -> None:
        """Serve a client that speaks another protocol, as a session. `stream` translates; it is closed at the end.

        `name`: the client's address. `access`: its rights. The session is among the sessions of all clients, so it is
        informed when the daemon stops.

        Raises:
            ConnectionLost: the daemon stops.
        """
        await self._ready.wait()
        assert self._sessions is not None
        assert self._serve is not None
        serve, ended = self._serve, trio.Event()

        async def run() -> None:
            try:
                await serve(stream, name, access)
            finally:
                ended.set()

        try:
            self._sessions.start_soon(run)
        except RuntimeError as error:  # the nursery is closed
            raise ConnectionLost("the daemon is stopping") from error
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)
