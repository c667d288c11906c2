"""The sending side of a session on real sockets: lines sent without a task, and the task that is there only to send."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
import trio
import trio.testing

from replicad.daemon.outbox import Outbox
from replicad.daemon.session import Session
from replicad.protocol.connection import CloseReason


class Owner:
    """Counts what the outbox asks of its session."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.started = 0
        self.sent = 0
        self.look_at = 0.0
        self.reasons: list[CloseReason] = []

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        self.started += 1
        self.nursery.start_soon(job, *args)

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        self.reasons.append(reason)

    def note_sent(self) -> None:
        self.sent += 1

    def note_waiting(self, look_at: float) -> None:
        self.look_at = look_at


class Wire:
    """An outbox and the socket at the other end."""

    def __init__(self, nursery: trio.Nursery) -> None:
        left, self.peer = socket.socketpair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.peer.setblocking(False)
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(left))
        self.owner = Owner(nursery)
        self.outbox = Outbox(self.stream, cast(Session, self.owner), 60)

    def received(self) -> bytes:
        try:
            return self.peer.recv(1 << 20)
        except BlockingIOError:
            return b""

    async def receive(self, size: int) -> bytes:
        data = b""
        with trio.fail_after(60):
            while len(data) < size:
                await trio.lowlevel.wait_readable(self.peer)
                data += self.peer.recv(1 << 16)
        return data


@pytest.fixture
async def wire(nursery: trio.Nursery) -> AsyncIterator[Wire]:
    made = Wire(nursery)
    yield made
    made.stream.socket.close()
    made.peer.close()


async def test_an_idle_outbox_has_no_task_and_sends_an_offer_at_once(wire: Wire) -> None:
    assert not wire.outbox.offer(b"too early\n"), "it is not open yet"
    wire.outbox.open()
    assert wire.outbox.free
    assert wire.outbox.offer(b"a\nb\n")
    assert wire.received() == b"a\nb\n"
    assert (wire.owner.started, wire.owner.sent) == (0, 1)


async def test_an_offer_does_not_overtake_what_is_queued_or_being_sent(wire: Wire) -> None:
    wire.outbox.open()
    wire.outbox.post_line(b"first\n")
    assert not wire.outbox.offer(b"second\n")
    await trio.testing.wait_all_tasks_blocked()
    assert wire.received() == b"first\n"
    assert wire.outbox.free
    assert wire.owner.started == 1


async def test_what_the_socket_does_not_take_of_an_offer_comes_before_anything_else(wire: Wire) -> None:
    wire.outbox.open()
    big = b"x" * 1_000_000 + b"\n"
    assert wire.outbox.offer(big)
    assert wire.outbox.torn
    assert not wire.outbox.free
    wire.outbox.post_line(b"posted\n")
    assert await wire.receive(len(big) + 7) == big + b"posted\n"
    await trio.testing.wait_all_tasks_blocked()
    assert wire.outbox.free
    assert not wire.outbox.torn
    assert wire.owner.started == 1


async def test_a_ping_is_sent_at_once_and_only_if_no_other_line_tells_that_we_are_alive(wire: Wire) -> None:
    wire.outbox.keep_alive(b"PING 1\n")
    wire.outbox.keep_alive(b"PING 2\n")
    wire.outbox.open()
    await trio.testing.wait_all_tasks_blocked()
    assert wire.received() == b"PING 1\n", "one is queued where the socket is not free, as with TLS"
    assert wire.owner.started == 1
    wire.outbox.keep_alive(b"PING 3\n")
    assert wire.received() == b"PING 3\n"
    assert wire.owner.started == 1, "no task was needed"
    big = b"x" * 1_000_000 + b"\n"
    wire.outbox.offer(big)
    wire.outbox.keep_alive(b"PING 4\n")
    assert await wire.receive(len(big)) == big
    await trio.testing.wait_all_tasks_blocked()
    assert wire.received() == b"", "a peer that takes lines slowly gets no PING between them"


async def test_an_offer_to_a_peer_that_is_gone_ends_the_session(wire: Wire) -> None:
    wire.outbox.open()
    wire.peer.close()
    assert wire.outbox.offer(b"x\n")
    assert wire.owner.reasons == [CloseReason.PEER_LOST]


async def test_there_are_no_offers_at_the_end(wire: Wire) -> None:
    wire.outbox.open()
    await wire.outbox.finish(1)
    assert not wire.outbox.offer(b"x\n")
    wire.outbox.post_line(b"late\n")
    assert wire.outbox.close() == []
    assert wire.received() == b""
