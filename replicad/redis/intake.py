"""Follows all streams of this daemon for Redis, as a client of its own, and keeps a bounded number of rows.

When Redis takes rows more slowly than they come, what waits reaches a bound. Then the connection is closed at once, so
that the journals, which all clients share, do not wait here. When Redis has accepted the waiting lines, the streams are
followed again from their tokens: old rows are read from Postgres at the pace of whoever reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import structlog
import trio
from anyio.abc import ByteStream, SocketStream

from replicad.client.async_client import AsyncClient, AsyncFollower
from replicad.client.events import (
    Disconnected,
    GenerationBegan,
    PositionMoved,
    Reset,
    RowBatch,
    StreamStopped,
)
from replicad.client.link import DaemonTarget
from replicad.client.refusals import named_stream
from replicad.client.requests import Introduction
from replicad.daemon.service import Inside
from replicad.daemon.troubles import Troubles
from replicad.errors import BadToken, ConnectionLost, ReplicadError, RowUnreadable, TokenAhead, TokenExpired
from replicad.loops import open_plain_tasks
from replicad.nurseries import open_plain_nursery
from replicad.redis.service import RedisIntervals
from replicad.retry import Backoff

NAME = "redis"  # of the connection, in lists of clients
OVERHEAD = 150  # bytes of a row beside its text


class Stopped(NamedTuple):
    """The stream has stopped before a row that cannot be read, or is refused."""

    stream: str


StreamEvent = RowBatch | PositionMoved | Reset | GenerationBegan | Stopped

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FollowedGeneration:
    """The generation of a stream and the numbers of its writers."""

    epoch: str
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Item:
    """Events of one read. `standings`: of the streams in it. `tokens`: after it, for some items."""

    events: list[StreamEvent]
    standings: Mapping[str, FollowedGeneration]
    tokens: Mapping[str, str] | None
    size: int


class Intake:
    """The rows that wait for Redis. `take` and `done` are for the one task that publishes."""

    def __init__(self, inside: Inside, tokens: Mapping[str, str], troubles: Troubles, pace: RedisIntervals) -> None:
        """`tokens`: where streams are to be followed from; the others from now on."""
        self._inside = inside
        self._tokens: dict[str, str | None] = dict(tokens)
        self._troubles = troubles
        self._pace = pace
        self._items: deque[Item] = deque()
        self._came = trio.Event()
        self._taken = trio.Event()
        self.names: frozenset[str] = frozenset()  # the streams that are served
        self.bytes = 0  # that wait
        self.overflows = 0  # how often the bound was reached

    # --- for who publishes ---

    async def wait(self) -> None:
        """Wait until there is an item."""
        while not self._items:
            self._came = trio.Event()
            await self._came.wait()

    def first(self) -> Item | None:
        """The next item, which stays until `done`."""
        return self._items[0] if self._items else None

    def done(self) -> None:
        """The first item was published."""
        self.bytes -= self._items.popleft().size
        self._taken.set()

    # --- the task ---

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff = Backoff(self._pace.retry, self._pace.longest_retry)
        async with open_plain_tasks() as tasks:
            client = AsyncClient(self._target(), tasks)
            while True:
                try:
                    await self._follow(client)
                    backoff.reset()
                except (BadToken, TokenExpired, TokenAhead) as error:
                    self._begin_anew(error)
                except ReplicadError as error:
                    self._troubles.fail("service", "redis", "follow", error)
                    await trio.sleep(backoff.next_delay())
                while self._items and self.bytes >= self._pace.waiting_bytes // 2:
                    self._taken = trio.Event()
                    await self._taken.wait()

    def _target(self) -> DaemonTarget:
        async def dial() -> ByteStream:
            return await SocketStream.from_socket(await self._inside.connect(NAME))

        return DaemonTarget("this daemon", 0, Introduction(NAME, None, None), dial=dial)

    def _begin_anew(self, error: ReplicadError) -> None:
        """A token is refused: rows were trimmed, or the database is another one."""
        stream = named_stream(error)
        begin = "EARLIEST" if isinstance(error, TokenExpired) else None
        for name in [stream] if stream in self._tokens else list(self._tokens):
            self._tokens[name] = begin
        self._troubles.record("service", "redis", "token", error)

    async def _follow(self, client: AsyncClient) -> None:
        """Follow until the list of streams changes or the bound is reached."""
        names = self.names = await self._names(client)
        follower: AsyncFollower[Any] = client.follow(
            {name: self._tokens.get(name) for name in names},
            also=(PositionMoved, GenerationBegan, StreamStopped, Disconnected),
            patience=None,
            first_patience=None,
        )
        known: dict[str, FollowedGeneration] = {}
        began = trio.current_time()
        noted_at = float("-inf")
        try:
            async with open_plain_nursery() as nursery, follower:
                nursery.start_soon(self._watch_names, client, names, nursery.cancel_scope)
                while self.bytes < self._pace.waiting_bytes:
                    received = await follower.together()
                    events = [one for event in received if (one := _of_stream(event)) is not None]
                    self._troubles.end("service", "redis", "follow")
                    tokens = None
                    if trio.current_time() >= noted_at + self._pace.snapshot:
                        noted_at, tokens = trio.current_time(), _known({**self._tokens, **follower.tokens()})
                    self._put(follower, events, known, tokens)
                self.overflows += 1
                log.warning("redis_behind", waiting_bytes=self.bytes, followed_s=round(trio.current_time() - began, 1))
        finally:
            self._tokens = {**self._tokens, **follower.tokens()}

    def _put(
        self,
        follower: AsyncFollower[Any],
        events: list[StreamEvent],
        known: dict[str, FollowedGeneration],
        tokens: Mapping[str, str] | None,
    ) -> None:
        standings: dict[str, FollowedGeneration] = {}
        size = 0
        for stream in set(map(attrgetter("stream"), events)):
            standing = FollowedGeneration(follower.epoch(stream) or "", follower.writers(stream))
            if known.get(stream) != standing:
                known[stream] = standings[stream] = standing
        for event in events:
            if type(event) is RowBatch:
                rows = event.rows
                size += (len(rows[0]) if len(rows) == 1 else sum(map(len, rows))) + OVERHEAD * len(rows)
        self._items.append(Item(events, standings, tokens, size + OVERHEAD))
        self.bytes += size + OVERHEAD
        self._came.set()

    async def _names(self, client: AsyncClient) -> frozenset[str]:
        while not (names := frozenset(await client.streams())):
            await trio.sleep(self._pace.look)
        return names

    async def _watch_names(self, client: AsyncClient, names: frozenset[str], scope: trio.CancelScope) -> None:
        """End the following when there are other streams."""
        found = names
        while found == names:
            await trio.sleep(self._pace.look)
            with suppress(ConnectionLost):
                found = frozenset(await client.streams())
        scope.cancel()


def _of_stream(event: Any) -> StreamEvent | None:
    if type(event) is RowBatch:  # most of them
        return event
    match event:
        case StreamStopped(stream=stream) | Disconnected(error=RowUnreadable(stream=str() as stream)):
            return Stopped(stream)
        case Disconnected():
            return None
    found: StreamEvent = event
    return found


def _known(tokens: Mapping[str, str | None]) -> dict[str, str]:
    return {name: token for name, token in tokens.items() if token is not None}
