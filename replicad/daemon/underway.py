"""The TLS handshakes under way, in the order in which they give way when there are too many.

First those that have sent no whole ClientHello, the oldest first: an attacker can begin many of them at no cost. Then
those that the server has answered, the longest ago first: a client goes on within one round trip. Those that wait for
the server come last. `ready` bounds their number, so each of them is answered within milliseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

WORKED_ON = 4  # handshakes that wait for the server; more are begun when these are answered


class Stage(enum.Enum):
    """What a handshake waits for."""

    HELLO = 0  # the client's first message
    SERVER = 1  # the answer: its turn, and the processor
    CLIENT = 2  # the client's last message


GIVES_WAY = (Stage.HELLO, Stage.CLIENT, Stage.SERVER)


class Underway:
    """Handshakes by stage, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cut = 0  # handshakes that were cut, since the start
        self._stages: dict[Stage, dict[object, Callable[[], None]]] = {stage: {} for stage in Stage}

    def __len__(self) -> int:
        return sum(map(len, self._stages.values()))

    @property
    def ready(self) -> bool:
        """Whether another one, whose ClientHello has come, would soon be answered."""
        return len(self._stages[Stage.SERVER]) < WORKED_ON

    def hold(self, member: object, cut: Callable[[], None]) -> None:
        """Add a handshake, for which another one gives way if there are too many.

        `cut` ends it and must not wait; the member has left by then.
        """
        while len(self) >= self.most:
            self.cut_one()
        self._stages[Stage.HELLO][member] = cut

    def move(self, member: object, stage: Stage) -> None:
        """It waits for something else from now on. No effect if it has left."""
        cut = self._pop(member)
        if cut is not None:
            self._stages[stage][member] = cut

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        self._pop(member)

    def cut_one(self) -> bool:
        """Cut the first in the order of this file's head. False if there is none."""
        for stage in GIVES_WAY:
            member = next(iter(self._stages[stage]), None)
            if member is not None:
                cut = self._stages[stage].pop(member)
                self.cut += 1
                cut()
                return True
        return False

    def _pop(self, member: object) -> Callable[[], None] | None:
        for members in self._stages.values():
            if member in members:
                return members.pop(member)
        return None
