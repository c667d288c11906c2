"""The sending side of one connection: sends pieces of bytes in order, within a bounded time.

On plain sockets, many pieces go in one system call (`writev`, no copy), mostly without setting up a time-out. The
fan-out of a stream spends its time here. This file does not interpret the bytes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol, runtime_checkable

import trio

from replicad.daemon.rounds import MUCH, Rounds

Piece = bytes | memoryview

MAX_PIECES = 512  # in one call; Linux takes 1,024


@runtime_checkable
class TakesPieces(Protocol):
    """A stream that does the same with a piece for each peer: it must get the pieces as they are."""

    async def send_pieces(self, pieces: Sequence[Piece]) -> None: ...


class Outlet:
    """Sends to one peer. The session ensures that only one task sends at a time, and ends one that takes too long."""

    def __init__(self, stream: trio.abc.SendStream, stall_timeout: float) -> None:
        """`stall_timeout`: the seconds that one `send` may take."""
        self.must_end = inf  # when a send that waits for the socket has taken too long; infinite while none waits
        self.torn = False  # a send did not complete: the peer may have half a line
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._whole = stream if self._socket is None and isinstance(stream, TakesPieces) else None
        self._stall_timeout = stall_timeout
        self._sent = 0  # bytes that the socket has accepted so far

    @property
    def sent(self) -> int:
        """How many bytes the socket has accepted so far."""
        return self._sent

    def progress(self) -> int | None:
        """How many bytes the peer's machine has taken so far; None while no send waits for the socket.

        What the socket has accepted and the peer's machine has not acknowledged is not counted.
        """
        return self._sent - _unacknowledged(self._stream) if self.must_end < inf else None

    @property
    def direct(self) -> bool:
        """Whether `send_nowait` is possible: on a plain socket."""
        return self._socket is not None

    def send_nowait(self, data: bytes) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest, which must be sent next. Only if `direct`.

        Small commits to many clients spend their time here.

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        assert self._socket is not None
        try:
            sent = os.write(self._socket.fileno(), data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise trio.BrokenResourceError(f"cannot send: {error.strerror}") from error
        self._sent += sent
        if sent == len(data):
            return ()
        self.torn = True
        return (memoryview(data)[sent:],)

    async def send(
        self,
        pieces: Sequence[Piece],
        rounds: Rounds,
        to_go: float = 0.0,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Send all of them; what is large waits for places in `rounds`, with `to_go`. `torn` is set until it is done.

        `on_wait` is called with `must_end` when it waits for the socket. A time-out of trio for each wait would stay
        in its heap long after the wait (Deadlines are the better place).

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        large = sum(map(len, pieces)) >= MUCH
        if large:
            await rounds.next(to_go)
        self.torn = True
        if self._socket is None:
            self._wait(on_wait)
            if self._whole is not None:
                await self._whole.send_pieces(pieces)
            else:
                await self._stream.send_all(b"".join(pieces))
            self.must_end = inf
            self._sent += sum(map(len, pieces))
            self.torn = False
            return
        rest = self._send_nowait(self._socket, pieces)
        if rest:
            self._wait(on_wait)
            while rest:
                await trio.lowlevel.wait_writable(self._socket)
                if large:
                    await rounds.next(to_go)
                rest = self._send_nowait(self._socket, rest)
            self.must_end = inf
            self.torn = False
        else:
            self.torn = False
            if not large:  # else they ran already
                await trio.lowlevel.checkpoint()  # let other tasks run

    def _wait(self, on_wait: Callable[[float], None]) -> None:
        self.must_end = trio.current_time() + self._stall_timeout
        on_wait(self.must_end)

    def _send_nowait(self, socket: trio.socket.SocketType, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest."""
        try:
            sent = os.writev(socket.fileno(), pieces[:MAX_PIECES])
        except BlockingIOError:
            return pieces
        except OSError as error:
            raise trio.BrokenResourceError(f"cannot send: {error.strerror}") from error
        self._sent += sent
        for number, piece in enumerate(pieces):
            if sent < len(piece):
                return [memoryview(piece)[sent:], *pieces[number + 1 :]]
            sent -= len(piece)
        return ()


def _unacknowledged(stream: trio.abc.SendStream) -> int:
    """The bytes that the socket holds for the peer (SIOCOUTQ); 0 for a stream without a socket.

    A stream that encrypts or translates has the one below as its `transport_stream`.
    """
    while isinstance(below := getattr(stream, "transport_stream", None), trio.abc.SendStream):
        stream = below
    if not isinstance(stream, trio.SocketStream) or stream.socket.fileno() < 0:
        return 0
    try:
        answer = fcntl.ioctl(stream.socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:  # not of a kind that counts them
        return 0
    return int(struct.unpack("i", answer)[0])
