"""Events that come together, of both followers, on steps that a test makes up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio

from replicad.client.async_client import AsyncFollower
from replicad.client.blocking_client import BlockingFollower
from replicad.client.events import PositionMoved, RowBatch
from replicad.client.link import DaemonTarget
from replicad.client.requests import Introduction
from replicad.client.steps import Receive
from replicad.errors import ConnectionLost
from replicad.protocol.connection import Timing

FIRST, SECOND, THIRD = (RowBatch("s", "w", token, ["{}"]) for token in (1, 2, 3))
TARGET = DaemonTarget("127.0.0.1", 1, Introduction("me", None, None), None, 1.0, 1.0, False, Timing())


class Performed:
    """Performs nothing, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _step: object) -> bytes:
        self.count += 1
        return b"what was received"

    async def later(self, step: object) -> bytes:
        await trio.lowlevel.checkpoint()
        return self(step)


@pytest.fixture(params=["blocking", "trio"])
async def follower(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Any:
    made: Any
    if request.param == "trio":
        made = AsyncFollower(TARGET, nursery, {"s": "NOW"}, linear=False, also=(), wishes={})
    else:
        made = BlockingFollower(TARGET, {"s": "NOW"}, linear=False, also=(), wishes={})
    made.performed = Performed()
    made._perform = made.performed.later if request.param == "trio" else made.performed
    return made


async def together(follower: Any) -> list[Any]:
    found: list[Any] = await follower.together() if isinstance(follower, AsyncFollower) else follower.together()
    return found


async def following(follower: Any) -> Any:
    return await follower.__anext__() if isinstance(follower, AsyncFollower) else next(follower)


async def test_what_came_together_is_handed_over_together_and_nothing_waits_or_is_lost(follower: Any) -> None:
    def steps() -> Iterator[Any]:
        assert (yield Receive(1.0)) == b"what was received"
        yield FIRST
        yield PositionMoved("s", "w", 1)  # is not wanted
        yield SECOND
        assert (yield Receive(1.0)) == b"what was received"
        yield THIRD
        yield FIRST
        yield Receive(1.0)

    follower._steps = steps()
    assert await together(follower) == [FIRST, SECOND]
    assert follower.performed.count == 1, "it does not wait for more"
    assert await following(follower) == THIRD
    assert follower.performed.count == 2
    assert await following(follower) == FIRST


async def test_an_error_comes_after_the_events_before_it_and_ends_the_follower(follower: Any) -> None:
    def steps() -> Iterator[Any]:
        yield FIRST
        raise ConnectionLost("cut")

    follower._steps = steps()
    assert await together(follower) == [FIRST]
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="cut"):
            await together(follower)
