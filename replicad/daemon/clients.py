"""The lists of clients for operators: connected clients, and clients that were cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from replicad.protocol.states import CloseReason

CUTS_KEPT = 100  # the last ones; all are in the log

ORDINARY = frozenset(
    (
        CloseReason.PEER_CLOSED,
        CloseReason.PEER_LOST,
        CloseReason.SERVER_STOPPING,
        CloseReason.TOO_MANY_NEWCOMERS,
        CloseReason.ACCESS_EXPIRED,
    )
)
"""Reasons of ends that are no cuts: the client ended it, the daemon ends, or a browser's token has expired.
Strangers without a command are many."""


@dataclass(frozen=True, slots=True)
class Following:
    """A stream that a client is sent. A client that reads the journal is behind by the seconds that its next chunk has
    waited for it. A client that catches up with old rows has so many ids to go; nothing waits for it in memory.
    """

    stream: str
    behind_s: float | None
    ids_left: int | None = None


@dataclass(frozen=True, slots=True)
class ClientView:
    """A connected client. `access`: its name in the access file. Times in seconds; `sent` in bytes."""

    number: int
    name: str | None
    peer: str
    access: str
    connected_s: float
    sent: int
    known: bool
    following: tuple[Following, ...]


class Cut(NamedTuple):
    """An end of a connection that its client did not want. `at`: by the clock of trio."""

    at: float
    name: str | None
    peer: str
    access: str
    reason: str
    why: str
