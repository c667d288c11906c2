"""One bounded journal per stream and order, shared by all its readers.

Chunks of rendered lines are appended once. A reader is a cursor, so nothing is copied or queued per client. A reader at
the head whose socket is free is sent a small chunk by the task that appends, so that its session's task need not be
woken: that costs more than the send. The bounds:

- A chunk that all readers have taken is removed when it is KEPT seconds old.
- The window holds at most `max_bytes` and `max_chunks`. When room is needed, the oldest chunk is removed.
- Before that, the writer waits for the readers of the oldest chunk, so that a burst that Postgres writes faster than
  sockets send does not disconnect its readers. If another reader has nothing left to take, it is being delayed. Then a
  reader is dropped that has taken nothing for `patience` seconds, or less than `pace` bytes per second.
- A reader whose next chunk is older than `max_age` when room is needed is dropped in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from replicad.daemon.figures import Delays
from replicad.errors import ReplicadError, RowUnreadable, SlowReader

# How well one reader of a full journal keeps up. Each reader is judged by itself, by what its peer takes.
#
# The writer waits when the journal is full and a reader still needs the oldest chunk. A reader is *dispensable*, and
# may be dropped, in two cases:
#
# - Its peer has taken nothing for `patience` seconds, though the socket had something for it.
# - It owes `patience` seconds: each second in which the writer waits is a second owed, and each `pace` bytes that the
#   peer takes pay for a second. A reader that reaches the head owes nothing.
#
# Only what the peer takes counts. A reader whose session did not get its turn yet, because this machine is slow, is
# not blocked by its socket. This time does not count. All readers that lag are examined, and not only the readers
# that the writer waits for. So readers that stop together are dispensable together.


LOOKS: Final = 20  # in the time of `patience`: more cost time, fewer find out late

Progress = Callable[[], int | None]  # bytes that the peer has taken so far; None: no send is blocked by the socket


class ReaderLag:
    """The progress of one reader."""

    __slots__ = ("_owed", "_progress", "_seen", "_stirred_at")

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen: int | None = None  # the progress at the last look
        self._stirred_at = float("inf")  # when something was last seen to be taken; inf: not looked at since the head
        self._owed = 0.0

    def reach_head(self) -> None:
        """It has nothing left to take."""
        self._seen = None
        self._stirred_at = float("inf")
        self._owed = 0.0

    def look(self, now: float, waited: float, pace: float) -> None:
        """It lags. `waited`: how long the writer has waited, for whomever, since the last look."""
        at = self._progress()
        if at is None or self._seen is None:
            self._stirred_at = now
        else:
            if at != self._seen:
                self._stirred_at = now
            self._owed = max(0.0, self._owed + waited - max(0, at - self._seen) / pace)
        self._seen = at

    def idle(self, now: float, patience: float) -> bool:
        """Whether its peer has taken nothing for `patience` seconds."""
        return now - self._stirred_at >= patience

    def owes(self, patience: float) -> bool:
        """Whether it takes too little: it owes `patience` seconds."""
        return self._owed >= patience


TAKE_BYTES = 288 * 1024  # of chunks taken together: two of a large copy, half the work of one; more gains little
TAKE_CHUNKS = 256  # taken together: fits into one system call, and bounds the memory that a stuck reader holds
OFFER_BYTES = 16 * 1024  # of a chunk that is sent at once; a socket takes it, and more would hold up the other readers
KEPT = 5.0  # seconds for which a chunk stays that all readers have: a client that catches up may join before it
TIDY = 0.5  # seconds between two looks for such chunks, while rows come
TIDIED = 1000  # chunks that are removed at once: some milliseconds
ROW = b"RDATA "  # begins a chunk of rows
SLICE = 200  # readers that are sent a chunk, some 2 ms, before other tasks run


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """The bounds of one channel: bytes, chunks, seconds, seconds, bytes per second."""

    max_bytes: int = 64 << 20  # about a second of Postgres' fastest COPY
    max_chunks: int = 8192  # a single row is a chunk of one line; so many of them take some 2.5 MB
    max_age: float = 30.0  # a client that is this late does not keep up
    patience: float = 1.0  # how long a reader that takes nothing may delay the others
    pace: float = 64 << 10  # a reader for which the others wait must take so much


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place between two chunks where the positions of all writers are known: `index` is the next chunk's number."""

    index: int
    positions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """The first four are present values, the others counts since the channel was made. `fill`: of its bytes or chunks,
    the larger share that is used, 0 to 1.
    """

    chunks: int
    bytes: int
    readers: int
    fill: float
    appended_chunks: int
    appended_lines: int
    appended_bytes: int
    fallen: int
    waited_s: float


