"""A connection to the daemon on a plain socket, with time-outs, TLS, and a thread that keeps it alive.

It moves bytes and minds the time; what is said is for `requests` and `pursuit`. The socket never blocks: whoever has to
wait does so in poll(), outside of the lock under which it is read and written, because a TLS connection must not be
read and written by two threads at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from replicad.client.link import Link
from replicad.client.requests import Introduction, greet
from replicad.client.steps import Receive, Send, Steps
from replicad.errors import ConnectionLost, ReplicadError
from replicad.protocol.command import Command
from replicad.protocol.commands import Ping
from replicad.protocol.connection import Due, Timing

T = TypeVar("T")

READ_BYTES = 1 << 18  # one read takes what a fast sender has put there meanwhile
_SHORTEST_PAUSE = 0.05  # seconds between two looks of the thread, whatever is due
_PLAIN_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect to and as whom. Times in seconds."""

    host: str
    port: int
    us: Introduction
    tls: ssl.SSLContext | None = None
    connect_timeout: float = 10.0
    answer_timeout: float = 60.0
    keepalive: bool = True
    timing: Timing = field(default_factory=Timing)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_link(target: Target, clock: Callable[[], float] = time.monotonic) -> SocketLink:
    """Connect, make the TLS handshake, wait for SERVER and introduce us, all within `connect_timeout`.

    Raises:
        ConnectionLost: it could not be made; the message says why.
        WrongServer, NotAuthorised, ReplicadError: what the server said, or was.
    """
    deadline = clock() + target.connect_timeout
    sock = _connect(target, deadline, clock)
    link = SocketLink(sock, target, clock)
    try:
        link.server_name = link.run(greet(link.connection, target.us), within=max(deadline - clock(), 0.0))
    except BaseException:
        link.close()
        raise
    if target.keepalive:
        link.keep_alive()
    return link


def _connect(target: Target, deadline: float, clock: Callable[[], float]) -> socket.socket:
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((target.host, target.port), timeout=target.connect_timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if target.tls is not None:
            sock.settimeout(max(deadline - clock(), 0.001))
            sock = target.tls.wrap_socket(sock, server_hostname=target.host)
        sock.setblocking(False)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError):
            raise ConnectionLost(f"no connection to {target}: {reason(error)}") from error
        raise
    return sock


