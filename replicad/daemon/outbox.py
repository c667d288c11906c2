"""The sending side of one session: the queue, the sending task, and whether the socket is free now.

Three sources are sent, each in whole lines and one at a time: lines queued by `post_line`, answers streamed by `send`,
and the chunks of the journals (`read`). A task sends only while there is something to send; an idle session has none.
`offer` sends without any task, if nothing else is queued or being sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import trio

from replicad.daemon import cuts
from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outlet import Outlet, Piece
from replicad.daemon.rounds import Rounds, SendRounds
from replicad.errors import ReplicadError, RowUnreadable
from replicad.protocol.states import CloseReason

QUEUED_BYTES = 1 << 20  # of answers and relayed lines that may wait for one client: ten thousand answers


class Owner(Protocol):
    """What the sending side needs of its session."""

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the session ends. An exception that it raises ends the session."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the text is sent to the peer as ERROR."""

    def note_sent(self) -> None:
        """Lines were sent: the next PING is due later."""

    def note_waiting(self, look_at: float) -> None:
        """A send waits for the socket. Call `Outbox.stalls` at that time."""


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
        owner: Owner,
        stall_timeout: float,
        rounds: SendRounds | None = None,
    ) -> None:
        """`stall_timeout`: the seconds within which the peer must accept what is sent at once. `rounds`: the object at
        which large sends wait for their place. QUEUED_BYTES may be exceeded by at most one line. Call `open` next.
        """
        self._owner: Owner | None = owner
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
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """Send the chunks of a journal from `cursor` on, after the queued lines and then `preamble` (whole lines).

        A preamble does not count towards the limit of the queue: there is one for each stream. If the stream stops
        before an unreadable row, all rows before it are sent; then the reading ends and `on_stop` is called.

        Raises:
            SlowReader: the chunk is no longer held.
        """
        reader = channel.subscribe(cursor, self.wake, extended=extended, progress=self._outlet.progress)
        reader.offer = self.offer
        reader.on_fall = partial(self._fall, reader)
        reader.on_stop = on_stop
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
