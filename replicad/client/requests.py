"""A question and its answer on one connection: who we are, and the requests about tubes and the list of streams.

Pure: generators of steps (see `steps`). Requests are asked one at a time, so that the next answer is ours;
PINGs and what the server relays to everybody may come in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from replicad.client.refusals import refusal
from replicad.client.steps import Receive, Send, Steps
from replicad.client.vocabulary import VOCABULARY
from replicad.errors import RemoteProtocolError, WrongServer
from replicad.protocol.command import Command
from replicad.protocol.commands import Auth, Error, Name, Ping, Server
from replicad.protocol.connection import Connection
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import (
    MAX_BLOCK,
    Ack,
    Arrow,
    CursorAt,
    Park,
    Part,
    Pods,
)

SEQS_PER_LINE = 20_000  # of at most 19 digits and a comma: well below the longest line that a daemon accepts
MAX_ERROR = 10_000  # characters of the text of a PARK
_FOLLOWED = {"POSITION", "TAKEN"}  # a subscribed client may get these between a request and its answer
_ANSWERS = frozenset(kind.ANSWER for kind in VOCABULARY if kind.ANSWER) - _FOLLOWED


class Bounds(TypedDict, total=False):
    """Bounds of an answer to PODS: pods, ids, backfill pods; and seconds to wait if there are none.

    `ready`: do not wait; the daemon sends READY within that time (see `trio_client.when_ready`).
    """

    limit: int | None
    ids: int | None
    backfill: int | None
    wait: float | None
    ready: bool


class Extent(Bounds, total=False):
    """Bounds, or `upto` instead: exactly the pods between two cursors."""

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


def park_request(tube: str, part: Part, term: int, seq: int, ids: Sequence[int], *, tries: int, error: str) -> Park:
    """A PARK with the error on one line, cut at MAX_ERROR."""
    text = " ".join(error.replace("\0", " ").split())[:MAX_ERROR]
    return Park(tube, part, term, seq, tuple(ids), tries, text or "unknown")


@dataclass(frozen=True, slots=True)
class Introduction:
    """Our name and token, and the expected name of the server (None: any)."""

    name: str
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)


def greet(connection: Connection, us: Introduction) -> Steps[str]:
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


def send_commands(commands: tuple[Command, ...], _connection: Connection, _timeout: float) -> Steps[None]:
    """Send commands that are not answered, in one write."""
    yield Send(commands)


def ask(request: Command, connection: Connection, timeout: float) -> Steps[Command]:
    """Send a request and return its answer; `timeout` in seconds, on top of what the request itself waits for.

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


def ask_for_pods(request: Pods, connection: Connection, timeout: float) -> Steps[CursorAt]:
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


def ask_for_blocks(request: Pods, connection: Connection, timeout: float) -> Steps[CursorAt]:
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


def _ends_blocks(connection: Connection, request: Pods, command: Command) -> Command | None:
    """As `_answer`. After CURSOR or ERROR no raw bytes are expected any more."""
    if isinstance(command, CursorAt | Error):
        connection.stop_at(None)
    return _answer(request, command)


def _wait_of(request: Command) -> float:
    """How long the daemon waits before it answers."""
    return 0.0 if getattr(request, "ready", False) else getattr(request, "wait", None) or 0.0


def _split(block: bytes, label: bytes) -> tuple[bytes, list[bytes]]:
    """The lines that begin with the label, newlines included, and the others."""
    lines = block.split(b"\n")
    rows = [line for line in lines if line.startswith(label)]
    return b"".join(row + b"\n" for row in rows), [line for line in lines if line and not line.startswith(label)]


def _commands(connection: Connection, block: bytes) -> Iterator[Command]:
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
