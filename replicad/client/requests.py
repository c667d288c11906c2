"""The requests of both clients, and how their answers are understood. No I/O.

Each request is declared once, as a method of `ClientRequests`: the steps that send it (see `steps`), and a function
that interprets the answer. Each client has a driver that performs the steps on its kind of connection. In the blocking
client a method returns the result, in the async client it is awaited. Names, parameters and defaults are the same in
both.

Requests are sent one at a time on a connection, so the next answer belongs to the last request. PINGs, and commands
that the server relays to every client, may come in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from replicad.client.refusals import refusal
from replicad.client.steps import Receive, Send, Steps
from replicad.errors import RemoteProtocolError, WrongServer
from replicad.protocol.command import Command
from replicad.protocol.commands import CORE, Auth, Error, Name, Ping, Server
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import START, Cursor
from replicad.streams import commands as streams
from replicad.streams.commands import Streams
from replicad.tubes import commands as tubes
from replicad.tubes.commands import (
    ARROW,
    MAX_BLOCK,
    Ack,
    Acked,
    Arrow,
    Attempt,
    Claim,
    CursorAt,
    Keep,
    Kept,
    Lease,
    Park,
    Parked,
    Part,
    PartitionShare,
    Pods,
    Release,
    Renew,
    Report,
    Seen,
    TablesFound,
    TablesOf,
    Tube,
)
from replicad.tubes.keys import BIGINT, Key

VOCABULARY = CORE.with_(*streams.COMMANDS, *tubes.COMMANDS)


class Pod(NamedTuple):
    """A pod of a tube: ids that were touched by one operation in one shard.

    `op` is I, U, D, T or B (backfill). A control pod has no ids and a payload. `ts` is when it was written, with a
    time zone. The ids are texts if the tube has keys of kind text (tubes/keys.py).
    """

    seq: int
    op: str
    shard: int
    ids: list[int] | list[str]
    payload: Any
    ts: datetime


def parse_pods(lines: bytes) -> list[Pod]:
    """The pods of whole RDATA lines, newlines included, in their order.

    Raises:
        RemoteProtocolError: a row is not the JSON of a pod.
    """
    # `RDATA tube:t 0/2 17 {...}`: the row is the text after the fourth space. One call parses all rows.
    rows = [line.split(b" ", 4)[4] for line in lines.split(b"\n")[:-1]]
    try:
        return [_pod(row) for row in json.loads(b"[" + b",".join(rows) + b"]")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RemoteProtocolError(f"a pod is not JSON of the form that was agreed on: {error!r:.300}") from error


def garbage_before(payload: Any) -> int | None:
    """The `start_seq` in the payload of a control pod that ends a backfill; None for any other payload.

    Rows of the shard that a downstream wrote for a touch with a lower seq are garbage.
    """
    if not isinstance(payload, dict) or payload.get("type") != "backfill_end":
        return None
    found = str(payload.get("start_seq", ""))
    return int(found) if found.isdecimal() else None


def _pod(row: dict[str, Any]) -> Pod:
    ts = datetime.fromisoformat(row["ts"])
    return Pod(row["seq"], row["op"], row["shard"], row["ids"], row.get("payload"), ts)


T = TypeVar("T")


class PodAnswer(Iterator[T], Generic[T]):
    """The pods of one answer, as received. Read it to its end, or close it, before the next request.

    `end` is the CURSOR after the last pod, None before that. Closing it before its end closes the connection.
    """

    def __init__(self, pieces: Generator[Any, None, CursorAt], parse: Callable[[Any], Iterable[T]]) -> None:
        self.end: CursorAt | None = None
        self._pieces = pieces
        self._parse = parse
        self._ready: Iterator[T] = iter(())

    def __next__(self) -> T:
        while True:
            for item in self._ready:
                return item
            try:
                self._ready = iter(self._parse(next(self._pieces)))
            except StopIteration as stop:
                self.end = self.end or stop.value
                raise StopIteration from None
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the iteration; safe to repeat."""
        self._pieces.close()


