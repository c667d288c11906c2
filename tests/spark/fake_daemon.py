"""A daemon without Postgres: pods, leases and rows in memory, the real protocol core on a real socket, threads.

It does what protocol.md says of tubes and enough of streams for a reader that resumes, and it can misbehave on demand:
lose all connections, cut an answer short, forget pods. Leases expire by the monotonic clock, here too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from replicad.client.requests import VOCABULARY
from replicad.errors import (
    BadToken,
    CursorAhead,
    EncodingUnavailable,
    LeaseForked,
    LeaseHeld,
    LeaseLost,
    PartitionsChanged,
    ProtocolError,
    ReplicadError,
    TokenAhead,
    TokenExpired,
    TokenForked,
    TubeRefused,
    UnknownStream,
    UnknownTube,
    forked_text,
)
from replicad.protocol.command import Command
from replicad.protocol.commands import Auth, Error, Ping, Server
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import Cursor, Vector
from replicad.protocol.words import Side
from replicad.streams.commands import Position, Rdata, Replicate, Writers
from replicad.tubes.columns import schema
from replicad.tubes.commands import (
    ARROW,
    Ack,
    Acked,
    Arrow,
    Claim,
    CursorAt,
    Lease,
    Park,
    Parked,
    Part,
    Pods,
    Release,
    Renew,
    Report,
    Seen,
    Tube,
)

STAMP = "2026-01-01T00:00:00.000000+00:00"
BLOCK_PODS = 100  # in a block of Arrow


@dataclass(frozen=True)
class Pod:
    seq: int
    op: str
    shard: int
    ids: tuple[int, ...]
    payload: Any = None

    def line(self, tube: str, part: Part) -> bytes:
        row: dict[str, Any] = {"seq": self.seq, "op": self.op, "shard": self.shard, "ids": list(self.ids), "ts": STAMP}
        if self.payload is not None:
            row["payload"] = self.payload
        return f"RDATA tube:{tube} {part} {self.seq} {json.dumps(row)}\n".encode()

    def row(self) -> dict[str, Any]:
        payload = None if self.payload is None else json.dumps(self.payload)
        ts = datetime.fromisoformat(STAMP)
        return {**asdict(self), "payload": payload, "ts": ts}


@dataclass
class Held:
    part: Part
    holder: str
    term: int
    ttl: float
    seen: float
    generation: str

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.seen + self.ttl


@dataclass
class TubeState:
    partitions: int
    pods: dict[int, Pod] = field(default_factory=dict)
    leases: list[Held] = field(default_factory=list)
    acked: list[Pod] = field(default_factory=list)
    parked: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    old_numbers: list[int] = field(default_factory=list)  # of partitions, which TUBE still tells for so many times
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)  # by reporter
    top: int = 0  # the position: the highest seq ever given out
    made: int = field(default_factory=itertools.count(1_700_000_000_000_000).__next__)

    generation: str = "g1"
    shared: int | None = None  # the position up to which this generation has the touches of those before; None: of all
    unknown: list[tuple[str, int]] = field(default_factory=list)  # generation and seq of each SEEN

    def fork(self, *pods: Pod, shared: int | None) -> None:
        """The database was restored: it has these pods, and begins a generation."""
        self.pods = {pod.seq: pod for pod in pods}
        self.generation, self.shared = f"g{int(self.generation[1:]) + 1}", shared
        self.top = 1_000_000

    def park(self, seq: int, ids: tuple[int, ...], error: str) -> int:
        """Take ids out of a pod; a pod without any goes."""
        pod = self.pods.pop(seq)
        good = tuple(one for one in pod.ids if one not in ids)
        if good:
            self.pods[seq] = replace(pod, ids=good)
        self.parked.append((seq, ids, error))
        return len(ids)


class FakeDaemon:
    """A daemon on a free port of the loopback. Methods may be called from any thread."""

    def __init__(self, *, token: str | None = None, max_limit: int = 100_000) -> None:
        self.token = token
        self.max_limit = max_limit
        self.tubes: dict[str, TubeState] = {}
        self.streams: dict[str, list[tuple[int, str, str]]] = {}
        self.tops: dict[str, int] = {}  # positions of streams; may be above the last row
        self.trimmed: dict[str, int] = {}  # up to where rows of streams were forgotten
        self.epoch = "0123456789ab"
        self.forks: dict[str, int] = {}  # up to where each earlier epoch is shared with this one
        self.cut_after_pods: int | None = None  # close the connection after so many pods of the next answer, once
        self.arrow: int | None = None  # of how many pods of an answer it gives blocks; None: of all
        self.requests: list[str] = []
        self.moved = threading.Condition()
        self.record: Callable[[int], None] = lambda _: None  # called with the seq of each pod before it can be read
        self._seq = itertools.count(1)
        self._term = itertools.count(1)
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.start()

    # --- life ---

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Like kill -9: nobody is told anything. State stays, `start` goes on with it."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.drop_connections()

    def drop_connections(self) -> None:
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- what a test does to it ---

    def make_tube(self, tube: str, partitions: int = 1) -> TubeState:
        with self.moved:
            state = self.tubes.setdefault(tube, TubeState(partitions))
            state.partitions = partitions
            return state

    def touch(self, tube: str, shard: int, ids: Any, op: str = "U", payload: Any = None) -> int:
        with self.moved:
            state = self.tubes[tube]
            seq = next(self._seq)
            self.record(seq)
            state.pods[seq] = Pod(seq, op, shard, tuple(ids), payload)
            state.top = seq
            self.moved.notify_all()
            return seq

    def append(self, stream: str, instance: str, row: Any) -> int:
        with self.moved:
            rows = self.streams.setdefault(stream, [])
            rows.append((next(self._seq), instance, json.dumps(row)))
            self.tops[stream] = rows[-1][0]
            self.moved.notify_all()
            return rows[-1][0]

    def fork(self, stream: str, epoch: str, shared: int) -> None:
        """The rows after `shared` are gone, and their ids are given out again."""
        with self.moved:
            self.forks = {known: min(at, shared) for known, at in {**self.forks, self.epoch: shared}.items()}
            self.epoch = epoch
            self.streams[stream] = [row for row in self.streams[stream] if row[0] <= shared]
            self.tops[stream] = shared
            self._seq = itertools.count(shared + 1)

    def count(self, command: str) -> int:
        """How many requests of that name came."""
        return sum(line.split(" ", 1)[0] == command for line in self.requests)

    # --- sockets ---

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.add(one)
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        core = ProtocolConnection(Side.SERVER, VOCABULARY, now=time.monotonic(), wants_auth=self.token is not None)

        sending = threading.Lock()

        def send(command: Command) -> None:
            with sending:
                one.sendall(core.send(command, time.monotonic()))

        name = f"connection-{one.fileno()}"
        try:
            send(Server("fake"))
            send(Ping(str(int(time.time() * 1000))))
            while data := one.recv(1 << 16):
                core.receive_data(data, time.monotonic())
                while (command := core.next_command()) is not None:
                    self.requests.append(command.render())
                    self._answer(command, send, one.sendall, name)
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                one.sendall(f"ERROR {error.code}: {error}\n".encode())
        except OSError:
            pass
        finally:
            self._sockets.discard(one)
            one.close()

    def _answer(
        self, command: Command, send: Callable[[Command], None], raw: Callable[[bytes], None], name: str
    ) -> None:
        try:
            match command:
                case Auth(token=token):
                    if token != self.token:
                        send(Error("not_authorised: wrong token"))
                        raise OSError("wrong token")
                case Tube(tube=tube, made=made):
                    state = self._state(tube)
                    number = state.old_numbers.pop() if state.old_numbers else state.partitions
                    send(Tube(tube, number, state.made if made else None))
                case Claim():
                    send(self._claim(command, name))
                case Renew(tube=tube, part=part, term=term):
                    with self.moved:
                        held = self._lease(tube, part, term)
                    send(Lease(tube, held.part, held.term, held.ttl))
                case Release(tube=tube, part=part, term=term):
                    with self.moved:
                        state = self._state(tube)
                        state.leases = [x for x in state.leases if x.term != term]
                        self.moved.notify_all()
                    send(Release(tube, part, term))
                case Seen(tube=tube, generation=generation, seq=seq):
                    state = self._state(tube)
                    state.unknown.append((generation, seq))
                    lost = generation != state.generation and state.shared is not None and seq > state.shared
                    mended = None if lost else seq
                    send(replace(command, state="unknown" if lost else "same", shared=state.shared, mended=mended))
                case Pods():
                    self._pods(command, send, raw)
                case Ack():
                    send(Acked(command.tube, command.part, self._ack(command)))
                case Park(tube=tube, part=part, term=term, seq=seq, ids=ids, error=error):
                    with self.moved:
                        self._lease(tube, part, term)
                        count = self._state(tube).park(seq, ids, error)
                    send(Parked(tube, part, count))
                case Report(tube=tube, reporter=reporter, counts=counts):
                    self._state(tube).reports[reporter] = json.loads(counts)
                    send(Report(tube, reporter))
                case Replicate():
                    self._replicate(command, send)
                case _:
                    pass
        except ReplicadError as error:
            if isinstance(error, ProtocolError):
                raise
            send(Error(f"{error.code}: {error}"))

    # --- tubes ---

    def _state(self, tube: str) -> TubeState:
        if tube not in self.tubes:
            raise UnknownTube(f"there is no tube {tube!r}; the tubes are: {', '.join(self.tubes)}")
        return self.tubes[tube]

    def _claim(self, command: Claim, name: str) -> Lease:
        deadline = time.monotonic() + (command.wait or 0)
        holder = command.holder or name
        with self.moved:
            while True:
                state = self._state(command.tube)
                if command.part.partitions not in (1, state.partitions):
                    raise PartitionsChanged(f"tube {command.tube} has {state.partitions} partitions")
                state.leases = [lease for lease in state.leases if not lease.expired]
                for lease in state.leases:
                    if lease.holder == holder and lease.part == command.part:
                        lease.seen = time.monotonic()
                        if lease.generation != state.generation:
                            lease.generation, lease.term = state.generation, next(self._term)
                        return self._given(command, lease)
                others = [x for x in state.leases if x.part.covers(command.part) or command.part.covers(x.part)]
                if not others:
                    ttl, now = command.ttl or 30, time.monotonic()
                    made = Held(command.part, holder, next(self._term), ttl, now, state.generation)
                    state.leases.append(made)
                    return self._given(command, made)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LeaseHeld(f"tube {command.tube} is held by {others[0].holder}")
                self.moved.wait(min(left, 0.02))

    @staticmethod
    def _given(command: Claim, held: Held) -> Lease:
        return Lease(command.tube, held.part, held.term, held.ttl, held.generation if command.generation else None)

    def _lease(self, tube: str, part: Part, term: int) -> Held:
        for lease in self._state(tube).leases:
            if lease.term == term and lease.generation != self._state(tube).generation:
                raise LeaseForked(f"{LeaseForked.FORKED}: term {term} was given before that")
            if lease.term == term and lease.part.covers(part):
                lease.seen = time.monotonic()
                return lease
        raise LeaseLost(f"term {term} is not the lease of {part} of tube {tube}")

    def _order(self, tube: str, part: Part, after: Cursor, upto: Cursor | None) -> Iterator[Pod]:
        pods = [p for p in self._state(tube).pods.values() if p.shard % part.partitions == part.partition]
        for backfill in (False, True):
            low, high = (after.backfill, upto and upto.backfill) if backfill else (after.regular, upto and upto.regular)
            for pod in sorted(pods, key=lambda pod: pod.seq):
                if (pod.op == "B") == backfill and low < pod.seq and (high is None or pod.seq <= high):
                    yield pod

    def _select(self, command: Pods) -> list[Pod]:
        found = self._order(command.tube, command.part, command.after, command.upto)
        if command.upto is not None:
            return list(found)
        chosen: list[Pod] = []
        backfill = ids = 0
        for pod in found:
            if len(chosen) >= min(1000 if command.limit is None else command.limit, self.max_limit):
                break
            if pod.op == "B":
                if command.backfill is not None and backfill >= command.backfill:
                    break
                backfill += 1
            if command.ids is not None and chosen and ids + len(pod.ids) > command.ids:
                break
            ids += len(pod.ids)
            chosen.append(pod)
        return chosen

    def _check(self, tube: str, cursor: Cursor | None) -> None:
        if cursor is not None and max(cursor.regular, cursor.backfill) > self._state(tube).top:
            raise CursorAhead(f"cursor {cursor} lies beyond position {self._state(tube).top} of tube {tube}")

    def _pods(self, command: Pods, send: Callable[[Command], None], raw: Callable[[bytes], None]) -> None:
        if command.wait is not None and command.wait > 300:
            raise TubeRefused("wait is too long")
        deadline = time.monotonic() + (command.wait or 0)
        with self.moved:
            while True:
                self._lease(command.tube, command.part, command.term)
                if command.upto is None and command.part.partitions not in (1, self._state(command.tube).partitions):
                    raise PartitionsChanged(f"tube {command.tube} has another number of partitions")
                self._check(command.tube, command.after)
                self._check(command.tube, command.upto)
                chosen = self._select(command)
                left = deadline - time.monotonic()
                if chosen or left <= 0:
                    break
                self.moved.wait(min(left, 0.5))
        if not command.plan:
            cut, self.cut_after_pods = self.cut_after_pods, None
            if command.encoding == ARROW:
                self._blocks(command, chosen, cut, raw)
            else:
                raw(b"".join(pod.line(command.tube, command.part) for pod in chosen[:cut]))
            if cut is not None and cut < len(chosen):
                raise OSError("cut short")
        cursor = Cursor(
            max([pod.seq for pod in chosen if pod.op != "B"], default=command.after.regular),
            max([pod.seq for pod in chosen if pod.op == "B"], default=command.after.backfill),
        )
        send(CursorAt(command.tube, command.part, command.upto or cursor, len(chosen)))

    def _blocks(self, command: Pods, pods: list[Pod], cut: int | None, raw: Callable[[bytes], None]) -> None:
        """Blocks of BLOCK_PODS pods; where the answer is cut short, the middle of one is where."""
        for begin in range(0, len(pods), BLOCK_PODS):
            if self.arrow is not None and begin >= self.arrow:
                raise EncodingUnavailable("lines only")
            some = pods[begin : begin + BLOCK_PODS]
            sink = pa.BufferOutputStream()
            batch = pa.RecordBatch.from_pylist([pod.row() for pod in some], schema(payload=command.payload))
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            block = sink.getvalue().to_pybytes()
            data = Arrow(command.tube, command.part, len(some), len(block)).render().encode() + b"\n" + block + b"\n"
            if cut is not None and cut < begin + len(some):
                return raw(data[: len(data) // 2])
            raw(data)
        return None

    def _ack(self, command: Ack) -> int:
        with self.moved:
            self._lease(command.tube, command.part, command.term)
            state = self._state(command.tube)
            if command.upto is None:
                gone = [state.pods[seq] for seq in command.seqs if seq in state.pods]
            else:
                self._check(command.tube, command.upto)
                gone = list(self._order(command.tube, command.part, command.after, command.upto))
            for pod in gone:
                del state.pods[pod.seq]
                state.acked.append(pod)
            return len(gone)

    # --- streams ---

    def _replicate(self, command: Replicate, send: Callable[[Command], None]) -> None:
        """Subscribe, linear; rows go out from a thread of their own until the connection is gone."""
        stream, token = str(command.stream), command.token or "NOW"
        assert command.linear
        if stream not in self.streams:
            raise UnknownStream(f"there is no stream {stream!r}")
        with self.moved:
            top = self.tops.get(stream, 0)
            oldest = self.trimmed.get(stream, 0)
        if token in ("NOW", "EARLIEST"):
            start = top if token == "NOW" else oldest
        else:
            vector = Vector.parse(token)
            shared = self.forks.get(vector.epoch or self.epoch, vector.minimum)
            if vector.minimum > shared:
                raise TokenForked(forked_text(stream, str(shared), f"{self.epoch}!{shared}"))
            if vector.epoch not in (None, self.epoch, *self.forks):
                raise BadToken(f"token {token} is of another epoch than {self.epoch}")
            start = vector.minimum
        if start > top:
            raise TokenAhead(f"token {token} lies beyond {top}")
        if start < oldest:
            raise TokenExpired(f"token {token} is older than {oldest}")
        send(Writers(stream, self.epoch, (("one", 1), ("two", 2))))
        send(Position(stream, "*", start, start))
        threading.Thread(target=self._follow, args=(stream, start, send), daemon=True).start()

    def _follow(self, stream: str, at: int, send: Callable[[Command], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self.moved:
                    self.moved.wait_for(lambda at=at: self.tops.get(stream, 0) > at, timeout=30)  # type: ignore[misc]
                    rows = [row for row in self.streams[stream] if row[0] > at]
                    top = self.tops.get(stream, 0)
                for seq, name, text in rows:
                    send(Rdata(stream, name, seq, text))
                    at = seq
                if top > at:
                    send(Position(stream, "*", at, top))
                    at = top
