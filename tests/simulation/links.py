"""A connection in memory between a client and a daemon: bounded, slow, and cut at any byte.

The daemon's end is a stream as its other streams that are no plain sockets (TLS, HTTP): sends wait while the buffer is
full. `Outlet.send_nowait`, which writes to a socket without a task, is no part of the simulation.
"""

from __future__ import annotations

import random

import trio

BUFFER = 16 << 10  # bytes that are on their way, in each direction


class _Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = self.broken = False
        self.changed = trio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def put(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        while data:
            if self.broken or self.ended:
                raise trio.BrokenResourceError("the other side has gone")
            room = BUFFER - len(self.data)
            if room > 0:
                self.data += data[:room]
                data = data[room:]
                self.wake()
            else:
                await self.changed.wait()

    async def take(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self.data:
            if self.broken:
                raise trio.BrokenResourceError("the connection was cut")
            if self.ended:
                return b""
            await self.changed.wait()
        taken = bytes(self.data[:most])
        del self.data[:most]
        self.wake()
        return taken

    def end(self, *, cut: bool = False) -> None:
        self.ended = True
        self.broken |= cut
        self.wake()


class End(trio.abc.HalfCloseableStream):
    """One end of a connection."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._outgoing.put(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        self._outgoing.end()
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._incoming.take(max_bytes or BUFFER)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close it: what is on its way arrives."""
        self._outgoing.end()
        self._incoming.end(cut=True)

    def cut(self) -> None:
        """Lose what is on its way, in both directions."""
        for pipe in (self._incoming, self._outgoing):
            pipe.data.clear()
            pipe.end(cut=True)


def connected() -> tuple[End, End]:
    """The two ends of a connection."""
    one, other = _Pipe(), _Pipe()
    return End(one, other), End(other, one)


def some(chance: random.Random) -> int:
    """How many bytes a client takes at a time."""
    return chance.choice((1, 17, 300, 4096, BUFFER))
