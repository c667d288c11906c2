"""The sending side of one session: the queue, the sending task, and whether the socket is free now.

Three sources are sent, each in whole lines and one at a time: lines queued by `post_line`, answers streamed by `send`,
and the chunks of the journals (`read`). A task sends only while there is something to send; an idle session has none.
`offer` sends without any task, if nothing else is queued or being sent.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

import trio

from replicad.daemon import cuts
from replicad.daemon.journal import Channel, Reader
from replicad.errors import ReplicadError, RowUnreadable
from replicad.protocol.connection import CloseReason

if TYPE_CHECKING:
    from replicad.daemon.session import Session

# Large sends in rounds: so many of them in each turn of the event loop, however many clients could be sent something.
#
# A send of a quarter of a megabyte takes the kernel some 60 to 100 microseconds. Five hundred clients that catch up
# at the same time would make each turn last 20 ms, and every other client would wait for several such turns. So a
# task that wants to send much waits here for its place in a round.
#
# Most places go to the clients with the most rows to go. So clients that began a little later reach the others, and
# rows that were read for one client serve all. One place in four goes to the client that has waited longest, so that
# each gets its place.


SENDS = 4  # of answers and old rows in a round: a quarter of a millisecond, with no loss of speed
NEW_SENDS = 16  # of new rows: with fewer, fan-out to 200 clients is some per cent slower
MUCH = 32 << 10  # bytes from which a send waits for a place; a smaller one takes about as long as waiting does
IN_ORDER = 4  # one place in so many goes to the client that has waited longest
_SPARE = 64  # entries of tasks that wait no longer, before they are removed


class Rounds(trio.abc.Instrument):
    """The places of the present round, and the tasks that wait for one. Without `run`, no task has to wait."""

    def __init__(self, sends: int) -> None:
        """`sends`: places in a round."""
        self.sends = sends
        self.waits = 0  # times that a task had to wait, since the start
        self._taken = 0  # places of this round
        self._given = 0  # places, since the start
        self._numbers = count()
        self._waiting: dict[int, trio.lowlevel.Task] = {}  # by number, in the order in which they came
        self._order: deque[int] = deque()  # these numbers; and some of tasks that wait no longer, as in the next one
        self._by_way: list[tuple[float, int]] = []  # a heap: minus the ids to go, and the number
        self._runs = False
        self._some = trio.Event()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - what trio calls it with
        """A turn of the event loop ends, and with it the round."""
        self._taken = 0

    async def next(self, to_go: float = 0.0) -> None:
        """Wait for a place; other tasks run before it returns.

        `to_go`: the number of ids that the client has before it. The client with the most comes first.
        """
        if not self._runs or (self._taken < self.sends and not self._waiting):
            self._taken += 1
            await trio.lowlevel.checkpoint()
            return
        self.waits += 1
        number = next(self._numbers)
        self._waiting[number] = trio.lowlevel.current_task()
        self._order.append(number)
        heappush(self._by_way, (-to_go, number))
        self._some.set()

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._waiting[number]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Give places until cancelled. After it no task has to wait."""
        trio.lowlevel.add_instrument(self)
        self._runs = True
        try:
            while True:
                await self._some.wait()
                while self._waiting:
                    self._give(self.sends - self._taken)
                    await trio.lowlevel.checkpoint()
                self._some = trio.Event()
        finally:
            self._runs = False
            trio.lowlevel.remove_instrument(self)
            waiting, self._waiting = self._waiting, {}
            for task in waiting.values():
                trio.lowlevel.reschedule(task)

    def _give(self, places: int) -> None:
        for _ in range(min(places, len(self._waiting))):
            self._given += 1
            number = self._farthest() if self._given % IN_ORDER else self._longest()
            self._taken += 1
            trio.lowlevel.reschedule(self._waiting.pop(number))
        if len(self._order) > 2 * len(self._waiting) + _SPARE:
            self._order = deque(self._waiting)
        if len(self._by_way) > 2 * len(self._waiting) + _SPARE:
            self._by_way = [entry for entry in self._by_way if entry[1] in self._waiting]
            heapify(self._by_way)

    def _longest(self) -> int:
        """The client that has waited longest. There must be a waiting client; so in the next method."""
        while (number := self._order.popleft()) not in self._waiting:
            pass
        return number

    def _farthest(self) -> int:
        """The client with the most to go."""
        while (number := heappop(self._by_way)[1]) not in self._waiting:
            pass
        return number


