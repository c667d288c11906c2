"""When the leases of requests were renewed last, and their renewal when it is due again.

PODS, ACK and PARK renew their lease after a share of its time to live, so that a simple client needs no RENEW. Leases
of requests that wait for pods are renewed together: one statement for all of a tube that are due soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from replicad.tubes.commands import Lease, Part
from replicad.tubes.serving.books import Leases

SHARE = 0.4  # of the time to live. Above a third, at which workers renew: their requests then have nothing to renew

_Key = tuple[str, int]  # tube, term


class Renewals:
    """The leases that requests of this daemon's clients have named."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._known: dict[_Key, tuple[float, float]] = {}  # when renewed last, ttl
        self._waiting: Counter[_Key] = Counter()
        self._together = trio.Lock()

    def note(self, lease: Lease, asked: float) -> None:
        """The lease was given or renewed by a request that was received at `asked`."""
        self._known[lease.tube, lease.term] = (asked, lease.ttl)

    def forget(self, tube: str, term: int) -> None:
        """The lease is over."""
        self._known.pop((tube, term), None)

    def keep_only(self, alive: set[_Key]) -> None:
        """Forget the leases that are over."""
        self._known = {key: value for key, value in self._known.items() if key in alive}

    async def renew(self, tube: str, part: Part, term: int) -> Lease:
        """Renew a lease. Raises LeaseLost."""
        asked = trio.current_time()
        lease = await self._leases.renew(tube, part, term)
        self.note(lease, asked)
        return lease

    async def keep(self, tube: str, terms: Sequence[int], client: str = "") -> list[int]:
        """Renew many leases; returns the terms of those that are still held. `client`: as in `LeaseBook.keep`."""
        asked = trio.current_time()
        kept = await self._leases.keep(tube, terms, client)
        for lease in kept:
            self.note(lease, asked)
        return [lease.term for lease in kept]

    async def renew_if_due(self, tube: str, part: Part, term: int) -> None:
        """Renew the lease of a request if it is time. The SQL statements check the lease. Raises LeaseLost."""
        if trio.current_time() >= self.due(tube, term):
            await self.renew(tube, part, term)

    async def renew_waiting(self, tube: str, part: Part, term: int) -> None:
        """`renew_if_due` for a request that waits, and for the others that wait and are due soon."""
        async with self._together:
            now = trio.current_time()
            if now < self.due(tube, term):
                return  # renewed with another one
            soon = [of for name, of in self._waiting if name == tube and now >= self._time(name, of, SHARE / 2)]
            await self.keep(tube, soon)
        await self.renew_if_due(tube, part, term)  # raises if it is lost

    @contextmanager
    def waiting(self, tube: str, term: int) -> Iterator[None]:
        """A request of this lease waits for pods during the block."""
        self._waiting[tube, term] += 1
        try:
            yield
        finally:
            self._waiting[tube, term] -= 1
            if not self._waiting[tube, term]:
                del self._waiting[tube, term]

    def due(self, tube: str, term: int) -> float:
        """When the lease is to be renewed; in the past if it is unknown here."""
        return self._time(tube, term, SHARE)

    def _time(self, tube: str, term: int, share: float) -> float:
        known = self._known.get((tube, term))
        return float("-inf") if known is None else known[0] + known[1] * share
