"""Which values may still be stored: those that were read after the last invalidation that touches them.

Pure. A load takes a ticket *before* it reads; an invalidation voids the tickets that are out for its entry, and a value
whose ticket is void is not stored. That is the whole argument: a value was read before or after the change that an
invalidation tells of was committed. If after, it is good. If before, the ticket was out when the invalidation came.
"""

from __future__ import annotations

from replicad.caches.keys import Key


class Ticket:
    """Of one load of one entry. Given back exactly once, with a value or without."""

    __slots__ = ("key", "valid")

    def __init__(self, key: Key, *, valid: bool) -> None:
        self.key = key
        self.valid = valid


class Guard:
    """The tickets that are out for one cache. Bounded by the loads that are under way."""

    __slots__ = ("_out",)

    def __init__(self) -> None:
        self._out: dict[Key, list[Ticket]] = {}

    def issue(self, key: Key) -> Ticket:
        """A ticket for a load that begins now."""
        ticket = Ticket(key, valid=True)
        self._out.setdefault(key, []).append(ticket)
        return ticket

    def give_back(self, ticket: Ticket) -> bool:
        """Whether the value that was read under the ticket may be stored. The ticket is void afterwards."""
        good, ticket.valid = ticket.valid, False
        if good:
            rest = self._out[ticket.key]
            rest.remove(ticket)
            if not rest:
                del self._out[ticket.key]
        return good

    def void(self, key: Key) -> None:
        """The entry was invalidated: whatever is being loaded for it may be old."""
        for ticket in self._out.pop(key, ()):
            ticket.valid = False

    def void_all(self) -> None:
        """The whole cache was invalidated."""
        for tickets in self._out.values():
            for ticket in tickets:
                ticket.valid = False
        self._out.clear()

    def __len__(self) -> int:
        return sum(map(len, self._out.values()))
