"""Parks ids whose rows cannot be read or are refused downstream, with the reason. The other ids go on.

After a dropped column, with a view that fails for one row, or a constraint downstream, a batch would fail for ever.
`park_refused` looks up all waiting ids and tries their rows out as a task would, halves a chunk that fails until one id
is left, and parks it (`replicad tubes parked` lists and replays parked ids). If no id works, the ids are mostly not the
reason, and none is parked. The query must not run meanwhile; its lease is used.

A table may be unreadable: it was dropped, or has lost a column or its rights. The first batch that finds it fails, and
the run reads all tables again, because a column may have been renamed in a known way. A shard whose table still cannot
be read is a suspect (`SuspectShards`). From then on, each batch asks for the tables of the suspects, parks the ids of
the unreadable ones, and works on the other pods. So the readable shards lose one start of the query, and no more. Ids
are parked before the rows are written: after a crash at any moment the ids are parked, or come again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.client.blocking_client import BlockingClient
from replicad.errors import (
    ColumnsChanged,
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    RowRefused,
    RowsUnproven,
    ValueUnheld,
)
from replicad.eventlog import get_logger
from replicad.protocol.tokens import START
from replicad.spark.arrow import PodReader
from replicad.spark.checkpoint import PARKED, Checkpoint
from replicad.spark.enrich import EnrichedRows, Enricher
from replicad.spark.holding import TubeHold
from replicad.spark.options import SourceOptions, endpoint_of
from replicad.spark.planning import MOST_PODS
from replicad.spark.touches import chunks_by_shard, collect
from replicad.sqlstates import BAD_DATA, WRONG_QUERY, means
from replicad.tubes.commands import Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_UNHELD = 1000  # rows with values that cannot be carried: beyond that a setting is wrong, not a row
FEW = 100  # ids that are parked although no other one works, if the reason is surely in their rows
_ERROR_CHARACTERS = 500  # of the error that are stored with parked ids

log = get_logger("replicad.spark")


@dataclass(frozen=True, slots=True)
class RefusedIds:
    """Ids of one shard that fail together, and their error. `surely`: the reason is in the rows and nowhere else."""

    shard: int
    ids: pa.Array
    error: str
    surely: bool


def park_refused(
    options: SourceOptions,
    enricher: Enricher,
    trial: Callable[[EnrichedRows], None],
    tries: int,
    checkpoint: Checkpoint,
) -> int:
    """Park the waiting ids whose rows cannot be read, or are refused by `trial` (see `Sink.try_out`).

    Returns how many; 0 if the rows are not the reason. First writes `PARKED` in the checkpoint: the batch that failed
    is replayed without the parked pods.

    Raises:
        LeaseHeld, ConnectionLost, DatabaseUnavailable, DownstreamError: the search could not be done.
        ValueUnheld: more than `MOST_UNHELD` rows cannot be carried.
    """
    parked = 0
    with TubeHold(options, holder=options.holder, renewing=True) as hold:
        part, term = Part(0, 1), hold.term()
        with endpoint_of(options).connect(f"{hold.holder}/parking"[:255]) as client:
            batches = list(_waiting(client, options, part, term))
            found, fine = search(enricher, trial, collect(batches).table)
            few = all(one.surely for one in found) and sum(len(one.ids) for one in found) <= FEW
            if not found or not (fine or few):
                return 0
            checkpoint.write(PARKED, "")
            for one in found:
                for seq, ids in pods_with(batches, one):
                    parked += client.park(hold.tube, part, term, seq, ids, tries=tries, error=one.error)
                log.warning("parked", tube=hold.tube, shard=one.shard, ids=len(one.ids), error=one.error)
    return parked


def _waiting(client: BlockingClient, options: SourceOptions, part: Part, term: int) -> Iterator[pa.RecordBatch]:
    """Pods from the first unacked one on: at least the pods of the batch that failed."""
    assert options.tube is not None
    limit = min(2 * options.max_pods, MOST_PODS)
    chunks = client.pod_chunks(options.tube, part, term, START, limit=limit)
    return PodReader(options.tube, part, payload=True, keys=options.keys).batches(chunks)


def search(
    enricher: Enricher, trial: Callable[[EnrichedRows], None], touches: pa.Table
) -> tuple[list[RefusedIds], int]:
    """The ids among deduplicated touches whose rows cannot be read, or are refused by `trial`; the number of others.

    Raises as `park_refused`.
    """
    found: list[RefusedIds] = []
    fine = unheld = 0
    for shard, chunk in chunks_by_shard(touches, enricher.chunk):
        todo = [chunk]
        while todo:
            piece = todo.pop()
            try:
                for changes in enricher.changes(piece):
                    trial(changes)
                fine += piece.num_rows
            except (DatabaseUnavailable, DatabaseRefused, ColumnsChanged, RowsUnproven):
                raise
            except ValueUnheld as error:
                unheld += len(error.reasons)
                if unheld > MOST_UNHELD:
                    raise ValueUnheld(f"more than {MOST_UNHELD} rows cannot be carried, for example {error}") from error
                found += [RefusedIds(shard, pa.array([id_]), why, surely=True) for id_, why in error.reasons.items()]
                unheld_ids = pa.array(list(error.reasons), piece.schema.field("id").type)
                others = pc.invert(pc.is_in(piece.column("id"), value_set=unheld_ids))
                todo.append(piece.filter(others))
            except (DatabaseError, RowRefused) as error:
                state = getattr(error, "sqlstate", None)
                if piece.num_rows == 1 or means(state, WRONG_QUERY):
                    ids = piece.column("id").combine_chunks()
                    surely = isinstance(error, RowRefused) or means(state, BAD_DATA)
                    found.append(RefusedIds(shard, ids, str(error)[:_ERROR_CHARACTERS], surely))
                else:
                    half = piece.num_rows // 2
                    todo += [piece.slice(0, half), piece.slice(half)]
    return found, fine


def pods_with(batches: list[pa.RecordBatch], one: RefusedIds) -> Iterator[tuple[int, list[int]]]:
    """The seq of each pod that has some of the ids, and those ids."""
    for batch in batches:
        of_shard = batch.filter(pc.equal(batch.column("shard"), one.shard))
        rows = pc.list_parent_indices(of_shard.column("ids"))
        flat = pc.list_flatten(of_shard.column("ids"))
        hit = pc.is_in(flat, value_set=one.ids)
        table = pa.table({"seq": of_shard.column("seq").take(rows).filter(hit), "id": flat.filter(hit)})
        for row in table.group_by("seq").aggregate([("id", "list")]).to_pylist():
            yield row["seq"], row["id_list"]


@dataclass(slots=True)
class SuspectShards:
    """The suspects of a run, by shard, with the reasons. `options`: of the query, with its holder."""

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
        """The pods without the pods of suspects that cannot be read now, and how many ids of them were parked.

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
