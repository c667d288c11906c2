"""The event loop that runs a client, trio's or asyncio's, where anyio is not enough. The daemon does not need this.

On asyncio a program may cancel a task in two ways: by a scope of anyio, and natively (`Task.cancel`, `asyncio.timeout`,
a web server whose client has gone). A native cancellation is raised once, at whatever the task waits for, and no
shielded scope keeps it away. So code of the client that waits keeps nothing in the waiting itself: what was received is
in an attribute until it is taken, without a wait between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib import import_module
from math import inf
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from replicad.groups import leaves, raise_as_it_was

T = TypeVar("T")


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


async def await_answer(request: Callable[[], Awaitable[T]], patience: float) -> T:
    """The result of a request that grants something: who gets it must know it, to give it back.

    If the caller is cancelled, the request goes on for at most `patience` seconds. Then the cancellation is raised; so
    the request itself has to note what it got.
    """
    await checkpoint_if_cancelled()
    found: list[T] = []
    scope = anyio.CancelScope(shield=True)
    ended = anyio.Event()

    async def run() -> None:
        with scope:
            found.append(await request())
        ended.set()

    async with open_plain_tasks() as tasks:
        tasks.start_soon(run)
        try:
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            scope.deadline = anyio.current_time() + patience
            raise
    return found[0]


@asynccontextmanager
async def outliving(open_it: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Something that is open during the block and until its end, also while the block is being cancelled.

    The tasks of a client, for example, end with the scope in which it was opened. So a request that goes on after its
    caller was cancelled needs a client that was opened here.
    """
    kept = anyio.CancelScope(shield=True)
    opened: list[T] = []
    ready = anyio.Event()

    async def keep() -> None:
        with kept:
            async with open_it() as thing:
                opened.append(thing)
                ready.set()
                await anyio.sleep_forever()

    async with open_plain_tasks() as tasks:
        try:
            tasks.start_soon(keep)
            await ready.wait()
            yield opened[0]
        finally:
            kept.cancel()


def _is_cancellation(error: BaseException) -> bool:
    return all(isinstance(leaf, anyio.get_cancelled_exc_class()) for leaf in leaves(error))


def call_from_threads() -> Callable[[Callable[[], None]], None]:
    """A function for any thread: it has this event loop make a call soon. Once the loop has ended, it does nothing."""
    native = current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        loop = native

        def soon(call: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call)

        return soon
    token: Any = native

    def soon_on_trio(call: Callable[[], None]) -> None:
        with suppress(import_module("trio").RunFinishedError):
            token.run_sync_soon(call)

    return soon_on_trio


def run_on_asyncio(function: Callable[[], Awaitable[T]]) -> T:
    """Run the function on an asyncio loop of its own, in this thread; whatever loop the process makes by default."""
    return anyio.run(function, backend="asyncio", backend_options={"loop_factory": asyncio.SelectorEventLoop})


def another_loop() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a function, in another thread, on a loop of the same library as this one. Both loops have the same time."""
    if isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        return run_on_asyncio
    trio = import_module("trio")
    return partial(trio.run, clock=trio.lowlevel.current_clock())


class CancelledInside(Exception):
    """A function of the user has raised CancelledError, though nothing has cancelled the call."""


@contextmanager
def calling() -> Iterator[None]:
    """A call of a function of the user during the block, in a task of ours.

    On asyncio the function raises CancelledError where it awaits a task that was cancelled. That is a failure of the
    function. Raised on, it would look like the end of our task.

    Raises:
        CancelledInside: in place of such a CancelledError.
    """
    try:
        yield
    except anyio.get_cancelled_exc_class() as error:
        if anyio.current_effective_deadline() == -inf:
            raise
        raise CancelledInside("it awaited something that was cancelled") from error
