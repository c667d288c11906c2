"""Lines of pods to Arrow: whatever a payload holds, and however the lines are cut into chunks."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.errors import RemoteProtocolError
from replicad.protocol.tokens import START, Cursor
from replicad.spark import arrow
from replicad.spark.arrow import PodReader, last_cursor
from replicad.tubes.commands import Part

PART = Part(1, 2)
big = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("seq") | st.just("payload"), inner, max_size=3)
    ),
    max_leaves=6,
)
pods = st.fixed_dictionaries(
    {
        "seq": st.integers(1, (1 << 63) - 1),
        "op": st.sampled_from("IUDTB"),
        "shard": st.integers(0, (1 << 31) - 1),
        "ids": st.lists(big, max_size=4),
        "ts": st.sampled_from(["2026-01-01T00:00:00.000001+00:00", "1999-12-31T23:59:59.999999+00:00"]),
    },
    optional={"payload": payloads.filter(lambda value: value is not None)},
)


def line(pod: dict[str, Any], separators: tuple[str, str] = (",", ":")) -> bytes:
    row = {key: pod[key] for key in ("seq", "op", "shard", "ids", "ts", "payload") if key in pod}
    return f"RDATA tube:t {PART} {pod['seq']} ".encode() + json.dumps(row, separators=separators).encode() + b"\n"


def rows(reader: PodReader, chunks: list[bytes]) -> list[dict[str, Any]]:
    return pa.Table.from_batches(list(reader.batches(chunks)), arrow.schema(payload=reader.payload)).to_pylist()


@settings(deadline=None)  # pyarrow's first call takes its time
@given(st.lists(pods, max_size=6), st.booleans())
def test_pods_come_out_as_they_went_in(found: list[dict[str, Any]], payload: bool) -> None:
    got = rows(PodReader("t", PART, payload), [line(pod) for pod in found])
    assert [(row["seq"], row["op"], row["shard"], row["ids"]) for row in got] == [
        (pod["seq"], pod["op"], pod["shard"], pod["ids"]) for pod in found
    ]
    assert [row["ts"].isoformat(timespec="microseconds") for row in got] == [pod["ts"] for pod in found]
    if payload:
        kept = [None if row["payload"] is None else json.loads(row["payload"]) for row in got]
        assert kept == [pod.get("payload") for pod in found]


def test_a_row_with_blanks_between_its_values_is_read_too() -> None:
    pod = {"seq": 7, "op": "U", "shard": 1, "ids": [1, 2], "ts": "2026-01-01T00:00:00.000000+00:00"}
    assert rows(PodReader("t", PART, False), [line(pod), line(pod, (", ", ": "))])[1]["ids"] == [1, 2]


def test_chunks_are_gathered_into_batches_of_some_size() -> None:
    pod = {"seq": 7, "op": "U", "shard": 1, "ids": list(range(1000)), "ts": "2026-01-01T00:00:00.000000+00:00"}
    chunk = line(pod) * 10
    count = 3 * arrow.TARGET_BYTES // len(chunk)
    batches = list(PodReader("t", PART, False).batches([chunk] * count))
    assert 2 <= len(batches) <= 4
    assert sum(batch.num_rows for batch in batches) == 10 * count


@pytest.mark.parametrize(
    "wrong",
    [
        b"RDATA tube:other 1/2 7 {}\n",
        b"RDATA tube:t 0/2 7 {}\n",
        b"PING 5\n",
        b"RDATA tube:t 1/2 7 {\n",
        b'RDATA tube:t 1/2 7 {"seq":"x"}\n',
    ],
)
def test_a_line_that_is_no_such_pod_is_refused(wrong: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        rows(PodReader("t", PART, False), [wrong])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=5))
def test_the_last_cursor_knows_both_kinds_of_pods(seqs: list[tuple[int, bool]]) -> None:
    made = [
        {"seq": s, "op": "B" if b else "U", "shard": 1, "ids": [], "ts": "2026-01-01T00:00:00+00:00"} for s, b in seqs
    ]
    (batch,) = PodReader("t", PART, False).batches([b"".join(map(line, made))])
    regular, late = [s for s, b in seqs if not b], [s for s, b in seqs if b]
    assert last_cursor(batch, START) == Cursor(max(regular, default=0), max(late, default=0))


def test_spark_and_arrow_are_told_of_the_same_columns() -> None:
    pytest.importorskip("pyspark", reason="`make unit` installs no PySpark")
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

    from replicad.spark import source, streams

    kinds = {
        "bigint": LongType(),
        "int": IntegerType(),
        "string": StringType(),
        "timestamp": TimestampType(),
        "array<bigint>": ArrayType(LongType()),
    }

    def spark_schema(columns: str) -> StructType:
        return StructType([StructField(name, kinds[kind]) for name, kind in map(str.split, columns.split(", "))])

    for columns, schema in (
        (source.POD_COLUMNS, arrow.schema(payload=False)),
        (source.POD_COLUMNS_PAYLOAD, arrow.schema(payload=True)),
        (source.STREAM_COLUMNS, streams.SCHEMA),
    ):
        assert to_arrow_schema(spark_schema(columns), timezone="UTC").equals(schema)
