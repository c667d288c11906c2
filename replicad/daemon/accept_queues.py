"""The sockets that a daemon listens on, and the connections that wait there until they are accepted.

The system keeps these connections in one queue for each listening socket, in the order in which they came. Behind a
crowd that connects faster than connections are accepted, every other client would wait there, whatever our own queues
do. So on Linux each address has QUEUES listening sockets (SO_REUSEPORT), and a filter that chooses one of them by the
client's address (SO_ATTACH_REUSEPORT_CBPF; socket(7) of Linux). Connections are accepted from each in turns, so a crowd
from one address fills one queue. Where the system has no such filter, there is one queue, as before it.
"""

from __future__ import annotations

import ctypes
import errno
import selectors
import socket
import struct
import sys
from collections.abc import Sequence

import trio

from replicad.config.access import parse_ip
from replicad.config.settings import Address
from replicad.errors import EnvironmentRefused

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
