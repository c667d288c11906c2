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
from replicad.daemon.figures import GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.daemon.service import Answers, Feature, Host, Job, Peer, PositionWatch
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import DataLoss
from replicad.positions.horizon import Reading
from replicad.postgres.bridge import Database, quote_ident, quote_literal
from replicad.postgres.statements import statement
from replicad.streams.queries import Impatient
from replicad.streams.together import fetch_together
from replicad.terminal.holders import held_back
from replicad.tubes.backfill import Backfiller
from replicad.tubes.bulk import BulkBook
from replicad.tubes.commands import COMMANDS
from replicad.tubes.leases import LeaseBook, LeaseView
from replicad.tubes.pods import PodBook, TubeInfo
from replicad.tubes.serving.known import TUBE, KnownTubes
from replicad.tubes.serving.leases import ExpiredLeases, Ownership, Renewals
from replicad.tubes.serving.requests import Books, TubeRequests
from replicad.tubes.serving.waiting import ClaimWaiters, PodWaiters, Readiness, TubeIntervals
from replicad.tubes.untouched import load_untouched

FEW = 5000  # pods of a tube that are counted in one pass over its table
SERVED, REFUSED = STATES = ("served", "refused")
_OF, _PART = ("tube",), ("tube", "partition")

STATE = Family(
    "replicad_tube_state", GAUGE, "1 for the state that the tube is in, else 0: served or refused.", ("tube", "state")
)
PARTITIONS = Family("replicad_tube_partitions", GAUGE, "Partitions of the tube.", _OF)
WAITING = Family("replicad_tube_waiting_requests", GAUGE, "Requests of clients of this daemon that wait for pods.", _OF)
HELD = Family(
    "replicad_tube_held_back_seconds",
    GAUGE,
    "Age of the transaction that holds the tube's position back, by its kind; missing if none does.",
    ("tube", "kind"),
)
ALIVE = Family(
    "replicad_tube_lease_alive", GAUGE, "1 if a worker has the partition's lease and renews it, 0 if not.", _PART
)
SILENT = Family(
    "replicad_tube_lease_silent_seconds",
    GAUGE,
    "How long this daemon has seen the lease's beat unchanged; missing without a lease.",
    _PART,
)
PODS = Family("replicad_tube_pods", GAUGE, "Pods that wait, without pods of backfills.", _PART)
AGE = Family("replicad_tube_oldest_pod_age_seconds", GAUGE, "Age of the oldest of them; 0 if there is none.", _PART)
BACKFILL_PODS = Family("replicad_tube_backfill_pods", GAUGE, "Pods of backfills that wait.", _PART)
BACKFILL_AGE = Family(
    "replicad_tube_backfill_oldest_pod_age_seconds", GAUGE, "Age of the oldest pod of a backfill; 0 if there is none.",
    _PART,
)  # fmt: skip
PARKED = Family("replicad_tube_parked_pods", GAUGE, "Pods, or parts of pods, that failed and are parked.", _PART)
FAMILIES = (
    STATE, PARTITIONS, WAITING, HELD, ALIVE, SILENT, PODS, AGE, BACKFILL_PODS, BACKFILL_AGE, PARKED,
)  # fmt: skip


class TubeFigures:
    """`Source` for tubes. `db`: the pool for the queries on the tables of tubes."""

    def __init__(self, served: TubeService, db: Database, schema: str) -> None:
        self._served = served
        self._db = db
        self._schema = schema
        self._seen: dict[tuple[str, int], Mapping[str, float]] = {}  # of the last look, by tube and partition

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        leases = _by_tube(self._served.seen_leases)
        for name, info in list(self._served.tubes.items()):
            present = SERVED if self._served.fault(name) is None else REFUSED
            yield from (STATE(float(state == present), name, state) for state in STATES)
            yield PARTITIONS(info.partitions, name)
            yield WAITING(self._served.waiting(name), name)
            reading = self._served.readings.get(name)
            if reading is not None and reading.held_by is not None:
                yield HELD(reading.held_by.age_s or 0.0, name, reading.held_by.kind.value)
            for partition in range(info.partitions):
                yield from self._of(name, partition, _lease_of(leases.get(name, ()), partition, info.partitions))

    def _of(self, name: str, partition: int, lease: LeaseView | None) -> Iterable[Sample]:
        labels = name, str(partition)
        yield ALIVE(float(lease is not None and not lease.expired), *labels)
        if lease is not None:
            yield SILENT(lease.silent, *labels)
        seen = self._seen.get((name, partition))
        if seen is not None:
            for family, column in _COLUMNS.items():
                yield family(seen[column], *labels)

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        for name in list(self._served.tubes):
            fault = self._served.fault(name)
            if fault is not None:
                yield Obstacle(TUBE, name, f"tube {name} cannot be served: {fault}")

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        leases = _by_tube(self._served.seen_leases)
        for name, info in self._served.tubes.items():
            fault = self._served.fault(name)
            partitions = []
            for partition in range(info.partitions):
                lease = _lease_of(leases.get(name, ()), partition, info.partitions)
                partitions.append(
                    {
                        "partition": partition,
                        "holder": None if lease is None else lease.holder.partition(" ")[0],
                        "lease_alive": lease is not None and not lease.expired,
                        "silent_seconds": None if lease is None else round(lease.silent, 1),
                        **self._seen.get((name, partition), {}),
                    }
                )
            state = SERVED if fault is None else REFUSED
            reading = self._served.readings.get(name)
            holder = None if reading is None else reading.held_by
            held = held_back(holder, None if holder is None else holder.age_s or 0.0)
            yield Detail(TUBE, name, {"state": state, "problem": fault, "held_back": held, "partitions": partitions})

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (FigureQuery("tubes", self._look, self._seen.clear),) if self._served.tubes else ()

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
                seen.update(
                    ((name, part), dict.fromkeys(_COLUMNS.values(), 0)) for part in range(infos[name].partitions)
                )
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


_COLUMNS = {
    PODS: "pods", AGE: "age_s", BACKFILL_PODS: "backfill_pods", BACKFILL_AGE: "backfill_age_s", PARKED: "parked",
}  # fmt: skip


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
        poller: PositionWatch,
        *,
        troubles: Troubles,
        pace: TubeIntervals = TubeIntervals(),
    ) -> None:
        self.leases = books.leases
        self.seen_leases: Sequence[LeaseView] = ()  # at the last look, which is made every second
        self._pace = pace
        self._untouched = books.untouched
        self._backfiller = books.backfiller
        self._troubles = troubles
        self._waiters = PodWaiters(books.pods, troubles, pace)
        self._claim_waiters = ClaimWaiters()
        self._known = KnownTubes(books.pods, poller, self._waiters, self._claim_waiters, troubles)
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
        """Repeat one step. Each step has its own task: a step that fails or waits does not delay the others."""
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
            partial(load_untouched, pools.housekeeping, schema),
        )
        service = TubeService(books, host.settings.limits, host.poller, troubles=host.troubles, pace=pace)
        host.figures.add(TubeFigures(service, pools.housekeeping, schema))
        return service

    return Feature("tubes", COMMANDS, open_service)


FEATURE = feature()
