"""Convert packed columns of pods (`tube_columns_sql`) to blocks of Arrow IPC.

Python does no work per pod: numpy converts the byte order of a whole column at once. numpy and pyarrow come with the
extra `arrow` and are imported with the first block. Without them the daemon can answer with lines only.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from replicad.errors import EncodingUnavailable, TubeRefused
from replicad.tubes.commands import MAX_BLOCK, Arrow, Part
from replicad.tubes.keys import BIGINT, TEXT

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_EPOCH = 946_684_800_000_000  # microseconds from 1970, where Arrow counts from, to 2000, where Postgres does
_FIXED = [("seq", ">i8"), ("shard", ">i4"), ("count", ">i4"), ("ts", ">i8"), ("op", ">i4")]  # see tube_columns_sql
_ID = [("length", ">i4"), ("value", ">i8")]
_ID_LENGTH = 8  # bytes of a bigint
_LENGTH = struct.Struct(">i").unpack_from
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of an IPC stream


def load() -> None:
    """Import numpy and pyarrow. Raises EncodingUnavailable if they are not installed."""
    try:
        for name in ("numpy", "pyarrow"):
            importlib.import_module(name)
    except ImportError as error:
        raise EncodingUnavailable(
            f"this daemon can only send lines ({error}); for encoding=arrow install replicad[arrow] on its host"
        ) from error


@dataclass(frozen=True, slots=True)
class Columns:
    """A piece of a range of pods: the rows of `tube_columns_sql`, concatenated.

    `last` is the seq of the last pod. `sizes` and `bodies` are None without payloads. `size` is the total in bytes.
    `keys`: the kind of the ids (keys.py).
    """

    pods: int
    last: int
    fixed: bytes
    ids: tuple[bytes, ...]
    sizes: bytes | None = None
    bodies: bytes | None = None
    size: int = 0
    keys: str = BIGINT

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Concatenate at least one row."""
        payload = "sizes" in rows[0]
        fixed, ids = b"".join(row["fixed"] for row in rows), tuple(row["ids"] for row in rows)
        sizes = b"".join(row["sizes"] for row in rows) if payload else None
        bodies = b"".join(row["bodies"] or b"" for row in rows) if payload else None
        size = len(fixed) + sum(map(len, ids)) + len(sizes or b"") + len(bodies or b"")
        keys = TEXT if "texts" in rows[0] else BIGINT
        return cls(sum(row["pods"] for row in rows), rows[-1]["last"], fixed, ids, sizes, bodies, size, keys)


