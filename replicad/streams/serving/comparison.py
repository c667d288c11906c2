"""One comparison of the sent rows of a stream with its table. It only reads; `audit` acts on what it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicad.streams.lineage import Lineage
from replicad.streams.registry import Stream
from replicad.streams.row_pieces import segments
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.ranges import HIGHEST, LOWEST, CountedRange, CountedRanges
from replicad.streams.serving.stretches import Run, Stretch, ids_of
from replicad.streams.serving.windows import Attached, Look, Window

WINDOW = 10_000  # ids below the position that are compared with the look before
MARGIN = 100_000  # rows that are counted beyond the sent rows, or that were there before
PART = 100_000  # rows of a range that is counted for the first time
QUERY = 1_000  # rows that could be counted in the time that a statement takes besides
FINEST = 64  # stretches of several writers that are counted one by one
SHOWN = 10  # ids that an alarm names


@dataclass(frozen=True, slots=True)
class LastLook:
    """What the last look at a stream has found. `elsewhere`: as in `Look`. `ranges` have the ids below the windows."""

    stream: Stream
    window: Window
    tree: frozenset[int]
    elsewhere: str | None
    ranges: CountedRanges

    def same_upto(self, stream: Stream, lineage: Lineage) -> int:
        """Up to which id there are the same rows of the same table still."""
        before = self.stream
        if (before.number, before.created_at, before.table_oid) != (stream.number, stream.created_at, stream.table_oid):
            return LOWEST
        if before.epoch == stream.epoch:
            return self.window.upto
        shared = lineage.shared(before.epoch) if lineage.present.id == stream.epoch else None
        return LOWEST if shared is None else min(self.window.upto, shared.minimum)


@dataclass(frozen=True, slots=True)
class Found:
    """Rows that readers were not sent: how many, and the ids if they are known. All ids are in (after, upto]."""

    rows: int
    after: int
    upto: int
    ids: Sequence[int] = ()

    def is_in(self, other: Found) -> bool:
        """Whether `other` has all these rows."""
        if self.ids and other.ids:
            return set(self.ids) <= set(other.ids)
        return other.after <= self.after and self.upto <= other.upto

    @property
    def names(self) -> str:
        """The ids for people."""
        if not self.ids:
            return f"among the ids {self.after + 1} to {self.upto}"
        more = f" and {len(self.ids) - SHOWN:,} more" if len(self.ids) > SHOWN else ""
        return "with the ids " + ", ".join(map(str, self.ids[:SHOWN])) + more


def found_of(ids: Mapping[int, int]) -> Found:
    """These ids, each with its number of rows."""
    return Found(sum(ids.values()), min(ids) - 1, max(ids), sorted(ids))


@dataclass(slots=True)
class Comparison:
    """`compare` fills in the last fields. They count only if the look is whole in the end.

    `position`: all rows up to here were sent before the look began. `skipped`: ids that an operator has taken
    out of the stream. `late`: rows that were not there at the look before; ids and numbers of rows. `counted_late`:
    others whose ids are not all known. `skips`: other rows that were not sent. `rows`: how many were counted.
    """

    look: Look
    feed: Feed
    stream: Stream
    position: int
    before: LastLook | None
    skipped: frozenset[int]
    late: dict[int, int] = field(default_factory=dict)
    counted_late: list[Found] = field(default_factory=list)
    attached: list[tuple[str, Attached]] = field(default_factory=list)
    skips: list[Found] = field(default_factory=list)
    seen: LastLook | None = None
    rows: int = 0
    _attached_from: int = HIGHEST  # rows of attached tables have ids above it
    _apart: set[int] = field(default_factory=set)

    async def compare(self, runs: Sequence[Run], far: int) -> None:
        """Compare the window, about `far` rows below it, then the runs. Late rows are not found again in a run."""
        await self._compare_window()
        if self.look.elsewhere is None:
            await self._compare_ranges(far)
        for run in runs:
            for stretch, rows in await self._counted(run):
                self.rows += rows
                late = sum(n for id, n in self.late.items() if stretch.lowest < id <= stretch.highest)
                if rows > stretch.rows + late:
                    self.skips.append(await self._name(run, stretch, rows - stretch.rows - late))

    async def _compare_window(self) -> None:
        """Compare the ids below the position with the look before."""
        look, position = self.look, self.position
        before: Window | None = None
        now: Window | None = None
        ranges = CountedRanges()
        attached: set[int] = set()
        swapped = self.before is not None and self.before.elsewhere != look.elsewhere
        # Where tables were renamed back, the rows of the other table were never the stream's.
        if self.before is not None and not (swapped and look.elsewhere is None):
            same, before = self.before.same_upto(self.stream, self.feed.lineage), self.before.window
            before = before.upto_id(same) if before.after < same <= position else None
            attached = set() if swapped else look.tree.keys() - self.before.tree
            if before is not None or not attached:
                ranges = self.before.ranges.copy()
                ranges.cut(same)
        if before is not None:
            now = await look.window(before.after, before.upto, attached)
            self.late = before.late(now)
            for oid in attached:
                await self._attach(oid, before.upto)
            if attached or position != before.upto:
                now = None
        if now is None:
            now = await look.window(max(position - WINDOW, LOWEST), position)
        self.seen = LastLook(self.stream, now, frozenset(look.tree), look.elsewhere, ranges)

    async def _attach(self, oid: int, before: int) -> None:
        """Rows of an attached table that were written when it was attached, or later, are late. Others may be old."""
        for rows in await self.look.attached(self.look.tree[oid], before, self.position):
            self._apart.add(oid)
            self._attached_from = min(self._attached_from, rows.first - 1)
            if rows.fresh:
                self.counted_late.append(Found(rows.rows, rows.first - 1, rows.last))
            else:
                self.attached.append((self.look.tree[oid], rows))

    async def _compare_ranges(self, rows: int) -> None:
        """Compare how many rows there are far below the position with how many there were; in turn, so many rows."""
        assert self.seen is not None
        look, ranges = self.look, self.seen.ranges
        ranges.reach(self.seen.window.after)
        for after in ranges.due():
            one = ranges.beginning(after)
            if rows <= 0 or one is None:
                continue
            limit = min(PART, max(rows, QUERY)) if one.rows is None else one.rows + MARGIN
            counted = await look.count(one.after, one.upto, limit, self._apart, self.skipped)
            assert counted.rows is not None
            rows -= counted.rows + QUERY
            self.rows += counted.rows
            if one.rows is not None and counted.rows > one.rows:
                await self._find_late(one, counted, counted.rows - one.rows)
            ranges.note(counted)
        ranges.forget(self._attached_from, HIGHEST)  # attached rows were left out, and count from the next look on

    async def _find_late(self, one: CountedRange, counted: CountedRange, rows: int) -> None:
        """So many more rows are in a range: find out which they are, by the transactions that wrote them."""
        rows -= sum(n for id, n in self.late.items() if one.after < id <= counted.upto)
        if rows <= 0:
            return
        there = await self.look.window(one.after, counted.upto, self._apart, since=one.since)
        ids = {id: n for id, n in there.rows() if id not in self.late and id not in self.skipped}
        written = sum(ids.values())
        if there.after > one.after or written < rows:  # they are too many to be read
            self.counted_late.append(Found(rows, one.after, counted.upto))
        elif written > rows:  # some were there, and were changed
            self.counted_late.append(Found(rows, min(ids) - 1, max(ids)))
        else:
            self.late.update(ids)

    async def _counted(self, run: Run) -> list[tuple[Stretch, int]]:
        """The stretches of a run, each with the rows that are there; of several writers only if these are too many."""
        if run.one:
            bounds = [one.highest for one in run.stretches[:-1]]
            counts = await self.look.counts(run.segment(), bounds, run.rows + MARGIN, self._apart, self.skipped)
            return list(zip(run.stretches, counts, strict=True))
        if await self._count_writers(run, 0, len(run.stretches)) <= run.rows:
            self.rows += run.rows
            return []
        step = -(-len(run.stretches) // FINEST)
        parts: list[tuple[Stretch, int]] = []
        for first in range(0, len(run.stretches), step):
            end = min(first + step, len(run.stretches))
            whole = run.stretches[first]
            for later in run.stretches[first + 1 : end]:
                whole = whole.joined(later)
            parts.append((whole, await self._count_writers(run, first, end)))
        return parts

    async def _count_writers(self, run: Run, first: int, end: int) -> int:
        """The rows that are there of some stretches of several writers."""
        segment = run.segment(first, end)
        limit = sum(one.rows for one in run.stretches[first:end]) + MARGIN
        parts = segments(dict(segment.ranges or ()), segment.others)
        return sum([sum(await self.look.counts(part, (), limit, self._apart, self.skipped)) for part in parts])

    async def _name(self, run: Run, stretch: Stretch, rows: int) -> Found:
        """The rows of a stretch that were not sent, with their ids where these are known still."""
        there = await self.look.window(stretch.lowest, stretch.highest, self._apart)
        sent = self._sent(run, stretch)
        if sent is None or there.after > stretch.lowest:  # too many
            return Found(rows, stretch.lowest, stretch.highest)
        ids = {
            id: more
            for id, rows in there.rows()
            if (more := rows - sent[id] - self.late.get(id, 0)) > 0 and id not in self.skipped
        }
        return found_of(ids) if ids else Found(rows, stretch.lowest, stretch.highest)

    def _sent(self, run: Run, stretch: Stretch) -> Counter[int] | None:
        """How many rows of each id were sent, by the journal; None if it does not have them any more."""
        if not stretch.rows:
            return Counter()
        lane = self.feed.lanes.get(str(run.order))
        numbers = stretch.chunks if run.one else run.chunks
        if lane is None or numbers is None:
            return None
        chunks = [lane.channel.chunks.get(number) for number in numbers]
        return None if None in chunks else ids_of(b"".join(chunk.data for chunk in chunks if chunk is not None))
