"""Listens for HTTP: how many connections, for how long, and what one may send. Hypercorn speaks HTTP.

Hypercorn's own `serve` has no bound on connections and none on their time, and shields what it sends. So each
connection is accepted by the daemon's `Acceptor` and lives in a stream with limits; hypercorn gets it afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from replicad.config.settings import Address
from replicad.daemon.access import names_of
from replicad.daemon.listener import Acceptor, open_listeners
from replicad.daemon.service import Host
from replicad.daemon.supervision import keep_running
from replicad.operations.http.app import Pages
from replicad.operations.http.looks import Looks, Pace
from replicad.operations.http.surroundings import Surroundings
from replicad.streams.serving.trouble_book import daemon_name

LIFE = 30.0  # seconds of a connection: who sends a header bit by bit gets no further
HEADER_BYTES = 16 << 10  # of a request
QUEUE = 2.0  # seconds for a connection to wait for room: a thousand readers of /live may come back at once
IDLE = 5.0  # seconds between two requests of a connection
SENDING = 5.0  # seconds for a peer to take an answer
REQUESTS = 100  # on one connection, one after another
STREAMS = 4  # requests at the same time on one connection, with HTTP/2

_TEXT = b"this server has all the HTTP connections that it takes (--http-connections); try again\n"
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT)
)
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Server:
    """The HTTP server of one daemon."""

    def __init__(self, host: Host, pace: Pace = Pace()) -> None:
        assert host.settings.http is not None
        self.addresses: tuple[Address, ...] = ()
        self._host = host
        self._address = host.settings.http
        self._looks = Looks(host.figures, host.troubles, pace)
        own = daemon_name(host.settings.server_name)
        surroundings = Surroundings(host.pools.housekeeping, host.settings.database, own)
        host.figures.add(surroundings)
        self._app = wrap_app(cast(Any, Pages(host, self._looks, surroundings).app()), 0, "asgi")
        self._config = _config()
        self._open: set[_Bounded] = set()
        self._acceptor: Acceptor | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises EnvironmentRefused: the address cannot be used."""
        host = self._host
        listeners = await open_listeners(self._address, "--http")
        self.addresses = tuple(Address(*one.socket.getsockname()[:2]) for one in listeners)
        self._address = self.addresses[0]  # port 0 was a free one: it is kept when this is started again
        async with trio.open_nursery() as nursery:
            acceptor = self._acceptor = Acceptor(
                self._serve_one,
                nursery,
                host.troubles,
                room=host.settings.limits.http_connections,
                full=FULL,
                refused=lambda: None,
                secure=host.handshakes,
                first_line=HEADER_BYTES,
                too_long=TOO_LONG,
                name="http",
                patience=QUEUE,
            )
            nursery.start_soon(keep_running, self._looks.run, "service", "figures", host.troubles)
            for listener in listeners:
                nursery.start_soon(acceptor.accept_forever, listener)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                for one in list(self._open):
                    one.abort()

    async def _serve_one(self, stream: trio.abc.Stream, peer: str) -> None:
        context = WorkerContext(None)
        life = trio.CancelScope(deadline=trio.current_time() + LIFE)
        lent = ExitStack()  # entered when the connection becomes a session of the daemon: it no longer counts here
        bounded = _Bounded(stream, context.terminated.set, life, lambda: lent.enter_context(self._lent()))
        state = ConnectionState({})
        state.update(peer=peer, certificate=names_of(stream), opened_at=trio.current_time(), connection=bounded)
        self._open.add(bounded)
        try:
            with lent, life:
                await TCPServer(self._app, self._config, context, state, cast(Any, bounded)).run()
        finally:
            self._open.discard(bounded)
            bounded.abort()

    def _lent(self) -> AbstractContextManager[None]:
        assert self._acceptor is not None
        return self._acceptor.lent()


class _Bounded(trio.abc.HalfCloseableStream):
    """The connection as hypercorn sees it: without TLS, which is done, and sending takes a bounded time.

    `ended` is called when the peer sends no more. Without it hypercorn would wait for another request all the same.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        ended: Callable[[], Awaitable[None]],
        life: trio.CancelScope,
        on_take: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._ended = ended
        self._life = life
        self._on_take = on_take
        self._taken = False
        bottom = stream
        while isinstance(bottom, trio.SSLStream):
            bottom = bottom.transport_stream
        self.socket: trio.socket.SocketType = cast(trio.SocketStream, bottom).socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._taken:
            raise trio.BrokenResourceError("the connection was taken over")
        with trio.move_on_after(SENDING) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            self.abort()
            raise trio.BrokenResourceError("the peer takes nothing")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data: bytes | bytearray = b""
        try:
            data = await self._stream.receive_some(max_bytes)
        finally:
            if not data:
                await self._ended()
        return data

    async def send_eof(self) -> None:
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()

    async def aclose(self) -> None:
        with trio.move_on_after(1.0):
            await self._stream.aclose()

    def take(self) -> trio.abc.Stream:
        """Take the connection over, to answer without hypercorn and for as long as one likes. Hypercorn sends nothing
        any more.

        It goes on receiving, so it reports when the peer closes. The caller closes the stream before its app returns.
        """
        if not self._taken:
            self._taken = True
            self._on_take()
            self._life.deadline = float("inf")
        return self._stream

    def prolong(self) -> None:
        """The peer takes a long answer: the connection may last as long again."""
        self._life.deadline = max(self._life.deadline, trio.current_time() + LIFE)

    def abort(self) -> None:
        """Close the socket at once; whoever sends or receives is woken. Safe to repeat."""
        self.socket.close()


def _config() -> Config:
    """What hypercorn bounds; it logs nothing, so that health checks do not fill the log."""
    config = Config()
    config.accesslog = config.errorlog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADER_BYTES
    config.h2_max_header_list_size = HEADER_BYTES
    config.h2_max_concurrent_streams = STREAMS
    config.keep_alive_timeout = IDLE
    config.keep_alive_max_requests = REQUESTS
    return config
