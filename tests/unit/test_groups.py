"""Errors out of exception groups: one comes out as itself, several come out together, and none is lost."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from replicad.groups import leaves, raise_as_it_was, sole_leaf
from replicad.nurseries import open_plain_nursery
from tests.conftest import PATIENCE

ONE, OTHER = ValueError("one"), OSError("other")


async def fail(error: BaseException) -> None:
    raise error


def test_leaves_come_in_order_and_a_single_one_stands_for_its_groups() -> None:
    nested = BaseExceptionGroup("", [ExceptionGroup("", [ONE]), OTHER, BaseExceptionGroup("", [KeyboardInterrupt()])])
    assert [type(leaf) for leaf in leaves(nested)] == [ValueError, OSError, KeyboardInterrupt]
    assert leaves(ONE) == [ONE]
    assert sole_leaf(ONE) is ONE
    assert sole_leaf(ExceptionGroup("", [ExceptionGroup("", [ONE])])) is ONE
    assert sole_leaf(nested) is nested


def test_an_error_out_of_a_group_keeps_its_own_context_and_does_not_mention_the_group() -> None:
    inner = ValueError("it")
    inner.__context__ = KeyError("before")

    def take_out(group: ExceptionGroup[ValueError]) -> None:
        try:
            raise group
        except ExceptionGroup:
            raise_as_it_was(inner)

    with pytest.raises(ValueError, match="it") as caught:
        take_out(ExceptionGroup("the nursery's", [inner]))
    assert isinstance(caught.value.__context__, KeyError)
    assert "Exception Group" not in "".join(traceback.format_exception(caught.value))


async def run(*jobs: Callable[[], Awaitable[None]], block: Callable[[], Awaitable[None]] = trio.sleep_forever) -> None:
    """Run the jobs as tasks of a nursery, beside what its block does."""
    async with open_plain_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(job)
        await block()


@pytest.mark.parametrize("error", [ONE, KeyboardInterrupt(), SystemExit(3)])
async def test_what_the_block_raises_comes_out_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        await run(trio.sleep_forever, block=partial(fail, error))
    assert caught.value is error


async def test_a_group_that_the_block_raises_stays_one() -> None:
    with pytest.raises(ExceptionGroup, match="the user's") as caught:
        await run(trio.sleep_forever, block=partial(fail, ExceptionGroup("the user's", [ONE])))
    assert caught.value.exceptions == (ONE,)


@pytest.mark.parametrize("error", [ONE, KeyboardInterrupt()])
async def test_the_one_error_of_a_task_comes_out_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        await run(partial(fail, error), trio.sleep_forever)
    assert caught.value is error


async def test_errors_that_come_together_come_out_together() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run(partial(fail, ONE), partial(fail, OTHER))
    assert set(caught.value.exceptions) == {ONE, OTHER}


async def test_an_error_amid_a_cancellation_comes_out_and_a_cancellation_alone_stays_one() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ONE

    with pytest.raises(ValueError, match="one") as caught, trio.move_on_after(0):
        await run(fail_when_cancelled)
    assert caught.value is ONE

    with trio.move_on_after(0) as scope:
        await run(trio.sleep_forever)
    assert scope.cancelled_caught


async def test_the_end_of_the_block_ends_the_tasks() -> None:
    with trio.fail_after(PATIENCE):
        await run(trio.sleep_forever, block=trio.lowlevel.checkpoint)
