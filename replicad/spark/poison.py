"""Find ids whose rows cannot be read or are refused downstream, and park them with the reason. The others go on.

After a dropped column, with a view that fails for one row, or a constraint downstream, a batch would fail for ever.
`park_refused` looks up all waiting ids and tries their rows out as a task would, halves a chunk that fails until one id
is left, and parks it (`replicad tubes parked` lists and replays parked ids). If no id works, the ids are mostly not the
reason, and none is parked. The query must not run meanwhile; its lease is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from replicad.client.blocking_client import BlockingClient
from replicad.errors import ColumnsChanged, DatabaseError, DatabaseRefused, DatabaseUnavailable, RowRefused, ValueUnheld
from replicad.eventlog import get_logger
from replicad.protocol.tokens import START
from replicad.spark.arrow import PodReader
from replicad.spark.checkpoint import PARKED, Checkpoint
from replicad.spark.connecting import endpoint_of
from replicad.spark.enrich import Changes, Enricher
from replicad.spark.holding import TubeHold
from replicad.spark.options import SourceOptions
from replicad.spark.planning import MOST_PODS
from replicad.spark.touches import chunks_by_shard, collect
from replicad.sqlstates import BAD_DATA, WRONG_QUERY, means
from replicad.tubes.commands import Part

MOST_UNHELD = 1000  # rows with values that cannot be carried: beyond that a setting is wrong, not a row
FEW = 100  # ids that are parked although no other one works, if the reason is surely in their rows
_ERROR_CHARACTERS = 500  # of the error that are stored with parked ids

log = get_logger("replicad.spark")


@dataclass(frozen=True, slots=True)
class Refused:
    """Ids of one shard that fail together, and their error. `surely`: the reason is in the rows and nowhere else."""

    shard: int
    ids: pa.Array
    error: str
    surely: bool


def park_refused(
    options: SourceOptions, enricher: Enricher, trial: Callable[[Changes], None], tries: int, checkpoint: Checkpoint
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
            found, fine = _search(enricher, trial, batches)
            few = all(one.surely for one in found) and sum(len(one.ids) for one in found) <= FEW
            if not found or not (fine or few):
                return 0
            checkpoint.write(PARKED, "")
            for one in found:
                for seq, ids in _pods_with(batches, one):
                    parked += client.park(hold.tube, part, term, seq, ids, tries=tries, error=one.error)
                log.warning("parked", tube=hold.tube, shard=one.shard, ids=len(one.ids), error=one.error)
    return parked


def _waiting(client: BlockingClient, options: SourceOptions, part: Part, term: int) -> Iterator[pa.RecordBatch]:
    """Pods from the first unacked one on: at least those of the batch that failed."""
    assert options.tube is not None
    limit = min(2 * options.max_pods, MOST_PODS)
    chunks = client.pod_chunks(options.tube, part, term, START, limit=limit)
    return PodReader(options.tube, part, payload=True).batches(chunks)


def _search(
    enricher: Enricher, trial: Callable[[Changes], None], batches: list[pa.RecordBatch]
) -> tuple[list[Refused], int]:
    """The ids that are refused, and the number of those that are not."""
    found: list[Refused] = []
    fine = unheld = 0
    for shard, chunk in chunks_by_shard(collect(batches).table, enricher.chunk):
        todo = [chunk]
        while todo:
            piece = todo.pop()
            try:
                for changes in enricher.changes(piece):
                    trial(changes)
                fine += piece.num_rows
            except (DatabaseUnavailable, DatabaseRefused, ColumnsChanged):
                raise
            except ValueUnheld as error:
                unheld += len(error.reasons)
                if unheld > MOST_UNHELD:
                    raise ValueUnheld(f"more than {MOST_UNHELD} rows cannot be carried, for example {error}") from error
                found += [Refused(shard, pa.array([id_]), why, surely=True) for id_, why in error.reasons.items()]
                others = pc.invert(pc.is_in(piece.column("id"), value_set=pa.array(list(error.reasons), pa.int64())))
                todo.append(piece.filter(others))
            except (DatabaseError, RowRefused) as error:
                state = getattr(error, "sqlstate", None)
                if piece.num_rows == 1 or means(state, WRONG_QUERY):
                    ids = piece.column("id").combine_chunks()
                    surely = isinstance(error, RowRefused) or means(state, BAD_DATA)
                    found.append(Refused(shard, ids, str(error)[:_ERROR_CHARACTERS], surely))
                else:
                    half = piece.num_rows // 2
                    todo += [piece.slice(0, half), piece.slice(half)]
    return found, fine


def _pods_with(batches: list[pa.RecordBatch], one: Refused) -> Iterator[tuple[int, list[int]]]:
    """The seq of each pod that has some of the ids, and those ids."""
    for batch in batches:
        of_shard = batch.filter(pc.equal(batch.column("shard"), one.shard))
        rows = pc.list_parent_indices(of_shard.column("ids"))
        flat = pc.list_flatten(of_shard.column("ids"))
        hit = pc.is_in(flat, value_set=one.ids)
        table = pa.table({"seq": of_shard.column("seq").take(rows).filter(hit), "id": flat.filter(hit)})
        for row in table.group_by("seq").aggregate([("id", "list")]).to_pylist():
            yield row["seq"], row["id_list"]
