"""Clients that misbehave, each kind in a process of its own until told to stop. They use plain sockets only."""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from itertools import count as count_from
from multiprocessing.connection import Connection
from pathlib import Path

from bench.readers import processes
from bench.system import STREAM

IDLE = 1500  # connections that relays go to
CROWD = 400  # connections with an unfinished line
LINE = 1 << 20  # bytes of an unfinished line
HALF = 1500  # handshakes that are begun
TRICKLES = 1000  # connections that take old rows slowly
TRICKLE, TRICKLE_PAUSE = 4096, 0.4  # bytes, and seconds between two times that so many are taken: 10 kB/s
BEGINS = 30.0  # seconds in which all of them must have got their first rows
GREEDY, AGAIN = 200, 2.0  # connections that take old rows quickly, and seconds after which one begins again
UNREAD = 200  # connections that do not read
_OLD_ROWS = f"REPLICATE {STREAM} EARLIEST\n".encode()
NICE = 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@dataclass(frozen=True, slots=True)
class Dialect:
    """What attackers say: a PING, what an idle client says first, what it is relayed, and a first valid command."""

    ping: bytes = b"PING x\n"
    idle: bytes = b"NAME idle\n"
    relay: bytes = b"REMOTE_SERVER_UP example.org\n"
    known: bytes = b"PING x\n"


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address, and a lease under which a tube may be acked. `source`: the attacker's own address.

    `http`: the port for HTTP, 0 for none. `redis`: where the daemon expects Redis. `secret`: of the polite clients,
    where one is needed.
    """

    host: str
    port: int
    lease: str
    source: str = ""
    dialect: Dialect = Dialect()
    http: int = 0
    redis: int = 0
    secret: str = ""


Attack = Callable[[Connection, Target], None]


def _connect(target: Target, hello: bytes = b"") -> socket.socket:
    link = socket.create_connection((target.host, target.port), timeout=60, source_address=(target.source, 0))
    with suppress(OSError):
        link.sendall(hello)
    return link


def _pour(pipe: Connection, links: list[socket.socket], block: bytes, pause: float = 0.0) -> None:
    """Send the block again and again on every link, and discard what comes, until told to stop."""
    watch = selectors.DefaultSelector()
    left = dict.fromkeys(links, memoryview(b""))
    for link in links:
        link.setblocking(False)
        watch.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
    while not pipe.poll():
        for key, events in watch.select(0.1):
            link = key.fileobj
            assert isinstance(link, socket.socket)
            try:
                if events & selectors.EVENT_READ and not link.recv(1 << 18):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    part = left[link] or memoryview(block)
                    left[link] = part[link.send(part) :]
            except BlockingIOError:
                pass
            except OSError:  # cut off
                watch.unregister(link)
                link.close()
        if not watch.get_map():
            break
        if pause:
            time.sleep(pause)
    pipe.poll(None)


def attack_from_afar(pipe: Connection, attack: Attack, target: Target) -> None:
    """The work of one process: an attack as from another machine.

    It has an address of its own, and leaves the processors to the daemon, Postgres and polite clients first: real
    attackers have their own. What is left is enough to keep the daemon busy all the time.
    """
    with suppress(OSError):
        os.setsid()  # else the group of processes that Linux weighs is that of the polite clients
        os.nice(NICE)
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
    attack(pipe, target)


def begin_attack(stack: ExitStack, groups: Sequence[Sequence[Attack]], target: Target) -> list[Connection]:
    """Begin all attacks of each group, which end with the stack. Each has a process and an address of its own."""
    sources = (f"127.0.0.{number}" for number in count_from(2))
    jobs = [
        [(attack_from_afar, (attack, replace(target, source=next(sources)))) for attack in group] for group in groups
    ]
    return list(chain(*[stack.enter_context(processes(group)) for group in jobs]))


def pings(pipe: Connection, target: Target) -> None:
    """Two clients that send PING as fast as they can."""
    links = [_connect(target) for _ in range(2)]
    pipe.send("ready")
    _pour(pipe, links, target.dialect.ping * 10_000)


def streams(pipe: Connection, target: Target) -> None:
    """Two clients that send STREAMS without waiting for the answers."""
    links = [_connect(target) for _ in range(2)]
    pipe.send("ready")
    _pour(pipe, links, b"STREAMS\n" * 10_000)


def acks(pipe: Connection, target: Target) -> None:
    """Two clients that send lists of half a million numbers with an ACK, under a lease that they do not have."""
    links = [_connect(target, b"NAME acks\n") for _ in range(2)]
    head = f"ACK {target.lease}999 ".encode()
    line = head + b"1," * ((LINE - len(head) - 8) // 2) + b"1\n"
    pipe.send("ready")
    _pour(pipe, links, line)


def relays(pipe: Connection, target: Target) -> None:
    """A client that relays as fast as it can to many idle connections, which read what they get."""
    idle = [_connect(target, target.dialect.idle) for _ in range(IDLE)]
    watch = selectors.DefaultSelector()
    for link in idle:
        link.setblocking(False)
        watch.register(link, selectors.EVENT_READ)
    sender = _connect(target, target.dialect.known)
    sender.setblocking(False)
    pipe.send("ready")
    while not pipe.poll():
        with suppress(OSError):  # full, or cut off
            sender.send(target.dialect.relay * 10)
        with suppress(OSError):
            sender.recv(1 << 16)
        for key, _ in watch.select(0.005):
            with suppress(OSError):
                key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
    pipe.poll(None)


def unfinished(pipe: Connection, target: Target) -> None:
    """Many clients with a line that does not end, closed and opened again."""
    pipe.send("ready")
    block = b"x" * (1 << 16)
    while not pipe.poll():
        links = [_connect(target) for _ in range(CROWD)]
        for link in links:
            link.setblocking(False)
        for _ in range(LINE // len(block)):
            for link in links:
                with suppress(OSError):
                    link.send(block)
        for link in links:
            link.close()
    pipe.poll(None)


def unfinished_known(pipe: Connection, target: Target) -> None:
    """The same after a first valid command, which makes them clients that may send long lines."""
    pipe.send("ready")
    block = b"x" * (1 << 16)
    while not pipe.poll():
        links = [_connect(target, target.dialect.known) for _ in range(CROWD)]
        for link in links:
            link.setblocking(False)
        for _ in range(2 * LINE // len(block)):
            for link in links:
                with suppress(OSError):
                    link.send(block)
        time.sleep(0.2)
        for link in links:
            link.close()
    pipe.poll(None)


def resets(pipe: Connection, target: Target) -> None:
    """A client that connects and resets as fast as it can."""
    pipe.send("ready")
    while not pipe.poll():
        for _ in range(50):
            link = socket.socket()
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                link.bind((target.source, 0))
                link.connect((target.host, target.port))
            link.close()
    pipe.poll(None)


def handshakes(pipe: Connection, target: Target) -> None:
    """Many connections that begin a TLS handshake and do not go on; closed ones are opened again."""
    _begin_again(pipe, target, b"\x16\x03\x01\x02\x00\x01")


def hellos(pipe: Connection, target: Target) -> None:
    """The same with a whole ClientHello, which the server has to answer."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    _begin_again(pipe, target, sent.read())


