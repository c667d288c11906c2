"""I/O steps: the clients' logic is generators that yield steps, and a driver performs the steps.

So the logic exists once, and each client has a driver of a few lines for these four steps, one on sockets and one on
trio. The driver throws the error of a failed step into the generator. Other values that the generator yields are for
the user of the driver.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from replicad.protocol.command import Command

T = TypeVar("T")


class Send(NamedTuple):
    """Send the commands on the connection, in one write."""

    commands: tuple[Command, ...]


class Receive(NamedTuple):
    """Wait for more lines; the answer is a block of whole lines, newlines included, never empty.

    Raw bytes that the connection expects are a block of their own.

    `within` sets a deadline, in seconds from now, at which ConnectionLost is raised; None keeps the deadline of an
    earlier step. The driver sends keep-alives; received ones do not change the deadline.
    """

    within: float | None = None


class Connect(NamedTuple):
    """Replace the connection by a new one and send our name; the answer is its `protocol.Connection`."""


class Sleep(NamedTuple):
    """Wait."""

    seconds: float


STEPS = frozenset({Send, Receive, Connect, Sleep})

Steps = Generator[Any, Any, T]  # yields steps (and things for the user), is sent their answers, returns T
