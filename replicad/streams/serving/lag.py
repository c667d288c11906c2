"""For how long ids of one stream have been waiting, and its position has been held back. From readings, without SQL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from replicad.positions.horizon import Reading

MARKS = 64  # kept for each stream; when there are more, two neighbours become one


class Lag:
    """Remembers when the sequence of a stream was first seen at which value."""

    __slots__ = ("_held", "_marks", "_moved_at", "_position")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # (when, last value), both rising
        self._position: int | None = None
        self._moved_at = 0.0
        self._held = False

    def observe(self, reading: Reading, now: float, published: Callable[[], int | None]) -> None:
        """Take a reading. `published` returns up to where readers were sent all rows; it is seldom called."""
        last, marks = reading.last_value, self._marks
        if reading.position != self._position or not self._held:
            self._position, self._moved_at = reading.position, now
        self._held = reading.held_by is not None
        if last is None or (marks and marks[-1][1] == last):
            return
        if marks and last < marks[-1][1]:  # the sequence was set back
            marks.clear()
        marks.append((now, last))
        if len(marks) > MARKS:
            self._drop(published())
        if len(marks) > MARKS:
            kept = list(marks)  # an earlier time with a later value: the lag is never shown too short
            marks.clear()
            marks.extend((kept[i][0], kept[min(i + 1, len(kept) - 1)][1]) for i in range(0, len(kept), 2))

    def seconds(self, published: int | None, now: float) -> float:
        """Time since the first id above `published` was seen; 0 if there is none. None: nothing is published."""
        self._drop(published)
        return max(0.0, now - self._marks[0][0]) if self._marks else 0.0

    def held_seconds(self, now: float) -> float | None:
        """For how long the position has not moved while it is held back; None if it is not held back."""
        return max(0.0, now - self._moved_at) if self._held else None

    def _drop(self, published: int | None) -> None:
        while published is not None and self._marks and self._marks[0][1] <= published:
            self._marks.popleft()
