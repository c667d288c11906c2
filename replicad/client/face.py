"""The methods of both clients: every request, declared once.

A request is a value: the steps that send it, and a function that interprets the answer. Each client has a driver that
performs such values on its kind of connection. In the blocking client a method returns the result, in the trio client
it is awaited. Names, parameters and defaults are the same in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from replicad.client.answers import Answer, PodBatch
from replicad.client.pods import Pod, parse_pods
from replicad.client.requests import (
    Bounds,
    Extent,
    PodBlock,
    ack_requests,
    ask,
    ask_for_blocks,
    ask_for_pods,
    park_request,
    send_commands,
)
from replicad.client.steps import Steps
from replicad.protocol.command import Command
from replicad.protocol.connection import Connection
from replicad.protocol.tokens import START, Cursor
from replicad.streams.commands import Streams
from replicad.tubes.commands import (
    ARROW,
    Ack,
    Acked,
    Claim,
    CursorAt,
    Keep,
    Kept,
    Lease,
    Parked,
    Part,
    Pods,
    Release,
    Renew,
    Report,
    Tube,
)

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C", bound=Command)

Turn = Callable[[Connection, float], Steps[Any]]
"""The steps of one request on a connection; the number is the seconds that the answer may take."""


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A request that is answered as a whole: turns, one after another, and a function of all their answers."""

    turns: Sequence[Turn]
    result: Callable[[list[Any]], T]


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A request for pods: its turn yields pieces and returns the CURSOR; `parse` makes items of a piece."""

    turn: Turn
    parse: Callable[[Any], Iterable[T]]


class Waits(Protocol):
    """A client whose methods block until the answer is received."""

    def _drive(self, request: Request[T], /) -> T: ...

    def _read(self, reading: Reading[T], /) -> Answer[T]: ...


class Awaits(Protocol):
    """A client whose methods are awaited."""

    def _drive(self, request: Request[T], /) -> Coroutine[Any, Any, T]: ...

    def _read(self, reading: Reading[T], /) -> Coroutine[Any, Any, PodBatch[T]]: ...


class _Method(Generic[P, B, A]):
    """A method of both clients: it returns a `B` in the blocking client; the trio client awaits an `A`."""

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


def asked(describe: Callable[Concatenate[Any, P], Request[T]]) -> _Method[P, T, T]:
    """Make a method of both clients out of a function that describes a Request."""
    return _Method(describe, "_drive")


def read(describe: Callable[Concatenate[Any, P], Reading[T]]) -> _Method[P, Answer[T], PodBatch[T]]:
    """Make a method of both clients out of a function that describes a Reading."""
    return _Method(describe, "_read")


class Requests:
    """The requests to one daemon. In the trio client the methods are awaited for their result.

    Every request raises ConnectionLost where the connection ends or an answer does not come in time, NotAuthorised and
    WrongServer where the server is not ours, RemoteProtocolError where it does not speak our language, and what
    the server refuses as the exception of that code.
    """

    # --- streams ---

    @asked
    def streams(self) -> Request[tuple[str, ...]]:
        """The names of the streams that the daemon serves."""
        return _one(Streams(), Streams, lambda answer: answer.names)

    # --- tubes ---

    @asked
    def tube(self, tube: str) -> Request[int]:
        """The tube's number of partitions. Raises UnknownTube."""
        return _one(Tube(tube), Tube, lambda answer: answer.partitions or 0)

    @asked
    def tube_made(self, tube: str) -> Request[tuple[int, int | None]]:
        """The tube's number of partitions, and when it was made, in microseconds since 1970. Raises UnknownTube.

        A tube that was dropped and made again has another time, and its pods other cursors.
        """
        return _one(Tube(tube, made=1), Tube, lambda answer: (answer.partitions or 0, answer.made))

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
    ) -> Request[Lease]:
        """The lease of a partition; waits up to `wait` if another client holds it. Raises LeaseHeld.

        `ready`: do not wait; the daemon sends READY within that time (see `trio_client.when_ready`).
        """
        return _one(Claim(tube, part, ttl, wait, holder, ready), Lease, lambda answer: answer)

    @asked
    def renew(self, tube: str, part: Part, term: int) -> Request[Lease]:
        """Renew a lease. Raises LeaseLost."""
        return _one(Renew(tube, part, term), Lease, lambda answer: answer)

    @asked
    def keep(self, tube: str, terms: Sequence[int]) -> Request[list[int]]:
        """Renew up to 1,000 leases of a tube at once; returns the terms of those that are still held."""
        return _one(Keep(tube, tuple(terms)), Kept, lambda answer: list(answer.terms))

    @asked
    def release(self, tube: str, part: Part, term: int) -> Request[None]:
        """Release a lease; does nothing if it is lost already."""
        return _one(Release(tube, part, term), Release, lambda _: None)

    @asked
    def plan(
        self, tube: str, part: Part, term: int, after: Cursor = START, **bounds: Unpack[Bounds]
    ) -> Request[CursorAt]:
        """The cursor that reading from `after` would reach, and the number of pods; reads none."""
        return _one(Pods(tube, part, term, after, plan=True, **bounds), CursorAt, lambda answer: answer)

    @read
    def pods(self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]) -> Reading[Pod]:
        """The pods after `after`, up to the end of the extent. Raises LeaseLost, also after some pods."""
        return Reading(partial(ask_for_pods, Pods(tube, part, term, after, **extent)), parse_pods)

    @read
    def pod_chunks(
        self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]
    ) -> Reading[bytes]:
        """Like `pods`, in bulk: blocks of lines `RDATA tube:NAME p/n seq {...}` as received, newlines included."""
        return Reading(partial(ask_for_pods, Pods(tube, part, term, after, **extent)), _as_it_is)

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
    ) -> Reading[PodBlock]:
        """Like `pods`, in bulk and as Arrow IPC: see `protocol.md` for the columns. `payload`: with payloads.

        Raises EncodingUnavailable if the daemon can send only lines, for all pods or for the next ones.
        """
        request = Pods(tube, part, term, after, encoding=ARROW, payload=payload, **extent)
        return Reading(partial(ask_for_blocks, request), _as_it_is)

    @asked
    def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> Request[int]:
        """Remove pods whose ids the downstream has; returns how many were removed. Raises LeaseLost."""
        return Request(
            [partial(ask, request) for request in ack_requests(tube, part, term, seqs)],
            lambda answers: sum(answer.pods for answer in answers),
        )

    @asked
    def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> Request[int]:
        """Like `ack`, for all pods of (after, upto]."""
        return _one(Ack(tube, part, term, upto=upto, after=after), Acked, lambda answer: answer.pods)

    @asked
    def park(
        self, tube: str, part: Part, term: int, seq: int, ids: Sequence[int], *, tries: int, error: str
    ) -> Request[int]:
        """Park ids that keep failing (none: the whole pod), with the error; returns how many."""
        request = park_request(tube, part, term, seq, ids, tries=tries, error=error)
        return _one(request, Parked, lambda answer: answer.ids)

    @asked
    def report(self, tube: str, reporter: str, counts: Mapping[str, object]) -> Request[None]:
        """Report counts that `replicad top` shows; they replace the reporter's earlier ones."""
        return _one(Report(tube, reporter, json.dumps(counts)), Report, lambda _: None)

    # --- any command ---

    @asked
    def send(self, *commands: Command) -> Request[None]:
        """Send commands that are not answered (such as USER_SYNC, FEDERATION_ACK, DOORBELL), in one write."""
        return Request([partial(send_commands, commands)], lambda _: None)


def _one(command: Command, kind: type[C], result: Callable[[C], T]) -> Request[T]:
    """A request with one command, which is answered by a command of type `kind`."""

    def understand(answers: list[Any]) -> T:
        (answer,) = answers
        assert isinstance(answer, kind)
        return result(answer)

    return Request([partial(ask, command)], understand)


def _as_it_is(piece: T) -> tuple[T]:
    return (piece,)