class PodBatch(list[T]):
    """The pods of one answer, in the order of processing; `end` is the CURSOR after the last."""

    def __init__(self, pods: Iterable[T], end: CursorAt) -> None:
        super().__init__(pods)
        self.end = end


SEQS_PER_LINE = 20_000  # of at most 19 digits and a comma: well below the longest line that a daemon accepts
MAX_ERROR = 10_000  # characters of the text of a PARK
_FOLLOWED = {"POSITION", "TAKEN"}  # a subscribed client may get these between a request and its answer
_ANSWERS = frozenset(kind.ANSWER for kind in VOCABULARY if kind.ANSWER) - _FOLLOWED


class PodBounds(TypedDict, total=False):
    """PodBounds of an answer to PODS: pods, ids, backfill pods; and seconds to wait if there are none.

    `ready`: do not wait; the daemon sends READY within that time (see `async_client.when_ready`). `early`: also pods
    that a cursor cannot pass yet, because an earlier transaction is open, but not the pods with these seqs (0: none).
    """

    limit: int | None
    ids: int | None
    backfill: int | None
    wait: float | None
    ready: bool
    early: tuple[int, ...] | None


class Extent(PodBounds, total=False):
    """PodBounds, or `upto` instead: exactly the pods between two cursors."""

    upto: Cursor | None


class PodBlock(NamedTuple):
    """Pods as an Arrow IPC stream with one RecordBatch; `pods` is their number."""

    pods: int
    data: memoryview


def ack_requests(tube: str, part: Part, term: int, seqs: Sequence[int]) -> list[Ack]:
    """ACKs for all seqs, each with at most SEQS_PER_LINE; none for no seqs."""
    return [
        Ack(tube, part, term, tuple(seqs[begin : begin + SEQS_PER_LINE]))
        for begin in range(0, len(seqs), SEQS_PER_LINE)
    ]


def park_request(tube: str, part: Part, term: int, seq: int, ids: Sequence[Key], *, tries: int, error: str) -> Park:
    """A PARK with the error on one line, cut at MAX_ERROR."""
    text = " ".join(error.replace("\0", " ").split())[:MAX_ERROR]
    return Park(tube, part, term, seq, tuple(ids), tries, text or "unknown")


@dataclass(frozen=True, slots=True)
class Introduction:
    """Our name and token, and the expected name of the server (None: any)."""

    name: str
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)


def greet(connection: ProtocolConnection, us: Introduction) -> Steps[str]:
    """Wait for SERVER, check its name, then send AUTH and NAME; returns the server's name.

    The token is sent only after the name was checked.

    Raises:
        WrongServer: it has another name than the expected one.
        ReplicadError: it sent an ERROR instead.
    """
    name: str | None = None
    while name is None:
        block = yield Receive()
        for command in _commands(connection, block):
            if isinstance(command, Server):
                name = command.server_name
            elif isinstance(command, Error):
                raise refusal(command.text)
    if us.server_name not in (None, name):
        raise WrongServer(f"connected to server {name!r} where {us.server_name!r} was expected; check host and port")
    secret = () if us.token is None else (Auth(us.token),)
    yield Send((*secret, Name(us.name), Ping()))
    return name


def send_commands(commands: tuple[Command, ...], _connection: ProtocolConnection, _timeout: float) -> Steps[None]:
    """Send commands that are not answered, in one write."""
    yield Send(commands)


def ask(request: Command, connection: ProtocolConnection, timeout: float) -> Steps[Command]:
    """Send a request and return its answer; `timeout` in seconds, on top of the time that the request itself waits.

    Raises:
        ReplicadError: the server's refusal, by its code.
        RemoteProtocolError: the answer belongs to another request.
    """
    yield Send((request,))
    block = yield Receive(timeout + _wait_of(request))
    while True:
        answer: Command | None = None
        for command in _commands(connection, block):
            answer = answer or _answer(request, command)
        if answer is not None:
            return answer
        block = yield Receive()


