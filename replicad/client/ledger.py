"""The ids of pods that wait, are being processed, or are done; and the collection of garbage after a backfill.

An id (of a shard: the same id in another shard is another row) is returned by `take` once at a time, however many pods
have touched it. If it is touched while it is processed, it is returned again afterwards, since the change may be later
than the read of its row. A pod is done when all its ids are done and it is not held.

Ids wait in two queues: live ids and ids of backfills. The ledger also keeps how much memory it takes, by an estimate.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import anyio

from replicad.client.requests import Pod
from replicad.errors import DownstreamError
from replicad.eventlog import get_logger
from replicad.retry import Backoff
from replicad.tubes.keys import Key

Row = tuple[int, Key]  # shard, id


class IdQueue(IntEnum):
    """The two queues of ids that wait."""

    LIVE = 0
    BACKFILL = 1


@dataclass(frozen=True, slots=True)
class Touch:
    """One id to process. `op`: of the last touch (G: garbage, see `collect`). `seqs`: the pods that wait for it.

    `id` is an int, or a str if the tube has keys of kind text (tubes/keys.py). `table`: the name of the table of which
    the id is, as SQL writes it (`public.film`); None if several tables have its shard, or its table has a routing.
    """

    id: Any
    shard: int
    op: str
    seqs: tuple[int, ...]
    table: str | None = None

    @property
    def seq(self) -> int:
        """The highest seq of the pods. A downstream keeps it with the row, to find stale rows later."""
        return max(self.seqs)


@dataclass(slots=True)
class _OpenPod:
    """A pod that is not done. `left`: the number of its ids that are not done, plus 1 if it is held."""

    op: str
    left: int


ROW_BYTES = 130  # of a row that waits, without its id
POD_BYTES = 200  # of a pod that is not done

_Seqs = int | tuple[int, ...]  # one number for nearly all rows, which takes no memory of its own


class Ledger:
    """The pods that were read and not acked yet."""

    def __init__(self) -> None:
        self.tables: dict[int, str | None] = {}  # the names of tables by shard, as far as they are known
        self._lanes: tuple[dict[Row, _Seqs], dict[Row, _Seqs]] = {}, {}  # by IdQueue
        # The rows of each queue, the oldest first; a row that has left its queue is skipped. The first key of a dict
        # from which many were removed is slow to find.
        self._order: tuple[deque[Row], deque[Row]] = deque(), deque()
        self._busy: dict[Row, Touch] = {}
        self._later: dict[Row, tuple[IdQueue, _Seqs]] = {}  # touched again while they are busy
        self._borrowed: set[Row] = set()
        self._open: dict[int, _OpenPod] = {}  # by seq, in the order of `add`
        self._finished: dict[int, None] = {}
        self._sizes = 0  # bytes of the ids that wait or are busy

    @property
    def pods(self) -> int:
        """Pods that are not done, or whose seqs were not taken yet."""
        return len(self._open) + len(self._finished)

    @property
    def busy(self) -> int:
        """Ids that are being processed."""
        return len(self._busy)

    @property
    def rows(self) -> int:
        """Rows that wait or are being processed."""
        return sum(map(len, self._lanes)) + len(self._busy)

    @property
    def oldest(self) -> int | None:
        """The seq of the first pod that is not done."""
        return next(iter(self._open), None)

    @property
    def memory(self) -> int:
        """The bytes that the pods and their ids take, about."""
        rows = self.rows + len(self._busy) + len(self._later)  # a busy row has a Touch besides
        return rows * ROW_BYTES + len(self._open) * POD_BYTES + self._sizes

    def waiting(self, lane: IdQueue) -> int:
        """How many ids wait in a queue."""
        return len(self._lanes[lane])

    def left(self, seq: int) -> int:
        """How many ids of a pod are still to be processed, plus 1 if it is held."""
        pod = self._open.get(seq)
        return 0 if pod is None else pod.left

    def has(self, seq: int) -> bool:
        """Whether a pod was added and its seq was not taken as finished yet."""
        return seq in self._open or seq in self._finished

    def add(self, seq: int, shard: int, op: str, ids: Iterable[Key], *, held: bool = False) -> None:
        """Add a pod, in the order of processing. `held`: it is not done before `let_go`."""
        self._open[seq] = _OpenPod(op, int(held))
        self.add_to(seq, shard, op, ids)
        if not self._open[seq].left:
            self._close(seq)

    def add_to(self, seq: int, shard: int, op: str, ids: Iterable[Key]) -> None:
        """Add more ids to a pod."""
        pod = self._open[seq]
        pod.op = op
        lane = IdQueue.BACKFILL if op == "B" else IdQueue.LIVE
        distinct = dict.fromkeys(ids)
        pod.left += len(distinct)
        for id in distinct:
            self._put((shard, id), lane, seq)

    def _put(self, row: Row, lane: IdQueue, seqs: _Seqs) -> None:
        if row in self._busy or row in self._borrowed:
            before = self._later.get(row)
            self._later[row] = (lane, seqs) if before is None else (min(lane, before[0]), _joined(before[1], seqs))
            return
        live, backfill = self._lanes
        if row in live:
            live[row] = _joined(live[row], seqs)
        elif row in backfill and lane is IdQueue.BACKFILL:
            backfill[row] = _joined(backfill[row], seqs)
        elif row in backfill:  # a live touch does not wait for the backfill
            live[row] = _joined(backfill.pop(row), seqs)
            self._order[IdQueue.LIVE].append(row)
        else:
            self._lanes[lane][row] = seqs
            self._order[lane].append(row)
            self._sizes += sys.getsizeof(row[1])

    def let_go(self, seq: int) -> None:
        """End `held` of a pod."""
        self._lower(seq)

    def forget(self, seq: int) -> None:
        """Remove a pod without ids left to process, which was parked."""
        del self._open[seq]

    def take(self, most: int, *lanes: IdQueue, newest: bool = False) -> list[Touch]:
        """Up to `most` ids to process now, the oldest (or newest) of these queues (all) first."""
        taken: list[Touch] = []
        for lane in lanes or IdQueue:
            queue, order = self._lanes[lane], self._order[lane]
            while queue and len(taken) < most:
                row = order.pop() if newest else order.popleft()
                seqs = queue.pop(row, None)
                if seqs is None:
                    continue
                touched = (seqs,) if isinstance(seqs, int) else seqs
                touch = Touch(row[1], row[0], self._open[touched[-1]].op, touched, self.tables.get(row[0]))
                self._busy[row] = touch
                taken.append(touch)
        return taken

    def done(self, touches: Iterable[Touch]) -> None:
        """Mark ids that `take` returned as processed."""
        for touch in touches:
            row = (touch.shard, touch.id)
            del self._busy[row]
            self._sizes -= sys.getsizeof(touch.id)
            for seq in touch.seqs:
                self._lower(seq)
            self._put_later(row)

    def borrow(self, touch: Touch) -> bool:
        """Keep a row from being taken that was processed before, to process it once more; False if it waits or is busy.

        End it with `give_back`.
        """
        row = (touch.shard, touch.id)
        if row in self._busy or row in self._borrowed or any(row in lane for lane in self._lanes):
            return False
        self._borrowed.add(row)
        return True

    def give_back(self, touch: Touch) -> None:
        """End `borrow`."""
        row = (touch.shard, touch.id)
        self._borrowed.discard(row)
        self._put_later(row)

    def _put_later(self, row: Row) -> None:
        later = self._later.pop(row, None)
        if later is not None:
            self._put(row, *later)

    def _lower(self, seq: int) -> None:
        pod = self._open[seq]
        pod.left -= 1
        if not pod.left:
            self._close(seq)

    def _close(self, seq: int) -> None:
        del self._open[seq]
        self._finished[seq] = None

    def take_finished(self) -> list[int]:
        """The seqs of the pods that are done since the last call."""
        finished, self._finished = self._finished, {}
        return list(finished)


def _joined(first: _Seqs, second: _Seqs) -> tuple[int, ...]:
    return (*((first,) if isinstance(first, int) else first), *((second,) if isinstance(second, int) else second))


StaleIds = Callable[[int, int, int], Awaitable[Sequence[Key]]]

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
    before_that: list[Key] = []
    empty = False
    backoff = Backoff(first=0.5, cap=30.0)
    while True:
        try:
            stale = list(await stale_ids(pod.shard, before, step))[:step]
        except Exception as error:  # noqa: BLE001 - of the user; it is called again
            log.warning("stale_ids_failed", shard=pod.shard, seq=pod.seq, error=repr(error))
            await anyio.sleep(backoff.next_delay())
            continue
        backoff.reset()
        if not stale:
            if empty:
                return total
            empty = True
            await anyio.sleep(settle)
            continue
        fruitless = fruitless + 1 if stale == before_that else 0
        if fruitless >= FRUITLESS_STEPS:
            raise DownstreamError(
                f"the downstream still names {len(stale)} stale ids of shard {pod.shard}, e.g. {stale[0]}, after they "
                "were written or deleted; does it keep the seq of touches with its rows?"
            )
        if empty or fruitless:  # recent writes may not be visible to it yet
            await anyio.sleep(settle)
        empty, before_that = False, stale
        ledger.add_to(pod.seq, pod.shard, "G", stale)
        total += len(set(stale))
        while ledger.left(pod.seq) > 1:
            await process()
