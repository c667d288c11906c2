"""Convert the daemon's answer to PODS (lines or blocks) into RecordBatches of the source's schema.

A block is an Arrow stream of some hundred kB and is passed on unchanged. A chunk of lines without payloads, the common
case, is turned into JSON lines by two replacements of byte strings, and pyarrow parses it as a whole: Python does no
work per line. Knows nothing of sockets and Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.json as pj

from replicad.client.requests import PodBlock
from replicad.errors import RemoteProtocolError
from replicad.protocol.tokens import Cursor
from replicad.tubes.columns import schema
from replicad.tubes.commands import Part
from replicad.tubes.keys import BIGINT

TARGET_BYTES = 1 << 20  # of lines in one RecordBatch: parsing takes longer than the call, and memory stays small
_MAX_BYTES = (1 << 31) - 1  # the most that one block of pyarrow.json may have
_PAYLOAD_KEY = re.compile(rb',\s*"payload"\s*:')  # no value before the payload can contain it


@dataclass(frozen=True, slots=True)
class PodReader:
    """Converts the lines of one answer to PODS into batches. `tube` and `part`: from the request. `keys`: the kind of
    the ids (tubes/keys.py).
    """

    tube: str
    part: Part
    payload: bool
    keys: str = BIGINT

    def batches(self, chunks: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        """RecordBatches of about `TARGET_BYTES` of lines each, in order. A chunk holds whole lines.

        Raises:
            RemoteProtocolError: a line is not the RDATA line of a pod of this partition.
        """
        held: list[bytes] = []
        size = 0
        for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size >= TARGET_BYTES:
                yield self._batch(b"".join(held))
                held, size = [], 0
        if size:
            yield self._batch(b"".join(held))

    def _batch(self, lines: bytes) -> pa.RecordBatch:
        head = f"RDATA tube:{self.tube} {self.part} ".encode()
        count = lines.count(b"\n")
        payloads = None
        if b'"payload"' not in lines and lines.count(b' {"seq":') == lines.count(head) == count:
            # `RDATA tube:t 0/2 17 {"seq":17,...}` becomes `{"_":17,"seq":17,...}`
            rows = lines.replace(head, b'{"_":').replace(b' {"seq":', b',"seq":')
        else:
            rows, payloads = _line_by_line(lines, head)
        parsed = schema(payload=False, keys=self.keys)
        table = _parse(rows, parsed)
        if table.num_rows != count:
            raise RemoteProtocolError(f"{count} lines of tube {self.tube} held {table.num_rows} pods")
        columns = [_one_chunk(table.column(field.name)) for field in parsed if field.name != "ts"]
        columns[3] = columns[3].cast(parsed.field("ids").type)
        if self.payload:
            columns.append(pa.array(payloads or [None] * count, pa.string()))
        columns.append(_one_chunk(table.column("ts")))
        return pa.RecordBatch.from_arrays(columns, schema=schema(payload=self.payload, keys=self.keys))


def block_batch(block: PodBlock, *, payload: bool, keys: str = BIGINT) -> pa.RecordBatch:
    """The RecordBatch in a block of pods. It shares the block's memory.

    Raises:
        RemoteProtocolError: not an IPC stream of the expected columns, or another number of pods than announced.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(block.data)) as stream:
            batch = stream.read_next_batch()
        batch.validate()
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise RemoteProtocolError(f"a block of pods is not Arrow IPC: {str(error)[:300]}") from error
    if batch.schema != schema(payload=payload, keys=keys) or batch.num_rows != block.pods:
        raise RemoteProtocolError(
            f"a block of {block.pods} pods has {batch.num_rows} rows of {str(batch.schema)[:300]!r}; "
            f"expected the columns {', '.join(schema(payload=payload).names)}, with ids of kind {keys}"
        )
    return batch


def _parse(rows: bytes, parsed: pa.Schema) -> pa.Table:
    if len(rows) > _MAX_BYTES:
        raise RemoteProtocolError(f"{len(rows)} bytes of pods in one piece; at most {_MAX_BYTES} can be read")
    try:
        return pj.read_json(
            pa.BufferReader(rows),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(rows) + 1),
            parse_options=pj.ParseOptions(explicit_schema=parsed, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid as error:
        raise RemoteProtocolError(f"a pod is not JSON of the expected form: {str(error)[:300]}") from error


def _line_by_line(lines: bytes, head: bytes) -> tuple[bytes, list[str | None]]:
    """The JSON and the payload of every line. A payload is the last value of its row and stays text."""
    rows: list[bytes] = []
    payloads: list[str | None] = []
    for line in lines.split(b"\n")[:-1]:
        if not line.startswith(head):
            raise RemoteProtocolError(f"expected a pod of {head.decode()!r}, got {line[:80]!r}")
        row = line[len(head) :].partition(b" ")[2].rstrip(b"\r")
        found = _PAYLOAD_KEY.search(row)
        if found:
            rows.append(row[: found.start()] + b"}")
            payloads.append(row[found.end() : row.rindex(b"}")].strip().decode())
        else:
            rows.append(row)
            payloads.append(None)
    return b"\n".join(rows), payloads


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def last_cursor(batch: pa.RecordBatch, before: Cursor) -> Cursor:
    """The cursor behind the last pod of a batch. `before` is the cursor before the batch."""
    seq, backfill = batch.column("seq"), pc.equal(batch.column("op"), "B")
    regular = pc.max(pc.filter(seq, pc.invert(backfill))).as_py()
    behind = pc.max(pc.filter(seq, backfill)).as_py()
    return Cursor(regular or before.regular, behind or before.backfill)
