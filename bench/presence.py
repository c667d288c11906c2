"""Presence: from what a worker says to the row at a reader of the stream, and relays from one daemon to another.

One worker has many users come online at once, then one at a time, and then clears them all; a reader of the same daemon
counts the rows. Two daemons serve one database for the relays. There is no peer: what others do, they do in memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bench.report import Figure, Spread, amount, latency
from bench.system import Daemon, Options, connect, system

USERS = 20_000
SINGLY = 200
RELAYS = 5_000
PATIENCE = 30.0  # seconds for anything to happen


def run(options: Options) -> list[Figure]:
    """Users per second, the latency of one, and relays per second between daemons."""
    users, singly, relays = options.sized(USERS), options.sized(SINGLY), options.sized(RELAYS)
    online, offline, times, across = [], [], [], []
    with system() as ours, ours.daemon() as first:
        ours.replicad("presence", "enable")
        with (
            ours.daemon() as second,
            _connected(first) as reader,
            _connected(first) as worker,
            _connected(second) as other,
        ):
            _follow(reader)
            _wait_for_relays(worker, other)
            for turn in range(options.runs):
                lines = [f"USER_SYNC w @{number}.{turn}:b P start 1" for number in range(users)]
                online.append(users / _timed(worker, reader, lines))
                for number in range(singly):
                    times.append(_timed(worker, reader, [f"USER_SYNC w @one{number}.{turn}:b P start 1"]))
                offline.append((users + singly) / _timed(worker, reader, ["CLEAR_USER_SYNC w"], rows=users + singly))
                lines = [f"REMOTE_SERVER_UP server{number}.example.org" for number in range(relays)]
                across.append(relays / _timed(worker, other, lines, word=b"REMOTE_SERVER_UP"))
    return [
        Figure("users who come online at once", amount(Spread.of(online).middle, "users/s")),
        Figure("one user: from USER_SYNC to the row, p50 / p99", latency(times)),
        Figure("users who go offline by one CLEAR_USER_SYNC", amount(Spread.of(offline).middle, "users/s")),
        Figure("relays to another daemon", amount(Spread.of(across).middle, "lines/s")),
    ]


@contextmanager
def _connected(daemon: Daemon) -> Iterator[socket.socket]:
    with connect(daemon.host, daemon.port) as link:
        yield link


def _follow(reader: socket.socket) -> None:
    """Subscribe, as soon as the daemon has noticed that there is presence."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        reader.sendall(b"REPLICATE presence\n")
        answer = _heard(reader, (b"POSITION presence", b"ERROR"))
        if b"POSITION presence" in answer:
            return
        time.sleep(0.1)
    raise RuntimeError("waited in vain for the stream presence")


def _wait_for_relays(worker: socket.socket, other: socket.socket) -> None:
    """Until the daemons hear each other."""
    other.settimeout(0.2)
    for _ in range(int(PATIENCE / 0.2)):
        worker.sendall(b'LOCK_RELEASED ["a","b","c"]\n')
        with suppress(TimeoutError):
            _heard(other, (b"LOCK_RELEASED",))
            other.settimeout(PATIENCE)
            return
    raise RuntimeError("waited in vain for a relay")


def _heard(link: socket.socket, words: tuple[bytes, ...]) -> bytes:
    """All that comes until one of the words is in it."""
    data = b""
    while not any(word in data for word in words):
        data += _received(link)
    return data


def _timed(
    worker: socket.socket, reader: socket.socket, lines: list[str], word: bytes = b"RDATA", rows: int = 0
) -> float:
    """Seconds from saying these lines until as many with the word, or `rows`, have come."""
    data = "".join(f"{line}\n" for line in lines).encode()
    began = time.perf_counter()
    said = threading.Thread(target=worker.sendall, args=(data,), daemon=True)
    said.start()
    missing, rest = rows or len(lines), b""
    while missing > 0:
        *whole, rest = (rest + _received(reader)).split(b"\n")
        missing -= sum(line.startswith(word) for line in whole)
    said.join(PATIENCE)
    return time.perf_counter() - began


def _received(link: socket.socket) -> bytes:
    data = link.recv(1 << 20)
    if not data:
        raise EOFError("the daemon closed the connection")
    return data
