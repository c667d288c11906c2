"""What services call to answer a client: queue commands, stream lines, follow journals. The base of `Session`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from replicad.daemon.access import ClientAccess
from replicad.daemon.closing import error_line, text_of
from replicad.daemon.hub import Hub
from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outbox import Outbox
from replicad.daemon.outlet import Piece
from replicad.errors import ReplicadError, RowUnreadable
from replicad.protocol.command import Command
from replicad.protocol.connection import ProtocolConnection

RELAY = "relay"  # the verb of lines for all clients
log = structlog.get_logger()


class Answering:
    """The sending half of a session. `Session` sets the attributes."""

    __slots__ = ("_connection", "_hub", "access", "name", "number", "outbox", "peer")

    number: int
    peer: str
    name: str | None
    access: ClientAccess
    outbox: Outbox
    _connection: ProtocolConnection
    _hub: Hub

    def _fail(self, error: BaseException) -> None:
        """End the session because of an exception."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """The client's name (its address if it has none) and number, as shown in lists and leases."""
        return f"{(self.name or self.peer).replace(' ', '_')}#{self.number}"

    @property
    def line_bytes(self) -> int:
        """Length of the line of the command that is handled."""
        return self._connection.line_bytes

    @property
    def log(self) -> Any:
        """A logger bound to the client's fields; made when it is needed, since most sessions are idle."""
        bound = log.bind(session=self.number, peer=self.peer)
        if self.access.name:
            bound = bound.bind(client=self.access.name)
        return bound if self.name is None else bound.bind(name=self.name)

    def post(self, command: Command) -> None:
        """Queue a command without waiting; never raises. A peer whose queue is full is disconnected.

        The command is rendered now. If that fails, it is a defect of replicad, and only this session ends.
        """
        try:
            line = self._connection.render(command)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            self._fail(error)
        else:
            self.outbox.post_line(line)

    def post_line(self, line: bytes) -> None:
        """`post` for a rendered line with its newline."""
        self.outbox.post_line(line)

    def deliver(self, lines: bytes) -> None:
        """Send whole lines now, if the socket is free, or queue them. Never raises."""
        if not self.outbox.offer(lines):
            self.outbox.post_line(lines)

    @property
    def hears(self) -> bool:
        """Whether the client may get the lines for all clients."""
        return self.access.may(RELAY)

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request with ERROR; the connection stays open."""
        self.log.info("request_refused", code=error.code, error=str(error))
        self.post(error_line(text_of(error)))

    async def give_way(self) -> None:
        """Wait for the next turn: for work in masses, such as reading a long list."""
        await self._hub.turns.next()

    async def send(self, *pieces: Piece, to_go: float = 0.0) -> None:
        """`Outbox.send`."""
        await self.outbox.send(*pieces, to_go=to_go)

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

    def stop_reading(self, reader: Reader) -> None:
        """`Outbox.stop_reading`."""
        self.outbox.stop_reading(reader)
