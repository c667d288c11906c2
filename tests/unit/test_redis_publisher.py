"""Commands of clients on their way to Redis: none is lost by a connection that breaks, and what is left out is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import trio
import trio.testing

from replicad.daemon.service import Inside
from replicad.daemon.troubles import Troubles
from replicad.errors import RedisUnavailable
from replicad.redis.intake import Intake
from replicad.redis.messages import COMMON, Step
from replicad.redis.publisher import MOST_SAID, RedisOutlet, RedisPublisher
from replicad.redis.service import RedisIntervals


class Outlet:
    """A connection that breaks at each of the first `breaks` publications of commands."""

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.got: list[bytes] = []

    async def publish(self, steps: Iterable[tuple[str, Step]]) -> int:
        pairs = [pair for _, step in steps for pair in zip(step[::2], step[1::2], strict=True)]
        said = [line for where, line in pairs if where == COMMON and isinstance(line, bytes)]
        if said and self.breaks:
            self.breaks -= 1
            raise RedisUnavailable("broken")
        self.got += said
        return len(said)

    async def announce(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Waiting(Intake):
    """No streams."""

    async def run(self) -> None:
        await trio.sleep_forever()


async def published(lines: list[bytes], *, breaks: int) -> tuple[list[bytes], RedisPublisher, Troubles]:
    outlet, troubles = Outlet(breaks), Troubles()

    async def connect() -> RedisOutlet:
        return cast("RedisOutlet", outlet)

    publisher = RedisPublisher(
        Waiting(Inside(), {}, troubles, RedisIntervals()), connect, {}, troubles, RedisIntervals()
    )
    for line in lines:
        publisher.say(line)
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.run)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
    return outlet.got, publisher, troubles


async def test_a_command_is_published_again_after_a_connection_that_broke(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lines = [b"REMOTE_SERVER_UP %d" % number for number in range(5)]
    got, publisher, _ = await published(lines, breaks=2)
    assert got == lines
    assert publisher.dropped == 0


async def test_the_oldest_commands_are_left_out_and_counted_where_too_many_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lines = [b"REMOTE_SERVER_UP %d" % number for number in range(MOST_SAID + 3)]
    got, publisher, troubles = await published(lines, breaks=1)
    assert got == lines[3:]
    assert publisher.dropped == 3
    assert troubles.counts["service", "commands", "redis_unavailable"] == 3
