"""A bound on the memory or places held for clients; above it an old client is cut, and a new client is served.

Refusing the newest client would let an attacker who connects first shut out all others. The oldest of the address that
has the most is cut, so that a crowd from one address takes no place from others.
"""

from __future__ import annotations

from collections.abc import Callable

from replicad.daemon.by_address import ByAddress


class Allowance:
    """Members with weights, in the order in which they came. If the sum is above `most`, old ones are cut."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.cut = 0  # members that were cut, since the start
        self._members: dict[object, tuple[int, Callable[[], None]]] = {}
        self._addresses: ByAddress[object] = ByAddress()

    def __len__(self) -> int:
        return len(self._members)

    def hold(self, member: object, cut: Callable[[], None], weight: int = 1, address: str = "") -> None:
        """Add a member, or change its weight (it keeps its age). `cut` must not wait; the member has left by then.
        `address`: the client's address.

        The new member may itself be cut, at once.
        """
        before, _ = self._members.get(member, (0, cut))
        if member not in self._members:
            self._addresses.add(member, address)
        self._members[member] = (weight, cut)
        self.used += weight - before
        while self.used > self.most and self._members:
            self.cut_one()

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        if member in self._members:
            weight, _ = self._members.pop(member)
            self.used -= weight
            self._addresses.remove(member)

    def cut_one(self) -> bool:
        """Cut the oldest member of the address that has the most; of all, if each has one. False if there is none."""
        if not self._members:
            return False
        number, crowded = self._addresses.most()
        member = self._addresses.oldest(crowded) if number > 1 else next(iter(self._members))
        _, cut = self._members[member]
        self.leave(member)
        self.cut += 1
        cut()
        return True
