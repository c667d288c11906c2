"""The counts of the sent rows of one stream by stretches of ids, until the audit compares them with the table.

The lines that went into the journal, or to a client that catches up, are counted. The counts never come from a query. A
stretch is the range of ids of one copy. Copies that follow one another make a run. Does no I/O.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from replicad.streams.row_pieces import Segment
from replicad.streams.row_text import Range

MOST = 1024  # stretches of a run that are kept; with more, two that follow one another become one
MOST_RUNS = 256  # of one order, or of one client that catches up; and orders and clients of one stream
COUNTED = 0.5e9  # bytes of lines that are counted in a second (measured: 0.8e9)
COUNTING = 0.01  # of the time of reading, to count the lines of old rows
FREE = 0.1  # seconds of counting that are free
_TOKEN = re.compile(rb"^RDATA [^ ]+ [^ ]+ ([^ ]+) ", re.MULTILINE)

Bounds = Mapping[str, int]


def spans_of(
    after: Bounds, upto: Bounds, *, one: bool, others_after: int | None = None
) -> tuple[dict[str, Range], Range | None]:
    """A range for each listed writer, and the range of all others. Writers that are not listed are at the lowest
    position of the listed ones; `others_after` replaces their lower bound. `one`: there is only one writer.
    """
    ranges = {name: (after[name], at) for name, at in upto.items()}
    if one:
        return {name: span for name, span in ranges.items() if span[0] < span[1]}, None
    lowest = min(after.values(), default=None) if others_after is None else others_after
    others = None if lowest is None else (lowest, max(lowest, min(upto.values(), default=lowest)))
    return ranges, others


@dataclass(slots=True)
class Stretch:
    """The rows with ids in (after, upto] of each writer: `rows` of them were sent, the last one at `at`.

    `chunks`: the numbers of the first chunk of the journal that has them, and of the one behind the last; None if they
    did not go into a journal. `others`: the range of writers that are not listed, where it does not follow from the
    others.
    """

    after: Bounds
    upto: Bounds
    rows: int
    at: float
    chunks: range | None = None
    others: Range | None = None

    def joined(self, later: Stretch) -> Stretch:
        """This stretch and the next, as one."""
        chunks = None
        if self.chunks is not None and later.chunks is not None:
            chunks = range(self.chunks.start, later.chunks.stop)
        return Stretch(self.after, later.upto, self.rows + later.rows, later.at, chunks)

    @property
    def lowest(self) -> int:
        """All its rows have ids above this one."""
        return min(self.after.values())

    @property
    def highest(self) -> int:
        """All its rows have ids up to this one."""
        return max(self.upto.values())


@dataclass(frozen=True, slots=True)
class Run:
    """Stretches that follow one another, in one order of the stream or to one client that catches up.

    `one`: of all writers together; else of several, each with its own bounds.
    """

    order: Hashable
    one: bool
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The rows that were sent."""
        return sum(stretch.rows for stretch in self.stretches)

    @property
    def chunks(self) -> range | None:
        """The chunks of the journal that have the rows; None if they did not go into a journal."""
        first, last = self.stretches[0].chunks, self.stretches[-1].chunks
        return None if first is None or last is None else range(first.start, last.stop)

    def segment(self, first: int = 0, end: int | None = None) -> Segment:
        """The ids of some of the stretches, those from `first` to before `end`."""
        some = self.stretches[first:end]
        after, upto = some[0].after, some[-1].upto
        lowest, highest = some[0].lowest, some[-1].highest
        if self.one:
            return Segment(lowest, highest)
        ranges, others = spans_of(after, upto, one=False)
        return Segment(lowest, highest, tuple(sorted(ranges.items())), some[0].others or others)

    def last(self, rows: int) -> Run:
        """The last stretches with at most so many rows, but one at least."""
        found: list[Stretch] = []
        for stretch in reversed(self.stretches):
            rows -= stretch.rows
            if found and rows < 0:
                break
            found.append(stretch)
        return Run(self.order, self.one, found[::-1])


