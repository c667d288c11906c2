"""Polite clients beside attackers: round trips, live rows, answers to PODS and new connections, alone and beside each.

The attackers of `attackers` attack the daemon with its default settings, one kind after the other. Half handshakes go
to a daemon with TLS and room for 20 connections. The figures are p50 and p99 of what the polite clients wait, with the
ratio of the p99 to the quiet one, and the daemon's memory before, during and at most ten seconds after the attack. The
whole takes two to three minutes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.attackers import PLAIN, SECURED, Attack, Target
from bench.latency import commit_probes
from bench.readers import Door, probes, processes
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import STREAM, Daemon, Options, System, allow_files, system

PROBES = 250  # rows; the other measurements take as long as these
PROBE_PAUSES = (0.003, 0.017)  # seconds between two rows, at random
CUT = 10.0  # seconds after which a connection that cannot be made is given up; it counts as so long a wait
LATE = 1.0  # seconds that are waited for the last rows
PAUSE = 0.004  # seconds between two measurements of one kind
TUBE = "isolation"
SETTLED, FORGOTTEN = 1.0, 10.0  # seconds after an attack: when memory is looked at first, and when it must be back
GOAL, MEMORY_GOAL = 5.0, 1.2
KINDS = ("round trip", "live row", "PODS", "new connection")
_SPARE = 4000  # files of this process and of the attackers, who inherit the limit

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


def run(options: Options) -> list[Figure]:
    """The quiet times, then a figure for each attacker and kind, and one for memory."""
    allow_files(_SPARE)
    count = options.sized(PROBES)
    figures: list[Figure] = []
    with system() as ours:
        with ours.daemon() as daemon:
            ours.make_stream()
            ours.sql(f"SELECT tube.tube_ensure_exists('{TUBE}', 1)")
            figures += _beside_each(ours, daemon, count, PLAIN, None)
        key, certificate = _certificate(ours.folder)
        secured = ("--tls-cert", str(certificate), "--tls-key", str(key), "--max-connections", "20")
        with ours.daemon(*secured) as daemon:
            figures += _beside_each(ours, daemon, count, SECURED, ssl.create_default_context(cafile=str(certificate)))
    return figures


def _beside_each(
    ours: System, daemon: Daemon, count: int, attackers: dict[str, Attack], tls: ssl.SSLContext | None
) -> list[Figure]:
    with _lease(daemon, tls) as target:
        _measure(ours, daemon, count, target, tls)  # what is loaded with the first clients belongs to no attack
        quiet = _measure(ours, daemon, count, target, tls)
        print(f"  alone: {', '.join(f'{kind} {latency(quiet[kind])}' for kind in quiet)}", file=sys.stderr)
        figures = [Figure(f"alone: {kind}", latency(quiet[kind])) for kind in quiet]
        for name, attack in attackers.items():
            watch = Watch(before=daemon.memory())
            with watch.looking(daemon), processes([(attack, (target,))]) as pipes:
                time.sleep(1.0)
                try:
                    beside = _measure(ours, daemon, count, target, tls)
                except OSError as error:
                    print(f"  {name}: a polite client cannot connect: {error}", file=sys.stderr)
                    beside = {}
                beside = {kind: beside.get(kind, [CUT]) for kind in quiet}
                pipes[0].send("stop")
            watch.wait_forgotten(daemon)
            print(f"  {name}: {', '.join(f'{kind} {latency(beside[kind])}' for kind in quiet)}", file=sys.stderr)
            figures += [
                Figure(
                    f"{name}: {kind}",
                    latency(beside[kind]),
                    f"alone {latency(quiet[kind])}",
                    Spread.of([percentile(beside[kind], 0.99) / percentile(quiet[kind], 0.99)]),
                    at_most=GOAL,
                )
                for kind in quiet
            ]
            figures.append(
                Figure(
                    f"{name}: memory during, within {FORGOTTEN:g} s after",
                    f"{amount(watch.peak, 'bytes')}, {amount(watch.after, 'bytes')}",
                    f"before {amount(watch.before, 'bytes')}",
                    Spread.of([watch.after / watch.before]),
                    at_most=MEMORY_GOAL,
                )
            )
    return figures


def _measure(ours: System, daemon: Daemon, count: int, target: Target, tls: ssl.SSLContext | None) -> Times:
    """What polite clients wait, all kinds at the same time. With TLS no live rows: the readers are plain sockets."""
    polite = Polite(daemon.host, daemon.port, target.lease, tls)
    times: Times = {}
    ended = threading.Event()
    workers = [
        threading.Thread(target=_repeat, args=(times, kind, wait, ended))
        for kind, wait in (
            ("round trip", polite.round_trip()),
            ("PODS", polite.pods()),
            ("new connection", polite.new_connection),
        )
    ]
    for worker in workers:
        worker.start()
    try:
        if tls is None:
            times["live row"] = _live_rows(ours, daemon, count)
        else:
            time.sleep(count * sum(PROBE_PAUSES) / 2)
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    return {kind: times[kind] for kind in KINDS if kind in times}


def _repeat(times: Times, kind: str, wait: Callable[[], None], ended: threading.Event) -> None:
    """Measure until the end, or until the client is cut off or waits for too long, which counts as CUT."""
    found = times[kind] = []
    while not ended.wait(PAUSE):
        began = time.monotonic()
        try:
            wait()
        except (OSError, RuntimeError) as error:
            print(f"  {kind}: {error}", file=sys.stderr)
            found.append(CUT)
            return
        found.append(time.monotonic() - began)


def _live_rows(ours: System, daemon: Daemon, count: int) -> list[float]:
    door = Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")
    with probes(door) as listening:
        committed = asyncio.run(commit_probes(ours, STREAM, count, pauses=PROBE_PAUSES))
        time.sleep(LATE)
        seen = listening.stop()
    ended = time.monotonic()  # a row that was not seen has waited until now
    return [seen[number][0] - at if number in seen else ended - at for number, at in committed.items()]


@dataclass(frozen=True, slots=True)
class Polite:
    """Clients that wait for each answer."""

    host: str
    port: int
    lease: str
    tls: ssl.SSLContext | None

    def link(self) -> socket.socket:
        """A new connection."""
        link = socket.create_connection((self.host, self.port), timeout=CUT)
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
                ask = _asking(link, question, answer)
                ask()
            except (ssl.SSLEOFError, ConnectionError):
                if time.monotonic() >= deadline:
                    raise
            else:
                return ask, link


def _asking(link: socket.socket, question: bytes, answer: bytes) -> Callable[[], None]:
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
def _lease(daemon: Daemon, tls: ssl.SSLContext | None) -> Iterator[Target]:
    """A lease of the whole tube during the block."""
    link = Polite(daemon.host, daemon.port, "", tls).link()
    link.sendall(f"CLAIM {TUBE} 0/1 ttl=3600\n".encode())
    heard = b""
    while b"LEASE" not in heard or not heard.endswith(b"\n"):
        data = link.recv(4096)
        if not data:
            raise RuntimeError(f"no lease: {heard!r}")
        heard += data
    line = next(line for line in heard.decode().splitlines() if line.startswith("LEASE"))
    with link:
        yield Target(daemon.host, daemon.port, " ".join(line.split()[1:4]))
        with suppress(OSError):
            link.settimeout(LATE)
            link.sendall(f"RELEASE {' '.join(line.split()[1:4])}\n".encode())
            link.recv(4096)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for localhost."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate
