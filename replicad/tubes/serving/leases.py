"""The leases that this daemon has given: their owners, their renewals, and the leases that have expired.

A lease belongs to a client of the access file, and to a connection or to a key. When a connection ends, the daemon
releases the leases that the connection has claimed; another connection may then claim them under the same name.

PODS, ACK and PARK renew their lease after a share of its time to live, so a simple client needs no RENEW. The leases of
requests that wait for pods are renewed together: one statement renews all leases of a tube that are due soon.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio

from replicad.daemon.session import Session
from replicad.daemon.troubles import Troubles
from replicad.errors import LeaseLost
from replicad.tubes.commands import Claim, Lease, Part
from replicad.tubes.leases import LeaseBook, LeaseHolder, LeaseView, belongs_to, holder_of, without_tags

LAST_WRITE = 1.0  # seconds at the end of the daemon to release the leases of its connections


class Ownership:
    """The holders of the leases that were claimed through this daemon."""

    def __init__(self, leases: LeaseBook, troubles: Troubles, retry: float) -> None:
        """`retry`: seconds before a release that failed is tried again."""
        self._leases = leases
        self._troubles = troubles
        self._retry = retry
        self._daemon = secrets.token_hex(8)  # with a session's number it names a connection among all daemons
        self._bound: set[LeaseHolder] = set()
        self._ended: set[LeaseHolder] = set()
        self._has_ended = trio.Event()
        self._clients: dict[tuple[str, int], str] = {}  # (tube, term): the stored holder

    def holder(self, session: Session, given: str | None) -> LeaseHolder:
        """The holder that the CLAIM of a client means. `given`: `NAME` or `NAME!KEY`, if it gives one."""
        connection = f"{self._daemon}.{session.number}"
        return holder_of(given or session.identity, session.access.name, connection)

    async def claim(
        self, session: Session, command: Claim, holder: LeaseHolder, ttl: float, expired: Callable[[str], Sequence[int]]
    ) -> Lease:
        """`LeaseBook.claim` for a client. `expired`: the beats of the expired leases of a tube."""
        if self._ended:
            await self._let_go()
        lease = await self._leases.claim(command.tube, command.part, holder, ttl, expired(command.tube))
        if holder.by_connection and holder not in self._bound:
            self._bound.add(holder)
            session.at_end(partial(self._end, holder))
        return lease

    async def check(self, session: Session, tube: str, term: int) -> None:
        """Refuse a term of another client of the access file. A term that no lease has is left to the SQL.

        Raises:
            LeaseLost: the lease belongs to another client.
        """
        stored = self._clients.get((tube, term)) or await self._leases.holder_of(tube, term)
        if stored is None:
            return
        self._clients[tube, term] = stored
        if not belongs_to(stored, session.access.name):
            raise LeaseLost(f"term {term} of tube {tube!r} is not a lease of client {session.access.name}")

    def keep_only(self, alive: set[tuple[str, int]]) -> None:
        """Forget the leases that are over."""
        self._clients = {key: value for key, value in self._clients.items() if key in alive}

    async def run(self) -> None:
        """Release the leases of connections that have ended, until cancelled."""
        try:
            while True:
                await self._has_ended.wait()
                with self._troubles.contain("service", "tubes", "let go"):
                    await self._let_go()
                if self._ended:
                    await trio.sleep(self._retry)
        finally:
            self._ended |= self._bound  # the daemon ends, and all connections with it
            with trio.move_on_after(LAST_WRITE, shield=True), self._troubles.contain("service", "tubes", "let go"):
                if self._ended:
                    await self._let_go()

    async def _let_go(self) -> None:
        holders = list(self._ended)
        await self._leases.let_go(holders)
        self._ended.difference_update(holders)
        if not self._ended:
            self._has_ended = trio.Event()

    def _end(self, holder: LeaseHolder) -> None:
        self._bound.discard(holder)
        self._ended.add(holder)
        self._has_ended.set()


SHARE = 0.4  # of the time to live. Above a third, at which workers renew: their requests then have nothing to renew

_Key = tuple[str, int]  # tube, term


class Renewals:
    """The leases that requests of this daemon's clients have named."""

    def __init__(self, leases: LeaseBook) -> None:
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
        """Renew many leases; returns the terms of the leases that are still held. `client`: as in `LeaseBook.keep`."""
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
        """`renew_if_due` for a waiting request, together with the other waiting requests whose leases are due soon."""
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


LEASE_EXPIRED = "lease_expired"


class ExpiredLeases:
    """Reports each expired lease as a trouble of its tube. The command line of any machine can read it.

    Without this report, a killed worker stays unnoticed until another worker claims its partition.
    """

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._reported: set[tuple[str, str]] = set()  # tube and cause

    def report(self, leases: Iterable[LeaseView], tubes: Container[str]) -> None:
        """Begin a trouble for each expired lease, and end the troubles of leases that are no longer expired.

        `leases`: all present leases.
        """
        expired = {(one.tube, _expired_cause(one)): one for one in leases if one.expired and one.tube in tubes}
        for tube, cause in self._reported - expired.keys():
            self._troubles.end("tube", tube, cause)
        for (tube, cause), lease in expired.items():
            self._troubles.begin("tube", tube, cause, _expired_text(lease), code=LEASE_EXPIRED)
        self._reported = set(expired)


def _expired_cause(lease: LeaseView) -> str:
    return f"lease {lease.partition}/{lease.partitions}"


def _expired_text(lease: LeaseView) -> str:
    return (
        f"partition {lease.partition}/{lease.partitions}: {without_tags(lease.holder)} has not renewed its lease of "
        f"{lease.ttl:g} s. It was stopped, was killed, hangs or cannot reach a daemon; start a worker"
    )
