"""The alarm for rows that appear at or below a position that was sent: readers have missed each of these rows.

It reads the ids below the position, and reads them again later. It compares ids, not counts, so a row that is deleted
meanwhile hides no other. It does not find rows more than WINDOW ids below, rows that appear while no daemon runs, and a
row that replaces a deleted one of the same id.

Two causes have their own messages: an id that was taken outside of the statement that inserts its row, and a table with
rows that was attached to the stream's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.registry import Method, Stream
from replicad.streams.serving.pace import Pace
from replicad.streams.serving.windows import MAX_COUNTED, Look, Window, Windows

LOWEST = -(1 << 63)  # the lowest id
WINDOW = 10_000  # ids below the position that are compared; a late row is late by seconds, not by days
SHARE = 10  # the pause after each look is this many times as long as the look
SHOWN = 10  # ids that an alarm names
MAX_REASONS = 5  # alarms of one stream that its trouble shows

_REMEDY = {
    Method.LOCK_WATCH: (
        "Their ids were taken before the statement that inserted them, or were chosen by the writer: let the column's "
        "default take the id, or add the stream with --method reservation"
    ),
    Method.RESERVATION: "A writer used ids that it had not reserved: take them by stream_next() or replicad.streams",
    Method.POSITIONS_TABLE: "A writer published a position before all its rows up to there were committed",
}

log = structlog.get_logger()


class Followed(Protocol):
    """What is needed of a `Feed`."""

    late_rows: int

    @property
    def stream(self) -> Stream: ...

    @property
    def sent_upto(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    stream: Stream
    window: Window
    tree: frozenset[int]

    def is_of(self, stream: Stream) -> bool:
        """Whether the ids still belong to the same rows of the same table."""
        return (self.stream.number, self.stream.created_at, self.stream.table_oid, self.stream.epoch) == (
            stream.number,
            stream.created_at,
            stream.table_oid,
            stream.epoch,
        )


class LateRows:
    """Looks at all feeds in turn. `feeds` is the publisher's mapping, by stream name."""

    def __init__(
        self, windows: Windows, feeds: Mapping[str, Followed], troubles: Troubles, pace: Pace = Pace()
    ) -> None:
        self._windows = windows
        self._pace = pace
        self._feeds = feeds
        self._troubles = troubles
        self._seen: dict[str, _Seen] = {}
        self._reasons: dict[str, list[str]] = {}
        self._ends: dict[str, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await trio.sleep(self._pace.late_look)
            for name, feed in list(self._feeds.items()):
                began = trio.current_time()
                with self._troubles.contain("stream", name, "late_rows_look"):
                    await self.look(name, feed)
                await trio.sleep((trio.current_time() - began) * SHARE)
            self._forget()

    async def look(self, name: str, feed: Followed) -> None:
        """Look at one stream; late rows are logged, counted and shown as a trouble of the stream."""
        upto = feed.sent_upto  # read first: all rows up to here were committed and sent
        stream = feed.stream
        async with self._windows.looking() as look:
            await self._look(look, name, feed, stream, upto)

    async def _look(self, look: Look, name: str, feed: Followed, stream: Stream, upto: int) -> None:
        tree = await look.tree(stream)
        seen = self._seen.get(name)
        now: Window | None = None
        if seen is not None and seen.is_of(stream) and upto >= seen.window.upto:
            attached = tree.keys() - seen.tree
            now = await look.window(stream, seen.window.after, seen.window.upto, attached)
            if late := seen.window.late(now):
                self._report_late(name, feed, late, seen.window.upto)
            for one in attached:
                await self._look_at_attached(look, name, feed, tree[one], before=seen.window.upto, position=upto)
            if attached or upto != seen.window.upto:
                now = None
        if now is None:
            now = await look.window(stream, max(upto - WINDOW, LOWEST), upto)
        self._seen[name] = _Seen(stream, now, frozenset(tree))

    async def _look_at_attached(
        self, look: Look, name: str, feed: Followed, table: str, *, before: int, position: int
    ) -> None:
        found = await look.attached(feed.stream, table, before, position)
        if found is None:
            return
        rows, first, last = found
        many = f"{rows:,}{' or more' if rows == MAX_COUNTED else ''} rows"
        self._report(
            name,
            feed,
            rows,
            f"{table} was attached to the table of stream {name} with {many} at or below its position {position} (ids "
            f"{first} to {last}): readers that are past these ids were not sent the rows, unless they were in another "
            f"part of the table before. Readers that need them begin again at token {first - 1}; or detach {table} and "
            "insert its rows with new ids",
            [first, last],
        )

    def _report_late(self, name: str, feed: Followed, late: Mapping[int, int], position: int) -> None:
        ids, rows = sorted(late), sum(late.values())
        shown = ", ".join(map(str, ids[:SHOWN])) + (f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else "")
        self._report(
            name,
            feed,
            rows,
            f"{rows:,} row{'s' if rows > 1 else ''} turned up at or below position {position} of stream {name}, with "
            f"the ids {shown}: readers that are past these ids were not sent them. {_REMEDY[feed.stream.method]}. "
            f"Readers that need these rows begin again at token {ids[0] - 1}",
            ids[:SHOWN],
        )

    def _report(self, name: str, feed: Followed, rows: int, reason: str, ids: list[int]) -> None:
        feed.late_rows += rows
        log.error("rows_below_position", stream=name, rows=rows, ids=ids, reason=reason)
        reasons = self._reasons[name] = [*self._reasons.get(name, []), reason][-MAX_REASONS:]
        self._ends[name] = trio.current_time() + self._pace.late_lasts
        self._troubles.begin("stream", name, "late_rows", " Also: ".join(reversed(reasons)), code="late_rows")

    def _forget(self) -> None:
        """Forget streams that are no longer served, and end troubles that have been shown for `late_lasts`."""
        for name in self._seen.keys() - self._feeds.keys():
            del self._seen[name]
        for name in [name for name, end in self._ends.items() if end <= trio.current_time()]:
            del self._ends[name], self._reasons[name]
            self._troubles.end("stream", name, "late_rows")
