"""Renews all leases of a worker with one request on one connection (docs/leases.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import trio

from replicad.client.holding import RENEWALS, Holding, OpenClient
from replicad.client.refusals import may_pass
from replicad.client.trio_client import TrioClient
from replicad.errors import LeaseLost, ReplicadError
from replicad.eventlog import get_logger
from replicad.tubes.commands import MAX_KEPT

log = get_logger(__name__)


class Keeper:
    """The trusted leases of one worker. Those that are due soon are renewed together with the one that is due."""

    def __init__(self, open_client: OpenClient, tube: str, ttl: float) -> None:
        self._open_client = open_client
        self._tube = tube
        self._ttl = ttl
        self._held: dict[int, Holding] = {}  # by term
        self._added = trio.Event()

    @contextmanager
    def keeping(self, holding: Holding) -> Iterator[None]:
        """Renew this lease during the block. When it is lost, its scope is cancelled."""
        self._held[holding.term] = holding
        self._added.set()
        try:
            yield
        finally:
            self._held.pop(holding.term, None)

    async def run(self) -> None:
        """Renew until cancelled. The connection is this task's own: on others a request may take long."""
        async with self._open_client() as client:
            while True:
                self._added = trio.Event()
                due = min((holding.due for holding in self._held.values()), default=float("inf"))
                if trio.current_time() >= due:
                    await self._renew(client)
                    continue
                with trio.move_on_at(due):
                    await self._added.wait()

    async def _renew(self, client: TrioClient) -> None:
        asked = trio.current_time()
        soon = asked + self._ttl / RENEWALS / 2
        near = sorted((holding.due, term) for term, holding in self._held.items() if holding.due <= soon)
        group = {term: self._held[term] for _, term in islice(near, MAX_KEPT)}
        try:
            kept = set(await client.keep(self._tube, list(group)))
        except ReplicadError as error:
            log.info("renewal_failed", tube=self._tube, leases=len(group), code=error.code, error=str(error))
            for holding in group.values():
                if may_pass(error):
                    holding.try_again()
                else:
                    holding.lose(error)
                    self._held.pop(holding.term, None)
            return
        for term, holding in group.items():
            if term in kept:
                holding.renewed(asked)
            else:
                holding.lose(LeaseLost(f"term {term} of tube {self._tube} is not held any more"))
                self._held.pop(term, None)
