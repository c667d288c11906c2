"""The client for programs without async, and for Spark's Python workers: needs threads and the standard library only.

`requests` and `follow_loop` have the logic; this file drives it on a socket. After any failure but a plain refusal the
connection is closed, so that an answer is never taken for the answer to another request.
"""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from replicad.client.events import E, Reset, RowBatch
from replicad.client.follow_loop import FollowerBase, FollowWishes, Tokens
from replicad.client.link import DaemonTarget, SocketLink, find_daemons, open_link
from replicad.client.refusals import keeps_in_step
from replicad.client.requests import ClientRequests, Introduction, PodAnswer, PodRequest, WholeRequest
from replicad.client.steps import STEPS, Connect, Sleep
from replicad.config.secrets import trust
from replicad.errors import ConnectionLost, LocalProtocolError, ReplicadError
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.tubes.commands import CursorAt

T = TypeVar("T")


class BlockingFollower(FollowerBase, Iterator[T]):
    """An endless iterator over RowBatch and Reset events, and over the events of the types in `also`.

    It reconnects and resumes by itself; `close`, from any thread, ends it. Iterating raises errors that trying again
    does not help against: NotAuthorised, WrongServer, RemoteProtocolError, UnknownStream and BadToken for the caller's
    arguments, or the last ConnectionLost when `patience` has passed.
    """

    def __init__(
        self,
        target: DaemonTarget,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
    ) -> None:
        super().__init__(target, streams, linear=linear, also=also, wishes=wishes, now=time.monotonic)
        self._link: SocketLink | None = None
        self._stop = threading.Event()

    def together(self) -> list[T]:
        """The next event and the events received with it: for programs that handle a hundred thousand in a second.

        Tokens and positions are those after the last of them. Empty when the follower was closed.
        """
        events = list(itertools.islice(self, 1))
        if events:
            self._add_at_hand(events)
        return events

    def __next__(self) -> T:
        if self._failure is not None:
            self.close()
            raise self._failure
        answer: Any = None
        error: ReplicadError | None = None
        while not self._stop.is_set():
            step, self._pending = self._pending, None
            try:
                if step is None:
                    step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except ReplicadError:
                self.close()
                raise
            answer = error = None
            kind = type(step)
            if kind in self._wanted:
                event: T = step
                return event
            if kind in STEPS:
                try:
                    answer = self._perform(step)
                except ReplicadError as failure:
                    error = failure
                except BaseException:  # for example Ctrl-C: a step cannot be resumed
                    self.close()
                    raise
        raise StopIteration

    def _perform(self, step: Any) -> Any:
        if isinstance(step, Connect):
            self._disconnect()
            self._link = open_link(self._target)
            if self._stop.is_set():  # closed meanwhile, by another thread
                self._disconnect()
            return self._link.connection, self._link.server_name
        if isinstance(step, Sleep):
            self._disconnect()
            self._stop.wait(step.seconds)
            return None
        assert self._link is not None
        return self._link.perform(step)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def send(self, *commands: Command) -> None:
        """Send commands on the present connection: for commands that only a connection that follows a stream may send.
        The server's answers are received like other lines.

        Raises:
            ConnectionLost: there is no connection now.
        """
        if self._link is None:
            raise ConnectionLost(f"there is no connection to {self._target} now")
        self._link.send(commands)

    def close(self) -> None:
        """End the iteration, even if another thread waits in it; safe to repeat."""
        self._stop.set()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's address and the other arguments of a connection: plain values that can be pickled. Times in seconds.

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
        """The TLS context, or None for a plain connection.

        Raises:
            UsageError: the file cannot be read or holds no certificate.
        """
        return None if self.tls_ca is None else trust(self.tls_ca, "tls_ca")

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


