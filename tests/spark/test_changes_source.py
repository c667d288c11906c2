"""Changes of a table in a real Spark, as columns with the types of the table; from a daemon in a process of its own."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from helpers import psql
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructType
from test_end_to_end import Served, served

from replicad.errors import DownstreamError, UsageError
from replicad.spark.changes import ChangedRows
from tests.conftest import PATIENCE

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
__all__ = ["served"]

TABLE = """
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE TYPE pair AS (a integer, b text);
CREATE TABLE odd (region text, id bigint, n numeric(38, 3), free numeric, at timestamptz, plain timestamp, day date,
    bytes bytea, doc jsonb, tags text[], scores double precision[], mood mood, pair pair, f real, ok boolean, gone text,
    PRIMARY KEY (region, id));
SELECT replicad.stream_add_changes('odd', 'odd', old => true);
INSERT INTO odd VALUES ('e', 9223372036854775807, 12345678901234567890123456789012345.678, 0.10,
    '2026-01-02 03:04:05.000006+02', '2026-01-02 03:04:05', '9999-12-31', '\\x00ff', '{"b": 12345678901234567890.10}',
    '{a,"b c",NULL}', '{NaN,0.1}', 'glad', '(1,"x y")', 'Infinity', true, 'x');
UPDATE odd SET n = -0.001, doc = '"a text"', id = 1;
ALTER TABLE odd DROP COLUMN gone;
ALTER TABLE odd ADD COLUMN more integer DEFAULT 5;
UPDATE odd SET ok = NULL, tags = '{}';
DELETE FROM odd;
TRUNCATE odd;
"""


def test_changes_have_the_columns_of_the_table_with_its_types(
    spark: SparkSession, served: Served, database_url: str
) -> None:
    psql(database_url, TABLE)
    options = {"port": str(served.port), "stream": "odd", "changes": "true"}
    frame = spark.read.format("replicad").options(**options).load()
    found: list[Row] = frame.orderBy("token").collect()
    assert [row.op for row in found] == ["insert", "delete", "insert", "update", "delete", "truncate"]
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema["row"].dataType}  # type: ignore[attr-defined]
    assert kinds == {
        "region": "string", "id": "bigint", "n": "decimal(38,3)", "free": "string", "at": "timestamp",
        "plain": "timestamp_ntz", "day": "date", "bytes": "binary", "doc": "string", "tags": "array<string>",
        "scores": "array<double>", "mood": "string", "pair": "string", "f": "float", "ok": "boolean", "more": "int",
    }  # fmt: skip
    inserted, moved_from, moved_to, updated, deleted, truncated = found
    assert inserted.key == Row(region="e", id=9223372036854775807)
    assert inserted.row.n == Decimal("12345678901234567890123456789012345.678")
    assert (inserted.row.free, inserted.row.day, bytes(inserted.row.bytes)) == ("0.10", date(9999, 12, 31), b"\x00\xff")
    assert inserted.row.plain == datetime(2026, 1, 2, 3, 4, 5)
    assert inserted.row.at.timestamp() == datetime.fromisoformat("2026-01-02T03:04:05.000006+02:00").timestamp()
    assert inserted.row.doc == '{"b": 12345678901234567890.10}'
    assert inserted.row.tags == ["a", "b c", None]
    assert str(inserted.row.scores) == "[nan, 0.1]"
    assert (inserted.row.mood, inserted.row.pair, inserted.row.f) == ("glad", '{"a": 1, "b": "x y"}', float("inf"))
    assert (inserted.row.ok, inserted.row.more, inserted.old) == (True, None, None)
    assert moved_from.key.id == 9223372036854775807
    assert (moved_from.row, moved_from.old.doc) == (None, inserted.row.doc)
    assert (moved_to.row.n, moved_to.row.doc) == (Decimal("-0.001"), '"a text"')
    assert (updated.row.ok, updated.row.tags, updated.row.more, updated.old.ok) == (None, [], 5, True)
    assert (updated.unchanged, inserted.unchanged) == ([], None)
    assert deleted.key == Row(region="e", id=1)
    assert deleted.old.more == 5
    assert (truncated.key, truncated.row, truncated.old) == (None, None, None)

    psql(database_url, "INSERT INTO odd (region, id, day) VALUES ('e', 2, 'infinity')")
    again = spark.read.format("replicad").options(**options, startingOffsets=str(truncated.token))
    with pytest.raises(
        Exception, match=r"row\.day is .infinity., which date32\[day\] cannot hold; read the column as a s"
    ):
        again.load().collect()
    day = '"name":"day","nullable":true,"type":"%s"'
    own = StructType.fromJson(json.loads(frame.schema.json().replace(day % "date", day % "string")))
    [row] = again.schema(own).load().collect()
    assert row.row.day == "infinity"


def test_a_query_has_the_changes_of_the_table_in_its_batches(
    spark: SparkSession, served: Served, database_url: str, tmp_path: Path
) -> None:
    psql(database_url, "CREATE TABLE t (id integer PRIMARY KEY, n numeric(8,2))")
    psql(database_url, "SELECT replicad.stream_add_changes('t', 't', old => true)")
    psql(database_url, "INSERT INTO t VALUES (1, 0.5), (2, 2); UPDATE t SET n = n + 1")
    options = {"port": str(served.port), "stream": "t", "changes": "true", "maxOffsetsPerTrigger": "3"}
    frame = spark.readStream.format("replicad").options(**options).load().select("op", "key.id", "row.n", "old")
    writer = frame.writeStream.format("memory").queryName("t").option("checkpointLocation", str(tmp_path / "c"))
    assert writer.trigger(availableNow=True).start().awaitTermination(2 * PATIENCE)
    found = [(row.op, row.id, str(row.n), row.old and str(row.old.n)) for row in spark.table("t").collect()]
    assert sorted(found) == [
        ("insert", 1, "0.50", None), ("insert", 2, "2.00", None), ("update", 1, "1.50", "0.50"),
        ("update", 2, "3.00", "2.00"),
    ]  # fmt: skip


def test_a_stream_of_rows_has_no_columns_of_changes(spark: SparkSession, served: Served, database_url: str) -> None:
    psql(database_url, "CREATE TABLE e (id bigserial PRIMARY KEY); SELECT replicad.stream_add('e', 'e', 'id')")
    psql(database_url, "INSERT INTO e DEFAULT VALUES")
    with pytest.raises(Exception, match="stream e has no changes of a table: it was added without --changes"):
        spark.read.format("replicad").options(port=str(served.port), stream="e", changes="true").load()


DESCRIBED: dict[str, Any] = {"key": ["id"], "columns": [{"name": "id", "type": "smallint"}]}


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("smallint", "32768"), ("integer", "1.5"), ("numeric(4,2)", "100.00"), ("numeric(4,2)", "0.001"),
        ("numeric(4,2)", '"NaN"'), ("date", '"0044-03-15 BC"'), ("timestamp without time zone", '"infinity"'),
        ("timestamp without time zone", '"2026-01-01T00:00:00+00:00"'), ("boolean", '"yes"'), ("bytea", '"ff"'),
        ("integer[]", "[[1], [2]]"), ("integer", "[1]"), ("text[]", '"a"'),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_its_column_is_an_error_with_its_place(type: str, value: str) -> None:
    columns = ChangedRows.described(
        "t", {"key": ["id"], "columns": [*DESCRIBED["columns"], {"name": "v", "type": type}]}
    )
    line = '{"op":"i","key":1,"row":{"id":1,"v":%s},"schema":1,"xid":5,"at":"2026-01-01T00:00:00+00:00"}'
    with pytest.raises(DownstreamError, match=r"stream t, change 7: row\.v is .* cannot hold"):
        columns.batch([(7, line % value)])
    assert columns.batch([(7, line % "null")]).to_pylist()[0]["row"] == {"id": 1, "v": None}


def test_a_schema_that_changes_cannot_fill_is_refused() -> None:
    columns = ChangedRows.described("t", DESCRIBED)
    with pytest.raises(UsageError, match="column xid of changes is int64"):
        ChangedRows("t", columns.schema.set(6, columns.schema.field("at").with_name("xid"))).check()
    with pytest.raises(UsageError, match="column row of changes has the columns of the table"):
        ChangedRows("t", columns.schema.set(3, columns.schema.field("op").with_name("row"))).check()
