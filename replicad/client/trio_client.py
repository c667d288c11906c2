"""The client for trio programs: the twin of `blocking`, with the same names and the same refusals.

What is asked and understood stands in `requests`, `pods` and `pursuit`; here it is driven on a trio stream. A
connection on which anything but a plain refusal happened (cancellation too) is closed, so that no answer is ever
taken for another one's.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self, TypeVar, Unpack

import trio

from replicad.client.backoff import Backoff
from replicad.client.events import Reset, RowBatch
from replicad.client.pods import Pod, parse_pods
from replicad.client.pursuit import FollowOptions, FollowWishes, Pursuit
from replicad.client.refusals import concerns_one_request
from replicad.client.requests import Bounds, Extent, Introduction, ack_requests, ask, ask_for_pods, park_request
from replicad.client.sockets import Target
from replicad.client.steps import STEPS, Connect, Sleep
from replicad.client.trio_link import TrioLink, open_link
from replicad.errors import LocalProtocolError, ReplicadError
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.protocol.tokens import START, Cursor
from replicad.streams.commands import Streams
from replicad.tubes.commands import Ack, Acked, Claim, CursorAt, Lease, Parked, Part, Pods, Release, Renew, Report, Tube

T = TypeVar("T")


class PodBatch(NamedTuple):
    """Pods in the order in which they are to be processed, and the CURSOR behind the last."""

    pods: list[Pod]
    end: CursorAt


@asynccontextmanager
async def open_client(
    host: str,
    port: int,
    *,
    name: str,
    server_name: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    connect_timeout: float = 10.0,
    answer_timeout: float = 60.0,
    timing: Timing | None = None,
) -> AsyncIterator[TrioClient]:
    """A client of one daemon, for the length of the block; the arguments are those of `blocking.BlockingClient`.

    Nothing is connected before the first request; at the end of the block everything is closed.
    """
    us = Introduction(name, server_name, token)
    target = Target(host, port, us, tls, connect_timeout, answer_timeout, timing=timing or Timing())
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield TrioClient(target, nursery)
        except Exception as error:  # noqa: BLE001 - raised again outside of the nursery, which would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class TrioClient:
    """Requests to one daemon; made by `open_client`. Connects when it is first needed, and again after a loss.

    Requests may come from several tasks; they are asked one after another on one connection. They raise what the
    blocking client's raise.
    """

    def __init__(self, target: Target, nursery: trio.Nursery) -> None:
        self._target = target
        self._nursery = nursery
        self._turn = trio.Lock()
        self._link: TrioLink | None = None

    # --- streams ---

    async def streams(self) -> tuple[str, ...]:
        """The names of the streams that the daemon serves."""
        return (await self._ask(Streams(), Streams)).names

    def follow(
        self,
        streams: Mapping[str, str | None] | None,
        linear: bool = False,
        *,
        also: Collection[type] = (),
        backoff: Backoff | None = None,
        **wishes: Unpack[FollowWishes],
    ) -> TrioFollower:
        """Rows of the streams, each from its token (None: from now on), on a connection of its own.

        `streams` None: every stream from `begin`, and those that are added later, from where they stand then.

        Iterate over it for RowBatch and Reset events, and for those of the types in `also`: PositionMoved, Connected,
        Disconnected, StreamStopped, StreamsChanged, TakenUpto, RemoteServerUp and LockReleased. `backoff` decides how
        long to wait between two tries to connect; for the wishes see FollowOptions.

        Raises:
            BadToken: a token is none.
        """
        options = FollowOptions(linear, answer_timeout=self._target.answer_timeout, **wishes)
        return TrioFollower(
            self._target, self._nursery, Pursuit(streams, options, backoff, now=trio.current_time), also
        )

    # --- tubes ---

    async def tube(self, tube: str) -> int:
        """The tube's number of partitions. Raises UnknownTube."""
        return (await self._ask(Tube(tube), Tube)).partitions or 0

    async def claim(
        self, tube: str, part: Part, *, ttl: float | None = None, wait: float | None = None, holder: str | None = None
    ) -> Lease:
        """The lease of a partition, waiting up to `wait` for one that another holds. Raises LeaseHeld."""
        return await self._ask(Claim(tube, part, ttl, wait, holder), Lease)

    async def renew(self, tube: str, part: Part, term: int) -> Lease:
        """Say that the holder is alive. Raises LeaseLost."""
        return await self._ask(Renew(tube, part, term), Lease)

    async def release(self, tube: str, part: Part, term: int) -> None:
        """Give the lease back; harmless where it is lost already."""
        await self._ask(Release(tube, part, term), Release)

    async def plan(self, tube: str, part: Part, term: int, after: Cursor = START, **bounds: Unpack[Bounds]) -> CursorAt:
        """How far reading from `after` would get and how many pods that is; the pods stay where they are."""
        return await self._ask(Pods(tube, part, term, after, plan=True, **bounds), CursorAt)

    async def pods(self, tube: str, part: Part, term: int, after: Cursor = START, **extent: Unpack[Extent]) -> PodBatch:
        """The pods behind `after`, as far as the extent reaches, all at once. Raises LeaseLost."""
        request = Pods(tube, part, term, after, **extent)
        found: list[Pod] = []
        async with self._request() as link:
            steps = ask_for_pods(link.connection, request, self._target.answer_timeout)
            answer: bytes | None = None
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    return PodBatch(found, stop.value)
                answer = None
                if type(step) in STEPS:
                    answer = await link.perform(step)
                else:
                    found += parse_pods(step)

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        """Remove pods whose ids the downstream has; returns how many there were. Raises LeaseLost."""
        requests = ack_requests(tube, part, term, seqs)
        return sum([(await self._ask(request, Acked)).pods for request in requests])

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        """Like `ack`, for all pods of (after, upto]."""
        return (await self._ask(Ack(tube, part, term, upto=upto, after=after), Acked)).pods

    async def park(
        self, tube: str, part: Part, term: int, seq: int, ids: Sequence[int], *, tries: int, error: str
    ) -> int:
        """Put ids that keep failing (none: the whole pod) aside, with the error; returns how many."""
        return (await self._ask(park_request(tube, part, term, seq, ids, tries=tries, error=error), Parked)).ids

    async def report(self, tube: str, reporter: str, counts: Mapping[str, object]) -> None:
        """Have `replicad top` show what was counted; the last word of each reporter stands."""
        await self._ask(Report(tube, reporter, json.dumps(counts)), Report)

    # --- any command ---

    async def send(self, *commands: Command) -> None:
        """Send commands that are not answered (USER_SYNC, FEDERATION_ACK, DOORBELL and the like), in one piece."""
        async with self._request() as link:
            await link.send(commands)

    # --- how ---

    async def _ask(self, request: Command, kind: type[T]) -> T:
        async with self._request() as link:
            answer = await link.run(ask(link.connection, request, self._target.answer_timeout))
        assert isinstance(answer, kind)
        return answer

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[TrioLink]:
        """The connection, for one request; afterwards it is in step, or closed."""
        async with self._turn:
            if self._link is None or not self._link.begin():
                self._link = await open_link(self._target, self._nursery)
            link = self._link
            try:
                yield link
            except BaseException as error:
                in_step = isinstance(error, ReplicadError) and (
                    concerns_one_request(error) or isinstance(error, LocalProtocolError)
                )
                if not in_step:
                    link.close()
                raise
            finally:
                link.end()


