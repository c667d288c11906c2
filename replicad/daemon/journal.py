"""One bounded journal per stream and order, shared by all its readers.

Chunks of rendered lines are appended once. A reader is a cursor, so nothing is copied or queued per client. The bounds:

- The window holds at most `max_bytes` and `max_chunks`. When room is needed, the oldest chunk is removed.
- Before that, the writer waits a little for the readers of the oldest chunk, so that a burst that Postgres writes
  faster than any socket sends does not disconnect all readers. If fewer than half of the readers lag, each of them may
  delay the writer for `patience` seconds in all; then it is dropped. A reader that has taken nothing for `patience`
  seconds when room is needed is dropped at once.
- A reader whose next chunk is older than `max_age` when room is needed is dropped in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from replicad.errors import ReplicadError, RowUnreadable, SlowReader

TAKE_BYTES = 256 * 1024  # of chunks taken together: half the work of one at a time; more gains little
TAKE_CHUNKS = 256  # taken together: fits into one system call, and bounds the memory that a stuck reader holds


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """The bounds of one channel: bytes, chunks, seconds, seconds."""

    max_bytes: int = 64 << 20  # about a second of Postgres' fastest COPY
    max_chunks: int = 1 << 16  # a single row is a chunk of one line; so many of them take some 20 MB
    max_age: float = 30.0  # a client that is this late does not keep up
    patience: float = 1.0  # how long a lagging reader may delay the others, in all


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place between two chunks where the positions of all writers are known: `index` is the next chunk's number."""

    index: int
    positions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """The first three are present values, the others counts since the channel was made."""

    chunks: int
    bytes: int
    readers: int
    appended_chunks: int
    appended_bytes: int
    fallen: int
    waited_s: float


@dataclass(slots=True)
class _Chunk:
    data: bytes
    at: float
    extended: bool


class Reader:
    """A cursor into a channel. `wake` is called when something can be taken again."""

    __slots__ = (
        "_channel",
        "_inserted",
        "_patience",
        "cursor",
        "ended",
        "extended",
        "fallen",
        "moved_at",
        "on_fall",
        "on_stop",
        "wake",
    )

    def __init__(
        self, channel: Channel, cursor: int, wake: Callable[[], None], extended: bool, patience: float
    ) -> None:
        self._channel = channel
        self._patience = patience
        self._inserted: tuple[int, bytes] | None = None
        self.cursor = cursor
        self.wake = wake
        self.extended = extended
        self.fallen = False
        self.moved_at = float("-inf")  # when it last took something; the time of the append before
        self.on_fall = wake  # called when it was dropped: its session may hang in a send and never take more
        self.on_stop: Callable[[RowUnreadable], None] | None = None  # called when the stream stops at its cursor
        self.ended: ReplicadError | None = None

    def take_nowait(self) -> list[bytes]:
        """The next chunks, about TAKE_BYTES; none at the head. They are not copied.

        Raises:
            SlowReader: the next chunk has left the window.
            ReplicadError: the channel was cut.
        """
        channel = self._channel
        if self.ended is not None:
            raise self.ended
        if self.fallen:
            raise self.refusal()
        taken: list[bytes] = []
        size = 0
        if self._inserted is not None and self.cursor >= self._inserted[0]:
            taken.append(self._inserted[1])
            self._inserted = None
        while self.cursor < channel.head and len(taken) < TAKE_CHUNKS:
            if self._inserted is not None and self.cursor == self._inserted[0]:
                break
            chunk = channel.chunks[self.cursor]
            if chunk.extended and not self.extended:
                self.cursor += 1
                continue
            if taken and size + len(chunk.data) > TAKE_BYTES:
                break
            taken.append(chunk.data)
            size += len(chunk.data)
            self.cursor += 1
        if self.cursor == channel.head:
            self._patience = channel.limits.patience
        if taken:
            self.moved_at = channel.appended_at
            channel.reader_moved()
        return taken

    def insert(self, index: int, data: bytes) -> None:
        """Deliver whole lines before chunk number `index`; they replace inserted lines that are not delivered yet."""
        self._inserted = (index, data)
        self.wake()

    @property
    def stopped(self) -> RowUnreadable | None:
        """The error for which the stream stops after the last chunk, if this reader has taken it; else None."""
        held = self._channel.held
        return held.copy() if held is not None and self.cursor == self._channel.head else None

    def refusal(self) -> SlowReader:
        """The error for a reader that was dropped."""
        return SlowReader(
            f"the next line of {self._channel.name} is no longer held; reconnect and resume from your token"
        )

    def charge(self, seconds: float) -> bool:
        """Subtract from the time that this reader may still delay the others; False when none is left."""
        self._patience -= seconds
        return self._patience > 0

    def close(self) -> None:
        """Stop reading; safe to repeat."""
        self._channel.remove(self)