def ask_for_pods(request: Pods, connection: ProtocolConnection, timeout: float) -> Steps[CursorAt]:
    """Like `ask`, for PODS with rows: yields blocks of RDATA lines as received, returns the CURSOR after them.

    `timeout` is for each piece of the answer.

    Raises:
        RemoteProtocolError: CURSOR has another number of pods than were received.
    """
    label = f"RDATA tube:{request.tube} {request.part} ".encode()
    between = b"\n" + label
    count = 0
    yield Send((request,))
    within: float | None = timeout + _wait_of(request)
    while True:
        block = yield Receive(within)
        within = None
        only_rows = block.startswith(label) + block.count(between) == block.count(b"\n")
        rows, others = (block, []) if only_rows else _split(block, label)
        if rows:
            count += rows.count(b"\n")
            within = timeout
            yield rows
        connection.check()
        answer: Command | None = None
        for line in others:
            command = connection.understand(line)
            if command is not None:
                answer = answer or _answer(request, command)
        if isinstance(answer, CursorAt):
            if answer.pods != count:
                raise RemoteProtocolError(f"CURSOR counts {answer.pods} pods of tube {request.tube}, {count} came")
            return answer


def ask_for_blocks(request: Pods, connection: ProtocolConnection, timeout: float) -> Steps[CursorAt]:
    """Like `ask_for_pods`, with `encoding=arrow`: yields PodBlocks as received, returns the CURSOR after them.

    `timeout` is for each block.

    Raises:
        EncodingUnavailable: the daemon can send only lines, for all pods or for those not yielded yet.
        RemoteProtocolError: a block has not the announced size, or CURSOR another number of pods than were received.
    """
    count = 0
    connection.stop_at(Arrow.NAME)  # first, since a driver may read while it sends
    yield Send((request,))
    within: float | None = timeout + _wait_of(request)
    while True:
        block = yield Receive(within)
        within = None
        answer: Command | None = None
        for command in _commands(connection, block):
            if isinstance(command, Arrow):
                _check_about(request, command)
                if command.pods < 1 or not 0 < command.size <= MAX_BLOCK:
                    raise RemoteProtocolError(
                        f"a block of {command.pods} pods and {command.size} bytes was announced for tube "
                        f"{request.tube}; it has at least one pod and at most {MAX_BLOCK} bytes"
                    )
                connection.expect_raw(command.size)
                raw: bytes = yield Receive(timeout)
                if not raw.endswith(b"\n"):
                    raise RemoteProtocolError(f"{command.size} bytes of pods of tube {request.tube} do not end there")
                count += command.pods
                within = timeout
                yield PodBlock(command.pods, memoryview(raw)[:-1])
            elif answer is None:
                answer = _ends_blocks(connection, request, command)
        if isinstance(answer, CursorAt):
            if answer.pods != count:
                raise RemoteProtocolError(f"CURSOR counts {answer.pods} pods of tube {request.tube}, {count} came")
            return answer


def _ends_blocks(connection: ProtocolConnection, request: Pods, command: Command) -> Command | None:
    """As `_answer`. After CURSOR or ERROR no raw bytes are expected any more."""
    if isinstance(command, CursorAt | Error):
        connection.stop_at(None)
    return _answer(request, command)


def _wait_of(request: Command) -> float:
    """The seconds that the daemon may wait before it answers."""
    return 0.0 if getattr(request, "ready", False) else getattr(request, "wait", None) or 0.0


def _split(block: bytes, label: bytes) -> tuple[bytes, list[bytes]]:
    """The lines that begin with the label, newlines included, and the others."""
    lines = block.split(b"\n")
    rows = [line for line in lines if line.startswith(label)]
    return b"".join(row + b"\n" for row in rows), [line for line in lines if line and not line.startswith(label)]


