"""Small commits, which is how applications write: single rows at a steady rate to many clients, beside NATS.

Each row carries the time of day at which its INSERT ran (on our side) or its message was published (on NATS'). One
process reads all clients. It looks at every row of a few of them, so that reading costs little, and throws away what
comes to the others. Our times include the commit, which NATS does not have. What is told besides is the server's
processor time: that of the daemon, and of Postgres' processes that serve it.

The goals for p99 and for processor time exclude each other here. Rows that were committed meanwhile go out together:
132 times a second to 100 clients, 80 times to 500. Each time takes 1.1 ms (a poll and a copy) and 12 microseconds for
each client. A p99 of 3 ms needs 500 times a second, which is 1.1 processors; half of what NATS takes is 0.34.
"""

from __future__ import annotations

import random
import re
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.pubsub import Peer, nats
from bench.readers import BUFFER, Door, processes, receive, subscribe
from bench.report import Figure, Spread, percentile
from bench.system import STREAM, Daemon, Options, System, connect, cpu, process, system

CASES = ((1_000, 100, 0.003), (500, 500, 0.010), (2_000, 500, 0.060))  # commits per second, clients, goal of p99
SECONDS = 8.0  # of each round
WARM = 1.5  # seconds before it: pgbench connects meanwhile
LOOKED_AT = 10  # clients whose rows are looked at
WRITERS = 8  # connections that commit
_SENT = re.compile(rb"~([0-9.]+)~")
_INSERT = f"""INSERT INTO {STREAM} (body) VALUES (format('["~%s~:example.com","!room:example.com","m.room.msg"]',
extract(epoch FROM clock_timestamp()))::json);\n"""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds from commit to client of the rows of the clients looked at, and shares of a processor."""

    latencies: list[float]
    server: float
    beside: float = 0.0  # of Postgres' processes that serve the daemon


def run(options: Options) -> list[Figure]:
    """Two figures for each case."""
    seconds = max(2.0, SECONDS * min(1, options.scale))
    with nats() as peer:
        return [figure for case in CASES for figure in _figures(options, peer, seconds, *case)]


def _figures(options: Options, peer: Peer | None, seconds: float, rate: int, clients: int, goal: float) -> list[Figure]:
    mine: list[Round] = []
    theirs: list[Round] = []
    with system() as ours, ours.daemon() as daemon:
        ours.make_stream()
        for _ in range(options.runs):
            mine.append(_by_us(ours, daemon, rate, clients, seconds))
            if peer is not None:
                theirs.append(_by_nats(peer, rate, clients, seconds))
    late = [percentile(one.latencies, 0.99) / goal for one in mine]
    return [
        Figure(
            f"{rate:,}/s to {clients} clients: p50 / p99; ratio: p99 to {goal * 1000:g} ms",
            _latency(mine),
            f"NATS {_latency(theirs)}" if theirs else "",
            Spread.of(late),
            at_most=1.0,
        ),
        Figure(
            "  processor time of the server",
            f"{_share(mine)}, Postgres {Spread.of(one.beside for one in mine).middle:.0%}",
            f"NATS {_share(theirs)}" if theirs else "",
            Spread.of_ratios([one.server for one in mine], [one.server for one in theirs]) if theirs else None,
            at_most=0.5,
        ),
    ]


def _latency(rounds: list[Round]) -> str:
    p50, p99 = (Spread.of(percentile(one.latencies, share) * 1000 for one in rounds).middle for share in (0.5, 0.99))
    return f"{p50:.1f} / {p99:.1f} ms"


def _share(rounds: list[Round]) -> str:
    return f"{Spread.of(one.server for one in rounds).middle:.0%}"


def _by_us(ours: System, daemon: Daemon, rate: int, clients: int, seconds: float) -> Round:
    door = Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")
    command = ours.pgbench(_INSERT, "-R", str(rate), "-T", "600", clients=WRITERS)
    with readers(door, clients) as stop, process(command):
        time.sleep(WARM)
        serving = ours.serving()
        before, began = (daemon.cpu(), [cpu(one) for one in serving]), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        server = daemon.cpu() - before[0]
        beside = sum(cpu(one) - was for one, was in zip(serving, before[1], strict=True))
        return Round(stop(), server / took, beside / took)


def _by_nats(peer: Peer, rate: int, clients: int, seconds: float) -> Round:
    with readers(peer.door, clients) as stop, processes([(publish, (peer.door.host, peer.door.port, rate))]):
        time.sleep(WARM)
        before, began = cpu(peer.process), time.monotonic()
        time.sleep(seconds)
        server = (cpu(peer.process) - before) / (time.monotonic() - began)
        return Round(stop(), server)


def publish(pipe: Connection, host: str, port: int, rate: int) -> None:
    """The work of a process: publish single messages at random times, so many per second, until the pipe is closed."""
    with connect(host, port, b'CONNECT {"verbose":false}\r\n') as link:
        pipe.send("ready")
        at = time.monotonic()
        while not pipe.poll():
            at += random.expovariate(rate)
            if (pause := at - time.monotonic()) > 0:
                time.sleep(pause)
            body = b'["~%.6f~:example.com","!room:example.com","m.room.msg"]' % time.time()
            link.sendall(b"PUB %s %d\r\n%s\r\n" % (STREAM.encode(), len(body), body))


@contextmanager
def readers(door: Door, clients: int) -> Iterator[Callable[[], list[float]]]:
    """So many clients in one process. Call the result to end them; it returns the latencies after the first second."""
    with processes([(measure, (door, clients))]) as [pipe]:

        def stop() -> list[float]:
            pipe.send("stop")
            found: list[float] = pipe.recv()
            if not found:
                raise RuntimeError("no row came, or clients were cut off")
            return found

        yield stop


def measure(pipe: Connection, door: Door, clients: int) -> None:
    """The work of one process: read all clients, and note the latencies of the rows of a few."""
    links = subscribe(door, clients)
    looked_at = dict.fromkeys(links[:: max(1, clients // LOOKED_AT)], b"")
    watch = selectors.EpollSelector()
    watch.register(pipe, selectors.EVENT_READ)
    for link in links:
        watch.register(link, selectors.EVENT_READ)
    pipe.send("ready")
    buffer = bytearray(BUFFER)
    found: list[float] = []
    from_then_on = time.monotonic() + WARM
    while True:
        for key, _ in watch.select():
            link = key.fileobj
            if link is pipe:
                pipe.recv()
                pipe.send(found)
                return
            size = receive(link, buffer) or 0
            if not size:
                pipe.send([])
                return
            if link in looked_at:
                now = time.time()
                data = looked_at[link] + buffer[:size]
                end = data.rfind(b"\n") + 1
                looked_at[link] = bytes(data[end:])
                if time.monotonic() >= from_then_on:
                    found += [now - float(at) for at in _SENT.findall(data[:end])]
