"""One bounded journal per stream and order, shared by all who read it.

Chunks of finished lines go in once; a reader is no more than a cursor, so nothing is copied or queued per client.
What the lines say is none of its business. The bounds:

- The window holds at most `max_bytes`, `max_chunks` and `max_age`. A chunk leaves at the tail when room is needed.
- Room is made by waiting a little for the readers at the tail, so that a burst that Postgres writes faster than
  any socket takes it does not cut everybody off. A minority that lags while the others are ahead may hold the writer
  up for `patience` seconds in all, then it falls off the tail and the others go on without it. One that has taken
  nothing for that long by the time room is needed falls at once: it costs the others nothing.
- A reader whose next chunk is older than `max_age` when room is needed falls off whatever the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from replicad.errors import ReplicadError, RowUnreadable, SlowReader

TAKE_BYTES = 256 * 1024  # chunks are taken together up to this much: half the work of one at a time, more gains little
TAKE_CHUNKS = 256  # and up to so many: what a system call takes, and a bound for what a stuck reader holds on to


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """The bounds of one channel: bytes, chunks, seconds, seconds."""

    max_bytes: int = 64 << 20  # about a second of Postgres' fastest COPY
    max_chunks: int = 1 << 16  # single rows come as chunks of one line; this many take some 20 MB
    max_age: float = 30.0  # a client that is this late is not keeping up
    patience: float = 1.0  # what a laggard may cost the others, once


@dataclass(frozen=True, slots=True)
class Seam:
    """A place between two chunks where the positions of all writers are known: `index` is the next chunk's number."""

    index: int
    positions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counted since the channel was made, but for the first three, which are now."""

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
    """A cursor into a channel. `wake` is called, at most once per wait, when something can be taken again."""

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
        self.moved_at = float("-inf")  # when it took something last, as exact as the last append
        self.on_fall = wake  # called when it has fallen: it may be busy sending and never come to take more
        self.on_stop: Callable[[RowUnreadable], None] | None = None  # called when the stream stops where it has got to
        self.ended: ReplicadError | None = None

    def take_nowait(self) -> list[bytes]:
        """The next chunks, about TAKE_BYTES; none at the head. They are the journal's own: nothing is copied.

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
        """Have whole lines handed out before chunk number `index`; they take the place of lines that wait already."""
        self._inserted = (index, data)
        self.wake()

    @property
    def stopped(self) -> RowUnreadable | None:
        """Why nothing comes behind what this reader has taken; None while it may go on."""
        held = self._channel.held
        return held.copy() if held is not None and self.cursor == self._channel.head else None

    def refusal(self) -> SlowReader:
        """What to tell a reader that has fallen."""
        return SlowReader(
            f"the next line of {self._channel.name} is no longer held; reconnect and resume from your token"
        )

    def charge(self, seconds: float) -> bool:
        """Take from what this reader may still cost the others; False when nothing is left."""
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
        self.seam = Seam(0, dict(positions))
        self.held: RowUnreadable | None = None  # why the stream stops behind the last chunk
        self.released = trio.Event()  # when that is over
        self.ended: ReplicadError | None = None  # why nothing will come any more
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
            SlowReader: the chunk has left the window already.
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
        """Forget a reader; safe to repeat."""
        self._readers.discard(reader)
        self.reader_moved()

    def reader_moved(self) -> None:
        """A cursor moved or went: whoever waits for room looks again."""
        if not self._moved.is_set():
            self._moved.set()

    # --- writing ---

    async def append(self, data: bytes, *, extended: bool = False) -> None:
        """Add one chunk of whole lines, making room first. `extended` ones are for subscribers by name only."""
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
        """Say that everything up to `positions`, and nothing beyond, is in the chunks so far."""
        self.seam = Seam(self.head, dict(positions))
        self._sealed.set()
        self._sealed = trio.Event()

    async def wait_sealed(self) -> None:
        """Until the next seam is made."""
        await self._sealed.wait()

    def cut(self, error: ReplicadError, positions: Mapping[str, int]) -> None:
        """Throw all readers and chunks out, and begin again at `positions`: what was appended last must not go on."""
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
        """Throw all readers out, and take no more."""
        self.ended = error
        self.cut(error, self.seam.positions)
        self.release()

    def hold(self, error: RowUnreadable) -> None:
        """Say that nothing comes behind the last seam for now; readers that get there see it as `stopped`."""
        self.held = error
        for reader in self._readers:
            reader.wake()

    def release(self) -> None:
        """Go on; safe to repeat."""
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
        """Give the readers at the tail a moment; returns those that have to fall."""
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
        """Whether most readers are behind: then it is the machine that is slow, not they, and nobody is charged."""
        middle = self.tail + len(self.chunks) // 2
        return 2 * sum(reader.cursor < middle for reader in self._readers) > len(self._readers)
