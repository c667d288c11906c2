"""Shards whose tables cannot be read: their ids are parked with the reason before each batch, and the others go on.

A table was dropped, lost a column or its rights. The first batch that finds it fails, and the run looks at all tables
again: perhaps the column was renamed, and it is known how. What still cannot be read then is a suspect. From there on,
each batch asks for the tables of the suspects, parks the ids of those that are still unreadable, and works on the other
pods. So the shards that are well lose one start of the query, and no more. Parking comes before the rows are written:
after a crash at any moment the ids are parked, or come again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicad.eventlog import get_logger
from replicad.spark.checkpoint import PARKED, Checkpoint
from replicad.spark.connecting import endpoint_of
from replicad.spark.enrich import Enricher
from replicad.spark.holding import TubeHold
from replicad.spark.options import SourceOptions
from replicad.tubes.commands import Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = get_logger("replicad.spark")


@dataclass(slots=True)
class Suspects:
    """The suspects of a run, by shard, with the reasons. `options` are those of the query, with its holder."""

    options: SourceOptions
    checkpoint: Checkpoint
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, found: Mapping[int, str], enricher: Enricher) -> bool:
        """Remember shards that cannot be read. False, without any change, if there are no new ones, or if that is not
        because of their tables.

        It is because of them if the table of another shard can be read. With several daemons it is unknown which of
        them has a pod, so no shard is suspected.
        """
        if self.options.islands is not None or found.keys() <= self.reasons.keys():
            return False
        if not enricher.reads_any(except_for=found):
            return False
        log.warning("tables_unreadable", shards=sorted(found), error=next(iter(found.values())))
        self.reasons.update(found)
        return True

    def take_out(self, pods: DataFrame, enricher: Enricher) -> tuple[DataFrame, int]:
        """The pods without those of suspects that cannot be read now, and how many ids of them were parked.

        Control pods stay. `pods` must be persisted: parked pods cannot be read again.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415

        still = enricher.unreadable(self.reasons)
        for shard in self.reasons.keys() - still.keys():
            log.info("table_readable", shard=shard)
            del self.reasons[shard]
        if not still:
            return pods, 0
        bad = F.col("shard").isin(list(still)) & (F.coalesce(F.size("ids"), F.lit(0)) > 0)
        rows = iter(pods.where(bad).select("seq", "shard", "ids").toLocalIterator())
        first = next(rows, None)
        parked = 0 if first is None else self._park(itertools.chain([first], rows), still)
        if parked:
            log.warning("parked", tube=self.options.tube, shards=sorted(still), ids=parked)
        return pods.where(~bad), parked

    def _park(self, rows: Iterable[Any], reasons: Mapping[int, str]) -> int:
        """Park all ids of pods (seq, shard, ids); returns how many."""
        parked = 0
        self.checkpoint.write(PARKED, "")
        with TubeHold(self.options, holder=self.options.holder, renewing=False) as hold:
            part, term = Part(0, 1), hold.term()  # that of the query, which has the same holder
            with endpoint_of(self.options).connect(f"{hold.holder}/parking"[:255]) as client:
                for seq, shard, ids in rows:
                    parked += client.park(hold.tube, part, term, seq, list(ids), tries=1, error=reasons[shard])
        return parked
