"""The ids of pods that wait, are being processed, or are done; and the collection of garbage after a backfill.

An id (of a shard: the same id in another shard is another row) is returned by `take` once at a time, however many pods
have touched it. If it is touched while it is processed, it is returned again afterwards, since the change may be later
than the read of its row. A pod is done when all its ids are done and it is not held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from replicad.client.requests import Pod
from replicad.errors import DownstreamError
from replicad.eventlog import get_logger
from replicad.retry import Backoff

Row = tuple[int, int]  # shard, id


@dataclass(frozen=True, slots=True)
class Touch:
    """One id to process. `op`: of the last touch (G: garbage, see `collect`). `seqs`: the pods that wait for it."""

    id: int
    shard: int
    op: str
    seqs: tuple[int, ...]

    @property
    def seq(self) -> int:
        """The highest seq of the pods. A downstream keeps it with the row, to find stale rows later."""
        return max(self.seqs)


@dataclass(slots=True)
class _Waiting:
    op: str
    seqs: list[int] = field(default_factory=list)


class Ledger:
    """The pods that were read and not acked yet."""

    def __init__(self) -> None:
        self._waiting: dict[Row, _Waiting] = {}  # oldest first
        self._busy: dict[Row, Touch] = {}
        self._open: dict[int, int] = {}  # seq: number of ids not done, plus 1 if held; in the order of `add`

    @property
    def pods(self) -> int:
        """Pods that are not done."""
        return len(self._open)

    @property
    def busy(self) -> int:
        """Ids that are being processed."""
        return len(self._busy)

    @property
    def rows(self) -> int:
        """Rows that wait or are being processed."""
        return len(self._waiting.keys() | self._busy.keys())

    @property
    def oldest(self) -> int | None:
        """The seq of the first pod that is not done."""
        return next(iter(self._open), None)

    def left(self, seq: int) -> int:
        """How many ids of a pod that is not done are still to be processed, plus 1 if it is held."""
        return self._open[seq]

    def add(self, seq: int, shard: int, op: str, ids: Iterable[int], *, held: bool = False) -> None:
        """Add a pod, in the order of processing. `held`: it is not done before `let_go`."""
        self._open[seq] = int(held)
        self.add_to(seq, shard, op, ids)

    def add_to(self, seq: int, shard: int, op: str, ids: Iterable[int]) -> None:
        """Add more ids to a pod."""
        distinct = dict.fromkeys(ids)
        self._open[seq] += len(distinct)
        for id in distinct:
            waiting = self._waiting.setdefault((shard, id), _Waiting(op))
            waiting.op = op
            waiting.seqs.append(seq)

    def let_go(self, seq: int) -> None:
        """End `held` of a pod."""
        self._open[seq] -= 1

    def forget(self, seq: int) -> None:
        """Remove a pod without ids left to process, which was parked."""
        del self._open[seq]

    def take(self, most: int) -> list[Touch]:
        """Up to `most` ids to process now, the oldest first."""
        taken: list[Touch] = []
        for (shard, id), waiting in self._waiting.items():
            if len(taken) >= most:
                break
            if (shard, id) not in self._busy:
                taken.append(Touch(id, shard, waiting.op, tuple(waiting.seqs)))
        for touch in taken:
            row = (touch.shard, touch.id)
            del self._waiting[row]
            self._busy[row] = touch
        return taken

    def done(self, touches: Iterable[Touch]) -> None:
        """Mark ids that `take` returned as processed."""
        for touch in touches:
            for seq in self._busy.pop((touch.shard, touch.id)).seqs:
                self._open[seq] -= 1

    def take_finished(self) -> list[int]:
        """Remove the pods that are done and return their seqs."""
        finished = [seq for seq, left in self._open.items() if left == 0]
        for seq in finished:
            del self._open[seq]
        return finished


StaleIds = Callable[[int, int, int], Awaitable[Sequence[int]]]

FRUITLESS_STEPS = 10  # in a row that return the same ids again after they were processed; then it gives up

log = get_logger(__name__)


async def collect(
    stale_ids: StaleIds,
    ledger: Ledger,
    pod: Pod,
    before: int,
    *,
    step: int,
    settle: float,
    process: Callable[[], Awaitable[None]],
) -> int:
    """Process all ids that the downstream holds of the pod's shard for a seq below `before`; returns how many.

    A row that was deleted while the tube had no triggers leaves no touch. But the backfill has touched all rows that
    exist. So an id that the downstream holds with a lower seq than the backfill's `start_seq` either was deleted from
    its table or has a touch that is not processed yet. The worker asks for these ids (`stale_ids`) and processes them
    like any touch, with operation G: the user's function finds a row and writes it, or finds none and deletes it. The
    control pod is acked when the downstream has named no id for a while; a worker that is killed before that begins
    again.

    `stale_ids(shard, before, limit)` returns some of them, or none if none is left; at most `step` are taken. If it
    raises, it is called again after a pause. It must return none for `settle` seconds. `process` is called when ids
    were added to the pod, which is held in the ledger, and again until all of them are done.

    Raises:
        DownstreamError: the downstream keeps returning the same ids after they were processed.
    """
    total = fruitless = 0
    before_that: list[int] = []
    empty = False
    backoff = Backoff(first=0.5, cap=30.0)
    while True:
        try:
            stale = list(await stale_ids(pod.shard, before, step))[:step]
        except Exception as error:  # noqa: BLE001 - of the user; it is called again
            log.warning("stale_ids_failed", shard=pod.shard, seq=pod.seq, error=repr(error))
            await trio.sleep(backoff.next_delay())
            continue
        backoff.reset()
        if not stale:
            if empty:
                return total
            empty = True
            await trio.sleep(settle)
            continue
        fruitless = fruitless + 1 if stale == before_that else 0
        if fruitless >= FRUITLESS_STEPS:
            raise DownstreamError(
                f"the downstream still names {len(stale)} stale ids of shard {pod.shard}, e.g. {stale[0]}, after they "
                "were written or deleted; does it keep the seq of touches with its rows?"
            )
        if empty or fruitless:  # recent writes may not be visible to it yet
            await trio.sleep(settle)
        empty, before_that = False, stale
        ledger.add_to(pod.seq, pod.shard, "G", stale)
        total += len(set(stale))
        while ledger.left(pod.seq) > 1:
            await process()
