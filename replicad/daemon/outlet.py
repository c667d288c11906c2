"""The sending end of one connection: pieces of bytes in, onto the wire in order, within a bounded time.

To plain sockets pieces go as they are, many in one call of the system (gathered, not joined) and mostly without a
time-out being set up: this is where a stream's fan-out spends its time. What the bytes mean is none of its business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

Piece = bytes | memoryview

MAX_PIECES = 512  # in one call; Linux takes 1,024


class Outlet:
    """Sends to one peer. One task at a time; who has the turn is for the session to say."""

    def __init__(self, stream: trio.abc.SendStream, stall_timeout: float) -> None:
        """`stall_timeout` in seconds is what one `send` may take."""
        self.torn = False  # a send was cut short: the peer may have half a line
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._stall_timeout = stall_timeout

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send all of them.

        Raises:
            trio.TooSlowError: the peer did not take them within the stall time; `torn` is set.
            trio.BrokenResourceError: the peer is gone.
        """
        self.torn = True
        if self._socket is None:
            with trio.fail_after(self._stall_timeout):
                await self._stream.send_all(b"".join(pieces))
            self.torn = False
            return
        rest = _send_nowait(self._socket, pieces)
        if rest:
            with trio.fail_after(self._stall_timeout):
                while rest:
                    await trio.lowlevel.wait_writable(self._socket)
                    rest = _send_nowait(self._socket, rest)
            self.torn = False
        else:
            self.torn = False
            await trio.lowlevel.checkpoint()  # the others' turn


def _send_nowait(socket: trio.socket.SocketType, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Send what the socket takes at once; returns what is left."""
    try:
        sent = os.writev(socket.fileno(), pieces[:MAX_PIECES])
    except BlockingIOError:
        return pieces
    except OSError as error:
        raise trio.BrokenResourceError(f"cannot send: {error.strerror}") from error
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[number + 1 :]]
        sent -= len(piece)
    return ()
