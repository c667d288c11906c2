"""TLS handshakes: their number, their time, and one answer to a ClientHello in each turn.

A step may cost a millisecond (the server signs). Without a bound, a thousand clients that connect at once would stop
the event loop for a second.
"""

from __future__ import annotations

import enum
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import structlog
import trio

from replicad.config.declaring import plain
from replicad.daemon.fairness import ByAddress, address_of, network_of
from replicad.daemon.hub import Hub, Stage

# Accepted connections that have no session yet: which of them gets one next, and which gets none.
#
# A session costs ten times as much as a look at the input. So a client that has sent a whole first line (with TLS: a
# whole ClientHello) comes before all others. A crowd of clients without a whole line waits for some time, in which
# the input of attackers becomes too long, or ends. Clients with a whole line are served in turns by their addresses,
# so that a crowd from one address delays others by one session. This file does not know what a session does.


LIVE = 4  # sessions that are begun in one turn: each takes some hundred microseconds
ASKED = 16  # addresses of which the next in turn may begin, if those before it may not
LOOKED = 64  # clients without a line that are looked at in one turn: two microseconds each
LOOKING = 0.0005  # seconds after which a turn ends all the same: closing with unread input takes much longer
QUIET = 0.05  # seconds for which a client without a line waits, if there are more than a few such clients
FEW = 8  # clients without a line that are begun, or refused for a long line, at once, in QUIET seconds
REST = 0.001  # seconds until clients without a line are looked at again, if none of them had sent anything
_HANDSHAKE = b"\x16"  # the first byte of a TLS record with a ClientHello (RFC 8446, 5.1)
_HEAD = 5  # bytes of a TLS record before its content; the last two are the length of the content
LONGEST_RECORD = _HEAD + (1 << 14)  # bytes of the longest record that is not encrypted


class Input(enum.Enum):
    """What a new client has sent."""

    WHOLE = "whole"  # a line, or a ClientHello
    PART = "part"  # nothing yet, or the beginning
    TOO_LONG = "too_long"  # a line that is too long
    ENDED = "ended"  # the end, or a reset


@dataclass(frozen=True, slots=True)
class Door:
    """How a client begins. `too_long` are the lines for one whose first line has more than `first_line` bytes; it ends
    with `line_end`.
    """

    tls: bool
    first_line: int = 4096
    too_long: bytes = b""
    line_end: bytes = b"\n"

    def look(self, client: socket.socket) -> Input:
        """The received input, which stays unread."""
        try:
            data = client.recv(self.first_line + 1, socket.MSG_PEEK)
        except BlockingIOError:
            return Input.PART
        except OSError:
            return Input.ENDED
        if not data:
            return Input.ENDED
        if self.tls:
            return Input.WHOLE if has_client_hello(data, self.first_line) else Input.PART
        if self.line_end in data:
            return Input.WHOLE
        return Input.TOO_LONG if len(data) > self.first_line else Input.PART


def has_client_hello(data: bytes | bytearray, most: int = LONGEST_RECORD) -> bool:
    """Whether a handshake can go on: `data` is a whole record, or `most` bytes of it, or begins another protocol."""
    if data[:1] != _HANDSHAKE:
        return bool(data)
    return len(data) >= _HEAD and len(data) >= min(most, _HEAD + int.from_bytes(data[3:_HEAD]))


