"""The work of a read task: read exactly one range of one partition, without side effects, and check its completeness.

When the connection is lost, the task connects again and goes on behind the last pod that it returned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from replicad.client.blocking_client import BlockingClient
from replicad.errors import ConnectionLost, DatabaseUnavailable, DataLoss, EncodingUnavailable
from replicad.protocol.tokens import Cursor
from replicad.spark.arrow import PodReader, block_batch, last_cursor
from replicad.spark.connecting import endpoint_of, retries_of
from replicad.spark.offsets import Range
from replicad.spark.options import AUTO, SourceOptions
from replicad.tubes.commands import ARROW, LINES

log = logging.getLogger("replicad.spark")


@dataclass
class TubePartition(InputPartition):  # type: ignore[misc]
    """One task's range and the term of the lease. It is pickled to the executor."""

    options: SourceOptions
    range: Range
    term: int

    def __repr__(self) -> str:
        return f"TubePartition({self.options.what} {self.range.part}, ({self.range.after}, {self.range.upto}])"


def read_range(partition: TubePartition) -> Iterator[pa.RecordBatch]:
    """The pods of a range as RecordBatches of the source's schema.

    Raises:
        DataLoss: there are fewer pods than planned, and failOnDataLoss is set.
        LeaseLost: another query has taken the tube over.
        EncodingUnavailable: encoding=arrow, and the daemon can only send lines.
        ConnectionLost: after all retries.
    """
    options, wanted = partition.options, partition.range
    retries = retries_of(options)
    encoding = LINES if options.encoding == LINES else ARROW
    after, pods = wanted.after, 0
    while True:
        try:
            with endpoint_of(options).connect(f"task/{options.consumer or 'spark'}") as client:
                for batch in _batches(client, partition, after, encoding):
                    yield batch
                    pods += batch.num_rows
                    after = last_cursor(batch, after)
            break
        except EncodingUnavailable:  # read the pods behind `after` as lines
            if options.encoding != AUTO:
                raise
            encoding = LINES
        except (ConnectionLost, DatabaseUnavailable):
            if not retries.pause():
                raise
    _check_complete(options, wanted, pods)


def _batches(
    client: BlockingClient, partition: TubePartition, after: Cursor, encoding: str
) -> Iterator[pa.RecordBatch]:
    options, part, upto = partition.options, partition.range.part, partition.range.upto
    assert options.tube is not None
    if encoding == LINES:
        chunks = client.pod_chunks(options.tube, part, partition.term, after=after, upto=upto)
        return PodReader(options.tube, part, options.include_payload).batches(chunks)
    payload = options.include_payload
    blocks = client.pod_blocks(options.tube, part, partition.term, after=after, payload=payload, upto=upto)
    return (block_batch(block, payload=payload) for block in blocks)


def _check_complete(options: SourceOptions, wanted: Range, pods: int) -> None:
    if pods >= wanted.pods:  # pods beyond the plan came late: they are processed and acked with the rest
        return
    text = (
        f"{options.what} {wanted.part}: {wanted.pods} pods were planned in ({wanted.after}, {wanted.upto}], {pods} are "
        "there. The others were removed, or the tube was created again"
    )
    if options.fail_on_data_loss:
        raise DataLoss(f"{text}. Set failOnDataLoss=false to go on without them, and then backfill the tube")
    log.warning("%s", text)
