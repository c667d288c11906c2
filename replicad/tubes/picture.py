"""The pictures of a tube and of its partitions at one moment, and the columns that all views of them show.

`operations/top.py` makes the picture of a partition from Postgres, and `serving/service.py` both pictures from the
memory of a daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from replicad.daemon.figures import (
    GAUGE,
    HISTOGRAM,
    ConsoleForm,
    Delays,
    Family,
    Sample,
    StateColumn,
    StateColumns,
    StateView,
)
from replicad.positions.horizon import Holder
from replicad.terminal.holders import held_back

OK, TROUBLED, PAUSED, REFUSED = STATES = ("ok", "troubled", "paused", "refused")  # in one daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class TubePicture:
    """One tube in one daemon. `problem` is the sentence to `state`; `waiting` is how many requests wait for pods.

    `paused_at`: since when it is paused, in seconds since 1970. `tables`: the attached ones, as far as they are known.
    """

    name: str
    state: str
    problem: str | None
    held_by: Holder | None
    waiting: int
    partitions: tuple[PartitionPicture, ...]
    paused_at: float | None = None
    tables: tuple[str, ...] = ()
    delays: Delays | None = None

    @property
    def held_seconds(self) -> float | None:
        """The age of the transaction that holds the position back; None if none does."""
        return None if self.held_by is None else self.held_by.age_s or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPicture:
    """One partition of a tube. `holder` has its lease, whose beat has not changed for `silent_s` seconds.

    `pods` wait, the oldest for `age_s` seconds; `backfill_pods` and `backfill_age_s` are the same of backfills.
    `parked` pods, or parts of pods, have failed. These numbers are None where they cannot be counted now.

    From a daemon: `lease_alive` is whether the lease is renewed. From Postgres: `row` has the other columns of the
    statement `tube_top`, and `in_s` and `out_s`, the pods of the whole tube per second.
    """

    tube: str
    partition: int
    holder: str | None
    silent_s: float | None
    pods: int | None
    age_s: float | None
    backfill_pods: int | None
    backfill_age_s: float | None
    parked: int | None
    lease_alive: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)


def _state_samples(one: TubePicture) -> Iterable[Sample]:
    return (_STATE(float(state == one.state), one.name, state) for state in STATES)


def _held_samples(one: TubePicture) -> Iterable[Sample]:
    if one.held_by is not None and one.held_seconds is not None:
        yield _HELD(one.held_seconds, one.name, one.held_by.kind.value)


def _of_row(name: str, views: StateView = StateView.TOP_JSON, *, spare: int = 0) -> StateColumn[PartitionPicture]:
    """A column that only Postgres has."""
    return StateColumn(name, views, lambda one: one.row[name], spare=spare)


def _part(name: str, text: str) -> Family:
    return Family(name, GAUGE, text, ("tube", "partition"))


def _rounded(of: Callable[[PartitionPicture], float | None]) -> Callable[[PartitionPicture], float | None]:
    return lambda one: None if (value := of(one)) is None else round(value, 3)


_STATE = Family(
    "replicad_tube_state",
    GAUGE,
    "1 for the state that the tube is in, else 0: ok; troubled (served, with a present trouble); paused (by an "
    "operator: no reader gets its pods); refused (it cannot be served).",
    ("tube", "state"),
)
_HELD = Family(
    "replicad_tube_held_back_seconds",
    GAUGE,
    "Age of the transaction that holds the tube's position back, by its kind; missing if none does.",
    ("tube", "kind"),
)
_TOP, _JSON, _STATUS, _CONSOLE = StateView.TOP, StateView.TOP_JSON, StateView.STATUS, StateView.CONSOLE

TUBE_COLUMNS: StateColumns[TubePicture] = StateColumns(
    lambda one: (one.name,),
    (
        StateColumn("state", _STATUS, lambda one: one.state, figure=_STATE, samples=_state_samples),
        StateColumn("problem", _STATUS, lambda one: one.problem),
        StateColumn("tables", _STATUS, lambda one: list(one.tables)),
        StateColumn("paused_at", _STATUS, lambda one: one.paused_at),
        StateColumn(
            "replicad_tube_paused_seconds",
            of=lambda one: None if one.paused_at is None else max(0.0, time.time() - one.paused_at),
            figure=Family(
                "replicad_tube_paused_seconds",
                GAUGE,
                "How long an operator has paused the tube; missing if it is not paused.",
                ("tube",),
            ),
        ),
        StateColumn(
            "partitions", _STATUS, lambda one: [PARTITION_COLUMNS.fields(_STATUS, part) for part in one.partitions]
        ),
        StateColumn(
            "replicad_tube_partitions", of=lambda one: len(one.partitions),
            figure=Family("replicad_tube_partitions", GAUGE, "Partitions of the tube.", ("tube",)),
        ),
        StateColumn(
            "replicad_tube_ack_delay_seconds", of=lambda one: one.delays,
            figure=Family(
                "replicad_tube_ack_delay_seconds",
                HISTOGRAM,
                "From the touch of a row until its pod was acknowledged through this daemon, by the clock of Postgres; "
                "a count for each pod, without pods of backfills.",
                ("tube",),
            ),
        ),
        StateColumn(
            "replicad_tube_waiting_requests", of=lambda one: one.waiting,
            figure=Family(
                "replicad_tube_waiting_requests",
                GAUGE,
                "Requests of clients of this daemon that wait for pods.",
                ("tube",),
            ),
        ),
        StateColumn(
            "held_back", _STATUS, lambda one: held_back(one.held_by, one.held_seconds),
            figure=_HELD, samples=_held_samples,
        ),
    ),
)  # fmt: skip

PARTITION_COLUMNS: StateColumns[PartitionPicture] = StateColumns(
    lambda one: (one.tube, str(one.partition)),
    (
        StateColumn("tube", _TOP | _JSON, lambda one: one.tube),
        StateColumn(
            "partition", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.partition,
            label="Partition", form=ConsoleForm.LABEL,
        ),
        StateColumn(
            "holder", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.holder, label="Holder", form=ConsoleForm.READER
        ),
        StateColumn(
            "lease_alive", _STATUS | _CONSOLE, lambda one: one.lease_alive,
            label="Lease", form=ConsoleForm.LEASE,
            figure=_part(
                "replicad_tube_lease_alive", "1 if a worker has the partition's lease and renews it, 0 if not."
            ),
        ),
        StateColumn("silent_s", _JSON, lambda one: one.silent_s),
        StateColumn(
            "silent_seconds", _STATUS, _rounded(lambda one: one.silent_s),
            figure=_part(
                "replicad_tube_lease_silent_seconds",
                "How long this daemon has seen the lease's beat unchanged; missing without a lease.",
            ),
        ),
        StateColumn(
            "pods", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.pods,
            label="Pods", figure=_part("replicad_tube_pods", "Pods that wait, without pods of backfills."),
        ),
        _of_row("ids", _TOP | _JSON, spare=1),
        _of_row("estimated"),
        StateColumn("lag_s", _TOP | _JSON, lambda one: one.age_s),
        StateColumn(
            "age_s", _STATUS | _CONSOLE, lambda one: one.age_s,
            label="Lag", form=ConsoleForm.SECONDS,
            figure=_part("replicad_tube_oldest_pod_age_seconds", "Age of the oldest of them; 0 if there is none."),
        ),
        StateColumn("backfill", _TOP, rare=True, spare=5),  # `top` makes it of the next ones
        StateColumn(
            "backfill_pods", _JSON | _STATUS | _CONSOLE, lambda one: one.backfill_pods,
            label="Backfill pods", form=ConsoleForm.SOME,
            figure=_part("replicad_tube_backfill_pods", "Pods of backfills that wait."),
        ),
        StateColumn("backfill_lag_s", _JSON, lambda one: one.backfill_age_s),
        StateColumn(
            "backfill_age_s", _STATUS, lambda one: one.backfill_age_s,
            figure=_part(
                "replicad_tube_backfill_oldest_pod_age_seconds",
                "Age of the oldest pod of a backfill; 0 if there is none.",
            ),
        ),
        _of_row("backfill_done"),
        _of_row("backfill_of"),
        StateColumn(
            "parked", _TOP | _JSON | _STATUS | _CONSOLE, lambda one: one.parked,
            label="Parked", form=ConsoleForm.FAILED, rare=True, spare=4,
            figure=_part("replicad_tube_parked_pods", "Pods, or parts of pods, that failed and are parked."),
        ),
        _of_row("in_s", _TOP | _JSON, spare=3),
        _of_row("out_s", _TOP | _JSON, spare=2),
        *map(_of_row, ("writer", "writer_s", "reporter", "report", "report_s")),
    ),
)  # fmt: skip
