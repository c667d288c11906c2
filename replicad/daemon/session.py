"""One connection: receives commands, sends keep-alives, and ends with a named reason.

Commands go to `handle`, which passes them to the services. What is sent goes through the session's `Outbox`.
"""

from __future__ import annotations

import hmac
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import structlog
import trio

from replicad.daemon.hub import Hub
from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outbox import Outbox
from replicad.daemon.outlet import Piece
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
from replicad.groups import reporting, sole_leaf
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.commands import CORE, Auth, Error, Name, Ping, Server
from replicad.protocol.connection import Connection, Due, Timing
from replicad.protocol.states import CloseReason
from replicad.protocol.words import Side, sendable

if TYPE_CHECKING:
    from replicad.config.settings import ServerSettings

RECEIVE_BYTES = 65536
TURN = 16  # commands of one client before other tasks run: some hundred microseconds
DRAIN_BYTES = 4 << 20  # of input that is read and discarded after the last ERROR
ERROR_GRACE = 1.0  # seconds for sending the last ERROR, best effort

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
_LOST = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)  # raised by sending to a disconnected peer
_numbers = count(1)
log = structlog.get_logger()


Handler = Callable[[Command], Awaitable[None]]


class Session:
    """One client."""

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
        self.outbox = Outbox(stream, self, limits.stall_timeout)
        self._end: tuple[CloseReason, str] | None = None
        self._ended = trio.Event()
        self._closed_by: list[Callable[[], None]] = []
        self._before_end: list[Callable[[], Awaitable[None]]] = []
        self._nursery: trio.Nursery
        self.post(Server(settings.server_name))
        self.post(Ping(f"{_wall_clock_ms()}"))

    # --- what services call ---

    @property
    def identity(self) -> str:
        """The client's name (its address if it has none) and number, as shown in lists and leases."""
        return f"{(self.name or self.peer).replace(' ', '_')}#{self.number}"

    def post(self, command: Command) -> None:
        """Queue a command without waiting; never raises. A peer whose queue is full is disconnected.

        The command is rendered now. If that fails, it is a defect of replicad, and only this session ends.
        """
        try:
            line = self._connection.render(command)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            self.hang_up(*self._explain(error))
        else:
            self.post_line(line)

    def post_line(self, line: bytes) -> None:
        """`post` for a rendered line with its newline."""
        self.outbox.post_line(line)

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request with ERROR; the connection stays open."""
        self.log.info("request_refused", code=error.code, error=str(error))
        self.post(_error_line(_text(error)))

    async def send(self, *pieces: Piece) -> None:
        """Send whole lines with nothing in between; waits until the socket has accepted them."""
        await self.outbox.send(*pieces)

    async def flush(self) -> None:
        """Send the commands that are queued already, so that the next `send` comes after them."""
        await self.outbox.flush()

    def read(
        self,
        channel: Channel,
        cursor: int,
        *,
        extended: bool,
        preamble: bytes = b"",
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """`Outbox.read`."""
        return self.outbox.read(channel, cursor, extended=extended, preamble=preamble, on_stop=on_stop)

    def note_sent(self) -> None:
        """Lines were sent: the next PING is due later."""
        self._connection.sent(trio.current_time())

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the first reason counts."""
        if self._end is None:
            self._end = (reason, text)
            self._ended.set()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when the session has ended."""
        self._closed_by.append(call)

    def before_end(self, wait_answered: Callable[[], Awaitable[None]]) -> None:
        """Await `wait_answered`, for at most ERROR_GRACE, when the peer has closed its side or broken the protocol."""
        self._before_end.append(wait_answered)

    # --- life ---

    async def run(self, handle: Handler) -> CloseReason:
        """Serve the client until one side ends the session; always closes the stream. Raises only when cancelled.

        `handle` is called with every command except PING, NAME, AUTH and ERROR, one at a time.
        """
        self.log.info("session_opened", connected=len(self._hub))
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.outbox.open()
                self.start(self._mind_deadlines)
                self.start(self._read, handle)
                await self._ended.wait()
                await self._finish()
                nursery.cancel_scope.cancel()
        finally:
            reason, text = self._end or (CloseReason.SERVER_STOPPING, "server stopping")
            for call in [*(reader.close for reader in self.outbox.close()), *self._closed_by]:
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - the others must be called too
                    self._record(error, "end")
            self._hub.leave(self, reason)
            await self._send_last_error(text)
            self.log.info("session_closed", reason=reason.value, error=text or None)
        return reason

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the session ends; an exception that it raises ends the session.

        Does nothing if the session has ended: services may call this before `at_end` has notified them.
        """
        with suppress(RuntimeError):  # the nursery is closed
            self._nursery.start_soon(self._guarded, job, args)

    async def _guarded(self, job: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        with reporting(lambda error: self.hang_up(*self._explain(error))):
            await job(*args)

    async def _finish(self) -> None:
        try:
            with suppress(*_LOST):
                await self.outbox.finish(ERROR_GRACE)
        except Exception as error:  # noqa: BLE001 - the session ends in any case
            self._record(error, "end")

    def _explain(self, error: BaseException) -> tuple[CloseReason, str]:
        """The close reason and the text for the peer that belong to an exception. A defect of replicad is logged."""
        error = sole_leaf(error)
        if isinstance(error, HangUp):
            return error.reason, error.text
        for kind, reason in _REASONS:
            if isinstance(error, kind) and not isinstance(error, LocalProtocolError):
                return reason, _text(error) if isinstance(error, ReplicadError) else ""
        self._record(error, "run")
        return CloseReason.INTERNAL_ERROR, "internal error; the server's log has it"

    def _record(self, error: BaseException, cause: str) -> None:
        self._hub.troubles.record("session", self.identity, cause, error)

    async def _send_last_error(self, text: str) -> None:
        with trio.move_on_after(ERROR_GRACE, shield=True):
            try:
                if text and not self.outbox.torn:  # after half a line the peer could not parse the ERROR
                    await self._stream.send_all(_error_line(text).render().encode() + b"\n")
                    if isinstance(self._stream, trio.abc.HalfCloseableStream):
                        await self._stream.send_eof()
                    left = DRAIN_BYTES  # closing with unread input sends a reset, which can discard the ERROR
                    while left > 0 and (data := await self._stream.receive_some(RECEIVE_BYTES)):
                        left -= len(data)
            except _LOST:
                pass  # no client is left to send it to
            except Exception as error:  # noqa: BLE001 - the stream is closed in any case
                self._record(error, "end")
        await trio.aclose_forcefully(self._stream)

    # --- reading ---

    async def _read(self, handle: Handler) -> None:
        """Handle commands until the peer closes its side or breaks the protocol; queued requests are answered first."""
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
            for wait_answered in self._before_end:
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

    # --- deadlines ---

    async def _mind_deadlines(self) -> None:
        """Send PINGs, and end the session of a peer that is too late."""
        while True:
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next deadline, and handle it."""
        # A line that begins while we wait has a deadline of its own, so wait no longer than `line_timeout`.
        deadline = min(self._connection.next_deadline(), trio.current_time() + self._timing.line_timeout)
        if not self._authorised:
            deadline = min(deadline, self._auth_deadline)
        await trio.sleep_until(deadline)
        now = trio.current_time()
        if not self._authorised and now >= self._auth_deadline:
            raise HangUp(CloseReason.NOT_AUTHORISED, "not_authorised: no AUTH came in time")
        match self._connection.due(now):
            case Due.PING:
                if not self.outbox.busy:  # else lines are on their way to a peer that takes them slowly
                    self.post(Ping(f"{_wall_clock_ms()}"))
                self.note_sent()
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
    """ERROR with `text`; characters that a line cannot have are replaced."""
    return Error(sendable(text))
