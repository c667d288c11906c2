"""The service of tubes: its tasks, which look at tubes, triggers, leases and backfills every second.

It sends only pods at or below the tube's position; above it a pod with a lower seq can still appear. Several daemons
and workers with an expired lease may send requests at once. The SQL keeps them apart, not this room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import trio

from replicad.config.limits import Limits
from replicad.daemon.service import Answers, Feature, Host, Job, Peer, Positions
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import DataLoss
from replicad.postgres.horizon import Reading
from replicad.tubes.backfill import Backfiller
from replicad.tubes.bulk import BulkBook
from replicad.tubes.commands import COMMANDS
from replicad.tubes.leases import LeaseBook, LeaseView
from replicad.tubes.pods import PodBook, TubeInfo
from replicad.tubes.serving.books import Books
from replicad.tubes.serving.expired import ExpiredLeases
from replicad.tubes.serving.figures import TubeFigures
from replicad.tubes.serving.known import TUBE, KnownTubes
from replicad.tubes.serving.ownership import Ownership
from replicad.tubes.serving.pace import Pace
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.renewals import Renewals
from replicad.tubes.serving.requests import TubeRequests
from replicad.tubes.serving.vacancies import Vacancies
from replicad.tubes.serving.waiters import Waiters
from replicad.tubes.untouched import load_untouched


class TubeService:
    """All tubes of one schema, for all sessions."""

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
        self.seen_leases: Sequence[LeaseView] = ()  # at the last look, which is made every second
        self._pace = pace
        self._untouched = books.untouched
        self._backfiller = books.backfiller
        self._troubles = troubles
        self._waiters = Waiters(books.pods, troubles, pace)
        self._vacancies = Vacancies()
        self._known = KnownTubes(books.pods, poller, self._waiters, self._vacancies, troubles)
        self._ownership = Ownership(books.leases, troubles, pace.look)
        self._readiness = Readiness(self._waiters, self._vacancies)
        self._renewals = Renewals(books.leases)
        self._expired = ExpiredLeases(troubles)
        self._requests = TubeRequests(
            books,
            self._known,
            self._waiters,
            self._vacancies,
            self._readiness,
            ownership=self._ownership,
            renewals=self._renewals,
            limits=limits,
        )

    # --- `Service` ---

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [Job("tubes", self.run, announces=True)]

    def answers(self, peer: Peer) -> Answers:
        """`Service.answers`."""
        return self._requests.answers(peer)

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"tubes": sorted(self.tubes)}

    # --- for figures ---

    @property
    def tubes(self) -> Mapping[str, TubeInfo]:
        """The tubes at the last look."""
        return self._known.tubes

    @property
    def readings(self) -> Mapping[str, Reading]:
        """The last reading of the position of each tube."""
        return self._known.readings

    def fault(self, tube: str) -> str | None:
        """Why a tube cannot be served; None if it can."""
        return self._known.fault(tube)

    def waiting(self, tube: str) -> int:
        """How many requests wait for pods of the tube."""
        return self._waiters.count(tube)

    # --- tasks ---

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the tubes, their positions and their leases until cancelled. Started once the tubes are known."""
        await self._known.look()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                keep_running, self._waiters.run, "service", "tube waiters", self._troubles, self._pace.restarts
            )
            nursery.start_soon(
                keep_running, self._ownership.run, "service", "leases", self._troubles, self._pace.restarts
            )
            nursery.start_soon(self._repeat, "tubes", self._known.look)
            nursery.start_soon(self._repeat, "triggers", self._look_at_triggers)
            nursery.start_soon(self._repeat, "leases", self._look_at_leases)
            nursery.start_soon(self._repeat, "backfills", partial(self._look_for_backfills, nursery))

    async def _repeat(self, cause: str, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat one step. Each has its own task: a step that fails or waits does not delay the others."""
        while True:
            await trio.sleep(self._pace.look)
            with self._troubles.contain("service", "tubes", cause):
                await step()

    async def _look_at_triggers(self) -> None:
        """Report attached tables whose changes are not recorded. The pods of their tube are served all the same."""
        found = await self._untouched() if self.tubes else {}
        for name in self.tubes:
            if name in found:
                self._troubles.begin(TUBE, name, "triggers", found[name], code=DataLoss.code)
            else:
                self._troubles.end(TUBE, name, "triggers")

    async def _look_at_leases(self) -> None:
        self._readiness.drop_late()
        try:
            self.seen_leases = await self.leases.look() if self.tubes else ()
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


def feature(pace: Pace = Pace()) -> Feature:
    """The feature `tubes` for the daemon."""

    def open_service(host: Host) -> TubeService:
        pools, schema = host.pools, host.settings.database.tube_schema
        books = Books(
            LeaseBook(pools.short, schema, own=pools.own),
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
