"""Every type of Postgres with values at its ends, sent to every downstream: what arrives there.

docs/types.md is made of it; make it anew after a change:

    REPLICAD_TYPES_PAGE=write pytest tests/spark/test_types.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
from helpers import make_pods, psql
from index_server import IndexServer

from replicad.errors import ValueUnheld
from replicad.spark.columns import ColumnForms
from replicad.spark.enrich import Enricher
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import BatchId, Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import TableRule, WantedColumns, find_layout
from replicad.spark.touches import TOUCH_SCHEMA, deduplicate

PAGE = Path(__file__).parents[2] / "docs/types.md"
WRITE = os.environ.get("REPLICAD_TYPES_PAGE") == "write"

BEFORE = """
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE DOMAIN amount AS numeric(10, 2) CHECK (value > 0);
CREATE TYPE pair AS (a integer, b text);
SET timezone = 'UTC';
"""
DAYS = ["0001-01-01", "9999-12-31"]
VALUES: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["3.4028235e+38", "1e-45", "-0", "NaN", "Infinity", "-Infinity"],
    "double precision": ["1.7976931348623157e+308", "5e-324", "-0", "NaN", "Infinity", "-Infinity"],
    "numeric": ["12345678901234567890123456789.123456789", "0.10", "NaN", "Infinity", "-Infinity"],
    "numeric(8,2)": ["-999999.99", "0.10", "NaN"],
    "numeric(38,0)": ["99999999999999999999999999999999999999"],
    "numeric(40,2)": ["99999999999999999999999999999999999999.99"],
    "money": ["-92233720368547758.08", "0.01"],
    "text": ["", " x ", "Ågren\n€𝄞"],
    "character varying(5)": ["", "a b  "],
    "character(3)": ["abc", "a  "],
    "bytea": ["\\x", "\\x00ff"],
    "date": [*DAYS, "4713-01-01 BC", "10000-01-01", "5874897-12-31", "infinity", "-infinity"],
    "timestamp without time zone": [
        "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "4713-01-01 00:00:00 BC", "10000-01-01 00:00:00",
        "294276-12-31 23:59:59.999999", "infinity", "-infinity",
    ],
    "timestamp with time zone": [
        "0001-01-01 00:00:00+00", "2024-02-29 12:00:00.123456+00", "0044-03-15 12:00:00+00 BC",
        "10000-01-01 00:00:00+00", "294276-12-31 23:59:59.999999+00", "infinity", "-infinity",
    ],
    "time without time zone": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "time with time zone": ["23:59:59.999999+15:59", "00:00:00-15:59"],
    "interval": ["178000000 years", "-178000000 years", "1 mon -1 days +00:00:00.000001"],
    "json": ['{"b": 1,  "a": [2, 2]}', "null"],
    "jsonb": ['{"a": 2, "b": 12345678901234567890.10}', "null"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "inet": ["10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "bit(3)": ["101"],
    "bit varying": ["1010110"],
    "point": ["(1.5,-2)"],
    "int4range": ["[1,5)", "empty", "(,)"],
    "tstzmultirange": ['{["2024-01-01 00:00:00+00",infinity)}'],
    "tsvector": ["'a':1 'b':2"],
    "oid": ["4294967295"],
    "name": ["x"],
    '"char"': ["x"],
    "mood": ["glad"],
    "amount": ["99999999.99"],
    "pair": ['(1,"a b")'],
    "integer[]": ["{}", "{1,NULL,-2147483648}", "{{1,2},{3,4}}", "[2:3]={1,2}"],
    "text[]": ['{a,"b c",NULL,""}'],
    "double precision[]": ["{NaN,0.1}"],
    "numeric[]": ["{0.10,NaN,NULL}"],
    "date[]": ["{0001-01-01,NULL}", "{2024-01-01,infinity}"],
    "timestamp with time zone[]": ['{"2024-02-29 12:00:00.123456+00"}', "{-infinity}"],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "money[]": ["{1.00}"],
}  # fmt: skip
PARKED = "parked"


@dataclass(frozen=True)
class Case:
    """One value of one type: its row, its column, and its text in Postgres."""

    id: int
    type: str
    column: str
    text: str


@dataclass
class Arrived:
    """What a downstream has: the type of each column, and the value of each case; PARKED if it was not sent."""

    types: dict[str, str]
    values: dict[int, Any]
    parked: dict[int, str] = field(default_factory=dict)


def make_table(url: str) -> list[Case]:
    """Table `every`, with a column for each type and a row for each value."""
    columns = {kind: f"c{number:02d}" for number, kind in enumerate(VALUES)}
    numbers = iter(range(1, 10_000))
    found = [(next(numbers), kind, text) for kind, texts in VALUES.items() for text in texts]
    psql(
        url, f"{BEFORE} CREATE TABLE every (id bigint PRIMARY KEY, {', '.join(f'{c} {t}' for t, c in columns.items())})"
    )
    quoted = [(number, columns[kind], kind, text.replace("'", "''")) for number, kind, text in found]
    rows = [
        f"INSERT INTO every (id, {column}) VALUES ({number}, '{text}'::{kind});"
        for number, column, kind, text in quoted
    ]
    psql(url, "SET lc_monetary = 'C';" + "".join(rows))
    texts = texts_of(url, "every", [(number, columns[kind]) for number, kind, _ in found])
    return [Case(number, kind, columns[kind], texts[number]) for number, kind, _ in found]


def texts_of(url: str, table: str, cells: Iterable[tuple[int, str]]) -> dict[int, str]:
    """The text of one column for each id, as Postgres writes it."""
    parts = [f"SELECT id, to_json(format('%s', {column})) FROM {table} WHERE id = {number}" for number, column in cells]
    lines = psql(url, "SET timezone = 'UTC';" + " UNION ALL ".join(parts)).splitlines()
    return {int(number): json.loads(text) for number, _, text in (line.partition("|") for line in lines) if text}


def carry(url: str, cases: list[Case], sink: Sink, out_of_range: str) -> dict[int, str]:
    """Send all rows to a downstream. Returns by id why a row was not sent."""
    reading = ColumnForms(out_of_range=out_of_range, exact=sink.casts)
    layout = find_layout(url, [TableRule("public.every")], WantedColumns("id", reading=reading))
    enricher = Enricher(url, layout, make_pods(url))
    shape = Shape(enricher.schema, "id", layout.types)
    sink.prepare(shape)
    parked: dict[int, str] = {}
    touched = deduplicate(pa.Table.from_pylist([{"shard": 1, "id": c.id, "seq": 1} for c in cases], TOUCH_SCHEMA))
    try:
        list(enricher.changes(touched))
    except ValueUnheld as error:
        parked = error.reasons
        touched = touched.filter(~pa.compute.field("id").isin(list(parked)))
    changes = list(enricher.changes(touched))
    sink.commit(BatchId("q", 0), [sink.apply(shape, BatchId("q", 0), 0, changes)])
    return parked


def arrow_values(table: pa.Table, cases: list[Case]) -> Arrived:
    """Values as they are stored: dates and times as their numbers, whatever their year."""
    by_id = {id_: row for row, id_ in enumerate(table.column("id").to_pylist())}
    names = {case.column: case.type for case in cases}
    types = {names[f.name]: str(f.type).replace("element: ", "") for f in table.schema if f.name in names}
    stored = {name: stored_values(table.column(name)) for name in names}
    return Arrived(types, {c.id: stored[c.column][by_id[c.id]] for c in cases if c.id in by_id})


def stored_values(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    of = kind.value_type if pa.types.is_list(kind) else kind
    number = pa.int32() if pa.types.is_date32(of) else pa.int64() if pa.types.is_timestamp(of) else None
    if number is not None:
        column = column.cast(pa.list_(number) if pa.types.is_list(kind) else number)
    values = column.to_pylist()
    if pa.types.is_decimal(kind):
        return [None if value is None else f"{value:f}" for value in values]
    return values


def into_parquet(url: str, cases: list[Case], folder: Path, out_of_range: str) -> Arrived:
    parked = carry(url, cases, ParquetSink(folder), out_of_range)
    found = arrow_values(parquet.table(folder), cases)
    found.parked = parked
    return found


def into_delta(url: str, cases: list[Case], folder: Path, out_of_range: str) -> Arrived:
    parked = carry(url, cases, DeltaSink(str(folder)), out_of_range)
    found = arrow_values(pa.table(deltalake.DeltaTable(str(folder)).to_pyarrow_table()), cases)
    found.parked = parked
    return found


def into_postgres(url: str, cases: list[Case], out_of_range: str) -> Arrived:
    parked = carry(url, cases, PostgresSink(url, "dw.every"), out_of_range)
    lines = psql(
        url, "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'dw.every'::regclass"
    )
    made = dict(line.split("|") for line in lines.splitlines())
    types = {case.type: made[case.column] for case in cases}
    return Arrived(types, texts_of(url, "dw.every", [(case.id, case.column) for case in cases]), parked)


def into_index(url: str, cases: list[Case], out_of_range: str) -> Arrived:
    server = IndexServer()
    try:
        parked = carry(
            url, cases, BulkSink(f"http://127.0.0.1:{server.port}", "every", document_id="{id}"), out_of_range
        )
    finally:
        server.close()
    values = {case.id: server.documents[str(case.id)][case.column] for case in cases if case.id not in parked}
    forms = {case.type: type(values[case.id]).__name__ for case in reversed(cases) if case.id in values}
    return Arrived(forms, values, parked)
