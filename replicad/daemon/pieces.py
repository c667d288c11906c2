"""Writes many items in one statement. If Postgres refuses some of the items, the others are still written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from replicad.errors import DatabaseError
from replicad.sqlstates import NEVER, means

T = TypeVar("T")


def is_hopeless(error: DatabaseError) -> bool:
    """Whether the same statement would always fail with the same values.

    asyncpg raises a ValueError for values that cannot be sent.
    """
    return means(error.sqlstate, NEVER) or isinstance(error.__cause__, ValueError)


async def write_in_pieces(
    items: Sequence[T], write: Callable[[Sequence[T]], Awaitable[bool]], refused: Callable[[DatabaseError], None]
) -> bool:
    """Write all items in one statement; without the items that Postgres cannot hold (its encoding lacks a character).

    `refused` is called for each of these. Returns False as soon as `write` returns False; other errors are raised.
    """
    try:
        return await write(items)
    except DatabaseError as error:
        if not is_hopeless(error):
            raise
        if len(items) == 1:
            refused(error)
            return True
    middle = len(items) // 2
    first = await write_in_pieces(items[:middle], write, refused)
    return first and await write_in_pieces(items[middle:], write, refused)
