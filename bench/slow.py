"""Slow readers: one that stops reading and one that trickles, beside twenty that keep up.

The daemon has a small journal, so that what takes minutes otherwise happens within seconds. Told are the latencies of
the twenty before and beside the two, when the two were cut off, and by how much the daemon's memory grew.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass

from bench.latency import commit_probes
from bench.readers import Door, probes
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import BODY, STREAM, Daemon, Options, System, process, system

READERS = 20
PROBES = 400  # in each of the two phases
JOURNAL = 8 << 20  # bytes
RATE = 200  # transactions per second, of ROWS rows each: about 3.5 MB/s
ROWS = 200
TRICKLE = 4096, 0.1  # bytes, and seconds between two times that so many are taken
_BURST = f"INSERT INTO {STREAM} (body) SELECT {BODY.replace('~', '')} FROM generate_series(1, {ROWS}) AS n;\n"


@dataclass(slots=True)
class Slow:
    """A subscriber that takes `size` bytes every `pause` seconds, or nothing at all (size 0), and how it ended."""

    link: socket.socket
    size: int
    pause: float
    ended_after: float | None = None
    told: bool = False

    def read(self, stop: threading.Event) -> None:
        """Until stopped or cut off."""
        began = time.monotonic()
        tail = b""
        while not stop.wait(self.pause):
            if self.size == 0:
                # Without reading: the kernel knows whether the peer has ended the connection.
                if self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1:
                    break
                continue
            try:
                data = self.link.recv(self.size)
            except ConnectionError:
                break
            if not data:
                break
            tail = (tail + data)[-2 * self.size :]
            self.told = self.told or b"ERROR slow_reader" in tail
            if self.told:
                break
        else:
            return
        self.ended_after = time.monotonic() - began


def run(options: Options) -> list[Figure]:
    """Latency without and with slow readers, how they ended, and memory."""
    count = options.sized(PROBES)
    with system() as ours, ours.daemon("--journal-bytes", str(JOURNAL)) as daemon:
        ours.make_stream()
        with process(ours.pgbench(_BURST, "-R", str(RATE), "-T", "600", clients=2)):
            time.sleep(1.0)
            before = _latencies(ours, daemon, count)
            memory = daemon.memory()
            stuck, trickling, beside, peak = _with_slow_ones(ours, daemon, count)
    growth = peak - memory
    return [
        Figure(
            f"latency of {READERS} readers beside the slow ones: p50 / p99",
            latency(beside),
            f"without them {latency(before)}",
            Spread.of([percentile(beside, 0.99) / percentile(before, 0.99)]),
        ),
        Figure("one that reads nothing", _end(stuck)),
        Figure(f"one that takes {TRICKLE[0] / TRICKLE[1] / 1024:.0f} KiB/s", _end(trickling)),
        Figure(
            "memory of the daemon grew by",
            amount(growth, "bytes") if growth > 0 else "nothing",
            f"journal {amount(JOURNAL, 'bytes')}",
            Spread.of([max(0, growth) / JOURNAL]),
            at_most=2.0,
        ),
    ]


def _with_slow_ones(ours: System, daemon: Daemon, count: int) -> tuple[Slow, Slow, list[float], int]:
    stop = threading.Event()
    slow = [Slow(_slow_link(daemon), 0, 0.1), Slow(_slow_link(daemon), *TRICKLE)]
    peak = 0

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.05):
            peak = max(peak, daemon.memory())

    threads = [threading.Thread(target=watch), *(threading.Thread(target=one.read, args=(stop,)) for one in slow)]
    for thread in threads:
        thread.start()
    try:
        beside = _latencies(ours, daemon, count)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for one in slow:
            one.link.close()
    return slow[0], slow[1], beside, peak


def _slow_link(daemon: Daemon) -> socket.socket:
    """A subscriber whose kernel keeps little for it."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    link.connect((daemon.host, daemon.port))
    link.sendall(f"REPLICATE {STREAM}\n".encode())
    return link


def _latencies(ours: System, daemon: Daemon, count: int) -> list[float]:
    door = Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")
    with probes(door, READERS) as listening:
        committed = asyncio.run(commit_probes(ours, STREAM, count))
        time.sleep(1.0)
        seen = listening.stop()
    short = sum(len(seen.get(number, ())) != READERS for number in committed)
    if short:
        raise RuntimeError(f"{short} of {count} probes did not reach all of the {READERS} readers that keep up")
    return [at - committed[number] for number, times in seen.items() for at in times]


def _end(slow: Slow) -> str:
    if slow.ended_after is None:
        return "was not cut off"
    return f"cut off after {slow.ended_after:.1f} s{', told why' if slow.told else ''}"
