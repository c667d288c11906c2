"""Polite clients, whose waits are measured, and what is watched meanwhile: the daemon's memory and oldest snapshot."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import asyncpg

from bench.attackers import Target
from bench.latency import commit_probes
from bench.readers import Door, probes
from bench.system import STREAM, Daemon, System

PROBE_PAUSES = (0.003, 0.017)  # seconds between two rows, at random
CUT = 10.0  # seconds after which a connection that cannot be made is given up; it counts as so long a wait
LATE = 1.0  # seconds that are waited for the last rows
PAUSE = 0.004  # seconds between two measurements of one kind
TUBE = "isolation"
SPARE_TUBE = "isolation_spare"
SETTLED, FORGOTTEN = 1.0, 10.0  # seconds after an attack: when memory is looked at first, and when it must be back
MEMORY_GOAL = 1.2
LOOK = 0.05  # seconds between two looks at the snapshots
KINDS = (
    "round trip", "live row", "PODS", "new connection", "first row", "/livez", "/readyz", "/rows", "/live"
)  # fmt: skip
WEB_PAUSE = 0.02  # seconds between two requests over HTTP, each of which is a connection, as those of probes are
PAGES = {
    "/livez": ("/livez", b"\r\n\r\nok"),
    "/readyz": ("/readyz", b"ready"),  # or not, with a reason: without Redis
    "/rows": (f"/streams/{STREAM}/rows?limit=100", b"HTTP/1.1 200"),
}
_OLDEST = """
    SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
      FROM pg_stat_activity
     WHERE application_name LIKE 'replicad%' AND backend_xmin IS NOT NULL
"""

Times = dict[str, list[float]]


@dataclass(slots=True)
class Watch:
    """The daemon's memory: before, the most during the attack, and after it."""

    before: int = 0
    peak: int = 0
    after: int = 0

    def wait_forgotten(self, daemon: Daemon) -> None:
        """Until the daemon's memory is back, or the time for that is over."""
        began = time.monotonic()
        time.sleep(SETTLED)
        self.after = daemon.memory()
        while self.after > MEMORY_GOAL * self.before and time.monotonic() < began + FORGOTTEN:
            time.sleep(0.1)
            self.after = daemon.memory()

    @contextmanager
    def looking(self, daemon: Daemon) -> Iterator[None]:
        """Note the most during the block."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.02):
                self.peak = max(self.peak, daemon.memory())

        looker = threading.Thread(target=look)
        looker.start()
        try:
            yield
        finally:
            stop.set()
            looker.join()


@dataclass(slots=True)
class Snapshots:
    """The age of the oldest snapshot that a backend of the daemon held, in seconds."""

    ours: System
    oldest: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Note the oldest during the block."""
        self._stop.clear()
        looker = threading.Thread(target=lambda: asyncio.run(self._look()))
        looker.start()
        try:
            yield
        finally:
            self._stop.set()
            looker.join()

    async def _look(self) -> None:
        connection = await asyncpg.connect(self.ours.url)
        while not self._stop.is_set():
            self.oldest = max(self.oldest, await connection.fetchval(_OLDEST))
            await asyncio.sleep(LOOK)
        await connection.close()


def measure(
    ours: System, daemon: Daemon, count: int, target: Target, tls: ssl.SSLContext | None, *, first_row: bool = False
) -> Times:
    """What polite clients wait, all kinds at the same time. With TLS no live rows: the readers are plain sockets.

    `first_row`: also from connecting to the first row of the stream, which must have rows. Requests over HTTP are among
    the kinds if the daemon has a port for them.
    """
    polite = Polite(daemon.host, daemon.port, target.lease, tls, target.http, target.secret)
    times: Times = {}
    ended = threading.Event()
    workers = [
        threading.Thread(target=repeat, args=(times, kind, wait, ended, pause))
        for kind, wait, pause in (
            ("round trip", polite.round_trip(), PAUSE),
            ("PODS", polite.pods(), PAUSE),
            ("new connection", polite.new_connection, PAUSE),
            *([("first row", polite.first_row, PAUSE)] if first_row else []),
            *(
                [(kind, partial(polite.request, *page), WEB_PAUSE) for kind, page in PAGES.items()]
                if target.http
                else []
            ),
        )
    ]
    for worker in workers:
        worker.start()
    try:
        if tls is None:
            times |= _live_rows(ours, polite, count)
        else:
            time.sleep(count * sum(PROBE_PAUSES) / 2)
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    return {kind: times[kind] for kind in KINDS if kind in times}


def repeat(times: Times, kind: str, wait: Callable[[], None], ended: threading.Event, pause: float = PAUSE) -> None:
    """Measure until the end, or until the client is cut off or waits for too long, which counts as CUT."""
    found = times[kind] = []
    while not ended.wait(pause):
        began = time.monotonic()
        try:
            wait()
        except (OSError, RuntimeError) as error:
            print(f"  {kind}: {error}", file=sys.stderr)
            found.append(CUT)
            return
        found.append(time.monotonic() - began)


def _live_rows(ours: System, polite: Polite, count: int) -> Times:
    """Of the same rows, over TCP and as server-sent events."""
    hello = f"{polite.auth}REPLICATE {STREAM}\n".encode()
    doors = {"live row": Door(polite.host, polite.port, hello, b"POSITION bench")}
    if polite.http:
        doors["/live"] = Door(polite.host, polite.http, polite.asked(f"/streams/{STREAM}/live"), b"event: position")
    with ExitStack() as stack:
        listening = {kind: stack.enter_context(probes(door)) for kind, door in doors.items()}
        committed = asyncio.run(commit_probes(ours, STREAM, count, pauses=PROBE_PAUSES))
        time.sleep(LATE)
        seen = {kind: one.stop() for kind, one in listening.items()}
    ended = time.monotonic()  # a row that was not seen has waited until now
    return {
        kind: [found[number][0] - at if number in found else ended - at for number, at in committed.items()]
        for kind, found in seen.items()
    }


