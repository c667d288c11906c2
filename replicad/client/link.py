"""A connection to the daemon: the base of both clients' connections, and the connection on a plain socket.

It sends and receives bytes and keeps the deadlines; `requests` and `follow_loop` interpret them. The plain socket has
time-outs, TLS, and a thread that keeps it alive. It is non-blocking and is read and written under a lock, because two
threads must not use a TLS connection at once. Threads wait in poll(), outside of the lock.
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from replicad.client.refusals import again, is_notice, may_pass, refusal
from replicad.client.requests import VOCABULARY, Introduction, greet
from replicad.client.steps import Receive, Send, Steps
from replicad.config.settings import Address, parse_address
from replicad.errors import ConnectionLost, ReplicadError, UsageError
from replicad.protocol.command import Command
from replicad.protocol.commands import Error, Ping
from replicad.protocol.connection import Due, ProtocolConnection, Timing
from replicad.protocol.words import Side

MAX_ROW = 64 << 20  # bytes in a line of the server; as the server's own bound


class Link:
    """An open connection; the base of both. Its first failure ends it for good."""

    def __init__(self, target: DaemonTarget, now: float) -> None:
        self.target = target
        self.server_name = ""
        self.connection = ProtocolConnection(Side.CLIENT, VOCABULARY, now=now, timing=target.timing, max_line=MAX_ROW)
        self._deadline = float("inf")  # for the answer that is awaited
        self._busy = True
        self._reading = False
        self._ended: ReplicadError | None = None

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._ended is not None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise again(self._ended)

    def _look_at(self, block: bytes) -> None:
        """Check lines received between requests. Raises the error of an ERROR line, unless it is only a notice."""
        for line in block.split(b"\n"):
            command = self.connection.understand(line)
            if isinstance(command, Error) and not is_notice(error := refusal(command.text)):
                raise error
        self.connection.check()

    def _overdue(self, due: Due) -> ConnectionLost:
        """The error that ends the connection for PEER_SILENT or UNFINISHED_LINE."""
        if due is Due.PEER_SILENT:
            return ConnectionLost(f"{self.target} has been silent for {self.target.timing.peer_timeout:g} s")
        return ConnectionLost(f"{self.target} began a line and did not end it")


T = TypeVar("T")

Dial = Callable[[], Awaitable[Any]]  # the connection, a ByteStream of anyio: executors of Spark have no anyio

ONE_OF_SEVERAL = 0.8  # seconds for a daemon to answer where another could; with the first pause a second at most
READ_BYTES = 1 << 18  # as much as a fast sender can send between two reads
_SHORTEST_PAUSE = 0.05  # seconds, at least, between two calls of `tick` by the thread
_PLAIN_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError)


@dataclass(frozen=True, slots=True)
class DaemonTarget:
    """The daemon's address, our name and token, and time-outs in seconds.

    `others`: daemons of the same database, tried in their order where this one does not answer. Every new connection
    begins with the first.

    `dial`, for the async client only: makes the connection in another way than by TCP to the address. `host` is then
    what messages call the daemon, and `tls` is not used. It raises ConnectionLost.
    """

    host: str
    port: int
    us: Introduction
    tls: ssl.SSLContext | None = None
    connect_timeout: float = 10.0
    answer_timeout: float = 60.0
    keepalive: bool = True
    timing: Timing = field(default_factory=Timing)
    dial: Dial | None = None
    others: tuple[Address, ...] = ()

    def choices(self) -> list[DaemonTarget]:
        """The targets to try, one after another; all but the last for a short time only."""
        one = replace(self, others=())
        all_of_them = [one, *(replace(one, host=other.host, port=other.port) for other in self.others)]
        quick = min(self.connect_timeout, ONE_OF_SEVERAL)
        return [*(replace(target, connect_timeout=quick) for target in all_of_them[:-1]), all_of_them[-1]]

    def __str__(self) -> str:
        if self.dial is not None:
            return self.host
        return str(Address(self.host, self.port, self.others))


def find_daemons(host: str, port: int | None) -> Address:
    """The address of the daemon that a program names; with the others, if `host` is `host1:9009,host2:9009`.

    Raises:
        UsageError: it is no address, or has no port.
    """
    if port is not None and "," not in host:
        return Address(host, port)
    texts = [text.strip() for text in host.split(",")]
    try:
        first, *others = (parse_address(text if port is None or ":" in text else f"{text}:{port}") for text in texts)
    except ValueError as error:
        raise UsageError(f"{host[:200]!r} names no daemons: {error}") from None
    return replace(first, others=tuple(others))


def open_link(target: DaemonTarget, clock: Callable[[], float] = time.monotonic) -> SocketLink:
    """`open_one`, to the first daemon that answers. Raises the errors of `open_one`."""
    if not target.others:
        return open_one(target, clock)
    failed = FailedChoices()
    for choice in target.choices():
        try:
            return open_one(choice, clock)
        except ReplicadError as error:
            failed.add(error)
    raise failed.error()


class FailedChoices:
    """Why several daemons could not be used."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def add(self, error: ReplicadError) -> None:
        """Note why one of them could not be used. Raises the error where another daemon would not help."""
        if not may_pass(error):
            raise error
        self._reasons.append(str(error))

    def error(self) -> ConnectionLost:
        """The error of all of them."""
        return ConnectionLost("; ".join(self._reasons))


