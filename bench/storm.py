"""A reconnect storm: many clients resume from one token at the same moment, as after a restart of the daemon.

Beside the daemon stands the physical limit: a process that has the same bytes in memory and writes them to as many
sockets, read by the same clients.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from bench.readers import BUFFER, PATIENCE, PROCESSES, processes
from bench.report import Figure, Spread, amount
from bench.system import MARK, STREAM, Daemon, Options, System, allow_files, connect, system, wait_until

CLIENTS = 500
ROWS = 1_000_000
READ = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE relname = "
WRITE = 256 * 1024
TOTAL_AT_MOST, LAST_AT_MOST = 1.2, 1.5

_spawn = multiprocessing.get_context("spawn")


def run(options: Options) -> list[Figure]:
    """Rows that Postgres read for each row of the stream, and the time of the last client."""
    clients, rows = options.sized(CLIENTS), options.sized(ROWS)
    allow_files(clients + 200)
    alone, last, limit, read, cpu = [], [], [], [], []
    with system() as ours:
        ours.make_stream()
        ours.commit_rows(rows)
        ours.sql(f"VACUUM ANALYZE {STREAM}")
        for _ in range(options.runs):
            with ours.daemon("--max-connections", str(clients + 50)) as daemon:
                alone.append(_storm(daemon.host, daemon.port, 1, rows))
                line = _line(daemon)
            before = _read(ours)
            with ours.daemon("--max-connections", str(clients + 50)) as daemon:
                spent = daemon.cpu()
                last.append(_storm(daemon.host, daemon.port, clients, rows))
                cpu.append(daemon.cpu() - spent)
            read.append((_read(ours) - before) / rows)
            with _memory(line, rows) as port:
                limit.append(_storm("127.0.0.1", port, clients, rows))
    size = len(line) * rows
    allowed = [one + many for one, many in zip(alone, limit, strict=True)]
    return [
        Figure(
            f"{clients} clients, {rows:,} rows each: rows read by Postgres for each row",
            f"{Spread.of(read)}",
            "one client reads each once",
            Spread.of(read),
            at_most=TOTAL_AT_MOST,
        ),
        Figure(
            "  the last client is done after",
            f"{Spread.of(last).middle:.2f} s",
            f"one alone {Spread.of(alone).middle:.2f} s + the same bytes from memory {Spread.of(limit).middle:.2f} s",
            Spread.of_ratios(last, allowed),
            at_most=LAST_AT_MOST,
        ),
        Figure("  processor time of the daemon", f"{Spread.of(cpu).middle:.2f} s"),
        Figure("  through the sockets", f"{amount(clients * size / Spread.of(last).middle, 'bytes/s')}",
               f"from memory {amount(clients * size / Spread.of(limit).middle, 'bytes/s')}"),
    ]  # fmt: skip


def _read(ours: System) -> int:
    """Rows of the stream that Postgres has read so far, for sessions that have ended."""
    time.sleep(1.0)
    return int(ours.sql(f"{READ}'{STREAM}'"))


def _line(daemon: Daemon) -> bytes:
    """The first row as a line, which has the length of most."""
    with connect(daemon.host, daemon.port, f"REPLICATE {STREAM} 0\n".encode()) as link:
        heard = b""
        while heard.count(MARK) < 2:
            heard += link.recv(BUFFER)
    start = heard.index(b"RDATA")
    return heard[start : heard.index(b"\n", start) + 1]


def _storm(host: str, port: int, clients: int, rows: int) -> float:
    """Seconds from the moment at which all ask until the last one has all rows."""
    shares = [clients // PROCESSES + (number < clients % PROCESSES) for number in range(min(PROCESSES, clients))]
    with processes([(_ask, (host, port, share, rows)) for share in shares]) as pipes:
        began = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        ends = [pipe.recv() for pipe in pipes]
    if any(end is None for end in ends):
        raise RuntimeError("a client did not get all its rows")
    return float(max(ends) - began)


def _ask(pipe: Connection, host: str, port: int, clients: int, rows: int) -> None:
    """The work of one process of clients."""
    links = [connect(host, port) for _ in range(clients)]
    pipe.send("ready")
    pipe.recv()
    watch = selectors.EpollSelector()
    for link in links:
        link.sendall(f"REPLICATE {STREAM} 0\n".encode())
        link.setblocking(False)
        watch.register(link, selectors.EVENT_READ)
    left = dict.fromkeys(links, rows)
    buffer = bytearray(BUFFER)
    waiting = clients
    while waiting:
        events = watch.select(PATIENCE)
        for key, _ in events:
            link = key.fileobj
            size = link.recv_into(buffer)
            left[link] -= buffer.count(MARK, 0, size)
            if not size or left[link] <= 0:
                watch.unregister(link)
                waiting -= 1
        if not events:
            break
    pipe.send(None if any(one > 0 for one in left.values()) else time.monotonic())
    for link in links:
        link.close()


@contextmanager
def _memory(line: bytes, rows: int) -> Iterator[int]:
    """A server that writes so many lines to each client that sends something; its port."""
    ours, theirs = _spawn.Pipe()
    server = _spawn.Process(target=_write, args=(theirs, line, rows), daemon=True)
    server.start()
    wait_until(ours.poll, "the server in memory to listen")
    try:
        yield ours.recv()
    finally:
        server.kill()
        server.join()


def _write(pipe: Connection, line: bytes, rows: int) -> None:
    """The work of that server."""
    data = memoryview(line * (WRITE // len(line)))
    size = len(line) * rows
    watch = selectors.EpollSelector()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as door:
        door.setblocking(False)
        watch.register(door, selectors.EVENT_READ)
        pipe.send(door.getsockname()[1])
        sent: dict[object, int] = {}
        while True:
            for key, _ in watch.select():
                link = key.fileobj
                if link is door:
                    found, _ = door.accept()
                    found.setblocking(False)
                    watch.register(found, selectors.EVENT_READ)
                elif link not in sent:
                    link.recv(4096)
                    sent[link] = 0
                    watch.modify(link, selectors.EVENT_WRITE)
                else:
                    begin = sent[link] % len(data)
                    sent[link] += link.send(data[begin : begin + size - sent[link]])
                    if sent[link] >= size:
                        watch.unregister(link)
