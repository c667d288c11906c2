"""Keeps long-lived tasks running: one that fails is reported, and begun again after a pause that grows.

So an exception that nobody expected ends the smallest thing that it concerns. What a task does is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from replicad.daemon.troubles import Troubles


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a failed task is begun again, in seconds."""

    first: float = 0.1  # before the first time; doubles up to `longest`
    longest: float = 10.0
    steady: float = 30.0  # of work after which the trouble is over, and the next failure is a new one


CAUSE = "run"  # the cause under which the end of a whole task is reported


async def keep_running(
    job: Callable[[], Awaitable[None]], kind: str, name: str, troubles: Troubles, restarts: Restarts = Restarts()
) -> None:
    """Run `job` until it returns or is cancelled; when it raises, report that and run it again."""
    pause = restarts.first
    while True:
        began = trio.current_time()
        failure = await _run_once(job, kind, name, troubles, restarts)
        if failure is None:
            troubles.end(kind, name, CAUSE)
            return
        troubles.fail(kind, name, CAUSE, failure)
        if trio.current_time() >= began + restarts.steady:
            pause = restarts.first
        await trio.sleep(pause)
        pause = min(2 * pause, restarts.longest)


async def keep_service(
    run: Callable[..., Awaitable[None]],
    name: str,
    troubles: Troubles,
    restarts: Restarts = Restarts(),
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`keep_running` for `run(task_status=...)`, a service that says when it has started.

    What it raises before it has started for the first time goes to whoever starts it: the daemon cannot start then,
    and says why.
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
    """Run a task to its end; returns what it raised. An earlier trouble ends after `restarts.steady`."""
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
    """Passes `started` on, and remembers that it came."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner
        self.has_started = False

    def started(self, value: None = None) -> None:
        self.has_started = True
        self._inner.started(value)
