"""Readers who want only the changes with one value of a filter: `REPLICATE stream token where=column=value`.

A feed reads the new changes of a stream once for all readers of one filter. Postgres writes the value of the filter
behind each line, so that readers are looked up by it and no row is parsed. Old changes are read for each reader, by the
index on the filter. A reader gets a POSITION every few seconds, however few of its rows there are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from replicad.config.access import Part
from replicad.daemon.session import Session
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, ReplicadError, RowTooLong, StreamRefused
from replicad.nurseries import open_plain_nursery
from replicad.postgres.literals import quote_literal
from replicad.streams.chunks import Chunk, Enough
from replicad.streams.row_text import MASTER
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import position_lines
from replicad.streams.serving.served_stream import KIND, ServedStream
from replicad.streams.serving.starts import Start
from replicad.streams.table_rows import TableRows

MARK: Final = b"\t"  # before the value, which is JSON of a text and has none
ALL: Final = b"*"  # in the place of a value, which is JSON: the change concerns every reader (op t and s)
TRIES: Final = 50  # to read new changes, until the readers are told to begin again
OLD_ROWS: Final = 2000  # that are read for a reader at a time
OLD_BYTES: Final = 4 << 20  # the same in bytes, but for one chunk more
MOVED: Final = 50  # readers that are sent their position at once: 1 to 2 ms
MOVE_PAUSE: Final = 0.005  # seconds until the next ones are: 10,000 readers in 1 s, between the changes


@dataclass(eq=False, slots=True)
class FilteredReader:
    """A reader of one value. `sent`: the last token that it was sent. `end`: called when it gets nothing more.
    `preface`: lines that are sent together with its first changes.
    """

    session: Session
    stream: str
    value: bytes
    sent: int
    end: Callable[[ReplicadError], None]
    preface: bytes = b""
    left: bool = False  # it reads no more

    def deliver(self, lines: list[bytes]) -> None:
        """Send the lines of changes that the reader does not have."""
        if _token(lines[0]) <= self.sent:
            lines = [line for line in lines if _token(line) > self.sent]
        if lines:
            self.session.deliver(self.preface + b"\n".join([*lines, b""]))
            self.preface = b""
            self.sent = _token(lines[-1])

    def move(self, position: int) -> None:
        """Send the position, if the reader was not sent it."""
        if self.sent < position and not self.left:
            before, now = {MASTER: self.sent}, {MASTER: position}
            self.session.deliver(position_lines(self.stream, before, now))
            self.sent = position


def _token(line: bytes) -> int:
    return int(line.split(b" ", 4)[3])


def filter_number(stream: ServedStream, column: str) -> int:
    """The number of the filter with this column, from 1 on. Raises StreamRefused: the stream has no such filter."""
    filters = stream.stream.filters
    if column not in filters:
        known = f"its filters are {', '.join(filter(None, filters))}" if any(filters) else "it has no filters"
        raise StreamRefused(
            f"stream {stream.name} has no filter {column[:80]!r}: {known}; a stream gets them when it is added: "
            "replicad streams add NAME --table TABLE --changes --filter COLUMN"
        )
    return filters.index(column) + 1


async def read_part(
    stream: ServedStream, number: int, value: str, span: tuple[int, int], *, rows: int, size: int
) -> tuple[list[Chunk], bool]:
    """The changes with one value of a filter, and the changes for every reader, after span[0] up to span[1].

    At most so many rows, and `size` bytes and one chunk more. Also whether there are no others in the span.
    """
    column = f"t.by_{number}"
    everybody = f"{column} IS NULL AND t.op IN ('t', 's')"
    part = changed_rows(stream, stream.stream.row or "", f"({column} = {quote_literal(value)} OR {everybody})")
    chunks: list[Chunk] = []

    async def collect(chunk: Chunk) -> None:
        chunks.append(chunk)
        if sum(len(one.data) for one in chunks) >= size:
            raise Enough

    with suppress(Enough):
        return chunks, await part.copy_range(*span, collect, limit=rows) < rows
    return chunks, False


def changed_rows(stream: ServedStream, row: str, only: str | None = None) -> TableRows:
    """The rows of a stream of changes with this row expression that meet the condition `only`."""
    rows = stream.catchup_rows(stream.stream)
    return replace(rows, source=replace(rows.source, row=row, row_type="jsonb", only=only))


class FilterFeed:
    """The new changes of one stream for all readers of one filter. `at`: up to where they were passed on."""

    def __init__(self, stream: ServedStream, number: int, pace: StreamIntervals) -> None:
        """`number`: of the filter, from 1 on."""
        self._stream = stream
        self._number = number
        self._pace = pace
        self._lane = stream.lane(linear=False)
        self._epoch = self._lane.epoch
        self._readers: defaultdict[bytes, set[FilteredReader]] = defaultdict(set)
        self._joining = 0
        self.at = self._lane.channel.boundary.positions[MASTER]
        self.ended: ReplicadError | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody reads, or is about to."""
        return bool(self._readers) or self._joining > 0

    async def run(self) -> None:
        """Pass on changes until nobody reads, or the stream ends or begins another generation."""
        channel, failures = self._lane.channel, 0
        move_at, to_move = trio.current_time() + self._pace.filtered, list[FilteredReader]()
        try:
            while self.wanted:
                if channel.ended is not None or self._lane.epoch != self._epoch:
                    self.ended = channel.ended or StreamRefused(
                        f"stream {self._stream.name} has begun another generation; resume from your token"
                    )
                    return
                upto = channel.boundary.positions.get(MASTER, self.at)
                if upto > self.at:
                    try:
                        await self._pass_on(upto)
                        failures = 0
                    except (DatabaseError, RowTooLong):  # the lane meets it too, and reports it
                        failures += 1
                        if failures >= TRIES:
                            raise
                        await trio.sleep(self._pace.copy_retry)
                else:
                    with trio.move_on_after(MOVE_PAUSE if to_move else self._pace.filtered):
                        await channel.wait_sealed()
                if trio.current_time() >= move_at and not to_move:
                    move_at = trio.current_time() + self._pace.filtered
                    to_move = [reader for some in self._readers.values() for reader in some]
                for reader in to_move[-MOVED:]:
                    reader.move(self.at)
                del to_move[-MOVED:]
        finally:
            if self.ended is None:
                self.ended = StreamRefused(f"readers of stream {self._stream.name} begin again; resume from your token")
            for reader in [one for some in self._readers.values() for one in some]:
                reader.end(self.ended)
            self._readers.clear()

    async def _pass_on(self, upto: int) -> None:
        rows = changed_rows(
            self._stream,
            f"(({self._stream.stream.row}) || E'\\t' || CASE WHEN t.op IN ('t', 's') THEN '*' "
            f"ELSE coalesce(to_json(t.by_{self._number})::text, 'null') END)",
        )

        async def take(chunk: Chunk) -> None:
            found: defaultdict[bytes, list[bytes]] = defaultdict(list)
            for whole in bytes(chunk.data).split(b"\n")[:-1]:
                line, _, value = whole.rpartition(MARK)
                if value == ALL:
                    for each in self._readers:
                        found[each].append(line)
                elif value in self._readers:
                    found[value].append(line)
            for value, lines in found.items():
                for reader in self._readers[value]:
                    reader.deliver(lines)
            if chunk.token is not None:
                self.at = chunk.token

        await rows.copy_range(self.at, upto, take)
        self.at = upto

    async def join(
        self, session: Session, start: Start, value: str, end: Callable[[ReplicadError], None]
    ) -> FilteredReader:
        """Send a reader the old changes after `start`, and let it read from then on.

        Raises:
            StreamRefused: the stream ended or began another generation meanwhile.
            DatabaseError: old changes cannot be read.
        """
        reader = FilteredReader(session, self._stream.name, json.dumps(value, ensure_ascii=False).encode(), 0, end)
        reader.sent = reached = start.positions[MASTER]
        self._joining += 1
        try:
            await session.flush()
            await session.send(start.lines(extended=True))
            reader.preface = await self._stream.description(reached)
            while reached < self.at or self.ended is not None:
                if self.ended is not None:
                    raise self.ended
                reached = await self._send_old(reader, value, reached, self.at)
            self._readers[reader.value].add(reader)
        finally:
            self._joining -= 1
        return reader

    async def _send_old(self, reader: FilteredReader, value: str, after: int, upto: int) -> int:
        """Send some old changes in (after, upto]; returns up to where."""
        span = (after, upto)
        chunks, whole = await read_part(self._stream, self._number, value, span, rows=OLD_ROWS, size=OLD_BYTES)
        if chunks:
            preface, reader.preface = reader.preface, b""
            await reader.session.send(preface + chunks[0].data, *(chunk.data for chunk in chunks[1:]))
            reader.sent = after = chunks[-1].token or after
        return upto if whole else after

    def leave(self, reader: FilteredReader) -> None:
        """Send the reader nothing more."""
        reader.left = True
        some = self._readers.get(reader.value, set())
        some.discard(reader)
        if not some:
            self._readers.pop(reader.value, None)


