"""Keeps long-lived tasks running: a task that fails is reported, and restarted after a growing pause.

So an unexpected exception ends only the task that raised it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from replicad.daemon.troubles import Troubles
from replicad.retry import Backoff


@dataclass(frozen=True, slots=True)
class Restarts:
    """Seconds before a failed task is restarted."""

    first: float = 0.1  # before the first restart; doubles up to `longest`
    longest: float = 10.0
    steady: float = 30.0  # without a failure; then the trouble ends, and the pause begins with `first` again


CAUSE = "run"  # the cause of troubles for the failure of a whole task


async def keep_running(
    job: Callable[[], Awaitable[None]], kind: str, name: str, troubles: Troubles, restarts: Restarts = Restarts()
) -> None:
    """Run `job` until it returns or is cancelled; when it raises, report the exception and run it again."""
    backoff = Backoff(restarts.first, restarts.longest, jitter=0.0)
    while True:
        began = trio.current_time()
        failure = await _run_once(job, kind, name, troubles, restarts)
        if failure is None:
            troubles.end(kind, name, CAUSE)
            return
        troubles.fail(kind, name, CAUSE, failure)
        if trio.current_time() >= began + restarts.steady:
            backoff.reset()
        await trio.sleep(backoff.next_delay())


async def keep_service(
    run: Callable[..., Awaitable[None]],
    name: str,
    troubles: Troubles,
    restarts: Restarts = Restarts(),
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`keep_running` for `run(task_status=...)`, a service that reports when it has started.

    An exception before its first start is raised: the daemon then does not start.
    """
    status = _Status(task_status)
    began = trio.current_time()

    async def first() -> None:
        await run(task_status=status)

    async def again() -> None:
        await run(task_status=trio.TASK_STATUS_IGNORED)

    failure = await _run_once(first, "service", name, troubles, restarts)
    if failure is None:
        return
    if not status.has_started:
        raise failure
    troubles.fail("service", name, CAUSE, failure)
    await trio.sleep(restarts.first if trio.current_time() < began + restarts.steady else 0)
    await keep_running(again, "service", name, troubles, restarts)


async def _run_once(
    job: Callable[[], Awaitable[None]], kind: str, name: str, troubles: Troubles, restarts: Restarts
) -> Exception | None:
    """Run a task to its end; returns its exception. An earlier trouble ends after `restarts.steady`."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_trouble_when_steady, kind, name, troubles, restarts.steady)
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - the caller reports it
            failure = error
        except BaseExceptionGroup as group:  # a cancellation and a failure at the same moment
            failed, rest = group.split(Exception)
            if failed is not None:
                troubles.fail(kind, name, CAUSE, failed)
            if rest is not None:
                raise rest from None
        nursery.cancel_scope.cancel()
    return failure


async def _end_trouble_when_steady(kind: str, name: str, troubles: Troubles, steady: float) -> None:
    await trio.sleep(steady)
    troubles.end(kind, name, CAUSE)


class _Status(trio.TaskStatus[None]):
    """Passes `started` on, and keeps that it was called."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner
        self.has_started = False

    def started(self, value: None = None) -> None:
        self.has_started = True
        self._inner.started(value)