class Tally:
    """The runs of one stream that wait for the audit, and counts since the start."""

    def __init__(self) -> None:
        self.rows = 0  # that were sent: in each order once, and to clients that caught up
        self.audited_rows = 0
        self.skipped = 0  # rows that were found not to have been sent
        self.reading = 0.0  # seconds that the reads took
        self.auditing = 0.0  # seconds that the comparison took
        self._counting = 0.0  # seconds that it took to count the lines of old rows
        self._runs: dict[Hashable, list[Run]] = {}

    def add(
        self,
        order: str,
        after: Bounds,
        upto: Bounds,
        rows: int,
        at: float,
        *,
        one: bool,
        seconds: float = 0.0,
        chunks: range | None = None,
    ) -> None:
        """`rows` rows of (after, upto] went into the journal at `at`; to read them took so many seconds. Where `after`
        is the object that was the last `upto` of this order, the stretch follows the one before. `one`: as in `Run`.
        """
        self.rows += rows
        self.reading += seconds
        runs = self._runs.setdefault(order, [])
        if not (runs and runs[-1].one == one and runs[-1].stretches[-1].upto is after):
            self._begin(Run(order, one))
        stretches = self._runs[order][-1].stretches
        stretches.append(Stretch(after, upto, rows, at, chunks))
        if len(stretches) > MOST:
            stretches[:] = list(_halved(stretches))

    def affords(self, size: int) -> bool:
        """Whether so many bytes of old rows may be counted. Where they may not, the audit leaves them out."""
        if self._counting > self.reading * COUNTING + FREE:
            return False
        self._counting += size / COUNTED
        return True

    def add_piece(self, client: Hashable, segment: Segment, rows: int, at: float) -> None:
        """`rows` rows of the segment were sent to a client that catches up."""
        self.rows += rows
        runs = self._runs.get(client)
        if segment.ranges is not None:
            after, upto = ({name: span[end] for name, span in segment.ranges} for end in (0, 1))
            others = segment.others or (segment.upto, segment.upto)
            self._begin(Run(client, one=False, stretches=[Stretch(after, upto, rows, at, None, others)]))
            return
        if not (runs and runs[-1].one and runs[-1].stretches[-1].highest == segment.after):
            self._begin(Run(client, one=True))
        self._runs[client][-1].stretches.append(Stretch({"": segment.after}, {"": segment.upto}, rows, at))

    def _begin(self, run: Run) -> None:
        runs = self._runs.setdefault(run.order, [])
        runs.append(run)
        if len(runs) > MOST_RUNS:  # it is not compared, as the counts show
            del runs[0]
        if len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]

    def take(self, before: float) -> list[Run]:
        """Remove and return the counts up to the time `before`."""
        found: list[Run] = []
        for order, runs in list(self._runs.items()):
            left = []
            for run in runs:
                old = sum(stretch.at <= before for stretch in run.stretches)
                if old:
                    found.append(Run(order, run.one, run.stretches[:old]))
                if old < len(run.stretches):
                    left.append(Run(order, run.one, run.stretches[old:]))
            if left:
                self._runs[order] = left
            else:
                del self._runs[order]
        return found

    def give_back(self, runs: Iterable[Run]) -> None:
        """The comparison was not possible: keep the runs for later."""
        for run in reversed(list(runs)):
            if run.order in self._runs or len(self._runs) < MOST_RUNS:
                kept = self._runs.setdefault(run.order, [])
                if len(kept) < MOST_RUNS:
                    kept.insert(0, run)

    def fork(self, shared: int, order: Hashable = None) -> None:
        """Forget the counts above the position that is shared with the next generation, in one order or to clients
        that catch up.
        """
        for one, runs in list(self._runs.items()):
            if one != order and (order is not None or isinstance(one, str)):
                continue
            kept = [Run(one, run.one, [at for at in run.stretches if at.highest <= shared]) for run in runs]
            self._runs[one] = [run for run in kept if run.stretches]
            if not self._runs[one]:
                del self._runs[one]


def _halved(stretches: list[Stretch]) -> Iterator[Stretch]:
    for first in range(0, len(stretches), 2):
        pair = stretches[first : first + 2]
        yield pair[0].joined(pair[1]) if len(pair) > 1 else pair[0]


def ids_of(data: bytes) -> Counter[int]:
    """How many lines of RDATA each id has in whole lines that end at the end of an id."""
    found: Counter[int] = Counter()
    batch = 0
    for word in _TOKEN.findall(data):
        batch += 1
        if word != b"batch":
            found[int(word)] += batch
            batch = 0
    return found
