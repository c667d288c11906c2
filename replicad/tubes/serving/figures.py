"""The figures of the tubes of one daemon: backlog, leases, parked ids, and what holds a tube back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from replicad.daemon.figures import GAUGE, Detail, Family, Look, Obstacle, Sample
from replicad.postgres.bridge import Database, quote_ident, quote_literal
from replicad.postgres.horizon import Reading
from replicad.postgres.statements import statement
from replicad.streams.queries import Impatient
from replicad.streams.together import fetch_together
from replicad.terminal.holders import held_back
from replicad.tubes.leases import LeaseView
from replicad.tubes.pods import TubeInfo

KIND = "tube"
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
PODS = Family("replicad_tube_pods", GAUGE, "Pods that wait, without those of backfills.", _PART)
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


class Served(Protocol):
    """What is needed of `TubeService`, which has the docstrings."""

    @property
    def tubes(self) -> Mapping[str, TubeInfo]: ...

    @property
    def seen_leases(self) -> Sequence[LeaseView]: ...

    @property
    def readings(self) -> Mapping[str, Reading]: ...

    def fault(self, tube: str) -> str | None: ...

    def waiting(self, tube: str) -> int: ...


class TubeFigures:
    """`Source` for tubes. `db`: the pool for the look at the tables of tubes."""

    def __init__(self, served: Served, db: Database, schema: str) -> None:
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
                yield Obstacle(KIND, name, f"tube {name} cannot be served: {fault}")

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
            yield Detail(KIND, name, {"state": state, "problem": fault, "held_back": held, "partitions": partitions})

    def looks(self) -> Sequence[Look]:
        """`Source.looks`."""
        return (Look("tubes", self._look, self._seen.clear),) if self._served.tubes else ()

    async def _look(self) -> None:
        """Read what waits in all tubes: with one statement, and another for tubes with many pods."""
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
    """The lease that covers the partition; of several the one that was renewed last."""
    covering = [
        lease
        for lease in leases
        if partitions % lease.partitions == 0 and partition % lease.partitions == lease.partition
    ]
    return min(covering, key=lambda lease: lease.silent, default=None)