@dataclass(slots=True)
class _Chunk:
    data: bytes
    at: float
    extended: bool
    since: float | None  # when ids of its rows were first seen to be given out; None: unknown, or it has no rows
    lines: int


class Reader:
    """A cursor into a channel. `wake` is called when something can be taken again."""

    __slots__ = (
        "_channel",
        "_inserted",
        "_taken",
        "cursor",
        "ended",
        "extended",
        "fallen",
        "offer",
        "on_fall",
        "on_stop",
        "preface",
        "standing",
        "wake",
    )

    def __init__(
        self, channel: Channel, cursor: int, wake: Callable[[], None], extended: bool, progress: Progress | None
    ) -> None:
        self._channel = channel
        self._inserted: tuple[int, bytes] | None = None
        self._taken = 0
        self.cursor = cursor
        self.wake = wake
        self.extended = extended
        self.fallen: str | None = None  # why it was dropped
        self.standing = ReaderLag(progress or self._progress)
        self.offer: Callable[[bytes], bool] | None = None  # send it now, after all that was taken; False: it was not
        self.on_fall = wake  # called when it was dropped: its session may hang in a send and never take more
        self.on_stop: Callable[[RowUnreadable], None] | None = None  # called when the stream stops at its cursor
        self.ended: ReplicadError | None = None
        self.preface = b""  # lines that are sent together with the first rows

    def take_nowait(self) -> list[bytes]:
        """The next chunks, about TAKE_BYTES; none at the head. They are not copied.

        Raises:
            SlowReader: the next chunk has left the window.
            ReplicadError: the channel was cut.
        """
        channel = self._channel
        if self.ended is not None:
            raise self.ended
        if self.fallen is not None:
            raise self.refusal()
        taken: list[bytes] = []
        now, size = trio.current_time(), 0
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
            if self.preface and chunk.data.startswith(ROW):
                taken.append(self.preface)
                self.preface = b""
            taken.append(chunk.data)
            if chunk.since is not None:
                channel.delays.observe(now - chunk.since, chunk.lines)
            size += len(chunk.data)
            self.cursor += 1
        if self.cursor == channel.head:
            self.standing.reach_head()
        if taken:
            self._taken += size
            channel.reader_moved()
        return taken

    def offer_nowait(self, index: int, chunk: _Chunk) -> bool:
        """Send the last chunk, number `index`, if everything before it was taken and the socket is free."""
        if self.cursor != index or self._inserted is not None or self.preface:
            return False
        if not chunk.extended or self.extended:
            if self.offer is None or not self.offer(chunk.data):
                return False
            self._taken += len(chunk.data)
        self.cursor += 1
        return True

    @property
    def stream(self) -> str:
        """The stream whose journal it reads."""
        return self._channel.name

    def behind_s(self, now: float) -> float:
        """For how many seconds its next chunk has been in the journal; 0 at the head."""
        chunk = self._channel.chunks.get(self.cursor)
        return 0.0 if chunk is None else max(0.0, now - chunk.at)

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
        why = self.fallen or "it is too old"
        return SlowReader(
            f"the next line of {self._channel.name} is no longer held: {why}; reconnect and resume from your token"
        )

    def close(self) -> None:
        """Stop reading; safe to repeat. The callbacks are dropped: they refer to this object, in a cycle."""
        self._channel.remove(self)
        self.wake = self.on_fall = _do_nothing
        self.offer = self.on_stop = None

    def _progress(self) -> int:
        return self._taken


def _do_nothing() -> None:
    """What a closed reader calls."""


