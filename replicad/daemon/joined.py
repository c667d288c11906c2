"""A job that runs once at a time; one run serves all concurrent callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import trio

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Callers(Generic[T]):
    """Callers whom one run serves: all callers since the begin of the previous run. `served`: its result, or none
    yet.
    """

    served: list[T]
    failure: Exception | None = None


class Joined(Generic[T]):
    """A call returns what a complete run of `job` returns that began after the call. One run serves all earlier calls.

    All of them go on in the same turn of the event loop: a lock that each of them has to hold would delay the last one
    by a turn for each of the others. An exception of the run is raised to each of these callers.
    """

    def __init__(self, job: Callable[..., Awaitable[T]]) -> None:
        self._job = job
        self._waiting: list[_Callers[T]] = []  # whose run was cancelled
        self._gathering: _Callers[T] = _Callers([])
        self._running: trio.Event | None = None  # set when the present run ends

    async def __call__(self, *args: Any) -> T:
        """`args`: of the job, if it is this call that begins the run. Raises what the run raises."""
        batch = self._gathering
        while not batch.served:
            if batch.failure is not None:
                raise batch.failure
            if self._running is None:
                return await self._run(*args)
            await self._running.wait()
        return batch.served[0]

    async def _run(self, *args: Any) -> T:
        """Run the job for all callers of now. If it is cancelled, another caller runs it."""
        batches = [*self._waiting, self._gathering]
        self._waiting, self._gathering = [], _Callers([])
        running = self._running = trio.Event()
        try:
            found = await self._job(*args)
        except Exception as error:
            for batch in batches:
                batch.failure = error
            raise
        except BaseException:
            self._waiting = batches
            raise
        else:
            for batch in batches:
                batch.served.append(found)
            return found
        finally:
            self._running = None
            running.set()
