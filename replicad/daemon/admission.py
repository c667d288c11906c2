"""Admits connections: sockets that listen, `accept` and its errors, TLS handshakes, the wait for a session.

It does not know what a session does.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import selectors
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import structlog
import trio

from replicad.config.access import parse_ip
from replicad.config.declaring import plain
from replicad.config.settings import Address
from replicad.daemon.fairness import ByAddress, address_of, network_of
from replicad.daemon.hub import Hub, Stage
from replicad.daemon.troubles import Troubles
from replicad.errors import EnvironmentRefused
from replicad.retry import Backoff

# The sockets that a daemon listens on, and the connections that wait there until they are accepted.
#
# The system keeps these connections in one queue for each listening socket, in the order in which they came. Behind a
# crowd that connects faster than connections are accepted, every other client would wait there, whatever our own
# queues do. So on Linux each address has QUEUES listening sockets (SO_REUSEPORT), and a filter that chooses one of
# them by the client's address (SO_ATTACH_REUSEPORT_CBPF; socket(7) of Linux). Connections are accepted from each in
# turns, so a crowd from one address fills one queue. Where the system has no such filter, there is one queue, as
# before it.


BACKLOG = 4096  # a thousand workers that reconnect at once must not be refused
QUEUES = 16  # of one address, a power of two: beside some attackers, most other addresses share a queue with none

_ATTACH = 51  # SO_ATTACH_REUSEPORT_CBPF; the module `socket` has no name for it
_HEADER = -0x100000  # SKF_NET_OFF: offsets from here on are in the header of IP (linux/filter.h)
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8  # where the client's address begins in it (RFC 791, 3.1; RFC 8200, 3)
_LOAD, _TAX, _XOR, _SHIFT, _AND, _RETURN = 0x20, 0x07, 0xAC, 0x74, 0x54, 0x16  # classic BPF; linux/bpf_common.h


class AcceptQueues:
    """Listening sockets, and the addresses that they listen on. Close them at the end."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = tuple(sockets)
        self.addresses = tuple(dict.fromkeys(Address(*one.getsockname()[:2]) for one in self._sockets))
        self._watch = selectors.DefaultSelector()
        for one in self._sockets:
            one.setblocking(False)
            self._watch.register(one, selectors.EVENT_READ)
        self._turn = 0

    async def wait(self) -> None:
        """Return when a connection waits."""
        await trio.lowlevel.wait_readable(self._watch.fileno())

    def waiting(self) -> list[socket.socket]:
        """The sockets on which connections wait. A different one comes first at each call."""
        found = [key.fileobj for key, _ in self._watch.select(0)]
        self._turn += 1
        first = self._turn % max(1, len(found))
        return [one for one in (*found[first:], *found[:first]) if isinstance(one, socket.socket)]

    def close(self) -> None:
        """Stop listening. Safe to repeat."""
        self._watch.close()
        for one in self._sockets:
            one.close()


def files_of(address: Address) -> int:
    """How many files `listen` opens: for a name there may be an address of IPv4 and one of IPv6; one file watches."""
    return (1 if parse_ip(address.host) is not None else 2) * QUEUES + 1


async def listen(address: Address, option: str = "--listen") -> AcceptQueues:
    """Listen on an address, which `option` has given.

    Raises:
        EnvironmentRefused: the port is in use, the address is not ours, or we may not bind to it.
    """
    try:
        # These refuse a port that somebody listens on; sockets with SO_REUSEPORT would share that of our own user.
        found = await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG)
        plain = [socket.socket(fileno=one.socket.detach()) for one in found]
        return AcceptQueues([each for one in plain for each in _divided(one)])
    except OSError as error:
        why = {
            errno.EADDRINUSE: f"the port is in use; choose another with {option}, or stop the program that has it",
            errno.EADDRNOTAVAIL: f"this machine has no such address; choose one of its own with {option}",
            errno.EACCES: f"ports below 1024 need privileges; choose a higher one with {option}",
        }.get(error.errno or 0, error.strerror or str(error))
        raise EnvironmentRefused(f"cannot listen on {address}: {why}") from error


