"""Which ids of which pods wait, are being processed, or are done. Pure: no clock, no connection.

An id is handed out once at a time, however many pods have touched it; touched again while it is being processed, it is
handed out again afterwards, since the change may have come after its row was loaded. A pod is done when
everything that it asked for is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Touch:
    """One id to process. `op` is what touched it last; `seqs` are the pods that wait for it."""

    id: int
    shard: int
    op: str
    seqs: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    shard: int
    op: str
    seqs: list[int] = field(default_factory=list)


class Ledger:
    """The pods that were read and not acked yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}  # by id, oldest first
        self._busy: dict[int, Touch] = {}
        self._open: dict[int, int] = {}  # seq: ids that are not done

    @property
    def pods(self) -> int:
        """Pods that are not done."""
        return len(self._open)

    @property
    def busy(self) -> int:
        """Ids that are being processed."""
        return len(self._busy)

    def add(self, seq: int, shard: int, op: str, ids: Iterable[int]) -> None:
        """Note a pod; pods come in the order in which they are to be processed."""
        distinct = dict.fromkeys(ids)
        self._open[seq] = len(distinct)
        for id in distinct:
            waiting = self._waiting.setdefault(id, _Waiting(shard, op))
            waiting.op = op
            waiting.seqs.append(seq)

    def take(self, most: int) -> list[Touch]:
        """Up to `most` ids to process now, those that have waited longest first."""
        taken: list[Touch] = []
        for id, waiting in self._waiting.items():
            if len(taken) >= most:
                break
            if id not in self._busy:
                taken.append(Touch(id, waiting.shard, waiting.op, tuple(waiting.seqs)))
        for touch in taken:
            del self._waiting[touch.id]
            self._busy[touch.id] = touch
        return taken

    def done(self, ids: Iterable[int]) -> None:
        """These ids, handed out by `take`, are processed."""
        for id in ids:
            for seq in self._busy.pop(id).seqs:
                self._open[seq] -= 1

    def take_finished(self) -> list[int]:
        """The seqs of the pods that are done; they are forgotten here."""
        finished = [seq for seq, left in self._open.items() if left == 0]
        for seq in finished:
            del self._open[seq]
        return finished
