"""One run of a job at a time, shared by all who ask for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Joined:
    """Call it to have `job` run from beginning to end after the call; one run answers all who asked before it began.

    What the run raises goes to each of them.
    """

    def __init__(self, job: Callable[[], Awaitable[None]]) -> None:
        self._job = job
        self._running = trio.Lock()
        self._asked = 0
        self._answered = 0
        self._failure: Exception | None = None

    async def __call__(self) -> None:
        """Raises what the run raises."""
        self._asked += 1
        ticket = self._asked
        async with self._running:
            if self._answered < ticket:
                await self._run()
            elif self._failure is not None:
                raise self._failure

    async def _run(self) -> None:
        upto, before = self._asked, self._answered
        self._failure = None
        self._answered = upto
        try:
            await self._job()
        except Exception as error:
            self._failure = error
            raise
        except BaseException:  # cancelled: the next who asked runs it
            self._answered = before
            raise
