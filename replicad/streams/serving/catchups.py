"""Reads pieces for all clients that catch up, on a bounded number of connections.

Clients that need the same rows wait for one read. Who waits for a connection waits in turn by crowd and client
(`daemon.fairness`). No connection is held while a socket is full.
"""

from __future__ import annotations

import copy
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import trio

from replicad.config.limits import Limits
from replicad.daemon.cuts import Following
from replicad.daemon.fairness import Asker, Places
from replicad.errors import DatabaseError
from replicad.streams.registry import Stream
from replicad.streams.row_pieces import Blocks, Piece, PieceBounds, RowSizes, Segment, read_piece

if TYPE_CHECKING:
    from replicad.streams.serving.copying import Copying
    from replicad.streams.serving.served_stream import ServedStream

OLDEST = 60.0  # seconds after which a piece is read again: rows that came late or were changed are seen then
UNUSED = 5.0  # seconds after which a piece is dropped that no client uses or is on its way to
FIRST_SPAN = 1 << 20  # ids that are looked through for a few writers' rows: some tenths of a second
LEAST_SPAN = 1 << 16
QUICK, SLOW = 0.1, 0.5  # seconds: the span grows after a quick read without enough rows, and shrinks after a slow one


@dataclass(slots=True)
class _Kept:
    size: int
    used_at: float
    forget: Callable[[], None]


