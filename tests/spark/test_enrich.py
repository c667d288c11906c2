"""Enrichment against a real Postgres: which tables there are, which columns, and what becomes of ids that are gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from helpers import PODS, make_pods, psql

from replicad.errors import DatabaseError, DatabaseRefused, DatabaseUnavailable, EnvironmentRefused, UsageError
from replicad.spark.columns import ColumnForms
from replicad.spark.database import forget, patiently
from replicad.spark.enrich import Enricher
from replicad.spark.pipeline import make_enricher
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import BatchId, Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import TableRule, WantedColumns, find_layout
from replicad.spark.touches import TOUCH_SCHEMA, deduplicate
from replicad.tubes.shards import ShardSet

CITIES = TableRule("shard_{shard:04d}.cities")
TABLES = r'''
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE SCHEMA shard_0001; CREATE SCHEMA shard_0002; CREATE SCHEMA "Odd.Schema";
CREATE TABLE shard_0001.cities (id bigint PRIMARY KEY, name text, area numeric(10,2), tags text[], seen timestamptz,
  born date, extra jsonb, key uuid, feeling mood, small smallint, span interval, raw bytea, spot point);
CREATE TABLE shard_0002.cities (LIKE shard_0001.cities INCLUDING ALL);
CREATE TABLE "Odd.Schema"."My ""Table""" (id integer PRIMARY KEY, name text, height float8);
INSERT INTO shard_0001.cities VALUES (1, 'Oslo', 480.75, '{a,NULL}', '2026-01-02 03:04:05.678+00', '1048-01-01', '{"a":
1}',
  '00000000-0000-0000-0000-000000000001', 'glad', 7, '1 day', '\x00ff', '(1,2)');
