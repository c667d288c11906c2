"""The event loop that runs a client, trio's or asyncio's, where anyio is not enough. The daemon does not need this.

On asyncio a program may cancel a task in two ways: by a scope of anyio, and natively (`Task.cancel`, `asyncio.timeout`,
a web server whose client has gone). A native cancellation is raised once, at whatever the task waits for, and no
shielded scope keeps it away. So code of the client that waits keeps nothing in the waiting itself: what was received is
in an attribute until it is taken, without a wait between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from replicad.groups import leaves, raise_as_it_was


@asynccontextmanager
async def open_plain_tasks() -> AsyncIterator[TaskGroup]:
    """Tasks that are cancelled at the end of the block, on either loop; `nurseries.open_plain_nursery` for clients.

    An exception of the block comes out as it is, and so does the one exception of a task, also when the caller is
    cancelled at the same moment. Only where several fail at once an exception group comes out, with all of them.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # made by the group above: exactly one level is its own
        failures = [error for error in group.exceptions if not _is_cancellation(error)]
        if len(failures) != 1:
            raise
        raise_as_it_was(failures[0])


def _is_cancellation(error: BaseException) -> bool:
    return all(isinstance(leaf, anyio.get_cancelled_exc_class()) for leaf in leaves(error))