class TrioFollower:
    """An endless asynchronous iterator over RowBatch and Reset events, and over those of the types in `also`.

    It reconnects and resumes by itself. A cancelled `__anext__` loses no row: the next one goes on where it was; only
    an attempt to connect begins anew. It raises what `blocking_follow.BlockingFollower` raises.
    """

    def __init__(self, target: Target, nursery: trio.Nursery, pursuit: Pursuit, also: Collection[type] = ()) -> None:
        self._target = target
        self._nursery = nursery
        self._pursuit = pursuit
        self._steps = pursuit.steps()
        self._wanted = frozenset({RowBatch, Reset, *also})
        self._pending: Any = None  # a step that is not performed yet
        self._link: TrioLink | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        while True:
            answer: Any = None
            error: ReplicadError | None = None
            if self._pending is not None:
                try:
                    answer = await self._perform(self._pending)
                except ReplicadError as failure:
                    error = failure
                self._pending = None
            try:
                step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except BaseException:
                self.close()
                raise
            if type(step) in STEPS:
                self._pending = step
            elif type(step) in self._wanted:
                return step

    async def _perform(self, step: Any) -> Any:
        if isinstance(step, Connect):
            self._disconnect()
            self._link = await open_link(self._target, self._nursery)
            return self._link.connection, self._link.server_name
        if isinstance(step, Sleep):
            self._disconnect()
            await trio.sleep(step.seconds)
            return None
        assert self._link is not None
        return await self._link.perform(step)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def token(self, stream: str) -> str | None:
        """What to follow the stream with later so that nothing handed out comes again and nothing else is missed."""
        return self._pursuit.follower.token(stream)

    def positions(self, stream: str) -> Mapping[str, int]:
        """How far each known writer's rows were handed out (`*`: in a linear subscription all of them)."""
        return self._pursuit.follower.positions(stream)

    def tokens(self) -> dict[str, str | None]:
        """`token` of every stream."""
        return {stream: self.token(stream) for stream in self._pursuit.follower.streams()}

    def close(self) -> None:
        """End it; safe to repeat."""
        self._closed = True
        self._disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
