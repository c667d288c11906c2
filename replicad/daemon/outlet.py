"""The sending side of one connection: sends pieces of bytes in order, within a bounded time.

On plain sockets, many pieces go in one system call (`writev`, no copy), mostly without setting up a time-out. The
fan-out of a stream spends its time here. This file does not interpret the bytes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Protocol, runtime_checkable

import trio

from replicad.daemon.rounds import MUCH, Rounds

Piece = bytes | memoryview

MAX_PIECES = 512  # in one call; Linux takes 1,024
SLICE = 64 << 10  # bytes that a stream which encrypts is given at a time: it holds them twice
LOOKS = 4  # looks at a send that waits in each stall time: so a peer is cut up to a quarter of it late
LEAST = 1024  # bytes per second that a peer must take while a send waits
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_ACKED = 120  # where `struct tcp_info` of tcp(7) has tcpi_bytes_acked, eight bytes


@runtime_checkable
class TakesPieces(Protocol):
    """A stream that does the same with a piece for each peer: it must get the pieces as they are."""

    async def send_pieces(self, pieces: Sequence[Piece]) -> None: ...


class Outlet:
    """Sends to one peer. The session ensures that only one task sends at a time, and ends a send that takes too
    long.
    """

    def __init__(self, stream: trio.abc.SendStream, stall_timeout: float) -> None:
        """`stall_timeout`: the seconds in which the peer must take something of a `send` that waits for it."""
        self.look_at = inf  # when a send that waits for the socket is to be looked at (`stalls`); infinite without one
        self.torn = False  # a send did not complete: the peer may have half a line
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._whole = stream if self._socket is None and isinstance(stream, TakesPieces) else None
        self._stall_timeout = stall_timeout
        self._sent = 0  # bytes that the socket has accepted so far
        self._moved = (0.0, 0)  # when the peer had last taken enough, and how much in all

    @property
    def sent(self) -> int:
        """How many bytes the socket has accepted so far."""
        return self._sent

    def progress(self) -> int | None:
        """How many bytes the peer's machine has taken so far; None while no send waits for the socket.

        What the socket has accepted and the peer's machine has not acknowledged is not counted.
        """
        return self._sent - _unacknowledged(self._stream) if self.look_at < inf else None

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
        """Send all of them; large sends wait for places in `rounds`, with `to_go`. `torn` is set until all are sent.

        `on_wait` is called with `look_at` when it waits for the socket. A time-out of trio for each wait would stay
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
                self._sent += sum(map(len, pieces))
            else:
                for part in sliced(pieces):
                    await self._stream.send_all(part)
                    self._sent += len(part)
            self.look_at = inf
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
            self.look_at = inf
            self.torn = False
        else:
            self.torn = False
            if not large:  # else they ran already
                await trio.lowlevel.checkpoint()  # let other tasks run

    def stalls(self, now: float) -> bool:
        """Whether the peer has taken less than LEAST bytes per second for the stall time; else `look_at` is set anew.

        To be called at `look_at`. What its machine has acknowledged counts as taken.
        """
        taken = self._taken()
        if taken - self._moved[1] >= LEAST * self._stall_timeout:
            self._moved = (now, taken)
        end = self._moved[0] + self._stall_timeout
        self.look_at = min(now + self._stall_timeout / LOOKS, end)
        return now >= end

    def _wait(self, on_wait: Callable[[float], None]) -> None:
        now = trio.current_time()
        self._moved = (now, self._taken())
        self.look_at = now + self._stall_timeout / LOOKS
        on_wait(self.look_at)

    def _taken(self) -> int:
        acknowledged = _acknowledged(self._stream)
        return self._sent - _unacknowledged(self._stream) if acknowledged is None else acknowledged

    def _send_nowait(self, link: trio.socket.SocketType, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest."""
        try:
            sent = os.writev(link.fileno(), pieces[:MAX_PIECES])
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


def sliced(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """All bytes of the pieces in parts of SLICE; small pieces are joined."""
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            held.append(rest[: SLICE - size])
            size += len(held[-1])
            rest = rest[len(held[-1]) :]
            if size == SLICE:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


def _socket_below(stream: trio.abc.SendStream) -> trio.socket.SocketType | None:
    """A stream that encrypts or translates has the one below as its `transport_stream`."""
    while isinstance(below := getattr(stream, "transport_stream", None), trio.abc.SendStream):
        stream = below
    return stream.socket if isinstance(stream, trio.SocketStream) and stream.socket.fileno() >= 0 else None


def _acknowledged(stream: trio.abc.SendStream) -> int | None:
    """The bytes that the peer's machine has acknowledged since the connection began; None if that is not known."""
    below = _socket_below(stream)
    if below is None or _TCP_INFO is None:
        return None
    try:
        answer = below.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ACKED + 8)
    except OSError:  # not of TCP
        return None
    return int(struct.unpack_from("Q", answer, _ACKED)[0]) if len(answer) == _ACKED + 8 else None


def _unacknowledged(stream: trio.abc.SendStream) -> int:
    """The bytes that the socket holds for the peer (SIOCOUTQ); 0 for a stream without a socket."""
    below = _socket_below(stream)
    if below is None:
        return 0
    try:
        answer = fcntl.ioctl(below.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:  # not of a kind that counts them
        return 0
    return int(struct.unpack("i", answer)[0])
