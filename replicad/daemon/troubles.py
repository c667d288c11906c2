"""The present troubles of streams, tubes and services: logged when one begins, when its reason changes, when it ends.

`keep_running` keeps a long-lived task at work, so that an unexpected exception ends only the task that raised it.

A *thing* is named by a kind (`stream`, `tube`, `session`, `service`) and a name. A thing can have several troubles at
once, one for each *cause*: a short word for the work that fails (`registry`, `copy`, `backfill`). The state of a
thing is the list of its troubles; it is ok when there are none.

All exceptions of long-lived tasks are reported here. So no failure is silent: each failure is counted, logged with its
reason (a defect of replicad with its traceback), and shown until it is over. The one exception is an outage of
Postgres: the poller reports it once, and failures that it causes are only counted.

This file does not know the tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog
import trio

from replicad.errors import DatabaseUnavailable, ReplicadError
from replicad.groups import Reporting, sole_leaf
from replicad.retry import Backoff

DATABASE = "database"  # the kind of the trouble that the poller reports while Postgres is away
AWAY_GRACE = 3.0  # seconds until a lost connection counts as a trouble of its own; the poller finds an outage sooner
QUIET = 10.0  # seconds between two log lines of `record` with the same kind and cause
MAX_REASON = 2000  # characters of a reason; a driver's message can quote a whole row

log = structlog.get_logger()


class Place(NamedTuple):
    """Where a trouble is: kind and name of the thing, and the cause."""

    kind: str
    name: str
    cause: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble. `reason` is a sentence for the operator, `code` its class (`ReplicadError.code`, or the exception's
    name for a defect), `since` the monotonic time in seconds at which it began.
    """

    place: Place
    code: str
    reason: str
    since: float


