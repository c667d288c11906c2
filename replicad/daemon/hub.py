"""The open sessions: their maximum number, commands for all of them, and counts of why connections ended.

A command for all sessions is rendered once, before any session gets it. If that fails, only its sender is concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from replicad.daemon.troubles import Troubles
from replicad.protocol.command import Command
from replicad.protocol.states import CloseReason


class Member(Protocol):
    """What the hub needs of a session."""

    def post_line(self, line: bytes) -> None:
        """Queue a rendered line without waiting. Never raises. A peer whose queue is full is disconnected."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the text is sent to the peer as ERROR."""


@dataclass(frozen=True, slots=True)
class HubStatistics:
    """`closed` counts ended connections by reason since the start."""

    connected: int
    accepted: int
    refused: int
    closed: Mapping[str, int]


class Hub:
    """The set of open sessions. `limit` is their maximum; failures of a session are recorded in `troubles`."""

    def __init__(self, limit: int, troubles: Troubles | None = None) -> None:
        self.limit = limit
        self.troubles = troubles or Troubles()
        self._sessions: set[Member] = set()
        self._accepted = 0
        self._refused = 0
        self._closed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._sessions)

    def admit(self, session: Member) -> bool:
        """Add a session. False, and nothing is changed, if the limit is reached."""
        if len(self._sessions) >= self.limit:
            self.refuse()
            return False
        self._accepted += 1
        self._sessions.add(session)
        return True

    def refuse(self) -> None:
        """Count a refused connection."""
        self._refused += 1

    def leave(self, session: Member, reason: CloseReason) -> None:
        """Remove a session and count the reason why it ended. Safe to repeat; the first reason counts."""
        if session in self._sessions:
            self._sessions.discard(session)
            self._closed[reason.value] += 1

    def relay(self, command: Command, sender: object | None) -> None:
        """Post a command to every session except its sender.

        Raises:
            LocalProtocolError: it cannot be rendered; nothing was posted.
        """
        line = command.render().encode() + b"\n"
        for session in list(self._sessions):
            if session is not sender:
                session.post_line(line)

    def statistics(self) -> HubStatistics:
        """Counts, as one frozen value."""
        return HubStatistics(len(self._sessions), self._accepted, self._refused, dict(self._closed))
