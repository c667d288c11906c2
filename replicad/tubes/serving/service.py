"""The service of tubes: its tasks, which read tubes, triggers, leases and backfills every second, and its figures.

It sends only pods at or below the tube's position; above the position a pod with a lower seq can still appear. Several
daemons, and workers with an expired lease, may send requests at once. The SQL keeps them apart, not this room.

The figures are the backlog, the leases, the parked ids, and the transaction that holds a tube back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from replicad.config.limits import Limits
from replicad.daemon.figures import Detail, Family, FigureQuery, Obstacle, Sample, StateView
from replicad.daemon.poller import Poller
from replicad.daemon.service import Answers, Feature, Host, Job
from replicad.daemon.session import Session
from replicad.daemon.troubles import Troubles, keep_running
from replicad.errors import DataLoss
from replicad.positions.horizon import Reading
from replicad.postgres.bridge import Database, quote_ident, quote_literal
from replicad.postgres.statements import statement
from replicad.streams.queries import Impatient, fetch_together
from replicad.tubes.backfill import Backfiller
from replicad.tubes.bulk import BulkBook
from replicad.tubes.commands import COMMANDS
from replicad.tubes.history import HistoryBook
from replicad.tubes.leases import LeaseBook, LeaseView
from replicad.tubes.picture import (
    OK,
    PARTITION_COLUMNS,
    PAUSED,
    REFUSED,
    TROUBLED,
    TUBE_COLUMNS,
    PartitionPicture,
    TubePicture,
)
from replicad.tubes.pods import PodBook, TubeInfo
from replicad.tubes.serving.known import TUBE, KnownTubes
from replicad.tubes.serving.leases import ExpiredLeases, Ownership, Renewals
from replicad.tubes.serving.requests import Books, TubeRequests
from replicad.tubes.serving.waiting import ClaimWaiters, PodWaiters, Readiness, TubeIntervals
from replicad.tubes.untouched import TriggerLooks

CHECK_SHARE = 50  # comparing the rows of all triggers may take a 50th of the time: with thousands of tables it is slow
MOST_TABLES = 10  # of one tube that are named
FEW = 5000  # pods of a tube that are counted in one pass over its table
COUNTED = ("pods", "age_s", "backfill_pods", "backfill_age_s", "parked")  # by a look at the tables
FAMILIES = (*TUBE_COLUMNS.families, *PARTITION_COLUMNS.families)


class TubeFigures:
    """`Source` for tubes. `db`: the pool for the queries on the tables of tubes."""

    def __init__(self, served: TubeService, db: Database, schema: str) -> None:
        self._served = served
        self._db = db
        self._schema = schema
        self._seen: dict[tuple[str, int], Mapping[str, float]] = {}  # of the last look, by tube and partition
        self._tables: dict[str, tuple[str, ...]] = {}  # of the last look, by tube

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        for picture in self._pictures():
            yield from TUBE_COLUMNS.samples(picture)
            for partition in picture.partitions:
                yield from PARTITION_COLUMNS.samples(partition)

    def _pictures(self) -> Iterable[TubePicture]:
        """The pictures of all tubes, from memory."""
        leases = _by_tube(self._served.seen_leases)
        for name, info in list(self._served.tubes.items()):
            reading = self._served.readings.get(name)
            state, problem = self._served.state(info)
            of_tube = leases.get(name, ())
            yield TubePicture(
                name=name,
                state=state,
                problem=problem,
                paused_at=info.paused_at,
                tables=self._tables.get(name, ()),
                delays=self._served.delays.get(name),
                held_by=None if reading is None else reading.held_by,
                waiting=self._served.waiting(name),
                partitions=tuple(
                    self._partition(name, number, _lease_of(of_tube, number, info.partitions))
                    for number in range(info.partitions)
                ),
            )

    def _partition(self, tube: str, partition: int, lease: LeaseView | None) -> PartitionPicture:
        seen: Mapping[str, Any] = self._seen.get((tube, partition), {})
        return PartitionPicture(
            tube=tube,
            partition=partition,
            holder=None if lease is None else lease.holder.partition(" ")[0],
            silent_s=None if lease is None else lease.silent,
            lease_alive=lease is not None and not lease.expired,
            pods=seen.get("pods"),
            age_s=seen.get("age_s"),
            backfill_pods=seen.get("backfill_pods"),
            backfill_age_s=seen.get("backfill_age_s"),
            parked=seen.get("parked"),
        )

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        for name in list(self._served.tubes):
            fault = self._served.fault(name)
            if fault is not None:
                yield Obstacle(TUBE, name, f"tube {name} cannot be served: {fault}")
            for reason in self._served.losses(name):
                yield Obstacle(TUBE, name, f"tube {name} does not have all changes: {reason}")

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        for picture in self._pictures():
            yield Detail(TUBE, picture.name, TUBE_COLUMNS.fields(StateView.STATUS, picture))

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        if not self._served.tubes:
            return ()
        return FigureQuery("tubes", self._look, self._seen.clear), FigureQuery(
            "tables", self._name_tables, self._tables.clear
        )

    async def _name_tables(self) -> None:
        """Read the names of the attached tables, at most MOST_TABLES of each tube."""
        found = await self._db.fetch(statement("tube_figures_tables", self._schema), MOST_TABLES)
        self._tables.clear()
        self._tables.update({row["tube"]: tuple(row["tables"]) for row in found})

    async def _look(self) -> None:
        """Read how many pods wait in all tubes: with one statement, and another for tubes with many pods."""
        infos = {name: info for name, info in self._served.tubes.items() if self._served.fault(name) is None}
        seen: dict[tuple[str, int], dict[str, float]] = {}
        many: list[str] = []

        def put(row: Any) -> None:
            place = seen.get((row["name"], row["partition"]))
            if place is not None:  # else the number of partitions has just changed
                kind = "backfill_" if row["backfill"] else ""
                place[f"{kind}pods"] = row["pods"]
                place[f"{kind}age_s"] = max(row["age_s"] or 0.0, 0.0)

        def take(names: Sequence[str], rows: Sequence[Any] | None) -> None:
            if rows is None:
                return  # the table is locked, or has just been changed
            total = Counter[str]()
            for name in names:
                seen.update(((name, part), dict.fromkeys(COUNTED, 0)) for part in range(infos[name].partitions))
            for row in rows:
                total[row["name"]] += row["pods"]
                put(row)
            many.extend(name for name, number in total.items() if number >= FEW)

        await fetch_together(Impatient(self._db), {name: self._few(info) for name, info in infos.items()}, take)
        if many:
            for row in await self._db.fetch(statement("tube_figures", self._schema), many):
                put(row)
        for row in await self._db.fetch(statement("tube_figures_parked", self._schema)):
            if (row["name"], row["partition"]) in seen:
                seen[row["name"], row["partition"]]["parked"] = row["pods"]
        self._seen.clear()
        self._seen.update(seen)

    def _few(self, info: TubeInfo) -> str:
        """The query for a tube with few pods: one pass over its table."""
        table = f"{quote_ident(self._schema)}.{quote_ident(info.name)}"
        return (
            f"SELECT {quote_literal(info.name)} AS name, x.shard % {info.partitions} AS partition, "
            "x.op = 'B' AS backfill, count(*) AS pods, "
            "extract(epoch FROM clock_timestamp() - min(x.ts))::float8 AS age_s "
            f"FROM (SELECT t.shard, t.op, t.ts FROM {table} AS t LIMIT {FEW}) AS x GROUP BY 2, 3"
        )


def _by_tube(leases: Iterable[LeaseView]) -> dict[str, list[LeaseView]]:
    found: dict[str, list[LeaseView]] = {}
    for lease in leases:
        found.setdefault(lease.tube, []).append(lease)
    return found


def _lease_of(leases: Iterable[LeaseView], partition: int, partitions: int) -> LeaseView | None:
    """The lease that covers the partition; of several leases the one renewed last."""
    covering = [
        lease
        for lease in leases
        if partitions % lease.partitions == 0 and partition % lease.partitions == lease.partition
    ]
    return min(covering, key=lambda lease: lease.silent, default=None)


class TubeService:
    """All tubes of one schema, for all sessions."""

    def __init__(
        self,
        books: Books,
        limits: Limits,
        poller: Poller,
        *,
        troubles: Troubles,
        pace: TubeIntervals = TubeIntervals(),
    ) -> None:
        self.leases = books.leases
        self.delays = books.pods.delays  # by tube
        self.seen_leases: Sequence[LeaseView] = ()  # at the last look, which is made every second
        self._pace = pace
        self._untouched = books.untouched
        self._history = books.history
        self._check_at = 0.0  # when the rows of all triggers are compared again
        self._backfiller = books.backfiller
        self._troubles = troubles
        self._waiters = PodWaiters(books.pods, troubles, pace)
        self._claim_waiters = ClaimWaiters()
        self._known = KnownTubes(
            books.pods, books.history, poller, self._waiters, self._claim_waiters, troubles=troubles
        )
        self._ownership = Ownership(books.leases, troubles, pace.look)
        self._readiness = Readiness(self._waiters, self._claim_waiters)
        self._renewals = Renewals(books.leases)
        self._expired = ExpiredLeases(troubles)
        self._requests = TubeRequests(
            books,
            self._known,
            self._waiters,
            self._claim_waiters,
            self._readiness,
            ownership=self._ownership,
            renewals=self._renewals,
            limits=limits,
        )

    # --- `Service` ---

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [Job("tubes", self.run, announces=True)]

    def answers(self, peer: Session) -> Answers:
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

    def state(self, info: TubeInfo) -> tuple[str, str | None]:
        """The state of a tube, one of STATES, and the sentence to it."""
        fault, why = self.fault(info.name), self._troubles.why(TUBE, info.name)
        if fault is not None:
            return REFUSED, fault
        if info.paused is not None:
            return PAUSED, " Also: ".join([info.paused, *([why] if why else [])])
        return (OK, None) if why is None else (TROUBLED, why)

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
            nursery.start_soon(
                keep_running, self._known.follow_history, "service", "tube history", self._troubles, self._pace.restarts
            )
            nursery.start_soon(self._repeat, "tubes", self._known.look)
            nursery.start_soon(self._repeat, "history", self._look_at_history)
            nursery.start_soon(self._repeat, "triggers", self._look_at_triggers)
            nursery.start_soon(self._repeat, "leases", self._look_at_leases)
            nursery.start_soon(self._repeat, "backfills", partial(self._look_for_backfills, nursery))

    async def _repeat(self, cause: str, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat one step. Each step has its own task: a step that fails or waits does not delay the others."""
        while True:
            await trio.sleep(self._pace.look)
            with self._troubles.contain("service", "tubes", cause):
                await step()

    async def _look_at_triggers(self) -> None:
        """Report attached tables whose changes are not recorded. The pods of their tube are served all the same."""
        began = trio.current_time()
        if self.tubes and began >= self._check_at:
            await self._history.check_triggers()
            self._check_at = began + (trio.current_time() - began) * CHECK_SHARE
        found = await self._untouched() if self.tubes else {}
        for name in self.tubes:
            if name in found:
                self._troubles.begin(TUBE, name, "triggers", found[name], code=DataLoss.code)
            else:
                self._troubles.end(TUBE, name, "triggers")

    def losses(self, tube: str) -> list[str]:
        """Why changes of the tube's tables were not recorded, or are not."""
        return [trouble.reason for trouble in self._troubles.of(TUBE, tube) if trouble.code == DataLoss.code]

    async def _look_at_history(self) -> None:
        await self._known.note_positions()
        await self._known.report_served()
        present = self._known.generation
        found = await self._history.missing() if present is not None and present.missed else {}
        for name in self.tubes:
            if name in found:
                self._troubles.begin(TUBE, name, "missed", found[name], code=DataLoss.code)
            else:
                self._troubles.end(TUBE, name, "missed")

    async def _look_at_leases(self) -> None:
        self._readiness.drop_late()
        try:
            self.seen_leases = await self.leases.look() if self.tubes else ()
        except Exception:
            self._claim_waiters.forget()
            raise
        self._claim_waiters.note(self.seen_leases)
        self._expired.report(self.seen_leases, self.tubes)
        alive = {(lease.tube, lease.term) for lease in self.seen_leases}
        self._renewals.keep_only(alive)
        self._ownership.keep_only(alive)

    async def _look_for_backfills(self, nursery: trio.Nursery) -> None:
        await self._backfiller.run([info for info in self.tubes.values() if info.fault is None], nursery)


def feature(pace: TubeIntervals = TubeIntervals()) -> Feature:
    """The feature `tubes` for the daemon."""

    def open_service(host: Host) -> TubeService:
        pools, schema = host.pools, host.settings.database.tube_schema
        books = Books(
            LeaseBook(pools.short, schema, own=pools.own),
            PodBook(pools.short, pools.acks, pools.tubes, schema),
            BulkBook(pools.tubes, schema, pace.blocks),
            Backfiller(pools.housekeeping, schema, host.troubles, pace.backfills),
            partial(TriggerLooks(schema).look, pools.housekeeping),
            HistoryBook(pools.own, schema),
        )
        service = TubeService(books, host.settings.limits, host.poller, troubles=host.troubles, pace=pace)
        host.figures.add(TubeFigures(service, pools.housekeeping, schema))
        return service

    return Feature("tubes", COMMANDS, open_service)


FEATURE = feature()
