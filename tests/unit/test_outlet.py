"""The sending end on real sockets: nothing lost between pieces, however little the socket takes at a time."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.daemon.outbox import MAX_PIECES, SLICE, Outlet, Rounds

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


@pytest.fixture
async def tcp() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two ends of a connection over TCP."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        theirs = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        ours = await listener.accept()
        async with ours, theirs:
            yield ours, theirs


async def test_a_peer_stalls_that_takes_next_to_nothing_and_not_one_that_is_slow(
    tcp: tuple[trio.SocketStream, trio.SocketStream],
) -> None:
    ours, theirs = tcp
    stall = 10.0
    outlet = Outlet(ours, stall)
    async with trio.open_nursery() as nursery:
        rounds = Rounds(4)
        nursery.start_soon(rounds.run)
        nursery.start_soon(outlet.send, [b"x" * (64 << 20)], rounds)
        while outlet.look_at == math.inf:
            await trio.lowlevel.checkpoint()
        now, taken = outlet.look_at, 0
        for _ in range(20):
            before = taken
            while taken < before + (1 << 20):  # acknowledged in lumps, as its buffer allows
                taken += len(await theirs.receive_some(1 << 16))
            await trio.sleep(0.01)  # its machine acknowledges what it read
            assert not outlet.stalls(now)
            assert now < outlet.look_at <= now + stall
            now += stall
        quiet = now - stall
        while not outlet.stalls(outlet.look_at):
            assert outlet.look_at <= quiet + 2 * stall, "what came in between counts once"
        nursery.cancel_scope.cancel()


class Recorded(trio.abc.SendStream):
    """A stream that is no socket, as one that encrypts: notes what it is given at a time."""

    def __init__(self) -> None:
        self.given: list[bytes] = []

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.given.append(bytes(data))
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None: ...

    async def aclose(self) -> None: ...


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0, 1, 100, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE])))
def test_a_stream_that_encrypts_gets_everything_in_small_parts(sizes: list[int]) -> None:
    pieces = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    stream = Recorded()

    async def send() -> None:
        rounds = Rounds(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rounds.run)
            await Outlet(stream, 10).send(pieces, rounds)
            nursery.cancel_scope.cancel()

    trio.run(send)
    assert b"".join(stream.given) == b"".join(pieces)
    assert max(map(len, stream.given), default=0) <= SLICE
    assert len(stream.given) == math.ceil(sum(sizes) / SLICE)
