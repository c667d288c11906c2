"""The service of tubes: answers requests for leases, pods and acks, and wakes waiting requests when pods arrive.

It sends only pods at or below the tube's position; above it a pod with a lower seq can still appear. Several daemons
and workers with an expired lease may send requests at once. The SQL keeps them apart, not this file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import trio

from replicad.config.limits import Limits
from replicad.daemon.service import Answer, Answers, Feature, Host, Job, Peer, Positions
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import (
    DatabaseError,
    DatabaseUnavailable,
    DataLoss,
    LeaseHeld,
    LeaseLost,
    TubeRefused,
    UnknownTube,
)
from replicad.postgres.horizon import LockSource, Reading
from replicad.protocol.command import Command
from replicad.tubes.backfill import Backfiller
from replicad.tubes.bulk import BulkBook
from replicad.tubes.commands import (
    COMMANDS,
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
from replicad.tubes.leases import LeaseBook, LeaseView
from replicad.tubes.pods import PodBook, TubeInfo
from replicad.tubes.serving.books import Books
from replicad.tubes.serving.claims import Claims
from replicad.tubes.serving.expired import ExpiredLeases
from replicad.tubes.serving.figures import TubeFigures
from replicad.tubes.serving.listed import ack_listed, read_list
from replicad.tubes.serving.ownership import Ownership
from replicad.tubes.serving.pace import Pace
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.reads import Reads
from replicad.tubes.serving.renewals import Renewals
from replicad.tubes.serving.vacancies import Vacancies
from replicad.tubes.serving.waiters import Waiters
from replicad.tubes.untouched import load_untouched

TUBE = "tube"  # the kind of the troubles of one tube; a trouble of all tubes has the kind "service"

log = structlog.get_logger()


class TubeService:
    """Answers the requests of all sessions about all tubes of one schema.

    A fault of one tube is a trouble of that tube, and the answer to requests for it.
    """

    def __init__(
        self,
        books: Books,
        limits: Limits,
        poller: Positions,
        *,
        troubles: Troubles,
        pace: Pace = Pace(),
    ) -> None:
        self.leases = books.leases
        self.tubes: dict[str, TubeInfo] = {}
        self._limits = limits
        self._pace = pace
        self._pods = books.pods
        self._untouched = books.untouched
        self._backfiller = books.backfiller
        self._poller = poller
        self._troubles = troubles
        self._ownership = Ownership(books.leases, troubles, pace.look)
        self._waiters = Waiters(self._pods, troubles, pace)
        self._vacancies = Vacancies()
        self._readiness = Readiness(self._waiters, self._vacancies)
        self._renewals = Renewals(books.leases)
        self._claims = Claims(self._ownership, self._vacancies, self._readiness, limits, self._partitions)
        self._reads = Reads(books, self._waiters, self._readiness, self._renewals, self._served)
        self._watched: dict[str, LockSource] = {}
        self._refused: dict[str, str] = {}  # tube: why it has no position
        self.readings: dict[str, Reading] = {}  # the last one of each tube
        self.seen_leases: Sequence[LeaseView] = ()  # at the last look, which is made every second
        self._expired = ExpiredLeases(troubles)
        self._looks = self._newest_look = 0

    # --- `Service` ---

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [Job("tubes", self.run, announces=True)]

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
            await self._info(command.tube, peer.access.lists)

        def answer(each: Callable[[Peer, Any], Awaitable[None]]) -> Answer:
            async def answer_known(command: Any) -> None:
                if peer.access.limited:  # a tube that it may not know and one that is not there get the same answer
                    await self._info(command.tube, peer.access.lists)
                    if isinstance(command, (Renew, Release, Pods, Ack, Park)):
                        await self._ownership.check(peer, command.tube, command.term)
                await each(peer, command)

            return partial(self._answer, answer_known)

        return Answers(in_turn={kind: answer(each) for kind, each in work.items()}, unknown=refuse_unknown)

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"tubes": sorted(self.tubes)}

    # --- for figures ---

    def fault(self, tube: str) -> str | None:
        """Why a tube cannot be served; None if it can."""
        info = self.tubes.get(tube)
        return (info.fault if info is not None else None) or self._refused.get(tube)

    def waiting(self, tube: str) -> int:
        """How many requests wait for pods of the tube."""
        return self._waiters.count(tube)

    # --- tasks ---

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the tubes, their positions and their leases until cancelled. Started once the tubes are known."""
        await self._look_at_tubes()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                keep_running, self._waiters.run, "service", "tube waiters", self._troubles, self._pace.restarts
            )
            nursery.start_soon(
                keep_running, self._ownership.run, "service", "leases", self._troubles, self._pace.restarts
            )
            nursery.start_soon(self._repeat, "tubes", self._look_at_tubes)
            nursery.start_soon(self._repeat, "triggers", self._look_at_triggers)
            nursery.start_soon(self._repeat, "leases", self._look_at_leases)
            nursery.start_soon(self._repeat, "backfills", partial(self._look_for_backfills, nursery))

    async def _repeat(self, cause: str, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat one step. Each has its own task: a step that fails or waits does not delay the others."""
        while True:
            await trio.sleep(self._pace.look)
            with self._troubles.contain("service", "tubes", cause):
                await step()

    async def _look_at_tubes(self) -> None:
        self._looks += 1
        number = self._looks
        found = {info.name: info for info in await self._pods.tubes()}
        if number < self._newest_look:
            return  # a look that began later has already finished
        self._newest_look = number
        before, self.tubes = self.tubes, found
        for name in before.keys() - found.keys():
            self._unwatch(name)
        troubled = {trouble.place.name for trouble in self._troubles.current() if trouble.place.kind == TUBE}
        for name in troubled - found.keys():
            self._troubles.forget(TUBE, name)
        for name, info in found.items():
            with self._troubles.contain(TUBE, name, "look"):
                self._watch(info, before.get(name))

    def _watch(self, info: TubeInfo, before: TubeInfo | None) -> None:
        """Watch the tube's table, which may have been replaced, and report its fault."""
        wanted = None
        if info.table_oid is not None and info.sequence_oid is not None:
            wanted = LockSource(info.table_oid, info.sequence_oid, own_deletes=True)
        if wanted != self._watched.get(info.name):
            self._unwatch(info.name)
            if wanted is not None:
                self._poller.watch(f"tube:{info.name}", wanted, self._on_reading)
                self._watched[info.name] = wanted
        if info.fault is None:
            self._troubles.end(TUBE, info.name, "table")
        else:
            self._troubles.begin(TUBE, info.name, "table", info.fault, code=TubeRefused.code)
        if before is not None and info.fault != before.fault:
            self._wake(info.name)
        elif before is not None and info.partitions != before.partitions:
            self._wake(info.name, but={1, info.partitions})

    def _wake(self, tube: str, but: Container[int] = ()) -> None:
        """Let requests that wait look again: their own statements show what has changed. `but`: as `Waiters.wake`."""
        self._waiters.wake(tube, but)
        self._vacancies.wake(tube, but)

    def _partitions(self, tube: str) -> int | None:
        """The number of partitions at the last look."""
        info = self.tubes.get(tube)
        return None if info is None else info.partitions

    def _unwatch(self, name: str) -> None:
        self._poller.unwatch(f"tube:{name}")
        self._watched.pop(name, None)
        self._refused.pop(name, None)
        self.readings.pop(name, None)
        self._troubles.end(TUBE, name, "position")
        self._waiters.forget(name)
        self._vacancies.wake(name)

    async def _look_at_triggers(self) -> None:
        """Report attached tables whose changes are not recorded. The pods of their tube are served all the same."""
        found = await self._untouched()
        for name in self.tubes:
            if name in found:
                self._troubles.begin(TUBE, name, "triggers", found[name], code=DataLoss.code)
            else:
                self._troubles.end(TUBE, name, "triggers")

    async def _look_at_leases(self) -> None:
        self._readiness.drop_late()
        try:
            self.seen_leases = await self.leases.look()
        except Exception:
            self._vacancies.forget()
            raise
        self._vacancies.note(self.seen_leases)
        self._expired.report(self.seen_leases, self.tubes)
        alive = {(lease.tube, lease.term) for lease in self.seen_leases}
        self._renewals.keep_only(alive)
        self._ownership.keep_only(alive)

    async def _look_for_backfills(self, nursery: trio.Nursery) -> None:
        await self._backfiller.run([info for info in self.tubes.values() if info.fault is None], nursery)

    def _on_reading(self, name: str, reading: Reading) -> None:
        tube = name.removeprefix("tube:")
        self.readings[tube] = reading
        if reading.refused is None:
            if self._refused.pop(tube, None) is not None:
                self._troubles.end(TUBE, tube, "position")
        elif self._refused.get(tube) != str(reading.refused):
            self._refused[tube] = str(reading.refused)
            self._troubles.begin(TUBE, tube, "position", str(reading.refused), code=TubeRefused.code)
            self._wake(tube)
        if reading.fork is not None:  # pods have no history: go on with the ids of now
            self._poller.watch(name, self._watched[tube], self._on_reading)
        elif reading.position is not None:
            self._waiters.note_position(tube, reading.position)

    # --- requests ---

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
            await self._look_at_tubes()
            info = self.tubes.get(command.tube)
            if info is None or info.fault is None:
                raise
            raise self._broken(info.name, info.fault) from error

    @staticmethod
    def _broken(tube: str, fault: str) -> TubeRefused:
        return TubeRefused(f"tube {tube} cannot be served: {fault}")

    async def _served(self, tube: str) -> TubeInfo:
        """The tube. Raises UnknownTube, or TubeRefused with the reason if it cannot be served."""
        info = await self._info(tube)
        fault = self.fault(tube)
        if fault is not None:
            raise self._broken(tube, fault)
        return info

    async def _refuse_broken(self, tube: str) -> None:
        """As `_served`, but accepts an unknown tube: the SQL statement checks the lease first and then refuses it."""
        if tube in self.tubes:
            await self._served(tube)

    async def _info(self, tube: str, lists: Callable[[str], bool] = lambda _: True) -> TubeInfo:
        """The tube. Raises UnknownTube, also if the client may not know the name (`lists`)."""
        hidden = not lists(tube)
        if hidden or tube not in self.tubes or self.fault(tube) is not None:  # made, made again or mended just now?
            await self._look_at_tubes()
        found = None if hidden else self.tubes.get(tube)
        if found is None:
            known = ", ".join(sorted(filter(lists, self.tubes))) or "none yet; make one with `replicad tubes create`"
            raise UnknownTube(f"there is no tube {tube[:80]!r}; the tubes are: {known}")
        return found

    async def _tube(self, session: Peer, command: Tube) -> None:
        await self._look_at_tubes()  # the number of partitions may have changed just now
        info = await self._served(command.tube)
        session.post(Tube(info.name, info.partitions, info.made if command.made else None))

    async def _claim(self, session: Peer, command: Claim) -> None:
        await self._served(command.tube)
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
        await self._info(command.tube)
        terms = await read_list(command.terms, session.give_way)
        session.post(Kept(command.tube, tuple(await self._renewals.keep(command.tube, terms, session.access.name))))

    async def _release(self, session: Peer, command: Release) -> None:
        released = await self.leases.release(command.tube, command.part, command.term)
        self._renewals.forget(command.tube, command.term)
        if released:
            self._vacancies.released(command.tube, command.part)
        session.log.info("lease_released", tube=command.tube, part=str(command.part), was_held=released)
        session.post(Release(command.tube, command.part, command.term))

    async def _ack(self, session: Peer, command: Ack) -> None:
        await self._refuse_broken(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        if command.upto is None:
            pods = await ack_listed(self._pods, command, session.give_way)
        else:
            await self._reads.check(command.tube, command.upto)
            pods = await self._pods.ack_upto(command.tube, command.part, command.term, command.after, command.upto)
        session.post(Acked(command.tube, command.part, pods))

    async def _park(self, session: Peer, command: Park) -> None:
        await self._refuse_broken(command.tube)
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
        await self._info(command.tube)
        await self._pods.report(command.tube, command.reporter, command.counts or "{}")
        session.post(Report(command.tube, command.reporter))

    async def _read(self, session: Peer, command: Pods) -> None:
        await self._served(command.tube)
        await self._renewals.renew_if_due(command.tube, command.part, command.term)
        planned = await self._reads.plan(session, command, self._bounded_wait(command.wait))
        if not session.access.require("work", "tube", command.tube):  # it may have been withdrawn meanwhile
            await self._info(command.tube, session.access.lists)
        if not command.plan and planned.cursor != command.after:
            planned = replace(planned, pods=await self._reads.send(session, command, planned.cursor))
        session.post(planned)

    # --- what requests share ---

    def _bounded_wait(self, wait: float | None) -> float:
        if wait is not None and wait > self._limits.wait_max:
            raise TubeRefused(f"wait={wait:g} is too long; this server waits up to {self._limits.wait_max:g} s")
        return wait or 0.0


def feature(pace: Pace = Pace()) -> Feature:
    """The feature `tubes` for the daemon."""

    def open_service(host: Host) -> TubeService:
        pools, schema = host.pools, host.settings.database.tube_schema
        books = Books(
            LeaseBook(pools.short, schema),
            PodBook(pools.short, pools.acks, pools.tubes, schema),
            BulkBook(pools.tubes, schema, pace.blocks),
            Backfiller(pools.housekeeping, schema, host.troubles, pace.backfills),
            partial(load_untouched, pools.housekeeping, schema),
        )
        service = TubeService(books, host.settings.limits, host.poller, troubles=host.troubles, pace=pace)
        host.figures.add(TubeFigures(service, pools.housekeeping, schema))
        return service

    return Feature("tubes", COMMANDS, open_service)


FEATURE = feature()