def open_one(target: DaemonTarget, clock: Callable[[], float]) -> SocketLink:
    """Connect, make the TLS handshake, wait for SERVER and send our name, all within `connect_timeout`.

    Raises:
        ConnectionLost: it could not be made; the message says why.
        WrongServer, NotAuthorised, ReplicadError: the server has another name, or sent this error.
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


def _connect(target: DaemonTarget, deadline: float, clock: Callable[[], float]) -> socket.socket:
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
        if isinstance(error, OSError | UnicodeError):  # UnicodeError: the name cannot be looked up
            raise ConnectionLost(f"no connection to {target}: {reason(error)}") from error
        raise
    return sock


def reason(error: BaseException) -> str:
    """The reason of a failure of a socket or TLS, for people."""
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

    Any failure closes it for good. Use `begin` and `end` around requests. Between requests received lines are
    discarded, so that PINGs do not accumulate and the end of the connection is noticed.
    """

    def __init__(self, sock: socket.socket, target: DaemonTarget, clock: Callable[[], float]) -> None:
        super().__init__(target, clock())
        self._sock = sock
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._closing = False

    # --- for the owner ---

    def begin(self) -> bool:
        """Begin a request; False if the connection has ended."""
        with self._lock:
            self._pass_over()
            self._busy = True
        return not self.closed

    def end(self) -> None:
        """End a request, after its whole answer."""
        self._busy = False

    def run(self, steps: Steps[T], *, within: float | None = None) -> T:
        """Perform steps that yield nothing for the user. `within`: seconds for the first answer."""
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
            ConnectionLost: the connection ended, or the deadline has passed.
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
        self._closing = True
        with contextlib.suppress(OSError):  # wakes a thread that waits to send, and holds the lock
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._lock:
            self._fail(self._was_closed())

    def _was_closed(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.target} was closed")

    # --- sending and receiving ---

    def send(self, commands: tuple[Command, ...]) -> None:
        """Send commands in one piece, waiting for the socket for at most `answer_timeout`."""
        with self._lock:
            self._check_open()
            now = self._clock()
            self._write(b"".join(self.connection.send(command, now) for command in commands))

    def receive(self) -> bytes:
        """The next whole lines. Sends PINGs while it waits; raises for a silent peer and at the deadline."""
        self._reading = True
        waited = False
        try:
            while True:
                with self._lock:
                    self._check_open()
                    block = self._read_nowait()
                    if block is None:
                        if not waited:
                            self.connection.pardon(self._clock())  # the peer's silence counts from the first read
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
        """Whole lines of the received bytes (perhaps empty), None if there are no bytes; under the lock."""
        if self.connection.holds_back and (block := self.connection.receive_block(b"", self._clock())):
            return block
        try:
            data = self._sock.recv(READ_BYTES)
        except (*_PLAIN_WAITS, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            self._lose(error)
        if not data:
            left = ConnectionLost(f"{self.target} closed the connection")
            self._fail(self._was_closed() if self._closing else left)
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
                self._pass_over()  # the peer may have sent the reason before
                self._lose(error)
            else:
                continue
            if self._clock() >= deadline:
                self._fail(ConnectionLost(f"{self.target} does not read any more"))
                self._check_open()
            self._poll(wanted, deadline - self._clock())

    def _poll(self, wanted: int, timeout: float) -> None:
        poller = select.poll()
        try:
            poller.register(self._sock, wanted)
        except ValueError:  # another thread closed it; the caller notices
            return
        poller.poll(min(max(timeout, 0.0), 3600.0) * 1000 + 1)

    # --- the end, and the time ---

    def _fail(self, error: ReplicadError) -> None:
        """Close the connection and keep the reason; the first one counts. Under the lock."""
        if self._ended is None:
            self._ended = error
            self._stop.set()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes another thread that waits for it; close() would not
            self._sock.close()

    def _lose(self, error: OSError) -> None:
        broke = ConnectionLost(f"the connection to {self.target} broke: {reason(error)}")
        self._fail(self._was_closed() if self._closing else broke)
        self._check_open()

    def _mind_the_time(self) -> None:
        """Send a PING if it is due, and check the peer's deadlines; under the lock.

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
        """Discard lines that were received between requests; under the lock."""
        try:
            while not self.closed and (block := self._read_nowait()) is not None:
                self._look_at(block)
        except ReplicadError as error:
            self._fail(error)

    def tick(self) -> float:
        """Keep the connection alive, from another thread than the owner's; returns the seconds until the next call."""
        with self._lock:
            if self.closed:
                return 0.0
            now = self._clock()
            if not self._busy:
                self._pass_over()
            elif not self._reading:
                self.connection.pardon(now)  # the owner does not read, so the peer's silence does not count
            judging = not self._busy  # during a request its thread checks
            with contextlib.suppress(ReplicadError):  # raised to the owner by its next call
                if not self.closed and (judging or self.connection.due(now) is Due.PING):
                    self._mind_the_time()
            return max(self.connection.next_deadline() - now, _SHORTEST_PAUSE)

    def keep_alive(self) -> None:
        """Start the thread that calls `tick` until the connection is closed or garbage-collected."""
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