class Channel:
    """The journal of one stream in one order. One task appends; any number of readers take."""

    def __init__(self, name: str, positions: Mapping[str, int], limits: JournalLimits | None = None) -> None:
        self.name = name
        self.limits = limits or JournalLimits()
        self.chunks: dict[int, _Chunk] = {}
        self.head = 0
        self.tail = 0
        self.appended_at = float("-inf")
        self.boundary = Boundary(0, dict(positions))
        self.held: RowUnreadable | None = None  # why the stream stops after the last chunk
        self.released = trio.Event()  # set when that is over; then replaced
        self.ended: ReplicadError | None = None  # why nothing will be appended any more
        self._bytes = 0
        self._readers: set[Reader] = set()
        self._moved = trio.Event()
        self._sealed = trio.Event()
        self._appended_bytes = 0
        self._fallen = 0
        self._waited = 0.0

    # --- reading ---

    def subscribe(self, cursor: int, wake: Callable[[], None], *, extended: bool) -> Reader:
        """A reader that begins at chunk number `cursor`, which must still be held or be the head.

        Raises:
            SlowReader: the chunk is no longer held.
            ReplicadError: the journal has ended.
        """
        if self.ended is not None:
            raise self.ended
        if not self.tail <= cursor <= self.head:
            raise SlowReader(f"chunk {cursor} of {self.name} is no longer held")
        reader = Reader(self, cursor, wake, extended, self.limits.patience)
        self._readers.add(reader)
        return reader

    def remove(self, reader: Reader) -> None:
        """Remove a reader; safe to repeat."""
        self._readers.discard(reader)
        self.reader_moved()

    def reader_moved(self) -> None:
        """A cursor moved or was removed: the writer, if it waits for room, checks again."""
        if not self._moved.is_set():
            self._moved.set()

    # --- writing ---

    async def append(self, data: bytes, *, extended: bool = False) -> None:
        """Add a chunk of whole lines, making room first. `extended` chunks are for subscribers by name only."""
        if not data:
            return
        if self._over(len(data)):
            await self._make_room(len(data))
        self.appended_at = trio.current_time()
        self.chunks[self.head] = _Chunk(data, self.appended_at, extended)
        self.head += 1
        self._bytes += len(data)
        self._appended_bytes += len(data)
        for reader in self._readers:
            reader.wake()

    def seal(self, positions: Mapping[str, int]) -> None:
        """Set a boundary: the chunks so far have everything up to `positions` and nothing beyond."""
        self.boundary = Boundary(self.head, dict(positions))
        self._sealed.set()
        self._sealed = trio.Event()

    async def wait_sealed(self) -> None:
        """Wait for the next boundary."""
        await self._sealed.wait()

    def cut(self, error: ReplicadError, positions: Mapping[str, int]) -> None:
        """Remove all readers and chunks and begin again at `positions`. Readers get `error`."""
        for reader in self._readers:
            reader.ended = error
            reader.wake()
        self._readers.clear()
        self.chunks.clear()
        self._bytes = 0
        self.tail = self.head
        self.seal(positions)
        self.reader_moved()

    def end(self, error: ReplicadError) -> None:
        """Remove all readers and accept no more. Readers get `error`."""
        self.ended = error
        self.cut(error, self.boundary.positions)
        self.release()

    def hold(self, error: RowUnreadable) -> None:
        """Stop the stream after the last boundary; readers that have reached it see `error` as `stopped`."""
        self.held = error
        for reader in self._readers:
            reader.wake()

    def release(self) -> None:
        """End `hold`; safe to repeat."""
        self.held = None
        self.released.set()
        self.released = trio.Event()

    def statistics(self) -> ChannelStatistics:
        """Counts, as one frozen value."""
        return ChannelStatistics(
            chunks=len(self.chunks),
            bytes=self._bytes,
            readers=len(self._readers),
            appended_chunks=self.head,
            appended_bytes=self._appended_bytes,
            fallen=self._fallen,
            waited_s=self._waited,
        )

    def _over(self, extra: int) -> bool:
        return bool(self.chunks) and (
            self._bytes + extra > self.limits.max_bytes or len(self.chunks) >= self.limits.max_chunks
        )

    async def _make_room(self, extra: int) -> None:
        while self._over(extra):
            late = [reader for reader in self._readers if reader.cursor == self.tail]
            if late:
                for reader in await self._wait_for(late):
                    reader.fallen = True
                    self._fallen += 1
                    self._readers.discard(reader)
                    reader.on_fall()
            else:
                self._bytes -= len(self.chunks.pop(self.tail).data)
                self.tail += 1

    async def _wait_for(self, late: list[Reader]) -> list[Reader]:
        """Wait a moment for the readers at the tail; returns those to be dropped."""
        began = trio.current_time()
        offered_at = self.chunks[self.tail].at
        remaining = offered_at + self.limits.max_age - began
        if remaining <= 0:
            return late
        if not self._most_lag():
            idle_since = began - self.limits.patience
            if stuck := [reader for reader in late if max(offered_at, reader.moved_at) <= idle_since]:
                return stuck
        self._moved = trio.Event()
        with trio.move_on_after(min(remaining, 0.05)):
            await self._moved.wait()
        waited = trio.current_time() - began
        self._waited += waited
        if self._most_lag():
            return []
        return [reader for reader in late if reader.cursor == self.tail and not reader.charge(waited)]

    def _most_lag(self) -> bool:
        """Whether most readers lag. Then the machine is slow, and no reader is charged."""
        middle = self.tail + len(self.chunks) // 2
        return 2 * sum(reader.cursor < middle for reader in self._readers) > len(self._readers)
