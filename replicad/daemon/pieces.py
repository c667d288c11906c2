"""Writing many things in one statement, of which Postgres may refuse a single one: the others are written all the same.

What the things are, and what is done about a refusal, is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from replicad.errors import DatabaseError
from replicad.sqlstates import NEVER, means

T = TypeVar("T")


def is_hopeless(error: DatabaseError) -> bool:
    """Whether the same statement would fail again with the same values, whatever the state of Postgres.

    The second half is what asyncpg raises for values that cannot be sent at all; it is a ValueError.
    """
    return means(error.sqlstate, NEVER) or isinstance(error.__cause__, ValueError)


async def write_in_pieces(
    items: Sequence[T], write: Callable[[Sequence[T]], Awaitable[bool]], refused: Callable[[DatabaseError], None]
) -> bool:
    """Write all at once; where Postgres cannot hold one of them (its encoding lacks a letter), all but that one.

    `refused` is called for each that cannot be held. False as soon as `write` says False; other errors are raised.
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
