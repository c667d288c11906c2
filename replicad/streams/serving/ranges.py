"""How many rows a table has far below the position, by ranges of ids, for the audit to find rows that turn up there.

Nearer to the position the audit compares ids. Of all rows below it keeps numbers. Each range is counted in turn; what
is more than at the count before has turned up since. Fewer rows are no fault: some were removed. Does no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple, Self

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1  # the bounds of all ids
GRAIN = 10_000  # rows up to which a range is joined with the next one
MOST_RANGES = 2048  # of one stream, some 400 kB; with more, two that follow one another become one


class CountedRange(NamedTuple):
    """The ids in (after, upto]. `rows`: how many rows there were at the last count, None before the first.

    `since`: transactions with lower numbers had ended at that count.
    """

    after: int
    upto: int
    rows: int | None = None
    since: int = 0

    def joined(self, later: CountedRange) -> CountedRange:
        """This range and the one that follows it, as one. It was counted if both were."""
        rows = None if self.rows is None or later.rows is None else self.rows + later.rows
        return CountedRange(self.after, later.upto, rows, min(self.since, later.since))


@dataclass(slots=True)
class CountedRanges:
    """All ids up to `upto`, in ranges that follow one another. `turn`: where the next one to be counted begins."""

    ranges: list[CountedRange] = field(default_factory=list)
    turn: int = LOWEST

    def copy(self) -> Self:
        """A copy to be changed."""
        return type(self)(list(self.ranges), self.turn)

    @property
    def upto(self) -> int:
        """The last id."""
        return self.ranges[-1].upto if self.ranges else LOWEST

    def reach(self, upto: int) -> None:
        """All ids up to here belong to ranges, the new ones to one that was not counted."""
        if upto > self.upto:
            self.ranges.append(CountedRange(self.upto, upto))
            if len(self.ranges) > MOST_RANGES:
                self.ranges[:] = list(_halved(self.ranges))

    def cut(self, upto: int) -> None:
        """Forget all ids above this one. What is left of a range was not counted."""
        kept = [one for one in self.ranges if one.upto <= upto]
        rest = self.ranges[len(kept) : len(kept) + 1]
        self.ranges = kept + [CountedRange(one.after, upto) for one in rest if one.after < upto]

    def forget(self, after: int, upto: int) -> None:
        """Forget how many rows the ranges have with ids in (after, upto]."""
        self.ranges = [
            CountedRange(one.after, one.upto) if one.after < upto and after < one.upto else one for one in self.ranges
        ]

    def due(self) -> Iterable[int]:
        """Where the ranges begin, in the order in which they are to be counted: by turns one that never was, the last
        first, and one of the others.
        """
        new = [one.after for one in reversed(self.ranges) if one.rows is None]
        known = [one.after for one in self.ranges if one.rows is not None]
        first = bisect_left(known, self.turn)
        both = zip_longest(new, [*known[first:], *known[:first]])
        return [after for pair in both for after in pair if after is not None]

    def beginning(self, after: int) -> CountedRange | None:
        """The range that begins there; None if it was joined with the one before."""
        at = bisect_left(self.ranges, after, key=attrgetter("after"))
        return self.ranges[at] if at < len(self.ranges) and self.ranges[at].after == after else None

    def note(self, counted: CountedRange) -> None:
        """A range was counted, or its lower part; then the upper one was not."""
        at = bisect_left(self.ranges, counted.after, key=attrgetter("after"))
        whole = self.ranges[at]
        if whole.rows is not None:
            self.turn = whole.upto
        found = [counted] if counted.upto == whole.upto else [counted, CountedRange(counted.upto, whole.upto)]
        joined = self.ranges[at - 1].joined(counted) if at else counted
        if at and joined.rows is not None and joined.rows <= GRAIN:
            self.ranges[at - 1 : at + 1] = [joined, *found[1:]]
        else:
            self.ranges[at : at + 1] = found
        if len(self.ranges) > MOST_RANGES:
            self.ranges[:] = list(_halved(self.ranges))


def _halved(ranges: list[CountedRange]) -> Iterator[CountedRange]:
    for first in range(0, len(ranges), 2):
        pair = ranges[first : first + 2]
        yield pair[0].joined(pair[1]) if len(pair) > 1 else pair[0]
