"""Keeps long-lived tasks running: one that fails is reported, and begun again after a pause that grows.

So an exception that nobody expected ends the smallest thing that it concerns. What a task does is not known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from replicad.daemon.troubles import Troubles

FIRST_PAUSE = 0.1  # seconds before a failed task is begun again; doubles up to MAX_PAUSE
MAX_PAUSE = 10.0
STEADY = 30.0  # seconds of work after which the trouble is over, and the next failure is a new one

CAUSE = "run"  # the cause under which the end of a whole task is reported


async def keep_running(job: Callable[[], Awaitable[None]], kind: str, name: str, troubles: Troubles) -> None:
    """Run `job` until it returns or is cancelled; when it raises, report that and run it again."""
    pause = FIRST_PAUSE
    while True:
        began = trio.current_time()
        failure = await _run_once(job, kind, name, troubles)
        if failure is None:
            troubles.end(kind, name, CAUSE)
            return
        troubles.fail(kind, name, CAUSE, failure)
        if trio.current_time() >= began + STEADY:
            pause = FIRST_PAUSE
        await trio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


async def keep_service(
    run: Callable[..., Awaitable[None]],
    name: str,
    troubles: Troubles,
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

    failure = await _run_once(first, "service", name, troubles)
    if failure is None:
        return
    if not status.has_started:
        raise failure
    troubles.fail("service", name, CAUSE, failure)
    await trio.sleep(FIRST_PAUSE if trio.current_time() < began + STEADY else 0)
    await keep_running(again, "service", name, troubles)


async def _run_once(job: Callable[[], Awaitable[None]], kind: str, name: str, troubles: Troubles) -> Exception | None:
    """Run a task to its end; returns what it raised. While it lasts, an earlier trouble ends after STEADY seconds."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_trouble_when_steady, kind, name, troubles)
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


async def _end_trouble_when_steady(kind: str, name: str, troubles: Troubles) -> None:
    await trio.sleep(STEADY)
    troubles.end(kind, name, CAUSE)


class _Status(trio.TaskStatus[None]):
    """Passes `started` on, and remembers that it came."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner
        self.has_started = False

    def started(self, value: None = None) -> None:
        self.has_started = True
        self._inner.started(value)
