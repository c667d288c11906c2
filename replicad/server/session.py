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
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING

import structlog
import trio

from replicad.errors import NotAuthorised, ProtocolError, ReplicadError, SlowReader
from replicad.protocol.commands import Auth, Command, Error, Name, Ping, Server, Side
from replicad.protocol.connection import Connection, Due, Timing
from replicad.protocol.states import CloseReason
from replicad.server.hub import Hub
from replicad.server.journal import Channel, Reader

if TYPE_CHECKING:
    from replicad.config import ServerSettings

RECEIVE_BYTES = 65536
MAX_POSTED = 1000  # commands; relays and answers of a few bytes each, for a peer that reads nothing
ERROR_GRACE = 1.0  # seconds for the last ERROR to leave, best effort

_numbers = count(1)
log = structlog.get_logger()


class HangUp(Exception):
    """Ends a session from within. `text` goes to the peer as ERROR, if there is any."""

    def __init__(self, reason: CloseReason, text: str = "") -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


Handler = Callable[["Session", Command], Awaitable[None]]


class Session:
    """One client. `handle` is called with every command that is not the session's own business, one at a time."""

    def __init__(self, stream: trio.abc.Stream, peer: str, settings: ServerSettings, hub: Hub) -> None:
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
            now=trio.current_time(),
            timing=self._timing,
            max_line=limits.max_line,
            wants_auth=settings.token is not None,
        )
        self._authorised = settings.token is None
        self._auth_deadline = trio.current_time() + limits.auth_timeout
        self._posted: deque[Command] = deque()
        self._readers: list[Reader] = []
        self._wake = trio.Event()
        self._sending = trio.Lock()
        self._torn = False  # a send was cut short: the peer has half a line, so no ERROR can follow
        self._end: HangUp | None = None
        self._scope = trio.CancelScope()
        self._closed_by: list[Callable[[], None]] = []
        self.nursery: trio.Nursery

    # --- what services call ---

    @property
    def identity(self) -> str:
        """Who this is in lists and leases: its name, or else its address, and its number."""
        return f"{(self.name or self.peer).replace(' ', '_')}#{self.number}"

    def post(self, command: Command) -> None:
        """Queue a command without waiting; a peer that lets the queue fill up is cut off."""
        if len(self._posted) >= MAX_POSTED:
            self.hang_up(CloseReason.SLOW_READER)
            return
        self._posted.append(command)
        self.wake()

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request that cannot be done: ERROR, and the connection stays."""
        self.log.info("request_refused", code=error.code, error=str(error))
        self.post(_error_line(error))

    async def send(self, data: bytes) -> None:
        """Send whole lines, waiting until the socket has taken them."""
        async with self._sending:
            await self._send_all(data)

    def read(self, channel: Channel, cursor: int, *, extended: bool) -> Reader:
        """Have the chunks of a journal sent from `cursor` on, after what is posted already.

        Raises:
            SlowReader: the chunk is no longer held.
        """
        reader = channel.subscribe(cursor, self.wake, extended=extended)
        self._readers.append(reader)
        self.wake()
        return reader

    def wake(self) -> None:
        """There is something to send, or a new deadline."""
        self._wake.set()

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon, whatever it is waiting for; the first reason counts."""
        if self._end is None:
            self._end = HangUp(reason, text)
            self._scope.cancel()

    def at_end(self, call: Callable[[], None]) -> None:
        """Have `call` called when the session is over."""
        self._closed_by.append(call)

    # --- life ---

    async def run(self, handle: Handler) -> CloseReason:
        """Serve the client until one side ends it; always closes the stream, never raises but for cancellation."""
        self.log.info("session_opened", connected=len(self._hub))
        reason, text = CloseReason.INTERNAL_ERROR, "internal error"
        try:
            with self._scope:
                reason, text = await self._converse(handle)
            if self._end is not None:
                reason, text = self._end.reason, self._end.text
        finally:
            for reader in self._readers:
                reader.close()
            for call in self._closed_by:
                call()
            self._hub.leave(self, reason)
            await self._say_goodbye(text)
            self.log.info("session_closed", name=self.name, reason=reason.value, error=text or None)
        return reason

    async def _converse(self, handle: Handler) -> tuple[CloseReason, str]:
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                nursery.start_soon(self._write)
                await self._read(handle)
        except BaseExceptionGroup as group:
            cancelled, rest = group.split(trio.Cancelled)
            if cancelled is not None:
                raise cancelled from None
            assert rest is not None
            return self._explain(_first(rest))
        raise AssertionError("the reader never returns")

    def _explain(self, error: BaseException) -> tuple[CloseReason, str]:
        """The reason that an exception is, and what to tell the peer."""
        match error:
            case HangUp():
                return error.reason, error.text
            case NotAuthorised():
                return CloseReason.NOT_AUTHORISED, _text(error)
            case ProtocolError():
                return CloseReason.BAD_LINE, _text(error)
            case SlowReader():
                return CloseReason.SLOW_READER, _text(error)
            case trio.BrokenResourceError() | trio.ClosedResourceError() | ssl.SSLError():
                return CloseReason.PEER_LOST, ""
            case Exception():
                self.log.error("session_failed", exc_info=error)
                return CloseReason.INTERNAL_ERROR, "internal error; the server's log has it"
        raise error

    async def _say_goodbye(self, text: str) -> None:
        with trio.move_on_after(ERROR_GRACE, shield=True):
            try:
                if text and not self._torn:
                    await self._stream.send_all(Error(text).render().encode() + b"\n")
                    if isinstance(self._stream, trio.abc.HalfCloseableStream):
                        await self._stream.send_eof()
                    while await self._stream.receive_some(RECEIVE_BYTES):  # else a reset could overtake the ERROR
                        pass
            except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
                pass  # the peer is gone: nobody is left to be told
        await trio.aclose_forcefully(self._stream)

    # --- reading ---

    async def _read(self, handle: Handler) -> None:
        connection = self._connection
        while True:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            if not data:
                raise HangUp(CloseReason.PEER_CLOSED)
            connection.receive_data(bytes(data), trio.current_time())
            while (command := connection.next_command()) is not None:
                await self._take(command, handle)
            if connection.next_deadline() < trio.current_time() + self._timing.ping_interval:
                self.wake()

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
                await handle(self, command)

    def _check_token(self, token: str) -> None:
        wanted = self._settings.token
        if wanted is not None and not hmac.compare_digest(token.encode(), wanted.encode()):
            raise NotAuthorised("the token is wrong; ask the operator of this server for it")
        self._authorised = True

    # --- writing ---

    async def _write(self) -> None:
        """Send what is posted, then what the journals have, then wait for either or for a deadline."""
        self.post(Server(self._settings.server_name))
        self.post(Ping(f"{_wall_clock_ms()}"))
        while True:
            self._wake = trio.Event()
            busy = False
            if self._posted:
                async with self._sending:
                    await self._send_all(self._render_posted())
            for reader in list(self._readers):
                if (data := reader.take_nowait()) is not None:
                    busy = True
                    async with self._sending:
                        await self._send_all(data)
            if not busy and not self._posted:
                await self._wait()

    def _render_posted(self) -> bytes:
        now = trio.current_time()
        lines = [self._connection.send(command, now) for command in self._posted]
        self._posted.clear()
        return b"".join(lines)

    async def _send_all(self, data: bytes) -> None:
        """Send under the lock. A peer that does not take one chunk within the stall time is cut off."""
        self._torn = True
        with trio.move_on_after(self._settings.limits.stall_timeout):
            await self._stream.send_all(data)
            self._torn = False
        if self._torn:
            raise HangUp(CloseReason.SLOW_READER, "slow_reader: nothing was read in time")
        self._connection.sent(trio.current_time())

    async def _wait(self) -> None:
        """Until something is to be sent or a deadline has come; then do what it asks for."""
        deadline = self._connection.next_deadline()
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
    """PING carries the time of day, by habit (seed 001); nothing is decided by it."""
    return int(time.time() * 1000)


def _text(error: ReplicadError) -> str:
    return f"{error.code}: {error}"


def _error_line(error: ReplicadError) -> Error:
    return Error(_text(error).replace("\r", " ").replace("\n", " ").replace("\0", " "))


def _first(group: BaseExceptionGroup) -> BaseException:
    """Any leaf of the group: which of several at once ended the session does not matter."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