def reason(error: BaseException) -> str:
    """What went wrong with a socket or TLS, in words for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class SocketLink(Link):
    """An open connection. One thread at a time runs steps on it; `tick` may be called by another one meanwhile.

    Any failure closes it for good. Use `busy` around requests: while nobody is busy, what comes is read and
    passed over, so that PINGs do not pile up and the end of the connection is noticed.
    """

    def __init__(self, sock: socket.socket, target: Target, clock: Callable[[], float]) -> None:
        super().__init__(target, clock())
        self._sock = sock
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()

    # --- for the owner ---

    def begin(self) -> bool:
        """Before a request: False where the connection turned out to have ended meanwhile."""
        with self._lock:
            self._pass_over()
            self._busy = True
        return not self.closed

    def end(self) -> None:
        """After the whole answer."""
        self._busy = False

    def run(self, steps: Steps[T], *, within: float | None = None) -> T:
        """Perform steps that hand nothing over, and return their result. `within`: seconds for the first answer."""
        self._deadline = float("inf") if within is None else self._clock() + within
        answer: bytes | None = None
        try:
            while True:
                answer = self.perform(steps.send(answer))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def perform(self, step: Any) -> bytes | None:
        """Perform a Send or a Receive.

        Raises:
            ConnectionLost: the connection ended, or time is up.
        """
        if isinstance(step, Send):
            self.send(step.commands)
            return None
        assert isinstance(step, Receive)
        if step.within is not None:
            self._deadline = self._clock() + step.within
        return self.receive()

    def close(self) -> None:
        """Close the connection; safe to repeat, and from any thread."""
        with self._lock:
            self._fail(ConnectionLost(f"the connection to {self.target} was closed"))

    # --- sending and receiving ---

    def send(self, commands: tuple[Command, ...]) -> None:
        """Send commands in one piece, waiting for the socket for at most `answer_timeout`."""
        with self._lock:
            self._check_open()
            now = self._clock()
            self._write(b"".join(self.connection.send(command, now) for command in commands))

    def receive(self) -> bytes:
        """The next whole lines. Sends PINGs while it waits, and gives up on a silent peer and at the deadline."""
        self._reading = True
        waited = False
        try:
            while True:
                with self._lock:
                    self._check_open()
                    block = self._read_nowait()
                    if block is None:
                        if not waited:
                            self.connection.pardon(self._clock())  # silence counts from when somebody listens
                        waited = True
                        self._mind_the_time()
                if block:
                    return block
                if block is None:
                    self._wait_for_more()
        finally:
            self._reading = False

    def _wait_for_more(self) -> None:
        now = self._clock()
        if now >= self._deadline:
            with self._lock:
                self._fail(ConnectionLost(f"{self.target} did not answer in time"))
            self._check_open()
        self._poll(select.POLLIN, min(self._deadline, self.connection.next_deadline()) - now)

    def _read_nowait(self) -> bytes | None:
        """Whole lines from what is there (perhaps none yet), None where nothing is; under the lock."""
        if self.connection.holds_back and (block := self.connection.receive_block(b"", self._clock())):
            return block
        try:
            data = self._sock.recv(READ_BYTES)
        except (*_PLAIN_WAITS, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            self._lose(error)
        if not data:
            self._fail(ConnectionLost(f"{self.target} closed the connection"))
            self._check_open()
        return self.connection.receive_block(data, self._clock())

    def _write(self, data: bytes) -> None:
        """Write all of it, under the lock."""
        rest = memoryview(data)
        deadline = self._clock() + self.target.answer_timeout
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
                wanted = select.POLLOUT
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except OSError as error:
                self._pass_over()  # it may have said why before it hung up
                self._lose(error)
            else:
                continue
            if self._clock() >= deadline:
                self._fail(ConnectionLost(f"{self.target} takes nothing any more"))
                self._check_open()
            self._poll(wanted, deadline - self._clock())

    def _poll(self, wanted: int, timeout: float) -> None:
        poller = select.poll()
        try:
            poller.register(self._sock, wanted)
        except ValueError:  # another thread closed it; the next look at it says so
            return
        poller.poll(min(max(timeout, 0.0), 3600.0) * 1000 + 1)

    # --- the end, and the time ---

    def _fail(self, error: ReplicadError) -> None:
        """Note why it ended, the first reason counts, and close it; under the lock."""
        if self._ended is None:
            self._ended = error
            self._stop.set()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes who waits for it in another thread; closing does not
            self._sock.close()

    def _lose(self, error: OSError) -> None:
        self._fail(ConnectionLost(f"the connection to {self.target} broke: {reason(error)}"))
        self._check_open()

    def _mind_the_time(self) -> None:
        """Do what is due, under the lock.

        Raises:
            ConnectionLost: the peer is silent, or does not finish a line.
        """
        due = self.connection.due(self._clock())
        if due is Due.PING:
            self._write(self.connection.send(Ping(), self._clock()))
        elif due is not None:
            self._fail(self._overdue(due))
            self._check_open()

    def _pass_over(self) -> None:
        """Read what came while nobody was asking; under the lock."""
        try:
            while not self.closed and (block := self._read_nowait()) is not None:
                self._look_at(block)
        except ReplicadError as error:
            self._fail(error)

    def tick(self) -> float:
        """Keep the connection alive, from another thread than the owner's; returns when to come again, in seconds."""
        with self._lock:
            if self.closed:
                return 0.0
            now = self._clock()
            if not self._busy:
                self._pass_over()
            elif not self._reading:
                self.connection.pardon(now)  # the peer's words are there, the owner has no time for them
            judging = not self._busy  # whoever reads sees first whether something came
            with contextlib.suppress(ReplicadError):  # noted, and raised to the owner when it asks next
                if not self.closed and (judging or self.connection.due(now) is Due.PING):
                    self._mind_the_time()
            return max(self.connection.next_deadline() - now, _SHORTEST_PAUSE)

    def keep_alive(self) -> None:
        """Start the thread that calls `tick` until the connection is closed or forgotten."""
        thread = threading.Thread(
            target=_keep_alive, args=(weakref.ref(self), self._stop), name="replicad-keepalive", daemon=True
        )
        thread.start()


def _keep_alive(reference: weakref.ref[SocketLink], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        link = reference()
        if link is None:
            return
        pause = link.tick()
        del link