INSERT INTO shard_0001.cities VALUES (2);
INSERT INTO shard_0002.cities (id, name) SELECT n, 'town ' || n FROM generate_series(1, 25) n;
INSERT INTO "Odd.Schema"."My ""Table""" VALUES (9, 'Nine', 1.5);
'''


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    psql(database_url, TABLES)
    make_pods(database_url)
    yield database_url
    forget(database_url)


def touches(*found: tuple[int, int, int]) -> pa.Table:
    return deduplicate(
        pa.Table.from_pylist([{"shard": s, "id": i, "seq": q} for s, i, q in found], schema=TOUCH_SCHEMA)
    )


def test_rows_come_with_their_highest_seq_and_missing_ones_are_deletes(url: str) -> None:
    enricher = Enricher(url, find_layout(url, [CITIES], WantedColumns("id", ["name"])), PODS)
    found = list(enricher.changes(touches((1, 1, 5), (1, 77, 6), (1, 1, 8), (2, 3, 7))))
    assert [row for change in found for row in change.writes.to_pylist()] == [
        {"id": 1, "name": "Oslo", "_shard": 1, "_seq": 8},
        {"id": 3, "name": "town 3", "_shard": 2, "_seq": 7},
    ]
    assert [row for change in found for row in change.deletes.to_pylist()] == [{"_shard": 1, "id": 77, "_seq": 6}]


def test_every_type_of_column_arrives_in_a_form_that_spark_has(url: str) -> None:
    layout = find_layout(url, [CITIES], WantedColumns("id"))
    (change,) = Enricher(url, layout, PODS).changes(touches((1, 1, 5)))
    (row,) = change.writes.to_pylist()
    assert (row["area"], row["tags"], row["extra"], row["feeling"]) == (
        Decimal("480.75"), ["a", None], '{"a": 1}', "glad",
    )  # fmt: skip
    assert (row["key"][-1], row["small"], row["span"], row["raw"], row["spot"]) == (
        "1",
        7,
        "1 day",
        b"\x00\xff",
        "(1,2)",
    )
    assert row["seen"].isoformat() == "2026-01-02T03:04:05.678000+00:00"
    assert (
        find_layout(url, [CITIES], WantedColumns("id", ["area"], ColumnForms(numeric="float")))
        .schema.field("area")
        .type
        == pa.float64()
    )


def test_chunks_are_bounded_and_of_one_shard(url: str) -> None:
    enricher = Enricher(url, find_layout(url, [CITIES], WantedColumns("id", ["name"])), PODS, chunk=10)
    found = list(enricher.changes(touches(*((2, number, 1) for number in range(1, 31)), (1, 1, 1))))
    assert [(len(change.writes), len(change.deletes)) for change in found] == [(1, 0), (10, 0), (10, 0), (5, 5)]


def test_several_tables_feed_one_tube_with_the_columns_of_all(url: str) -> None:
    rules = [TableRule('"Odd.Schema"."My ""Table"""', ShardSet.parse("9")), CITIES]
    layout = find_layout(url, rules, WantedColumns("id", ["name", "height", "born"]))
    found = list(Enricher(url, layout, PODS).changes(touches((9, 9, 1), (1, 1, 2))))
    rows = {
        row["_shard"]: (row["name"], row["height"], row["born"])
        for change in found
        for row in change.writes.to_pylist()
    }
    assert rows[9] == ("Nine", 1.5, None)
    assert rows[1][0] == "Oslo"
    assert rows[1][1] is None


@pytest.mark.parametrize(
    ("rules", "id_column", "columns", "says"),
    [
        ([TableRule("shard_{shard:04d}.towns")], "id", None, "no table matches"),
        (
            [TableRule("shard_{shard:04d}.cities", ShardSet.parse("7-9"))],
            "id",
            None,
            "shards 7-9; there are shard_0001.cit",
        ),
        ([CITIES], "key_id", None, "has no column 'key_id'; its columns are id, name"),
        ([CITIES], "name", None, "is not an integer"),
        ([CITIES], "id", ["nam"], "no column 'nam' in .* there are .*name"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(
    url: str, rules: list[TableRule], id_column: str, columns: list[str] | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        find_layout(url, rules, WantedColumns(id_column, columns))


def test_columns_of_two_types_and_of_our_own_names_are_refused(url: str) -> None:
    psql(url, "CREATE TABLE a_1 (id bigint, name date); CREATE TABLE c_1 (id bigint, name bytea)")
    psql(url, 'CREATE TABLE b_1 (id bigint, "_seq" text)')
    with pytest.raises(UsageError, match="column name is date in one table and bytea in"):
        find_layout(url, [TableRule("a_{shard}"), TableRule("c_{shard}")], WantedColumns("id"))
    with pytest.raises(UsageError, match="reserved for replicad's own columns"):
        find_layout(url, [TableRule("b_{shard}")], WantedColumns("id"))


@pytest.mark.parametrize("text", ["cities{", "{table}", "{0}", "{shard:zz}", "a; DROP TABLE b", " "])
def test_a_template_that_cannot_be_one_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a template"):
        TableRule(text)


def test_shard_sets_say_what_is_in_them() -> None:
    found = ShardSet.parse("0-3, 7")
    assert [shard for shard in range(10) if shard in found] == [0, 1, 2, 3, 7]
    assert 12345 in ShardSet.parse("all")
    with pytest.raises(ValueError, match="is not a range"):
        ShardSet.parse("3-1")


def test_a_touch_of_a_shard_without_table_is_an_error_not_a_delete(url: str) -> None:
    rule = TableRule("shard_{shard:04d}.cities", ShardSet.parse("1-2"))
    layout = find_layout(url, [rule], WantedColumns("id", ["name"]))
    with pytest.raises(UsageError, match="shard 3 was touched"):
        list(Enricher(url, layout, PODS).changes(touches((3, 1, 1))))
    psql(url, "ALTER TABLE shard_0001.cities DROP COLUMN name")
    with pytest.raises(DatabaseError, match='column "name" does not exist'):
        list(Enricher(url, layout, PODS).changes(touches((1, 1, 1))))


def test_a_connection_that_postgres_ended_is_made_again(url: str) -> None:
    enricher = Enricher(url, find_layout(url, [CITIES], WantedColumns("id", ["name"])), PODS)
    assert next(enricher.changes(touches((2, 1, 1)))).writes.num_rows == 1
    ours = "datname = current_database() AND application_name = 'replicad spark'"
    psql(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")
    assert next(enricher.changes(touches((2, 1, 1)))).writes.num_rows == 1


def test_an_absent_postgres_is_waited_for_only_so_long(url: str) -> None:
    slept: list[float] = []
    clock = iter(range(0, 1000, 1))
    with pytest.raises(DatabaseUnavailable, match="Connection refused"):
        patiently(
            "postgresql://nobody:secret@127.0.0.1:1/x",
            len,
            patience=6,
            now=lambda: float(next(clock)),
            sleep=slept.append,
        )
    assert slept == sorted(slept)
    assert 2 <= len(slept) <= 6
    with pytest.raises(DatabaseRefused, match="does not exist"):
        patiently(url.replace("/test_", "/no_test_"), len)


def test_without_the_driver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adbc_driver_postgresql", "adbc_driver_manager"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentRefused, match="pip install"):
        patiently("postgresql://nobody@127.0.0.1:1/nothing", lambda _: None, patience=0)


def test_pieces_are_bounded_in_bytes_whatever_the_length_of_rows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 10,000 ids has rows of any length; the sizes are found with the rows, and no id is left out."""
    piece = 1 << 20
    monkeypatch.setattr("replicad.spark.enrich.PIECE", piece)
    psql(
        url,
        "CREATE TABLE long (id bigint PRIMARY KEY, body text); "
        "INSERT INTO long SELECT n, repeat('x', CASE WHEN n BETWEEN 100 AND 120 THEN 400000 WHEN n = 150 THEN 5000000 "
        "ELSE 10 END) FROM generate_series(1, 300) n; DELETE FROM long WHERE id IN (110, 299)",
    )
    made = Enricher(url, find_layout(url, [TableRule("public.long")], WantedColumns("id")), PODS)
    found = list(made.changes(touches(*((1, number, 1) for number in range(1, 301)))))
    written = [one for change in found for one in change.writes.column("id").to_pylist()]
    deleted = [one for change in found for one in change.deletes.column("id").to_pylist()]
    assert written == sorted(written) == [one for one in range(1, 301) if one not in (110, 299)]
    assert deleted == [110, 299]
    for change in found:
        assert change.writes.nbytes <= 3 * piece or change.writes.num_rows == 1, "a piece, and what the driver has read"
    assert len(found) < 60, "the size grows again behind the long rows"


def test_columns_of_other_tools_that_begin_with_an_underscore_are_carried(url: str, tmp_path: Path) -> None:
    """dlt, Airbyte and MongoDB's tools make such columns; a name of ours on the way must not be one of them."""
    names = ["_dlt_id", "_airbyte_raw_id", "_gone", "_kind", "_note", "_there", "_seen", "_unheld", "_added"]
    psql(url, f"CREATE TABLE loaded (id bigint PRIMARY KEY, {', '.join(f'{name} text' for name in names)}, at date)")
    values = ", ".join(f"n || '{name}'" for name in names)
    psql(
        url,
        f"INSERT INTO loaded SELECT n, {values} FROM generate_series(1, 3) n",
    )
    layout = find_layout(url, [TableRule("public.loaded")], WantedColumns("id", following=True))
    enricher = Enricher(url, layout, PODS)
    sinks = [ParquetSink(tmp_path / "p"), DeltaSink(str(tmp_path / "d")), PostgresSink(url, "dw.loaded")]
    shape = Shape(enricher.schema, "id", layout.types)
    for sink in sinks:
        sink.prepare(shape)
        for number in range(2):
            batch = BatchId("q", number)
            found = enricher.changes(touches((1, 1, 1), (1, 2, 1), (1, 9, 1)))
            sink.commit(batch, [sink.apply(shape, batch, 0, found)])
    wanted = [[str(row) + name for name in names] for row in (1, 2)]
    for rows in (parquet.table(tmp_path / "p"), deltalake.DeltaTable(str(tmp_path / "d")).to_pyarrow_table()):
        assert sorted([row[name] for name in names] for row in rows.to_pylist()) == wanted
    assert psql(url, "SELECT count(*) FROM dw.loaded WHERE _note = id || '_note'") == "2"


def test_names_that_a_downstream_cannot_have_are_refused_before_spark_starts(url: str, tmp_path: Path) -> None:
    psql(url, 'CREATE TABLE odd (id bigint PRIMARY KEY, "Name" text, name text, _id text, _dlt_id text)')

    def start(sink: Sink, *columns: str) -> None:
        make_enricher(PipelineConfig("t", url, "odd", sink, tmp_path / "c", columns=columns or "*"))

    delta, index = DeltaSink(str(tmp_path / "d")), BulkSink("http://127.0.0.1:1", "odd")
    with pytest.raises(UsageError, match=r'columns "Name" and "name" differ in case only, and Delta cannot have both'):
        start(delta)
    with pytest.raises(UsageError, match=r"column '_id': documents of an index cannot have a field of that name"):
        start(index)
    start(delta, "name", "_id")
    start(index, "Name", "name", "_dlt_id")
    start(ParquetSink(tmp_path / "p"))
    start(PostgresSink(url, "dw.odd"))
    psql(url, 'CREATE TABLE odd2 (id bigint PRIMARY KEY, "ID" text)')
    with pytest.raises(UsageError, match='columns "id" and "ID" differ in case only'):
        make_enricher(PipelineConfig("t", url, "odd2", delta, tmp_path / "c"))
