"""Slow readers: one that stops reading and one that trickles, beside twenty that keep up.

The daemon has a small journal, so that what takes minutes otherwise happens within seconds. Told are the latencies of
the twenty before and beside the two, when the two were cut off, and by how much the daemon's memory grew.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

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
    """A subscriber that takes `size` bytes every `pause` seconds, or nothing at all (size 0)."""

    name: str
    link: socket.socket
    size: int
    pause: float

    def read(self, stop: threading.Event) -> None:
        """Until stopped or cut off."""
        with suppress(ConnectionError):
            while not stop.wait(self.pause):
                if self.size and not self.link.recv(self.size):
                    return


def run(options: Options) -> list[Figure]:
    """Latency without and with slow readers, how they ended, and memory."""
    count = options.sized(PROBES)
    settings = ("--journal-bytes", str(JOURNAL), "--log-level", "info", "--log-format", "json")
    with system() as ours, ours.daemon(*settings) as daemon:
        ours.make_stream()
        with process(ours.pgbench(_BURST, "-R", str(RATE), "-T", "600", clients=2)):
            time.sleep(1.0)
            before = _latencies(ours, daemon, count)
            memory = daemon.memory()
            beside, peak = _with_slow_ones(ours, daemon, count)
        ends = {name: _end(daemon, name) for name in ("stuck", "trickling")}
    growth = peak - memory
    return [
        Figure(
            f"latency of {READERS} readers beside the slow ones: p50 / p99",
            latency(beside),
            f"without them {latency(before)}",
            Spread.of([percentile(beside, 0.99) / percentile(before, 0.99)]),
        ),
        Figure("one that reads nothing", ends["stuck"]),
        Figure(f"one that takes {TRICKLE[0] / TRICKLE[1] / 1024:.0f} KiB/s", ends["trickling"]),
        Figure(
            "memory of the daemon grew by",
            amount(growth, "bytes") if growth > 0 else "nothing",
            f"journal {amount(JOURNAL, 'bytes')}",
            Spread.of([max(0, growth) / JOURNAL]),
            at_most=2.0,
        ),
    ]


def _with_slow_ones(ours: System, daemon: Daemon, count: int) -> tuple[list[float], int]:
    stop = threading.Event()
    slow = [
        Slow("stuck", _slow_link(daemon, "stuck"), 0, 0.1),
        Slow("trickling", _slow_link(daemon, "trickling"), *TRICKLE),
    ]
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
    return beside, peak


def _slow_link(daemon: Daemon, name: str) -> socket.socket:
    """A subscriber whose kernel keeps little for it."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    link.connect((daemon.host, daemon.port))
    link.sendall(f"NAME {name}\nREPLICATE {STREAM}\n".encode())
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


def _end(daemon: Daemon, name: str) -> str:
    """How the session of that name ended, as the daemon's log tells it; its client may not know yet."""
    lines = [json.loads(line) for line in daemon.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    opened = {line["session"]: line["timestamp"] for line in lines if line["event"] == "session_opened"}
    for line in lines:
        if line["event"] == "session_closed" and line.get("name") == name and line["reason"] == "slow_reader":
            began, ended = (datetime.fromisoformat(at) for at in (opened[line["session"]], line["timestamp"]))
            return f"cut off after {(ended - began).total_seconds():.1f} s"
    return "was not cut off"