class Channel:
    """The journal of one stream in one order. One task appends; any number of readers take."""

    def __init__(self, name: str, positions: Mapping[str, int], limits: JournalLimits | None = None) -> None:
        self.name = name
        self.limits = limits or JournalLimits()
        self.chunks: dict[int, _Chunk] = {}
        self.head = 0
        self.tail = 0
        self.lines = 0  # that were appended
        self.delays = Delays()  # of rows that readers have taken
        self.boundary = Boundary(0, dict(positions))
        self.held: RowUnreadable | None = None  # why the stream stops after the last chunk
        self.released = trio.Event()  # set when that is over; then replaced
        self.ended: ReplicadError | None = None  # why nothing will be appended any more
        self._bytes = 0
        self._readers: set[Reader] = set()
        self._moved = trio.Event()
        self._sealed = trio.Event()
        self._at_seal: set[Callable[[], None]] = set()
        self._appended_bytes = 0
        self._fallen = 0
        self._waited = 0.0
        self._unpaid = 0.0  # of `_waited`, since the last look at all readers
        self._look_at = float("-inf")  # when the next look is due
        self._tidy_at = float("-inf")

    # --- reading ---

    def subscribe(
        self, cursor: int, wake: Callable[[], None], *, extended: bool, progress: Progress | None = None
    ) -> Reader:
        """A reader that begins at chunk number `cursor`, which must still be held or be the head.

        `progress`: how much the peer has taken so far, as of `ReaderLag`; without it, what the reader has taken.

        Raises:
            SlowReader: the chunk is no longer held.
            ReplicadError: the journal has ended.
        """
        if self.ended is not None:
            raise self.ended
        if not self.tail <= cursor <= self.head:
            raise SlowReader(f"chunk {cursor} of {self.name} is no longer held")
        reader = Reader(self, cursor, wake, extended, progress)
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

    async def append(
        self, data: bytes, *, extended: bool = False, since: float | None = None, lines: int | None = None
    ) -> None:
        """Add a chunk of whole lines, making room first. `extended` chunks are for subscribers by name only. `since`:
        the time from which the delay of its rows is counted, when a reader takes them. `lines`: their number, where it
        is known.
        """
        if not data:
            return
        now = trio.current_time()
        if now >= self._tidy_at:
            self.tidy(now)
        if now >= self._look_at and self._is_filling():
            self._look(now)
        if self.is_full(len(data)):
            await self._make_room(len(data))
            now = trio.current_time()
        lines = data.count(b"\n") if lines is None else lines
        chunk = self.chunks[self.head] = _Chunk(data, now, extended, since, lines)
        self.head += 1
        self.lines += lines
        self._bytes += len(data)
        self._appended_bytes += len(data)
        if len(data) > OFFER_BYTES:
            for reader in self._readers:
                reader.wake()
        else:
            await self._offer(self.head - 1, chunk)

    async def _offer(self, index: int, chunk: _Chunk) -> None:
        """Send a small chunk to the readers at the head; the others are woken."""
        readers = list(self._readers)
        for start in range(0, len(readers), SLICE):
            if start:
                try:
                    await trio.lowlevel.checkpoint()
                except BaseException:
                    for reader in readers[start:]:
                        reader.wake()
                    raise
            sent = 0
            for reader in readers[start : start + SLICE]:
                if reader in self._readers and reader.offer_nowait(index, chunk):
                    sent += 1
                else:
                    reader.wake()
            if chunk.since is not None and sent:
                self.delays.observe(trio.current_time() - chunk.since, sent * chunk.lines)

    def tidy(self, now: float) -> None:
        """Remove the chunks that all readers have taken, KEPT seconds after they came."""
        self._tidy_at = now + TIDY
        if self.tail >= self.head or self.chunks[self.tail].at > now - KEPT:
            return
        needed = min((reader.cursor for reader in self._readers), default=self.head)
        needed = min(needed, self.boundary.index, self.tail + TIDIED)  # the second: where new readers begin
        while self.tail < needed and self.chunks[self.tail].at <= now - KEPT:
            self._remove_oldest()
        if not self.chunks:
            self.chunks.clear()  # the table of the dictionary, too

    def _remove_oldest(self) -> None:
        self._bytes -= len(self.chunks.pop(self.tail).data)
        self.tail += 1

    def seal(self, positions: Mapping[str, int]) -> None:
        """Set a boundary: the chunks so far have everything up to `positions` and nothing beyond."""
        self.boundary = Boundary(self.head, dict(positions))
        self._sealed.set()
        self._sealed = trio.Event()
        for wake in list(self._at_seal):
            wake()

    async def wait_sealed(self) -> None:
        """Wait for the next boundary."""
        await self._sealed.wait()

    @contextmanager
    def at_seal(self, wake: Callable[[], None]) -> Iterator[None]:
        """For the block, call `wake` at each boundary."""
        self._at_seal.add(wake)
        try:
            yield
        finally:
            self._at_seal.remove(wake)

    def cut(self, error: ReplicadError, positions: Mapping[str, int]) -> None:
        """Remove all readers and chunks and begin again at `positions`. Readers get `error`.

        A boundary of before is not held any more: who still catches up to it would miss the rows up to `positions`.
        """
        for reader in self._readers:
            reader.ended = error
            reader.wake()
        self._readers.clear()
        self.chunks.clear()
        self._bytes = 0
        self.head += 1
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

    @property
    def waited(self) -> float:
        """Seconds for which the writer has waited for room."""
        return self._waited

    @property
    def readers(self) -> int:
        """How many read it."""
        return len(self._readers)

    def statistics(self) -> ChannelStatistics:
        """Counts, as one frozen value."""
        return ChannelStatistics(
            chunks=len(self.chunks),
            bytes=self._bytes,
            readers=len(self._readers),
            fill=max(self._bytes / self.limits.max_bytes, len(self.chunks) / self.limits.max_chunks),
            appended_chunks=self.head,
            appended_lines=self.lines,
            appended_bytes=self._appended_bytes,
            fallen=self._fallen,
            waited_s=self._waited,
        )

    def is_full(self, extra: int) -> bool:
        """Whether `append` of so many bytes has to make room, for which it may wait."""
        return bool(self.chunks) and (
            self._bytes + extra > self.limits.max_bytes or len(self.chunks) >= self.limits.max_chunks
        )

    def _is_filling(self) -> bool:
        """Whether room may be needed soon. Readers are examined before that, so that stopped readers are known."""
        return 2 * self._bytes > self.limits.max_bytes or 2 * len(self.chunks) > self.limits.max_chunks

    async def wait_room(self, extra: int, seconds: float = float("inf")) -> bool:
        """Make room for so many bytes, for which readers may have to be waited for. False if that takes longer."""
        with trio.move_on_after(seconds):
            await self._make_room(extra)
        return not self.is_full(extra)

    async def _make_room(self, extra: int) -> None:
        while self.is_full(extra):
            late = [reader for reader in self._readers if reader.cursor == self.tail]
            if late:
                for reader, why in await self._wait_for(late):
                    reader.fallen = why
                    self._fallen += 1
                    self._readers.discard(reader)
                    reader.on_fall()
            else:
                self._remove_oldest()

    async def _wait_for(self, late: list[Reader]) -> list[tuple[Reader, str]]:
        """Wait a moment for the readers at the tail; returns those to be dropped, and why."""
        limits, began = self.limits, trio.current_time()
        remaining = self.chunks[self.tail].at + limits.max_age - began
        if remaining <= 0:
            return [(reader, f"it is {limits.max_age:g} s old (journal_seconds)") for reader in late]
        if found := self._dispensable(late, began):
            return found
        self._moved = trio.Event()
        pause = min(remaining, limits.patience / LOOKS)
        with trio.move_on_after(pause):
            await self._moved.wait()
        now = trio.current_time()
        waited = min(now - began, pause)  # time beyond it is the time of other tasks
        self._waited += waited
        self._unpaid += waited
        if now >= self._look_at:
            self._look(now)
        return []

    def _dispensable(self, late: list[Reader], now: float) -> list[tuple[Reader, str]]:
        """The readers at the tail that are too slow, if they delay another reader."""
        limits = self.limits
        idle = f"you took nothing for {limits.patience:g} s (journal_patience)"
        slow = f"you took less than {limits.pace:g} bytes/s (journal_pace)"
        found = [
            (reader, idle if reader.standing.idle(now, limits.patience) else slow)
            for reader in late
            if reader.standing.idle(now, limits.patience) or reader.standing.owes(limits.patience)
        ]
        return found if found and any(reader.cursor == self.head for reader in self._readers) else []

    def _look(self, now: float) -> None:
        """Look at all readers that lag."""
        waited, self._unpaid = self._unpaid, 0.0
        self._look_at = now + self.limits.patience / LOOKS
        for reader in self._readers:
            if reader.cursor != self.head:
                reader.standing.look(now, waited, self.limits.pace)