def _commands(connection: ProtocolConnection, block: bytes) -> Iterator[Command]:
    for line in block.split(b"\n"):
        command = connection.understand(line)
        if command is not None:
            yield command
    connection.check()


def _answer(request: Command, command: Command) -> Command | None:
    """The command if it answers the request; None for others such as PING."""
    if isinstance(command, Error):
        raise refusal(command.text)
    if command.NAME not in _ANSWERS:
        return None
    if command.NAME != request.ANSWER:
        raise RemoteProtocolError(f"{command.NAME} was received instead of the answer to {request.NAME}")
    _check_about(request, command)
    return command


def _check_about(request: Command, command: Command) -> None:
    for what in ("tube", "part"):
        if getattr(command, what, None) != getattr(request, what, None):
            raise RemoteProtocolError(f"{command.NAME} is about another {what} than {request.NAME}")


P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C", bound=Command)

Turn = Callable[[ProtocolConnection, float], Steps[Any]]
"""The steps of one request on a connection; the number is the seconds that the answer may take."""


@dataclass(frozen=True, slots=True)
class WholeRequest(Generic[T]):
    """A request that is answered as a whole: turns, one after another, and a function of all their answers."""

    turns: Sequence[Turn]
    result: Callable[[list[Any]], T]


@dataclass(frozen=True, slots=True)
class PodRequest(Generic[T]):
    """A request for pods: its turn yields pieces and returns the CURSOR; `parse` makes items of a piece."""

    turn: Turn
    parse: Callable[[Any], Iterable[T]]


class Waits(Protocol):
    """A client whose methods block until the answer is received."""

    def _drive(self, request: WholeRequest[T], /) -> T: ...

    def _read(self, reading: PodRequest[T], /) -> PodAnswer[T]: ...


class Awaits(Protocol):
    """A client whose methods are awaited."""

    def _drive(self, request: WholeRequest[T], /) -> Coroutine[Any, Any, T]: ...

    def _read(self, reading: PodRequest[T], /) -> Coroutine[Any, Any, PodBatch[T]]: ...


