"""Find ids whose rows cannot be read, and park them with the error, so that the pipeline can go on with the others.

After a dropped column, or with a view that fails for one row, a batch would fail for ever. `park_unreadable` looks up
all waiting ids as a task would, halves a chunk that fails until one id is left, and parks it (`replicad tubes parked`
lists and replays parked ids). If no id can be read, the ids are not the reason, and none is parked. The query must not
run meanwhile; its lease is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from replicad.client.blocking_client import BlockingClient
from replicad.errors import DatabaseError, DatabaseRefused, DatabaseUnavailable
from replicad.eventlog import get_logger
from replicad.protocol.tokens import START
from replicad.spark.arrow import PodReader
from replicad.spark.connecting import endpoint_of
from replicad.spark.enrich import Enricher
from replicad.spark.holding import TubeHold
from replicad.spark.options import SourceOptions
from replicad.spark.planning import MOST_PODS
from replicad.spark.touches import chunks_by_shard, collect
from replicad.sqlstates import WRONG_QUERY, means
from replicad.tubes.commands import Part

MARK = "replicad.parked"  # file in the checkpoint: pods of a batch that may be replayed were parked
_ERROR_CHARACTERS = 500  # of the error that are stored with parked ids

log = get_logger("replicad.spark")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Ids of one shard that fail together, and their error."""

    shard: int
    ids: pa.Array
    error: str


def park_unreadable(options: SourceOptions, enricher: Enricher, tries: int, checkpoint: Path) -> int:
    """Park the waiting ids whose rows cannot be read. Returns how many; 0 if all or none can be read.

    First makes `MARK` in the checkpoint: the batch that failed is replayed without the parked pods.

    Raises:
        LeaseHeld, ConnectionLost, DatabaseUnavailable: the search could not be done.
    """
    parked = 0
    with TubeHold(options, holder=options.holder, renewing=True) as hold:
        part, term = Part(0, 1), hold.term()
        with endpoint_of(options).connect(f"{hold.holder}/parking"[:255]) as client:
            batches = list(_waiting(client, options, part, term))
            found, readable = _search(enricher, batches)
            if not found or not readable:
                return 0
            (checkpoint / MARK).touch()
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


def _search(enricher: Enricher, batches: list[pa.RecordBatch]) -> tuple[list[Unreadable], int]:
    """The ids that cannot be read, and the number of those that can."""
    found: list[Unreadable] = []
    readable = 0
    for shard, chunk in chunks_by_shard(collect(batches).table, enricher.chunk):
        todo = [chunk]
        while todo:
            piece = todo.pop()
            try:
                for _ in enricher.changes(piece):
                    readable += piece.num_rows
            except (DatabaseUnavailable, DatabaseRefused):
                raise
            except DatabaseError as error:
                if piece.num_rows == 1 or means(error.sqlstate, WRONG_QUERY):
                    ids = piece.column("id").combine_chunks()
                    found.append(Unreadable(shard, ids, str(error)[:_ERROR_CHARACTERS]))
                else:
                    half = piece.num_rows // 2
                    todo += [piece.slice(0, half), piece.slice(half)]
    return found, readable


def _pods_with(batches: list[pa.RecordBatch], one: Unreadable) -> Iterator[tuple[int, list[int]]]:
    """The seq of each pod that has some of the ids, and those ids."""
    for batch in batches:
        of_shard = batch.filter(pc.equal(batch.column("shard"), one.shard))
        rows = pc.list_parent_indices(of_shard.column("ids"))
        flat = pc.list_flatten(of_shard.column("ids"))
        hit = pc.is_in(flat, value_set=one.ids)
        table = pa.table({"seq": of_shard.column("seq").take(rows).filter(hit), "id": flat.filter(hit)})
        for row in table.group_by("seq").aggregate([("id", "list")]).to_pylist():
            yield row["seq"], row["id_list"]
