"""Answers the requests of clients: for leases, pods and acks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from replicad.config.limits import Limits
from replicad.daemon.service import Answer, Answers, Peer
from replicad.errors import DatabaseError, DatabaseUnavailable, LeaseHeld, LeaseLost, TubeRefused
from replicad.protocol.command import Command
from replicad.tubes.commands import (
    MAX_KEPT,
    Ack,
    Acked,
    Claim,
    Keep,
    Kept,
    Park,
    Parked,
    Pods,
    Release,
    Renew,
    Report,
    Tube,
)
from replicad.tubes.holders import without_tags
from replicad.tubes.serving.books import Books
from replicad.tubes.serving.claims import Claims
from replicad.tubes.serving.known import KnownTubes
from replicad.tubes.serving.listed import ack_listed, read_list
from replicad.tubes.serving.ownership import Ownership
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.reads import Reads
from replicad.tubes.serving.renewals import Renewals
from replicad.tubes.serving.vacancies import Vacancies
from replicad.tubes.serving.waiters import Waiters


class TubeRequests:
    """The answers to all clients."""

    def __init__(
        self,
        books: Books,
        known: KnownTubes,
        waiters: Waiters,
        vacancies: Vacancies,
        readiness: Readiness,
        *,
        ownership: Ownership,
        renewals: Renewals,
        limits: Limits,
    ) -> None:
        self._leases = books.leases
        self._pods = books.pods
        self._known = known
        self._vacancies = vacancies
        self._ownership = ownership
        self._renewals = renewals
        self._limits = limits
        self._claims = Claims(ownership, vacancies, readiness, limits, known.partitions)
        self._reads = Reads(books, waiters, readiness, renewals, still_served=known.served, partitions=known.partitions)

    def answers(self, peer: Peer) -> Answers:
        """`Service.answers`."""
        work: Mapping[type[Command], Callable[[Peer, Any], Awaitable[None]]] = {
            Tube: self._tube,
            Claim: self._claim,
            Renew: self._renew,
            Keep: self._keep,
            Release: self._release,
            Pods: self._read,
            Ack: self._ack,
            Park: self._park,
            Report: self._report,
        }

        async def refuse_unknown(command: Any) -> None:
            await self._known.find(command.tube, peer.access.lists)

        def answer(each: Callable[[Peer, Any], Awaitable[None]]) -> Answer:
            async def answer_known(command: Any) -> None:
                if peer.access.limited:  # a tube that it may not know and one that is not there get the same answer
                    await self._known.find(command.tube, peer.access.lists)
                    if isinstance(command, (Renew, Release, Pods, Ack, Park)):
                        await self._ownership.check(peer, command.tube, command.term)
                await each(peer, command)

            return partial(self._answer, answer_known)

        return Answers(in_turn={kind: answer(each) for kind, each in work.items()}, unknown=refuse_unknown)

    async def _answer(self, work: Answer, command: Any) -> None:
        """Answer one request of a client.

        Raises:
            TubeError, DatabaseError: it cannot be done. A part of the pods may have been sent.
        """
        try:
            await work(command)
        except (LeaseHeld, LeaseLost) as error:
            raise type(error)(without_tags(str(error))) from error
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:  # if the tube's table is the reason, say so
            if (broken := await self._known.why_broken(command.tube)) is None:
                raise
            raise broken from error

    async def _tube(self, session: Peer, command: Tube) -> None:
        await self._known.look()  # the number of partitions may have changed just now
        info = await self._known.served(command.tube)
        session.post(Tube(info.name, info.partitions, info.made if command.made else None))

    async def _claim(self, session: Peer, command: Claim) -> None:
        await self._known.served(command.tube)
        asked = trio.current_time()
        lease = await self._claims.claim(session, command, self._bounded_wait(command.wait))
        self._renewals.note(lease, asked)
        session.log.info("lease_claimed", tube=lease.tube, part=str(lease.part), term=lease.term, ttl=lease.ttl)
        session.post(lease)

    async def _renew(self, session: Peer, command: Renew) -> None:
        session.post(await self._renewals.renew(command.tube, command.part, command.term))

    async def _keep(self, session: Peer, command: Keep) -> None:
        if len(command.terms) > MAX_KEPT:
            raise TubeRefused(f"{len(command.terms)} terms in one KEEP are too many; send up to {MAX_KEPT} at a time")
        await self._known.find(command.tube)
        terms = await read_list(command.terms, session.give_way)
        session.post(Kept(command.tube, tuple(await self._renewals.keep(command.tube, terms, session.access.name))))

    async def _release(self, session: Peer, command: Release) -> None:
        released = await self._leases.release(command.tube, command.part, command.term)
        self._renewals.forget(command.tube, command.term)
        if released:
            self._vacancies.released(command.tube, command.part)
        session.log.info("lease_released", tube=command.tube, part=str(command.part), was_held=released)
        session.post(Release(command.tube, command.part, command.term))

    async def _ack(self, session: Peer, command: Ack) -> None:
        await self._known.refuse_broken(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        if command.upto is None:
            pods = await ack_listed(self._pods, command, session.give_way)
        else:
            await self._reads.check(command.tube, command.upto)
            pods = await self._pods.ack_upto(command.tube, command.part, command.term, command.after, command.upto)
        session.post(Acked(command.tube, command.part, pods))

    async def _park(self, session: Peer, command: Park) -> None:
        await self._known.refuse_broken(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        ids = await self._pods.park(
            command.tube,
            command.part,
            command.term,
            seq=command.seq,
            ids=await read_list(command.ids, session.give_way),
            tries=command.tries,
            error=command.error,
        )
        session.log.warning(
            "parked", tube=command.tube, seq=command.seq, ids=ids, tries=command.tries, error=command.error
        )
        session.post(Parked(command.tube, command.part, ids))

    async def _report(self, session: Peer, command: Report) -> None:
        await self._known.find(command.tube)
        await self._pods.report(command.tube, command.reporter, command.counts or "{}")
        session.post(Report(command.tube, command.reporter))

    async def _read(self, session: Peer, command: Pods) -> None:
        await self._known.served(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        planned = await self._reads.plan(session, command, self._bounded_wait(command.wait))
        if not session.access.require("work", "tube", command.tube):  # it may have been withdrawn meanwhile
            await self._known.find(command.tube, session.access.lists)
        answer = planned.at
        if planned.lines:
            await session.flush()
            await session.send(planned.lines, f"{answer.render()}\n".encode())
            return
        if not command.plan and answer.cursor != command.after:
            answer = replace(answer, pods=await self._reads.send(session, command, answer.cursor))
        session.post(answer)

    def _bounded_wait(self, wait: float | None) -> float:
        if wait is not None and wait > self._limits.wait_max:
            raise TubeRefused(f"wait={wait:g} is too long; this server waits up to {self._limits.wait_max:g} s")
        return wait or 0.0
