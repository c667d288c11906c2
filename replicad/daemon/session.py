"""One connection: bytes in, lines out, keep-alives, and a named reason for every end.

It moves bytes and minds the time. What a command means is for the services that `handle` passes it to; what stands in a
journal is for the publisher. All that is sent goes through one lock, whole lines at a time, so that nothing is
torn: commands queued by `post`, answers streamed by `send`, and the chunks of the journals.
"""

from __future__ import annotations

import hmac
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import structlog
import trio

from replicad.daemon.hub import Hub
from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outlet import Outlet, Piece
from replicad.daemon.service import HangUp
from replicad.errors import (
    DatabaseError,
    LocalProtocolError,
    NotAuthorised,
    ProtocolError,
    ReplicadError,
    RowUnreadable,
    SlowReader,
    StreamError,
)
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.commands import CORE, Auth, Error, Name, Ping, Server
from replicad.protocol.connection import Connection, Due, Timing
from replicad.protocol.states import CloseReason
from replicad.protocol.words import Side, sendable

if TYPE_CHECKING:
    from replicad.config.settings import ServerSettings

RECEIVE_BYTES = 65536
TURN = 16  # commands of one client that are taken before the others' turn: some hundred microseconds
MAX_POSTED = 1 << 20  # bytes of relays and answers that wait for a peer that reads nothing; one line more may come
DRAIN_BYTES = 4 << 20  # of what a peer that we hang up on still sends; it is thrown away
ERROR_GRACE = 1.0  # seconds for the last ERROR to leave, best effort

_REASONS: tuple[tuple[type[Exception], CloseReason], ...] = (
    (NotAuthorised, CloseReason.NOT_AUTHORISED),
    (ProtocolError, CloseReason.BAD_LINE),
    (SlowReader, CloseReason.SLOW_READER),
    (StreamError, CloseReason.STREAM_ENDED),
    (DatabaseError, CloseReason.STREAM_ENDED),
    (trio.BrokenResourceError, CloseReason.PEER_LOST),
    (trio.ClosedResourceError, CloseReason.PEER_LOST),
    (ssl.SSLError, CloseReason.PEER_LOST),
)
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)  # what sending to a peer that left raises
_numbers = count(1)
log = structlog.get_logger()


Handler = Callable[[Command], Awaitable[None]]