class BlockingClient(ClientRequests):
    """Sends requests to one daemon. Connects when it is first needed, and again after a loss, which is raised once.

    Several threads may send requests; they are sent one after another. Times in seconds. `server_name`: the name that
    the server must send; `token`: its secret. `connect_timeout` is for connection, TLS and greeting together,
    `answer_timeout` for each piece of an answer, on top of the time that the request itself waits. `keepalive` starts a
    thread that sends PINGs and notices a silent peer between requests.

    `host` may name several daemons of one database, `db1:9009,db2:9009` (`port` is that of names without one). Each new
    connection begins with the first, and takes the next one if it does not answer within 0.8 s. Followers resume there
    by their tokens.

    `requests.ClientRequests` has the requests and the errors that they raise.
    """

    def __init__(
        self,
        host: str,
        port: int | None = None,
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
        at = find_daemons(host, port)
        timing = timing or Timing()
        self._target = DaemonTarget(
            at.host, at.port, us, tls, connect_timeout, answer_timeout, keepalive, timing, others=at.others
        )
        self._turn = threading.Lock()  # one request at a time; held until its answer is complete
        self._owner: int | None = None  # the thread whose request it is
        self._link: SocketLink | None = None
        self._closed = False
        self._followers: WeakSet[BlockingFollower[Any]] = WeakSet()
        self._listing = threading.Lock()  # of the followers

    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, **wishes: Unpack[FollowWishes]
    ) -> BlockingFollower[RowBatch | Reset]: ...
    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, *, also: Collection[type[E]], **wishes: Unpack[FollowWishes]
    ) -> BlockingFollower[RowBatch | Reset | E]: ...
    def follow(
        self,
        streams: Tokens | None,
        linear: bool = False,
        *,
        also: Collection[type[Any]] = (),
        **wishes: Unpack[FollowWishes],
    ) -> BlockingFollower[Any]:
        """Rows of the streams, each from its token (None: from now on), on a connection of its own.

        `streams` None: every stream from `begin`, and streams that are added later, from their position at that time.
        Events are RowBatch, Reset, and the events of the types in `also` (see `events.Also`). FollowOptions has the
        wishes.

        Raises:
            BadToken: a token cannot be parsed.
        """
        follower: BlockingFollower[Any] = BlockingFollower(
            self._target, streams, linear=linear, also=also, wishes=wishes
        )
        with self._listing:
            self._followers.add(follower)
        if self._closed:
            follower.close()
        return follower

    def close(self) -> None:
        """Close the connection and every follower, even during a request of another thread; safe to repeat.

        The request raises ConnectionLost; the iteration over a follower ends. A thread that is connecting notices it
        after `connect_timeout` at the latest.
        """
        self._closed = True
        if self._link is not None:
            self._link.close()
        with self._listing:
            followers = list(self._followers)
        for follower in followers:
            follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ---

    def _drive(self, request: WholeRequest[T], /) -> T:
        answers: list[Any] = []
        for turn in request.turns:
            with self._request() as link:
                answers.append(link.run(turn(link.connection, self._target.answer_timeout)))
        return request.result(answers)

    def _read(self, reading: PodRequest[T], /) -> PodAnswer[T]:
        return PodAnswer(self._pieces(reading), reading.parse)

    def _pieces(self, reading: PodRequest[Any]) -> Generator[Any, None, CursorAt]:
        with self._request() as link:
            steps = reading.turn(link.connection, self._target.answer_timeout)
            answer: bytes | None = None
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    end: CursorAt = stop.value
                    return end
                answer = None
                if type(step) in STEPS:
                    answer = link.perform(step)
                else:
                    yield step

    @contextmanager
    def _request(self) -> Iterator[SocketLink]:
        """The connection for one request; afterwards it can serve the next one, or is closed."""
        if self._owner == threading.get_ident():
            raise LocalProtocolError("the pods of the request before are not all read; read on, or close() them")
        with self._turn:
            self._owner = threading.get_ident()
            link: SocketLink | None = None
            try:
                link = self._ready()
                yield link
                link.end()
            except BaseException as error:
                if link is not None and keeps_in_step(error):
                    link.end()
                elif link is not None:
                    link.close()
                raise
            finally:
                self._owner = None

    def _ready(self) -> SocketLink:
        if self._closed:
            raise ConnectionLost("this client was closed; make another one")
        if self._link is None or not self._link.begin():
            self._link = open_link(self._target)
            if self._closed:  # by another thread, meanwhile
                self._link.close()
        return self._link


open_client = BlockingClient
"""The name that the async client has, for programs that exist in both forms."""
