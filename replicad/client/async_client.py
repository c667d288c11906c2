"""The client for programs on trio or asyncio, with the same methods and errors as `blocking_client`.

`requests` and `follow_loop` have the logic; this file drives it on a stream of anyio. After any failure but a plain
refusal (also after a cancellation) the connection is closed, so that an answer is never taken for that of another
request.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, Unpack, overload
from weakref import WeakSet

import anyio
from anyio.abc import TaskGroup

from replicad.client.async_link import AsyncLink, ReadyCalls, open_link
from replicad.client.events import E, Reset, RowBatch
from replicad.client.follow_loop import FollowerBase, FollowWishes, Tokens
from replicad.client.link import DaemonTarget, find_daemons
from replicad.client.refusals import keeps_in_step
from replicad.client.requests import ClientRequests, Introduction, PodBatch, PodRequest, WholeRequest
from replicad.client.steps import STEPS, Connect, Sleep
from replicad.config.settings import Address
from replicad.errors import ConnectionLost, EnvironmentRefused, ReplicadError, UsageError
from replicad.loops import open_plain_tasks
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.tubes.commands import CursorAt, Part


def open_target(url: str, target: DaemonTarget, tasks: TaskGroup, daemon: str | Sequence[str] | None) -> DaemonTarget:
    """The target for a URL, from `target`, which has everything but an address. `daemon`: where to ask by TCP.

    Raises:
        UsageError: no feature opens such URLs, or the URL cannot be used.
        EnvironmentRefused: the feature's extra is not installed.
    """
    scheme = url.partition("://")[0]
    # The list is above this room, and names features; only a caller with a URL needs it.
    ways = importlib.import_module("replicad.features").schemes()
    if scheme not in ways:
        known = ", ".join(f"{name}://" for name in ways) or "none"
        raise UsageError(f"{scheme[:40]}:// is not a way to a daemon; give a host and a port, or a URL: {known}")
    try:
        module = importlib.import_module(ways[scheme])
    except ModuleNotFoundError as error:
        extra = ways[scheme].split(".")[1]
        raise EnvironmentRefused(f"{scheme}:// needs the extra `{extra}`: pip install 'replicad[{extra}]'") from error
    found: DaemonTarget = module.open_target(url, target, tasks, daemon)
    return found


T = TypeVar("T")


class AsyncFollower(FollowerBase, AsyncIterator[T]):
    """An endless asynchronous iterator over RowBatch and Reset events, and over the events of the types in `also`.

    It reconnects and resumes by itself. A cancelled `__anext__` loses no row: the next one goes on where it was; only
    an attempt to connect begins again. It raises the errors that `BlockingFollower` raises.
    """

    def __init__(
        self,
        target: DaemonTarget,
        tasks: TaskGroup,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
    ) -> None:
        super().__init__(target, streams, linear=linear, also=also, wishes=wishes, now=anyio.current_time)
        self._tasks = tasks
        self._link: AsyncLink | None = None
        self._waiting: anyio.CancelScope | None = None  # for a connection, or to try again
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def together(self) -> list[T]:
        """The next event and the events received with it: for programs that handle a hundred thousand in a second.

        Tokens and positions are those after the last of them. Cancelled, it loses none. Empty when the follower was
        closed.
        """
        try:
            events = [await self.__anext__()]
        except StopAsyncIteration:
            return []
        self._add_at_hand(events)
        return events

    async def send(self, *commands: Command) -> None:
        """Send commands on the present connection: for commands that only a connection that follows a stream may send.
        The server's answers are received like other lines.

        Raises:
            ConnectionLost: there is no connection now.
        """
        if self._link is None:
            raise ConnectionLost(f"there is no connection to {self._target} now")
        await self._link.send(commands)

    async def __anext__(self) -> T:
        if self._failure is not None:
            self.close()
            raise self._failure
        while not self._closed:
            answer: Any = None
            error: ReplicadError | None = None
            if self._pending is not None:
                try:
                    answer = await self._perform(self._pending)
                except ReplicadError as failure:
                    error = failure
                if self._closed:  # by another task, meanwhile
                    self._disconnect()
                    break
                self._pending = None
            try:
                step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except BaseException:
                self.close()
                raise
            if type(step) in STEPS:
                self._pending = step
            elif type(step) in self._wanted:
                event: T = step
                return event
        raise StopAsyncIteration

    async def _perform(self, step: Any) -> Any:
        """Perform a step. When the follower is closed meanwhile, it returns at once and the answer is of no use."""
        if isinstance(step, Connect):
            self._disconnect()
            with anyio.CancelScope() as self._waiting:
                self._link = await open_link(self._target, self._tasks)
                return self._link.connection, self._link.server_name
            return None
        if isinstance(step, Sleep):
            self._disconnect()
            with anyio.CancelScope() as self._waiting:
                await anyio.sleep(step.seconds)
            return None
        assert self._link is not None
        return await self._link.perform(step)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """End the iteration, even if another task waits in it; safe to repeat."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


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
) -> AsyncIterator[AsyncClient]:
    """A client of one daemon, for the length of the block; `BlockingClient` has the same arguments.

    `host` may name several daemons of one database, `db1:9009,db2:9009` (`port` is that of names without one). Each new
    connection begins with the first, and takes the next one if it does not answer within 0.8 s. Followers resume there
    by their tokens.

    `host` may be a URL instead, without a port: `redis://[[user]:password@]host[:port][/database]`, or `rediss://` with
    TLS. Then `server_name` is needed. Streams are followed over Redis, with the same events and tokens; all requests,
    and rows that were missed, go by TCP (`tls`, `token`) to `daemon`: HOST:PORT, or several of them; the client takes
    the daemon that is announced in Redis. Without `daemon`, and so without `token`, the client takes any daemon that is
    announced. See docs/transports.md.

    Nothing is connected before the first request; at the end of the block everything is closed.

    Raises:
        UsageError: the URL cannot be used, or the port is missing.
    """
    us = Introduction(name, server_name, token)
    timing = timing or Timing()
    is_url = "://" in host
    if (is_url and port is not None) or (daemon is not None and not is_url):
        raise UsageError("give a host and a port, or a URL, which may go with `daemon`")
    at = Address(host, 0) if is_url else find_daemons(host, port)
    target = DaemonTarget(
        at.host, at.port, us, tls, connect_timeout, answer_timeout, keepalive, timing, others=at.others
    )
    async with open_plain_tasks() as tasks:
        if is_url:
            target = open_target(host, target, tasks, daemon)
        client = AsyncClient(target, tasks)
        try:
            yield client
        finally:
            client.close()


