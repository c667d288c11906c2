"""Accepting connections: room for so many, `accept` that fails, and commands that go to all clients."""

from __future__ import annotations

import errno
import socket
from itertools import pairwise
from typing import Any

import trio
from trio.testing import MockClock

from replicad.daemon.admission import Acceptor, Pauses
from replicad.daemon.relay import Relay
from replicad.daemon.session import Relaying
from replicad.daemon.troubles import Troubles
from replicad.protocol.commands import RemoteServerUp
from tests.daemons import relay_key
from tests.vocabulary import EVERY

from .conftest import Desk, settle
from .test_poller_and_relay import Bus


class Queues:
    """Hands out what the test gives it: connections, or errors to raise."""

    def __init__(self, *outcomes: Exception | socket.socket) -> None:
        self.outcomes = list(outcomes)
        self.times: list[float] = []

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()
        self.times.append(trio.current_time())
        if not self.outcomes:
            await trio.sleep_forever()

    def waiting(self) -> list[Queues]:
        return [self]

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self.outcomes:
            raise BlockingIOError
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, ("127.0.0.1", 0)


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    return ours, theirs


async def test_there_is_room_for_so_many_and_one_more_is_told_so_and_closed(autojump_clock: MockClock) -> None:
    pairs = [connected() for _ in range(3)]
    ours = [one for one, _ in pairs]
    served, refused, troubles = [], [], Troubles()

    async def serve(stream: trio.abc.Stream, peer: str) -> None:
        served.append(stream)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        acceptor = Acceptor(serve, nursery, troubles, room=2, full=b"ERROR full\n", refused=lambda: refused.append(1))
        for some in (ours[:2], ours[2:]):
            queues: Any = Queues(*some)
            nursery.start_soon(acceptor.accept_forever, queues)
            await settle()
        assert (len(served), refused) == (2, [1])
        assert pairs[2][1].recv(100) == b"ERROR full\n"
        assert pairs[2][1].recv(100) == b"", "closed"
        nursery.cancel_scope.cancel()
    for _, theirs in pairs:
        theirs.close()


async def test_an_accept_that_fails_is_tried_again_with_a_pause_that_grows(autojump_clock: MockClock) -> None:
    troubles = Troubles()
    errors = [OSError(errno.EMFILE, "too many open files")] * 5 + [ValueError("defect")]
    async with trio.open_nursery() as nursery:
        acceptor = Acceptor(
            trio.lowlevel.checkpoint,  # type: ignore[arg-type]
            nursery,
            troubles,
            room=9,
            full=b"",
            refused=lambda: None,
            pauses=Pauses(first=0.1, longest=0.4),
        )
        queues: Any = Queues(*errors)
        nursery.start_soon(acceptor.accept_forever, queues)
        await trio.sleep(0.05)
        assert "too many open files; raise the limit" in (troubles.why("service", "listener") or "")
        await trio.sleep(10)
        assert [round(b - a, 6) for a, b in pairwise(queues.times)] == [0.1, 0.2, 0.4, 0.4, 0.4, 0.4]
        nursery.cancel_scope.cancel()


async def test_what_concerns_all_goes_to_all_clients_but_the_sender_and_to_the_other_daemons(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        bus = Bus()
        desks = [Desk(nursery, Troubles()) for _ in range(2)]
        for desk in desks:
            await desk.open(Relaying(desk.hub, Relay(bus, relay_key, EVERY, desk.troubles)))
        await settle()
        sender, neighbour, distant = desks[0].connect(), desks[0].connect(), desks[1].connect()
        line = RemoteServerUp("example.org").render()
        assert await sender.say(line) == []
        assert await neighbour.lines() == [line]
        assert await distant.lines() == [line]
        assert desks[0].services[0].summary() == {}
        nursery.cancel_scope.cancel()
