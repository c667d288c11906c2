"""Accepts connections: the cap, TLS, and the small accidents of `accept`. What a session does is not known here."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Awaitable, Callable

import structlog
import trio

from replicad.config import Address
from replicad.errors import EnvironmentRefused

BACKLOG = 4096  # a thousand workers that reconnect at once must not see a refusal
TLS_TIMEOUT = 10.0  # seconds for a client to finish the handshake
ACCEPT_PAUSE = 0.1  # seconds to wait when the process has run out of file descriptors

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
log = structlog.get_logger()

Serve = Callable[[trio.abc.Stream, str], Awaitable[object]]


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


async def accept_forever(
    listener: trio.SocketListener, serve: Serve, sessions: trio.Nursery, tls: ssl.SSLContext | None = None
) -> None:
    """Accept until cancelled; each connection gets a task in `sessions` that runs `serve(stream, peer)`.

    When file descriptors run out, accepting pauses and goes on; sessions that exist are not touched.
    """
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.warning("accept_failed", error=error.strerror, remedy="raise the limit of open files (ulimit -n)")
                await trio.sleep(ACCEPT_PAUSE)
                continue
            sessions.start_soon(_serve_one, stream, serve, tls)


async def _serve_one(stream: trio.SocketStream, serve: Serve, tls: ssl.SSLContext | None) -> None:
    peer = _peer_of(stream)
    if tls is None:
        await serve(stream, peer)
        return
    secured = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    try:
        with trio.fail_after(TLS_TIMEOUT):
            await secured.do_handshake()
    except (trio.BrokenResourceError, trio.TooSlowError, ssl.SSLError) as error:
        cause = error.__cause__ or error
        log.warning("tls_refused", peer=peer, error=str(cause) or type(cause).__name__)
        await trio.aclose_forcefully(secured)
        return
    await serve(secured, peer)


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # gone again already
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