class AsyncClient(ClientRequests):
    """Sends requests to one daemon; made by `open_client`. Connects when it is first needed, and again after a loss.

    Several tasks may send requests; they are sent one after another on one connection. `requests.ClientRequests` has
    the requests and the errors that they raise: the methods of the blocking client, but awaited.
    """

    def __init__(self, target: DaemonTarget, tasks: TaskGroup) -> None:
        self._target = target
        self._tasks = tasks
        self._turn = anyio.Lock()
        self._link: AsyncLink | None = None
        self._connecting: anyio.CancelScope | None = None
        self._closed = False
        self._ready_calls = ReadyCalls()
        self._followers: WeakSet[AsyncFollower[Any]] = WeakSet()

    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, **wishes: Unpack[FollowWishes]
    ) -> AsyncFollower[RowBatch | Reset]: ...
    @overload
    def follow(
        self, streams: Tokens | None, linear: bool = False, *, also: Collection[type[E]], **wishes: Unpack[FollowWishes]
    ) -> AsyncFollower[RowBatch | Reset | E]: ...
    def follow(
        self,
        streams: Tokens | None,
        linear: bool = False,
        *,
        also: Collection[type[Any]] = (),
        **wishes: Unpack[FollowWishes],
    ) -> AsyncFollower[Any]:
        """Rows of the streams, each from its token (None: from now on), on a connection of its own.

        `streams` None: every stream from `begin`, and streams that are added later, from their position at that time.
        Events are RowBatch, Reset, and the events of the types in `also` (see `events.Also`). FollowOptions has the
        wishes.

        Raises:
            BadToken: a token cannot be parsed.
        """
        follower: AsyncFollower[Any] = AsyncFollower(
            self._target, self._tasks, streams, linear=linear, also=also, wishes=wishes
        )
        self._followers.add(follower)
        if self._closed:
            follower.close()
        return follower

    def close(self) -> None:
        """Close the connection and every follower, even during a request of another task; safe to repeat.

        The request raises ConnectionLost; the iteration over a follower ends.
        """
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.close()
        for follower in list(self._followers):
            follower.close()

    # --- how ---

    async def _drive(self, request: WholeRequest[T], /) -> T:
        answers: list[Any] = []
        for turn in request.turns:
            async with self._request() as link:
                answers.append(await link.run(turn(link.connection, self._target.answer_timeout)))
        return request.result(answers)

    async def _read(self, reading: PodRequest[T], /) -> PodBatch[T]:
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
    async def _request(self) -> AsyncIterator[AsyncLink]:
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

    async def _ready(self) -> AsyncLink:
        if not self._closed and (self._link is None or not self._link.begin()):
            with anyio.CancelScope() as self._connecting:
                self._link = await open_link(self._target, self._tasks, self._ready_calls)
        if self._link is None or self._closed:
            self.close()  # a connection that was made meanwhile
            raise ConnectionLost("this client was closed; make another one")
        return self._link


def when_ready(client: AsyncClient, tube: str, part: Part | None, call: Callable[[], None]) -> None:
    """Call `call` once, when the daemon sends READY for the partition (None: any) or the connection ends.

    Call this before you send CLAIM, PODS or SHARE with `ready=1`. READY can arrive before the answer.
    """
    client._ready_calls.when(tube, part, call)
