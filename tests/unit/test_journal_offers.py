"""Small chunks that the appending task sends itself: to whom, in which order, and what else may happen meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.daemon.journal import OFFER_BYTES, SLICE, Channel
from replicad.daemon.outbox import Outbox
from replicad.daemon.session import Session
from replicad.errors import StreamRefused
from replicad.protocol.connection import CloseReason
from tests.lengths import examples


class SocketReader:
    """A reader whose socket is free, or not."""

    def __init__(self, channel: Channel, *, free: bool = True, extended: bool = False) -> None:
        self.free = free
        self.sent: list[bytes] = []
        self.woken = 0
        self.reader = channel.subscribe(channel.head, self._wake, extended=extended)
        self.reader.offer = self._offer

    def _wake(self) -> None:
        self.woken += 1

    def _offer(self, data: bytes) -> bool:
        if self.free:
            self.sent.append(data)
        return self.free


async def test_a_reader_at_the_head_is_sent_a_small_chunk_and_is_not_woken() -> None:
    channel = Channel("s", {})
    free, full = SocketReader(channel), SocketReader(channel, free=False)
    await channel.append(b"1\n")
    assert (free.sent, free.woken, free.reader.take_nowait()) == ([b"1\n"], 0, [])
    assert (full.sent, full.woken, full.reader.take_nowait()) == ([], 1, [b"1\n"])


async def test_a_reader_that_is_behind_takes_everything_in_order_by_itself() -> None:
    channel = Channel("s", {})
    behind = SocketReader(channel, free=False)
    await channel.append(b"1\n")
    behind.free = True
    await channel.append(b"2\n")
    assert behind.sent == []
    assert behind.reader.take_nowait() == [b"1\n", b"2\n"]
    await channel.append(b"3\n")
    assert behind.sent == [b"3\n"]


async def test_a_large_chunk_and_inserted_lines_go_the_usual_way() -> None:
    channel = Channel("s", {})
    one = SocketReader(channel)
    await channel.append(b"x" * (OFFER_BYTES + 1))
    assert (one.sent, one.woken) == ([], 1)
    assert one.reader.take_nowait() == [b"x" * (OFFER_BYTES + 1)]
    one.reader.insert(channel.head, b"inserted\n")
    await channel.append(b"1\n")
    assert one.sent == []
    assert one.reader.take_nowait() == [b"inserted\n", b"1\n"]


async def test_a_chunk_for_subscribers_by_name_passes_the_others_by() -> None:
    channel = Channel("s", {})
    plain, extended = SocketReader(channel), SocketReader(channel, extended=True)
    await channel.append(b"WRITERS\n", extended=True)
    await channel.append(b"1\n")
    assert (plain.sent, extended.sent) == ([b"1\n"], [b"WRITERS\n", b"1\n"])


@pytest.mark.parametrize("event", ["closed", "ended", "cancelled"])
async def test_other_tasks_run_between_slices_of_many_readers(event: str) -> None:
    """What they do to readers that had no turn yet counts: nothing is sent after a close or the end of the journal."""
    channel = Channel("s", {})
    sessions = [SocketReader(channel) for _ in range(3 * SLICE)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.append, b"1\n")
        while not any(one.sent for one in sessions):
            await trio.lowlevel.checkpoint()
        without = [one for one in sessions if not one.sent]
        assert len(without) >= SLICE
        if event == "closed":
            without[0].reader.close()
        elif event == "ended":
            channel.end(StreamRefused("over"))
        else:
            nursery.cancel_scope.cancel()
    if event == "closed":
        assert [one.sent for one in without].count([]) == 1
        assert without[0].sent == []
    else:
        assert not any(one.sent for one in without)
        assert all(one.woken for one in without)


# --- on real sockets ---


class Owner:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.reasons: list[CloseReason] = []

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        self._nursery.start_soon(job, *args)

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        self.reasons.append(reason)

    def note_sent(self) -> None:
        pass

    def note_waiting(self, look_at: float) -> None: ...


def outbox_of(stream: trio.SocketStream, owner: Owner) -> Outbox:
    return Outbox(stream, cast(Session, owner), 60)


STEPS = st.one_of(
    st.integers(1, 3000).map(lambda size: ("append", size)),
    st.integers(1, 50).map(lambda size: ("post", size)),
    st.integers(1, 20_000).map(lambda size: ("receive", size)),
    st.just(("turn", 0)),
)


@settings(max_examples=examples(50))
@given(st.lists(STEPS, max_size=60))
def test_a_peer_gets_all_lines_whole_and_in_order_however_its_socket_takes_them(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        left, right = socket.socketpair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        right.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(left))
        received = b""
        rows, posted = [], []

        def receive(size: int) -> bytes:
            try:
                return right.recv(size)
            except BlockingIOError:
                return b""

        async with trio.open_nursery() as nursery:
            outbox = outbox_of(stream, Owner(nursery))
            outbox.open()
            channel = Channel("s", {})
            outbox.read(channel, 0, extended=False)
            for number, (what, size) in enumerate(steps):
                line = b"%s %d %s\n" % (what.encode(), number, b"x" * size)
                if what == "append":
                    rows.append(line)
                    await channel.append(line)
                elif what == "post":
                    posted.append(line)
                    outbox.post_line(line)
                elif what == "receive":
                    received += receive(size)
                else:
                    await trio.lowlevel.checkpoint()
            with trio.fail_after(60):
                while len(received) < sum(map(len, rows + posted)):
                    received += receive(1 << 16)
                    await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert not outbox.busy
        right.close()
        left.close()
        lines = received.splitlines(keepends=True)
        assert [line for line in lines if line.startswith(b"append")] == rows
        assert [line for line in lines if line.startswith(b"post")] == posted
        assert len(lines) == len(rows) + len(posted)

    trio.run(scenario)


async def test_a_connection_that_breaks_ends_its_own_session_only(nursery: trio.Nursery) -> None:
    channel = Channel("s", {})
    owners, peers, streams = [], [], []
    for _ in range(3):
        left, right = socket.socketpair()
        streams.append(trio.SocketStream(trio.socket.from_stdlib_socket(left)))
        owners.append(Owner(nursery))
        peers.append(right)
        outbox = outbox_of(streams[-1], owners[-1])
        outbox.open()
        outbox.read(channel, 0, extended=False)
    await trio.testing.wait_all_tasks_blocked()
    peers[1].close()
    await channel.append(b"1\n")
    assert [owner.reasons for owner in owners] == [[], [CloseReason.PEER_LOST], []]
    assert [peers[0].recv(10), peers[2].recv(10)] == [b"1\n", b"1\n"]
    for one in peers:
        one.close()
    for stream in streams:
        stream.socket.close()
