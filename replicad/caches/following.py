"""Decides when the caches are live, and applies a client's events to them. No I/O: a driver brings the events.

Caches are *live* while two things are true. There is a connection on which all later invalidations will come. All
invalidations before it have been applied.

- On the first connection nothing is cached, so the caches are live at once. Later invalidations come on the connection.
- Entries from before a lost connection are valid only when the rows in between have been applied. Positions do not
  show up to where those rows go, because an open transaction may hold the positions back. So on every connection the
  client asks up to which id there are rows (TAKEN). The caches are live again when every writer has reached that id.
- The client asks again and again. When every writer has reached the id of a TAKEN that was sent at `fresh_at`,
  everything that was committed by then has been applied. So a daemon that is cut off from Postgres, or whose
  positions are held back, is noticed although it reports no error.
- If the token cannot resume (there is none yet, or the server refuses it), the caches are emptied. Empty caches are
  live at once, as on a first connection.

The driver follows the stream from `NOW` and passes every event to `take`. When it ends, for any reason, it calls
`stop`: without a driver the caches are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from replicad.caches.registry import Caches
from replicad.client.events import Connected, Disconnected, GenerationBegan, PositionMoved, Reset, RowBatch, TakenUpto
from replicad.client.follow_loop import FollowWishes
from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.retry import Backoff

_NO_TOKENS = frozenset({None, "NOW", "EARLIEST"})  # a subscription with such a token does not resume


class LivenessState:
    """When the caches of one process are live. Pure: no I/O, no clock. Apply rows first, then read `live`.

    Times are seconds of one clock.
    """

    __slots__ = ("_asked_at", "_connected", "_goal", "_kept", "fresh_at", "live")

    def __init__(self) -> None:
        self.live = False
        self.fresh_at = 0.0  # everything committed by then has been applied to the caches
        self._connected = False
        self._kept = False  # there may be entries from before the present connection
        self._goal: int | None = None  # the id that every writer must reach
        self._asked_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether `moved` must be called with positions."""
        return self._goal is not None

    def connected(self, now: float) -> None:
        """A connection was made."""
        self._connected = True
        self._become_live(now)

    def taken(self, upto: int, at: float) -> None:
        """The answer to a TAKEN that was sent at `at`: ids were given out up to `upto`. An earlier goal comes first.

        If the ids went back meanwhile, the new goal replaces the earlier one, which would never be reached.
        """
        if self._connected and (self._goal is None or upto < self._goal):
            self._goal, self._asked_at = upto, at

    def moved(self, positions: Mapping[str, int]) -> None:
        """Everything up to these positions, by writer, has been applied."""
        if self._goal is not None and min(positions.values(), default=self._goal - 1) >= self._goal:
            self._goal = None
            self._kept = False
            self.live = True
            self.fresh_at = self._asked_at

    def reset(self, now: float) -> None:
        """The stream was reset: the caches must be emptied."""
        self._kept = False
        self._goal = None
        if self._connected:
            self._become_live(now)

    def lost(self, token: str | None) -> bool:
        """The connection was lost, or not made. The next one begins with `token`. True: the caches must be emptied."""
        had = self.live or self._kept
        self._kept = had and token not in _NO_TOKENS
        self._connected = self.live = False
        self._goal = None
        return had and not self._kept

    def _become_live(self, now: float) -> None:
        """Become live at once, because nothing is cached."""
        if not self._kept:
            self.live = True
            self.fresh_at = now


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

_PROOFS = 4  # proofs of freshness in the time for which a proof is valid
_CATCHING_UP = "invalidations that were committed without a connection are still missing"

log = get_logger(__name__)


class Follows(Protocol):
    """A follower of either client."""

    def token(self, stream: str) -> str | None: ...

    def positions(self, stream: str) -> Mapping[str, int]: ...


def wishes(caches: Caches, backoff: Backoff | None) -> FollowWishes:
    """The wishes for following the stream: for ever; after a reset, which empties the caches, from `NOW`."""
    return FollowWishes(
        backoff=backoff,
        after_reset="NOW",
        patience=None,
        first_patience=None,
        taken=caches.max_staleness / _PROOFS,
        merged=True,  # a row says by itself what it invalidates
    )


class InvalidationFollower:
    """Applies the events of one stream to all caches of a process."""

    def __init__(self, caches: Caches, stream: str) -> None:
        self._caches = caches
        self._stream = stream
        self._liveness = LivenessState()
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
        liveness = self._liveness
        if liveness.waits:
            liveness.moved(follower.positions(self._stream))
        self._caches.fresh_at = liveness.fresh_at
        if liveness.live and not self._caches.live:
            self._caches.stand(live=True)
            if self._logged:  # the log has the event that they were not live
                log.info("caches_live", stream=self._stream)

    def _take_other(self, event: RowBatch | Reset | Also, follower: Follows) -> None:
        liveness, now = self._liveness, self._caches.now
        match event:
            case Connected():
                liveness.connected(now())
                if not liveness.live:
                    self._caches.stand(live=False, problem=_CATCHING_UP)
            case TakenUpto():
                liveness.taken(event.token, now() - event.age)
            case Reset() | GenerationBegan():
                # A value may be from a lost transaction whose invalidation was not received.
                self._caches.empty()
                liveness.reset(now())
                reason = event.reason if isinstance(event, Reset) else "generation"
                log.info("caches_emptied", stream=self._stream, reason=reason)
            case Disconnected():
                was_live = liveness.live
                emptied = self._lost(follower.token(self._stream), str(event.error))
                if was_live:
                    self._logged = True
                    log.info("caches_not_live", stream=self._stream, emptied=emptied, reason=str(event.error))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Wraps the block in which the driver follows the stream. Errors end it, are logged, and are not raised."""
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
        emptied = self._liveness.lost(token)
        self._caches.stand(live=False, problem=why)
        if emptied:
            self._caches.empty()
        return emptied
