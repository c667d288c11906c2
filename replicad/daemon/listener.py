"""Accepts connections: their limit, TLS, and errors of `accept`. It does not know what a session does."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from replicad.config.settings import Address
from replicad.daemon.troubles import Troubles
from replicad.errors import EnvironmentRefused
from replicad.retry import Backoff

BACKLOG = 4096  # a thousand workers that reconnect at once must not be refused
LIVE = 4  # sessions that are begun in one turn: each takes some hundred microseconds
DEAD = 32  # connections that were reset before they were accepted, and are closed in one turn: ten microseconds each
PLACE = ("service", "listener", "accept")  # under which the troubles of `accept` are reported

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
# What `accept` reports of the one connection that it removed from the queue (Linux, accept(2)): no reason for a pause.
_OF_ONE = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "EPROTO", "EPERM", "EINTR", "ENOPROTOOPT", "EOPNOTSUPP", "ECONNRESET", "ETIMEDOUT",
        "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET",
    )
    if hasattr(errno, name)
}  # fmt: skip
log = structlog.get_logger()

Serve = Callable[[trio.abc.Stream, str], Awaitable[object]]
Secure = Callable[[trio.SocketStream, str], Awaitable[trio.abc.Stream | None]]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds until the next `accept` after one failed (for example because no file descriptor was left)."""

    first: float = 0.1  # doubles up to `longest`
    longest: float = 1.0


async def open_listeners(address: Address) -> list[trio.SocketListener]:
    """Bind to an address.

    Raises:
        EnvironmentRefused: the port is in use, the address is not ours, or we may not bind to it.
    """
    try:
        return await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG)
    except OSError as error:
        why = {
            errno.EADDRINUSE: "the port is in use; choose another with --listen, or stop the program that has it",
            errno.EADDRNOTAVAIL: "this machine has no such address; choose one of its own with --listen",
            errno.EACCES: "ports below 1024 need privileges; choose a higher one with --listen",
        }.get(error.errno or 0, error.strerror or str(error))
        raise EnvironmentRefused(f"cannot listen on {address}: {why}") from error


class Acceptor:
    """Accepts the connections of all listeners of a daemon and runs `serve(stream, peer)` for each, in `sessions`.

    `room` is the maximum of client sockets, including those that are being refused. One more is closed at once; without
    TLS it is sent `full` before. So clients cannot use up the file descriptors that the daemon needs.

    All connections that wait are accepted, LIVE in a turn. One that was reset meanwhile is closed
    without a session.
    """

    def __init__(
        self,
        serve: Serve,
        sessions: trio.Nursery,
        troubles: Troubles,
        *,
        room: int,
        full: bytes,
        refused: Callable[[], None],
        secure: Secure | None = None,
        give_way: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        pauses: Pauses = Pauses(),
    ) -> None:
        """`refused` is called for each connection that is closed because `room` is used up. `secure` returns the stream
        after the TLS handshake; None if that failed, or there is no room for it. `give_way` waits for the next turn;
        accepting has a queue of its own, so that it does not wait behind all who send much.
        """
        self._give_way = give_way
        self._serve = serve
        self._sessions = sessions
        self._troubles = troubles
        self._room = room
        self._full = full
        self._refused = refused
        self._secure = secure
        self._pauses = pauses
        self._inside = 0
        self.dead = 0  # connections that were reset before they were accepted, since the start

    async def accept_forever(self, listener: trio.SocketListener) -> None:
        """Accept until cancelled.

        A failure of `accept`, for example because file descriptors have run out, is reported as a trouble, and `accept`
        is called again after a pause. Open sessions are not affected.
        """
        backoff = Backoff(self._pauses.first, self._pauses.longest, jitter=0.0)
        async with listener:
            waiting = _plain_copy(listener)
            try:
                while True:
                    try:
                        self._enter(await listener.accept())
                        while self._accept_waiting(waiting):
                            await self._give_way()
                    except Exception as error:  # noqa: BLE001 - reported; without this task no client could connect
                        if isinstance(error, OSError) and error.errno in _OF_ONE:
                            self.dead += 1
                            continue
                        self._report_failure(error)
                        await trio.sleep(backoff.next_delay())
                    else:
                        self._troubles.end(*PLACE)
                        backoff.reset()
            finally:
                if waiting is not None:
                    waiting.close()

    def _accept_waiting(self, waiting: socket.socket | None) -> bool:
        """Accept more of the connections that wait, as many as one turn should take. False if there are no more."""
        if waiting is None:
            return False
        live = 0
        dead = self.dead
        while live < LIVE and self.dead < dead + DEAD:
            try:
                accepted, _ = waiting.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _OF_ONE:
                    raise
                self.dead += 1
                continue
            live += self._enter(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)))
        return True

    def _report_failure(self, error: Exception) -> None:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            remedy = "; raise the limit of open files (ulimit -n)" if error.errno in _EXHAUSTED else ""
            self._troubles.begin(*PLACE, f"no connection can be accepted: {why}{remedy}", code="accept_failed")
        else:
            self._troubles.fail(*PLACE, error)

    def _enter(self, stream: trio.SocketStream) -> bool:
        """Begin to serve a connection; False if there was nothing to serve."""
        peer = _peer_of(stream)
        if peer is None:
            self.dead += 1
            stream.socket.close()
            return False
        if self._inside >= self._room:
            self._refused()
            if self._secure is None:
                with suppress(OSError):
                    os.write(stream.socket.fileno(), self._full)  # fits into the send buffer of a new socket
            stream.socket.close()
            return True
        self._sessions.start_soon(self._serve_one, stream, peer)
        self._inside += 1
        return True

    async def _serve_one(self, stream: trio.SocketStream, peer: str) -> None:
        """Serve one connection. A failure is recorded and ends only this connection."""
        try:
            with self._troubles.contain_and_record("session", peer, "serve"):
                if self._secure is None:
                    await self._serve(stream, peer)
                elif (secured := await self._secure(stream, peer)) is not None:
                    await self._serve(secured, peer)
        finally:
            self._inside -= 1
            stream.socket.close()


def _plain_copy(listener: trio.SocketListener) -> socket.socket | None:
    """The same listening socket, to be asked without waiting. None for a listener that is none."""
    if not isinstance(listener, trio.SocketListener):
        return None
    copy = socket.socket(fileno=os.dup(listener.socket.fileno()))
    copy.setblocking(False)
    return copy


def _peer_of(stream: trio.SocketStream) -> str | None:
    """The address of the other end; None if the connection has been reset."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return None
    except ValueError:  # no address: a pair of sockets
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
