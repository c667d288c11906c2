"""Answers the requests of clients: CLAIM and the other commands on leases, PODS, ACK, PARK and REPORT.

Postgres decides who holds a lease. PODS plans a read, waits if there are no pods yet, and sends the pods; few pods come
with the plan. Long lists of ACK and PARK are read in pieces, so that one line does not hold the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import trio

from replicad.config.limits import LEASE_TTL_MAX, WAIT_MAX, Limits
from replicad.daemon.service import Answer, Answers
from replicad.daemon.session import Session
from replicad.errors import CursorAhead, DatabaseError, DatabaseUnavailable, LeaseHeld, LeaseLost, TubeRefused
from replicad.protocol.command import Command
from replicad.protocol.tokens import Cursor
from replicad.protocol.words import pieces_of
from replicad.tubes.backfill import Backfiller
from replicad.tubes.bulk import BulkBook, Want
from replicad.tubes.commands import (
    ARROW,
    MAX_KEPT,
    MAX_TABLES,
    Ack,
    Acked,
    Attempt,
    Claim,
    CursorAt,
    Keep,
    Kept,
    Lease,
    Park,
    Parked,
    PartitionShare,
    Pods,
    Release,
    Renew,
    Report,
    Seen,
    TablesFound,
    TablesOf,
    Tube,
)
from replicad.tubes.history import HistoryBook
from replicad.tubes.keys import BIGINT
from replicad.tubes.leases import LeaseBook, LeaseHolder, without_tags
from replicad.tubes.pods import PodBook, PodReadBounds, Span
from replicad.tubes.serving.known import KnownTubes
from replicad.tubes.serving.leases import Ownership, Renewals
from replicad.tubes.serving.waiting import JUST_NOW, ClaimWaiter, ClaimWaiters, PodWaiter, PodWaiters, Readiness


@dataclass(frozen=True, slots=True)
class Books:
    """The access to the database of the service of tubes. `untouched` is `load_untouched`."""

    leases: LeaseBook
    pods: PodBook
    blocks: BulkBook
    backfiller: Backfiller
    untouched: Callable[[], Awaitable[Mapping[str, str]]]
    history: HistoryBook


@dataclass(frozen=True, slots=True)
class _Claiming:
    peer: Session
    command: Claim
    holder: LeaseHolder
    ttl: float
    until: float


class LeaseClaims:
    """The claims of all clients. `partitions`: the number of partitions of a tube, as far as it is known."""

    def __init__(
        self,
        ownership: Ownership,
        claim_waiters: ClaimWaiters,
        readiness: Readiness,
        limits: Limits,
        *,
        partitions: Callable[[str], int | None],
        pods: PodBook,
    ) -> None:
        self._pods = pods
        self._ownership = ownership
        self._claim_waiters = claim_waiters
        self._readiness = readiness
        self._limits = limits
        self._partitions = partitions

    async def claim(self, peer: Session, command: Claim, wait: float) -> Lease:
        """The lease that a CLAIM asks for. `wait`: seconds, checked.

        Raises:
            LeaseHeld: another holder has the lease; raised at once with `ready`, otherwise at the end of the wait.
            TubeRefused, UnknownTube, PartitionsChanged: the lease cannot be given.
        """
        ttl = self._ttl(command.ttl)
        if not ttl:
            raise TubeRefused("ttl=0 is out of range: a lease lasts for a while; give it back with RELEASE")
        holder = self._ownership.holder(peer, command.holder)
        claiming = _Claiming(peer, command, holder, ttl, trio.current_time() + wait)
        if not wait:
            return await self._ask(claiming)
        return await (self._claim_or_want if command.ready else self._claim_or_wait)(claiming)

    async def share(self, peer: Session, command: PartitionShare) -> PartitionShare:
        """The answer to a SHARE. Raises TubeRefused, UnknownTube."""
        tube, ttl = command.tube, self._ttl(command.ttl)
        worker = self._ownership.holder(peer, command.holder)
        if command.ready:  # first: a lease may end while the share is counted
            self._readiness.want_share(peer, tube, worker, trio.current_time() + ttl)
        return await self._pods.share(tube, worker.stored, ttl, self._claim_waiters.expired(tube))

    def _ttl(self, asked: float | None) -> float:
        ttl = self._limits.lease_ttl if asked is None else asked
        if not 0 <= ttl <= LEASE_TTL_MAX:
            raise TubeRefused(f"ttl={ttl:g} is out of range; this server gives leases of up to {LEASE_TTL_MAX:g} s")
        return ttl

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
        claimant = ClaimWaiter(claiming.command.tube, claiming.command.part, claiming.holder, free.set)
        with self._claim_waiters.waiting(claimant):
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
        """`_ask`, unless the last reading shows that another holder has the partition."""
        tube, part = claiming.command.tube, claiming.command.part
        if part.partitions in (1, self._partitions(tube)):
            taken = self._claim_waiters.taken(tube, part, claiming.holder)
            if taken is not None:
                raise taken
        return await self._ask(claiming)

    async def _ask(self, claiming: _Claiming) -> Lease:
        command = claiming.command
        return await self._ownership.claim(
            claiming.peer, command, claiming.holder, claiming.ttl, self._claim_waiters.expired
        )


GiveWay = Callable[[], Awaitable[None]]  # waits for the next turn

T = TypeVar("T")

ACKED_AT_ONCE = 10_000  # listed pods in one statement: a few milliseconds


async def ack_listed(pods: PodBook, command: Ack, give_way: GiveWay) -> int:
    """Remove the listed pods; returns how many there were. The first piece shows whether the lease is held.

    Raises:
        LeaseLost: the term does not cover the partition; nothing was removed.
        RemoteProtocolError: a part of the list is no number. Pods before it were removed.
    """
    removed = 0
    most = 0
    listed: list[int] = []
    for piece in pieces_of(command.seqs):
        if most:
            await give_way()
        listed += piece
        if len(listed) > most:
            removed += await pods.ack(command.tube, command.part, command.term, listed)
            most, listed = ACKED_AT_ONCE, []
    if listed:
        removed += await pods.ack(command.tube, command.part, command.term, listed)
    return removed


async def read_list(numbers: Sequence[T], give_way: GiveWay) -> tuple[T, ...]:
    """All elements of a list. Raises RemoteProtocolError."""
    listed: list[T] = []
    for piece in pieces_of(numbers):
        if listed:
            await give_way()
        listed += piece
    return tuple(listed)


MAX_LIMIT = 100_000  # pods in one answer; a worker that wants more asks again
DEFAULT_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Planned:
    """How far an answer goes. `lines`: its pods, if they were read already."""

    at: CursorAt
    lines: bytes = b""


def _early_of(command: Pods) -> frozenset[int] | None:
    """The seqs above the position that the reader has; None if it wants none of those."""
    return None if command.early is None else frozenset(seq for piece in pieces_of(command.early) for seq in piece)


class PodReads:
    """The reads of all clients."""

    def __init__(
        self,
        books: Books,
        waiters: PodWaiters,
        readiness: Readiness,
        renewals: Renewals,
        *,
        known: KnownTubes,
    ) -> None:
        self._pods = books.pods
        self._bulk = books.blocks
        self._waiters = waiters
        self._readiness = readiness
        self._renewals = renewals
        self._known = known

    async def plan(self, peer: Session, command: Pods, wait: float) -> Planned:
        """How far the answer goes, and how many pods it has. Waits up to `wait` seconds if there are none.

        Raises:
            CursorAhead, LeaseLost, PartitionsChanged, UnknownTube, TubeRefused: the request cannot be answered.
        """
        await self.check(command.tube, command.after)
        if command.upto is not None:
            await self.check(command.tube, command.upto)
            return Planned(CursorAt(command.tube, command.part, command.upto, 0))
        if not wait:
            return await self._plan(command)
        until = trio.current_time() + wait
        return await (self._plan_or_want(peer, command, until) if command.ready else self._plan_or_wait(command, until))

    async def send(self, peer: Session, command: Pods, upto: Cursor) -> int:
        """Send the pods that are planned; returns how many. Raises LeaseLost, also after some."""
        self._known.note_served(command.tube, upto)
        target = command.tube, command.part, command.term
        renew = partial(self._renewals.renew_if_due, *target)
        if command.encoding == ARROW:
            return await self._bulk.send(Want(*target, command.after, upto, command.payload), peer.send, renew)
        return await self._pods.lines(*target, Span(command.after, upto), sink=peer.send, renew=renew)

    async def check(self, tube: str, cursor: Cursor) -> None:
        """Refuse a cursor above the position: pods can still appear below it, and a read behind it would skip them."""
        position = await self._waiters.position(tube)
        if max(cursor.regular, cursor.backfill) > position:
            raise CursorAhead(
                f"cursor {cursor} lies beyond the position {position} of tube {tube}; use cursors from CURSOR answers"
            )

    async def _plan_or_want(self, peer: Session, command: Pods, until: float) -> Planned:
        """The plan; if it has no pods, READY follows."""
        tube, part, after = command.tube, command.part, command.after
        read_to = self._read_to(command)
        early = _early_of(command)
        self._readiness.want_pods(
            peer, tube, part, until, read_to, early=early
        )  # first: pods may come while it is planned
        if read_to is not None:
            return Planned(CursorAt(tube, part, after, 0))
        wanted = False
        try:
            planned = await self._plan(command)
            wanted = not planned.at.pods
            return planned
        finally:
            if not wanted:
                self._readiness.drop(peer, tube, part)

    async def _plan_or_wait(self, command: Pods, until: float) -> Planned:
        tube, part, term = command.tube, command.part, command.term
        came = trio.Event()
        waiter = PodWaiter(tube, part, came.set, self._read_to(command), _early_of(command))
        with self._waiters.waiting(waiter), self._renewals.waiting(tube, term):
            if waiter.read_to is not None:
                with trio.move_on_at(min(until, trio.current_time() + JUST_NOW, self._renewals.due(tube, term))):
                    await came.wait()
                await self._known.served(tube)
                came = trio.Event()
                waiter.wake, waiter.read_to = came.set, None
            while True:
                planned = await self._plan(command)
                if planned.at.pods:
                    return planned
                while not came.is_set():
                    if trio.current_time() >= until:
                        return planned  # no pod came since it was planned
                    with trio.move_on_at(min(until, max(self._renewals.due(tube, term), trio.current_time()))):
                        await came.wait()
                    await self._renewals.renew_waiting(tube, part, term)
                await self._known.served(tube)
                came = trio.Event()
                waiter.wake = came.set

    def _read_to(self, command: Pods) -> int | None:
        """The position up to which no pod is behind the request's cursor, as its lease has just read; else None."""
        if command.part.partitions != self._known.partitions(command.tube):
            return None
        return self._waiters.take_end(command.tube, command.part, command.term, command.after)

    async def _plan(self, command: Pods) -> Planned:
        """The plan. Of a paused tube it has no pods; a range that was planned before the pause is read to its end."""
        tube, part, term, after = command.tube, command.part, command.term, command.after
        if self._waiters.is_paused(tube):
            return Planned(CursorAt(tube, part, after, 0))
        limit = min(DEFAULT_LIMIT if command.limit is None else command.limit, MAX_LIMIT)
        position = await self._waiters.position(tube)
        # read without a pause after the position, so that both are of one generation
        bounds = PodReadBounds(position, limit, command.ids, command.backfill, self._known.generation_id)
        as_lines = not command.plan and command.encoding != ARROW and part.partitions == self._known.partitions(tube)
        short = None
        if as_lines:
            try:
                short = await self._pods.short(tube, part, term, after, bounds)
            except DatabaseUnavailable:
                raise
            except DatabaseError:  # the plan raises the right error
                pass
        if short is not None:
            self._waiters.note_end(tube, part, term, short[0].cursor, bounds.position)
            planned = Planned(*short)
        else:
            planned = Planned(await self._pods.plan(tube, part, term, after, bounds))
        if (
            command.early is None
            or not self._waiters.is_held(tube)
            or not as_lines
            or (planned.at.pods and short is None)
        ):
            return planned
        return await self._add_early(command, bounds, planned)

    async def _add_early(self, command: Pods, bounds: PodReadBounds, planned: Planned) -> Planned:
        """The plan, which has all pods up to the position or is at the limit, and pods above the position."""
        assert command.early is not None
        left = bounds.limit - planned.at.pods
        if left <= 0:
            return planned
        but = [seq for piece in pieces_of(command.early) for seq in piece]
        count, highest, lines = await self._pods.early(
            command.tube, command.part, command.term, but, replace(bounds, limit=left)
        )
        if count:
            self._known.note_served(command.tube, Cursor(highest, 0))
        return Planned(replace(planned.at, pods=planned.at.pods + count), planned.lines + lines)


