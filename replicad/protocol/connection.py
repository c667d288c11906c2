"""One end of one connection, without the connection: bytes in, commands out, and deadlines by the caller's clock.

The server, the trio client and the blocking client share it. It opens nothing, sleeps for nothing and logs nothing;
`next_deadline` says when to call `due`.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.protocol.commands import CORE, Command, Ping, Side, Vocabulary
from replicad.protocol.lines import MAX_LINE, LineTooLong, MixedBuffer
from replicad.protocol.states import State, after
from replicad.protocol.words import refuse_controls

PING_INTERVAL = 5.0  # seconds; at least one command is sent in each; Synapse's figure (protocol.md, Keep-alive)
PEER_TIMEOUT = 15.0  # seconds without a command from a peer that has sent PING; Synapse's figure
LINE_TIMEOUT = 30.0  # seconds in which a line that has begun must end; long enough for a slow typist


class Due(enum.Enum):
    """What a deadline asks for."""

    PING = "ping"  # send one
    PEER_SILENT = "peer_silent"  # hang up
    UNFINISHED_LINE = "unfinished_line"  # hang up


@dataclass(frozen=True, slots=True)
class Timing:
    """The three times of a connection, in seconds."""

    ping_interval: float = PING_INTERVAL
    peer_timeout: float = PEER_TIMEOUT
    line_timeout: float = LINE_TIMEOUT


class Connection:
    """What one end knows of a connection: the unread bytes, the state, and when each side last spoke.

    Times are seconds of one monotonic clock, handed in by the caller. Not safe for use from two threads at once.
    """

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
        """`side` is ours, `vocabulary` what both may say. `wants_auth`: as a server, allow nothing before AUTH."""
        self.side = side
        self._vocabulary = vocabulary
        if side is Side.CLIENT:
            self.state = State.AWAIT_SERVER
        else:
            self.state = State.AWAIT_AUTH if wants_auth else State.OPEN
        self._peer = Side.SERVER if side is Side.CLIENT else Side.CLIENT
        self._timing = timing or Timing()
        self._lines = MixedBuffer(max_line)
        self._waiting: deque[bytes] = deque()
        self._last_sent = now
        self._last_received = now
        self._line_began: float | None = None
        self._peer_pings = False

    # --- receiving ---

    def receive_data(self, data: bytes, now: float) -> None:
        """Take bytes from the peer; `next_command` then hands out what they make up.

        Raises:
            LineTooLong: the peer goes on with a line beyond the limit.
        """
        lines = self._lines.feed(data).split(b"\n")
        lines.pop()  # what stands behind the last end: nothing
        self._waiting.extend(line[:-1] if line.endswith(b"\r") else line for line in lines)
        self._note_received(bool(lines), now)

    def receive_block(self, data: bytes, now: float) -> bytes:
        """Take bytes from the peer and hand out all lines that are now whole in one piece, ends included.

        For who takes bulk rows apart without a command for each; every line that is not such a row goes to
        `understand`. Not to be mixed with `receive_data` on one connection. Call `check` once the lines are used up.

        Raises:
            LineTooLong: the peer goes on with a line beyond the limit.
        """
        raw = self._lines.raw
        block = self._lines.feed(data)
        # Raw bytes are signs of life, each of them: how long a block may take is for who waits for it to say.
        self._note_received(bool(block) or raw, now)
        return block

    def stop_at(self, word: str | None) -> None:
        """Have `receive_block` hand out nothing beyond a line that begins with this word; None: as much as there is.

        Whoever reads such a line then calls `expect_raw` where raw bytes follow it.
        """
        self._lines.stop = None if word is None else f"{word} ".encode()

    def expect_raw(self, size: int) -> None:
        """The next thing that `receive_block` hands out are the `size` raw bytes that the peer has announced, and the
        byte behind them.
        """
        self._lines.expect_raw(size)

    @property
    def holds_back(self) -> bool:
        """Whether bytes were received that `receive_block` has not looked at: call it with b"" before reading more."""
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
        """The oldest command that was received whole and not handed out yet; None when more bytes are needed.

        Blank lines are passed over. After an exception the connection is CLOSED.

        Raises:
            RemoteProtocolError: the line is not UTF-8, no command, the wrong side's, malformed or too long.
            NotAuthorised: anything but AUTH came first where a token is wanted.
        """
        while self._waiting:
            command = self._command(self._waiting.popleft())
            if command is not None:
                return command
        self.check()
        return None

    def understand(self, line: bytes) -> Command | None:
        """The command on one line of the peer, None for a blank one; the connection's state moves with it.

        A `\r` at its end is dropped. After an exception the connection is CLOSED.

        Raises:
            RemoteProtocolError: the line is not UTF-8, no command, the wrong side's or malformed.
            NotAuthorised: anything but AUTH came first where a token is wanted.
        """
        return self._command(line.removesuffix(b"\r"))

    def _command(self, line: bytes) -> Command | None:
        if not line or line.isspace():
            return None
        try:
            command = self._vocabulary.parse(self._decode(line), self._peer)
            self.state = after(self.state, command)
        except Exception:
            self._fail()
            raise
        if type(command) is Ping:
            self._peer_pings = True
        return command

    def check(self) -> None:
        """Raise where the line now under way is beyond the limit already; the connection is CLOSED then.

        Raises:
            LineTooLong: a RemoteProtocolError.
        """
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
        """`render`, for the caller who writes the bytes at once. Raises what `render` raises."""
        line = self.render(command)
        self._last_sent = now
        return line

    def render(self, command: Command) -> bytes:
        """The bytes of a command of ours, its end included; the caller writes them later, and then calls `sent`.

        A server that hears nothing any more, because its client broke the protocol, may still answer what was asked
        before; a client has nothing to say but ERROR then.

        Raises:
            LocalProtocolError: not our side's command, the connection is closed, or the line would be refused.
        """
        if not command.SENDER & self.side:
            raise LocalProtocolError(f"{command.NAME} is not for this side to send")
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
        """Note that finished lines went out by another way than `send`."""
        self._last_sent = now

    # --- time ---

    def pardon(self, now: float) -> None:
        """Forgive the peer its silence up to `now`: it was us who did not read."""
        self._last_received = now
        if self._line_began is not None:
            self._line_began = now

    def next_deadline(self) -> float:
        """When `due` has something to say at the latest."""
        deadline = self._last_sent + self._timing.ping_interval
        if self._peer_pings:
            deadline = min(deadline, self._last_received + self._timing.peer_timeout)
        if self._line_began is not None:
            deadline = min(deadline, self._line_began + self._timing.line_timeout)
        return deadline

    def due(self, now: float) -> Due | None:
        """What is due at `now`. A hang-up wins over a PING; time-outs start with the peer's first PING."""
        if self._peer_pings and now >= self._last_received + self._timing.peer_timeout:
            return Due.PEER_SILENT
        if self._line_began is not None and now >= self._line_began + self._timing.line_timeout:
            return Due.UNFINISHED_LINE
        if now >= self._last_sent + self._timing.ping_interval:
            return Due.PING
        return None
