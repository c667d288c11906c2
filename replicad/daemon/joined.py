"""A job that runs once at a time; one run serves all concurrent callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Joined:
    """A call returns after a complete run of `job` that began after the call. One run serves all earlier calls.

    An exception of the run is raised to each of these callers.
    """

    def __init__(self, job: Callable[[], Awaitable[None]]) -> None:
        self._job = job
        self._running = trio.Lock()
        self._calls = 0
        self._served = 0  # calls, the first of them first
        self._failure: Exception | None = None

    async def __call__(self) -> None:
        """Raises what the run raises."""
        self._calls += 1
        ticket = self._calls
        async with self._running:
            if self._served < ticket:
                await self._run()
            elif self._failure is not None:
                raise self._failure

    async def _run(self) -> None:
        before, self._served = self._served, self._calls
        self._failure = None
        try:
            await self._job()
        except Exception as error:
            self._failure = error
            raise
        except BaseException:  # cancelled: the next caller runs it
            self._served = before
            raise
