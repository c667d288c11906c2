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

SEQS_PER_LINE = 20_000  # of 19 digits and a comma at most: well below the longest line that a daemon takes
MAX_ERROR = 10_000  # characters; a traceback's end says what happened
_FOLLOWED = {"POSITION", "TAKEN"}  # a client that has subscribed gets them between a request and its answer
_ANSWERS = frozenset(kind.ANSWER for kind in VOCABULARY if kind.ANSWER) - _FOLLOWED


class Bounds(TypedDict, total=False):
    """What bounds an answer to PODS: pods, ids, backfill pods among them; and seconds to wait when there is nothing."""

    limit: int | None
    ids: int | None
    backfill: int | None
    wait: float | None


class Extent(Bounds, total=False):
    """Bounds, or instead of them `upto`: exactly the pods between two cursors."""

    upto: Cursor | None


class PodBlock(NamedTuple):
    """So many pods as one Arrow IPC stream of one RecordBatch."""

    pods: int
    data: memoryview


def ack_requests(tube: str, part: Part, term: int, seqs: Sequence[int]) -> list[Ack]:
    """As many ACKs as it takes to keep each of them on a line of bearable length; none for no seqs."""
    return [
        Ack(tube, part, term, tuple(seqs[begin : begin + SEQS_PER_LINE]))
        for begin in range(0, len(seqs), SEQS_PER_LINE)
    ]


def park_request(tube: str, part: Part, term: int, seq: int, ids: Sequence[int], *, tries: int, error: str) -> Park:
    """A PARK whose error stands on one line, whatever the exception's text was."""
    text = " ".join(error.replace("\0", " ").split())[:MAX_ERROR]
    return Park(tube, part, term, seq, tuple(ids), tries, text or "unknown")


@dataclass(frozen=True, slots=True)
class Introduction:
    """What we say about ourselves, and what we expect the server to be called (None: anything)."""

    name: str
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)


def greet(connection: Connection, us: Introduction) -> Steps[str]:
    """Wait for SERVER, check its name, then say who we are; returns the server's name.

    The secret is sent only after the name was checked.

    Raises:
        WrongServer: it has another name than the one that was expected.
        ReplicadError: what its ERROR says instead.
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


def tell(commands: tuple[Command, ...], _connection: Connection, _timeout: float) -> Steps[None]:
    """Send commands that are not answered, in one piece."""
    yield Send(commands)


def ask(request: Command, connection: Connection, timeout: float) -> Steps[Command]:
    """Send a request and return its answer; `timeout` in seconds, on top of what the request itself waits for.

    Raises:
        ReplicadError: the server's refusal, by its code.
        RemoteProtocolError: an answer to something else.
    """
    yield Send((request,))
    block = yield Receive(timeout + (getattr(request, "wait", None) or 0.0))
    while True:
        answer: Command | None = None
        for command in _commands(connection, block):
            answer = answer or _answer(request, command)
        if answer is not None:
            return answer
        block = yield Receive()


def ask_for_pods(request: Pods, connection: Connection, timeout: float) -> Steps[CursorAt]:
    """Like `ask`, for PODS with rows: yields blocks of RDATA lines as they come, returns the CURSOR behind them.

    `timeout` is for each piece of the answer.

    Raises:
        RemoteProtocolError: CURSOR counts other pods than those that came.
    """
    label = f"RDATA tube:{request.tube} {request.part} ".encode()
    between = b"\n" + label
    count = 0
    yield Send((request,))
    within: float | None = timeout + (request.wait or 0.0)
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
    """Like `ask_for_pods`, with `encoding=arrow`: yields PodBlocks as they come, returns the CURSOR behind them.

    `timeout` is for each block.

    Raises:
        EncodingUnavailable: the daemon has only lines to give, of all pods or of those behind what was yielded.
        RemoteProtocolError: a block does not end where it was said to, or CURSOR counts other pods than came.
    """
    count = 0
    connection.stop_at(Arrow.NAME)  # before a driver can read on while it sends
    yield Send((request,))
    within: float | None = timeout + (request.wait or 0.0)
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
    """As `_answer`; what ends the answer, CURSOR or a refusal, ends the time in which raw bytes may come."""
    if isinstance(command, CursorAt | Error):
        connection.stop_at(None)
    return _answer(request, command)


def _split(block: bytes, label: bytes) -> tuple[bytes, list[bytes]]:
    """The lines that begin with the label, ends included, and the others."""
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
    """The command if it answers the request, None if it is something in between."""
    if isinstance(command, Error):
        raise refusal(command.text)
    if command.NAME not in _ANSWERS:
        return None
    if command.NAME != request.ANSWER:
        raise RemoteProtocolError(f"{command.NAME} came where the answer to {request.NAME} was expected")
    _check_about(request, command)
    return command


def _check_about(request: Command, command: Command) -> None:
    for what in ("tube", "part"):
        if getattr(command, what, None) != getattr(request, what, None):
            raise RemoteProtocolError(f"{command.NAME} answers about another {what} than {request.NAME} asked about")
