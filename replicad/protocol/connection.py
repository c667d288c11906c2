"""The protocol state of one end of a connection, without I/O: bytes in, commands out, deadlines by the caller's clock.

The server, the async client and the blocking client use it. `next_deadline` returns when to call `due`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from replicad.errors import LocalProtocolError, NotAuthorised, RemoteProtocolError
from replicad.protocol.commands import (
    CORE,
    Auth,
    Command,
    Error,
    Help,
    Name,
    Ping,
    Server,
    Side,
    Vocabulary,
    typed_word,
)
from replicad.protocol.lines import MAX_LINE, LineTooLong, MixedBuffer
from replicad.protocol.words import refuse_controls

# The states of one end of a connection, and the commands that each allows.


class State(enum.Enum):
    """The state of one end of a connection."""

    AWAIT_AUTH = "await_auth"  # server: the client must send AUTH
    AWAIT_SERVER = "await_server"  # client: the server must send SERVER
    OPEN = "open"
    CLOSED = "closed"


class CloseReason(enum.Enum):
    """Why a connection ended. Logged and counted by this name."""

    PEER_CLOSED = "peer_closed"  # end of file
    PEER_ERROR = "peer_error"  # the peer sent ERROR
    PEER_LOST = "peer_lost"  # reset, unreachable
    PEER_SILENT = "peer_silent"  # the peer has sent PING and then nothing for the time-out
    BAD_LINE = "bad_line"  # the peer broke the protocol
    UNFINISHED_LINE = "unfinished_line"  # the peer began a line and did not end it in time
    NOT_AUTHORISED = "not_authorised"
    ACCESS_EXPIRED = "access_expired"  # the token of a browser that follows over HTTP
    NO_COMMAND = "no_command"  # the peer sent no command in time after it connected
    TOO_MANY_NEWCOMERS = "too_many_newcomers"  # the oldest of too many connections that have not sent a command yet
    STREAM_ENDED = "stream_ended"  # a stream that the peer follows was removed or failed
    SLOW_READER = "slow_reader"  # the peer fell behind the journal, or took no bytes for too long
    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_CONNECTIONS = "too_many_connections"  # of this client
    FORBIDDEN = "forbidden"  # a right was withdrawn while an answer was being sent
    SERVER_STOPPING = "server_stopping"
    INTERNAL_ERROR = "internal_error"  # a defect of replicad


TRANSITIONS: dict[State, dict[type[Command], State]] = {
    State.AWAIT_AUTH: {Auth: State.OPEN, Name: State.AWAIT_AUTH, Ping: State.AWAIT_AUTH, Error: State.CLOSED},
    State.AWAIT_SERVER: {Server: State.OPEN, Ping: State.AWAIT_SERVER, Error: State.CLOSED},
    State.CLOSED: {},
}
"""State, received command, next state. A command that is missing is refused. OPEN allows every command: an ERROR may
refuse one request only, and if it concerns the connection, its sender closes the connection."""


def after(state: State, command: Command) -> State:
    """The state after receiving `command`.

    Raises:
        NotAuthorised: the client has to send AUTH first.
        RemoteProtocolError: the command is not allowed in this state.
    """
    if state is State.OPEN:
        return state
    found = TRANSITIONS[state].get(type(command))
    if found is not None:
        return found
    if state is State.AWAIT_AUTH:
        raise NotAuthorised(f"{command.NAME} before AUTH: this server wants `AUTH token` first")
    raise RemoteProtocolError(f"{command.NAME} is not allowed while the connection is {state.value}")


PING_INTERVAL = 5.0  # seconds; at least one command is sent in each, as in Synapse (protocol.md, Keep-alive)
PEER_TIMEOUT = 15.0  # seconds without a command from a peer that has sent PING, as in Synapse
STRAYS = 3  # unknown words of a person that are answered by the list of commands; the next one ends the connection
LINE_TIMEOUT = 30.0  # seconds within which a line must end; a person may be typing it


class Due(enum.Enum):
    """The action that a deadline requires."""

    PING = "ping"  # send PING
    PEER_SILENT = "peer_silent"  # close the connection
    UNFINISHED_LINE = "unfinished_line"  # close the connection


@dataclass(frozen=True, slots=True)
class Timing:
    """The three times of a connection, in seconds."""

    ping_interval: float = PING_INTERVAL
    peer_timeout: float = PEER_TIMEOUT
    line_timeout: float = LINE_TIMEOUT


class ProtocolConnection:
    """One end of a connection: the unread bytes, the state, and when each side last sent something.

    Times are seconds of one monotonic clock; the caller passes them. Not thread-safe.
    """

    __slots__ = (
        "_last_received",
        "_last_sent",
        "_line_began",
        "_lines",
        "_peer",
        "_peer_pings",
        "_strays",
        "_timing",
        "_waiting",
        "line_bytes",
        "side",
        "state",
        "vocabulary",
    )

    def __init__(
        self,
        side: Side,
        vocabulary: Vocabulary = CORE,
        *,
        now: float,
        timing: Timing | None = None,
        max_line: int = MAX_LINE,
        wants_auth: bool = False,
    ) -> None:
        """`side` is this end, `vocabulary` the commands of both sides. `wants_auth`: this server needs AUTH first."""
        self.side = side
        self.vocabulary = vocabulary
        if side is Side.CLIENT:
            self.state = State.AWAIT_SERVER
        else:
            self.state = State.AWAIT_AUTH if wants_auth else State.OPEN
        self._peer = Side.SERVER if side is Side.CLIENT else Side.CLIENT
        self._timing = timing or Timing()
        self._lines = MixedBuffer(max_line)
        self._waiting: list[bytes] = []  # the next line is the last; an empty deque takes 600 bytes of each connection
        self.line_bytes = 0  # length of the last line that was parsed
        self._last_sent = now
        self._last_received = now
        self._line_began: float | None = None
        self._peer_pings = False
        self._strays = STRAYS if side is Side.SERVER else 0  # unknown words that are still answered

    # --- receiving ---

    def receive_data(self, data: bytes, now: float) -> None:
        """Take bytes from the peer; `next_command` then returns their commands.

        Raises:
            LineTooLong: the peer continues a line that is too long.
        """
        lines = self._lines.feed(data).split(b"\n")
        lines.pop()  # the empty text behind the last line end
        came = [line[:-1] if line.endswith(b"\r") else line for line in reversed(lines) if line]
        self._waiting = came + self._waiting if self._waiting else came
        self._note_received(bool(lines), now)

    def allow(self, max_line: int) -> None:
        """Change the longest line that is accepted."""
        self._lines.allow(max_line)

    def drop(self) -> None:
        """Forget all bytes that were received: the connection has ended."""
        self._fail()
        self._lines.drop()

    @property
    def unfinished(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return self._lines.partial

    def receive_block(self, data: bytes, now: float) -> bytes:
        """Take bytes from the peer and return all lines that are now complete in one piece, with their ends.

        For callers that parse bulk rows themselves and pass every other line to `understand`. Do not use it together
        with `receive_data` on one connection. Call `check` after all lines have been used.

        Raises:
            LineTooLong: the peer continues a line that is too long.
        """
        raw = self._lines.raw
        block = self._lines.feed(data)
        # All raw bytes count as signs of life. The reader of a block decides how long it may take.
        self._note_received(bool(block) or raw, now)
        return block

    def stop_at(self, word: str | None) -> None:
        """Let `receive_block` return nothing beyond a line that begins with this word. None: no such word.

        If raw bytes follow the line, its reader calls `expect_raw`.
        """
        self._lines.stop = None if word is None else f"{word} ".encode()

    def expect_raw(self, size: int) -> None:
        """Let `receive_block` return next the `size` raw bytes that the peer announced, and the byte behind them."""
        self._lines.expect_raw(size)

    @property
    def holds_back(self) -> bool:
        """Whether received bytes wait for `receive_block`: call it with b"" before reading more."""
        return self._lines.held

    def _note_received(self, whole_lines: bool, now: float) -> None:
        if whole_lines:
            self._last_received = now
            self._line_began = None
        if not self._lines.partial:
            self._line_began = None
        elif self._line_began is None:
            self._line_began = now

    def next_command(self) -> Command | None:
        """The next received command; None if more bytes are needed.

        Blank lines are ignored. After an exception the connection is CLOSED.

        Raises:
            RemoteProtocolError: the line is not UTF-8, no command, a command of the wrong side, malformed or too long.
            NotAuthorised: a token is required, and the command came before AUTH.
        """
        while self._waiting:
            command = self._command(self._waiting.pop())
            if command is not None:
                return command
        self.check()
        return None

    def understand(self, line: bytes) -> Command | None:
        """Parse one line of the peer and change the state. None for a blank line.

        A `\r` at its end is dropped. After an exception the connection is CLOSED. Raises as `next_command`.
        """
        return self._command(line.removesuffix(b"\r"))

    def _command(self, line: bytes) -> Command | None:
        if not line or line.isspace():
            return None
        self.line_bytes = len(line)
        try:
            command = self._parse(self._decode(line))
            self.state = after(self.state, command)
        except Exception:
            self._fail()
            raise
        if type(command) is Ping:
            self._peer_pings = True
            self._strays = 0
        elif type(command) is Name:
            self._strays = 0
        return command

    def _parse(self, line: str) -> Command:
        """The command of a line. A word that is none is read as `HELP word`, if a person seems to have typed it.

        Programs send PING or NAME: to them an unknown command is an error, and so it is before AUTH.
        """
        try:
            return self.vocabulary.parse(line, self._peer)
        except RemoteProtocolError:
            word = typed_word(line) if self._strays and self.state is State.OPEN else None
            if word is None or word in self.vocabulary:
                raise
            self._strays -= 1
            return Help(word)

    def check(self) -> None:
        """Raise LineTooLong if the unfinished line is already too long. The connection is then CLOSED."""
        try:
            self._lines.check()
        except LineTooLong:
            self._fail()
            raise

    def _fail(self) -> None:
        self.state = State.CLOSED
        self._waiting.clear()

    @staticmethod
    def _decode(line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(
                f"a line is not valid UTF-8 (byte {error.start + 1} of it); send UTF-8 text"
            ) from None

    # --- sending ---

    def send(self, command: Command, now: float) -> bytes:
        """As `render`, for a caller that writes the bytes at once."""
        line = self.render(command)
        self._last_sent = now
        return line

    def render(self, command: Command) -> bytes:
        """The line of a command with its end. The caller writes it later and then calls `sent`.

        On a CLOSED connection a server may still answer earlier requests; a client may only send ERROR.

        Raises:
            LocalProtocolError: a command of the other side, the connection is closed, or the line would be refused.
        """
        if not command.SENDER & self.side:
            raise LocalProtocolError(f"{command.NAME} cannot be sent by this side")
        if self.state is State.CLOSED and self.side is Side.CLIENT and command.NAME != "ERROR":
            raise LocalProtocolError(f"{command.NAME} after the connection was closed")
        line = command.render()
        if self.side is Side.CLIENT:
            try:
                refuse_controls(line, self.side)
            except RemoteProtocolError as error:
                raise LocalProtocolError(f"{command.NAME} cannot be sent: {error}") from None
        return line.encode() + b"\n"

    def sent(self, now: float) -> None:
        """Note that lines were sent by another way than `send`."""
        self._last_sent = now

    # --- time ---

    def pardon(self, now: float) -> None:
        """Restart the peer's time-outs at `now`, because this side did not read before."""
        self._last_received = now
        if self._line_began is not None:
            self._line_began = now

    def next_deadline(self) -> float:
        """The latest time for the next call of `due`."""
        deadline = self._last_sent + self._timing.ping_interval
        if self._peer_pings:
            deadline = min(deadline, self._last_received + self._timing.peer_timeout)
        if self._line_began is not None:
            deadline = min(deadline, self._line_began + self._timing.line_timeout)
        return deadline

    def due(self, now: float, early: float = 0.0) -> Due | None:
        """The action that is due at `now`, if any; closing first. The peer's time-out needs a first PING from it.

        A PING is due also up to `early` seconds before its time.
        """
        if self._peer_pings and now >= self._last_received + self._timing.peer_timeout:
            return Due.PEER_SILENT
        if self._line_began is not None and now >= self._line_began + self._timing.line_timeout:
            return Due.UNFINISHED_LINE
        if now + early >= self._last_sent + self._timing.ping_interval:
            return Due.PING
        return None
