"""Places for large sends: so many in a turn of the event loop, and who gets them."""

from __future__ import annotations

import socket

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.daemon.outbox import IN_ORDER, MUCH, Outlet, Rounds
from tests.lengths import examples


class Turn(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


async def test_no_turn_of_the_event_loop_has_more_sends_than_a_round() -> None:
    rounds, turn = Rounds(4), Turn()
    sends: list[int] = []

    async def client(number: int) -> None:
        for _ in range(5):
            await rounds.next(number)
            sends.append(turn.number)

    trio.lowlevel.add_instrument(turn)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.run)
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as clients:
            for number in range(50):
                clients.start_soon(client, number)
        nursery.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(turn)
    assert len(sends) == 250
    assert max(map(sends.count, sends)) == 4
    assert rounds.waits > 200


@settings(max_examples=examples(40))
@given(early=st.integers(8, 20), late=st.integers(8, 20), head=st.integers(20, 60), sends=st.sampled_from([2, 4, 8]))
def test_clients_that_begin_later_reach_the_others(early: int, late: int, head: int, sends: int) -> None:
    """When there are fewer places than clients, so that what was read for the first ones serves the later ones."""
    rows = 5 * head + 20
    at = dict.fromkeys(range(early), head) | dict.fromkeys(range(early, early + late), 0)

    async def main() -> int:
        rounds, first = Rounds(sends), trio.Event()

        async def client(number: int) -> None:
            while at[number] < rows:
                await rounds.next(rows - at[number])
                at[number] += 1
            first.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rounds.run)
            await trio.lowlevel.checkpoint()
            for number in at:
                nursery.start_soon(client, number)
            await first.wait()
            spread = max(at.values()) - min(at.values())
            nursery.cancel_scope.cancel()
        return spread

    assert trio.run(main) <= 0.7 * head, "in turns alone the later ones would stay behind"


async def test_a_client_with_little_to_go_is_not_passed_over_for_ever() -> None:
    rounds, near = Rounds(2), trio.Event()
    sends = 0

    async def far() -> None:
        nonlocal sends
        while not near.is_set():
            await rounds.next(1000)
            sends += 1

    async def client() -> None:
        await rounds.next(1)
        near.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.run)
        await trio.lowlevel.checkpoint()
        for _ in range(30):
            nursery.start_soon(far)
        for _ in range(30):
            await trio.lowlevel.checkpoint()
        nursery.start_soon(client)
        with trio.fail_after(5):
            await near.wait()
        nursery.cancel_scope.cancel()
    assert sends < 60 + 2 * IN_ORDER * 31


async def test_a_task_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    rounds = Rounds(1)
    done: list[int] = []

    async def client(number: int) -> None:
        await rounds.next(number)
        done.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.run)
        await trio.lowlevel.checkpoint()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as cut:
                for number in range(100):
                    cut.start_soon(client, number)
                await trio.lowlevel.checkpoint()
                scope.cancel()
        before = len(done)
        await rounds.next()
        with trio.fail_after(5):
            await rounds.next()
        nursery.cancel_scope.cancel()
    assert before < 100


async def test_nobody_waits_before_it_runs_or_when_it_has_ended() -> None:
    rounds = Rounds(1)
    with trio.fail_after(5):
        for _ in range(3):
            await rounds.next()
    ended = 0

    async def client() -> None:
        nonlocal ended
        await rounds.next()
        ended += 1

    async with trio.open_nursery() as clients:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rounds.run)
            await trio.lowlevel.checkpoint()
            for _ in range(20):
                clients.start_soon(client)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert ended == 20


async def test_what_waited_once_is_not_kept() -> None:
    rounds = Rounds(8)

    async def client(number: int) -> None:
        for step in range(200):
            await rounds.next(0 if number % 2 else step)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.run)
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as clients:
            for number in range(20):
                clients.start_soon(client, number)
        nursery.cancel_scope.cancel()
    assert len(rounds._order) + len(rounds._by_way) < 400, "4,000 have waited"


@pytest.mark.parametrize("size", [100, 4 * MUCH])
async def test_only_a_large_send_waits_for_a_place_also_when_its_socket_was_full(size: int) -> None:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    places = 0

    class Places(Rounds):
        async def next(self, to_go: float = 0.0) -> None:
            nonlocal places
            places += 1
            await trio.lowlevel.checkpoint()

    async with trio.SocketStream(trio.socket.from_stdlib_socket(left)) as ours:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(right)) as theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Outlet(ours, 10).send, [b"x" * size], Places(4))
                received = 0
                while received < size:
                    received += len(await theirs.receive_some(1000))
    assert places == 0 if size < MUCH else places > 1
