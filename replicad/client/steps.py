"""How the clients' logic asks for I/O without doing any: a generator yields steps, a driver performs them.

Both clients have a driver of a few lines for these four steps, one on sockets and one on trio, and everything else
once. What a driver throws into the generator is what the step failed with; what the generator yields besides steps
is for the driver's user.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from replicad.protocol.command import Command

T = TypeVar("T")


class Send(NamedTuple):
    """Send the commands on the connection, in one piece."""

    commands: tuple[Command, ...]


class Receive(NamedTuple):
    """Wait for more lines; the answer is a block of whole lines, ends included, never empty.

    Raw bytes that the connection was told to expect come as a block of their own.

    `within` starts a clock anew, in seconds, after which ConnectionLost is raised instead; None lets the clock of an
    earlier step run on. Keep-alives are the driver's business and stop no clock.
    """

    within: float | None = None


class Connect(NamedTuple):
    """Make a new connection in place of the old one and introduce us; the answer is its `protocol.Connection`."""


class Sleep(NamedTuple):
    """Wait for so many seconds."""

    seconds: float


STEPS = frozenset({Send, Receive, Connect, Sleep})

Steps = Generator[Any, Any, T]  # yields steps (and things for the user), is sent their answers, returns T
