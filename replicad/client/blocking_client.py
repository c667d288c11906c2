"""The client for programs without async, and for Spark's Python workers: needs threads and the standard library only.

`face`, `requests` and `pursuit` have the logic; this file drives it on a socket. After any failure but a plain refusal
the connection is closed, so that an answer is never taken for that of another request.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, Unpack, overload

from replicad.client.answers import Answer
from replicad.client.blocking_follow import BlockingFollower
from replicad.client.events import E, Reset, RowBatch
from replicad.client.face import Reading, Request, Requests
from replicad.client.following import Tokens
from replicad.client.pursuit import FollowWishes
from replicad.client.refusals import keeps_in_step
from replicad.client.requests import Introduction
from replicad.client.sockets import SocketLink, Target, open_link
from replicad.client.steps import STEPS
from replicad.config.secrets import trust
from replicad.errors import ConnectionLost, LocalProtocolError
from replicad.protocol.connection import Timing
from replicad.tubes.commands import CursorAt

__all__ = ["Answer", "BlockingClient", "BlockingFollower", "Endpoint", "open_client"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's address and what is needed to connect: plain values that can be pickled. Times in seconds.

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


class BlockingClient(Requests):
    """Requests to one daemon. Connects when it is first needed, and again after a loss, which is raised once.

    Requests may come from several threads; they are asked one after another. Times in seconds. `server_name`: what
    the server must call itself; `token`: its secret. `connect_timeout` is for connection, TLS and greeting together,
    `answer_timeout` for each piece of an answer, on top of what the request itself waits for. `keepalive` starts a
    thread that sends PINGs and notices a silent peer between requests.

    The requests and what they raise: see `face.Requests`.
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

        `streams` None: every stream from `begin`, and those that are added later, from where they stand then. Events
        are RowBatch, Reset, and those of the types in `also` (see `events.Also`). For the wishes see FollowOptions.

        Raises:
            BadToken: a token cannot be parsed.
        """
        return BlockingFollower(self._target, streams, linear=linear, also=also, wishes=wishes)

    def close(self) -> None:
        """Close the connection, even during a request of another thread; safe to repeat."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ---

    def _drive(self, request: Request[T], /) -> T:
        answers: list[Any] = []
        for turn in request.turns:
            with self._request() as link:
                answers.append(link.run(turn(link.connection, self._target.answer_timeout)))
        return request.result(answers)

    def _read(self, reading: Reading[T], /) -> Answer[T]:
        return Answer(self._pieces(reading), reading.parse)

    def _pieces(self, reading: Reading[Any]) -> Generator[Any, None, CursorAt]:
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
"""The name that the client for trio programs has, for programs that exist in both forms."""
