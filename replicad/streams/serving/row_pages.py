"""Pages of a stream: rows after a token in the order of ids, read from the pieces that clients who catch up share.

A page is *closed* when more rows follow it. Its end is then the roundest id in its second half, so readers that began
at different tokens soon ask for the same pages. What a closed page has depends only on the rows: it is the same at each
request within one generation. A page is built once for all who ask for it at about the same time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import trio

from replicad.daemon.fairness import Asker
from replicad.daemon.joined import Joined
from replicad.daemon.service import PageRequest, RowPage
from replicad.errors import RowUnreadable
from replicad.protocol.tokens import Vector
from replicad.streams.chunks import HEAD, line_token
from replicad.streams.registry import Stream
from replicad.streams.row_text import MASTER
from replicad.streams.serving.copying import Copying
from replicad.streams.serving.filters import filter_number, read_part
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.served_stream import ServedStream
from replicad.streams.serving.starts import Start, begin

PAGE_BYTES = 512 << 10  # lines of a page; the rows of one id are never divided, whatever their size
FRESH = 1.0  # seconds for which a closed page is given to others without a look at Postgres
KEPT_BYTES = 8 << 20  # of pages that are kept for others
WEIGHT = 2048  # bytes of the objects of a page
DESCRIPTION = re.compile(rb'RDATA \S+ \S+ \S+ {"op":"s"')  # begins the line of one


class _Full(Exception):
    """The page has all rows that it may have."""


@dataclass(eq=False, slots=True)
class _Building:
    """A page that is kept, or is being built for all who ask for it."""

    built: Joined[RowPage]
    page: RowPage | None = None
    began: float = float("-inf")  # when the last build began
    state: tuple[Stream, int] | None = None  # of the stream; a page of another generation or row expression is void
    waiting: int = 0  # tasks
    ended: trio.Event | None = None  # set when the build that is under way has ended

    def valid(self, stream: ServedStream, arrived: float) -> RowPage | None:
        """The page for a request that came at `arrived`, if its build began later, or the page does not change."""
        if self.page is None or self.state is None:
            return None
        lasts = FRESH if self.page.closed and self.page.named else 0.0
        registered, late_rows = self.state
        same = registered is stream.stream and late_rows == stream.late_rows
        return self.page if same and arrived <= self.began + lasts else None

    async def built_since(self, stream: ServedStream, since: float) -> RowPage | None:
        """The page, if its build began later and it has rows. Waits for such a build that is under way."""
        while True:
            page = self.valid(stream, since)
            if page is not None and page.lines:
                return page
            if self.ended is None or since > self.began:
                return None
            await self.ended.wait()


class _Ids:
    """Takes the lines of a catch-up until a page is full: the lines of each id, ids ascending."""

    def __init__(self, asker: Asker, rows: int) -> None:
        self.asker = asker
        self.ids: list[int] = []
        self.lines: list[list[bytes]] = []
        self._rows = rows
        self._taken = self._bytes = 0

    async def send(self, stream: str, *pieces: bytes, to_go: float) -> None:  # noqa: ARG002
        """As `Taking.send`. Each piece ends at the end of an id. Raises _Full."""
        for piece in pieces:
            if not piece.startswith(b"RDATA "):
                continue  # a POSITION: the token of the page has it
            batch: list[bytes] = []
            for line in bytes(piece).split(b"\n")[:-1]:
                batch.append(line)
                id = line_token(line[:HEAD])
                if id is not None:
                    self._take(id, batch)
                    batch = []

    def _take(self, id: int, batch: list[bytes]) -> None:
        if self.ids and self.ids[-1] == id:  # of another writer
            self.lines[-1] += batch
        elif self._taken >= self._rows or self._bytes >= PAGE_BYTES:
            raise _Full
        else:
            self.ids.append(id)
            self.lines.append(batch)
        self._taken += len(batch)
        self._bytes += sum(map(len, batch))

    def close(self) -> int:
        """End the page at the roundest id in its second half, and return that."""
        seen, half = 0, 0
        for number, lines in enumerate(self.lines):
            seen += len(lines)
            if 2 * seen >= self._taken:
                half = number
                break
        end = roundest(self.ids[half], self.ids[-1])
        while self.ids[-1] > end:
            self.ids.pop()
            self.lines.pop()
        return end


def roundest(low: int, high: int) -> int:
    """The number in [low, high] that the highest power of two divides."""
    found = high
    while low <= (next_one := found & (found - 1)) < found:
        found = next_one
    return found


class RowPages:
    """The pages of all streams of one daemon."""

    def __init__(self, publisher: Publisher, pace: StreamIntervals) -> None:
        self._publisher = publisher
        self._pace = pace
        self._kept: OrderedDict[Hashable, _Building] = OrderedDict()
        self._bytes = 0

    async def page(self, wanted: PageRequest, since: float | None = None) -> RowPage:
        """`Pages.page`."""
        stream = await self._find(wanted)
        wanted = replace(wanted, part=wanted.access.part_of(stream.name, wanted.part))
        key = (stream.name, wanted.token, wanted.limit, wanted.part)
        building = self._kept.get(key)
        if building is None:
            building = self._kept[key] = _Building(Joined(self._renewed))
        self._kept.move_to_end(key)
        building.waiting += 1
        try:
            page = building.valid(stream, trio.current_time())
            if page is None and since is not None:
                page = await building.built_since(stream, since)
            return await building.built(key, building, stream, wanted) if page is None else page
        finally:
            building.waiting -= 1
            self._forget(key, building)

    async def empty_page(self, wanted: PageRequest) -> RowPage | None:
        """`Pages.empty_page`. Whether rows after the token were trimmed is looked at when there are rows again."""
        stream = await self._find(wanted)
        if wanted.token == "EARLIEST" or wanted.access.part_of(stream.name, wanted.part) is not None:  # noqa: S105
            return None
        token, lane = Vector.parse(wanted.token), stream.lane(linear=False)
        at_end = token.epoch == lane.epoch and token.minimum == stream.sent_upto and not token.ahead
        if not at_end or lane.channel.held is not None or lane.channel.ended is not None or stream.forked:
            return None
        return RowPage((), str(token), closed=False, named=True)

    async def wait_beyond(self, wanted: PageRequest, token: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """`Pages.wait_beyond`."""
        stream, after = await self._find(wanted), Vector.parse(token)
        lane = stream.lane(linear=False)
        while lane.epoch == after.epoch and stream.sent_upto <= after.minimum:
            if lane.channel.ended is not None:
                raise lane.channel.ended
            with trio.CancelScope() as scope, lane.channel.at_seal(scope.cancel):
                await meanwhile()

    async def _find(self, wanted: PageRequest) -> ServedStream:
        access = wanted.access
        return await self._publisher.find(wanted.stream, access.lists if access.limited else lambda _: True)

    def has_changes(self, name: str) -> bool:
        """`Pages.has_changes`."""
        stream = self._publisher.streams.get(name)
        return stream is not None and stream.stream.source is not None

    async def _renewed(self, key: Hashable, building: _Building, stream: ServedStream, wanted: PageRequest) -> RowPage:
        """The page, built now unless the stored page is still valid."""
        page = building.valid(stream, trio.current_time())
        if page is None:
            self._put(key, building, None)
            building.state, building.began = (stream.stream, stream.late_rows), trio.current_time()
            building.ended = trio.Event()
            try:
                page = await self._build(stream, wanted)
                self._put(key, building, page)
            finally:
                building.ended.set()
                building.ended = None
        return page

    def _put(self, key: Hashable, building: _Building, page: RowPage | None) -> None:
        """Replace a page. A page that has been dropped meanwhile is not counted."""
        if self._kept.get(key) is building:
            self._bytes += _weight(page) - _weight(building.page)
        building.page = page

    def _forget(self, key: Hashable, building: _Building) -> None:
        """Drop a place without a page, and the pages that were not asked for for longest."""
        if building.page is None and not building.waiting and self._kept.get(key) is building:
            del self._kept[key]
        while self._bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _weight(oldest.page)

    async def _build(self, stream: ServedStream, wanted: PageRequest) -> RowPage:
        async def read(stream: ServedStream) -> RowPage | None:
            async with wanted.access.catching_up():
                return await (self._read(stream, wanted) if wanted.part is None else self._read_part(stream, wanted))

        while True:
            page = await self._publisher.use(stream.name, lambda _: True, read)
            if page is not None:
                return page
            with trio.move_on_after(self._pace.ahead):
                await stream.lane(linear=False).wait_epoch_sent(stream.stream.epoch)

    async def _read(self, stream: ServedStream, wanted: PageRequest) -> RowPage | None:
        """The page; None if another generation has begun meanwhile."""
        token = None if wanted.token == "EARLIEST" else Vector.parse(wanted.token)  # noqa: S105 - no secret
        start = await begin(stream, wanted.token, wanted.asker, linear=False)
        upto = max(start.others_after if token is None else token.minimum, stream.sent_upto)
        taken = _Ids(wanted.asker, wanted.limit)
        copying = Copying(self._publisher.catchups, taken, start)
        closed, stopped = False, None
        try:
            if not await copying.copy({name: max(at, upto) for name, at in start.positions.items()}):
                return None
        except _Full:
            closed, upto = True, taken.close()
        except RowUnreadable as error:
            if not taken.ids:
                raise
            stopped, upto = error, taken.ids[-1]
        if start.lane.epoch != start.epoch:
            return None
        channel = start.lane.channel
        if not taken.ids and stopped is None and channel.held is not None and upto == stream.sent_upto:
            raise channel.held.copy()
        ahead: Mapping[int, int] = {} if token is None else token.ahead
        lines = await _described(stream, start, [line for lines in taken.lines for line in lines])
        return RowPage(
            lines, str(Vector(upto, ahead, start.epoch)), closed, token is not None and token.epoch is not None
        )

    async def _read_part(self, stream: ServedStream, wanted: PageRequest) -> RowPage | None:
        """The page of a part; None if another generation has begun meanwhile. A full page ends at its last row."""
        assert wanted.part is not None
        column, value = wanted.part
        number = filter_number(stream, column)
        token = None if wanted.token == "EARLIEST" else Vector.parse(wanted.token)  # noqa: S105 - no secret
        start = await begin(stream, wanted.token, wanted.asker, linear=False)
        after = start.positions[MASTER]
        upto = max(after, stream.sent_upto)
        async with self._publisher.catchups.places.place(wanted.asker):
            chunks, whole = await read_part(stream, number, value, (after, upto), rows=wanted.limit, size=PAGE_BYTES)
        if start.lane.epoch != start.epoch:
            return None
        found = [line for chunk in chunks for line in bytes(chunk.data).split(b"\n")[:-1]]
        lines = await _described(stream, start, found)
        end = None if whole or not chunks else chunks[-1].token
        named = token is not None and token.epoch is not None
        return RowPage(lines, str(Vector(end or upto, epoch=start.epoch)), not whole, named, wanted.part)


async def _described(stream: ServedStream, start: Start, lines: list[bytes]) -> tuple[bytes, ...]:
    """The lines of a page. Before changes there is the description of their columns."""
    if stream.stream.source is None or not lines or DESCRIPTION.match(lines[0]):
        return tuple(lines)
    return (*(await stream.description(start.others_after)).splitlines(), *lines)


def _weight(page: RowPage | None) -> int:
    return 0 if page is None else WEIGHT + sum(map(len, page.lines))
