"""Connections of services to their own daemon: they follow streams and send commands as any other client does.

So what a service passes on to somewhere else has the bounds, the tokens and the way to catch up that clients have.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio

from replicad.errors import ConnectionLost

Serve = Callable[[trio.abc.Stream, str], Awaitable[object]]


class Inside:
    """Made before the services; `admit` is called when clients are accepted."""

    def __init__(self) -> None:
        self._ready = trio.Event()
        self._sessions: trio.Nursery | None = None
        self._serve: Serve | None = None

    def admit(self, sessions: trio.Nursery, serve: Serve) -> None:
        """From now on connections are served by `serve(stream, name)` in `sessions`."""
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
            self._sessions.start_soon(self._serve, theirs, name)
        except RuntimeError as error:  # the nursery is closed
            theirs.socket.close()
            ours.socket.close()
            raise ConnectionLost("the daemon is stopping") from error
        return ours
