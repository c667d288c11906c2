"""The client for programs without async, and for Spark's Python workers: needs threads and the standard library only.

What is asked and understood stands in `requests`, `pods` and `pursuit`; here it is driven on a socket. A connection on
which anything but a plain refusal happened is closed, so that no answer is ever taken for another one's.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, cast

from replicad.client.backoff import Backoff
from replicad.client.blocking_follow import BlockingFollower
from replicad.client.pods import Pod, parse_pods
from replicad.client.pursuit import FollowOptions, FollowWishes, Pursuit
from replicad.client.refusals import concerns_one_request
from replicad.client.requests import (
    Bounds,
    Extent,
    Introduction,
    PodBlock,
    ack_requests,
    ask,
    ask_for_blocks,
    ask_for_pods,
    park_request,
)
from replicad.client.sockets import SocketLink, Target, open_link
from replicad.client.steps import STEPS, Steps
from replicad.errors import ConnectionLost, LocalProtocolError, ReplicadError, UsageError
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.protocol.tokens import START, Cursor
from replicad.streams.commands import Streams
from replicad.tubes.commands import (
    ARROW,
    Ack,
    Acked,
    Claim,
    CursorAt,
    Lease,
    Parked,
    Part,
    Pods,
    Release,
    Renew,
    Report,
    Tube,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a daemon is and how to be let in: plain values that survive pickling. Times in seconds.

    `tls_ca`: the file of the authority that signed the server's certificate, or `system`; None means no TLS.
    """

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    server_name: str | None = None
    tls_ca: str | None = None
    connect_timeout: float = 10.0
    answer_timeout: float = 60.0

    def ssl_context(self) -> ssl.SSLContext | None:
        """What TLS needs, or None for a plain connection.

        Raises:
            UsageError: the file cannot be read or holds no certificate.
        """
        if self.tls_ca is None:
            return None
        try:
            return ssl.create_default_context(cafile=None if self.tls_ca == "system" else self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{self.tls_ca} cannot be used as a certificate authority: {error}") from error

    def connect(self, name: str) -> BlockingClient:
        """A client that calls itself `name`; it connects with its first request.

        Raises:
            UsageError: as `ssl_context`.
        """
        return BlockingClient(
            self.host,
            self.port,
            name=name,
            server_name=self.server_name,
            token=self.token,
            tls=self.ssl_context(),
            connect_timeout=self.connect_timeout,
            answer_timeout=self.answer_timeout,
        )


class Answer(Iterator[T], Generic[T]):
    """The pods of one answer, as they come. Read it to its end, or close it, before the next request.

    `end` is the CURSOR behind the last pod, None until everything was taken. Closing it early costs the connection.
    """

    def __init__(self, blocks: Generator[Any, None, CursorAt], parse: Callable[[Any], Iterable[T]]) -> None:
        self.end: CursorAt | None = None
        self._blocks = blocks
        self._parse = parse
        self._ready: Iterator[T] = iter(())

    def __next__(self) -> T:
        while True:
            for item in self._ready:
                return item
            try:
                self._ready = iter(self._parse(next(self._blocks)))
            except StopIteration as stop:
                self.end = self.end or stop.value
                raise StopIteration from None
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Take no more; safe to repeat."""
        self._blocks.close()


class BlockingClient:
    """Requests to one daemon. Connects when it is first needed, and again after a loss, which is raised once.

    Requests may come from several threads; they are asked one after another. Times in seconds. `server_name`: what
    the server must call itself; `token`: its secret. `connect_timeout` is for connection, TLS and greeting together,
    `answer_timeout` for each piece of an answer, on top of what the request itself waits for. `keepalive` starts a
    thread that sends PINGs and notices a dead peer while nobody asks anything.

    Every request raises ConnectionLost where the connection ends or an answer does not come in time, NotAuthorised and
    WrongServer where the server is not ours, RemoteProtocolError where it does not speak our language, and what
    the server refuses as the exception of that code.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        name: str,
        server_name: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        connect_timeout: float = 10.0,
        answer_timeout: float = 60.0,
        keepalive: bool = True,
        timing: Timing | None = None,
    ) -> None:
        us = Introduction(name, server_name, token)
        self._target = Target(host, port, us, tls, connect_timeout, answer_timeout, keepalive, timing or Timing())
        self._turn = threading.Lock()  # one request at a time; held until its answer is complete
        self._owner: int | None = None  # the thread whose request it is
        self._link: SocketLink | None = None
        self._closed = False

    # --- streams ---

    def streams(self) -> tuple[str, ...]:
        """The names of the streams that the daemon serves."""
        return self._ask(Streams(), Streams).names

    def follow(
        self,
        streams: Mapping[str, str | None] | None,
        linear: bool = False,
        *,
        also: Collection[type] = (),
        backoff: Backoff | None = None,
        **wishes: Unpack[FollowWishes],
    ) -> BlockingFollower:
        """Rows of the streams, each from its token (None: from now on), on a connection of its own.

        `streams` None: every stream from `begin`, and those that are added later, from where they stand then.

        Iterate over it for RowBatch and Reset events, and for those of the types in `also`: PositionMoved, Connected,
        Disconnected, StreamStopped, StreamsChanged, TakenUpto, RemoteServerUp and LockReleased. `backoff` decides how
        long to wait between two tries to connect; for the wishes see FollowOptions.

        Raises:
            BadToken: a token is none.
        """
        options = FollowOptions(linear, answer_timeout=self._target.answer_timeout, **wishes)
        return BlockingFollower(self._target, Pursuit(streams, options, backoff, now=time.monotonic), also)

    # --- tubes ---

    def tube(self, tube: str) -> int:
        """The tube's number of partitions. Raises UnknownTube."""
        return self._ask(Tube(tube), Tube).partitions or 0

    def claim(
        self, tube: str, part: Part, *, ttl: float | None = None, wait: float | None = None, holder: str | None = None
    ) -> Lease:
        """The lease of a partition, waiting up to `wait` for one that another holds. Raises LeaseHeld."""
        return self._ask(Claim(tube, part, ttl, wait, holder), Lease)

    def renew(self, tube: str, part: Part, term: int) -> Lease:
        """Say that the holder is alive. Raises LeaseLost."""
        return self._ask(Renew(tube, part, term), Lease)

    def release(self, tube: str, part: Part, term: int) -> None:
        """Give the lease back; harmless where it is lost already."""
        self._ask(Release(tube, part, term), Release)

    def plan(self, tube: str, part: Part, term: int, after: Cursor = START, **bounds: Unpack[Bounds]) -> CursorAt:
        """How far reading from `after` would get and how many pods that is; the pods stay where they are."""
        return self._ask(Pods(tube, part, term, after, plan=True, **bounds), CursorAt)

    def pods(self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]) -> Answer[Pod]:
        """The pods behind `after`, as far as the extent reaches. Raises LeaseLost, on the way as well."""
        return Answer(self._blocks(Pods(tube, part, term, after, **extent)), parse_pods)

    def pod_chunks(
        self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]
    ) -> Answer[bytes]:
        """Like `pods`, in bulk: blocks of whole lines `RDATA tube:NAME p/n seq {...}` as they came, ends included."""
        return Answer(self._blocks(Pods(tube, part, term, after, **extent)), lambda block: (block,))

    def pod_blocks(
        self,
        tube: str,
        part: Part,
        term: int,
        after: Cursor = START,
        *,
        payload: bool = False,
        **extent: Unpack[Extent],
    ) -> Answer[PodBlock]:
        """Like `pods`, in bulk and as Arrow IPC: see `protocol.md` for the columns. `payload` has payloads come along.

        Raises EncodingUnavailable where the daemon has only lines to give, of all or of those that would come next.
        """
        request = Pods(tube, part, term, after, encoding=ARROW, payload=payload, **extent)
        return Answer(self._blocks(request), lambda block: (block,))

    def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        """Remove pods whose ids the downstream has; returns how many there were. Raises LeaseLost."""
        return sum(self._ask(request, Acked).pods for request in ack_requests(tube, part, term, seqs))

    def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        """Like `ack`, for all pods of (after, upto]."""
        return self._ask(Ack(tube, part, term, upto=upto, after=after), Acked).pods

    def park(self, tube: str, part: Part, term: int, seq: int, ids: Sequence[int], *, tries: int, error: str) -> int:
        """Put ids that keep failing (none: the whole pod) aside, with the error; returns how many."""
        return self._ask(park_request(tube, part, term, seq, ids, tries=tries, error=error), Parked).ids

    def report(self, tube: str, reporter: str, counts: Mapping[str, object]) -> None:
        """Have `replicad top` show what was counted; the last word of each reporter stands."""
        self._ask(Report(tube, reporter, json.dumps(counts)), Report)

    # --- any command ---

    def send(self, *commands: Command) -> None:
        """Send commands that are not answered (USER_SYNC, FEDERATION_ACK, DOORBELL and the like), in one piece."""
        with self._request() as link:
            link.send(commands)

    def close(self) -> None:
        """Close the connection, also under a request of another thread; safe to repeat."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- how ---

    def _ask(self, request: Command, kind: type[T]) -> T:
        with self._request() as link:
            answer = link.run(ask(link.connection, request, self._target.answer_timeout))
        assert isinstance(answer, kind)
        return answer

    def _blocks(self, request: Pods) -> Generator[Any, None, CursorAt]:
        with self._request() as link:
            ask_for = ask_for_blocks if request.encoding == ARROW else ask_for_pods
            steps: Steps[CursorAt] = ask_for(link.connection, request, self._target.answer_timeout)
            answer: bytes | None = None
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    return cast(CursorAt, stop.value)
                answer = None
                if type(step) in STEPS:
                    answer = link.perform(step)
                else:
                    yield step

    @contextmanager
    def _request(self) -> Iterator[SocketLink]:
        """The connection, for one request; afterwards it is in step, or closed."""
        if not self._turn.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise LocalProtocolError("the pods of the request before are not all read; read on, or close() them")
            self._turn.acquire()
        self._owner = threading.get_ident()
        link: SocketLink | None = None
        try:
            link = self._ready()
            yield link
            link.end()
        except BaseException as error:
            in_step = isinstance(error, ReplicadError) and (
                concerns_one_request(error) or isinstance(error, LocalProtocolError)
            )
            if link is not None and in_step:
                link.end()
            elif link is not None:
                link.close()
            raise
        finally:
            self._owner = None
            self._turn.release()

    def _ready(self) -> SocketLink:
        if self._closed:
            raise ConnectionLost("this client was closed; make another one")
        if self._link is None or not self._link.begin():
            self._link = open_link(self._target)
            if self._closed:  # by another thread, meanwhile
                self._link.close()
        return self._link
