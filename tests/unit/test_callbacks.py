"""The driver's loop runs its callbacks in few turns of trio, forgets none, and lets other tasks run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
import trio_asyncio

from replicad.postgres.bridge import MOST_CALLBACKS, hasten
from tests.conftest import PATIENCE


class Turns(trio.abc.Instrument):
    """Counts the turns of trio."""

    def __init__(self) -> None:
        self.made = 0

    def before_io_wait(self, timeout: float) -> None:
        self.made += 1


@asynccontextmanager
async def hastened() -> AsyncIterator[Any]:
    async with trio_asyncio.open_loop() as loop:
        hasten(loop)
        with trio.fail_after(PATIENCE):
            yield loop


async def chain(length: int) -> int:
    """Callbacks each of which queues the next one."""
    for _ in range(length):
        await asyncio.sleep(0)
    return length


async def turns_of_a_chain(loop: Any, length: int) -> int:
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    assert await loop.run_aio_coroutine(chain(length)) == length
    trio.lowlevel.remove_instrument(turns)
    return turns.made


async def test_callbacks_that_follow_from_one_another_share_a_turn() -> None:
    async with trio_asyncio.open_loop() as loop:
        assert await turns_of_a_chain(loop, 30) > 30
    async with hastened() as loop:
        assert await turns_of_a_chain(loop, 30) < 8


async def test_callbacks_without_end_do_not_keep_other_tasks_from_running() -> None:
    async with hastened() as loop:
        ran = 0

        def again() -> None:
            nonlocal ran
            ran += 1
            if not over and ran < 100 * MOST_CALLBACKS:
                loop.call_soon(again)

        over = False
        again()
        turns = 0
        while ran < 20 * MOST_CALLBACKS:
            await trio.lowlevel.checkpoint()
            turns += 1
        over = True
        assert turns >= 10


async def test_callbacks_run_in_their_order_and_an_error_in_one_is_reported() -> None:
    async with hastened() as loop:
        reported: list[str] = []
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        ran: list[int] = []

        def fail() -> None:
            raise ValueError("one of them")

        for number in range(200):
            loop.call_soon(ran.append, number)
            if number == 100:
                loop.call_soon(fail)
        cancelled = loop.call_soon(ran.append, -1)
        cancelled.cancel()
        await loop.synchronize()
        assert ran == list(range(200))
        assert reported == ["one of them"]


@pytest.mark.parametrize("what", ["a callback", "a timer", "a trio function", "an asyncio task"])
async def test_what_a_reading_callback_begins_comes_about(what: str) -> None:
    """The main loop waits for nothing meanwhile, and must be woken for all but plain callbacks."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        ours.setblocking(False)
        async with hastened() as loop:
            done = trio.Event()

            async def set_done() -> None:
                done.set()

            def read() -> None:
                loop.remove_reader(ours.fileno())
                if what == "a callback":
                    loop.call_soon(done.set)
                elif what == "a timer":
                    loop.call_later(0.01, done.set)
                elif what == "a trio function":
                    loop.trio_as_future(set_done)
                else:
                    tasks.append(loop.create_task(set_done()))

            tasks: list[asyncio.Task[None]] = []
            loop.add_reader(ours.fileno(), read)
            await trio.testing.wait_all_tasks_blocked()
            theirs.send(b"x")
            await done.wait()


def test_a_loop_without_the_parts_that_are_replaced_is_left_as_it_is() -> None:
    loop = SimpleNamespace(call_soon=None, synchronize=None)
    hasten(loop)
    assert vars(loop) == {"call_soon": None, "synchronize": None}
