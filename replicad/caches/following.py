"""Applies a client's events to the caches. No I/O: a driver brings the events.

The driver follows the stream from `NOW` and passes every event to `take`. When it ends, for any reason, it calls
`stop`: without a driver the caches are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from replicad.caches.course import Course
from replicad.caches.registry import Caches
from replicad.client.events import (
    Connected,
    Disconnected,
    GenerationBegan,
    PositionMoved,
    Reset,
    RowBatch,
    TakenUpto,
)
from replicad.client.pursuit import FollowWishes
from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.retry import Backoff

STREAM = "caches"
ENDED = "following the stream has ended"
Also = PositionMoved | GenerationBegan | Connected | Disconnected | TakenUpto
ALSO: tuple[type[Also], ...] = (
    PositionMoved,
    GenerationBegan,
    Connected,
    Disconnected,
    TakenUpto,
)  # the driver asks its follower so
RETRY_FIRST = 0.5  # seconds until following begins again after an error that a retry may not mend
RETRY_CAP = 30.0

_PROOFS = 4  # proofs of freshness in the time for which one is valid
_CATCHING_UP = "what was invalidated while there was no connection is still to come"

log = get_logger(__name__)


class Follows(Protocol):
    """A follower of either client."""

    def token(self, stream: str) -> str | None: ...

    def positions(self, stream: str) -> Mapping[str, int]: ...


def wishes(caches: Caches, backoff: Backoff | None) -> FollowWishes:
    """How the stream is followed: for ever, from now on after a reset, which empties everything."""
    return FollowWishes(
        backoff=backoff,
        after_reset="NOW",
        patience=None,
        first_patience=None,
        taken=caches.max_staleness / _PROOFS,
        merged=True,  # a row says by itself what it invalidates
    )


class Following:
    """Follows one stream for all caches of a process."""

    def __init__(self, caches: Caches, stream: str) -> None:
        self._caches = caches
        self._stream = stream
        self._course = Course()
        self._logged = False  # an outage is in the log

    def take(self, events: Sequence[RowBatch | Reset | Also], follower: Follows) -> None:
        """Handle events that came together. The positions of `follower` are those after the last one.

        All rows first: to invalidate too early is never wrong, and whatever makes caches live comes after it.
        """
        rows = [row for event in events if type(event) is RowBatch for row in event.rows]
        if rows:
            self._caches.apply(rows)
        for event in events:
            if type(event) is not RowBatch:
                self._take_other(event, follower)
        course = self._course
        if course.waits:
            course.moved(follower.positions(self._stream))
        self._caches.fresh_at = course.fresh_at
        if course.live and not self._caches.live:
            self._caches.stand(live=True)
            if self._logged:  # the log has the event that they were not live
                log.info("caches_live", stream=self._stream)

    def _take_other(self, event: RowBatch | Reset | Also, follower: Follows) -> None:
        course, now = self._course, self._caches.now
        match event:
            case Connected():
                course.connected(now())
                if not course.live:
                    self._caches.stand(live=False, problem=_CATCHING_UP)
            case TakenUpto():
                course.taken(event.token, now() - event.age)
            case Reset() | GenerationBegan():
                # A value may be from a lost transaction whose invalidation was not received.
                self._caches.empty()
                course.reset(now())
                reason = event.reason if isinstance(event, Reset) else "generation"
                log.info("caches_emptied", stream=self._stream, reason=reason)
            case Disconnected():
                was_live = course.live
                emptied = self._lost(follower.token(self._stream), str(event.error))
                if was_live:
                    self._logged = True
                    log.info("caches_not_live", stream=self._stream, emptied=emptied, reason=str(event.error))

    @contextmanager
    def session(self) -> Iterator[None]:
        """For the block in which the driver follows the stream. Errors end it, are logged, and are not raised."""
        why = ENDED
        try:
            yield
        except ReplicadError as error:
            why = str(error)
            log.warning("caches_not_followed", stream=self._stream, code=error.code, error=why)
        except Exception as error:
            why = repr(error)
            log.exception("caches_not_followed", stream=self._stream, error=why)
        finally:
            self.stop(why)

    def stop(self, why: str) -> None:
        """The driver has ended."""
        self._lost(None, why)

    def _lost(self, token: str | None, why: str) -> bool:
        emptied = self._course.lost(token)
        self._caches.stand(live=False, problem=why)
        if emptied:
            self._caches.empty()
        return emptied
