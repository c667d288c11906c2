"""Small micro-batches on the driver: read, looked up and written there, because a Spark job takes longer than they do.

The plan of a batch is in the checkpoint (`offsets/N`), and its tasks are the ranges of the plan in their order. So the
driver reads the same pods that the tasks would read, and writes each range with the number that its task would have. A
batch that comes again after a crash is recognised downstream, whether it runs here or in tasks.

Whenever something is unusual (a plan that is not known, a lost lease, a daemon or database that does not answer, too
many ids, rows that are too long), the answer is None or `NotSmall`, and the batch runs as a Spark job, which has its
own patience and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc

from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import BatchPlan, Checkpoint
from replicad.spark.enrich import EnrichedRows, LookUps
from replicad.spark.holding import TubeHold
from replicad.spark.offsets import Range, TubeOffset, ranges_between
from replicad.spark.options import SourceOptions
from replicad.spark.touches import Touches, collect
from replicad.spark.tubes import TubePartition, read_range

MOST_IDS = 10_000  # of a batch: 0.3 s here, 0.75 s by a job on two processors (at 60,000 they are alike), less on more
MOST_BYTES = 16 << 20  # of its rows in memory; a cluster writes more of them beside each other
PATIENCE = 1.0  # seconds for a database that is away; then a Spark job waits for it

log = get_logger("replicad.spark")


class NotSmall(Exception):
    """The rows of a batch are too long for the driver."""


@dataclass(slots=True)
class SmallRows:
    """The rows of a batch: `size` bytes for the touches of `ids` ids, so far."""

    size: int = 0
    ids: int = 0

    def held(self, look_ups: LookUps) -> list[EnrichedRows]:
        """The changes of a task. Raises NotSmall: the batch has more than `MOST_BYTES` of rows."""
        found = []
        self.ids += look_ups.touches.num_rows
        for change in look_ups:
            self.size += change.writes.nbytes
            if self.size > MOST_BYTES:
                raise NotSmall
            found.append(change)
        return found


class SmallBatches:
    """Reads the pods of small batches, for one start of a query. `options`: of its source, with its holder.

    Keeps a connection to each daemon. The length of the rows is estimated by the last batch that was written here.
    """

    most_ids = MOST_IDS

    def __init__(self, options: SourceOptions, checkpoint: Checkpoint) -> None:
        self._islands = {
            name: replace(one, lease_wait=0.0, num_retries=1)  # a Spark job waits longer
            for name, one in sorted(options.by_island().items())
        }
        self._several = options.islands is not None
        self._checkpoint = checkpoint
        self._holds: dict[str, TubeHold] = {}
        self._row = 0.0  # bytes

    def read(self, number: int, plan: BatchPlan) -> list[Touches] | None:
        """The touches of each task of a batch, in the order of the tasks. None: it must run as a Spark job."""
        try:
            return self._read(number, plan.end)
        except (ReplicadError, LookupError) as error:  # a task finds the same, or has more patience
            log.debug("batch_not_small", batch=number, error=str(error))
            self.close()
            return None

    def _read(self, number: int, end: Mapping[str, Any]) -> list[Touches] | None:
        start = self._checkpoint.plan(number - 1).end if number else None
        planned = [(name, one) for name in self._islands for one in self._ranges(name, start, end)]
        if not planned or sum(one.pods for _, one in planned) > self.most_ids:
            return None
        found, left = [], self.most_ids
        for name, one in planned:
            pods = []
            for batch in read_range(TubePartition(self._islands[name], one, self._term(name, end))):
                pods.append(batch)
                left -= len(pc.list_flatten(batch.column("ids")))
                if left < 0:
                    return None
            found.append(collect(pods))
        if self._row * (self.most_ids - left) > MOST_BYTES:
            self._row /= 2  # so that rows that have become short are seen
            return None
        return found

    def _ranges(self, name: str, start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> list[Range]:
        """The ranges of an island, as its reader plans them."""
        if self._several:
            end = end["i"].get(name)
            start = None if start is None else start["i"].get(name)
        if end is None:
            return []
        if TubeOffset.tube_of(end)[0] not in (None, self._islands[name].tube):
            raise LookupError("the plan is of another tube")
        return ranges_between(start, end)

    def _term(self, name: str, end: Mapping[str, Any]) -> int:
        """The term of the query's lease on the tube of an island, if the tube is the one of the plan."""
        options = self._islands[name]
        hold = self._holds.get(name)
        if hold is None:
            hold = self._holds[name] = TubeHold(options, holder=options.holder, renewing=False)
        end = end["i"][name] if self._several else end
        if options.fail_on_data_loss:
            hold.expect(TubeOffset.tube_of(end)[1])
        hold.enter(TubeOffset.generation_of(end))
        return hold.term()

    def measured(self, size: int, ids: int) -> None:
        """The rows of so many ids have this size in bytes."""
        self._row = size / max(1, ids)

    def close(self) -> None:
        """Close the connections. The next batch opens them again, and asks for the term of the lease."""
        while self._holds:
            self._holds.popitem()[1].close()
