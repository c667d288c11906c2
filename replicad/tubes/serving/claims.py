"""Answers CLAIM, and lets those wait whose partition is taken. Who holds a lease, Postgres decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from replicad.config.limits import Limits
from replicad.daemon.service import Peer
from replicad.errors import LeaseHeld, TubeRefused
from replicad.tubes.commands import Claim, Lease
from replicad.tubes.holders import Holder
from replicad.tubes.serving.ownership import Ownership
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.vacancies import Claimant, Vacancies


@dataclass(frozen=True, slots=True)
class _Claiming:
    peer: Peer
    command: Claim
    holder: Holder
    ttl: float
    until: float


class Claims:
    """The claims of all clients. `partitions`: the number of partitions of a tube, as far as it is known."""

    def __init__(
        self,
        ownership: Ownership,
        vacancies: Vacancies,
        readiness: Readiness,
        limits: Limits,
        partitions: Callable[[str], int | None],
    ) -> None:
        self._ownership = ownership
        self._vacancies = vacancies
        self._readiness = readiness
        self._limits = limits
        self._partitions = partitions

    async def claim(self, peer: Peer, command: Claim, wait: float) -> Lease:
        """The lease that a CLAIM asks for. `wait`: seconds, checked.

        Raises:
            LeaseHeld: another holder has it; with `ready` at once, otherwise at the end of the wait.
            TubeRefused, UnknownTube, PartitionsChanged: it cannot be given.
        """
        limits = self._limits
        ttl = limits.lease_ttl if command.ttl is None else command.ttl
        if not 0 < ttl <= limits.lease_ttl_max:
            raise TubeRefused(
                f"ttl={ttl:g} is out of range; this server gives leases of up to {limits.lease_ttl_max:g} s"
            )
        holder = self._ownership.holder(peer, command)
        claiming = _Claiming(peer, command, holder, ttl, trio.current_time() + wait)
        if not wait:
            return await self._ask(claiming)
        return await (self._claim_or_want if command.ready else self._claim_or_wait)(claiming)

    async def _claim_or_want(self, claiming: _Claiming) -> Lease:
        """The lease, or LeaseHeld; READY follows then."""
        peer, tube, part = claiming.peer, claiming.command.tube, claiming.command.part
        self._readiness.want_lease(peer, tube, part, claiming.holder, claiming.until)
        try:
            lease = await self._try(claiming)
        except LeaseHeld:
            raise
        except BaseException:
            self._readiness.drop(peer, tube, part)
            raise
        self._readiness.drop(peer, tube, part)
        return lease

    async def _claim_or_wait(self, claiming: _Claiming) -> Lease:
        free = trio.Event()
        claimant = Claimant(claiming.command.tube, claiming.command.part, claiming.holder, free.set)
        with self._vacancies.waiting(claimant):
            while True:
                try:
                    return await self._try(claiming)
                except LeaseHeld:
                    if trio.current_time() >= claiming.until:
                        raise
                with trio.move_on_at(claiming.until):
                    await free.wait()
                free = trio.Event()
                claimant.wake = free.set

    async def _try(self, claiming: _Claiming) -> Lease:
        """`_ask`, if the partition was free at the last look, or is one of another number of partitions."""
        tube, part = claiming.command.tube, claiming.command.part
        if part.partitions in (1, self._partitions(tube)):
            taken = self._vacancies.taken(tube, part, claiming.holder)
            if taken is not None:
                raise taken
        return await self._ask(claiming)

    async def _ask(self, claiming: _Claiming) -> Lease:
        command = claiming.command
        return await self._ownership.claim(
            claiming.peer, command, claiming.holder, claiming.ttl, self._vacancies.expired
        )