class TubeRequests:
    """The answers to all clients."""

    def __init__(
        self,
        books: Books,
        known: KnownTubes,
        waiters: PodWaiters,
        claim_waiters: ClaimWaiters,
        readiness: Readiness,
        *,
        ownership: Ownership,
        renewals: Renewals,
        limits: Limits,
    ) -> None:
        self._leases = books.leases
        self._pods = books.pods
        self._known = known
        self._claim_waiters = claim_waiters
        self._ownership = ownership
        self._renewals = renewals
        self._claims = LeaseClaims(
            ownership, claim_waiters, readiness, limits, partitions=known.partitions, pods=books.pods
        )
        self._reads = PodReads(books, waiters, readiness, renewals, known=known)
        self._history = books.history

    def answers(self, peer: Session) -> Answers:
        """`Service.answers`."""
        work: Mapping[type[Command], Callable[[Session, Any], Awaitable[None]]] = {
            Tube: self._tube,
            Claim: self._claim,
            Renew: self._renew,
            Keep: self._keep,
            Release: self._release,
            Pods: self._read,
            Ack: self._ack,
            Park: self._park,
            Attempt: self._attempt,
            PartitionShare: self._share,
            Report: self._report,
            TablesOf: self._tables_of,
            Seen: self._seen,
        }

        async def refuse_unknown(command: Any) -> None:
            await self._known.find(command.tube, peer.access.lists)

        def answer(each: Callable[[Session, Any], Awaitable[None]]) -> Answer:
            async def answer_known(command: Any) -> None:
                if peer.access.limited:  # a tube that the client may not know gets the answer of an absent tube
                    await self._known.find(command.tube, peer.access.lists)
                    if isinstance(command, (Renew, Release, Pods, Ack, Park, Attempt)):
                        await self._ownership.check(peer, command.tube, command.term)
                await each(peer, command)

            return partial(self._answer, answer_known)

        return Answers(in_turn={kind: answer(each) for kind, each in work.items()}, unknown=refuse_unknown)

    async def _answer(self, work: Answer, command: Any) -> None:
        """Answer one request of a client.

        Raises:
            TubeError, DatabaseError: the request cannot be answered. A part of the pods may have been sent.
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

    async def _tube(self, session: Session, command: Tube) -> None:
        await self._known.look()  # the number of partitions may have changed just now
        info = await self._known.served(command.tube)
        keys = None if info.keys == BIGINT else info.keys
        session.post(Tube(info.name, info.partitions, info.made if command.made else None, keys))

    async def _claim(self, session: Session, command: Claim) -> None:
        await self._known.served(command.tube)
        asked = trio.current_time()
        lease = await self._claims.claim(session, command, self._bounded_wait(command.wait))
        self._renewals.note(lease, asked)
        session.log.info("lease_claimed", tube=lease.tube, part=str(lease.part), term=lease.term, ttl=lease.ttl)
        if lease.generation != self._known.generation_id:
            await self._known.look()  # the positions here may be of another history than the lease
        session.post(lease if command.generation else replace(lease, generation=None))

    async def _renew(self, session: Session, command: Renew) -> None:
        session.post(await self._renewals.renew(command.tube, command.part, command.term))

    async def _keep(self, session: Session, command: Keep) -> None:
        if len(command.terms) > MAX_KEPT:
            raise TubeRefused(f"{len(command.terms)} terms in one KEEP are too many; send up to {MAX_KEPT} at a time")
        await self._known.find(command.tube)
        terms = await read_list(command.terms, session.give_way)
        session.post(Kept(command.tube, tuple(await self._renewals.keep(command.tube, terms, session.access.name))))

    async def _release(self, session: Session, command: Release) -> None:
        released = await self._leases.release(command.tube, command.part, command.term)
        self._renewals.forget(command.tube, command.term)
        if released:
            self._claim_waiters.released(command.tube, command.part)
        session.log.info("lease_released", tube=command.tube, part=str(command.part), was_held=released)
        session.post(Release(command.tube, command.part, command.term))

    async def _ack(self, session: Session, command: Ack) -> None:
        await self._known.refuse_broken(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        if command.upto is None:
            pods = await ack_listed(self._pods, command, session.give_way)
        else:
            await self._reads.check(command.tube, command.upto)
            pods = await self._pods.ack_upto(command.tube, command.part, command.term, command.after, command.upto)
        session.post(Acked(command.tube, command.part, pods))

    async def _park(self, session: Session, command: Park) -> None:
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

    async def _seen(self, session: Session, command: Seen) -> None:
        await self._known.find(command.tube)
        found = await self._history.seen(command.tube, command.generation, command.seq)
        since = None if found.since is None else round(found.since.timestamp() * 1_000_000)
        session.post(replace(command, state=found.state, shared=found.shared, since=since, mended=found.mended))

    async def _attempt(self, session: Session, command: Attempt) -> None:
        await self._known.refuse_broken(command.tube)
        note = await self._pods.attempt(command.tube, command.part, command.term, command.note)
        session.post(Attempt(command.tube, command.part, command.term, note))

    async def _share(self, session: Session, command: PartitionShare) -> None:
        await self._known.find(command.tube)
        session.post(await self._claims.share(session, command))

    async def _report(self, session: Session, command: Report) -> None:
        await self._known.find(command.tube)
        await self._pods.report(command.tube, command.reporter, command.counts or "{}")
        session.post(Report(command.tube, command.reporter))

    async def _tables_of(self, session: Session, command: TablesOf) -> None:
        if len(command.shards) > MAX_TABLES:
            raise TubeRefused(f"{len(command.shards)} shards in one TABLES are too many; name up to {MAX_TABLES}")
        await self._known.find(command.tube)
        shards = await read_list(command.shards, session.give_way)
        found = await self._pods.tables_of(command.tube, shards)
        session.post(TablesFound(command.tube, json.dumps(found, separators=(",", ":"))))

    async def _read(self, session: Session, command: Pods) -> None:
        await self._known.served(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        planned = await self._reads.plan(session, command, self._bounded_wait(command.wait))
        if not session.access.require("work", "tube", command.tube):  # it may have been withdrawn meanwhile
            await self._known.find(command.tube, session.access.lists)
        answer = planned.at
        if planned.lines:
            self._known.note_served(command.tube, answer.cursor)
            await session.flush()
            await session.send(planned.lines, f"{answer.render()}\n".encode())
            return
        if not command.plan and answer.cursor != command.after:
            answer = replace(answer, pods=await self._reads.send(session, command, answer.cursor))
        session.post(answer)

    def _bounded_wait(self, wait: float | None) -> float:
        if wait is not None and wait > WAIT_MAX:
            raise TubeRefused(f"wait={wait:g} is too long; this server waits up to {WAIT_MAX:g} s")
        return wait or 0.0
