"""ADD COLUMN while a pipeline runs, in one shard after the other: no row that has the column is written without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deltalake
import pandas as pd
import pyarrow as pa
import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from helpers import PODS, psql
from pyspark.sql import SparkSession

from replicad.errors import ColumnsChanged, DatabaseError, TableUnreadable, UsageError
from replicad.spark import pipeline
from replicad.spark.checkpoint import open_checkpoint
from replicad.spark.database import forget
from replicad.spark.enrich import EnrichedRows, Enricher
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks.base import BatchId, Shape, Sink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import Known, TableRule, WantedColumns, find_layout
from replicad.spark.touches import TOUCH_SCHEMA, deduplicate

RULE = TableRule("shard_{shard:04d}.cities")


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


def enricher(cities: Cities, known: Known, **renamed: str) -> Enricher:
    return Enricher(
        cities.url,
        find_layout(cities.url, [RULE], WantedColumns("id", known=known, renamed=renamed, following=True)),
        PODS,
    )


def row(made: Enricher, shard: int, id_: int = 1) -> dict[str, object]:
    touched = deduplicate(pa.Table.from_pylist([{"shard": shard, "id": id_, "seq": 1}], TOUCH_SCHEMA))
    (change,) = made.changes(touched)
    found: dict[str, object] = change.writes.to_pylist()[0]
    return found


def test_a_new_column_is_noticed_with_the_first_row_that_may_have_it_and_known_by_shard(
    cities: Cities, tmp_path: Path
) -> None:
    for shard in (1, 2, 3):
        cities.put(shard, [1], shard)
    checkpoint = open_checkpoint(tmp_path)
    before = enricher(cities, Known.read(checkpoint))
    before.layout.known.write(checkpoint)
    psql(cities.url, "ALTER TABLE shard_0002.cities ADD COLUMN mood text DEFAULT 'glad'")
    assert row(before, 1)["people"] == 1
    with pytest.raises(ColumnsChanged, match="the table of shard 2 has new columns: mood"):
        row(before, 2)
    between = enricher(cities, Known.read(checkpoint))
    assert [(row(between, shard)["mood"], row(between, shard)["people"]) for shard in (1, 2, 3)] == [
        (None, 1), ("glad", 2), (None, 3),
    ]  # fmt: skip
    psql(cities.url, "ALTER TABLE shard_0001.cities DROP COLUMN area, ADD COLUMN mood text DEFAULT 'sad'")
    with pytest.raises(DatabaseError, match='column "area" does not exist'):
        row(between, 1)
    with pytest.raises(DatabaseError, match='column "area" does not exist'):
        row(enricher(cities, Known.read(checkpoint)), 1)
    psql(cities.url, "ALTER TABLE shard_0001.cities ADD COLUMN area numeric")
    psql(cities.url, "ALTER TABLE shard_0003.cities ADD COLUMN mood text")
    after = enricher(cities, Known.read(checkpoint))
    assert after.layout.schema.names == ["id", "name", "people", "area", "mood"]
    assert [row(after, shard)["mood"] for shard in (1, 2, 3)] == ["sad", "glad", None]
    after.layout.known.write(checkpoint)
    psql(cities.url, "ALTER TABLE shard_0003.cities RENAME COLUMN mood TO feeling")
    with pytest.raises(DatabaseError, match='column "mood" does not exist'):
        row(enricher(cities, Known.read(checkpoint)), 3)


def test_a_shard_whose_table_is_gone_is_told_from_others_and_purged_only_when_asked(cities: Cities) -> None:
    for shard in (1, 2):
        cities.put(shard, [1], shard)
    made = enricher(cities, Known())
    purging = replace(made, purged=frozenset({1, 2}))
    touched = deduplicate(pa.Table.from_pylist([{"shard": 2, "id": 1, "seq": 1}], TOUCH_SCHEMA))
    (kept,) = purging.changes(touched)
    assert (len(kept.writes), len(kept.deletes)) == (1, 0), "there is a table"
    psql(cities.url, "DROP SCHEMA shard_0002 CASCADE; ALTER TABLE shard_0003.cities DROP people")
    assert made.unreadable([1]) == {}
    assert {shard: "does not exist" in why for shard, why in made.unreadable([1, 2, 3]).items()} == {2: True, 3: True}
    assert made.reads_any(except_for={2, 3})
    assert not made.reads_any(except_for={1})
    with pytest.raises(TableUnreadable, match="the table of shard 2 cannot be read"):
        list(made.changes(touched))
    (gone,) = purging.changes(touched)
    assert gone.deletes.to_pylist() == [{"_shard": 2, "id": 1, "_seq": 1}]
    with pytest.raises(TableUnreadable, match="people"):
        row(replace(made, purged=frozenset({3})), 3)


def test_a_wider_type_in_one_shard_is_noticed_and_the_widest_counts(cities: Cities) -> None:
    for shard in (1, 2, 3):
        cities.put(shard, [1], shard)
    before = enricher(cities, Known())
    psql(cities.url, "ALTER TABLE shard_0002.cities ALTER people TYPE bigint")
    assert row(before, 2)["people"] == 2
    psql(cities.url, "UPDATE shard_0002.cities SET people = 5000000000")
    with pytest.raises(ColumnsChanged, match="the table of shard 2 has another type"):
        row(before, 2)
    after = enricher(cities, before.layout.known)
    assert [row(after, shard)["people"] for shard in (1, 2)] == [1, 5_000_000_000]
    assert after.layout.types["people"] == "bigint"
    assert before.layout.known.widened(after.layout.known.types) == {"people"}
    psql(cities.url, "DROP TABLE shard_0002.cities")
    assert enricher(cities, after.layout.known).layout.types["people"] == "bigint", "it stays as it is downstream"


def test_a_renamed_column_is_read_by_both_names_and_keeps_the_old_one_downstream(cities: Cities) -> None:
    for shard in (1, 2, 3):
        cities.put(shard, [1], shard)
    known = enricher(cities, Known()).layout.known
    psql(cities.url, "ALTER TABLE shard_0002.cities RENAME people TO inhabitants")
    psql(cities.url, "ALTER TABLE shard_0003.cities ADD inhabitants integer DEFAULT -1")
    psql(cities.url, "ALTER TABLE shard_0001.cities RENAME id TO number")
    made = enricher(cities, known, people="inhabitants", id="number")
    assert made.layout.schema.names == ["id", "name", "people", "area"]
    assert [(row(made, shard)["id"], row(made, shard)["people"]) for shard in (1, 2, 3)] == [(1, 1), (1, 2), (1, 3)]
    psql(cities.url, "ALTER TABLE shard_0002.cities ADD COLUMN mood text")
    with pytest.raises(ColumnsChanged, match="new columns: mood"):
        row(made, 2)


KEYS = [("_shard", pa.int32()), ("_seq", pa.int64())]
OLD = Shape(pa.schema([("id", pa.int64()), ("name", pa.string()), *KEYS]), "id")
NEW = Shape(
    pa.schema([("id", pa.int64()), ("name", pa.string()), ("born", pa.date32()), ("n", pa.string()), *KEYS]), "id"
)
GROWN = Shape(NEW.schema, "id", {"n": "numeric(8,2)"}, frozenset({"born", "n"}))


def put(sink: Sink, shape: Shape, number: int, **values: object) -> None:
    changed = pa.Table.from_pylist([{"_shard": 1, "_seq": number, **values}], shape.schema)
    batch = BatchId("q", number)
    sink.commit(batch, [sink.apply(shape, batch, 0, [EnrichedRows(changed, shape.keys.empty_table())])])


PURGE = "purge"
WIDE = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("price", pa.string()), *KEYS])
NARROW = pa.schema([("id", pa.int64()), ("n", pa.int32()), ("price", pa.int32()), *KEYS])


@pytest.mark.parametrize("kind", ["parquet", "delta", "postgres"])
def test_a_downstream_gets_wider_types_and_keeps_its_rows(cities: Cities, tmp_path: Path, kind: str) -> None:
    sinks = {
        "parquet": ParquetSink(tmp_path / "lake"),
        "delta": DeltaSink(str(tmp_path / "delta")),
        "postgres": PostgresSink(cities.url, "dw.cities"),
    }
    sink = sinks[kind]
    before = Shape(NARROW, "id", {"n": "integer", "price": "integer"})
    types = {"n": "bigint", "price": "numeric"}
    after = Shape(WIDE, "id", types, widened=frozenset({"n", "price"}))
    sink.prepare(before)
    identity = sink.identity()
    put(sink, before, 1, id=1, n=1, price=-3)
    for refused in (Shape(WIDE, "id", types), Shape(WIDE, "id", types, widened=frozenset({"n"}))):
        with pytest.raises(UsageError, match=r"other columns|would be (int64|string)|cannot hold the rows"):
            sink.prepare(refused)
    for _ in range(2):
        sink.prepare(after)
    assert sink.identity() == identity, "it is still the downstream of the checkpoint"
    put(sink, after, 2, id=2, n=1 << 40, price="0.50")
    assert sink.apply(after, BatchId("q", 2), 0, []).repeated, "it still knows its batches"
    if kind == "postgres":
        rows = psql(cities.url, "SELECT id, n, price FROM dw.cities ORDER BY id")
        assert rows == f"1|1|-3\n2|{1 << 40}|0.50"
        psql(cities.url, "CREATE VIEW dw.uses AS SELECT n FROM dw.cities")
        text = Shape(WIDE.set(1, pa.field("n", pa.string())), "id", {"n": "numeric"}, widened=frozenset({"n"}))
        with pytest.raises(DatabaseError, match=r"used by a view.*; run it yourself: ALTER TABLE dw.cities ALTER"):
            sink.prepare(text)
        return
    found = pd.read_parquet(tmp_path / "lake/current") if kind == "parquet" else None
    if found is None:
        found = deltalake.DeltaTable(str(tmp_path / "delta")).to_pandas()
    rows = found.sort_values("id")[["id", "n", "price"]].values.tolist()
    assert rows == [[1, 1, "-3"], [2, 1 << 40, "0.50"]]


@pytest.mark.parametrize("kind", ["parquet", "delta", "postgres"])
def test_a_downstream_gets_the_columns_with_null_in_what_is_there(cities: Cities, tmp_path: Path, kind: str) -> None:
    sinks = {
        "parquet": ParquetSink(tmp_path / "lake"),
        "delta": DeltaSink(str(tmp_path / "delta")),
        "postgres": PostgresSink(cities.url, "dw.cities"),
    }
    sink = sinks[kind]
    sink.prepare(OLD)
    put(sink, OLD, 1, id=1, name="a")
    with pytest.raises(UsageError, match=r"other columns|has no column"):
        sink.prepare(NEW)
    for _ in range(2):
        sink.prepare(GROWN)
    put(sink, GROWN, 2, id=2, name="b", born=None, n="1.50")
    if kind == "postgres":
        assert psql(cities.url, "SELECT id, name, n FROM dw.cities ORDER BY id") == "1|a|\n2|b|1.50"
        kept = "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'dw.cities'::regclass"
        assert psql(cities.url, f"{kept} AND attname IN ('born', 'n') ORDER BY attname") == "date\nnumeric"
        return
    if kind == "parquet":
        found = pd.read_parquet(tmp_path / "lake/current")
        assert not sink.apply(GROWN, BatchId("q", 3), 0, []).repeated
        assert sink.apply(GROWN, BatchId("q", 2), 0, []).repeated, "it still knows its batches"
    else:
        found = deltalake.DeltaTable(str(tmp_path / "delta")).to_pandas()
    rows = found.sort_values("id")[["id", "name", "n"]].astype(object).to_dict("records")
    assert [(one["id"], one["name"], None if pd.isna(one["n"]) else one["n"]) for one in rows] == [
        (1, "a", None), (2, "b", "1.50"),
    ]  # fmt: skip


def test_a_start_follows_stops_or_ignores_what_the_checkpoint_does_not_know(cities: Cities, tmp_path: Path) -> None:
    known = Known(("id", "name", "people", "area"), frozenset({"id", "name", "people", "area"}))
    psql(cities.url, "ALTER TABLE shard_0001.cities ADD COLUMN late text")

    def columns(known: Known | None, **more: str) -> list[str]:
        config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path, **more)
        return list(pipeline.make_enricher(config, known).layout.schema.names)

    assert columns(known, new_columns="ignore") == ["id", "name", "people", "area"]
    assert columns(known, new_columns="follow") == ["id", "name", "people", "area", "late"]
    with pytest.raises(UsageError, match=r"new columns \(late\), and new_columns is `stop`"):
        columns(known, new_columns="stop")
    assert "late" in columns(Known(), new_columns="stop"), "nothing is new to a new checkpoint"
    narrow = Known(known.columns, known.whole, {"people": "smallint"})
    assert columns(narrow, wider_types="follow")
    with pytest.raises(UsageError, match=r"wider types \(people is integer\), and wider_types is `stop`"):
        columns(narrow, wider_types="stop", new_columns="ignore")


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_running_pipeline_follows_a_migration_from_shard_to_shard(
    spark: SparkSession, cities: Cities, tmp_path: Path
) -> None:
    """Two shards get a column, one a wider type, and one loses a column: its ids are parked, the others only wait for
    one start of the query at each change. At last a table is dropped, and its shard is purged.
    """
    config = cities.config(PostgresSink(cities.url, "dw.cities"), tmp_path, trigger=0, tries=3)
    cities.put(1, [1], 1)
    changes = [
        *(f"ALTER TABLE shard_000{shard}.cities ADD COLUMN mood text DEFAULT 'glad {shard}'" for shard in (3, 1)),
        "ALTER TABLE shard_0002.cities ALTER people TYPE bigint",
        "ALTER TABLE shard_0003.cities DROP COLUMN people",
    ]
    rounds = [*changes, "", "", "", PURGE]
    starts: list[str | None] = []
    start_query = pipeline.start_query

    def start(*given: Any, **more: Any) -> Any:
        starts.append(Known.read(open_checkpoint(config.checkpoint)).types.get("people"))
        return start_query(*given, **more)

    def until(_: PipelineResult) -> bool:
        if cities.daemon.tubes["t"].pods:
            return False
        if not rounds:
            return True
        if (change := rounds.pop(0)) == PURGE:
            psql(cities.url, "DROP SCHEMA shard_0002 CASCADE")
            seq = cities.daemon.tubes["t"].top + 1
            cities.daemon.touch("t", 2, [], "B", {"type": "backfill_end", "start_seq": str(seq), "purge": True})
            return False
        psql(cities.url, f"{change};") if change else None
        for shard in (1, 2, 3):
            id_ = 9 + len(rounds)
            people = 1 << 40 if "bigint" in change and shard == 2 else 1
            column = "" if shard == 3 and len(rounds) < 5 else "people,"
            values = "" if not column else f"{people},"
            psql(cities.url, f"INSERT INTO shard_000{shard}.cities (id, {column} name) VALUES ({id_}, {values} 'new')")
            cities.daemon.touch("t", shard, [id_])
        return False

    with patch.object(pipeline, "start_query", start):
        pipeline.run(config, spark, until)
    assert psql(cities.url, "SELECT _shard, id, people, mood FROM dw.cities ORDER BY 1, 2").splitlines() == [
        "1|1|1|", *(f"1|{id_}|1|glad 1" for id_ in range(10, 16)), "1|16|1|",
        *(f"3|{id_}|1|glad 3" for id_ in range(14, 17)),
    ]  # fmt: skip
    parked = [(ids, error) for _, ids, error in cities.daemon.tubes["t"].parked]
    assert [ids for ids, _ in parked] == [(13,), (12,), (11,), (10,)]
    assert all("the table of shard 3 cannot be read" in error and '"people"' in error for _, error in parked)
    assert starts == [None, "integer", "integer", "integer", "bigint"], "one at each change, and none after the last"
    sent = "SELECT sum(deleted) FROM dw.replicad_batches"
    assert psql(cities.url, sent) == "7", "the rows of the shard that was purged"
    kept = "SELECT format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = 'dw.cities'::regclass"
    assert psql(cities.url, f"{kept} AND attname = 'people'") == "bigint"