def _divided(plain: socket.socket) -> list[socket.socket]:
    """QUEUES sockets in the place of a listening socket; only that socket, where the system cannot divide them by
    address.
    """
    family, at = plain.family, plain.getsockname()
    found: list[socket.socket] = []
    try:
        found.append(_shared(family))
        _divide(found[0])
    except OSError:
        found.clear()
    if not found:
        return [plain]
    plain.close()
    try:
        found += [_shared(family) for _ in range(QUEUES - 1)]
        for one in found:
            one.bind(at)
            one.listen(BACKLOG)
    except BaseException:
        for one in found:
            one.close()
        raise
    return found


def _shared(family: int) -> socket.socket:
    """A socket that may have the same address as others."""
    if sys.platform != "linux":
        raise OSError(errno.ENOPROTOOPT, "there is no filter here")
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return found


def _divide(first: socket.socket) -> None:
    """Have the system choose by the client's address among the sockets that will share the address of this one: by all
    bits of an address of IPv4, by the network of 64 bits of IPv6. Neighbours have different queues.
    """
    load = [(_LOAD, _HEADER + _IPV4_SOURCE)]
    if first.family == socket.AF_INET6:
        high, low = _HEADER + _IPV6_SOURCE, _HEADER + _IPV6_SOURCE + 4
        load = [(_LOAD, high), (_TAX, 0), (_LOAD, low), (_XOR, 0)]
    fold = [step for bits in (16, 8, 4) for step in ((_TAX, 0), (_SHIFT, bits), (_XOR, 0))]
    program = [*load, *fold, (_AND, QUEUES - 1), (_RETURN, 0)]
    code = b"".join(struct.pack("HBBI", what, 0, 0, value & 0xFFFFFFFF) for what, value in program)
    held = ctypes.create_string_buffer(code, len(code))
    first.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HL", len(program), ctypes.addressof(held)))