def _begin_again(pipe: Connection, target: Target, hello: bytes) -> None:
    """Hold HALF connections that have said no more than `hello`, until told to stop."""
    watch = selectors.DefaultSelector()
    pipe.send("ready")
    while not pipe.poll():
        for _ in range(min(50, HALF - len(watch.get_map()))):
            with suppress(OSError):
                link = _connect(target, hello)
                link.setblocking(False)
                watch.register(link, selectors.EVENT_READ)
        for key, _ in watch.select(0.01):
            link = key.fileobj  # type: ignore[assignment]
            try:
                closed = not link.recv(4096)
            except OSError:
                closed = True
            if closed:
                watch.unregister(link)
                link.close()
    pipe.poll(None)


def _begin_reading(target: Target, clients: int) -> list[socket.socket]:
    """Clients that are sent old rows: the first of these have come, or the time for that is over."""
    links = [_connect(target, _OLD_ROWS) for _ in range(clients)]
    deadline = time.monotonic() + BEGINS
    for link in links:
        link.settimeout(max(0.01, deadline - time.monotonic()))
        heard = b""
        with suppress(OSError):
            while b"RDATA" not in heard and (data := link.recv(TRICKLE)):
                heard += data
    return links


def trickles(pipe: Connection, target: Target) -> None:
    """Many clients that take old rows of a stream slowly, at more than the pace that is required."""
    links = _begin_reading(target, TRICKLES)
    pipe.send("ready")
    while not pipe.poll():
        began = time.monotonic()
        for link in links:
            with suppress(OSError):  # nothing has come, or it was cut off
                link.recv(TRICKLE, socket.MSG_DONTWAIT)
        time.sleep(max(0.0, began + TRICKLE_PAUSE - time.monotonic()))
    pipe.poll(None)


def unread(pipe: Connection, target: Target) -> None:
    """Clients that ask for old and new rows of a stream and do not read."""
    links = _begin_reading(target, UNREAD)
    pipe.send("ready")
    pipe.poll(None)
    for link in links:
        link.close()


def greedy(pipe: Connection, target: Target) -> None:
    """Clients that take all old rows of a stream as fast as they come, and then come again from the beginning."""
    watch = selectors.DefaultSelector()
    buffer = bytearray(1 << 20)

    def begin() -> None:
        link = _connect(target, _OLD_ROWS)
        link.settimeout(0)
        watch.register(link, selectors.EVENT_READ, time.monotonic() + AGAIN)

    for _ in range(GREEDY):
        begin()
    pipe.send("ready")
    while not pipe.poll():
        for key, _ in watch.select(0.1):
            link = key.fileobj
            assert isinstance(link, socket.socket)
            if not link.recv_into(buffer) or time.monotonic() > key.data:
                watch.unregister(link)
                link.close()
                begin()
    pipe.poll(None)


QUICK: dict[str, Attack] = {f"{GREEDY} that take old rows": greedy}
SLOW: dict[str, Attack] = {f"{TRICKLES:,} that trickle": trickles, f"{UNREAD} that do not read": unread}
PLAIN: dict[str, Attack] = {
    "two PING floods": pings,
    "two pipelines of STREAMS": streams,
    "two that send ACK lists": acks,
    f"relays to {IDLE:,} idle ones": relays,
    f"{CROWD} unfinished lines": unfinished,
    f"{CROWD} unfinished lines, known": unfinished_known,
    "resets": resets,
}
ANYWHERE = (pings, relays, unfinished, unfinished_known, resets)  # what can be done to any server of text lines
SECURED: dict[str, Attack] = {
    f"{HALF:,} half handshakes": handshakes,
    f"{HALF:,} ClientHellos and no more": hellos,
}