class _Method(Generic[P, B, A]):
    """A method of both clients: it returns a `B` in the blocking client; the async client awaits an `A`."""

    def __init__(self, describe: Callable[..., Any], driver: str) -> None:
        @wraps(describe)
        def method(client: Any, *args: Any, **named: Any) -> Any:
            return getattr(client, driver)(describe(client, *args, **named))

        self._method = method

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Waits, owner: type) -> Callable[P, B]: ...
    @overload
    def __get__(self, client: Awaits, owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self._method if client is None else MethodType(self._method, client)


def asked(describe: Callable[Concatenate[Any, P], WholeRequest[T]]) -> _Method[P, T, T]:
    """Make a method of both clients out of a function that describes a WholeRequest."""
    return _Method(describe, "_drive")


def read(describe: Callable[Concatenate[Any, P], PodRequest[T]]) -> _Method[P, PodAnswer[T], PodBatch[T]]:
    """Make a method of both clients out of a function that describes a PodRequest."""
    return _Method(describe, "_read")


class ClientRequests:
    """The requests to one daemon. In the async client the methods are awaited for their result.

    Every request raises ConnectionLost if the connection ends or an answer does not come in time, NotAuthorised and
    WrongServer if the server is not ours, RemoteProtocolError if it does not speak our protocol, and for a refusal of
    the server the exception of that code.
    """

    # --- streams ---

    @asked
    def streams(self) -> WholeRequest[tuple[str, ...]]:
        """The names of the streams that the daemon serves."""
        return _one(Streams(), Streams, lambda answer: answer.names)

    # --- tubes ---

    @asked
    def tube(self, tube: str) -> WholeRequest[int]:
        """The tube's number of partitions. Raises UnknownTube."""
        return _one(Tube(tube), Tube, lambda answer: answer.partitions or 0)

    @asked
    def tube_made(self, tube: str) -> WholeRequest[tuple[int, int | None]]:
        """The tube's number of partitions, and when it was made, in microseconds since 1970. Raises UnknownTube.

        A tube that was dropped and made again has another time, and its pods other cursors.
        """
        return _one(Tube(tube, made=1), Tube, lambda answer: (answer.partitions or 0, answer.made))

    @asked
    def tube_keys(self, tube: str) -> WholeRequest[str]:
        """The kind of the tube's keys, `bigint` or `text` (tubes/keys.py). Raises UnknownTube."""
        return _one(Tube(tube), Tube, lambda answer: answer.keys or BIGINT)

    @asked
    def claim(
        self,
        tube: str,
        part: Part,
        *,
        ttl: float | None = None,
        wait: float | None = None,
        holder: str | None = None,
        ready: bool = False,
    ) -> WholeRequest[Lease]:
        """The lease of a partition; waits up to `wait` if another client holds it. Raises LeaseHeld.

        `ready`: do not wait; the daemon sends READY within that time (see `async_client.when_ready`).
        """
        return _one(Claim(tube, part, ttl, wait, holder, ready, generation=True), Lease, lambda answer: answer)

    @asked
    def seen(self, tube: str, generation: str, seq: int) -> WholeRequest[Seen]:
        """Say that pods up to `seq` of an earlier generation were passed on; the answer says which of them are lost."""
        return _one(Seen(tube, generation, seq), Seen, lambda answer: answer)

    @asked
    def renew(self, tube: str, part: Part, term: int) -> WholeRequest[Lease]:
        """Renew a lease. Raises LeaseLost."""
        return _one(Renew(tube, part, term), Lease, lambda answer: answer)

    @asked
    def keep(self, tube: str, terms: Sequence[int]) -> WholeRequest[list[int]]:
        """Renew up to 1,000 leases of a tube at once; returns the terms of the leases that are still held."""
        return _one(Keep(tube, tuple(terms)), Kept, lambda answer: list(answer.terms))

    @asked
    def release(self, tube: str, part: Part, term: int) -> WholeRequest[None]:
        """Release a lease; does nothing if it is lost already."""
        return _one(Release(tube, part, term), Release, lambda _: None)

    @asked
    def plan(
        self, tube: str, part: Part, term: int, after: Cursor = START, **bounds: Unpack[PodBounds]
    ) -> WholeRequest[CursorAt]:
        """The cursor that reading from `after` would reach, and the number of pods; reads none."""
        return _one(Pods(tube, part, term, after, plan=True, **bounds), CursorAt, lambda answer: answer)

    @read
    def pods(
        self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]
    ) -> PodRequest[Pod]:
        """The pods after `after`, up to the end of the extent. Raises LeaseLost, also after some pods."""
        return PodRequest(partial(ask_for_pods, Pods(tube, part, term, after, **extent)), parse_pods)

    @read
    def pod_chunks(
        self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]
    ) -> PodRequest[bytes]:
        """Like `pods`, in bulk: blocks of lines `RDATA tube:NAME p/n seq {...}` as received, newlines included."""
        return PodRequest(partial(ask_for_pods, Pods(tube, part, term, after, **extent)), _as_it_is)

    @read
    def pod_blocks(
        self,
        tube: str,
        part: Part,
        term: int,
        after: Cursor = START,
        *,
        payload: bool = False,
        **extent: Unpack[Extent],
    ) -> PodRequest[PodBlock]:
        """Like `pods`, in bulk and as Arrow IPC: see `protocol.md` for the columns. `payload`: with payloads.

        Raises EncodingUnavailable if the daemon can send only lines, for all pods or for the next ones.
        """
        request = Pods(tube, part, term, after, encoding=ARROW, payload=payload, **extent)
        return PodRequest(partial(ask_for_blocks, request), _as_it_is)

    @asked
    def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> WholeRequest[int]:
        """Remove pods whose ids the downstream has; returns how many were removed. Raises LeaseLost."""
        return WholeRequest(
            [partial(ask, request) for request in ack_requests(tube, part, term, seqs)],
            lambda answers: sum(answer.pods for answer in answers),
        )

    @asked
    def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> WholeRequest[int]:
        """Like `ack`, for all pods of (after, upto]."""
        return _one(Ack(tube, part, term, upto=upto, after=after), Acked, lambda answer: answer.pods)

    @asked
    def park(
        self, tube: str, part: Part, term: int, seq: int, ids: Sequence[Key], *, tries: int, error: str
    ) -> WholeRequest[int]:
        """Park ids that keep failing (none: the whole pod), with the error; returns how many."""
        request = park_request(tube, part, term, seq, ids, tries=tries, error=error)
        return _one(request, Parked, lambda answer: answer.ids)

    @asked
    def attempt(
        self, tube: str, part: Part, term: int, note: Mapping[str, object] | None = None
    ) -> WholeRequest[dict[str, Any] | None]:
        """Store what the reader of a partition is doing (None: leave it), for the reader after it; returns the note
        before, which may be of another reader. Raises LeaseLost.
        """
        request = Attempt(tube, part, term, "" if note is None else json.dumps(note, separators=(",", ":")))
        return _one(request, Attempt, lambda answer: json.loads(answer.note) if answer.note else None)

    @asked
    def tables_of(self, tube: str, shards: Sequence[int]) -> WholeRequest[dict[int, TouchedTable]]:
        """Of which table the ids of these shards are, at most MAX_TABLES. Shards without one table are left out."""
        return _one(TablesOf(tube, tuple(shards)), TablesFound, lambda answer: _tables(answer.tables))

    @asked
    def share(self, tube: str, *, holder: str, ttl: float, ready: bool = False) -> WholeRequest[PartitionShare]:
        """Say that a worker is alive which divides the partitions of a tube with others, for `ttl` seconds (0: it
        ends). The answer says how many it should hold. `holder`: as of its leases.

        `ready`: the daemon sends READY when a lease of the tube is over (see `async_client.when_ready`).
        """
        return _one(PartitionShare(tube, ttl, holder, ready), PartitionShare, lambda answer: answer)

    @asked
    def report(self, tube: str, reporter: str, counts: Mapping[str, object]) -> WholeRequest[None]:
        """Report counts that `replicad top` shows; they replace the reporter's earlier ones."""
        return _one(Report(tube, reporter, json.dumps(counts)), Report, lambda _: None)

    # --- any command ---

    @asked
    def send(self, *commands: Command) -> WholeRequest[None]:
        """Send commands that are not answered (such as USER_SYNC, FEDERATION_ACK, DOORBELL), in one write."""
        return WholeRequest([partial(send_commands, commands)], lambda _: None)


@dataclass(frozen=True, slots=True)
class TouchedTable:
    """A table of a tube: its name as SQL writes it, the columns of its key, and whether it is attached now."""

    name: str
    key: tuple[str, ...]
    attached: bool


def _tables(text: str) -> dict[int, TouchedTable]:
    found = json.loads(text)
    return {
        int(shard): TouchedTable(str(one["table"]), tuple(one["key"]), bool(one["attached"]))
        for shard, one in found.items()
    }


def _one(command: Command, kind: type[C], result: Callable[[C], T]) -> WholeRequest[T]:
    """A request with one command, which is answered by a command of type `kind`."""

    def understand(answers: list[Any]) -> T:
        (answer,) = answers
        assert isinstance(answer, kind)
        return result(answer)

    return WholeRequest([partial(ask, command)], understand)


def _as_it_is(piece: T) -> tuple[T]:
    return (piece,)
