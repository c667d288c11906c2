"""A nursery for context managers and functions that users call: it adds no exception group to a single error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from replicad.groups import leaves, raise_as_it_was


@asynccontextmanager
async def open_plain_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled at the end of the block.

    An exception of the block comes out as it is, and so does the one exception of a task, also when the caller is
    cancelled at the same moment. Only where several fail at once an exception group comes out, with all of them.
    """
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            yield nursery
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # made by the nursery above: exactly one level is its own
        failures = [error for error in group.exceptions if not _is_cancellation(error)]
        if len(failures) != 1:
            raise
        raise_as_it_was(failures[0])


def _is_cancellation(error: BaseException) -> bool:
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))
