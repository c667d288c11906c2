"""What a worker is told to do and what it counts: shared by the worker and its partitions. No connection, no clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from replicad.client.garbage import StaleIds
from replicad.client.holding import OpenClient, Past, new_key
from replicad.client.ledger import Touch
from replicad.client.pods import Pod
from replicad.tubes.commands import Part

Handle = Callable[["Batch"], Awaitable[None]]
HandleControl = Callable[[Pod], Awaitable[None]]

WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids to process, each once, the oldest first.

    `term` is that of the lease under which they are processed. Of two leases of a partition (`part`), the later one has
    the higher term. A downstream that keeps the highest term of each partition can refuse what a worker writes after
    its lease is lost.
    """

    tube: str
    touches: tuple[Touch, ...]
    part: Part = WHOLE
    term: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The bounds of a worker, for each of its partitions. Times in seconds."""

    batch_ids: int = 500  # ids in one call of the function
    parallelism: int = 4  # calls at the same time
    max_pods: int = 1000  # pods read and not acked
    exclude_backfill: bool = False  # leave backfill pods where they are, for a downstream under pressure
    lease_ttl: float = 30.0
    poll: float = 20.0  # after so long a partition without pods, or without its lease, asks again, though no READY came
    tries: int = 5  # of a single id, or of a pod that cannot be read, before it is parked; 0: without limit
    call_timeout: float = (
        600.0  # a call that takes longer is cancelled and has failed: a hanging one would keep its lease
    )
    backoff_first: float = 0.5
    backoff_cap: float = 60.0
    garbage_ids: int = 1000  # stale ids in one call of `stale_ids`
    garbage_settle: float = 1.0  # how long `stale_ids` must return none; as long as a write may stay invisible there


@dataclass(slots=True)
class WorkerStatistics:
    """Counted since the start."""

    processed: int = 0
    failed_calls: int = 0
    parked: int = 0
    garbage: int = 0
    acked_pods: int = 0
    leases_lost: int = 0


@dataclass(slots=True)
class Work:
    """One tube, and how its ids are processed. See `Worker`.

    `past`: leases that this process may still hold in Postgres. `unproven`: partitions where something was parked while
    nothing else succeeded, until something does.
    """

    open_client: OpenClient
    tube: str
    handle: Handle
    control: HandleControl | None
    stale_ids: StaleIds | None
    settings: WorkerSettings
    statistics: WorkerStatistics = field(default_factory=WorkerStatistics)
    key: str = field(default_factory=new_key)
    past: dict[Part, Past] = field(default_factory=dict)
    unproven: set[int] = field(default_factory=set)
