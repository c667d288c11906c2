"""Ctrl-C during the async work of a command comes where the work can be cancelled, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio_asyncio

from replicad.terminal.database import run_async


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    """A session of Spark in this process has put a handler of its own there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def in_a_callback_of_asyncio(done: list[str]) -> None:
    """As the driver's code runs."""

    def callback() -> None:
        interrupt()
        done.append("the callback went on")

    async with trio_asyncio.open_loop() as loop:
        loop.call_soon(callback)
        await trio.sleep_forever()


async def in_another_task(done: list[str]) -> None:
    async def other() -> None:
        interrupt()
        done.append("the callback went on")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.sleep_forever()


@pytest.mark.parametrize("work", [in_a_callback_of_asyncio, in_another_task])
def test_ctrl_c_cancels_the_work_and_interrupts_no_callback(work: Callable[[list[str]], Any]) -> None:
    done: list[str] = []

    async def cleaned_up() -> None:
        try:
            await work(done)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_async(cleaned_up)
    assert done == ["the callback went on", "cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_clean_up_raises_does_not_hide_the_interrupt() -> None:
    async def work() -> None:
        try:
            interrupt()
            await trio.sleep_forever()
        finally:
            raise OSError("lost")

    with pytest.raises(KeyboardInterrupt) as caught:
        run_async(work)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_result_and_the_error_of_the_work_come_as_they_are() -> None:
    async def work(error: Exception | None) -> int:
        await trio.lowlevel.checkpoint()
        if error:
            raise error
        return 7

    assert run_async(lambda: work(None)) == 7
    with pytest.raises(LookupError):
        run_async(lambda: work(LookupError()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_ctrl_c_itself_keeps_doing_so() -> None:
    """Someone's program that runs our commands."""
    said: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: said.append(number))
    try:

        async def work() -> str:
            interrupt()
            await trio.lowlevel.checkpoint()
            return "done"

        assert run_async(work) == "done"
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == [signal.SIGINT]


def test_a_second_ctrl_c_ends_a_clean_up_that_does_not_end() -> None:
    script = (
        "import signal, trio\n"
        "from replicad.terminal.database import run_async\n"
        "async def work():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    with trio.CancelScope(shield=True):\n"
        "        print('cleaning up', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "run_async(work)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "cleaning up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
