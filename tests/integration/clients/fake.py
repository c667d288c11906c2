"""A daemon without Postgres: the real protocol core on a real socket, a world of rows and pods in memory.

It runs in a thread of its own, so that blocking programs can be tested as they are, and it can misbehave on demand:
fall silent, die, answer half. What it knows of tubes is just enough to be asked.
"""

from __future__ import annotations

import json
import ssl
import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from replicad.errors import (
    BadToken,
    LeaseHeld,
    LeaseLost,
    NotAuthorised,
    ProtocolError,
    ReplicadError,
    TokenAhead,
    TokenForked,
    UnknownStream,
    UnknownTube,
    forked_text,
)
from replicad.protocol.command import Command
from replicad.protocol.connection import Due, ProtocolConnection, Timing
from replicad.protocol.tokens import Cursor, Vector
from replicad.protocol.words import Side
from tests import vocabulary as c
from tests.conftest import PATIENCE
from tests.vocabulary import EVERY

from .world import FakeTube, World

Hook = Callable[["FakeSession", Command], "bytes | None"]


class FakeDaemon:
    """Serves a world on one port until `stop` or `kill`; `start` again serves the same world on the same port."""

    def __init__(
        self,
        world: World,
        *,
        name: str = "fake",
        token: str | None = None,
        timing: Timing | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.token = token
        self.timing = timing or Timing()
        self.tls = tls
        self.port = 0
        self.received: list[Command] = []  # over all connections
        self.connections = 0
        self.silent = False
        self.hook: Hook | None = None  # answers in place of us, or leaves it to us with None
        self.sessions: set[FakeSession] = set()
        self._thread: threading.Thread | None = None

    # --- from the test's thread ---

    def start(self) -> None:
        ready = threading.Event()
        self.silent = False
        self._thread = threading.Thread(target=trio.run, args=(self._main, ready), name="fake-daemon", daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE), "the fake daemon did not start"

    def stop(self, farewell: str | None = "server stopping") -> None:
        """End it; every client is told `farewell` first."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._call(partial(self._end, farewell))
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the fake daemon did not stop"

    def kill(self) -> None:
        """End it without a word."""
        self.stop(None)

    def say(self, line: str) -> None:
        """Send a line to every client."""
        self._call(lambda: [session.push(line.encode() + b"\n") for session in self.sessions])

    def _call(self, function: Callable[[], Any]) -> None:
        trio.from_thread.run_sync(function, trio_token=self._trio)

    # --- in the daemon's thread ---

    async def _main(self, ready: threading.Event) -> None:
        self._trio = trio.lowlevel.current_trio_token()
        self.sessions.clear()
        self._over = trio.Event()
        self._farewell: str | None = None
        [listener] = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        wake = partial(self._trio.run_sync_soon, self._wake)
        self.world.watchers.append(wake)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(trio.serve_listeners, self._serve, [listener], handler_nursery=nursery))
                ready.set()
                await self._over.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.world.watchers.remove(wake)

    def _end(self, farewell: str | None) -> None:
        self._farewell = farewell
        self._over.set()

    def _wake(self) -> None:
        for session in self.sessions:
            session.wake.set()

    async def _serve(self, stream: trio.SocketStream) -> None:
        wrapped: trio.abc.Stream = stream
        if self.tls is not None:
            wrapped = trio.SSLStream(stream, self.tls, server_side=True, https_compatible=True)
        self.connections += 1
        session = FakeSession(self, wrapped)
        self.sessions.add(session)
        try:
            await session.run()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            pass
        finally:
            self.sessions.discard(session)
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                try:
                    if self._over.is_set() and self._farewell is not None:
                        await wrapped.send_all(f"ERROR {self._farewell}\n".encode())
                        await stream.send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
            await trio.aclose_forcefully(wrapped)


class Goodbye(Exception):
    """Ends a session after it has said its last word."""


class FakeSession:
    """One client of the fake daemon."""

    def __init__(self, daemon: FakeDaemon, stream: trio.abc.Stream) -> None:
        self.daemon = daemon
        self.world = daemon.world
        self.stream = stream
        self.connection = ProtocolConnection(
            Side.SERVER, EVERY, now=trio.current_time(), timing=daemon.timing, wants_auth=daemon.token is not None
        )
        self.wake = trio.Event()
        self.out = bytearray()
        self.subscriptions: dict[str, tuple[bool, dict[str, int], int]] = {}
        self.epochs: dict[str, str] = {}  # that each subscription was told last
        self.waiting: tuple[float, Command] | None = None  # a long poll: until when, for what
        self.stalled = False  # it reads nothing any more

    def push(self, data: bytes) -> None:
        self.out += data
        self.wake.set()

    def send(self, *commands: Command) -> None:
        now = trio.current_time()
        self.push(b"".join(self.connection.send(command, now) for command in commands))

    async def run(self) -> None:
        self.send(c.Server(self.daemon.name), c.Ping("1"))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read()
        except* Goodbye:
            await self.stream.send_all(bytes(self.out))
            with trio.move_on_after(1):  # else a reset could overtake what was said
                while await self.stream.receive_some(65536):
                    pass

    async def _read(self) -> None:
        while True:
            if self.stalled:
                await trio.sleep_forever()
            data = await self.stream.receive_some(65536)
            if not data:
                raise trio.BrokenResourceError
            try:
                self.connection.receive_data(bytes(data), trio.current_time())
                while (command := self.connection.next_command()) is not None:
                    self._take(command)
            except (ProtocolError, NotAuthorised) as error:
                self.out += f"ERROR {error.code}: {error}\n".encode()
                raise Goodbye from error

    async def _write(self) -> None:
        while True:
            self.wake = trio.Event()
            if not self.daemon.silent:
                self._pump()
                if self.waiting is not None:
                    self._answer(*self.waiting)
                due = self.connection.due(trio.current_time())
                if due is Due.PING:
                    self.send(c.Ping("2"))
                elif due is Due.PEER_SILENT:
                    self.out += b"ERROR peer_silent: nothing came\n"
                    raise Goodbye
                if self.out:
                    data = bytes(self.out)
                    await self.stream.send_all(data)
                    del self.out[: len(data)]
                    continue
            deadline = trio.current_time() + self.daemon.timing.ping_interval / 4
            if self.waiting is not None:
                deadline = min(deadline, self.waiting[0])
            with trio.move_on_at(deadline):
                await self.wake.wait()

    def _take(self, command: Command) -> None:
        self.daemon.received.append(command)
        if self.daemon.hook is not None and (data := self.daemon.hook(self, command)) is not None:
            self.push(data)
            return
        if isinstance(command, c.Auth) and command.token != self.daemon.token:
            raise NotAuthorised("the token is wrong")
        if isinstance(command, c.RemoteServerUp):
            for other in self.daemon.sessions - {self}:
                other.send(command)
        self._answer(trio.current_time() + (getattr(command, "wait", None) or 0.0), command)

    def _answer(self, until: float, command: Command) -> None:
        self.waiting = None
        try:
            with self.world.lock:
                match command:
                    case c.Replicate():
                        self._subscribe(command)
                    case c.Streams():
                        self.send(c.Streams(tuple(sorted(self.world.streams))))
                    case c.Taken():
                        self.send(c.Taken(command.stream, self.world.streams[command.stream].last))
                    case c.Tube() | c.Claim() | c.Renew() | c.Release() | c.Pods() | c.Ack() | c.Park():
                        if not self._tube(command, last=trio.current_time() >= until):
                            self.waiting = (until, command)
                            self.wake.set()
        except ReplicadError as error:
            self.send(c.Error(f"{error.code}: {error}"))

    # --- streams ---

    def _subscribe(self, command: c.Replicate) -> None:
        stream = self.world.streams.get(command.stream or "")
        if stream is None:
            raise UnknownStream(f"there is no stream {command.stream}")
        if command.token in (None, "NOW"):
            begin = Vector(stream.last)
        elif command.token == "EARLIEST":
            begin = Vector(0)
        else:
            begin = Vector.parse(command.token or "")
            shared = stream.forks.get(begin.epoch or stream.epoch, begin.maximum)
            if begin.maximum > shared:
                rewind = Vector(min(begin.minimum, shared), {n: min(at, shared) for n, at in begin.ahead.items()})
                raise TokenForked(forked_text(command.stream or "", str(shared), f"{stream.epoch}!{rewind}"))
            if begin.epoch not in (None, stream.epoch, *stream.forks):
                raise BadToken("the token is of another epoch")
            if begin.maximum > stream.last:
                raise TokenAhead(f"the token lies beyond {stream.last}")
        name = command.stream or ""
        if command.linear:
            told = {"*": begin.minimum}
        else:
            told = {writer: begin.at(number) for writer, number in stream.numbers.items()}
        self.send(c.Writers(name, stream.epoch, tuple(stream.numbers.items())))
        self.send(*(c.Position(name, writer, at, at) for writer, at in told.items()))
        first = bisect_right(stream.facts, begin.minimum, key=lambda fact: fact[0])
        self.subscriptions[name] = (command.linear, told, first)
        self.epochs[name] = stream.epoch

    def _pump(self) -> None:
        """Queue what came since, at most some tens of kilobytes at a time."""
        with self.world.lock:
            for name, (linear, told, at) in self.subscriptions.items():
                stream = self.world.streams[name]
                first = at
                if self.epochs[name] != stream.epoch:
                    first = self._announce_fork(name, told, self.epochs[name])
                if not linear and stream.numbers.keys() - told.keys():
                    self.send(c.Writers(name, stream.epoch, tuple(stream.numbers.items())))
                    for writer in stream.numbers.keys() - told.keys():
                        told[writer] = stream.joined_at[writer]
                        self.send(c.Position(name, writer, told[writer], told[writer]))
                while first < len(stream.facts) and len(self.out) < 65536:
                    token, writer, rows = stream.facts[first]
                    first += 1
                    if token > told["*" if linear else writer]:
                        told["*" if linear else writer] = token
                        self.send(*(c.Rdata(name, writer, None, row) for row in rows[:-1]))
                        self.send(c.Rdata(name, writer, token, rows[-1]))
                if first == len(stream.facts):
                    for writer, position in told.items():
                        if position < stream.last:
                            self.send(c.Position(name, writer, position, stream.last))
                            told[writer] = stream.last
                self.subscriptions[name] = (linear, told, first)

    def _announce_fork(self, name: str, told: dict[str, int], epoch: str) -> int:
        """Positions that go back, WRITERS, and all positions; returns the fact to go on with."""
        stream = self.world.streams[name]
        shared = stream.forks.get(epoch, 0)
        for writer, position in told.items():
            if position > shared:
                self.send(c.Position(name, writer, position, shared))
                told[writer] = shared
        self.send(c.Writers(name, stream.epoch, tuple(stream.numbers.items())))
        self.send(*(c.Position(name, writer, at, at) for writer, at in told.items()))
        self.epochs[name] = stream.epoch
        return bisect_right(stream.facts, min(told.values(), default=0), key=lambda fact: fact[0])

    # --- tubes ---

    def _tube(self, command: Any, *, last: bool) -> bool:
        """Answer a request about a tube; False where it may wait for a better answer."""
        tube = self.world.tubes.get(command.tube)
        if tube is None:
            raise UnknownTube(f"there is no tube {command.tube}")
        match command:
            case c.Tube():
                self.send(c.Tube(command.tube, tube.partitions))
            case c.Claim():
                return self._claim(tube, command, last=last)
            case c.Release():
                tube.leases.pop(command.part, None)
                self.send(command)
            case _:
                if not any(
                    part.covers(command.part) and term == command.term for part, (term, _) in tube.leases.items()
                ):
                    raise LeaseLost(f"term {command.term} is over")
                return self._leased(tube, command, last=last)
        return True

    def _claim(self, tube: FakeTube, command: c.Claim, *, last: bool) -> bool:
        holder = command.holder or "somebody"
        held = tube.leases.get(command.part)
        if held is not None and held[1] != holder:
            if last:
                raise LeaseHeld(f"{held[1]} has it")
            return False
        if held is None:
            self.world.terms += 1
            held = tube.leases[command.part] = (self.world.terms, holder)
        self.send(c.Lease(command.tube, command.part, held[0], command.ttl or 30.0))
        return True

    def _leased(self, tube: FakeTube, command: Any, *, last: bool) -> bool:
        match command:
            case c.Renew():
                self.send(c.Lease(command.tube, command.part, command.term, 30.0))
            case c.Pods():
                seqs = tube.within(command.part, command.after, command.upto)
                if not seqs and command.upto is None and not last:
                    return False
                self._send_pods(tube, command, seqs if command.limit is None else seqs[: command.limit])
            case c.Ack():
                seqs = list(command.seqs)
                if command.upto is not None:
                    seqs = tube.within(command.part, command.after, command.upto)
                self.send(c.Acked(command.tube, command.part, sum(bool(tube.pods.pop(seq, None)) for seq in seqs)))
            case c.Park():
                tube.parked.append(command)
                self.send(c.Parked(command.tube, command.part, len(command.ids)))
        return True

    def _send_pods(self, tube: FakeTube, command: c.Pods, seqs: list[int]) -> None:
        regular, backfill = command.after.regular, command.after.backfill
        for seq in seqs:
            if tube.pods[seq]["op"] == "B":
                backfill = seq
            else:
                regular = seq
            if not command.plan:
                row = json.dumps(tube.pods[seq], separators=(",", ":"))
                self.push(f"RDATA tube:{command.tube} {command.part} {seq} {row}\n".encode())
        cursor = command.upto or Cursor(regular, backfill)
        self.send(c.CursorAt(command.tube, command.part, cursor, len(seqs)))
