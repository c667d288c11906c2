"""Readers in processes of their own, the same code for every server: receive into a buffer and count a byte.

A reader knows nothing of the protocol but what to say first, what comes back when it is subscribed, and the byte that
stands once in every row. So what is compared is the servers, not their client libraries.
"""

from __future__ import annotations

import multiprocessing
import re
import selectors
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection

from bench.system import MARK, connect

BUFFER = 256 * 1024
PATIENCE = 180.0  # seconds without any row until a reader gives up
PROCESSES = 2  # in which many clients are read
_PROBE = re.compile(rb"~([0-9]+)~")

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Door:
    """How to subscribe: where, what to say, and what is in the answer. `authority`: a file, for TLS."""

    host: str
    port: int
    hello: bytes
    ready: bytes
    authority: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the clients of one process got: rows in all, and the monotonic times of the first and the last."""

    rows: int
    first: float
    last: float
    lost: int


@dataclass(slots=True)
class Crowd:
    """Clients that are subscribed already."""

    pipes: Sequence[Connection]

    def wait(self) -> Heard:
        """Until every client has its rows, or lost its connection."""
        parts: list[Heard] = [pipe.recv() for pipe in self.pipes]
        return Heard(
            sum(part.rows for part in parts),
            min(part.first for part in parts),
            max(part.last for part in parts),
            sum(part.lost for part in parts),
        )


@contextmanager
def crowd(door: Door, clients: int, rows: int) -> Iterator[Crowd]:
    """So many clients, each of which waits for so many rows; they are subscribed when the block begins."""
    shares = [clients // PROCESSES + (number < clients % PROCESSES) for number in range(min(PROCESSES, clients))]
    with processes([(count_rows, (door, share, rows)) for share in shares]) as pipes:
        yield Crowd(pipes)


def count_rows(pipe: Connection, door: Door, clients: int, rows: int) -> None:
    """The work of one process: say when all are subscribed, then count."""
    links = subscribe(door, clients)
    pipe.send("ready")
    watch = selectors.EpollSelector()
    for link in links:
        watch.register(link, selectors.EVENT_READ)
    counts = dict.fromkeys(links, 0)
    buffer = bytearray(BUFFER)
    first, last, lost, waiting = float("inf"), 0.0, 0, clients
    while waiting:
        events = watch.select(PATIENCE)
        if not events:
            lost += waiting
            break
        for key, _ in events:
            link = key.fileobj
            while (size := receive(link, buffer)) is not None:
                found = buffer.count(MARK, 0, size)
                counts[link] += found
                if found or not size:
                    last = time.monotonic()
                    first = min(first, last)
                if not size or counts[link] >= rows:
                    watch.unregister(link)
                    waiting -= 1
                    lost += not size
                    break
                if not (isinstance(link, ssl.SSLSocket) and link.pending()):
                    break
    pipe.send(Heard(sum(counts.values()), first, last, lost))
    for link in links:
        link.close()


@dataclass(slots=True)
class Probes:
    """Clients that note when they saw each probe, a row with a number between two marks."""

    pipes: Sequence[Connection]
    seen: dict[int, list[float]] = field(default_factory=dict)

    def stop(self) -> dict[int, list[float]]:
        """The monotonic times at which each probe was seen, one for each client that saw it."""
        for pipe in self.pipes:
            pipe.send("stop")
        for pipe in self.pipes:
            for number, at in pipe.recv():
                self.seen.setdefault(number, []).append(at)
        return self.seen


@contextmanager
def probes(door: Door, clients: int = 1) -> Iterator[Probes]:
    """So many clients in one process, subscribed when the block begins."""
    with processes([(note_probes, (door, clients))]) as pipes:
        yield Probes(pipes)


def note_probes(pipe: Connection, door: Door, clients: int) -> None:
    """The work of one process: note probes until told to stop."""
    links = subscribe(door, clients)
    pipe.send("ready")
    watch = selectors.EpollSelector()
    watch.register(pipe, selectors.EVENT_READ)
    for link in links:
        watch.register(link, selectors.EVENT_READ)
    buffer = bytearray(BUFFER)
    rests = dict.fromkeys(links, b"")
    seen: list[tuple[int, float]] = []
    while True:
        for key, _ in watch.select():
            link = key.fileobj
            if link is pipe:
                with suppress(EOFError):  # nobody wants to know
                    pipe.recv()
                    pipe.send(seen)
                return
            size = receive(link, buffer) or 0
            now = time.monotonic()
            if not size:
                watch.unregister(link)
                continue
            data = rests[link] + buffer[:size]
            seen += [(int(found[1]), now) for found in _PROBE.finditer(data)]
            rests[link] = bytes(data[data.rfind(b"\n") + 1 :])


def hold(pipe: Connection, door: Door, clients: int) -> None:
    """The work of one process: keep connections open and throw away what comes, until told to stop."""
    watch = selectors.EpollSelector()
    links = subscribe(door, clients)
    watch.register(pipe, selectors.EVENT_READ)
    for link in links:
        watch.register(link, selectors.EVENT_READ)
    pipe.send("ready")
    buffer = bytearray(BUFFER)
    while True:
        for key, _ in watch.select():
            if key.fileobj is pipe:
                return
            if not receive(key.fileobj, buffer):
                raise ConnectionError("an idle connection was closed")


@contextmanager
def idle(door: Door, clients: int) -> Iterator[None]:
    """So many clients that are subscribed and get nothing."""
    shares = [clients // PROCESSES] * PROCESSES
    with processes([(hold, (door, share)) for share in shares]) as pipes:
        yield
        for pipe in pipes:
            pipe.send("stop")


def subscribe(door: Door, clients: int) -> list[socket.socket]:
    links = []
    for _ in range(clients):  # each says at once what it wants: a crowd that says nothing gives way to others
        links.append(secured(connect(door.host, door.port), door.authority))
        links[-1].sendall(door.hello)
    for link in links:
        heard = b""
        while door.ready not in heard:
            data = link.recv(4096)
            if not data:
                raise ConnectionError(f"closed before {door.ready!r}; it said {heard!r}")
            heard += data
            if re.search(rb"^ERROR .*\n", heard, re.MULTILINE):  # the daemon keeps the connection, and sends PINGs
                raise ConnectionError(f"refused: {heard!r}")
        link.setblocking(False)
    return links


def secured(link: socket.socket, authority: str) -> socket.socket:
    """The connection, over TLS if a file with the certificate is given."""
    if not authority:
        return link
    return _context(authority).wrap_socket(link, server_hostname="localhost")


@lru_cache(maxsize=1)
def _context(authority: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority)


def receive(link: socket.socket, buffer: bytearray) -> int | None:
    """How many bytes came: 0 at the end, None if they are no whole record of TLS yet."""
    try:
        return link.recv_into(buffer)
    except ssl.SSLWantReadError:
        return None
    except ConnectionError:
        return 0


@contextmanager
def processes(jobs: Sequence[tuple[object, tuple[object, ...]]]) -> Iterator[list[Connection]]:
    """Run each job with a pipe of its own; the block begins when all have said that they are ready."""
    pipes, workers = [], []
    try:
        for work, arguments in jobs:
            ours, theirs = _spawn.Pipe()
            worker = _spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(timeout=1)
            worker.kill()
            worker.join()
