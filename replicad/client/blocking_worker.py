"""The worker for programs without async: the user's functions are plain, and are called in threads.

It is the async worker (`worker`) on an event loop of its own, so both have the same leases, retries and bounds.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

from replicad.client.leases import OpenClient
from replicad.client.requests import Pod
from replicad.client.worker import Batch, Worker, WorkerSettings, WorkerStatistics
from replicad.client.worker_history import TubeFork
from replicad.loops import call_from_threads, run_on_asyncio
from replicad.tubes.keys import Key

P = ParamSpec("P")
T = TypeVar("T")


class BlockingWorker:
    """`Worker` for threads: `run` blocks, and plain functions are called in threads, several at the same time.

    The arguments are those of `Worker`, but for the functions, which are not async. At most `parallelism` calls of
    `handle` run at the same time for each partition. A thread cannot be cancelled: a call that takes longer than
    `call_timeout` has failed, though its thread goes on. So give the downstream's client a shorter time limit.
    """

    def __init__(
        self,
        open_client: OpenClient,
        tube: str,
        handle: Callable[[Batch], None],
        *,
        partitions: Collection[int] | None = None,
        control: Callable[[Pod], None] | None = None,
        stale_ids: Callable[[int, int, int], Sequence[Key]] | None = None,
        on_fork: Callable[[TubeFork], None] | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        """`partitions` None: all of them."""
        self._threads: anyio.CapacityLimiter | None = None
        self._worker = Worker(
            open_client,
            tube,
            self._in_thread(handle),
            partitions=partitions,
            control=None if control is None else self._in_thread(control),
            stale_ids=None if stale_ids is None else self._in_thread(stale_ids),
            on_fork=None if on_fork is None else self._in_thread(on_fork),
            settings=settings,
        )
        self._closed = threading.Event()
        self._end: Callable[[], None] | None = None

    @property
    def statistics(self) -> WorkerStatistics:
        """The counts since the start."""
        return self._worker.statistics

    def run(self) -> None:
        """Work until `close` is called, or Ctrl-C in the main thread. Returns when the present calls have returned.

        Raises:
            UnknownTube, NotAuthorised: trying again would not help.
        """
        run_on_asyncio(self._run)

    def close(self) -> None:
        """End `run`, from any thread, from a signal handler or from `handle`; safe to repeat. Does not wait.

        Ids whose call has not returned successfully are processed again by the next worker.
        """
        self._closed.set()
        if self._end is not None:
            self._end()

    async def _run(self) -> None:
        self._threads = anyio.CapacityLimiter(float("inf"))  # the worker bounds the calls
        with anyio.CancelScope() as scope:
            self._end = partial(call_from_threads(), scope.cancel)
            if not self._closed.is_set():
                await self._worker.run()

    def _in_thread(self, function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
        async def call(*args: P.args, **named: P.kwargs) -> T:
            return await anyio.to_thread.run_sync(partial(function, *args, **named), limiter=self._threads)

        return call
