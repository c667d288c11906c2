"""Decides which loaded values may be stored: those that were read after the last invalidation of their entry.

Pure: no I/O, no clock. A load takes a ticket *before* it reads. An invalidation voids all tickets for its entry. A
value with a void ticket is not stored. This is enough: a value was read either after the change was committed, then it
is up to date; or before, then its ticket existed when the invalidation came.
"""

from __future__ import annotations

from replicad.caches.keys import Key


class Ticket:
    """A ticket for one load of one entry. It must be given back exactly once, with a value or without."""

    __slots__ = ("key", "valid")

    def __init__(self, key: Key, *, valid: bool) -> None:
        self.key = key
        self.valid = valid


class Guard:
    """The valid tickets of one cache, in `out` by key. There are at most as many as loads under way."""

    __slots__ = ("out",)

    def __init__(self) -> None:
        self.out: dict[Key, list[Ticket]] = {}

    def issue(self, key: Key) -> Ticket:
        """A ticket for a load that begins now."""
        ticket = Ticket(key, valid=True)
        self.out.setdefault(key, []).append(ticket)
        return ticket

    def give_back(self, ticket: Ticket) -> bool:
        """Whether the value that was read under the ticket may be stored. The ticket is void afterwards."""
        good, ticket.valid = ticket.valid, False
        if good:
            rest = self.out[ticket.key]
            rest.remove(ticket)
            if not rest:
                del self.out[ticket.key]
        return good

    def void(self, key: Key) -> None:
        """The entry was invalidated: void the tickets of its loads."""
        for ticket in self.out.pop(key, ()):
            ticket.valid = False

    def void_all(self) -> None:
        """The whole cache was invalidated: void all tickets."""
        for tickets in self.out.values():
            for ticket in tickets:
                ticket.valid = False
        self.out.clear()

    def __len__(self) -> int:
        return sum(map(len, self.out.values()))
