"""Reads what follows of an answer while a piece is being sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")

Pass = Callable[[T], Awaitable[None]]  # passes one piece on


async def read_ahead(fetch: Callable[[Pass[T]], Awaitable[None]], take: Pass[T], *, waiting: float = 0) -> None:
    """Run `fetch`, which passes pieces on one after another, and `take` with each of them.

    So many pieces may wait to be taken: none, so that at most two are in memory, or any number (`math.inf`), if `fetch`
    bounds them itself.

    Raises their first exception, not in an exception group. Pieces may have been taken before.
    """
    failure: Exception | None = None
    ahead, pieces = trio.open_memory_channel[T](waiting)

    async def run() -> None:
        nonlocal failure
        async with ahead:
            try:
                await fetch(ahead.send)
            except Exception as error:  # noqa: BLE001 - raised again below
                failure = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            async for piece in pieces:
                await take(piece)
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = failure or error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
