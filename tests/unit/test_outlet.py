"""The sending end on real sockets: nothing lost between pieces, however little the socket takes at a time."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.lowlevel

from replicad.daemon.outlet import MAX_PIECES, Outlet
from replicad.daemon.rounds import Rounds

PIECES = [bytes([n % 251]) * (n * 37 % 3000 + 1) for n in range(3 * MAX_PIECES)]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two connected streams, the first of which has a small buffer."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(left)) as ours:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(right)) as theirs:
            yield ours, theirs


async def test_what_is_sent_in_many_pieces_arrives_whole_and_in_order(
    pair: tuple[trio.SocketStream, trio.SocketStream],
) -> None:
    ours, theirs = pair
    received = bytearray()

    async def receive() -> None:
        while len(received) < sum(map(len, PIECES)):
            received.extend(await theirs.receive_some(1000))

    outlet = Outlet(ours, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await outlet.send(PIECES, Rounds(4))
        assert not outlet.torn
    assert received == b"".join(PIECES)


async def test_who_sends_to_a_peer_that_takes_nothing_is_told_when_it_must_end(
    pair: tuple[trio.SocketStream, trio.SocketStream],
) -> None:
    ours, theirs = pair
    outlet = Outlet(ours, 1000)
    told: list[float] = []
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(outlet.send, PIECES, Rounds(4), 0.0, told.append)
        while not told:
            await trio.lowlevel.checkpoint()
        assert told == [outlet.look_at]
        assert 250 <= outlet.look_at - began < 300
        assert not outlet.stalls(outlet.look_at)
        while outlet.torn:
            await theirs.receive_some(1 << 20)
    assert outlet.look_at == math.inf
    assert len(told) == 1


async def test_a_peer_that_is_gone_is_broken(pair: tuple[trio.SocketStream, trio.SocketStream]) -> None:
    ours, theirs = pair
    await theirs.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await Outlet(ours, 10).send([b"x"], Rounds(4))
