"""Streams that the server stops before a row that it cannot send: when to ask for each of them again.

Pure bookkeeping. A stream that stops before the same row again is asked for after a longer pause; one that got further
begins with the shortest.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.errors import RowUnreadable

FIRST_PAUSE = 0.5  # seconds; the server itself tries the row again that often at first
MAX_PAUSE = 10.0


@dataclass(slots=True)
class _Stop:
    row_id: int | None
    pause: float
    waited: float  # seconds before this row so far, the pause included
    again_at: float  # on this connection
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

    def stopped(self, error: RowUnreadable, now: float) -> float:
        """Begin a pause for the stream; returns its length."""
        name = str(error.stream)
        pause, waited = FIRST_PAUSE, 0.0
        known = self._stops.get(name)
        if known is not None and known.row_id == error.row_id:
            pause, waited = min(2 * known.pause, MAX_PAUSE), known.waited
        self._stops[name] = _Stop(error.row_id, pause, waited + pause, now + pause)
        return pause

    def new_connection(self) -> None:
        """Every stream is asked for on a new connection; the lengths of pauses are kept."""
        self._noted.clear()
        for stop in self._stops.values():
            stop.stands = False

    def is_stopped(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection and was not asked for again."""
        return stream in self._stops and self._stops[stream].stands

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
        """How long has been waited before the row at which the stream stops, in seconds, this pause included."""
        return self._stops[stream].waited
