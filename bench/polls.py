"""Pages that wait for rows (`live=20s`), asked for by a crowd: straight from the daemon, and through caches in front.

Each reader keeps one connection and asks for the next address as soon as it has an answer, as a browser does. Measured
are the time from a commit to each reader, the requests that reach the daemon, and the processor time and memory of the
daemon and of the cache. The readers take processors themselves: theirs is reported, because with many readers it is
theirs that ends first.
"""

from __future__ import annotations

import re
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import (
    STREAM,
    Daemon,
    Options,
    System,
    allow_files,
    cpu,
    free_port,
    listens,
    process,
    system,
    wait_until,
)

READERS = 1000
WRITES = 20
PAUSE = 0.5  # seconds between two commits
GOAL = 0.1  # seconds from commit to reader, p99
LIVE = "20s"
_SPARE = 500  # files that processes open besides
_PATH = f"/streams/{STREAM}/rows"
_LENGTH, _LINK = re.compile(rb"(?i)content-length: (\d+)"), re.compile(rb"(?i)link: <([^>]*)>")
_STAMP = re.compile(rb'\["(\d+\.\d+)"\]')


def run(options: Options) -> list[Figure]:
    """The daemon alone, Varnish and nginx; a cache that is not installed is left out."""
    readers = min(options.sized(READERS), (allow_files(4 * READERS + _SPARE) - _SPARE) // 2)
    figures: list[Figure] = []
    with system() as ours:
        ours.make_stream()
        for front in (_alone, _varnish, _nginx):
            port = free_port()
            with (
                ours.daemon("--http", f"127.0.0.1:{port}", "--max-connections", "30000") as daemon,
                front(port, ours.folder) as door,
            ):
                if door is not None:
                    figures += _measured(ours, daemon, door, readers, max(4, options.sized(WRITES)))
    return figures


@dataclass(frozen=True, slots=True)
class _Front:
    """Where readers ask. `asked`: requests that have reached the daemon so far, if it can be known."""

    name: str
    port: int
    processes: list[psutil.Process]
    asked: Callable[[], int] | None = None


@contextmanager
def _alone(port: int, folder: Path) -> Iterator[_Front | None]:  # noqa: ARG001
    yield _Front("the daemon alone", port, [])


@contextmanager
def _varnish(port: int, folder: Path) -> Iterator[_Front | None]:
    program = shutil.which("varnishd")
    if program is None:
        yield None
        return
    mine, place = free_port(), folder / "varnish"
    text = f"""vcl 4.1;
backend default {{ .host = "127.0.0.1"; .port = "{port}"; .first_byte_timeout = 90s; .between_bytes_timeout = 90s; }}
sub vcl_backend_response {{ set beresp.grace = 0s; }}
"""
    (folder / "front.vcl").write_text(text, encoding="ascii")
    command = [
        program, "-F", "-a", f"127.0.0.1:{mine}", "-n", str(place), "-f", str(folder / "front.vcl"), "-s", "malloc,64m",
        "-j", "none", "-p", "thread_pool_max=4000",
    ]  # fmt: skip
    with process(command) as started:
        wait_until(lambda: listens("127.0.0.1", mine), "Varnish to listen", started)
        root = psutil.Process(started.pid)

        def asked() -> int:
            shown = subprocess.run(
                ["varnishstat", "-n", str(place), "-1", "-f", "MAIN.backend_req"],
                capture_output=True,
                text=True,
                check=True,
            )
            return int(shown.stdout.split()[1])

        yield _Front("Varnish", mine, [root, *root.children(recursive=True)], asked)


@contextmanager
def _nginx(port: int, folder: Path) -> Iterator[_Front | None]:
    program = shutil.which("nginx")
    if program is None:
        yield None
        return
    mine, place = free_port(), folder / "nginx"
    place.mkdir(exist_ok=True)
    log = place / "access.log"
    text = f"""daemon off; pid {place}/pid; error_log /dev/null; user root;
worker_processes 1; worker_rlimit_nofile 50000;
events {{ worker_connections 25000; }}
http {{
  log_format short $upstream_cache_status; access_log {log} short;
  proxy_cache_path {place}/cache keys_zone=rows:8m;
  upstream daemon {{ server 127.0.0.1:{port}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{mine} backlog=4096; keepalive_requests 1000000;
    location / {{
      proxy_pass http://daemon; proxy_http_version 1.1; proxy_read_timeout 90s;
      proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1;
      proxy_cache rows; proxy_cache_lock on; proxy_cache_lock_timeout 90s; proxy_cache_lock_age 90s;
    }}
  }}
}}
"""
    (place / "nginx.conf").write_text(text, encoding="ascii")
    with process([program, "-p", str(place), "-c", str(place / "nginx.conf")]) as started:
        wait_until(lambda: listens("127.0.0.1", mine), "nginx to listen", started)
        root = psutil.Process(started.pid)

        def asked() -> int:
            return sum(1 for line in log.read_text(encoding="ascii").split("\n") if line and line != "HIT")

        yield _Front("nginx", mine, [root, *root.children(recursive=True)], asked)


def _measured(ours: System, daemon: Daemon, front: _Front, readers: int, writes: int) -> list[Figure]:
    crowd = _Crowd(front.port, readers)
    crowd.start()
    try:
        wait_until(lambda: crowd.waiting == readers, "all readers to wait", seconds=120.0)
        asked = front.asked() if front.asked else 0
        began = time.monotonic(), daemon.cpu(), sum(map(cpu, front.processes)), crowd.cpu()
        for _ in range(writes):
            ours.sql(
                f"INSERT INTO {STREAM} (body) VALUES (json_build_array(extract(epoch FROM clock_timestamp())::text))"
            )
            time.sleep(PAUSE)
        wait_until(lambda: len(crowd.delays) >= readers * writes, "all rows at all readers", seconds=60.0)
        took = time.monotonic() - began[0]
        memory = sum(one.memory_info().rss for one in front.processes)
        used = daemon.cpu() - began[1], sum(map(cpu, front.processes)) - began[2], crowd.cpu() - began[3]
        beside = f"at the daemon {front.asked() - asked} requests for {writes} rows" if front.asked else ""
    finally:
        crowd.stop()
    late = percentile(crowd.delays, 0.99)
    per = 1 / (writes * readers)
    return [
        Figure(
            f"{readers} readers, a row in {took / writes:.2f} s, {front.name}: p50 / p99; p99 to {GOAL * 1000:g} ms",
            latency(crowd.delays), beside, Spread.of([late / GOAL]), at_most=1.0,
        ),
        Figure(
            f"  processor time for a row to a reader, {front.name}",
            amount(used[0] * per * 1e6, "us"),
            f"the cache {amount(used[1] * per * 1e6, 'us')}, the readers {amount(used[2] * per * 1e6, 'us')}",
        ),
        Figure(f"  memory, {front.name}", amount(daemon.memory(), "B"), f"the cache {amount(memory, 'B')}"),
    ]  # fmt: skip


@dataclass(slots=True, eq=False)
class _Reader:
    link: socket.socket
    asks: bytes = b""
    received: bytearray = field(default_factory=bytearray)


class _Crowd(threading.Thread):
    """Readers that ask for the next address again and again. `delays`: seconds from a row's commit to a reader."""

    def __init__(self, port: int, readers: int) -> None:
        super().__init__(daemon=True)
        self.delays: list[float] = []
        self.waiting = 0  # readers that have asked for what is not there yet
        self._port = port
        self._over = False
        self._used = 0.0
        self._readers = readers

    def stop(self) -> None:
        """End the readers."""
        self._over = True
        self.join()

    def cpu(self) -> float:
        """Seconds of processor time of the readers."""
        return self._used

    def run(self) -> None:
        """Ask until `stop`."""
        choosing = selectors.DefaultSelector()
        head = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        # the token of the generation first, so that every reader waits at the same address, which caches may keep
        first = socket.create_connection(("127.0.0.1", self._port))
        first.sendall(b"GET " + f"{_PATH}?after=EARLIEST&limit=10000".encode() + head)
        token = re.search(rb"(?i)replicad-next: (\S+)", first.recv(1 << 20))
        assert token is not None
        first.close()
        begin = b"?after=" + token[1] + f"&limit=1000&live={LIVE}".encode()
        for _ in range(self._readers):
            link = socket.create_connection(("127.0.0.1", self._port))
            one = _Reader(link, begin)
            link.sendall(b"GET " + _PATH.encode() + begin + head)
            link.setblocking(False)
            choosing.register(link, selectors.EVENT_READ, one)
        self.waiting = self._readers
        while not self._over:
            for key, _ in choosing.select(0.2):
                one = key.data
                data = one.link.recv(1 << 16)
                if not data:
                    choosing.unregister(one.link)
                    continue
                one.received += data
                end = one.received.find(b"\r\n\r\n")
                length = _LENGTH.search(one.received, 0, max(end, 0))
                if length is None or len(one.received) < end + 4 + int(length[1]):
                    continue
                now = time.time()
                self.delays += [now - float(at) for at in _STAMP.findall(one.received, end)]
                link_ = _LINK.search(one.received, 0, end)
                if link_ is not None:
                    one.asks = link_[1]
                one.received.clear()
                one.link.sendall(b"GET " + _PATH.encode() + one.asks + head)
            self._used = time.thread_time()
        for key in list(choosing.get_map().values()):
            key.data.link.close()
