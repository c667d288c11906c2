"""The TLS handshakes under way, in the order in which they are closed when there are too many.

First the handshakes of the address with the most. Of these, first the handshakes without a whole ClientHello: an
attacker can begin many of them at no cost. Then the handshakes that the server has answered: a client continues within
one round trip. Handshakes that wait for the server come last. `ready` bounds their number, so each of them is answered
within milliseconds. Of several, the handshake that has waited for the longest time. If each comes from another address,
that order is the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from replicad.daemon.by_address import ByAddress

WORKED_ON = 1  # handshakes that wait for the server; the next is begun when this handshake is answered
ALONE = 3  # as many beside it, each alone from its address: they need not wait behind a crowd


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
        self._stages: dict[Stage, ByAddress[object]] = {stage: ByAddress() for stage in Stage}
        self._all: ByAddress[object] = ByAddress()
        self._members: dict[object, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def ready(self, address: str) -> bool:
        """Whether another one from this address, whose ClientHello has come, would soon be answered."""
        return len(self._stages[Stage.SERVER]) < WORKED_ON or self.may_jump(address)

    def may_jump(self, address: str) -> bool:
        """Whether another handshake need not wait behind others: no other handshake of its address is under way."""
        return not self._all.count(address) and len(self._stages[Stage.SERVER]) < WORKED_ON + ALONE

    def hold(self, member: object, cut: Callable[[], None], address: str = "", stage: Stage = Stage.HELLO) -> None:
        """Add a handshake with a client, for which another one gives way if there are too many.

        `cut` ends it and must not wait; the member has left by then.
        """
        while len(self) >= self.most:
            self.cut_one()
        self._members[member] = _Member(cut, address, stage)
        self._all.add(member, address)
        self._stages[stage].add(member, address)

    def move(self, member: object, stage: Stage) -> None:
        """It waits for something else from now on. No effect if it has left."""
        found = self._members.get(member)
        if found is not None:
            self._stages[found.stage].remove(member)
            self._stages[stage].add(member, found.address)
            found.stage = stage

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        found = self._members.pop(member, None)
        if found is not None:
            self._all.remove(member)
            self._stages[found.stage].remove(member)

    def cut_one(self) -> bool:
        """Cut the first in the order of this file's head. False if there is none."""
        number, crowded = self._all.most()
        for stage in GIVES_WAY:
            members = self._stages[stage]
            member = members.oldest(crowded if number > 1 else members.most()[1])
            if member is not None:
                cut = self._members[member].cut
                self.leave(member)
                self.cut += 1
                cut()
                return True
        return False


@dataclass(slots=True)
class _Member:
    cut: Callable[[], None]
    address: str
    stage: Stage
