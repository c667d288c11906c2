"""Accepts connections: their limit, TLS, and errors of `accept`. It does not know what a session does.

How they wait before is in `accept_queues`, and how they wait for a session in `arrivals`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog
import trio

from replicad.config.access import parse_ip
from replicad.config.settings import Address
from replicad.daemon.handshakes import Arrivals, Door, Handshakes
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
