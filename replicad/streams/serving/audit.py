"""Compares the sent rows of each stream with its table later, and so finds rows that readers were not sent.

The arguments of docs/positions.md say why no row can be missing at or below a position. Each of them has premises. The
audit shares none: it counts the sent rows, and counts a second or more later the rows in the table, by a statement, a
snapshot and a connection of its own. More rows than were sent: rows were skipped, or came late. In addition the ids of
the last rows below the position are compared with the look before, and the numbers of all rows below these with earlier
looks, so that rows that appear much later are found, too.
"""

from __future__ import annotations

import shlex
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.lineage import Lineage
from replicad.streams.registry import Method, RetentionChange, Rewound, Stream
from replicad.streams.row_pieces import segments
from replicad.streams.serving.counts import Run, Stretch, ids_of
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import Lane
from replicad.streams.serving.served_stream import ServedStream
from replicad.streams.serving.windows import (
    HIGHEST,
    LOWEST,
    MAX_COUNTED,
    Attached,
    CountedRange,
    CountedRanges,
    Look,
    Window,
    Windows,
)

# One comparison of the sent rows of a stream with its table. It only reads; `audit` acts on what it finds.


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
    lineage: Lineage
    lanes: Mapping[str, Lane]
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
            same, before = self.before.same_upto(self.stream, self.lineage), self.before.window
            before = before.upto_id(same) if before.after < same <= position else None
            # Partitions of a table of changes are ours and empty when they are attached, so none brings rows: a writer
            # that began before may write into one.
            ours = self.stream.source is not None
            attached = set() if swapped or ours else look.tree.keys() - self.before.tree
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
        lane = self.lanes.get(str(run.order))
        numbers = stretch.chunks if run.one else run.chunks
        if lane is None or numbers is None:
            return None
        chunks = [lane.channel.chunks.get(number) for number in numbers]
        return None if None in chunks else ids_of(b"".join(chunk.data for chunk in chunks if chunk is not None))


LOOK = "late_rows_look"  # the cause of the trouble of a look that failed
SHARE = 0.02  # of the time that reading a stream takes, for looks at it
IDLE_SHARE = 0.005  # of all time, for looks at all streams in turn, whatever is read
LONGEST = 30.0  # seconds for which a look that took long keeps others away
CREDIT = 0.2  # seconds that looks may take at once, saved up from SHARE or IDLE_SHARE
FEWEST = 1000  # rows that a look counts in any case
REMEMBERED = 100  # deliveries of one stream, so that none is repeated
MAX_REASONS = 5  # alarms of one stream that its trouble shows

_REMEDY = {
    Method.LOCK_WATCH: (
        "Their ids were taken in another transaction than the one that inserted them, or were chosen by the writer: "
        "let the column's default take the id, or add the stream with --method reservation"
    ),
    Method.RESERVATION: "A writer used ids that it had not reserved: take them by stream_next() or replicad.streams",
    Method.POSITIONS_TABLE: "A writer published a position before all its rows up to there were committed",
}

log = structlog.get_logger()


Keep = Callable[[Stream, int | None, int, int | None], Awaitable[RetentionChange]]
Rewind = Callable[[Stream, int], Awaitable[Rewound]]


@dataclass(slots=True)
class _Wanted:
    """Rows to be delivered: readers are to be sent back to `upto`. `waits`: that was delayed, and reported."""

    stream: Stream
    upto: int
    found: list[Found] = field(default_factory=list)
    waits: bool = False


