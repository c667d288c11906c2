"""The client for trio programs, with the same methods and errors as `blocking_client`.

`face`, `requests` and `pursuit` have the logic; this file drives it on a trio stream. After any failure but a plain
refusal (also after a cancellation) the connection is closed, so that an answer is never taken for that of another
request.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack, overload

import trio

from replicad.client.answers import PodBatch
from replicad.client.events import E, Reset, RowBatch
from replicad.client.face import Reading, Request, Requests
from replicad.client.following import Tokens
from replicad.client.pursuit import FollowWishes
from replicad.client.ready import ReadyCalls
from replicad.client.refusals import keeps_in_step
from replicad.client.requests import Introduction
from replicad.client.schemes import open_target
from replicad.client.sockets import Target
from replicad.client.steps import STEPS
from replicad.client.trio_follow import TrioFollower
from replicad.client.trio_link import TrioLink, open_link
from replicad.errors import ConnectionLost, UsageError
from replicad.nurseries import open_plain_nursery
from replicad.protocol.connection import Timing
from replicad.tubes.commands import CursorAt, Part

__all__ = ["PodBatch", "TrioClient", "TrioFollower", "open_client"]

T = TypeVar("T")


@asynccontextmanager
async def open_client(
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
    daemon: str | Sequence[str] | None = None,
) -> AsyncIterator[TrioClient]:
    """A client of one daemon, for the length of the block; the arguments are those of `BlockingClient`.

    `host` may be a URL instead, without a port: `redis://[[user]:password@]host[:port][/database]`, or `rediss://` with
    TLS. Then `server_name` is needed. Streams are followed over Redis, with the same events and tokens; all requests,
    and rows that were missed, go by TCP (`tls`, `token`) to `daemon`: HOST:PORT, or several of them, of which the one
    that is announced in Redis is taken. Without `daemon`, and so without `token`, it is whichever is announced. See
    docs/transports.md.

    Nothing is connected before the first request; at the end of the block everything is closed.

    Raises:
        UsageError: the URL cannot be used, or the port is missing.
    """
    us = Introduction(name, server_name, token)
    timing = timing or Timing()
    is_url = "://" in host
    if is_url != (port is None) or (daemon is not None and not is_url):
        raise UsageError("give a host and a port, or a URL, which may go with `daemon`")
    target = Target(host, port or 0, us, tls, connect_timeout, answer_timeout, keepalive, timing)
    async with open_plain_nursery() as nursery:
        if is_url:
            target = open_target(host, target, nursery, daemon)
        yield TrioClient(target, nursery)


class TrioClient(Requests):
    """Requests to one daemon; made by `open_client`. Connects when it is first needed, and again after a loss.

    Requests may come from several tasks; they are asked one after another on one connection. What they are and raise,
    see `face.Requests`: the methods are those of the blocking client, to be awaited for.
    """

    def __init__(self, target: Target, nursery: trio.Nursery) -> None:
        self._target = target
        self._nursery = nursery
        self._turn = trio.Lock()
        self._link: TrioLink | None = None
        self._closed = False
        self._ready_calls = ReadyCalls()

    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, **wishes: Unpack[FollowWishes]
    ) -> TrioFollower[RowBatch | Reset]: ...
    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, *, also: Collection[type[E]], **wishes: Unpack[FollowWishes]
    ) -> TrioFollower[RowBatch | Reset | E]: ...
    def follow(
        self,
        streams: Tokens | None,
        linear: bool = False,
        *,
        also: Collection[type[Any]] = (),
        **wishes: Unpack[FollowWishes],
    ) -> TrioFollower[Any]:
        """Rows of the streams, each from its token (None: from now on), on a connection of its own.

        `streams` None: every stream from `begin`, and those that are added later, from where they stand then. Events
        are RowBatch, Reset, and those of the types in `also` (see `events.Also`). For the wishes see FollowOptions.

        Raises:
            BadToken: a token cannot be parsed.
        """
        return TrioFollower(self._target, self._nursery, streams, linear=linear, also=also, wishes=wishes)

    def close(self) -> None:
        """Close the connection, even during a request of another task; safe to repeat."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    # --- how ---

    async def _drive(self, request: Request[T], /) -> T:
        answers: list[Any] = []
        for turn in request.turns:
            async with self._request() as link:
                answers.append(await link.run(turn(link.connection, self._target.answer_timeout)))
        return request.result(answers)

    async def _read(self, reading: Reading[T], /) -> PodBatch[T]:
        found: list[T] = []
        async with self._request() as link:
            steps = reading.turn(link.connection, self._target.answer_timeout)
            answer: bytes | None = None
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    end: CursorAt = stop.value
                    return PodBatch(found, end)
                answer = None
                if type(step) in STEPS:
                    answer = await link.perform(step)
                else:
                    found += reading.parse(step)

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[TrioLink]:
        """The connection for one request; afterwards it can serve the next one, or is closed."""
        async with self._turn:
            link = await self._ready()
            try:
                yield link
            except BaseException as error:
                if not keeps_in_step(error):
                    link.close()
                raise
            finally:
                link.end()

    async def _ready(self) -> TrioLink:
        if self._closed:
            raise ConnectionLost("this client was closed; make another one")
        if self._link is None or not self._link.begin():
            self._link = await open_link(self._target, self._nursery, self._ready_calls)
            if self._closed:  # by another task, meanwhile
                self._link.close()
        return self._link


def when_ready(client: TrioClient, tube: str, part: Part, call: Callable[[], None]) -> None:
    """Call `call` once, when the daemon sends READY for the partition or the connection ends.

    Say so before the CLAIM or PODS with `ready`: READY may come before the answer.
    """
    client._ready_calls.when(tube, part, call)
