"""The shortest schedule that still fails, found by leaving steps out (delta debugging).

A schedule of faults does not fail each time, because the moments of the faults depend on the machine: what passed once
may fail at another try. So the shortest that was found is one that has failed, and not surely the shortest that can.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Enough(Exception):
    """No more tries are wanted."""


async def shrink(
    steps: Sequence[T], fails: Callable[[Sequence[T]], Awaitable[bool]], allowed: Callable[[Sequence[T]], bool]
) -> list[T]:
    """Leave out halves, then smaller parts, as long as it fails and is `allowed`.

    Where `fails` raises Enough, the shortest so far is returned.
    """
    found, parts = list(steps), 2
    try:
        while len(found) > 1:
            size = -(-len(found) // parts)
            for begin in range(0, len(found), size):
                shorter = found[:begin] + found[begin + size :]
                if shorter and allowed(shorter) and await fails(shorter):
                    found, parts = shorter, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    break
                parts = min(len(found), parts * 2)
    except Enough:
        pass
    return found
