"""A follower that asks for one stream after another, as ours do, while the first of them comes by Redis already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import trio
import trio.testing

from replicad.redis.following import Switch
from replicad.redis.messages import ALIVE, stream_channel
from tests.loops import TrioBytes, memory_bytes_pair

SERVER = "example.com"


class Link:
    """A subscription to Redis; `send` has it receive lines of the channel of a stream."""

    address = "redis"

    def __init__(self) -> None:
        self.subscribed: list[str] = []
        self.opened = 0
        self._send, self._received = trio.open_memory_channel[list[tuple[bytes, bytes]]](100)

    async def open(self) -> Link:
        self.opened += 1
        return self

    async def subscribe(self, channels: Iterable[str]) -> None:
        self.subscribed += channels

    subscribe_more = subscribe

    async def messages(self) -> list[tuple[bytes, bytes]]:
        return await self._received.receive()

    async def aclose(self) -> None:
        """Nothing is open."""

    def send(self, stream: str, *lines: bytes) -> None:
        self._send.send_nowait([(stream_channel(SERVER, stream).encode(), line) for line in lines])


def state(stream: str) -> tuple[bytes, bytes]:
    return b"WRITERS %s e w1=1" % stream.encode(), b"POSITION %s w1 5 5" % stream.encode()


async def test_a_stream_that_is_asked_for_later_ends_no_subscription_of_those_that_have_joined() -> None:
    far, follower = memory_bytes_pair()
    daemons = [memory_bytes_pair() for _ in range(2)]
    link = Link()

    async def connect() -> TrioBytes:
        return daemons[1][0]

    async def lines(count: int) -> list[bytes]:
        found = b""
        while found.count(b"\n") < count:
            data = await follower.receive_some(1000)
            assert data, "the connection ended"
            found += bytes(data)
        return found.splitlines()

    switch = Switch(far, daemons[0][0], SERVER, connect=connect, connect_redis=cast(Any, link.open))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(switch.run)
            for number, stream in enumerate(("a", "b")):
                await follower.send_all(b"REPLICATE %s 5\n" % stream.encode())
                await trio.testing.wait_all_tasks_blocked()
                link.send("a", ALIVE, *state("a"))  # so that what is wanted is looked at
                await daemons[number][1].send_all(b"".join(line + b"\n" for line in state(stream)))
                await trio.testing.wait_all_tasks_blocked()
                link.send(stream, ALIVE, *state(stream))
                await trio.testing.wait_all_tasks_blocked()
            link.send("a", b"RDATA a w1 6 1")
            link.send("b", b"RDATA b w1 6 1")
            got = await lines(6)
            while b"RDATA b w1 6 1" not in got:
                got += await lines(1)
            assert b"RDATA a w1 6 1" in got
            assert (link.opened, len(link.subscribed)) == (1, 2)
            await follower.aclose()
