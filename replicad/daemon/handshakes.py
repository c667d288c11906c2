"""TLS handshakes: their number, their time, and one answer to a ClientHello in each turn.

A step may cost a millisecond (the server signs). Without a bound, a thousand clients that connect at once would stop
the event loop for a second.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress

import structlog
import trio

from replicad.config.declaring import plain
from replicad.daemon.arrivals import LONGEST_RECORD, has_client_hello
from replicad.daemon.by_address import address_of
from replicad.daemon.hub import Hub
from replicad.daemon.underway import Stage

log = structlog.get_logger()


class Handshakes:
    """Shakes hands with the clients of a hub."""

    def __init__(self, tls: ssl.SSLContext, hub: Hub, timeout: float) -> None:
        """`timeout`: seconds for a client to finish."""
        self._tls = tls
        self._hub = hub
        self._timeout = timeout

    def use(self, tls: ssl.SSLContext) -> None:
        """Use another context, with new certificates, for the handshakes that begin from now on."""
        self._tls = tls

    def ready(self, address: str) -> bool:
        """Whether a client from an address that has sent its ClientHello would soon be answered."""
        return self._hub.handshakes.ready(address)

    async def shake(self, stream: trio.SocketStream, peer: str) -> trio.abc.Stream | None:
        """The secured stream; None if the client cannot, is too slow, or had to give way. `stream` is closed then."""
        begun = _received(stream)
        try:
            address = address_of(stream.socket)
        except OSError:  # reset; nothing will come
            address = ""
        transport = _InTurn(stream, self._hub, begun, jumps=self._hub.handshakes.may_jump(address))
        secured = trio.SSLStream(transport, self._tls, server_side=True, https_compatible=True)
        scope = trio.CancelScope(deadline=trio.current_time() + self._timeout)
        stage = Stage.SERVER if has_client_hello(begun) else Stage.HELLO
        if not self._hub.admit_handshake(transport, scope.cancel, address, stage):
            await self._drop(secured)
            return None
        failure = ""
        try:
            with scope:
                await secured.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError) as error:
            cause = error.__cause__ or error
            failure = str(cause) or type(cause).__name__
        finally:
            self._hub.handshakes.leave(transport)
        transport.hub = None
        cut = scope.cancelled_caught and trio.current_time() < scope.deadline
        if cut:
            failure = "closed for a newer one (--max-connections, or too many handshakes)"
        elif scope.cancelled_caught:
            failure = f"not finished within {plain(self._timeout)} s"
        if failure:
            (log.info if cut else log.warning)("tls_refused", peer=peer, error=failure)  # an attack would fill the log
            await self._drop(secured)
            return None
        return secured

    async def _drop(self, secured: trio.abc.Stream) -> None:
        await trio.aclose_forcefully(secured)
        self.forget(secured)

    def forget(self, secured: trio.abc.Stream) -> None:
        """Free what a closed stream of `shake` holds at once: it refers to itself, so that it would be garbage later.

        OpenSSL holds some 30 kB for each.
        """
        vars(secured).clear()


def _received(stream: trio.SocketStream) -> bytes:
    """The received input, without waiting: a client that has sent its ClientHello must not count as a client without
    one.
    """
    with suppress(OSError):  # nothing yet; or reset, as the next look will find
        return os.read(stream.socket.fileno(), LONGEST_RECORD)
    return b""


class _InTurn(trio.abc.HalfCloseableStream):
    """A socket whose input is handed on when it is its turn, and first when there is a whole ClientHello.

    It keeps the hub informed of what the handshake waits for.
    """

    def __init__(self, stream: trio.SocketStream, hub: Hub, begun: bytes, *, jumps: bool) -> None:
        """`begun`: the bytes that were received already. `jumps`: it is answered without waiting for its turn."""
        self.hub: Hub | None = hub  # None: the handshake is over
        self._begun = begun
        self._jumps = jumps
        self._answered = False
        self._stream = stream

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below."""
        return self._stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.hub is None:
            return await self._stream.receive_some(max_bytes)
        if self._answered:  # the remaining work takes a tenth of the time
            return await self._stream.receive_some(max_bytes)
        data = await self._receive_hello(max_bytes)
        if not self._jumps:
            await self.hub.turns.next()
        return data

    async def _receive_hello(self, max_bytes: int | None) -> bytes | bytearray:
        """A whole record, or less at the end of the input."""
        assert self.hub is not None
        data = bytearray(self._begun)
        self._begun = b""
        while not has_client_hello(data):
            self.hub.handshakes.move(self, Stage.HELLO)  # also if the message goes on in another record
            more = await self._stream.receive_some(max_bytes)
            if not more:
                break
            data += more
        self.hub.handshakes.move(self, Stage.SERVER)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.hub is not None and not self._answered:
            self._answered = True
            self.hub.handshakes.move(self, Stage.CLIENT)
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()