class Arrivals:
    """The queue before the sessions."""

    def __init__(
        self,
        door: Door,
        begin: Callable[[socket.socket], None],
        give_way: Callable[[], Awaitable[None]],
        ready: Callable[[str], bool],
    ) -> None:
        """`begin` begins a session. `give_way` waits for the next turn. `ready`: whether one from an address, with a
        whole line, may begin now; it becomes true without our doing.
        """
        self._ready = ready
        self._door = door
        self._begin = begin
        self._give_way = give_way
        self._whole: ByAddress[socket.socket] = ByAddress()
        self._new: ByAddress[socket.socket] = ByAddress()  # without a line; looked at once
        self._part: ByAddress[socket.socket] = ByAddress()  # the same, looked at twice
        self._came: dict[socket.socket, float] = {}  # when the last two connections arrived
        self._few_until = float("-inf")
        self._few = 0  # clients without a line that may still be begun before then
        self.hopeless = 0  # that were closed without a session, since the start

    def __len__(self) -> int:
        return len(self._whole) + len(self._came)

    def put(self, client: socket.socket, host: str) -> None:
        """Add a client that came from this address, and whose socket does not block."""
        self._sort(client, network_of(host), trio.current_time(), self._new)

    def begin_one(self) -> None:
        """Begin one session now, without a turn; none if too many came without a line. `run` begins the others."""
        if self._whole:
            self._begin_ready()
        elif self._new and self._is_one_of_few(trio.current_time()):
            client = self._new.take(newest=True)
            del self._came[client]
            self._begin(client)

    def take_out(self) -> socket.socket:
        """Remove a connection for which there is no room: an old one of the address with the most, if possible without
        a whole line.
        """
        queues = (self._part, self._new, self._whole)
        _, address = max((queue.most() for queue in queues), key=itemgetter(0))
        for queue in queues:
            client = queue.oldest(address)
            if client is not None:
                queue.remove(client)
                self._came.pop(client, None)
                return client
        raise IndexError("there is none")

    async def run(self) -> None:
        """Begin the sessions of all that wait; returns when there are none. At the end nothing is left open."""
        try:
            while self:
                await self._give_way()
                found = self._begin_whole() + self._look_again()
                if not found and not self._whole:
                    await trio.sleep(REST)
        finally:
            while self:
                self.take_out().close()

    def _begin_whole(self) -> int:
        """Begin those with a whole line."""
        for number in range(LIVE):
            if not self._begin_ready():
                return number
        return LIVE

    def _begin_ready(self) -> bool:
        """Begin the next connection that may begin. False if there is none."""
        for address in islice(self._whole.turns(), ASKED):
            if self._ready(address):
                self._begin(self._whole.take(address))
                return True
        return False

    def _look_again(self) -> int:
        """Look at some connections without a line, the newest and the oldest in turns. A connection is begun if it has
        waited for long enough and none has a line. Returns by how many the waiting ones have become fewer.
        """
        now = trio.current_time()
        before = len(self._came)
        for number in range(min(LOOKED, before)):
            newest = bool(self._new) and (number % 2 == 0 or not self._part)
            queue = self._new if newest else self._part
            address, client = queue.turn(), queue.take(newest=newest)
            self._sort(client, address, self._came.pop(client), self._part)
            if trio.current_time() >= now + LOOKING:
                break
        if self._part and not self._whole:
            client = self._part.first()
            if now >= self._came[client] + QUIET or self._is_one_of_few(now):
                self._part.take(newest=False)
                del self._came[client]
                self._begin(client)
        return before - len(self._came)

    def _sort(self, client: socket.socket, address: str, came: float, unfinished: ByAddress[socket.socket]) -> None:
        found = self._door.look(client)
        if found is Input.WHOLE:
            self._whole.add(client, address)
        elif found is Input.PART:
            unfinished.add(client, address)
            self._came[client] = came
        else:
            self.hopeless += 1
            if found is Input.TOO_LONG and self._is_one_of_few(trio.current_time()):
                with suppress(OSError):
                    os.write(client.fileno(), self._door.too_long)  # fits into the send buffer of a new socket
            client.close()

    def _is_one_of_few(self, now: float) -> bool:
        """Whether so few clients without a line arrived lately that this client is begun, or refused with a reason, at
        once.
        """
        if now >= self._few_until:
            self._few_until, self._few = now + QUIET, FEW
        self._few -= 1
        return self._few >= 0


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