class Troubles:
    """All troubles of one daemon. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = trio.current_time) -> None:
        self._now = now
        self._current: dict[Place, Trouble] = {}
        self._causes: dict[tuple[str, str], set[str]] = {}  # of the present troubles, by kind and name
        self._suspected: dict[Place, float] = {}  # lost connections: since when
        self._changed = trio.Event()
        self._quiet: dict[tuple[str, str], tuple[float, int]] = {}  # until when, and how many were not logged
        self.counts: Counter[tuple[str, str, str]] = Counter()  # (kind, cause, code): reports since the start
        self.by_service: Counter[str] = Counter()  # name of a service: the same

    # --- reporting ---

    def begin(self, kind: str, name: str, cause: str, reason: str, *, code: str) -> None:
        """Report a trouble. A repeated report with the same reason is counted and not logged."""
        self._count(kind, name, cause, code)
        place, reason = Place(kind, name, cause), reason[:MAX_REASON]
        known = self._current.get(place)
        if known is not None and (known.code, known.reason) == (code, reason):
            return
        if kind == DATABASE:
            self._explain()
        since = self._now() if known is None else known.since
        self._current[place] = Trouble(place, code, reason, since)
        self._causes.setdefault((kind, name), set()).add(cause)
        event = "trouble_began" if known is None else "trouble_changed"
        log.warning(event, kind=kind, name=name, cause=cause, code=code, reason=reason)
        self._notify()

    def fail(self, kind: str, name: str, cause: str, error: BaseException) -> None:
        """Report an exception as a trouble. A defect of replicad is logged with its traceback each time."""
        group, error = error, sole_leaf(error)
        if isinstance(error, DatabaseUnavailable) and self._is_outage(Place(kind, name, cause)):
            self._count(kind, name, cause, error.code)
            return
        if isinstance(error, ReplicadError):
            self.begin(kind, name, cause, str(error), code=error.code)
            return
        log.error("unexpected_failure", kind=kind, name=name, cause=cause, exc_info=group)
        what = f"{type(error).__name__}: {error}".strip(": ")
        self.begin(kind, name, cause, f"unexpected {what}; the log has the traceback", code=type(error).__name__)

    def record(self, kind: str, name: str, cause: str, error: BaseException) -> None:
        """Report a failure that does not last, because its message or session has ended.

        It is counted and logged (a defect of replicad with its traceback), and is not part of any state. Clients can
        cause such failures, so for each kind and cause a failure is logged every QUIET seconds, with the number left
        out.
        """
        code = error.code if isinstance(error, ReplicadError) else type(error).__name__
        self._count(kind, name, cause, code)
        until, left_out = self._quiet.get((kind, cause), (float("-inf"), 0))
        if self._now() < until:
            self._quiet[kind, cause] = (until, left_out + 1)
            return
        self._quiet[kind, cause] = (self._now() + QUIET, 0)
        fields = {"kind": kind, "name": name[:MAX_REASON], "cause": cause, "code": code, "left_out": left_out}
        if isinstance(error, ReplicadError):
            log.warning("failure_contained", **fields, reason=str(error)[:MAX_REASON])
        else:
            log.error("unexpected_failure", **fields, exc_info=error)

    def end(self, kind: str, name: str, cause: str) -> None:
        """End the trouble of this cause. Safe to repeat, and cheap while there is none."""
        place = Place(kind, name, cause)
        self._suspected.pop(place, None)
        known = self._current.pop(place, None)
        if kind == DATABASE:  # others that lost their connection get the grace anew, from now
            self._suspected.clear()
        if known is not None:
            self._causes[kind, name].discard(cause)
            if not self._causes[kind, name]:
                del self._causes[kind, name]
            lasted = round(self._now() - known.since, 1)
            log.info("trouble_over", kind=kind, name=name, cause=cause, code=known.code, lasted_s=lasted)
            self._notify()

    def forget(self, kind: str, name: str) -> None:
        """End all troubles of a thing that was removed."""
        suspected = {place.cause for place in self._suspected if place[:2] == (kind, name)}
        for cause in suspected | self._causes.get((kind, name), set()):
            self.end(kind, name, cause)

    @contextmanager
    def contain(self, kind: str, name: str, cause: str) -> Iterator[None]:
        """Report an exception of the block as a trouble; a block that succeeds ends it. Cancellation passes."""
        with Reporting(lambda error: self.fail(kind, name, cause, error)):
            yield
            self.end(kind, name, cause)

    def contain_and_record(self, kind: str, name: str, cause: str) -> Reporting:
        """`contain` for a block that is not tried again: an exception is passed to `record`."""
        return Reporting(partial(self.record, kind, name, cause))

    # --- looking ---

    def current(self) -> list[Trouble]:
        """All troubles, the oldest first."""
        return sorted(self._current.values(), key=lambda trouble: trouble.since)

    def of(self, kind: str, name: str) -> list[Trouble]:
        """The troubles of one thing."""
        causes = self._causes.get((kind, name), ())
        return sorted((self._current[Place(kind, name, cause)] for cause in causes), key=lambda one: one.since)

    def names(self, kind: str) -> set[str]:
        """The things of one kind that have troubles."""
        return {name for of_kind, name in self._causes if of_kind == kind}

    def why(self, kind: str, name: str) -> str | None:
        """The reasons of one thing's troubles in one text; None if it has none."""
        return " Also: ".join(trouble.reason for trouble in self.of(kind, name)) or None

    def next_change(self) -> trio.Event:
        """An event that is set at the next change. Get it before reading the state, then wait for it."""
        return self._changed

    def now(self) -> float:
        """The clock of `Trouble.since`."""
        return self._now()

    # --- inside ---

    def _count(self, kind: str, name: str, cause: str, code: str) -> None:
        self.counts[kind, cause, code] += 1
        if kind == "service":  # their names are in the code, so there are few; names of streams and peers are not
            self.by_service[name] += 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _explain(self) -> None:
        """The poller reports an outage: end the troubles of others that have only lost their connection."""
        for place, trouble in list(self._current.items()):
            if place.kind != DATABASE and trouble.code == DatabaseUnavailable.code:
                self.end(*place)

    def _is_outage(self, place: Place) -> bool:
        """Whether an outage of Postgres explains a lost connection, or may still be found to explain it."""
        if any(trouble.place.kind == DATABASE for trouble in self._current.values()):
            return True
        return self._now() < self._suspected.setdefault(place, self._now()) + AWAY_GRACE


# Keeps long-lived tasks running: a task that fails is reported, and restarted after a growing pause.
#
# So an unexpected exception ends only the task that raised it.


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
