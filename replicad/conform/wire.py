"""The lines of one connection, or of the output of a program."""

from __future__ import annotations

from contextlib import suppress

import trio

from replicad.conform.transcript import ScriptError


class ConnectionClosed(Exception):
    """The other side closed the connection."""


class Lines:
    """Lines as they are received. `leases` has the leases that the other side gave."""

    def __init__(self, source: trio.abc.ReceiveStream, passed_over: frozenset[str] = frozenset()) -> None:
        """`passed_over`: commands that may come at any time."""
        self._source = source
        self._passed_over = passed_over
        self._received = b""
        self._over = False
        self.leases: set[str] = set()

    async def line(self) -> str:
        """The next line, without its end. Raises ConnectionClosed."""
        while b"\n" not in self._received:
            if self._over:
                raise ConnectionClosed
            try:
                data = await self._source.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                self._over = True
            self._received += data
        received, _, self._received = self._received.partition(b"\n")
        line = received.decode("utf-8", "replace")
        if line.startswith("LEASE "):
            self.leases.add(" ".join(line.split(" ")[1:4]))
        return line

    async def line_or_ping(self) -> str:
        """The next line that is a PING, or no command of `passed_over`."""
        while True:
            line = await self.line()
            word = line.partition(" ")[0]
            if word == "PING" or word not in self._passed_over:
                return line

    async def line_but_pings(self) -> str:
        """The next line that is no command of `passed_over`."""
        while True:
            line = await self.line()
            if line.partition(" ")[0] not in self._passed_over:
                return line


class Wire(Lines):
    """A connection: lines are received, and bytes are sent."""

    def __init__(self, stream: trio.abc.Stream, passed_over: frozenset[str] = frozenset()) -> None:
        super().__init__(stream, passed_over)
        self._stream = stream

    async def send(self, data: bytes) -> None:
        """Send. If the other side has closed already, it shows when its lines are read."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_all(data)

    async def end(self) -> None:
        """Close our side only."""
        if not isinstance(self._stream, trio.SocketStream):
            raise ScriptError("a connection with TLS has no half that could be closed")
        await self._stream.send_eof()
