"""The ids of pods that wait, are being processed, or are done. No clock, no connection.

An id (of a shard: the same id in another shard is another row) is returned by `take` once at a time, however many pods
have touched it. If it is touched while it is processed, it is returned again afterwards, since the change may be later
than the read of its row. A pod is done when all its ids are done and it is not held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Row = tuple[int, int]  # shard, id


@dataclass(frozen=True, slots=True)
class Touch:
    """One id to process. `op`: of the last touch (G: garbage, see garbage.py). `seqs`: the pods that wait for it."""

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