class PieceCache:
    """The pieces of all streams, at most `max_bytes`. The least recently used ones are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._pieces: OrderedDict[Piece, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece, now: float, forget: Callable[[], None]) -> bool:
        """Keep a piece; False if it alone is too large. `forget` is called when it is dropped."""
        size = piece.size + 1024  # of the objects
        if size > self.max_bytes // 2:
            return False
        self._pieces[piece] = _Kept(size, now, forget)
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.drop(next(iter(self._pieces)))
        return True

    def use(self, piece: Piece, now: float) -> None:
        """The piece is in use: others are dropped before it."""
        kept = self._pieces.get(piece)
        if kept is not None:
            kept.used_at = now
            self._pieces.move_to_end(piece)

    def need(self, piece: Piece, now: float) -> None:
        """A client will need the piece: it does not count as unused, but others are not dropped before it."""
        kept = self._pieces.get(piece)
        if kept is not None:
            kept.used_at = now

    def drop(self, piece: Piece) -> None:
        """Remove a piece from memory; safe to repeat."""
        kept = self._pieces.pop(piece, None)
        if kept is not None:
            self.bytes -= kept.size
            piece.drop()
            kept.forget()

    def sweep(self, now: float) -> None:
        """Drop pieces that are too old, and pieces that no client has used for a while."""
        for piece, kept in list(self._pieces.items()):
            if now >= min(kept.used_at + UNUSED, piece.read_at + OLDEST):
                self.drop(piece)


class Shelf:
    """The pieces of one stream in one state, and the known sizes of its rows.

    The state is its generation, its table, its row expression and its skipped ids. When the state changes, the shelf is
    closed and the stream gets a new shelf. So a piece of an earlier state is never found.
    """

    def __init__(self, stream: Stream, late_rows: int, cache: PieceCache) -> None:
        """`late_rows`: how many were found so far; with each more, pieces may lack a row."""
        self.stream = stream
        self.late_rows = late_rows
        self.sizes = RowSizes()
        self.span = FIRST_SPAN
        self._closed = False
        self._cache = cache
        self._begins: list[int] = []
        self._whole: dict[int, Piece] = {}  # of all writers, by their beginnings
        self._parts: dict[tuple[Segment, int], Piece] = {}  # of ranges for each writer

    def is_of(self, stream: Stream, late_rows: int) -> bool:
        """Whether the pieces belong to the stream's present state."""
        return self.stream is stream and self.late_rows == late_rows

    def find(self, segment: Segment, after: int, now: float) -> Piece | None:
        """The piece with the rows that follow `after`; None if it must be read."""
        if segment.ranges is None:
            at = bisect_right(self._begins, after) - 1
            piece = self._whole[self._begins[at]] if at >= 0 else None
        else:
            piece = self._parts.get((segment, after))
        if piece is None or piece.upto <= after:
            return None
        if now >= piece.read_at + OLDEST:
            self._cache.drop(piece)
            return None
        self._cache.use(piece, now)
        return piece

    def end_of_gap(self, segment: Segment, after: int) -> int:
        """Up to where rows after `after` must be read: where the next piece begins, or the segment ends."""
        if segment.ranges is not None:
            return min(segment.upto, after + self.span)
        at = bisect_right(self._begins, after)
        return min(segment.upto, self._begins[at]) if at < len(self._begins) else segment.upto

    def blocks(self, segment: Segment, rows: int, size: int) -> Blocks | None:
        """How a piece with so many rows is read in blocks of `size` bytes; None if it is read row by row."""
        if segment.ranges is not None or not self.stream.unique_ids:
            return None
        return self.sizes.blocks(rows, size, by_reader=self.stream.reader is not None)

    def put(self, segment: Segment, piece: Piece, now: float) -> None:
        """Keep a piece for others, unless the shelf is closed."""
        if self._closed:
            return
        if segment.ranges is not None:
            key = segment, piece.after
            if self._cache.add(piece, now, lambda: self._forget_part(key, piece)):
                self._parts[key] = piece
            return
        old = self._whole.get(piece.after)
        if old is not None:
            self._cache.drop(old)
        if self._cache.add(piece, now, lambda: self._forget_whole(piece)):
            insort(self._begins, piece.after)
            self._whole[piece.after] = piece

    def learn(self, segment: Segment, piece: Piece, seconds: float) -> None:
        """Take the size of rows, and how dense ids are, from a piece that was read in `seconds`."""
        if segment.ranges is None:
            ids = piece.upto - piece.after if piece.cut else None
            self.sizes.learn(piece.rows, piece.size, ids, failed=piece.no_blocks)
            return
        self.sizes.learn_bytes(piece.rows, piece.size)
        if seconds > SLOW:
            self.span = max(LEAST_SPAN, self.span // 4)
        elif seconds < QUICK and not piece.cut:
            self.span = min(1 << 62, self.span * 4)

    def need_above(self, lowest: int, now: float) -> None:
        """A client that has the rows up to `lowest` will need the pieces above."""
        for piece in [*self._whole.values(), *self._parts.values()]:
            if piece.upto > lowest:
                self._cache.need(piece, now)

    def trimmed(self, upto: int) -> None:
        """Drop pieces with rows that were trimmed: those up to `upto`."""
        for piece in [*self._whole.values(), *self._parts.values()]:
            if piece.after < upto:
                self._cache.drop(piece)

    def close(self) -> None:
        """Drop all pieces; pieces that are being read will not be kept."""
        self._closed = True
        for piece in [*self._whole.values(), *self._parts.values()]:
            self._cache.drop(piece)

    def _forget_whole(self, piece: Piece) -> None:
        if self._whole.get(piece.after) is piece:
            del self._whole[piece.after]
            self._begins.remove(piece.after)

    def _forget_part(self, key: tuple[Segment, int], piece: Piece) -> None:
        if self._parts.get(key) is piece:
            del self._parts[key]


SWEEP = 1.0  # seconds between two looks for unused pieces
SHARE = 8  # of the cache is the largest piece


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Bytes of a piece."""

    smallest: int = 64 << 10  # what a slow client is read at a time, and holds in memory
    first: int = 256 << 10  # when the client's speed is not known yet
    largest: int = 8 << 20  # some 50 ms of Postgres' fastest COPY, so that beginning a statement costs little
    block: int = 128 << 10  # of lines that Postgres sends as one value; 256 KiB and 64 KiB are slower (measured)


@dataclass(frozen=True, slots=True)
class CatchupLimits:
    """Bounds: reads at the same time, bytes, catch-ups of one client, bytes a second, seconds."""

    connections: int = 4
    cache_bytes: int = 64 << 20
    per_client: int = 4  # streams; they share one socket, so more at the same time are no faster
    pace: int = 4096
    pace_seconds: float = 60.0
    sizes: PieceSizes = PieceSizes()

    @classmethod
    def of(cls, limits: Limits) -> CatchupLimits:
        """From the settings."""
        return cls(
            limits.catchup_connections,
            limits.catchup_bytes,
            pace=limits.catchup_pace,
            pace_seconds=limits.stall_timeout,
        )


@dataclass(eq=False, slots=True)
class PieceRead:
    """One read under way: of (after, upto] up to the bounds, begun for `asker`.

    `claim`: the ids below it are expected to be in the piece, so a client that needs such an id waits.
    """

    asker: Asker
    shelf: Shelf
    segment: Segment
    after: int
    upto: int
    bounds: PieceBounds
    claim: float
    waiting: int = 0  # clients
    begun: bool = False
    piece: Piece | None = None
    error: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(frozen=True, slots=True)
class CatchupStatistics:
    """Present values (pieces, bytes, waiting) and counts since the start (reads, rows that Postgres was asked for)."""

    pieces: int
    bytes: int
    waiting: int
    reads: int
    rows: int


class Catchups:
    """The reads of all streams of one daemon. `run` must be running."""

    def __init__(self, limits: CatchupLimits = CatchupLimits()) -> None:
        self.limits = limits
        self.places = Places(limits.connections)
        self.largest = max(limits.sizes.smallest, min(limits.sizes.largest, limits.cache_bytes // SHARE))
        self._cache = PieceCache(limits.cache_bytes)
        self._shelves: WeakKeyDictionary[ServedStream, Shelf] = WeakKeyDictionary()
        self._readings: dict[Shelf, list[PieceRead]] = {}
        self.under_way: set[Copying] = set()
        self.clients: dict[tuple[int, str], Copying] = {}  # by connection and stream; also reads that wait their turn
        self._nursery: trio.Nursery | None = None
        self._kept = trio.Event()  # set when a piece is kept, so that it is dropped some time
        self._reads = self._rows = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    await self._kept.wait()
                    await trio.sleep(SWEEP)
                    self._sweep()
                    if not len(self._cache):
                        self._kept = trio.Event()
        finally:
            self._nursery = None

    def following(self) -> dict[int, list[Following]]:
        """What each client that catches up is sent, by the number of its connection."""
        found: dict[int, list[Following]] = {}
        for (client, stream), one in self.clients.items():
            left = max(0, one.stream.sent_upto - one.position)
            found.setdefault(client, []).append(Following(stream, None, left))
        return found

    def _sweep(self) -> None:
        """Drop the pieces that no client will need."""
        now = trio.current_time()
        for served, shelf in self._shelves.items():
            positions = [one.position for one in self.under_way if one.stream is served]
            if positions:
                shelf.need_above(min(positions), now)
        self._cache.sweep(now)

    def statistics(self) -> CatchupStatistics:
        """Counts, as one frozen value."""
        return CatchupStatistics(len(self._cache), self._cache.bytes, self.places.waiting, self._reads, self._rows)

    def shelf(self, served: ServedStream) -> Shelf:
        """The shelf of the stream's present state."""
        shelf = self._shelves.get(served)
        if shelf is None or not shelf.is_of(served.stream, served.late_rows):
            if shelf is not None:
                shelf.close()
            shelf = self._shelves[served] = Shelf(served.stream, served.late_rows, self._cache)
        return shelf

    def trimmed(self, served: ServedStream, upto: int) -> None:
        """Rows up to `upto` were trimmed: they are not sent any more."""
        if served in self._shelves:
            self._shelves[served].trimmed(upto)

    def use(self, piece: Piece) -> None:
        """A client takes a part of the piece now."""
        self._cache.use(piece, trio.current_time())

    def ask(self, asker: Asker, served: ServedStream, segment: Segment, after: int, size: int) -> PieceRead | None:
        """Begin to read what follows `after`, about `size` bytes, if no piece has it; None if a piece has it. The
        caller calls `leave` when it no longer waits for it.
        """
        shelf, now = self.shelf(served), trio.current_time()
        if shelf.find(segment, after, now) is not None:
            return None
        readings = self._readings.setdefault(shelf, [])
        for reading in readings:
            same = reading.after <= after < reading.claim if segment.ranges is None else reading.after == after
            if same and (reading.segment.ranges is None if segment.ranges is None else reading.segment == segment):
                reading.waiting += 1
                return reading
        if self._nursery is None:
            raise DatabaseError("catching up is not possible at this moment; resume later")
        row_limit = max(1, int(min(size, self.largest) / shelf.sizes.row_bytes))
        upto = shelf.end_of_gap(segment, after)
        claim = min(upto, after + row_limit * shelf.sizes.ids_per_row)
        blocks = shelf.blocks(segment, row_limit, self.limits.sizes.block)
        bounds = PieceBounds(row_limit, min(size, self.largest), blocks)
        reading = PieceRead(asker, shelf, segment, after, upto, bounds, claim, waiting=1)
        readings.append(reading)
        self._nursery.start_soon(self._read, reading, served)
        return reading

    def leave(self, reading: PieceRead) -> None:
        """One client less waits; without any, a read that has not begun is given up."""
        reading.waiting -= 1
        if not reading.waiting and not reading.begun:
            reading.scope.cancel()

    async def piece(self, asker: Asker, served: ServedStream, segment: Segment, after: int, size: int) -> Piece:
        """The piece with the rows that follow `after`, from memory or from Postgres.

        Raises what `RowSource.copy_range` raises, for the row that follows `after`.
        """
        while True:
            reading = self.ask(asker, served, segment, after, size)
            if reading is None:
                piece = self.shelf(served).find(segment, after, trio.current_time())
                assert piece is not None
                return piece
            try:
                await reading.done.wait()
            finally:
                self.leave(reading)
            piece = reading.piece
            if piece is not None and not piece.dropped and after < piece.upto:
                return piece
            if reading.error is not None and reading.after == after:
                raise _again(reading.error) from reading.error.__cause__

    async def _read(self, reading: PieceRead, served: ServedStream) -> None:
        shelf = reading.shelf
        try:
            with reading.scope:
                async with self.places.place(reading.asker):
                    reading.begun = True
                    began = trio.current_time()
                    rows = served.catchup_rows(shelf.stream)
                    piece = await read_piece(rows, reading.segment, reading.after, reading.upto, reading.bounds)
                    piece.read_at = began
                    now = trio.current_time()
                    self._reads += 1
                    self._rows += piece.rows
                    served.tally.reading += now - began
                    shelf.learn(reading.segment, piece, now - began)
                    shelf.put(reading.segment, piece, now)
                    self._kept.set()
                    reading.piece = piece
        except Exception as error:  # noqa: BLE001 - raised in the tasks that wait for the piece
            reading.error = error
        finally:
            readings = self._readings[shelf]
            readings.remove(reading)
            if not readings:
                del self._readings[shelf]
            reading.done.set()


def _again(error: Exception) -> Exception:
    """A copy for a waiting client: an exception that is raised again and again would gather tracebacks."""
    return copy.copy(error)
