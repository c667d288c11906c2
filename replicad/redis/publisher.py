"""Publishes what the intake has to Redis, for as long as this daemon has the role.

An item stays first until Redis has confirmed all of it. After a lost connection it is published again from its start:
followers find by the positions in it what they have already.

`RedisOutlet` sends the messages through one connection to Redis, as the holder of a term.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha1
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import cast

import hiredis
import trio

from replicad.client.events import GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.daemon.troubles import Troubles
from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError
from replicad.nurseries import open_plain_nursery
from replicad.redis.intake import FollowedGeneration, Intake, Item, Stopped
from replicad.redis.link import RedisLink, Word, refused
from replicad.redis.messages import COMMON, MISSED, OWN, STOPPED, PublishedState, Step, key_of, stream_channel
from replicad.redis.service import RedisIntervals
from replicad.retry import Backoff

MOST_SAID = 1000  # lines of other clients that wait to be published; then the oldest are dropped, and counted

Steps = list[tuple[str, Step]]  # each with its stream

SCRIPT = Path(__file__).with_name("publishing.lua").read_text(encoding="utf-8")
_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()  # as Redis names it
AHEAD = 8  # steps that are sent before the first of them is confirmed
KEPT = 60  # seconds for which Redis keeps the publisher's term after the last line: far more than two syncs


class RedisPublisher:
    """One turn of the role."""

    def __init__(
        self,
        intake: Intake,
        connect: Callable[[], Awaitable[RedisOutlet]],
        tokens: Mapping[str, str],
        troubles: Troubles,
        pace: RedisIntervals,
    ) -> None:
        """`tokens`: the positions published before this turn."""
        self.intake = intake
        self.tokens = tokens  # the published positions
        self.grown = trio.Event()  # set when streams were published for the first time: note their tokens soon
        self.lines = 0  # published since the turn began
        self.dropped = 0  # lines of clients that were not published: there were too many
        self.ours: Counter[bytes] = Counter()  # lines of clients that we have published and not received back yet
        self.connected = False
        self._connect = connect
        self._troubles = troubles
        self._pace = pace
        self._streams: dict[str, PublishedState] = {}
        self._said: deque[bytes] = deque()
        self._positions_asked = False
        self._answer_at = float("-inf")  # when positions may be published again because they are asked for
        self._wait = trio.CancelScope()
        self._sync_at = float("-inf")
        self._works_at = trio.current_time()  # when something was published last, or the turn began

    @property
    def failing_s(self) -> float:
        """For how many seconds nothing could be published; 0 while Redis answers."""
        return 0.0 if self.connected else trio.current_time() - self._works_at

    async def run(self) -> None:
        """Publish until cancelled."""
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self.intake.run)
            backoff = Backoff(self._pace.retry, self._pace.longest_retry)
            while True:
                try:
                    await self._one_connection(backoff)
                except ReplicadError as error:
                    self._troubles.fail("service", "redis", "publish", error)
                self._works_at = trio.current_time() if self.connected else self._works_at
                self.connected = False
                self.ours.clear()
                await trio.sleep(backoff.next_delay())

    def answer_replicate(self) -> None:
        """A process has sent REPLICATE: publish all positions soon. Never waits."""
        self._positions_asked = True
        self._wait.cancel()

    def say(self, line: bytes) -> None:
        """Publish a command of another client of the daemon, on the channel of the server. Never waits."""
        self._said.append(line)
        self._drop_oldest()
        self._wait.cancel()

    # --- how ---

    async def _one_connection(self, backoff: Backoff) -> None:
        outlet = await self._connect()
        try:
            self._sync_at = float("-inf")
            while True:
                if (item := self.intake.first()) is not None:
                    await self._publish_item(outlet, item)
                await self._publish_others(outlet)
                if not self.connected:
                    self.connected = True
                    self._troubles.end("service", "redis", "publish")
                    backoff.reset()
                if self.intake.first() is None and not self._said:
                    until = min(self._sync_at, self._answer_at) if self._positions_asked else self._sync_at
                    self._wait = trio.CancelScope(deadline=until)
                    with self._wait:
                        await self.intake.wait()
        finally:
            await outlet.aclose()

    async def _publish_item(self, outlet: RedisOutlet, item: Item) -> None:
        before = {name: replace(one, positions=dict(one.positions)) for name, one in self._streams.items()}
        try:
            self.lines += await outlet.publish(self._rendered(item))
        except BaseException:
            self._streams = before  # it is published again
            raise
        self.intake.done()
        if item.tokens is not None:
            if not item.tokens.keys() <= self.tokens.keys():
                self.grown.set()
            self.tokens = item.tokens

    def _rendered(self, item: Item) -> Steps:
        found: Steps = []
        for stream, events in groupby(item.events, attrgetter("stream")):
            standing = item.standings.get(stream)
            published = self._streams.get(stream)
            if published is None:
                published = self._streams[stream] = PublishedState(stream, "", {}, {})
            for kind, some in groupby(events, type):
                if kind is RowBatch:
                    published.stopped = False
                    steps = published.rows(cast("Iterable[RowBatch]", some))
                else:
                    steps = [_moved(published, event) for event in some]
                found += [(stream, step) for step in steps]
            if standing is not None and (published.epoch, published.numbers) != (standing.epoch, standing.numbers):
                _take(published, standing)
                found.append((stream, published.sync()))
        return found

    async def _publish_others(self, outlet: RedisOutlet) -> None:
        """What does not come from streams: positions that were asked for or are due, and commands of clients."""
        steps: Steps = []
        now = trio.current_time()
        streams = [(name, one) for name, one in sorted(self._streams.items()) if name in self.intake.names]
        if self._positions_asked and now >= self._answer_at:
            self._positions_asked, self._answer_at = False, now + self._pace.answers
            steps += [(name, one.all_positions()) for name, one in streams]
        if now >= self._sync_at:
            self._sync_at = now + self._pace.sync
            await outlet.announce()
            steps += [(name, one.sync()) for name, one in streams]
        said, self._said = self._said, deque()
        self.ours.update(said)
        steps += [("", [COMMON, line]) for line in said]
        try:
            self.lines += await outlet.publish(steps)
        except BaseException:
            self._said.extendleft(reversed(said))  # perhaps published twice, which does no harm; lost would
            self._drop_oldest()
            raise
        await trio.lowlevel.checkpoint()

    def _drop_oldest(self) -> None:
        if len(self._said) <= MOST_SAID:
            return
        while len(self._said) > MOST_SAID:
            self._said.popleft()
            self.dropped += 1
        error = RedisUnavailable(
            f"over {MOST_SAID} commands of clients waited to be published; the oldest are left out: processes that "
            "listen on Redis do not get them"
        )
        self._troubles.record("service", "redis", "commands", error)


def _take(published: PublishedState, standing: FollowedGeneration) -> None:
    """A generation has begun, or there are other writers."""
    published.epoch, published.numbers = standing.epoch, standing.numbers
    listed = {name: at for name, at in published.positions.items() if name in standing.numbers}
    published.positions = listed or published.positions


def _moved(published: PublishedState, event: object) -> Step:
    published.stopped = isinstance(event, Stopped)
    match event:
        case Stopped():
            return [OWN, STOPPED]
        case PositionMoved():
            return published.moved(event.instance, event.token)
        case Reset(token=None):  # the stream begins again; the positions follow
            return [OWN, MISSED]
        case Reset(token=int() as token):
            return published.back(event.instance, token)
        case GenerationBegan():
            return [OWN, MISSED]
    return []


class RedisOutlet:
    """Publishes with a term; the first connection of a term with a higher one makes this one fail."""

    def __init__(self, link: RedisLink, server: str, term: int, address: str) -> None:
        """`address`: of our daemon, for followers that miss rows; may be empty."""
        self._link = link
        self._server = server
        self._head: tuple[Word, ...] = (1, key_of(server), term, KEPT, address, server)
        self._loaded = False

    async def publish(self, steps: Iterable[tuple[str, Step]]) -> int:
        """Publish steps of streams, in this order; returns the number of lines.

        Raises:
            RedisUnavailable: the connection was lost; an unknown number of lines was published.
            RedisRefused: Redis refuses it, or another publisher has begun.
        """
        some = [(stream, step) for stream, step in steps if step]
        for at in range(0, len(some), AHEAD):
            await self._publish(some[at : at + AHEAD])
        return sum(len(step) // 2 for _, step in some)

    async def _publish(self, steps: Sequence[tuple[str, Step]]) -> None:
        """Publish some steps. If a step is refused and a later step is not, followers find the gap by the position
        before the rows of each step; and all of them are published again.
        """
        if not self._loaded:
            await self._link.call("SCRIPT", "LOAD", SCRIPT)
            self._loaded = True
        commands: list[tuple[Word, ...]] = [
            ("EVALSHA", _SHA, *self._head, stream_channel(self._server, stream), *step) for stream, step in steps
        ]
        for answer in await self._link.call_all(commands):
            if isinstance(answer, hiredis.ReplyError):
                raise self._explained(answer)

    async def announce(self) -> None:
        """Keep our term and address in Redis, which also shows whether it answers. Raises as `publish`."""
        await self._publish([("", [])])

    async def aclose(self) -> None:
        """Close the connection; safe to repeat."""
        await self._link.aclose()

    def _explained(self, answer: hiredis.ReplyError) -> Exception:
        if str(answer).startswith("STALE"):
            return RedisRefused(
                f"another daemon publishes {self._server} to {self._link.address} ({answer}). If it belongs to another "
                f"database, give one of the two another --server-name; else this ends within {KEPT} s"
            )
        return refused(self._link.address, answer)
