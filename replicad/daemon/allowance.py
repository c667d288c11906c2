"""A bound on what is held for clients; if there is more, the oldest is cut, and a new client is served.

Refusing the newest would let an attacker who comes first shut out everybody else.
"""

from __future__ import annotations

from collections.abc import Callable


class Allowance:
    """Members with weights, in the order in which they came. If the sum is above `most`, the oldest are cut."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.cut = 0  # members that were cut, since the start
        self._members: dict[object, tuple[int, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def hold(self, member: object, cut: Callable[[], None], weight: int = 1) -> None:
        """Add a member, or change its weight (it keeps its age). `cut` must not wait; the member has left by then.

        The member may itself be the oldest, and be cut at once.
        """
        before, _ = self._members.get(member, (0, cut))
        self._members[member] = (weight, cut)
        self.used += weight - before
        while self.used > self.most and self._members:
            self.cut_oldest()

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        weight, _ = self._members.pop(member, (0, None))
        self.used -= weight

    def cut_oldest(self) -> bool:
        """Cut the oldest member. False if there is none."""
        member = next(iter(self._members), None)
        if member is None:
            return False
        weight, cut = self._members.pop(member)
        self.used -= weight
        self.cut += 1
        cut()
        return True
