"""Checks of tubes: obstacles to serving, readers, parked ids, and backfills."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from shlex import quote

from replicad.operations.doctor.declared import Check, Finding, counted, failing, fine, warning
from replicad.operations.doctor.seen import Evidence
from replicad.tubes.serving.leases import LEASE_EXPIRED


async def _tubes(seen: Evidence) -> Iterable[Finding]:
    found = [
        failing(f"tube {name}: {why}", f"replicad tubes list; replicad tubes stats {quote(name)}")
        for name, why in (await seen.tube_faults()).items()
    ]
    tubes = {row["tube"] for row in await seen.partitions()}
    return found or fine(f"{counted(len(tubes), 'tube can', 'tubes can')} be served")


async def _readers(seen: Evidence) -> Iterable[Finding]:
    found = []
    for row in await seen.partitions():
        where = f"tube {row['tube']}, partition {row['partition']}"
        if row["pods"] and row["holder"] is None:
            age, pods = row["lag_s"] or 0, counted(row["pods"], "pod waits", "pods wait")
            late = failing if age >= seen.thresholds.lag else warning
            found.append(late(f"{where}: {pods} for up to {age:.0f} s, and no worker has the lease", "start a worker"))
        elif (row["lag_s"] or 0) >= seen.thresholds.lag:
            text = f"{where}: the oldest pod is {row['lag_s']:.0f} s old; {row['holder']} reads it"
            found.append(warning(text, "see the worker's log; more partitions allow more workers"))
    return found or fine("every partition with pods has a reader that keeps up")


async def _leases(seen: Evidence) -> Iterable[Finding]:
    expired = {(one.name, one.cause): one for one in await seen.troubles() if one.code == LEASE_EXPIRED}
    found = [
        warning(f"tube {name}, {one.reason.partition('; ')[0]}", "start a worker") for (name, _), one in expired.items()
    ]
    return found or fine("no lease has expired")


async def _parked(seen: Evidence) -> Iterable[Finding]:
    parked: defaultdict[str, int] = defaultdict(int)
    for row in await seen.partitions():
        parked[row["tube"]] += row["parked"] or 0
    found = [
        warning(
            f"tube {name}: {counted(number, 'pod is', 'pods are')} parked", f"replicad tubes parked list {quote(name)}"
        )
        for name, number in parked.items()
        if number
    ]
    return found or fine("no pod of a tube is parked")


async def _backfills(seen: Evidence) -> Iterable[Finding]:
    found = []
    for row in await seen.backfills():
        if row["idle_s"] >= seen.thresholds.backfill:
            text = f"the backfill of {row['table']} into tube {row['tube']} has added nothing for {row['idle_s']:.0f} s"
            found.append(
                warning(f"{text} ({row['ids']:,} ids are in)", "a daemon continues it: `replicad serve`, and its log")
            )
    for row in await seen.partitions():
        if row["backfill_pods"] and row["holder"] is None:
            where = f"tube {row['tube']}, partition {row['partition']}"
            text = f"{where}: {counted(row['backfill_pods'], 'pod of a backfill waits', 'pods of a backfill wait')}"
            found.append(warning(f"{text}, and no worker has the lease", "start a worker"))
    return found or fine("no backfill is stuck")


TUBE_CHECKS = (
    Check(
        "tubes",
        "whether each tube can be served, and records all changes",
        None,
        "its table is missing or cannot be read, or a trigger is missing",
        "what the sentence says",
        _tubes,
        needs="schema",
    ),
    Check(
        "readers",
        "pods that wait",
        "they wait without a reader, or the reader is a minute behind",
        "they have waited for a minute without a reader",
        "start a worker",
        _readers,
        needs="schema",
    ),
    Check(
        "leases",
        "leases whose holders are silent, as the daemons see them",
        "one has expired",
        None,
        "start the worker again",
        _leases,
        needs="schema",
    ),
    Check(
        "parked",
        "pods that failed too often",
        "some are parked",
        None,
        "`replicad tubes parked list TUBE`, then `replay` or `drop`",
        _parked,
        needs="schema",
    ),
    Check(
        "backfills",
        "backfills that are not finished",
        "one has added nothing for five minutes, or its pods have no reader",
        None,
        "start a daemon, or a worker",
        _backfills,
        needs="schema",
    ),
)
