"""The sending side of one connection: sends pieces of bytes in order, within a bounded time.

On plain sockets, many pieces go in one system call (`writev`, no copy), mostly without setting up a time-out. The
fan-out of a stream spends its time here. This file does not interpret the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

Piece = bytes | memoryview

MAX_PIECES = 512  # in one call; Linux takes 1,024


class Outlet:
    """Sends to one peer. The session ensures that only one task sends at a time."""

    def __init__(self, stream: trio.abc.SendStream, stall_timeout: float) -> None:
        """`stall_timeout`: the seconds that one `send` may take."""
        self.torn = False  # a send did not complete: the peer may have half a line
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._stall_timeout = stall_timeout

    @property
    def direct(self) -> bool:
        """Whether `send_nowait` is possible: on a plain socket."""
        return self._socket is not None

    def send_nowait(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest, which must be sent next. Only if `direct`.

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        assert self._socket is not None
        rest = _send_nowait(self._socket, pieces)
        self.torn = bool(rest)
        return rest

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send all of them.

        Raises:
            trio.TooSlowError: the peer did not accept them within the stall time; `torn` is set.
            trio.BrokenResourceError: the connection is lost.
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
            await trio.lowlevel.checkpoint()  # let other tasks run


def _send_nowait(socket: trio.socket.SocketType, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Send what the socket accepts now; returns the rest."""
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
