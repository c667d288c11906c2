"""To whom the leases belong that this daemon gives: to a client of the access file, and to a connection or a key.

When a connection ends, what it has claimed is let go: another connection may claim it under the same name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial

import trio

from replicad.daemon.service import Peer
from replicad.daemon.troubles import Troubles
from replicad.errors import LeaseLost
from replicad.tubes.commands import Claim, Lease
from replicad.tubes.holders import Holder, belongs_to, holder_of
from replicad.tubes.serving.books import Leases

LAST_WRITE = 1.0  # seconds at the end of the daemon to let go of what its connections have claimed


class Ownership:
    """The holders of the leases that were claimed through this daemon."""

    def __init__(self, leases: Leases, troubles: Troubles, retry: float) -> None:
        """`retry`: seconds before Postgres is told again that a connection has ended."""
        self._leases = leases
        self._troubles = troubles
        self._retry = retry
        self._daemon = secrets.token_hex(8)  # with a session's number it names a connection among all daemons
        self._bound: set[Holder] = set()
        self._ended: set[Holder] = set()
        self._has_ended = trio.Event()
        self._clients: dict[tuple[str, int], str] = {}  # (tube, term): the stored holder

    def holder(self, session: Peer, command: Claim) -> Holder:
        """The holder that the CLAIM of a client means."""
        connection = f"{self._daemon}.{session.number}"
        return holder_of(command.holder or session.identity, session.access.name, connection)

    async def claim(
        self, session: Peer, command: Claim, holder: Holder, ttl: float, expired: Callable[[str], Sequence[int]]
    ) -> Lease:
        """`LeaseBook.claim` for a client. `expired`: the beats of the expired leases of a tube."""
        if self._ended:
            await self._let_go()
        lease = await self._leases.claim(command.tube, command.part, holder, ttl, expired(command.tube))
        if holder.by_connection and holder not in self._bound:
            self._bound.add(holder)
            session.at_end(partial(self._end, holder))
        return lease

    async def check(self, session: Peer, tube: str, term: int) -> None:
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
        """Let go of what ended connections have claimed, until cancelled."""
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

    def _end(self, holder: Holder) -> None:
        self._bound.discard(holder)
        self._ended.add(holder)
        self._has_ended.set()
