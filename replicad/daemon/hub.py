"""Who is connected: the cap, the relaying of what concerns all, and the count of how connections ended.

What is relayed is rendered once, before any session sees it: what cannot be rendered concerns its sender alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from replicad.daemon.troubles import Troubles
from replicad.protocol.command import Command
from replicad.protocol.states import CloseReason


class Listening(Protocol):
    """What the hub needs of a session."""

    def post_line(self, line: bytes) -> None:
        """Queue a finished line for the peer without waiting; a peer whose queue is full is cut off. Never raises."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the text goes to the peer as ERROR."""


@dataclass(frozen=True, slots=True)
class HubStatistics:
    """`closed` counts ended connections by reason since the start."""

    connected: int
    accepted: int
    refused: int
    closed: Mapping[str, int]


class Hub:
    """The set of open sessions. `limit` is the most there may be; `troubles` takes what goes wrong in one of them."""

    def __init__(self, limit: int, troubles: Troubles | None = None) -> None:
        self.limit = limit
        self.troubles = troubles or Troubles()
        self._sessions: set[Listening] = set()
        self._accepted = 0
        self._refused = 0
        self._closed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Listening]:
        return iter(self._sessions)

    def admit(self, session: Listening) -> bool:
        """Count a session in; False, and nothing done, when there are as many as there may be."""
        if len(self._sessions) >= self.limit:
            self.refuse()
            return False
        self._accepted += 1
        self._sessions.add(session)
        return True

    def refuse(self) -> None:
        """Count a connection that is turned away."""
        self._refused += 1

    def leave(self, session: Listening, reason: CloseReason) -> None:
        """Count a session out under the reason why it ended; safe to repeat, the first reason counts."""
        if session in self._sessions:
            self._sessions.discard(session)
            self._closed[reason.value] += 1

    def relay(self, command: Command, sender: object | None) -> None:
        """Pass a command on to every session but the one that it came from.

        Raises:
            LocalProtocolError: it cannot be rendered; no session was given anything.
        """
        line = command.render().encode() + b"\n"
        for session in list(self._sessions):
            if session is not sender:
                session.post_line(line)

    def statistics(self) -> HubStatistics:
        """Counts, as one frozen value."""
        return HubStatistics(len(self._sessions), self._accepted, self._refused, dict(self._closed))
