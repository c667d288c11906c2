"""Which ids of which pods wait, are being processed, or are done. Pure: no clock, no connection.

An id (of a shard: another shard's row of that id is another row) is handed out once at a time, however many pods have
touched it; touched again while it is being processed, it is handed out again afterwards, since the change may have come
after its row was loaded. A pod is done when everything that it asked for is, and, where it is held, when it was let go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Row = tuple[int, int]  # shard, id


@dataclass(frozen=True, slots=True)
class Touch:
    """One id to process. `op` is what touched it last (G: garbage, see garbage.py); `seqs` are the pods that wait for
    it."""

    id: int
    shard: int
    op: str
    seqs: tuple[int, ...]

    @property
    def seq(self) -> int:
        """The highest of the pods: what a downstream keeps with the row, to tell later what is stale."""
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
        self._open: dict[int, int] = {}  # seq: ids that are not done, and 1 where it is held; in the order of `add`

    @property
    def pods(self) -> int:
        """Pods that are not done."""
        return len(self._open)

    @property
    def busy(self) -> int:
        """Ids that are being processed."""
        return len(self._busy)

    @property
    def oldest(self) -> int | None:
        """The seq of the pod that was noted first of those that are not done."""
        return next(iter(self._open), None)

    def left(self, seq: int) -> int:
        """How many ids of a pod that is not done are still to be processed, and 1 more where it is held."""
        return self._open[seq]

    def add(self, seq: int, shard: int, op: str, ids: Iterable[int], *, held: bool = False) -> None:
        """Note a pod; pods come in the order in which they are to be processed. `held`: until `let_go`."""
        self._open[seq] = int(held)
        self.add_to(seq, shard, op, ids)

    def add_to(self, seq: int, shard: int, op: str, ids: Iterable[int]) -> None:
        """Have more ids processed before a pod that was noted is done."""
        distinct = dict.fromkeys(ids)
        self._open[seq] += len(distinct)
        for id in distinct:
            waiting = self._waiting.setdefault((shard, id), _Waiting(op))
            waiting.op = op
            waiting.seqs.append(seq)

    def let_go(self, seq: int) -> None:
        """A pod that was held need not be any longer."""
        self._open[seq] -= 1

    def forget(self, seq: int) -> None:
        """A pod, none of whose ids is left, is no longer ours: somebody put it aside."""
        del self._open[seq]

    def take(self, most: int) -> list[Touch]:
        """Up to `most` ids to process now, those that have waited longest first."""
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
        """These, handed out by `take`, are processed."""
        for touch in touches:
            for seq in self._busy.pop((touch.shard, touch.id)).seqs:
                self._open[seq] -= 1

    def take_finished(self) -> list[int]:
        """The seqs of the pods that are done; they are forgotten here."""
        finished = [seq for seq, left in self._open.items() if left == 0]
        for seq in finished:
            del self._open[seq]
        return finished
