"""The base of both clients' connections: their state, why they ended, and lines received between requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.client.refusals import again, is_notice, refusal
from replicad.client.vocabulary import VOCABULARY
from replicad.errors import ConnectionLost, ReplicadError
from replicad.protocol.commands import Error
from replicad.protocol.connection import Connection, Due
from replicad.protocol.words import Side

if TYPE_CHECKING:
    from replicad.client.sockets import Target

MAX_ROW = 64 << 20  # bytes in a line of the server; as the server's own bound


class Link:
    """An open connection; the base of both. Its first failure ends it for good."""

    def __init__(self, target: Target, now: float) -> None:
        self.target = target
        self.server_name = ""
        self.connection = Connection(Side.CLIENT, VOCABULARY, now=now, timing=target.timing, max_line=MAX_ROW)
        self._deadline = float("inf")  # for the answer that is awaited
        self._busy = True
        self._reading = False
        self._ended: ReplicadError | None = None

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._ended is not None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise again(self._ended)

    def _look_at(self, block: bytes) -> None:
        """Check lines received between requests. Raises the error of an ERROR line, unless it is only a notice."""
        for line in block.split(b"\n"):
            command = self.connection.understand(line)
            if isinstance(command, Error) and not is_notice(error := refusal(command.text)):
                raise error
        self.connection.check()

    def _overdue(self, due: Due) -> ConnectionLost:
        """The error that ends the connection for PEER_SILENT or UNFINISHED_LINE."""
        if due is Due.PEER_SILENT:
            return ConnectionLost(f"{self.target} has been silent for {self.target.timing.peer_timeout:g} s")
        return ConnectionLost(f"{self.target} began a line and did not end it")
