"""Streams that stop while others go on: before a row that cannot be sent, or because the server refuses them.

Pure bookkeeping of when to ask for each of them again. A stream that stops before the same row again, or is refused
again, is asked for after a longer pause; one that got further, or was accepted meanwhile, begins with the shortest.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.errors import ReplicadError, RowUnreadable
from replicad.retry import Backoff

FIRST_PAUSE = 0.5  # seconds; the server itself tries the row again that often at first
MAX_PAUSE = 10.0


@dataclass(slots=True)
class _Stop:
    row_id: int | None  # None: the server refused the stream
    backoff: Backoff
    pause: float = 0.0
    waited: float = 0.0  # seconds for this row, or since it was accepted last, the pause included
    again_at: float = 0.0  # on this connection
    stands: bool = True  # it has stopped on this connection


class Stops:
    """The streams of one follower that have stopped. Times are seconds of one monotonic clock, handed in."""

    def __init__(self) -> None:
        self._stops: dict[str, _Stop] = {}
        self._noted: list[RowUnreadable] = []

    def note(self, error: RowUnreadable) -> None:
        """The server has said so; `take` hands it out once the lines before it are dealt with."""
        self._noted.append(error)

    def take(self) -> list[RowUnreadable]:
        """What was noted since."""
        noted, self._noted = self._noted, []
        return noted

    def stopped(self, stream: str, error: ReplicadError, now: float) -> float:
        """Begin a pause for the stream; returns its length."""
        row_id = error.row_id if isinstance(error, RowUnreadable) else None
        stop = self._stops.get(stream)
        if stop is None or stop.row_id != row_id:
            stop = self._stops[stream] = _Stop(row_id, Backoff(FIRST_PAUSE, MAX_PAUSE, jitter=0.0))
        stop.pause = stop.backoff.next_delay()
        stop.waited += stop.pause
        stop.again_at = now + stop.pause
        stop.stands = True
        return stop.pause

    def accepted(self, stream: str) -> None:
        """The server has accepted the subscription. It may still stop before the same row: that pause is kept."""
        stop = self._stops.get(stream)
        if stop is None:
            return
        if stop.row_id is None:
            del self._stops[stream]
        else:
            stop.stands = False

    def forget(self, stream: str) -> None:
        """The stream is followed no longer."""
        self._stops.pop(stream, None)

    def new_connection(self) -> None:
        """Every stream is asked for on a new connection; the lengths of pauses are kept."""
        self._noted.clear()
        for stop in self._stops.values():
            stop.stands = False

    def is_stopped(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection and was not asked for again."""
        return stream in self._stops and self._stops[stream].stands

    def is_refused(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection because the server refused it."""
        return self.is_stopped(stream) and self._stops[stream].row_id is None

    def may_ask(self, stream: str, now: float) -> bool:
        """Whether it may be asked for now; to be followed by doing so."""
        if not self.is_stopped(stream):
            return True
        if now < self._stops[stream].again_at:
            return False
        self._stops[stream].stands = False
        return True

    def due(self, now: float) -> bool:
        """Whether a pause is over."""
        return any(stop.stands and now >= stop.again_at for stop in self._stops.values())

    def delay(self, stream: str) -> float:
        """The pause that was begun last, in seconds."""
        return self._stops[stream].pause

    def waited(self, stream: str) -> float:
        """How long has been waited for the stream since it got further, in seconds, this pause included."""
        return self._stops[stream].waited