class Session:
    """One client. `handle` is called with every command that is not the session's own business, one at a time."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        peer: str,
        settings: ServerSettings,
        hub: Hub,
        vocabulary: Vocabulary = CORE,
    ) -> None:
        limits = settings.limits
        self.number = next(_numbers)
        self.peer = peer
        self.name: str | None = None
        self.log = log.bind(session=self.number, peer=peer)
        self._stream = stream
        self._settings = settings
        self._hub = hub
        self._timing = Timing(limits.ping_interval, limits.peer_timeout, limits.line_timeout)
        self._connection = Connection(
            Side.SERVER,
            vocabulary,
            now=trio.current_time(),
            timing=self._timing,
            max_line=limits.max_line,
            wants_auth=settings.token is not None,
        )
        self._authorised = settings.token is None
        self._auth_deadline = trio.current_time() + limits.auth_timeout
        self._posted: deque[bytes] = deque()
        self._posted_bytes = 0  # but for what subscriptions begin with
        self._readers: list[Reader] = []
        self._wake = trio.Event()
        self._sending = trio.Lock()
        self._outlet = Outlet(stream, limits.stall_timeout)
        self._closing = False
        self._end: tuple[CloseReason, str] | None = None
        self._ended = trio.Event()
        self._closed_by: list[Callable[[], None]] = []
        self._unanswered: list[Callable[[], Awaitable[None]]] = []
        self._nursery: trio.Nursery
        self.post(Server(settings.server_name))
        self.post(Ping(f"{_wall_clock_ms()}"))

    # --- what services call ---

    @property
    def identity(self) -> str:
        """Who this is in lists and leases: its name, or else its address, and its number."""
        return f"{(self.name or self.peer).replace(' ', '_')}#{self.number}"

    def post(self, command: Command) -> None:
        """Queue a command without waiting; never raises. A peer that lets the queue fill up is cut off.

        The command is rendered now: one that cannot be is a defect of ours, and ends this session and no other.
        """
        try:
            line = self._connection.render(command)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            self.hang_up(*self._explain(error))
        else:
            self.post_line(line)

    def post_line(self, line: bytes) -> None:
        """`post` for a line that is finished, its end included."""
        if self._posted_bytes >= MAX_POSTED:
            self.hang_up(CloseReason.SLOW_READER, "slow_reader: answers wait and nothing is read; reconnect and resume")
            return
        self._posted.append(line)
        self._posted_bytes += len(line)
        self.wake()

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request that cannot be done: ERROR, and the connection stays."""
        self.log.info("request_refused", code=error.code, error=str(error))
        self.post(_error_line(_text(error)))

    async def send(self, *pieces: Piece) -> None:
        """Send whole lines, and what they announce, with nothing in between; waits until the socket has taken them."""
        await self._wait_for_turn()
        try:
            await self._send_all(pieces)
        finally:
            self._sending.release()

    async def flush(self) -> None:
        """Send what is posted already, so that what is sent next comes after it."""
        await self._wait_for_turn()
        try:
            if self._posted:
                await self._send_all([self._take_posted()])
        finally:
            self._sending.release()

    def read(
        self,
        channel: Channel,
        cursor: int,
        *,
        extended: bool,
        preamble: bytes = b"",
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """Have the chunks of a journal sent from `cursor` on, after what is posted already and then `preamble`, whole
        lines. There is one preamble for each stream, so these do not count as commands that are posted.

        Where the stream stops before a row, all that comes before it is sent, the reading ends and `on_stop` is called.

        Raises:
            SlowReader: the chunk is no longer held.
        """
        reader = channel.subscribe(cursor, self.wake, extended=extended)
        reader.on_fall = lambda: self.hang_up(*self._explain(reader.refusal()))
        reader.on_stop = on_stop
        self._readers.append(reader)
        if preamble:
            self._posted.append(preamble)
        self.wake()
        return reader

    def wake(self) -> None:
        """There is something to send, or a new deadline."""
        self._wake.set()

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon, whatever it is waiting for; the first reason counts."""
        if self._end is None:
            self._end = (reason, text)
            self._ended.set()

    def at_end(self, call: Callable[[], None]) -> None:
        """Have `call` called when the session is over."""
        self._closed_by.append(call)

    def answers(self, wait_answered: Callable[[], Awaitable[None]]) -> None:
        """Have `wait_answered` waited for, briefly, when the peer says no more, or nothing that can be understood."""
        self._unanswered.append(wait_answered)

    # --- life ---

    async def run(self, handle: Handler) -> CloseReason:
        """Serve the client until one side ends it; always closes the stream, never raises but for cancellation."""
        self.log.info("session_opened", connected=len(self._hub))
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.start(self._write)
                self.start(self._read, handle)
                await self._ended.wait()
                await self._finish()
                nursery.cancel_scope.cancel()
        finally:
            reason, text = self._end or (CloseReason.SERVER_STOPPING, "server stopping")
            for call in [*(reader.close for reader in self._readers), *self._closed_by]:
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - one that fails must not keep the others from being called
                    self._record(error, "end")
            self._hub.leave(self, reason)
            await self._say_goodbye(text)
            self.log.info("session_closed", reason=reason.value, error=text or None)
        return reason

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task that lives as long as the session; whatever it raises ends the session.

        Nothing is done where the session has ended: others may call this before they have heard of it.
        """
        with suppress(RuntimeError):  # the nursery is closed
            self._nursery.start_soon(self._guarded, job, args)

    async def _guarded(self, job: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        try:
            await job(*args)
        except Exception as error:  # noqa: BLE001 - each becomes a reason; defects are logged with their traceback
            self.hang_up(*self._explain(error))
        except BaseExceptionGroup as group:  # a cancellation and a failure at the same moment
            failed, rest = group.split(Exception)
            if failed is not None:
                self.hang_up(*self._explain(failed))
            if rest is not None:
                raise rest from None

    async def _finish(self) -> None:
        """Let the send that is under way come to its end, and what is posted go out, so that ERROR stands on a line."""
        self._closing = True
        try:
            with trio.move_on_after(ERROR_GRACE), suppress(*_GONE):
                async with self._sending:
                    if self._posted:
                        await self._send_all([self._take_posted()])
        except Exception as error:  # noqa: BLE001 - the session ends anyhow
            self._record(error, "end")

    def _explain(self, error: Exception) -> tuple[CloseReason, str]:
        """The reason that an exception is, and what to tell the peer. A defect of ours is logged."""
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, HangUp):
            return error.reason, error.text
        for kind, reason in _REASONS:
            if isinstance(error, kind) and not isinstance(error, LocalProtocolError):
                return reason, _text(error) if isinstance(error, ReplicadError) else ""
        self._record(error, "run")
        return CloseReason.INTERNAL_ERROR, "internal error; the server's log has it"

    def _record(self, error: Exception, cause: str) -> None:
        self._hub.troubles.record("session", self.identity, cause, error)

    async def _say_goodbye(self, text: str) -> None:
        with trio.move_on_after(ERROR_GRACE, shield=True):
            try:
                if text and not self._outlet.torn:  # else the peer has half a line, which no ERROR can follow
                    await self._stream.send_all(_error_line(text).render().encode() + b"\n")
                    if isinstance(self._stream, trio.abc.HalfCloseableStream):
                        await self._stream.send_eof()
                    left = DRAIN_BYTES  # unread input would make the close a reset, which could overtake the ERROR
                    while left > 0 and (data := await self._stream.receive_some(RECEIVE_BYTES)):
                        left -= len(data)
            except _GONE:
                pass  # nobody is left to be told
            except Exception as error:  # noqa: BLE001 - the stream is closed in any case
                self._record(error, "end")
        await trio.aclose_forcefully(self._stream)

    # --- reading ---

    async def _read(self, handle: Handler) -> None:
        """Take commands until the peer closes its side or breaks the protocol; what it had asked is answered first."""
        connection = self._connection
        try:
            while data := await self._stream.receive_some(RECEIVE_BYTES):
                connection.receive_data(bytes(data), trio.current_time())
                taken = 0
                while (command := connection.next_command()) is not None:
                    await self._take(command, handle)
                    taken += 1
                    if taken % TURN == 0:
                        await trio.lowlevel.checkpoint()
        except ProtocolError:
            await self._wait_answered()
            raise
        await self._wait_answered()
        raise HangUp(CloseReason.PEER_CLOSED)

    async def _wait_answered(self) -> None:
        with trio.move_on_after(ERROR_GRACE):
            for wait_answered in self._unanswered:
                await wait_answered()

    async def _take(self, command: Command, handle: Handler) -> None:
        match command:
            case Ping():
                pass
            case Name():
                self.name = command.text
                self.log = self.log.bind(name=self.name)
            case Auth():
                self._check_token(command.token)
            case Error():
                self.log.warning("peer_error", error=command.text)
                raise HangUp(CloseReason.PEER_ERROR)
            case _:
                await handle(command)

    def _check_token(self, token: str) -> None:
        wanted = self._settings.token
        if wanted is not None and not hmac.compare_digest(token.encode(), wanted.encode()):
            raise NotAuthorised("the token is wrong; ask the operator of this server for it")
        self._authorised = True

    # --- writing ---

    async def _write(self) -> None:
        """Send what is posted, then what the journals have, then wait for either or for a deadline."""
        while True:
            if self._wake.is_set():
                self._wake = trio.Event()
            await self._wait_for_turn()
            try:
                pieces = self._take_chunks()
                if self._posted:
                    pieces.insert(0, self._take_posted())
                if pieces:
                    await self._send_all(pieces)
            finally:
                self._sending.release()
            if not pieces:
                await self._wait()

    def _take_chunks(self) -> list[Piece]:
        """What the journals have. A reader with nothing left of a stream that stops is dropped, and says so."""
        pieces: list[Piece] = []
        for reader in tuple(self._readers):
            taken = reader.take_nowait()
            pieces += taken
            if not taken and (why := reader.stopped) is not None:
                self._readers.remove(reader)
                reader.close()
                if reader.on_stop is not None:
                    reader.on_stop(why)
        return pieces

    async def _wait_for_turn(self) -> None:
        """Acquire the right to send; nobody gets it any more once the session is closing."""
        try:
            self._sending.acquire_nowait()  # the usual case, without a detour through the scheduler
        except trio.WouldBlock:
            await self._sending.acquire()
        if self._closing:
            self._sending.release()
            await trio.sleep_forever()

    def _take_posted(self) -> bytes:
        lines = b"".join(self._posted)
        self._posted.clear()
        self._posted_bytes = 0
        return lines

    async def _send_all(self, pieces: Sequence[Piece]) -> None:
        """Send under the lock. A peer that does not take them within the stall time is cut off."""
        try:
            await self._outlet.send(pieces)
        except trio.TooSlowError:
            raise HangUp(CloseReason.SLOW_READER, "slow_reader: nothing was read in time") from None
        self._connection.sent(trio.current_time())

    async def _wait(self) -> None:
        """Until something is to be sent or a deadline has come; then do what it asks for."""
        # A line that begins while we wait has a deadline of its own: look again before that can have come.
        deadline = min(self._connection.next_deadline(), trio.current_time() + self._timing.line_timeout)
        if not self._authorised:
            deadline = min(deadline, self._auth_deadline)
        with trio.move_on_at(deadline):
            await self._wake.wait()
            return
        now = trio.current_time()
        if not self._authorised and now >= self._auth_deadline:
            raise HangUp(CloseReason.NOT_AUTHORISED, "not_authorised: no AUTH came in time")
        match self._connection.due(now):
            case Due.PING:
                self.post(Ping(f"{_wall_clock_ms()}"))
            case Due.PEER_SILENT:
                raise HangUp(
                    CloseReason.PEER_SILENT,
                    f"peer_silent: nothing came for {self._timing.peer_timeout:g} s; send PING now and then",
                )
            case Due.UNFINISHED_LINE:
                raise HangUp(
                    CloseReason.UNFINISHED_LINE,
                    f"unfinished_line: a line has to end within {self._timing.line_timeout:g} s",
                )
            case None:
                pass


def _wall_clock_ms() -> int:
    """PING carries the sender's wall-clock time in ms, as in Synapse. Nothing depends on it."""
    return int(time.time() * 1000)


def _text(error: ReplicadError) -> str:
    return f"{error.code}: {error}"


def _error_line(text: str) -> Error:
    """Whatever the text quotes, it stands on one line that every client takes."""
    return Error(sendable(text))
