"""Reads pieces for all clients that catch up, on a bounded number of connections.

Clients that need the same rows wait for one read. Who waits for a connection waits in turn by crowd and client
(`places`). No connection is held while a socket is full.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import trio

from replicad.config.limits import Limits
from replicad.daemon.clients import Following
from replicad.daemon.places import Asker, Places
from replicad.errors import DatabaseError
from replicad.streams.row_pieces import Piece, PieceBounds, Segment, read_piece
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.shelf import PieceCache, Shelf

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


class UnderWay(Protocol):
    """A catch-up of one client. `position`: it has all rows up to there."""

    @property
    def feed(self) -> Feed: ...

    @property
    def position(self) -> int: ...


class Catchups:
    """The reads of all streams of one daemon. `run` must be running."""

    def __init__(self, limits: CatchupLimits = CatchupLimits()) -> None:
        self.limits = limits
        self.places = Places(limits.connections)
        self.largest = max(limits.sizes.smallest, min(limits.sizes.largest, limits.cache_bytes // SHARE))
        self._cache = PieceCache(limits.cache_bytes)
        self._shelves: WeakKeyDictionary[Feed, Shelf] = WeakKeyDictionary()
        self._readings: dict[Shelf, list[PieceRead]] = {}
        self.under_way: set[UnderWay] = set()
        self.clients: dict[tuple[int, str], UnderWay] = {}  # by connection and stream; also reads that wait their turn
        self._nursery: trio.Nursery | None = None
        self._kept = trio.Event()  # set when a piece is kept, so that it is dropped some time
        self._reads = self._rows = 0
        self.sent_rows: Counter[str] = Counter()  # to clients that caught up, by stream; for figures

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
            left = max(0, one.feed.sent_upto - one.position)
            found.setdefault(client, []).append(Following(stream, None, left))
        return found

    def _sweep(self) -> None:
        """Drop the pieces that no client will need."""
        now = trio.current_time()
        for feed, shelf in self._shelves.items():
            positions = [one.position for one in self.under_way if one.feed is feed]
            if positions:
                shelf.need_above(min(positions), now)
        self._cache.sweep(now)

    def statistics(self) -> CatchupStatistics:
        """Counts, as one frozen value."""
        return CatchupStatistics(len(self._cache), self._cache.bytes, self.places.waiting, self._reads, self._rows)

    def shelf(self, feed: Feed) -> Shelf:
        """The shelf of the stream's present state."""
        shelf = self._shelves.get(feed)
        if shelf is None or not shelf.is_of(feed.stream, feed.late_rows):
            if shelf is not None:
                shelf.close()
            shelf = self._shelves[feed] = Shelf(feed.stream, feed.late_rows, self._cache)
        return shelf

    def trimmed(self, feed: Feed, upto: int) -> None:
        """Rows up to `upto` were trimmed: they are not sent any more."""
        if feed in self._shelves:
            self._shelves[feed].trimmed(upto)

    def use(self, piece: Piece) -> None:
        """A client takes a part of the piece now."""
        self._cache.use(piece, trio.current_time())

    def ask(self, asker: Asker, feed: Feed, segment: Segment, after: int, size: int) -> PieceRead | None:
        """Begin to read what follows `after`, about `size` bytes, if no piece has it; None if a piece has it. The
        caller calls `leave` when it no longer waits for it.
        """
        shelf, now = self.shelf(feed), trio.current_time()
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
        row_limit = max(1, int(min(size, self.largest) / shelf.row_bytes))
        upto = shelf.end_of_gap(segment, after)
        claim = min(upto, after + row_limit * shelf.ids_per_row)
        blocks = shelf.blocks(segment, row_limit, self.limits.sizes.block)
        bounds = PieceBounds(row_limit, min(size, self.largest), blocks)
        reading = PieceRead(asker, shelf, segment, after, upto, bounds, claim, waiting=1)
        readings.append(reading)
        self._nursery.start_soon(self._read, reading, feed)
        return reading

    def leave(self, reading: PieceRead) -> None:
        """One client less waits; without any, a read that has not begun is given up."""
        reading.waiting -= 1
        if not reading.waiting and not reading.begun:
            reading.scope.cancel()

    async def piece(self, asker: Asker, feed: Feed, segment: Segment, after: int, size: int) -> Piece:
        """The piece with the rows that follow `after`, from memory or from Postgres.

        Raises what `RowSource.copy_range` raises, for the row that follows `after`.
        """
        while True:
            reading = self.ask(asker, feed, segment, after, size)
            if reading is None:
                piece = self.shelf(feed).find(segment, after, trio.current_time())
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

    async def _read(self, reading: PieceRead, feed: Feed) -> None:
        shelf = reading.shelf
        try:
            with reading.scope:
                async with self.places.place(reading.asker):
                    reading.begun = True
                    began = trio.current_time()
                    rows = feed.catchup_rows(shelf.stream)
                    piece = await read_piece(rows, reading.segment, reading.after, reading.upto, reading.bounds)
                    piece.read_at = began
                    now = trio.current_time()
                    self._reads += 1
                    self._rows += piece.rows
                    feed.tally.reading += now - began
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
