"""When each destination is due: a heap of names and times, with few stale entries. Does no I/O."""

from __future__ import annotations

import heapq

_SLACK = 64  # stale entries that do not cause a rebuild


class Agenda:
    """At most one time per name; memory in proportion to the names, however often they are put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._current: dict[str, tuple[float, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._current)

    def put(self, name: str, at: float) -> None:
        """Make `name` due at `at`. An earlier entry of it is replaced."""
        if name in self._current and self._current[name][0] == at:
            return
        self._count += 1
        self._current[name] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, name))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(when, count, known) for known, (when, count) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Remove `name`."""
        self._current.pop(name, None)

    def pop_due(self, now: float) -> list[str]:
        """Take out all that are due at `now`, the earliest first, in the order of `put` where times are equal."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            at, count, name = heapq.heappop(self._heap)
            if self._current.get(name) == (at, count):
                del self._current[name]
                due.append(name)
        return due

    def next_time(self) -> float | None:
        """The time at which the next one is due, or None."""
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