@dataclass(frozen=True, slots=True)
class Polite:
    """Clients that wait for each answer."""

    host: str
    port: int
    lease: str
    tls: ssl.SSLContext | None
    http: int = 0
    secret: str = ""

    @property
    def auth(self) -> str:
        """What is said first, over TCP."""
        return f"AUTH {self.secret}\n" if self.secret else ""

    def asked(self, path: str) -> bytes:
        """A request, over HTTP."""
        secret = f"Authorization: Bearer {self.secret}\r\n" if self.secret else ""
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{secret}\r\n".encode()

    def link(self, port: int = 0) -> socket.socket:
        """A new connection, to this port or that of the protocol."""
        link = socket.create_connection((self.host, port or self.port), timeout=CUT)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return link
        try:
            return self.tls.wrap_socket(link, server_hostname="localhost")
        except BaseException:
            link.close()
            raise

    def round_trip(self) -> Callable[[], None]:
        """The answer to STREAMS."""
        return self._asking(b"STREAMS\n", b"STREAMS")

    def pods(self) -> Callable[[], None]:
        """The answer to PODS, for which Postgres is asked."""
        return self._asking(f"PODS {self.lease} plan=1\n".encode(), b"CURSOR")

    def new_connection(self) -> None:
        """From connecting to the answer to a first command."""
        _, link = self._first_answer(b"STREAMS\n", b"STREAMS")
        link.close()

    def first_row(self) -> None:
        """From connecting to the first row of the stream."""
        _, link = self._first_answer(f"REPLICATE {STREAM} EARLIEST\n".encode(), b"RDATA")
        link.close()

    def request(self, path: str, wanted: bytes) -> None:
        """From connecting to the end of the answer to a request over HTTP, which must have what is wanted."""
        deadline = time.monotonic() + CUT
        while True:
            answer = b""
            with suppress(ssl.SSLEOFError, ConnectionError), self.link(self.http) as link:
                link.sendall(self.asked(path))
                while data := link.recv(1 << 16):
                    answer += data
                    if time.monotonic() >= deadline:
                        break
            if wanted in answer:
                return
            if answer or time.monotonic() >= deadline:  # without any, it gave way in the handshake
                raise RuntimeError(f"a polite request for {path} got {answer[:300]!r}")

    def _asking(self, question: bytes, answer: bytes) -> Callable[[], None]:
        ask, _ = self._first_answer(question, answer)
        return ask

    def _first_answer(self, question: bytes, answer: bytes) -> tuple[Callable[[], None], socket.socket]:
        """A connection on which the question was answered once. If it is cut before, another one is tried: of the
        handshakes under way, one gives way when there are too many.
        """
        deadline = time.monotonic() + CUT
        while True:
            try:
                link = self.link()
                link.sendall(self.auth.encode())
                ask = asking(link, question, answer)
                ask()
            except (ssl.SSLEOFError, ConnectionError):
                if time.monotonic() >= deadline:
                    raise
            else:
                return ask, link


def asking(link: socket.socket, question: bytes, answer: bytes) -> Callable[[], None]:
    """A function that asks, and returns when an answer has come. Raises if none comes within CUT seconds."""
    heard = b""

    def ask() -> None:
        nonlocal heard
        deadline = time.monotonic() + CUT  # the server's PINGs would keep a time-out of the socket from ever ending
        link.sendall(question)
        while True:
            *lines, heard = heard.split(b"\n")
            if any(line.startswith(answer) for line in lines):
                return
            if refused := [line for line in lines if line.startswith(b"ERROR")]:
                raise RuntimeError(f"a polite client got {refused[0]!r}")
            data = link.recv(1 << 16)
            if not data:
                raise ConnectionResetError("a polite client was closed")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer to {question!r} within {CUT:g} s")
            heard += data

    return ask


@contextmanager
def lease(
    daemon: Daemon, tls: ssl.SSLContext | None, tube: str = TUBE, *, redis: int = 0, secret: str = ""
) -> Iterator[Target]:
    """A lease of the whole tube during the block. It belongs to no connection: none of them has to be kept alive."""
    polite = Polite(daemon.host, daemon.port, "", tls, daemon.http, secret)
    with polite.link() as link:
        held = " ".join(_answer(link, f"{polite.auth}CLAIM {tube} 0/1 ttl=3600", "LEASE").split()[1:4])
    yield Target(daemon.host, daemon.port, held, http=daemon.http, redis=redis, secret=secret)
    with polite.link() as link:
        _answer(link, f"{polite.auth}RELEASE {held}", "RELEASE")


def _answer(link: socket.socket, question: str, answer: str) -> str:
    """The line that answers. All PINGs before it are read: closing with something unread would undo the question."""
    deadline = time.monotonic() + CUT
    link.sendall(question.encode() + b"\n")
    heard = b""
    while True:
        *lines, _ = heard.decode().split("\n")
        for line in lines:
            if line.startswith((answer, "ERROR")):
                if line.startswith("ERROR"):
                    raise RuntimeError(f"{question!r} was refused: {line}")
                return line
        data = link.recv(1 << 16)
        if not data or time.monotonic() >= deadline:
            raise RuntimeError(f"no answer to {question!r}: {lines}")
        heard += data
