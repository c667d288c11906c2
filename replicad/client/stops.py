"""Streams that stop while others go on: before an unreadable row, or because the server refuses them.

Decides when to subscribe to each of them again; does no I/O. The pause grows while a stream stops before the same row
or is refused again. It begins with the shortest when the stream has advanced or was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.errors import ReplicadError, RowUnreadable
from replicad.retry import Backoff

FIRST_PAUSE = 0.5  # seconds; about as often as the server tries the row again at first
MAX_PAUSE = 10.0


@dataclass(slots=True)
class _Stop:
    row_id: int | None  # None: the server refused the stream
    backoff: Backoff
    pause: float = 0.0
    waited: float = 0.0  # seconds in all for this row or refusal, including the present pause
    again_at: float = 0.0  # when to subscribe again on this connection
    stands: bool = True  # it has stopped on this connection


class Stops:
    """The streams of one follower that have stopped. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._stops: dict[str, _Stop] = {}
        self._noted: list[RowUnreadable] = []

    def note(self, error: RowUnreadable) -> None:
        """Keep the server's error; `take` returns it when the lines before it are handled."""
        self._noted.append(error)

    def take(self) -> list[RowUnreadable]:
        """The errors since the last call."""
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
        """The server has accepted the subscription. The pause is kept, since it may stop before the same row again."""
        stop = self._stops.get(stream)
        if stop is None:
            return
        if stop.row_id is None:
            del self._stops[stream]
        else:
            stop.stands = False

    def forget(self, stream: str) -> None:
        """The stream is no longer followed."""
        self._stops.pop(stream, None)

    def new_connection(self) -> None:
        """A new connection subscribes to every stream; the lengths of pauses are kept."""
        self._noted.clear()
        for stop in self._stops.values():
            stop.stands = False

    def is_stopped(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection and was not subscribed to again."""
        return stream in self._stops and self._stops[stream].stands

    def is_refused(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection because the server refused it."""
        return self.is_stopped(stream) and self._stops[stream].row_id is None

    def may_ask(self, stream: str, now: float) -> bool:
        """Whether to subscribe now. After True the caller must subscribe."""
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
        """The length of the last pause, in seconds."""
        return self._stops[stream].pause

    def waited(self, stream: str) -> float:
        """Seconds waited since the stream last advanced, including this pause."""
        return self._stops[stream].waited
