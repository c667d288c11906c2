"""Which columns of a downstream take which values: none that would change them, and every one that users expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from helpers import psql

from replicad.errors import DatabaseError, UsageError
from replicad.spark.columns import ColumnType
from replicad.spark.database import forget
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks.base import BatchId, Shape
from replicad.spark.sinks.postgres import PostgresSink

VALUES: dict[str, list[str]] = {  # by type: values at its ends, and some that other types cut off
    "boolean": ["true", "false"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647", "16777217"],
    "bigint": ["-9223372036854775808", "9223372036854775807", "9007199254740993"],
    "real": ["3.4028235e38", "0.1", "NaN", "Infinity"],
    "double precision": ["1.7976931348623157e308", "0.1", "5e-324", "NaN"],
    "numeric": ["12345678901234567890.123456789", "NaN", "0.10"],
    "numeric(8,2)": ["999999.99", "0.01"],
    "numeric(20,0)": ["99999999999999999999"],
    "numeric(12,2)": ["9999999999.99"],
    "text": ["", " x ", "1234", "0.10"],
    "character varying": ["", " x "],
    "character varying(3)": ["abc"],
    "character varying(5)": ["abcde"],
    "character(3)": ["abc", "a  "],
    "json": ['{"b": 1,  "a": 2}', "[1, 1]"],
    "jsonb": ['{"a": 2, "b": 1}', "1234"],
    "date": ["0001-01-01", "5874897-12-31", "infinity"],
    "timestamp without time zone": ["2024-02-29 12:00:00.123456", "-infinity"],
    "timestamp(3) without time zone": ["2024-02-29 12:00:00.123"],
    "timestamp with time zone": ["2024-02-29 12:00:00.123456+00"],
    "time without time zone": ["23:59:59.999999"],
    "time(0) without time zone": ["23:59:59"],
    "time with time zone": ["23:59:59.999999+14"],
    "interval": ["1 mon -1 days 00:00:00.000001"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "inet": ["10.0.0.1/8"],
    "bytea": ["\\x00ff"],
    "bit(3)": ["101"],
    "bit varying(5)": ["10101"],
    "integer[]": ["{1,NULL,-2147483648}"],
    "bigint[]": ["{9223372036854775807}"],
    "text[]": ['{a,"b c",NULL}'],
    "numeric[]": ["{0.10}"],
}
SMALLER = {"date": ["0001-01-01", "9999-12-31"]}  # beyond it a timestamp has no such day, and Postgres says so


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    yield database_url
    forget(database_url)


def test_a_column_that_holds_a_type_gives_every_value_back_as_it_was(url: str) -> None:
    checks, taken = [], 0
    for source, values in VALUES.items():
        for target in VALUES:
            if not ColumnType.parse(target).holds(ColumnType.parse(source)):
                continue
            taken += target != source
            for value in SMALLER.get(source, values) if target.startswith("timestamp") else values:
                if "json" in target and source != target:
                    continue  # the same JSON in another form, or none
                at = f"'{value}'::{source}"
                checks.append(f"SELECT '{source} in {target}' WHERE ({at})::{target}::{source}::text <> ({at})::text")
    assert taken > 60
    assert psql(url, " UNION ALL ".join(checks)) == ""


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("bigint", "integer"), ("numeric", "bigint"), ("numeric(20,0)", "bigint"), ("double precision", "integer"),
        ("numeric", "numeric(8,2)"), ("numeric(12,2)", "numeric(8,2)"), ("numeric(12,2)", "integer"),
        ("jsonb", "text"), ("jsonb", "jsonb"), ("json", "jsonb"), ("text", "bigint"), ("text", "integer[]"),
        ("character varying(5)", "character varying(3)"), ("timestamp without time zone", "date"), ("uuid", "uuid"),
        ("timestamp without time zone", "timestamp(3) without time zone"), ("bigint[]", "integer[]"),
        ("interval", "interval(3)"), ('app."Mood"', 'app."Mood"'),
    ],
)  # fmt: skip
def test_what_loses_nothing_is_taken(target: str, source: str) -> None:
    assert ColumnType.parse(target).holds(ColumnType.parse(source))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("double precision", "bigint"), ("real", "integer"), ("real", "double precision"), ("integer", "bigint"),
        ("integer", "text"), ("numeric(8,2)", "numeric"), ("numeric(8,2)", "integer"),
        ("numeric(8,2)", "numeric(12,2)"),
        ("character varying(3)", "text"), ("character varying(3)", "character varying(5)"), ("character(3)", "text"),
        ("date", "timestamp without time zone"), ("timestamp without time zone", "timestamp with time zone"),
        ("timestamp(3) without time zone", "timestamp without time zone"), ("integer", "date"), ("boolean", "integer"),
        ("integer[]", "integer"), ("integer", "integer[]"), ("integer[]", "bigint[]"), ("bytea", "text"),
        ("bit(3)", "bit varying(5)"), ('app."Mood"', 'app."Other"'),
    ],
)  # fmt: skip
def test_what_could_lose_something_is_not(target: str, source: str) -> None:
    assert not ColumnType.parse(target).holds(ColumnType.parse(source))


def write(sink: PostgresSink, shape: Shape, number: int, value: Any) -> None:
    row = {"id": number, "v": value, "_shard": 1, "_seq": number}
    gone = pa.Table.from_pylist([], shape.keys)
    sink.apply(shape, BatchId("q", number), 0, [EnrichedRows(pa.Table.from_pylist([row], shape.schema), gone)])


def shape_of(kind: pa.DataType, type: str | None = None) -> Shape:
    schema = pa.schema([("id", pa.int64()), ("v", kind), ("_shard", pa.int32()), ("_seq", pa.int64())])
    return Shape(schema, "id", {} if type is None else {"v": type})


@pytest.mark.parametrize(
    ("kind", "type", "value", "target", "held"),
    [
        (pa.int32(), "integer", 5, "bigint", "5"),
        (pa.int64(), "bigint", (1 << 63) - 1, "numeric", "9223372036854775807"),
        (pa.int32(), "integer", -5, "double precision", "-5"),
        (pa.string(), "numeric(8,2)", "0.10", "numeric", "0.10"),
        (pa.string(), "numeric(8,2)", "0.10", "numeric(12,2)", "0.10"),
        (pa.decimal128(8, 2), "numeric(8,2)", Decimal("-0.10"), "numeric(12,3)", "-0.100"),
        (pa.decimal128(38, 0), "numeric(38,0)", Decimal("9" * 38), "numeric", "9" * 38),
        (pa.string(), "jsonb", '{"a": 1}', "jsonb", '{"a": 1}'),
        (pa.string(), "text", '{"a":1}', "jsonb", '{"a": 1}'),
        (pa.string(), None, "x'y", "character varying", "x'y"),
        (pa.string(), "uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        (pa.int64(), "bigint", 5, "text", "5"),
        (pa.date32(), "date", date(2024, 2, 29), "timestamp", "2024-02-29 00:00:00"),
        (pa.timestamp("us", tz="UTC"), None, datetime(2024, 1, 1, tzinfo=UTC), "timestamptz", "2024-01-01 00:00:00+00"),
        (pa.list_(pa.int32()), "integer[]", [1, None], "bigint[]", "{1,NULL}"),
        (pa.string(), "numeric[]", "{0.10,NULL}", "numeric[]", "{0.10,NULL}"),
        (pa.string(), "numeric(8,2)", "7.50", "amount", "7.50"),
    ],
)  # fmt: skip
def test_a_table_of_the_users_gets_the_values_in_its_own_types(
    url: str, kind: pa.DataType, type: str | None, value: Any, target: str, held: str
) -> None:
    psql(url, "CREATE DOMAIN amount AS numeric(10, 2) CHECK (value > 0)")
    psql(url, f"CREATE TABLE mine (_seq bigint, v {target}, _shard integer, id bigint, PRIMARY KEY (_shard, id))")
    sink, shape = PostgresSink(url, "mine"), shape_of(kind, type)
    sink.prepare(shape)
    write(sink, shape, 1, value)
    assert psql(url, "SET timezone = 'UTC'; SELECT v FROM mine") == held


@pytest.mark.parametrize(
    ("kind", "type", "value", "target"),
    [
        (pa.int64(), "bigint", 5, "double precision"),
        (pa.int64(), "bigint", 5, "integer"),
        (pa.string(), "text", "1234", "integer"),
        (pa.date32(), "date", date(2024, 2, 29), "integer"),
        (pa.string(), "numeric", "0.105", "numeric(8,2)"),
        (pa.string(), "text", "long", "character varying(3)"),
        (pa.float64(), None, 0.1, "real"),
    ],
)
def test_a_column_that_would_change_values_is_refused_with_the_statement_that_mends_it(
    url: str, kind: pa.DataType, type: str | None, value: Any, target: str
) -> None:
    psql(url, f"CREATE TABLE mine (id bigint, v {target}, _shard integer, _seq bigint, PRIMARY KEY (_shard, id))")
    sink, shape = PostgresSink(url, "mine"), shape_of(kind, type)
    with pytest.raises(UsageError, match=r'cannot hold the rows unchanged: "v" is .*; run: ALTER TABLE') as refused:
        sink.prepare(shape)
    with pytest.raises(DatabaseError, match="cannot hold the rows unchanged"):
        write(sink, shape, 1, value)
    remedy = str(refused.value).partition("run: ")[2].partition(";")[0]
    psql(url, remedy)
    sink.prepare(shape)
    write(sink, shape, 1, value)
    assert psql(url, "SELECT v FROM mine") == str(value)


def test_a_table_that_is_altered_while_the_pipeline_runs_takes_no_wrong_value(url: str) -> None:
    sink, shape = PostgresSink(url, "made"), shape_of(pa.int64(), "bigint")
    sink.prepare(shape)
    write(sink, shape, 1, (1 << 53) + 1)
    psql(url, "ALTER TABLE made ALTER COLUMN v TYPE double precision")
    with pytest.raises(DatabaseError, match="is double precision"):
        write(sink, shape, 2, (1 << 53) + 1)
    assert psql(url, "SELECT count(*) FROM made") == "1"


def test_a_table_that_we_create_has_the_types_of_the_source(url: str) -> None:
    for number, (type, kind) in enumerate(
        {"numeric(8,2)": pa.decimal128(8, 2), "jsonb": pa.string(), "mood": pa.string()}.items()
    ):
        PostgresSink(url, f"made_{number}").prepare(shape_of(kind, type))
    created = (
        "SELECT json_agg(atttypid::regtype) FROM pg_attribute "
        "WHERE attname = 'v' AND attrelid::regclass::text ~ '^made_[0-9]$'"
    )
    assert sorted(json.loads(psql(url, created))) == ["jsonb", "numeric", "text"]