class Audit:
    """Looks at all streams in turn. `streams` is the publisher's mapping of the streams that are served, by name."""

    def __init__(
        self,
        windows: Windows,
        streams: Mapping[str, ServedStream],
        troubles: Troubles,
        pace: StreamIntervals = StreamIntervals(),
        *,
        rewind: Rewind | None = None,
        keep: Keep | None = None,
    ) -> None:
        """`rewind`: begins the generation in which readers get rows again; None: rows are only reported. `keep`: notes
        the lowest id of a stream.
        """
        self._keep = keep
        self._kept_at: dict[str, float] = {}  # when that was done last
        self._rewind = rewind
        self._wanted: dict[str, _Wanted] = {}  # what waits for its delivery
        self._delivered: dict[str, deque[Found]] = {}
        self._windows = windows
        self._pace = pace
        self._served = streams
        self._troubles = troubles
        self._seen: dict[str, LastLook] = {}
        self._skipped: dict[str, frozenset[int]] = {}  # ids that an operator has taken out of a stream, now or before
        self._credit: dict[str, float] = {}  # seconds that the next looks at a stream may take, from SHARE
        self._reading: dict[str, float] = {}  # `Tally.reading` when that was added up last
        self._idle_credit = CREDIT  # seconds that the next looks in turn may take, from IDLE_SHARE
        self._idle_at: float | None = None  # when that was added up last
        self._looked_at: dict[str, float] = {}  # the last look at each stream
        self._cost: dict[str, float] = {}  # seconds for each row that was counted
        self._reasons: dict[str, deque[str]] = {}
        self._ends: dict[str, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await trio.sleep(self._pace.late_look)
            self._earn()
            for name in sorted(self._served, key=lambda name: self._looked_at.get(name, float("-inf"))):
                served = self._served.get(name)
                if served is None:
                    continue
                # a look that failed is made again, so that its trouble does not outlive its cause
                if self._failed(name) or max(self._idle_credit, self._credit.get(name, 0.0)) > 0:
                    with self._troubles.contain("stream", name, LOOK):
                        await self.look(name, served)
                    await trio.lowlevel.checkpoint()
            self._forget()

    def _failed(self, name: str) -> bool:
        return any(trouble.place.cause == LOOK for trouble in self._troubles.of("stream", name))

    def _earn(self) -> None:
        """Add up what looks may take now: those at streams that were read, and those in turn."""
        now = trio.current_time()
        idle = IDLE_SHARE * (0.0 if self._idle_at is None else now - self._idle_at)
        self._idle_at, self._idle_credit = now, min(CREDIT, self._idle_credit + idle)
        for name, served in self._served.items():
            read = served.tally.reading - self._reading.get(name, 0.0)
            self._reading[name] = served.tally.reading
            self._credit[name] = min(CREDIT, self._credit.get(name, 0.0) + max(0.0, read) * SHARE)

    def _spend(self, name: str, took: float) -> None:
        """A look took so many seconds. The reads of the stream pay for it if they have earned anything."""
        if self._credit.get(name, 0.0) > 0:
            self._credit[name] -= took
        else:
            self._idle_credit = max(-IDLE_SHARE * LONGEST, self._idle_credit - took)

    async def look(self, name: str, served: ServedStream) -> None:
        """Look at one stream; rows that were not sent are logged, counted and shown as a trouble of the stream."""
        stream = served.stream
        tally, lanes = served.tally, served.lanes  # a stream that is served again has others
        if any(lane.epoch != stream.epoch for lane in lanes.values()):
            return  # the counts are of the generation before, and the lanes change to the next generation
        began = trio.current_time()
        taken = tally.take(began - self._pace.audit_after)  # first: all of these rows were committed and sent
        upto, runs = served.sent_upto, self._affordable(name, taken)
        skipped = self._skipped[name] = self._skipped.get(name, frozenset()).union(stream.skipped)
        found: Comparison | None = None
        kept: tuple[int | None, int | None] | None = None
        try:
            async with self._windows.looking(stream) as look:
                found = Comparison(look, served.lineage, lanes, stream, upto, self._seen.get(name), skipped)
                await found.compare(runs, self._affords(name) // 2)
                if look.elsewhere is None and self._is_due(name, found, began):
                    kept = await look.lowest()
        finally:
            took = trio.current_time() - began
            tally.auditing += took
            self._looked_at[name] = began
            self._spend(name, took)
            whole = found is not None and found.look.whole
            if not whole and stream.epoch == served.stream.epoch:
                tally.give_back(taken)
        if found is None or not whole or stream.epoch != served.stream.epoch:
            return  # nothing is known, or history has forked since
        assert found.seen is not None
        if found.look.elsewhere is not None and (found.late or found.skips):
            tally.give_back(taken)  # to be compared when it is known which table is meant
            self._stop(name, served, found, found.look.elsewhere)
            return
        served.strayed = None
        self._seen[name] = found.seen
        tally.audited_rows += sum(run.rows for run in runs)
        if found.rows > FEWEST:
            self._cost[name] = took / found.rows
        back: int | None = None
        try:  # first: readers are sent back no further than to the retained rows
            if kept is not None and self._keep is not None:
                self._kept_at[name] = began
                back = _report_kept(name, await self._keep(stream, kept[0], upto, kept[1]))
        finally:
            await self._report_all(name, served, found, back)

    def _is_due(self, name: str, found: Comparison, now: float) -> bool:
        """Whether the lowest id is to be noted: each minute, and if rows appeared that may have been removed before."""
        return bool(found.late or found.counted_late or found.attached or found.skips) or (
            now >= self._kept_at.get(name, float("-inf")) + self._pace.kept_look
        )

    def _affords(self, name: str) -> int:
        """How many rows the share of time allows to be counted now."""
        own = self._credit.get(name, 0.0)
        seconds = own if own > 0 else max(0.0, self._idle_credit)
        return max(FEWEST, int(seconds / self._cost.get(name, 1e-6)))

    def _affordable(self, name: str, runs: list[Run]) -> list[Run]:
        """The last rows of these runs, as many as the share of time allows to be counted."""
        rows = self._affords(name)
        found: list[Run] = []
        for run in reversed(runs):
            if found and rows <= 0:
                break
            found.append(run.last(rows))
            rows -= found[-1].rows
        return found

    # --- findings ---

    async def _report_all(self, name: str, served: ServedStream, found: Comparison, back: int | None) -> None:
        """Report the found rows, and deliver them, with the rows above `back`, which have returned."""
        position = found.position
        for late in [*([found_of(found.late)] if found.late else []), *found.counted_late]:
            below = position if found.before is None else found.before.window.upto
            what = f"turned up at or below position {below} of stream {name}"
            self._report_late(name, served, late, what)
        for table, rows in found.attached:
            self._report_attached(name, served, table, rows, position)
        for skips in found.skips:
            what = f"of stream {name} at or below its position {position} were not sent"
            self._report_late(name, served, skips, what)
        if back is not None and (found.late or found.counted_late or found.skips) and name in self._wanted:
            self._wanted[name].upto = min(self._wanted[name].upto, back)
        await self._deliver(name, served)

    async def _deliver(self, name: str, served: ServedStream) -> None:
        """Send readers back to the position before the first row that they were not sent, if that is due."""
        wanted = self._wanted.get(name)
        if wanted is None or self._rewind is None:
            return
        if wanted.stream.epoch != served.stream.epoch:
            shared = served.lineage.shared(wanted.stream.epoch) or served.lineage.floor
            if shared.minimum <= wanted.upto:  # history has forked since, and readers have got all rows above that
                del self._wanted[name]
                return
        done = await self._rewind(served.stream, wanted.upto)
        if done.generation is not None:
            del self._wanted[name]
            self._delivered.setdefault(name, deque(maxlen=REMEMBERED)).extend(wanted.found)
            log.warning("skipped_rows_delivered", stream=name, position=wanted.upto, generation=done.generation)
        elif done.wait is not None and not wanted.waits:
            wanted.waits = True
            log.warning("skipped_rows_wait", stream=name, position=wanted.upto, seconds=round(done.wait, 1))

    def _want(self, name: str, served: ServedStream, found: Found) -> str:
        """Have rows delivered, unless they were delivered before; returns the text about that."""
        again = f"Readers that need these rows begin again at token {found.after}"
        if self._rewind is None:
            return again
        if any(found.is_in(before) for before in self._delivered.get(name, ())):
            return (
                "Readers were sent back to before these rows already, and did not get them: what reads rows for them "
                f"does not see these. {again}"
            )
        wanted = self._wanted.setdefault(name, _Wanted(served.stream, found.after))
        wanted.upto = min(wanted.upto, found.after)
        wanted.found.append(found)
        return f"Readers are sent back to token {found.after}, and get all rows above it again"

    def _stop(self, name: str, served: ServedStream, found: Comparison, table: str) -> None:
        """Another table has the name of the stream's table, and rows that were not sent: the stream waits."""
        if served.strayed is not None:
            return
        unsent = [*([found_of(found.late)] if found.late else []), *found.skips]
        rows = sum(one.rows for one in unsent)
        served.strayed = (
            f"{table} is another table than {served.stream.table}, from which its rows are read, and has {rows:,} "
            f"row{'s' if rows > 1 else ''} at or below its position {found.position} that were not sent, "
            f"{unsent[0].names}; to follow {table}, run: replicad streams alter {shlex.quote(name)} --table "
            f"{shlex.quote(table)}; or rename the tables back"
        )
        ids = list(unsent[0].ids[:SHOWN]) or [unsent[0].after + 1, unsent[0].upto]
        self._report(name, served, rows, f"stream {name} waits: {served.strayed}", ids)

    def _report_attached(self, name: str, served: ServedStream, table: str, found: Attached, position: int) -> None:
        rows, first, last, _ = found
        many = f"{rows:,}{' or more' if rows == MAX_COUNTED else ''} rows"
        self._report(
            name,
            served,
            rows,
            f"{table} was attached to the table of stream {name} with {many} at or below its position {position} (ids "
            f"{first} to {last}): readers that are past these ids were not sent the rows, unless they were in another "
            f"part of the table before. Readers that need them begin again at token {first - 1}; or detach {table} and "
            "insert its rows with new ids",
            [first, last],
        )

    def _report_late(self, name: str, served: ServedStream, found: Found, what: str) -> None:
        self._report(
            name,
            served,
            found.rows,
            f"{found.rows:,} row{'s' if found.rows > 1 else ''} {what}, {found.names}: readers that are past these ids "
            f"were not sent them. {_REMEDY[served.stream.method]}. {self._want(name, served, found)}",
            list(found.ids[:SHOWN]) or [found.after + 1, found.upto],
        )

    def _report(self, name: str, served: ServedStream, rows: int, reason: str, ids: list[int]) -> None:
        served.late_rows += rows
        served.tally.skipped += rows
        log.error("rows_below_position", stream=name, rows=rows, ids=ids, reason=reason)
        reasons = self._reasons.setdefault(name, deque(maxlen=MAX_REASONS))
        reasons.appendleft(reason)
        self._ends[name] = trio.current_time() + self._pace.late_lasts
        self._troubles.begin("stream", name, "late_rows", " Also: ".join(reasons), code="late_rows")

    def _forget(self) -> None:
        """Forget streams that are no longer served, and end troubles that have been shown for `late_lasts`."""
        books: tuple[dict[str, Any], ...] = (
            self._seen,
            self._skipped,
            self._credit,
            self._looked_at,
            self._cost,
            self._kept_at,
            self._wanted,
            self._delivered,
        )
        for name in self._reading.keys() - self._served.keys():
            del self._reading[name]
            for book in books:
                book.pop(name, None)
        for name in [name for name, end in self._ends.items() if end <= trio.current_time()]:
            del self._ends[name], self._reasons[name]
            self._troubles.end("stream", name, "late_rows")


def _report_kept(name: str, kept: RetentionChange) -> int | None:
    """Log that rows were removed, or are there again; returns after which id they are."""
    if kept.gone is not None:
        log.warning("rows_removed", stream=name, upto=kept.gone, remedy="tokens below are expired, as after a trim")
    if kept.back is not None:
        log.warning("rows_returned", stream=name, after=kept.back, remedy="tokens from there on are good again")
    return kept.back
