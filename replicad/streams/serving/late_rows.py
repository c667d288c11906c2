"""The alarm for rows that turn up at or below a position that readers were told: each is a row that they missed.

It remembers which ids there were below the position, and looks a little later which there are. Ids are compared, not
counts: a row that is deleted meanwhile hides no other. What it cannot see: rows that come more than WINDOW ids late,
those that come while no daemon runs, and one that takes the place of a deleted row of the same id.

Two causes have words of their own: an id that was taken outside of the statement that inserts its row, and a table
that was attached to the stream's table with rows in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database, load_sql, quote_ident
from replicad.sqlstates import LOCKED, means
from replicad.streams.registry import Method, Stream

INTERVAL = 5.0  # seconds between two looks
LOWEST = -(1 << 63)  # the lowest id
WINDOW = 10_000  # ids below the position that are looked at; a late row is late by seconds, not by days
MAX_ROWS = 40_000  # rows of a window that are read; where ids have more rows than that, the window is narrower
MAX_COUNTED = 1_000_000  # rows of an attached table that are counted
SHARE = 10  # a look is followed by a rest this many times as long, however many streams there are
SHOWN = 10  # ids that an alarm names
TOLD = 5  # alarms of one stream that are told together
LASTS = 3600.0  # seconds after the last late row in which the trouble is shown

_SESSION = "SET lock_timeout = '50ms'; SET statement_timeout = '5s'"
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
    """What is asked of a `Feed`."""

    late_rows: int

    @property
    def stream(self) -> Stream: ...

    @property
    def told_upto(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Window:
    """The ids of (after, upto] that there were, ascending, and how many rows each had (None: one)."""

    after: int
    upto: int
    ids: array[int]
    counts: array[int] | None

    def late(self, now: Window) -> dict[int, int]:
        """The ids that have more rows now than in this window, and how many more."""
        after = max(self.after, now.after)
        before = dict(zip(self.ids, self.counts or (), strict=False)) if self.counts else dict.fromkeys(self.ids, 1)
        counts = now.counts or array("q", [1]) * len(now.ids)
        return {
            one: count - before.get(one, 0)
            for one, count in zip(now.ids, counts, strict=True)
            if after < one <= self.upto and count > before.get(one, 0)
        }


@dataclass(frozen=True, slots=True)
class _Seen:
    stream: Stream
    window: Window
    tree: frozenset[int]

    def is_of(self, stream: Stream) -> bool:
        """Whether ids still mean the same rows of the same table."""
        return (self.stream.number, self.stream.created_at, self.stream.table_oid, self.stream.epoch) == (
            stream.number,
            stream.created_at,
            stream.table_oid,
            stream.epoch,
        )


class LateRows:
    """Looks at all feeds in turn. `feeds` is the publisher's mapping, by stream name."""

    def __init__(self, db: Database, feeds: Mapping[str, Followed], troubles: Troubles) -> None:
        self._db = db
        self._feeds = feeds
        self._troubles = troubles
        self._seen: dict[str, _Seen] = {}
        self._told: dict[str, list[str]] = {}
        self._ends: dict[str, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await trio.sleep(INTERVAL)
            for name, feed in list(self._feeds.items()):
                began = trio.current_time()
                with self._troubles.contain("stream", name, "late_rows_look"):
                    await self.look(name, feed)
                await trio.sleep((trio.current_time() - began) * SHARE)
            self._forget()

    async def look(self, name: str, feed: Followed) -> None:
        """Look at one stream; what is found is told, counted and shown as a trouble of the stream."""
        upto = feed.told_upto  # before anything is read: all rows up to here are there, and were sent
        stream = feed.stream
        try:
            async with self._db.connection() as connection:
                await connection.execute(_SESSION)
                await self._look(connection, name, feed, stream, upto)
        except DatabaseError as error:
            if not means(error.sqlstate, LOCKED):  # somebody alters the table; what was seen before stays good
                raise

    async def _look(self, connection: Connection, name: str, feed: Followed, stream: Stream, upto: int) -> None:
        tree = await _tree(connection, stream)
        seen = self._seen.get(name)
        now: Window | None = None
        if seen is not None and seen.is_of(stream) and upto >= seen.window.upto:
            attached = tree.keys() - seen.tree
            now = await _window(connection, stream, seen.window.after, seen.window.upto, attached)
            if late := seen.window.late(now):
                self._tell_late(name, feed, late, seen.window.upto)
            for one in attached:
                await self._look_at_attached(connection, name, feed, tree[one], before=seen.window.upto, position=upto)
            if attached or upto != seen.window.upto:
                now = None
        if now is None:
            now = await _window(connection, stream, max(upto - WINDOW, LOWEST), upto)
        self._seen[name] = _Seen(stream, now, frozenset(tree))

    async def _look_at_attached(
        self, connection: Connection, name: str, feed: Followed, table: str, *, before: int, position: int
    ) -> None:
        query = load_sql("late_attached").format(table=table, id=quote_ident(feed.stream.id_column))
        row = await connection.fetch_row(query, before, position, MAX_COUNTED)
        if row is None or not row["rows"]:
            return
        rows, first, last = row["rows"], row["first"], row["last"]
        many = f"{rows:,}{' or more' if rows == MAX_COUNTED else ''} rows"
        self._tell(
            name,
            feed,
            rows,
            f"{table} was attached to the table of stream {name} with {many} at or below its position {position} (ids "
            f"{first} to {last}): readers that are past these ids were not sent the rows, unless they were in another "
            f"part of the table before. Readers that need them begin again at token {first - 1}; or detach {table} and "
            "insert its rows with new ids",
            [first, last],
        )

    def _tell_late(self, name: str, feed: Followed, late: Mapping[int, int], position: int) -> None:
        ids, rows = sorted(late), sum(late.values())
        shown = ", ".join(map(str, ids[:SHOWN])) + (f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else "")
        self._tell(
            name,
            feed,
            rows,
            f"{rows:,} row{'s' if rows > 1 else ''} turned up at or below position {position} of stream {name}, with "
            f"the ids {shown}: readers that are past these ids were not sent them. {_REMEDY[feed.stream.method]}. "
            f"Readers that need these rows begin again at token {ids[0] - 1}",
            ids[:SHOWN],
        )

    def _tell(self, name: str, feed: Followed, rows: int, reason: str, ids: list[int]) -> None:
        feed.late_rows += rows
        log.error("rows_below_position", stream=name, rows=rows, ids=ids, reason=reason)
        told = [*self._told.get(name, []), reason][-TOLD:]
        self._told[name] = told
        self._ends[name] = trio.current_time() + LASTS
        self._troubles.begin("stream", name, "late_rows", " Also: ".join(reversed(told)), code="late_rows")

    def _forget(self) -> None:
        """Streams that are not served any more, and troubles that have been shown for long enough."""
        for name in self._seen.keys() - self._feeds.keys():
            del self._seen[name]
        for name in [name for name, end in self._ends.items() if end <= trio.current_time()]:
            del self._ends[name], self._told[name]
            self._troubles.end("stream", name, "late_rows")


async def _tree(connection: Connection, stream: Stream) -> dict[int, str]:
    """The names of the stream's table, its partitions and its children, by oid."""
    rows = await connection.fetch(load_sql("late_tree"), stream.table_oid)
    return {row["oid"]: row["name"] for row in rows}


async def _window(connection: Connection, stream: Stream, after: int, upto: int, apart: Collection[int] = ()) -> Window:
    """The ids of (after, upto] in all tables of the tree but those `apart` (oids)."""
    some = ", ".join(str(int(one)) for one in sorted(apart))
    query = load_sql("late_ids").format(
        table=stream.table,
        id=quote_ident(stream.id_column),
        apart=f" AND t.tableoid NOT IN ({some})" if some else "",
    )
    row = await connection.fetch_row(query, after, upto, MAX_ROWS)
    assert row is not None
    ids = array("q", row["ids"])
    counts = None if row["counts"] is None else array("q", row["counts"])
    if row["rows"] == MAX_ROWS:  # the lowest id may have been cut
        after = ids[0]
        ids, counts = ids[1:], None if counts is None else counts[1:]
    return Window(after, upto, ids, counts)
