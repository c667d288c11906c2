"""Publishes what the intake has to Redis, for as long as this daemon has the role.

An item stays first until Redis has confirmed all of it. After a lost connection it is published again from its start:
followers find by the positions in it what they have already.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import groupby

import trio

from replicad.client.events import GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.daemon.troubles import Troubles
from replicad.errors import RedisUnavailable, ReplicadError
from replicad.nurseries import open_plain_nursery
from replicad.redis.intake import FollowedGeneration, Intake, Item, Stopped
from replicad.redis.intervals import RedisIntervals
from replicad.redis.messages import COMMON, MISSED, OWN, STOPPED, PublishedState, Step
from replicad.redis.outlet import RedisOutlet
from replicad.retry import Backoff

MOST_SAID = 1000  # lines of other clients that wait to be published; then the oldest are dropped, and counted

Steps = list[tuple[str, Step]]  # each with its stream


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
        for stream, events in groupby(item.events, lambda event: event.stream):
            standing = item.standings.get(stream)
            published = self._streams.get(stream)
            if published is None:
                published = self._streams[stream] = PublishedState(stream, "", {}, {})
            for kind, some in groupby(events, type):
                if kind is RowBatch:
                    published.stopped = False
                    steps = published.rows(one for one in some if isinstance(one, RowBatch))
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
