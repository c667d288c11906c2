"""One comparison of what was sent of a stream with what its table has. It only reads; `audit` acts on what it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicad.streams.lineage import Lineage
from replicad.streams.registry import Stream
from replicad.streams.row_pieces import segments
from replicad.streams.serving.lane import Lane
from replicad.streams.serving.stretches import Run, Stretch, Tally, ids_of
from replicad.streams.serving.windows import Attached, Look, Window

LOWEST = -(1 << 63)  # the lowest id
WINDOW = 10_000  # ids below the position that are compared with those of the look before
MARGIN = 100_000  # rows that are counted beyond those that were sent
FINEST = 64  # stretches of several writers that are counted one by one
SHOWN = 10  # ids that an alarm names


class Followed(Protocol):
    """What is needed of a `Feed`."""

    late_rows: int
    strayed: str | None

    @property
    def stream(self) -> Stream: ...

    @property
    def lineage(self) -> Lineage: ...

    @property
    def sent_upto(self) -> int: ...

    @property
    def lanes(self) -> Mapping[str, Lane]: ...

    @property
    def tally(self) -> Tally: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last look at a stream has found. `elsewhere`: as in `Look`."""

    stream: Stream
    window: Window
    tree: frozenset[int]
    elsewhere: str | None = None

    def window_in(self, stream: Stream, lineage: Lineage) -> Window | None:
        """The window, as far as its ids belong to the same rows of the same table; None if they do not."""
        before = self.stream
        if (before.number, before.created_at, before.table_oid) != (stream.number, stream.created_at, stream.table_oid):
            return None
        if before.epoch == stream.epoch:
            return self.window
        shared = lineage.shared(before.epoch) if lineage.present.id == stream.epoch else None
        if shared is None or shared.minimum <= self.window.after:
            return None
        return self.window.upto_id(min(self.window.upto, shared.minimum))


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
    out of the stream. `late`: rows that were not there at the look before; ids and numbers of rows. `skips`: other rows
    that were not sent. `rows`: how many were counted.
    """

    look: Look
    feed: Followed
    stream: Stream
    position: int
    before: Seen | None
    skipped: frozenset[int]
    late: dict[int, int] = field(default_factory=dict)
    attached: list[tuple[str, Attached]] = field(default_factory=list)
    skips: list[Found] = field(default_factory=list)
    seen: Seen | None = None
    rows: int = 0
    _apart: Sequence[int] = ()

    async def compare(self, runs: Sequence[Run]) -> None:
        """Compare the window, then the runs. Rows that the window has shown to be late are not found again."""
        await self._compare_window()
        full = {name for name, _ in self.attached}
        self._apart = [oid for oid, name in self.look.tree.items() if name in full]
        for run in runs:
            for stretch, rows in await self._counted(run):
                self.rows += rows
                late = sum(n for id, n in self.late.items() if stretch.lowest < id <= stretch.highest)
                if rows > stretch.rows + late:
                    self.skips.append(await self._name(run, stretch, rows - stretch.rows - late))

    async def _compare_window(self) -> None:
        """Compare the ids below the position with those of the look before."""
        look, position = self.look, self.position
        before = None if self.before is None else self.before.window_in(self.stream, self.feed.lineage)
        now: Window | None = None
        swapped = self.before is not None and self.before.elsewhere != look.elsewhere
        if swapped and look.elsewhere is None:
            before = None  # tables were renamed back, and the rows of the other one were never the stream's
        if self.before is not None and before is not None and position >= before.upto:
            attached = set() if swapped else look.tree.keys() - self.before.tree
            now = await look.window(before.after, before.upto, attached)
            self.late = before.late(now)
            for one in attached:
                rows = await look.attached(look.tree[one], before.upto, position)
                if rows is not None:
                    self.attached.append((look.tree[one], rows))
            if attached or position != before.upto:
                now = None
        if now is None:
            now = await look.window(max(position - WINDOW, LOWEST), position)
        self.seen = Seen(self.stream, now, frozenset(look.tree), look.elsewhere)

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