class FilterFeeds:
    """The feeds of all streams of one daemon."""

    def __init__(self, troubles: Troubles, pace: StreamIntervals) -> None:
        self._troubles = troubles
        self._pace = pace
        self._feeds: dict[tuple[ServedStream, int], FilterFeed] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Run the feeds until cancelled."""
        async with open_plain_nursery() as self._nursery:
            await trio.sleep_forever()

    async def follow(
        self, session: Session, start: Start, part: Part, end: Callable[[ReplicadError], None]
    ) -> Callable[[], None]:
        """Let a session follow a part of a stream; returns what stops it. `end` is called when the feed ends by itself.

        Raises:
            StreamRefused: the stream has no such filter, or cannot be served now.
            DatabaseError: old changes cannot be read.
        """
        stream, (column, value) = start.stream, part
        feed = self._feed(stream, filter_number(stream, column))
        reader = await feed.join(session, start, value, end)
        return lambda: feed.leave(reader)

    def _feed(self, stream: ServedStream, number: int) -> FilterFeed:
        place = (stream, number)
        feed = self._feeds.get(place)
        if feed is None or feed.ended is not None:
            if self._nursery is None:
                raise StreamRefused(f"stream {stream.name} is not served yet; try again")
            feed = self._feeds[place] = FilterFeed(stream, number, self._pace)
            self._nursery.start_soon(self._run, place, feed.run)
        return feed

    async def _run(self, place: tuple[ServedStream, int], run: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._troubles.contain_and_record(KIND, place[0].name, "filters"):  # its readers begin again
                await run()
        finally:
            self._feeds.pop(place, None)
