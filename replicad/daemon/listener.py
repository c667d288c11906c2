"""Accepts connections: their limit, TLS, and errors of `accept`. It does not know what a session does."""

from __future__ import annotations

import errno
import os
import ssl
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
TLS_TIMEOUT = 10.0  # seconds for a client to finish the handshake
PLACE = ("service", "listener", "accept")  # under which the troubles of `accept` are reported

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
log = structlog.get_logger()

Serve = Callable[[trio.abc.Stream, str], Awaitable[object]]


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
        tls: ssl.SSLContext | None = None,
        pauses: Pauses = Pauses(),
    ) -> None:
        """`refused` is called for each connection that is closed because `room` is used up."""
        self._serve = serve
        self._sessions = sessions
        self._troubles = troubles
        self._room = room
        self._full = full
        self._refused = refused
        self._tls = tls
        self._pauses = pauses
        self._inside = 0

    async def accept_forever(self, listener: trio.SocketListener) -> None:
        """Accept until cancelled.

        A failure of `accept`, for example because file descriptors have run out, is reported as a trouble, and `accept`
        is called again after a pause. Open sessions are not affected.
        """
        backoff = Backoff(self._pauses.first, self._pauses.longest, jitter=0.0)
        async with listener:
            while True:
                try:
                    self._enter(await listener.accept())
                except Exception as error:  # noqa: BLE001 - reported; without this task no client could connect
                    self._report_failure(error)
                    await trio.sleep(backoff.next_delay())
                else:
                    self._troubles.end(*PLACE)
                    backoff.reset()

    def _report_failure(self, error: Exception) -> None:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            remedy = "; raise the limit of open files (ulimit -n)" if error.errno in _EXHAUSTED else ""
            self._troubles.begin(*PLACE, f"no connection can be accepted: {why}{remedy}", code="accept_failed")
        else:
            self._troubles.fail(*PLACE, error)

    def _enter(self, stream: trio.SocketStream) -> None:
        if self._inside >= self._room:
            self._refused()
            if self._tls is None:
                with suppress(OSError):
                    os.write(stream.socket.fileno(), self._full)  # fits into the send buffer of a new socket
            stream.socket.close()
            return
        self._sessions.start_soon(self._serve_one, stream)
        self._inside += 1

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        """Serve one connection. A failure is recorded and ends only this connection."""
        try:
            peer = _peer_of(stream)
            with self._troubles.contain_and_record("session", peer, "serve"):
                if self._tls is None:
                    await self._serve(stream, peer)
                elif (secured := await _shake_hands(stream, peer, self._tls)) is not None:
                    await self._serve(secured, peer)
        finally:
            self._inside -= 1
            stream.socket.close()


async def _shake_hands(stream: trio.SocketStream, peer: str, tls: ssl.SSLContext) -> trio.abc.Stream | None:
    secured = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    try:
        with trio.fail_after(TLS_TIMEOUT):
            await secured.do_handshake()
    except (trio.BrokenResourceError, trio.TooSlowError, ssl.SSLError) as error:
        cause = error.__cause__ or error
        log.warning("tls_refused", peer=peer, error=str(cause) or type(cause).__name__)
        await trio.aclose_forcefully(secured)
        return None
    return secured


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # closed already
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