ACCEPTING = 0.001  # seconds after which other tasks run; a connection takes ten to fifty microseconds

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


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds until the next `accept` after one failed (for example because no file descriptor was left)."""

    first: float = 0.1  # doubles up to `longest`
    longest: float = 1.0


class Acceptor:
    """Accepts the connections of all listeners of a daemon and runs `serve(stream, peer)` for each, in `sessions`.

    `room` is the maximum of client sockets, including sockets that are being refused. One more is closed at once;
    without TLS it is sent `full` before. So clients cannot use up the file descriptors that the daemon needs.

    Connections are accepted as fast as they arrive; a connection that was reset meanwhile is closed. If they arrive
    faster than sessions can be begun, `Arrivals` decides which of them get a session.
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
        secure: Handshakes | None = None,
        give_way: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        first_line: int = 4096,
        line_end: bytes = b"\n",
        too_long: bytes = b"",
        pauses: Pauses = Pauses(),
        name: str = "listener",
    ) -> None:
        """`refused` is called for each connection that is closed because `room` is used up. `give_way` waits for
        the next turn; accepting has a queue of its own, so that it does not wait behind all who send much. `too_long`
        are the lines for a client whose first line, up to `line_end`, has more than `first_line` bytes. `name`: of the
        service in troubles.
        """
        self._place = ("service", name, "accept")  # under which failures of `accept` are reported
        self._serve = serve
        self._sessions = sessions
        self._troubles = troubles
        self._room = room
        self._full = full
        self._refused = refused
        self._secure = secure
        self._pauses = pauses
        self._inside = 0
        door = Door(secure is not None, first_line, too_long, line_end)
        self._arrivals = Arrivals(door, self._enter, give_way, _always if secure is None else secure.ready)
        self._begins = False  # whether a task begins the sessions of arrived connections
        self._reset = 0

    async def accept_forever(self, queues: AcceptQueues) -> None:
        """Accept until cancelled.

        A failure of `accept`, for example because file descriptors have run out, is reported as a trouble, and `accept`
        is called again after a pause. Open sessions are not affected.
        """
        backoff = Backoff(self._pauses.first, self._pauses.longest, jitter=0.0)
        while True:
            try:
                await queues.wait()
                self._accept_waiting(queues.waiting())
            except Exception as error:  # noqa: BLE001 - reported; without this task no client could connect
                self._report_failure(error)
                await trio.sleep(backoff.next_delay())
            else:
                self._troubles.end(*self._place)
                backoff.reset()

    @property
    def dead(self) -> int:
        """The connections that were closed without a session, since the start: reset, ended, or without hope."""
        return self._reset + self._arrivals.hopeless

    def _accept_waiting(self, queues: list[socket.socket]) -> None:
        """Accept the connections that wait, one of each queue in turn, for at most ACCEPTING seconds. Connections for
        which there is no room are refused in that time too.
        """
        until = trio.current_time() + ACCEPTING
        try:
            while queues:
                for queue in tuple(queues):
                    if trio.current_time() >= until:
                        return
                    try:
                        accepted, address = queue.accept()
                    except BlockingIOError:
                        queues.remove(queue)
                    except OSError as error:
                        if error.errno not in _OF_ONE:
                            raise
                        self._reset += 1
                    else:
                        accepted.setblocking(False)
                        self._arrivals.put(accepted, address[0])
                        while len(self._arrivals) > max(0, self._room - self._inside):
                            self._refuse(self._arrivals.take_out())
        finally:
            if not self._begins:
                self._arrivals.begin_one()
            if self._arrivals and not self._begins:
                self._begins = True
                self._sessions.start_soon(self._begin_arrivals)

    async def _begin_arrivals(self) -> None:
        try:
            await self._arrivals.run()
        finally:
            self._begins = False

    def _report_failure(self, error: Exception) -> None:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            remedy = "; raise the limit of open files (ulimit -n)" if error.errno in _EXHAUSTED else ""
            self._troubles.begin(*self._place, f"no connection can be accepted: {why}{remedy}", code="accept_failed")
        else:
            self._troubles.fail(*self._place, error)

    def _enter(self, client: socket.socket) -> None:
        """Begin to serve a connection."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))
        peer = _peer_of(stream)
        if peer is None:
            self._reset += 1
            stream.socket.close()
        elif self._inside >= self._room:
            self._refuse(stream.socket)
        else:
            self._sessions.start_soon(self._serve_one, stream, peer)
            self._inside += 1

    @contextmanager
    def lent(self) -> Iterator[None]:
        """For the block, a connection is not counted here: its new owner counts it."""
        self._inside -= 1
        try:
            yield
        finally:
            self._inside += 1

    def _refuse(self, client: socket.socket | trio.socket.SocketType) -> None:
        self._refused()
        if self._secure is None:
            with suppress(OSError):
                os.write(client.fileno(), self._full)  # fits into the send buffer of a new socket
        client.close()

    async def _serve_one(self, stream: trio.SocketStream, peer: str) -> None:
        """Serve one connection. A failure is recorded and ends only this connection."""
        try:
            with self._troubles.contain_and_record("session", peer, "serve"):
                if self._secure is None:
                    await self._serve(stream, peer)
                elif (secured := await self._secure.shake(stream, peer)) is not None:
                    try:
                        await self._serve(secured, peer)
                    finally:
                        self._secure.forget(secured)
        finally:
            self._inside -= 1
            stream.socket.close()


def _always(address: str) -> bool:  # noqa: ARG001 - as `Handshakes.ready`
    return True


def _peer_of(stream: trio.SocketStream) -> str | None:
    """The address of the other end; None if the connection has been reset."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return None
    except ValueError:  # no address: a pair of sockets
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# TLS handshakes: their number, their time, and one answer to a ClientHello in each turn.
#
# A step may cost a millisecond (the server signs). Without a bound, a thousand clients that connect at once would stop
# the event loop for a second.

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
