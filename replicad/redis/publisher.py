"""Publishes what the intake has to Redis, for as long as this daemon has the role.

An item stays first until Redis has confirmed all of it. After a lost connection it is published again from its start:
followers find by the positions in it what they have already.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import groupby

import trio

from replicad.client.events import GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.daemon.troubles import Troubles
from replicad.errors import ReplicadError
from replicad.nurseries import open_plain_nursery
from replicad.redis.intake import Intake, Item
from replicad.redis.messages import MISSED, Message, Published
from replicad.redis.outlet import RedisOutlet
from replicad.redis.pace import Pace
from replicad.retry import Backoff

MOST_SAID = 1000  # lines of other clients that wait to be published; then the oldest are dropped

Batch = tuple[str, list[Message]]  # a stream, and what is published of it


class RedisPublisher:
    """One turn of the role."""

    def __init__(
        self,
        intake: Intake,
        connect: Callable[[], Awaitable[RedisOutlet]],
        tokens: Mapping[str, str],
        troubles: Troubles,
        pace: Pace,
    ) -> None:
        """`tokens`: of what was published before this turn."""
        self.intake = intake
        self.tokens = tokens  # of what has been published
        self.lines = 0  # published since the turn began
        self.ours: Counter[bytes] = Counter()  # lines of clients that we have published and not heard ourselves yet
        self.connected = False
        self._connect = connect
        self._troubles = troubles
        self._pace = pace
        self._streams: dict[str, Published] = {}
        self._said: deque[bytes] = deque()
        self._positions_asked = False
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
        """A process has said REPLICATE: publish all positions soon. Never waits."""
        self._positions_asked = True
        self._wait.cancel()

    def say(self, line: bytes) -> None:
        """Publish a command of another client of the daemon, on the channel of the server. Never waits."""
        self._said.append(line)
        while len(self._said) > MOST_SAID:
            self._said.popleft()
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
                if self.intake.first() is None and not self._positions_asked and not self._said:
                    self._wait = trio.CancelScope(deadline=self._sync_at)
                    with self._wait:
                        await self.intake.wait()
        finally:
            await outlet.aclose()

    async def _publish_item(self, outlet: RedisOutlet, item: Item) -> None:
        before = {name: dict(one.positions) for name, one in self._streams.items()}
        try:
            self.lines += await outlet.publish(list(self._rendered(item)))
        except BaseException:
            for name, positions in before.items():  # it is published again
                self._streams[name].positions = positions
            raise
        self.intake.done()
        if item.tokens is not None:
            self.tokens = item.tokens

    def _rendered(self, item: Item) -> list[Batch]:
        found: list[Batch] = []
        for stream, events in groupby(item.events, lambda event: event.stream):
            messages: list[Message] = []
            standing = item.standings.get(stream)
            published = self._streams.get(stream)
            if published is None:
                published = self._streams[stream] = Published(stream, "", {}, {})
            for kind, some in groupby(events, type):
                if kind is RowBatch:
                    messages += published.rows(one for one in some if isinstance(one, RowBatch))
                    continue
                for event in some:
                    messages += _moved(published, event)
            if standing is not None and (published.epoch, published.numbers) != (standing.epoch, standing.numbers):
                published.epoch, published.numbers = standing.epoch, standing.numbers
                published.positions = {
                    name: at for name, at in published.positions.items() if name in standing.numbers
                } or published.positions
                messages += published.sync()
            found.append((stream, messages))
        return found

    async def _publish_others(self, outlet: RedisOutlet) -> None:
        """What does not come from streams: positions that were asked for or are due, and commands of clients."""
        batches: list[Batch] = []
        if self._positions_asked:
            self._positions_asked = False
            batches += [(name, one.all_positions()) for name, one in sorted(self._streams.items())]
        if trio.current_time() >= self._sync_at:
            self._sync_at = trio.current_time() + self._pace.sync
            batches += [(name, one.sync()) for name, one in sorted(self._streams.items())]
        while self._said:
            line = self._said.popleft()
            self.ours[line] += 1
            batches.append(("", [Message(line, own=False)]))
        self.lines += await outlet.publish(batches)
        if not batches or not any(messages for _, messages in batches):
            await trio.lowlevel.checkpoint()


def _moved(published: Published, event: object) -> list[Message]:
    match event:
        case PositionMoved():
            return published.moved(event.instance, event.token)
        case Reset(token=None):  # the stream begins again; the positions follow
            return [Message(MISSED, common=False)]
        case Reset(token=int() as token):
            return published.back(event.instance, token)
        case GenerationBegan():
            return [Message(MISSED, common=False)]
    return []
