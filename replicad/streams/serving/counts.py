"""Counts of one stream: the sent rows by stretches of ids, until the audit compares them with the table; the figures of
what clients were sent; and for how long ids have waited.

The lines that went into the journal, or to a client that catches up, are counted. The counts never come from a query. A
stretch is the range of ids of one copy. Copies that follow one another make a run. Does no I/O.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import trio

from replicad.daemon.journal import ChannelStatistics
from replicad.positions.horizon import Reading
from replicad.streams.row_pieces import Piece, Segment
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


# What is measured of one served stream for figures: what its clients were sent, and for how long ids have waited.

MINUTE = 60  # seconds; bytes are kept by the second in which they were sent, so at most 60 numbers are kept
MARKS = 64  # kept for each stream; when there are more, two neighbours become one


class SentCounts:
    """Counts since the stream is served, once for each client: new rows from the journal, and old rows of catch-ups.

    Counted for each copy or piece, never for each row.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._bytes: deque[tuple[int, int]] = deque()  # of the last minute: the second, and the bytes in it

    def add_copy(self, before: ChannelStatistics, after: ChannelStatistics) -> None:
        """A copy has put rows into a journal, which had these statistics before it and has those after it."""
        self.rows += (after.appended_lines - before.appended_lines) * after.readers
        self._add_bytes((after.appended_bytes - before.appended_bytes) * after.readers)

    def add_piece(self, piece: Piece, size: int) -> None:
        """So many bytes of a piece were sent to one client. A piece of which all was sent has exactly so many rows."""
        self.rows += round(piece.rows * min(1.0, size / max(1, piece.size)))
        self._add_bytes(size)

    @property
    def bytes_last_minute(self) -> int:
        """The bytes of rows of the last 60 seconds."""
        self._forget(int(trio.current_time()))
        return sum(size for _, size in self._bytes)

    def _add_bytes(self, size: int) -> None:
        if not size:
            return
        second = int(trio.current_time())
        if self._bytes and self._bytes[-1][0] == second:
            size += self._bytes.pop()[1]
        self._bytes.append((second, size))
        self._forget(second)

    def _forget(self, second: int) -> None:
        while self._bytes and self._bytes[0][0] <= second - MINUTE:
            self._bytes.popleft()


class Lag:
    """For how long ids of a stream have been waiting, and its position has been held back: from readings, without SQL.

    It remembers when the sequence was first seen at which value.
    """

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

    def since(self, above: int) -> float | None:
        """When the first id above this one was seen; None if none was."""
        found = None
        for at, last in reversed(self._marks):  # the newest first: few are above what is being sent
            if last <= above:
                break
            found = at
        return found

    def held_seconds(self, now: float) -> float | None:
        """For how long the position has not moved while it is held back; None if it is not held back."""
        return max(0.0, now - self._moved_at) if self._held else None

    def _drop(self, published: int | None) -> None:
        while published is not None and self._marks and self._marks[0][1] <= published:
            self._marks.popleft()