@cache
def schema(*, payload: bool, keys: str = BIGINT) -> pa.Schema:
    """The columns of a block, in the order and with the types that `protocol.md` names. `keys`: the kind of the ids."""
    import pyarrow as pa  # noqa: PLC0415 - imported with the first block

    fields = [
        pa.field("seq", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("shard", pa.int32()),
        pa.field("ids", pa.list_(pa.field("element", pa.string() if keys == TEXT else pa.int64()))),
        *([pa.field("payload", pa.string())] if payload else []),
        pa.field("ts", pa.timestamp("us", tz="UTC")),
    ]
    return pa.schema(fields)


def render(tube: str, part: Part, columns: Columns) -> list[bytes | memoryview]:
    """The ARROW line of these pods, its block and a newline, in parts that must be sent without a gap.

    Raises:
        EncodingUnavailable: the block would be too large. The pods can be read as lines.
        TubeRefused: as `record_batch`.
    """
    batch = record_batch(columns)
    head = bytes(batch.schema.serialize())
    body = memoryview(batch.serialize())
    size = len(head) + len(body) + len(_END)
    if size > MAX_BLOCK:
        raise EncodingUnavailable(
            f"the block of tube {tube} that ends with pod {columns.last} would have {size} bytes; a block has at most "
            f"{MAX_BLOCK}: read it as lines"
        )
    line = Arrow(tube, part, columns.pods, size).render().encode()
    return [line + b"\n" + head, body, _END + b"\n"]


def record_batch(columns: Columns) -> pa.RecordBatch:
    """The pods as a RecordBatch of `schema`.

    Raises:
        TubeRefused: an array of ids is not one-dimensional.
    """
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    fixed = np.frombuffer(columns.fixed, _FIXED)
    kinds = schema(payload=columns.sizes is not None, keys=columns.keys)
    ids = _ids if columns.keys == BIGINT else _text_ids
    arrays = [
        _plain(kinds.field("seq").type, fixed["seq"].astype(np.int64)),
        _ops(fixed["op"]),
        _plain(kinds.field("shard").type, fixed["shard"].astype(np.int32)),
        pa.Array.from_buffers(
            kinds.field("ids").type,
            len(fixed),
            [None, _offsets(fixed["count"])],
            children=[ids(columns.ids, int(fixed["count"].sum()))],
        ),
    ]
    if columns.sizes is not None:
        arrays.append(_texts(np.frombuffer(columns.sizes, ">i4"), columns.bodies or b""))
    arrays.append(_plain(kinds.field("ts").type, fixed["ts"].astype(np.int64) + _EPOCH))
    return pa.RecordBatch.from_arrays(arrays, schema=kinds)


def _plain(kind: pa.DataType, values: np.ndarray[Any, Any]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _offsets(counts: np.ndarray[Any, Any]) -> pa.Buffer:
    """Arrow offsets (where each element begins, and where the last one ends), from the lengths of the elements."""
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.py_buffer(offsets)


def _ops(codes: np.ndarray[Any, Any]) -> pa.Array:
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    if len(codes) and codes.max() > 127:  # not written by replicad's functions; the reader gets it unchanged
        return pa.array([chr(code) for code in codes.tolist()], pa.string())
    return pa.Array.from_buffers(
        pa.string(), len(codes), [None, _offsets(np.ones(len(codes))), pa.py_buffer(codes.astype(np.uint8))]
    )


def _texts(sizes: np.ndarray[Any, Any], bodies: bytes) -> pa.Array:
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    valid = pa.py_buffer(np.packbits(sizes >= 0, bitorder="little"))  # the size of NULL is -1
    return pa.Array.from_buffers(pa.string(), len(sizes), [valid, _offsets(np.maximum(sizes, 0)), pa.py_buffer(bodies)])


def _ids(rows: Sequence[bytes], total: int) -> pa.Array:
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    if sum(map(len, rows)) != total * (4 + _ID_LENGTH):
        return pa.array(_ids_with_nulls(b"".join(rows), total), pa.int64())
    memory = pa.allocate_buffer(total * _ID_LENGTH)  # from Arrow's memory pool, unlike numpy's arrays
    values, at = np.frombuffer(memory, np.int64), 0
    for row in rows:
        ids = np.frombuffer(row, _ID)
        if not (ids["length"] == _ID_LENGTH).all():
            return pa.array(_ids_with_nulls(b"".join(rows), total), pa.int64())
        values[at : at + len(ids)] = ids["value"]
        at += len(ids)
    return pa.Array.from_buffers(pa.int64(), total, [None, memory])


def _ids_with_nulls(data: bytes, total: int) -> Sequence[int | None]:
    """Decode ids one by one. A NULL has the length -1 and no value. replicad's own functions never write one."""
    ids: list[int | None] = []
    at = 0
    for _ in range(total):
        length = int.from_bytes(data[at : at + 4], "big", signed=True)
        at += 4
        if length == -1:
            ids.append(None)
            continue
        if length != _ID_LENGTH:
            break
        ids.append(int.from_bytes(data[at : at + _ID_LENGTH], "big", signed=True))
        at += _ID_LENGTH
    _check_decoded(len(ids) == total and at == len(data))
    return ids


def _text_ids(rows: Sequence[bytes], total: int) -> pa.Array:
    """Decode ids of kind text: find the lengths one by one, and remove them from the bytes at once. If all have one
    length, as uuids have, numpy finds them too.
    """
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    data = b"".join(rows)
    length = int.from_bytes(data[:4], "big", signed=True)
    if length > 0 and len(data) == total * (4 + length):
        ids = np.frombuffer(data, [("length", ">i4"), ("text", np.uint8, (length,))])
        if (ids["length"] == length).all():
            offsets = np.arange(0, len(ids) * length + 1, length, dtype=np.int32)
            texts = np.ascontiguousarray(ids["text"])
            return pa.Array.from_buffers(pa.string(), len(ids), [None, pa.py_buffer(offsets), pa.py_buffer(texts)])
    lengths: list[int] = []
    at, end = 0, len(data)
    while at + 4 <= end:
        (length,) = _LENGTH(data, at)
        if length < -1:
            break
        lengths.append(length)
        at += 4 if length == -1 else 4 + length
    _check_decoded(len(lengths) == total and at == end)
    sizes = np.array(lengths, np.int64)
    begins = np.concatenate(([0], np.cumsum(4 + np.maximum(sizes, 0))))[:-1]
    kept = np.ones(end, bool)
    for byte in range(4):
        kept[begins + byte] = False
    return _texts(sizes, np.frombuffer(data, np.uint8)[kept].tobytes())


def _check_decoded(complete: bool) -> None:
    if not complete:
        raise TubeRefused("a pod's array of ids is not one-dimensional; insert its ids again, or park the pod")