@dataclass(frozen=True, slots=True)
class SendRounds:
    """The rounds of a daemon: for answers and old rows, and for new rows. The ones never wait for the others."""

    old: Rounds = field(default_factory=lambda: Rounds(SENDS))
    new: Rounds = field(default_factory=lambda: Rounds(NEW_SENDS))

    @property
    def waits(self) -> int:
        """Times that a send had to wait, since the start."""
        return self.old.waits + self.new.waits


# The sending side of one connection: sends pieces of bytes in order, within a bounded time.
#
# On plain sockets, many pieces go in one system call (`writev`, no copy), mostly without setting up a time-out. The
# fan-out of a stream spends its time here. This file does not interpret the bytes.


Piece = bytes | memoryview

MAX_PIECES = 512  # in one call; Linux takes 1,024
SLICE = 64 << 10  # bytes that a stream which encrypts is given at a time: it holds them twice
LOOKS = 4  # looks at a send that waits in each stall time: so a peer is cut up to a quarter of it late
LEAST = 1024  # bytes per second that a peer must take while a send waits
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_ACKED = 120  # where `struct tcp_info` of tcp(7) has tcpi_bytes_acked, eight bytes


class Outlet:
    """Sends to one peer. The session ensures that only one task sends at a time, and ends a send that takes too
    long.
    """

    def __init__(self, stream: trio.abc.SendStream, stall_timeout: float) -> None:
        """`stall_timeout`: the seconds in which the peer must take something of a `send` that waits for it."""
        self.look_at = inf  # when a send that waits for the socket is to be looked at (`stalls`); infinite without one
        self.torn = False  # a send did not complete: the peer may have half a line
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        # A stream that translates may have this method: it does the same with a piece for each peer, so it must get the
        # pieces as they are.
        self._send_pieces: Callable[[Sequence[Piece]], Awaitable[None]] | None = getattr(stream, "send_pieces", None)
        self._stall_timeout = stall_timeout
        self._sent = 0  # bytes that the socket has accepted so far
        self._moved = (0.0, 0)  # when the peer had last taken enough, and how much in all

    @property
    def sent(self) -> int:
        """How many bytes the socket has accepted so far."""
        return self._sent

    def progress(self) -> int | None:
        """How many bytes the peer's machine has taken so far; None while no send waits for the socket.

        What the socket has accepted and the peer's machine has not acknowledged is not counted.
        """
        return self._sent - _unacknowledged(self._stream) if self.look_at < inf else None

    @property
    def direct(self) -> bool:
        """Whether `send_nowait` is possible: on a plain socket."""
        return self._socket is not None

    def send_nowait(self, data: bytes) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest, which must be sent next. Only if `direct`.

        Small commits to many clients spend their time here.

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        assert self._socket is not None
        try:
            sent = os.write(self._socket.fileno(), data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise trio.BrokenResourceError(f"cannot send: {error.strerror}") from error
        self._sent += sent
        if sent == len(data):
            return ()
        self.torn = True
        return (memoryview(data)[sent:],)

    async def send(
        self,
        pieces: Sequence[Piece],
        rounds: Rounds,
        to_go: float = 0.0,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Send all of them; large sends wait for places in `rounds`, with `to_go`. `torn` is set until all are sent.

        `on_wait` is called with `look_at` when it waits for the socket. A time-out of trio for each wait would stay
        in its heap long after the wait (Deadlines are the better place).

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        large = sum(map(len, pieces)) >= MUCH
        if large:
            await rounds.next(to_go)
        self.torn = True
        if self._socket is None:
            self._wait(on_wait)
            if self._send_pieces is not None:
                await self._send_pieces(pieces)
                self._sent += sum(map(len, pieces))
            else:
                for part in sliced(pieces):
                    await self._stream.send_all(part)
                    self._sent += len(part)
            self.look_at = inf
            self.torn = False
            return
        rest = self._send_nowait(self._socket, pieces)
        if rest:
            self._wait(on_wait)
            while rest:
                await trio.lowlevel.wait_writable(self._socket)
                if large:
                    await rounds.next(to_go)
                rest = self._send_nowait(self._socket, rest)
            self.look_at = inf
            self.torn = False
        else:
            self.torn = False
            if not large:  # else they ran already
                await trio.lowlevel.checkpoint()  # let other tasks run

    def stalls(self, now: float) -> bool:
        """Whether the peer has taken less than LEAST bytes per second for the stall time; else `look_at` is set anew.

        To be called at `look_at`. What its machine has acknowledged counts as taken.
        """
        taken = self._taken()
        if taken - self._moved[1] >= LEAST * self._stall_timeout:
            self._moved = (now, taken)
        end = self._moved[0] + self._stall_timeout
        self.look_at = min(now + self._stall_timeout / LOOKS, end)
        return now >= end

    def _wait(self, on_wait: Callable[[float], None]) -> None:
        now = trio.current_time()
        self._moved = (now, self._taken())
        self.look_at = now + self._stall_timeout / LOOKS
        on_wait(self.look_at)

    def _taken(self) -> int:
        acknowledged = _acknowledged(self._stream)
        return self._sent - _unacknowledged(self._stream) if acknowledged is None else acknowledged

    def _send_nowait(self, link: trio.socket.SocketType, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the socket accepts now; returns the rest."""
        try:
            sent = os.writev(link.fileno(), pieces[:MAX_PIECES])
        except BlockingIOError:
            return pieces
        except OSError as error:
            raise trio.BrokenResourceError(f"cannot send: {error.strerror}") from error
        self._sent += sent
        for number, piece in enumerate(pieces):
            if sent < len(piece):
                return [memoryview(piece)[sent:], *pieces[number + 1 :]]
            sent -= len(piece)
        return ()


def sliced(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """All bytes of the pieces in parts of SLICE; small pieces are joined."""
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            held.append(rest[: SLICE - size])
            size += len(held[-1])
            rest = rest[len(held[-1]) :]
            if size == SLICE:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


def _socket_below(stream: trio.abc.SendStream) -> trio.socket.SocketType | None:
    """A stream that encrypts or translates has the one below as its `transport_stream`."""
    while isinstance(below := getattr(stream, "transport_stream", None), trio.abc.SendStream):
        stream = below
    return stream.socket if isinstance(stream, trio.SocketStream) and stream.socket.fileno() >= 0 else None


def _acknowledged(stream: trio.abc.SendStream) -> int | None:
    """The bytes that the peer's machine has acknowledged since the connection began; None if that is not known."""
    below = _socket_below(stream)
    if below is None or _TCP_INFO is None:
        return None
    try:
        answer = below.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ACKED + 8)
    except OSError:  # not of TCP
        return None
    return int(struct.unpack_from("Q", answer, _ACKED)[0]) if len(answer) == _ACKED + 8 else None


def _unacknowledged(stream: trio.abc.SendStream) -> int:
    """The bytes that the socket holds for the peer (SIOCOUTQ); 0 for a stream without a socket."""
    below = _socket_below(stream)
    if below is None:
        return 0
    try:
        answer = fcntl.ioctl(below.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:  # not of a kind that counts them
        return 0
    return int(struct.unpack("i", answer)[0])


QUEUED_BYTES = 1 << 20  # of answers and relayed lines that may wait for one client: ten thousand answers


class Outbox:
    """Sends to one peer. At most one task sends at a time; others wait for their turn."""

    __slots__ = (
        "_again",
        "_closing",
        "_direct",
        "_gathers",
        "_opened",
        "_outlet",
        "_owner",
        "_posted",
        "_posted_bytes",
        "_readers",
        "_rest",
        "_rounds",
        "_runs",
        "_turn",
        "_woken",
    )

    def __init__(
        self,
        stream: trio.abc.SendStream,
        owner: Session,
        stall_timeout: float,
        rounds: SendRounds | None = None,
    ) -> None:
        """`stall_timeout`: the seconds within which the peer must accept what is sent at once. `rounds`: the object at
        which large sends wait for their place. QUEUED_BYTES may be exceeded by at most one line. Call `open` next.
        """
        self._owner: Session | None = owner
        self._outlet = Outlet(stream, stall_timeout)
        self._rounds = rounds or SendRounds()
        self._turn = trio.Lock()  # held by the task that sends
        self._posted: list[bytes] = []
        self._posted_bytes = 0  # without the preambles of `read`
        self._readers: list[Reader] = []
        self._rest: Sequence[Piece] = ()  # what the socket did not take of an offer: half a line, to be sent first
        self._opened = self._closing = self._direct = False
        self._runs = self._again = False  # whether the sending task exists, and looks once more before it ends
        self._gathers = self._woken = False  # whether lines are gathered, and there were chunks of journals meanwhile

    # --- the queue ---

    def post_line(self, line: bytes) -> None:
        """Queue a rendered line with its newline. Never raises. A peer whose queue is full is disconnected. No effect
        after `stop`.
        """
        if self._closing:
            return
        if self._posted_bytes >= QUEUED_BYTES:
            self._hang_up(*cuts.answers_not_read(QUEUED_BYTES))
            return
        self._posted.append(line)
        self._posted_bytes += len(line)
        if not self._gathers:
            self.wake()

    async def send(self, *pieces: Piece, to_go: float = 0.0) -> None:
        """Send whole lines with nothing in between; waits until the socket has accepted them.

        `to_go`: as in `Rounds.next`.
        """
        await self._wait_for_turn()
        try:
            await self._send_all(pieces, self._rounds.old, to_go)
        finally:
            self._turn.release()

    async def flush(self) -> None:
        """Send the lines that are queued already, so that the next `send` comes after them."""
        await self._wait_for_turn()
        try:
            if self._posted:
                await self._send_all([self._take_posted()], self._rounds.old)
        finally:
            self._turn.release()

    def read(
        self,
        channel: Channel,
        cursor: int,
        *,
        extended: bool,
        preamble: bytes = b"",
        preface: bytes = b"",
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """Send the chunks of a journal from `cursor` on, after the queued lines and then `preamble` (whole lines).
        `preface`: whole lines that are sent together with the first rows.

        A preamble does not count towards the limit of the queue: there is one for each stream. If the stream stops
        before an unreadable row, all rows before it are sent; then the reading ends and `on_stop` is called.

        Raises:
            SlowReader: the chunk is no longer held.
        """
        reader = channel.subscribe(cursor, self.wake, extended=extended, progress=self._outlet.progress)
        reader.offer = self.offer
        reader.on_fall = partial(self._fall, reader)
        reader.on_stop = on_stop
        reader.preface = preface
        self._readers.append(reader)
        if preamble:
            self._posted.append(preamble)
        self.wake()
        return reader

    # --- who sends ---

    def stop_reading(self, reader: Reader) -> None:
        """Send no more chunks of a journal. Safe to repeat."""
        if reader in self._readers:
            self._readers.remove(reader)
        reader.close()

    @property
    def readers(self) -> tuple[Reader, ...]:
        """The journals that it reads."""
        return tuple(self._readers)

    @property
    def sent(self) -> int:
        """The bytes that the socket has taken so far."""
        return self._outlet.sent

    @property
    def look_at(self) -> float:
        """When `stalls` is to be called, for a send that waits for the socket. Infinite while none waits."""
        return self._outlet.look_at

    def stalls(self, now: float) -> bool:
        """Whether the peer has taken nothing of it, or next to nothing, for the stall time."""
        return self._outlet.stalls(now)

    @property
    def busy(self) -> bool:
        """Whether lines are queued or being sent."""
        return bool(self._posted) or self._sends

    @property
    def _sends(self) -> bool:
        return bool(self._rest) or self._runs or self._closing or self._turn.locked()

    @property
    def free(self) -> bool:
        """Whether `offer` would send now: on a plain socket, if nothing is queued and no task is sending."""
        return self._direct and not self.busy

    def offer(self, data: bytes) -> bool:
        """Send whole lines now, without a task. False, and nothing is sent, unless the socket is `free`.

        What the socket does not take is sent by a task before anything else. If the connection is lost, the session
        ends soon. The condition is written out: with many readers this is called most of all.
        """
        if self._posted or self._rest or self._runs or self._closing or not self._direct or self._turn.locked():
            return False
        try:
            rest = self._outlet.send_nowait(data)
        except trio.BrokenResourceError:
            self._hang_up(CloseReason.PEER_LOST)
            return True
        self._note_sent()
        if rest:
            self._rest = rest
            self.wake()
        return True

    def keep_alive(self, line: bytes) -> None:
        """`offer` of a PING, or queue it. Nothing is sent if other lines are on their way: they take its place."""
        if not self.offer(line) and not self.busy:
            self.post_line(line)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Queue the lines of the block, and send them together at its end, without a task if the socket is free."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            if self._posted and self._direct and not self._sends:
                self.offer(self._take_posted())
            if self._posted or self._woken:
                self._woken = False
                self.wake()

    def open(self) -> None:
        """Begin to send. Lines may have been queued before."""
        self._opened = True
        self._direct = self._outlet.direct
        if self._posted or self._readers:
            self.wake()

    def wake(self) -> None:
        """There is something to send: start the task that sends, unless it runs."""
        if self._runs:
            self._again = True
        elif self._gathers:
            self._woken = True
        elif self._opened and not self._closing and self._owner is not None:
            self._runs = True
            self._owner.start(self._run)

    async def _run(self) -> None:
        """Send the queued lines and the new chunks of the journals until there are no more."""
        while True:
            self._again = False
            await self._wait_for_turn()
            try:
                pieces = self._take_chunks()
                if self._posted:
                    pieces.insert(0, self._take_posted())
                if pieces or self._rest:
                    await self._send_all(pieces, self._rounds.new)
            finally:
                self._turn.release()
            if not pieces and not self._again:
                self._runs = False
                return

    def _take_chunks(self) -> list[Piece]:
        """The new chunks of the journals. Removes a reader whose stream has stopped after its last chunk."""
        pieces: list[Piece] = []
        for reader in tuple(self._readers):
            taken = reader.take_nowait()
            pieces += taken
            if not taken and (why := reader.stopped) is not None:
                self._readers.remove(reader)
                on_stop = reader.on_stop
                reader.close()
                if on_stop is not None:
                    on_stop(why)
        return pieces

    def _take_posted(self) -> bytes:
        lines = b"".join(self._posted)
        self._posted.clear()
        self._posted_bytes = 0
        return lines

    async def _wait_for_turn(self) -> None:
        """Acquire the right to send. Waits forever once the session is closing."""
        try:
            self._turn.acquire_nowait()  # the usual case, without the scheduler
        except trio.WouldBlock:
            await self._turn.acquire()
        if self._closing:
            self._turn.release()
            await trio.sleep_forever()

    async def _send_all(self, pieces: Sequence[Piece], rounds: Rounds, to_go: float = 0.0) -> None:
        """Send; the caller has the turn."""
        if self._rest:
            pieces, self._rest = [*self._rest, *pieces], ()
        await self._outlet.send(pieces, rounds, to_go, self._note_waiting)
        self._note_sent()

    # --- the end ---

    @property
    def torn(self) -> bool:
        """Whether the peer may have half a line: nothing that is sent now could be parsed."""
        return self._outlet.torn

    def stop(self) -> None:
        """Begin no other send: no later line reaches the peer. `finish` sends the queue."""
        self._closing = True

    async def finish(self, grace: float) -> None:
        """Let the present `send` end and send the queued lines, so that ERROR begins on a new line. Bounded."""
        self.stop()
        with trio.move_on_after(grace):
            async with self._turn:
                if self._posted or self._rest:
                    await self._send_all([self._take_posted()], self._rounds.old)

    def close(self) -> list[Reader]:
        """Drop everything that is queued, and the owner. Returns the readers, for the caller to close."""
        self._closing = True
        self._posted.clear()
        self._rest = ()
        readers, self._readers = self._readers, []
        self._owner = None
        return readers

    def _fall(self, reader: Reader) -> None:
        """The journal has dropped a reader. The session ends at once: its task may hang in a send."""
        refusal: ReplicadError = reader.refusal()
        self._hang_up(CloseReason.SLOW_READER, f"{refusal.code}: {refusal}")

    def _hang_up(self, reason: CloseReason, text: str = "") -> None:
        if self._owner is not None:
            self._owner.hang_up(reason, text)

    def _note_waiting(self, look_at: float) -> None:
        if self._owner is not None:
            self._owner.note_waiting(look_at)

    def _note_sent(self) -> None:
        if self._owner is not None:
            self._owner.note_sent()
