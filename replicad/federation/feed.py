"""What a sender needs of the daemon: rows in one order, news about servers, and a way to say what is recorded.

The real one is made of `replicad.client`; tests bring their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from replicad.client.events import Event
from replicad.protocol.commands import Command

NOW = "NOW"
EARLIEST = "EARLIEST"


class Feed(Protocol):
    """A connection to the daemon that comes back when it was lost."""

    def follow(self) -> AsyncIterator[Event | Command]:
        """Rows of every stream in ascending order over all writers (`linear`), and commands that concern no stream.

        Never ends by itself. Raises ReplicadError where trying again does not help.
        """

    async def send(self, command: Command) -> None:
        """Tell the daemon something, if there is a connection now; what is lost with one is not repeated."""


OpenFeed = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Feed]]
"""Opens a feed of streams, each behind a token: a number, NOW or EARLIEST."""
