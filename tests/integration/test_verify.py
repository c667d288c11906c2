"""`replicad pipeline verify` finds every row that differs downstream, and none that is only on its way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import trio

from replicad.errors import DownstreamDiffers, DownstreamError, DownstreamUnavailable, UsageError
from replicad.postgres.bridge import Database
from replicad.spark import verify as comparing
from replicad.spark.local.config import LocalConfig, SinkMaker
from replicad.spark.local.engine import run_local
from replicad.spark.local.tables import attach_new
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import TableRule
from replicad.spark.verify import TableReport, Transform, raise_if_different, summary, verify
from tests.commands import replicad_async
from tests.conftest import psql
from tests.daemons import Daemon
from tests.integration.test_local_pipeline import (
    SHOP,
    Shop,
    eventually,
    eventually_backfilled,
    running,
    shop_of,
    target_url,
)
from tests.spark.index_server import IndexServer

__all__ = ["target_url"]

FILES = """
[downstream.files]
kind = "parquet"
folder = "{folder}/{{schema}}.{{table}}"
[downstream.lake]
kind = "delta"
uri = "{folder}/lake/{{schema}}.{{table}}"
"""
UNSEEN = "SET session_replication_role = replica; "  # what follows is not recorded


@pytest.fixture(autouse=True)
def looks_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "AGAIN", 0.01)


@pytest.fixture
async def shop(database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path) -> Shop:
    """Three tables in three downstreams, which are equal."""
    psql(database_url, SHOP)
    made = shop_of(database_url, target_url, daemon, tmp_path, FILES.format(folder=tmp_path))
    await eventually_backfilled(made)
    await trio.to_thread.run_sync(made.run)  # the other downstreams too
    return made


class Indexes(dict[str, IndexServer]):
    """A server for the index of each table."""

    def __missing__(self, table: str) -> IndexServer:
        return self.setdefault(table, IndexServer())

    @property
    def maker(self) -> SinkMaker:
        return SinkMaker("bulk", lambda _schema, table: BulkSink(f"http://127.0.0.1:{self[table].port}", table.lower()))


@pytest.fixture
def indexes() -> Iterator[Indexes]:
    made = Indexes()
    yield made
    for server in made.values():
        server.close()


async def carry_all(config: LocalConfig) -> None:
    """Run the pipeline until no backfill is under way and the tube is empty."""
    sql = f"""SELECT NOT EXISTS (SELECT FROM tube.tube_backfill WHERE NOT finished)
        AND NOT EXISTS (SELECT FROM tube.{config.tube})"""
    async with running(config):
        await eventually(lambda: psql(config.database, sql) == "t")


def found(reports: list[TableReport]) -> dict[tuple[str, str], tuple[object, ...]]:
    """What differs, by downstream and table."""
    return {(one.downstream, one.table): (one.missing, one.extra, one.different) for one in reports if one.differing}


@pytest.mark.long
async def test_rows_of_all_types_and_keys_are_equal_in_every_downstream(shop: Shop) -> None:
    reports = verify(shop.config)
    assert len(reports) == 9
    assert found(reports) == {}
    assert {one.table: one.rows for one in reports} == {
        "public.customer": 300, 'public."Film"': 50, "public.film_actor": 50
    }  # fmt: skip
    raise_if_different(reports)


@pytest.mark.parametrize("page", [pytest.param(7, marks=pytest.mark.long), 50_000])
async def test_each_row_that_differs_is_found_and_repaired(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(comparing, "PAGE", page)
    psql(
        shop.source,
        UNSEEN
        + "UPDATE customer SET name = 'other', paid = NULL WHERE id = 77; DELETE FROM customer WHERE id IN (1, 300);"
        "INSERT INTO customer VALUES (0, 'first'), (1000, 'last'); UPDATE film_actor SET note = 'y' WHERE actor = 3 AND"
        " film = md5('3')::uuid",
    )
    reports = verify(shop.config, repair=True)
    differing = ([0, 1000], [1, 300], {77: ("name", "paid")})
    for downstream in ("copy", "files", "lake"):
        missing, extra, different = found(reports)[downstream, "public.customer"]
        assert ([int(id_) for id_ in missing], sorted(int(id_) for id_ in extra)) == differing[:2]
        assert {int(id_): names for id_, names in different.items()} == differing[2]
        assert len(found(reports)[downstream, "public.film_actor"][2]) == 1
    with pytest.raises(DownstreamDiffers, match=r"6 missing, 6 extra, 6 different.*they were touched"):
        raise_if_different(reports)
    await trio.to_thread.run_sync(shop.run)
    assert found(verify(shop.config)) == {}
    assert shop.is_equal()


async def test_a_row_that_is_on_its_way_does_not_differ(shop: Shop) -> None:
    psql(shop.source, "UPDATE customer SET name = 'new' WHERE id < 10; DELETE FROM film_actor WHERE actor = 2")
    reports = verify(shop.config, wait=0)
    assert found(reports) == {}
    assert sum(one.in_flight for one in reports) == 3 * (9 + 7)
    with pytest.raises(DownstreamDiffers, match=r"48 rows differ and are in flight.*is the pipeline running"):
        raise_if_different(reports)
    assert "9 in flight" in summary(next(one for one in reports if one.table == "public.customer"))
    await trio.to_thread.run_sync(shop.run)
    assert sum(one.in_flight for one in verify(shop.config, wait=0)) == 0


@pytest.mark.long
async def test_nothing_differs_while_a_backfill_is_under_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_BUSY", "SELECT 1::bigint /* {schema} {tube} */")
    psql(shop.source, UNSEEN + "DELETE FROM customer WHERE id = 3")
    report = next(one for one in verify(shop.config, wait=0) if one.table == "public.customer")
    assert (report.differing, report.in_flight) == (0, 1)
    assert summary(report).endswith("1 in flight (a backfill is under way), the others equal")


async def test_what_waits_in_a_backlog_is_in_flight(shop: Shop) -> None:
    psql(
        shop.source,
        "SELECT tube.tube_ensure_exists('shop_lake', keys => 'text'); "
        + UNSEEN
        + "UPDATE customer SET name = 'later' WHERE id = 9;"
        "SELECT tube.shop_lake_touch(a.shard, '{9}'::text[], 'T') FROM tube.tube_attachment a"
        " WHERE a.tbl = 'customer'::regclass",
    )
    reports = [one for one in verify(shop.config, wait=0) if one.table == "public.customer"]
    assert {one.downstream: (one.differing, one.in_flight) for one in reports} == {
        "copy": (1, 0), "files": (1, 0), "lake": (0, 1)
    }  # fmt: skip


@pytest.mark.long
async def test_a_table_that_the_source_has_no_more_is_seen_in_every_downstream(shop: Shop, indexes: Indexes) -> None:
    config = replace(shop.config, downstreams={**shop.config.downstreams, "search": indexes.maker})
    psql(shop.source, "SELECT tube.tube_backfill_request('shop', NULL, 0, 2147483647)")
    await carry_all(replace(config, checkpoint=config.checkpoint / "b"))
    psql(shop.source, "SELECT tube.tube_table_ensure_detached('shop', 'film_actor'); DROP TABLE film_actor")
    assert [(one.downstream, one.orphaned) for one in verify(config) if one.differing] == [
        ("copy", 50), ("files", 50), ("lake", 50), ("search", 50)
    ]  # fmt: skip
    reports = verify(config, repair=True)
    assert not any(one.purged for one in reports)
    with pytest.raises(DownstreamDiffers, match=r"200 of no table.*the source has no public.film_actor any more"):
        raise_if_different(reports)


@pytest.mark.long
async def test_documents_of_an_index_are_compared_and_repaired(shop: Shop, indexes: Indexes) -> None:
    psql(
        shop.source,
        "CREATE TABLE odd (id bigint PRIMARY KEY, f float8, n numeric, j jsonb, b bytea, d date[], t timestamptz);"
        "INSERT INTO odd VALUES (1, 'NaN', 1.50, '{\"b\": 1.0, \"a\": [1e2, null]}', 'x', '{2026-01-02}', now()),"
        "(2, 1e300, 1234567.25, 'null', NULL, '{}', NULL), (3, NULL, 7, '{\"c\": 0}', '', NULL, NULL)",
    )
    attach_new(shop.config)
    config = replace(shop.config, downstreams={"search": indexes.maker}, checkpoint=shop.config.checkpoint / "b")
    psql(shop.source, "SELECT tube.tube_backfill_request('shop', NULL, 0, 2147483647)")
    await carry_all(config)
    assert found(verify(config)) == {}
    assert sum(one.rows for one in verify(config)) == 403
    odd, customers = indexes["odd"].documents, indexes["customer"].documents
    (two,) = (one for one in odd.values() if one["id"] == 2)
    two["n"] = 1234567.5
    del two["b"]  # it was null
    seven, eight = (next(id_ for id_, one in customers.items() if one["id"] == number) for number in (7, 8))
    del customers[seven]
    customers[eight.replace("8", "999")] = {**customers[eight], "_key": "999", "id": 999}
    customers["foreign"] = {"text": "of another program"}
    reports = verify(config, repair=True)
    assert found(reports) == {
        ("search", "public.odd"): ([], [], {"2": ("n",)}),
        ("search", "public.customer"): (["7"], ["999"], {}),
    }
    await trio.to_thread.run_sync(run_local, config)
    assert found(verify(config)) == {}
    indexes["customer"].shards_failed = 1
    with pytest.raises(DownstreamUnavailable, match="returned a part of its documents"):
        verify(config)


@pytest.fixture
def cities(database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path) -> LocalConfig:
    """Two shards in five downstreams, one of which is a class."""
    psql(
        database_url,
        "SELECT tube.tube_ensure_exists('cities');"
        + "".join(
            f"CREATE SCHEMA shard_{shard}; CREATE TABLE shard_{shard}.cities (id bigint PRIMARY KEY, name text);"
            f"INSERT INTO shard_{shard}.cities SELECT n, 'city ' || n FROM generate_series(1, 30) n;"
            f"SELECT tube.tube_table_ensure_attached('cities', 'shard_{shard}.cities', {shard});"
            for shard in (1, 2)
        )
        + "SELECT tube.tube_backfill_request('cities', NULL, 0, 9)",
    )
    return LocalConfig(
        options={"tube": "cities", "port": str(daemon.addresses[0].port)},
        database=database_url,
        checkpoint=tmp_path / "cities",
        rules=(TableRule("shard_{shard}.cities"),),
        downstreams={
            "copy": maker(PostgresSink(target_url, "dw.cities")),
            "files": maker(ParquetSink(tmp_path / "files")),
            "lake": maker(DeltaSink(str(tmp_path / "lake"))),
            "changes": maker(DeltaSink(str(tmp_path / "changes"), mode="changes")),
            "own": maker(CustomSink(Readable(str(tmp_path / "own")))),
        },
    )


def maker(sink: Sink) -> SinkMaker:
    return SinkMaker("of a test", lambda _schema, _table: sink)


class Kept:
    """A class of a user: a file for each row."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def write(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            (self.folder / f"{row['_shard']}.{row['id']}").write_text(json.dumps(row))

    def delete(self, shard: int, ids: list[int]) -> None:
        for one in ids:
            (self.folder / f"{shard}.{one}").unlink(missing_ok=True)

    def stale_ids(self, shard: int, before: int) -> list[int]:
        found = (json.loads(path.read_text()) for path in self.folder.glob(f"{shard}.*"))
        return [row["id"] for row in found if row["_seq"] < before]


class Readable(Kept):
    def read_keys(self) -> Iterator[tuple[int, list[int]]]:
        for path in self.folder.iterdir():
            shard, _, id_ = path.name.partition(".")
            yield int(shard), [int(id_)]

    def read_rows(self, shard: int, ids: list[int]) -> pa.Table:
        there = [path for one in ids if (path := self.folder / f"{shard}.{one}").exists()]
        return pa.Table.from_pylist([json.loads(path.read_text()) for path in there], CITY)


CITY = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.mark.long
async def test_rows_of_a_shard_that_the_source_has_no_more_are_seen_and_purged(cities: LocalConfig) -> None:
    await carry_all(cities)
    reports = verify(cities)
    assert (found(reports), sum(one.rows for one in reports)) == ({}, 5 * 60)
    raise_if_different(reports)
    psql(
        cities.database,
        "SELECT tube.tube_table_ensure_detached('cities', 'shard_2.cities'); DROP TABLE shard_2.cities;"
        + UNSEEN
        + "UPDATE shard_1.cities SET name = 'x' WHERE id = 4",
    )
    reports = verify(cities)
    assert [(one.downstream, one.orphaned) for one in reports if one.orphaned] == [
        (name, 30) for name in cities.downstreams
    ]
    with pytest.raises(DownstreamDiffers, match=r"5 different, 150 of no table.*--repair, which touches.*which purges"):
        raise_if_different(reports)
    assert verify(cities, repair=True)
    assert sum(one.in_flight for one in verify(cities, wait=0)) == 5 * 31  # the touch and the purge wait
    await trio.to_thread.run_sync(run_local, cities)
    reports = verify(cities)
    assert (found(reports), sum(one.rows for one in reports)) == ({}, 5 * 30)


@pytest.mark.long
async def test_a_class_is_compared_by_its_two_methods(cities: LocalConfig, tmp_path: Path) -> None:
    await carry_all(cities)
    own = replace(cities, downstreams={"own": cities.downstreams["own"]})
    (tmp_path / "own/1.3").unlink()
    (tmp_path / "own/1.77").write_text(json.dumps({"id": 77, "name": "x", "_shard": 1, "_seq": 1}))
    (tmp_path / "own/2.5").write_text(json.dumps({"id": 5, "name": "y", "_shard": 2, "_seq": 1}))
    assert found(verify(own)) == {
        ("own", "shard_1.cities"): ([3], [77], {}),
        ("own", "shard_2.cities"): ([], [], {5: ("name",)}),
    }

    class Narrow(Readable):
        def read_rows(self, shard: int, ids: list[int]) -> pa.Table:
            return super().read_rows(shard, ids).select(["id"])

    narrow = replace(own, downstreams={"own": maker(CustomSink(Narrow(str(tmp_path / "own"))))})
    with pytest.raises(DownstreamError, match=r"read_rows\(\) returned no column 'name'"):
        verify(narrow)


@pytest.mark.long
async def test_a_class_that_cannot_be_read_back_is_not_called_equal(cities: LocalConfig, tmp_path: Path) -> None:
    await carry_all(cities)
    kept = maker(CustomSink(Kept(str(tmp_path / "own"))))
    reports = verify(replace(cities, downstreams={"own": kept, "copy": cities.downstreams["copy"]}))
    assert [one.downstream for one in reports if one.uncompared] == ["own"]
    assert sum(one.rows for one in reports) == 60
    assert summary(reports[0]).endswith("not compared: Kept has no method read_keys and no method read_rows")
    with pytest.raises(
        UsageError, match="downstream own cannot be compared, so it is not known to be equal: own: Kept"
    ):
        raise_if_different(reports)


async def test_rows_are_compared_after_the_transform(cities: LocalConfig) -> None:
    """The rows that the transform leaves out may not be there, and what it makes of the others must."""
    await carry_all(cities)

    def rows(shape: Shape, page: pa.Table) -> pa.Table:
        page = page.filter(pc.greater(page.column("id"), 10))
        upper = pc.if_else(pc.less(page.column("id"), 13), pc.utf8_upper(page.column("name")), page.column("name"))
        return page.set_column(1, "name", upper)

    transform = Transform(lambda enricher: Shape(enricher.schema, enricher.layout.id), rows)
    reports = [one for one in verify(cities, transform=transform) if one.differing]
    assert {one.downstream for one in reports} == set(cities.downstreams)
    for one in reports:
        assert sorted(one.extra) == [*range(1, 11)]
        assert one.different == {11: ("name",), 12: ("name",)}


@pytest.mark.long
async def test_the_result_of_a_transform_is_bounded(cities: LocalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that become long are transformed and compared in smaller pages, and none is left out."""
    monkeypatch.setattr(comparing, "PIECE", 400_000)
    await carry_all(cities)
    sizes, pages = [], []

    def rows(shape: Shape, page: pa.Table) -> pa.Table:
        made = page.set_column(1, "name", pc.binary_repeat(page.column("name"), 10_000))
        sizes.append(made.nbytes)
        return made

    def watched(self: Any, page: Any, *given: Any, **named: Any) -> Any:
        pages.append(page.rows.nbytes)
        return compare(self, page, *given, **named)

    compare = comparing._Comparison._compare_page
    monkeypatch.setattr(comparing._Comparison, "_compare_page", watched)
    transform = Transform(lambda enricher: Shape(enricher.schema, enricher.layout.id), rows)
    reports = verify(replace(cities, downstreams={"own": cities.downstreams["own"]}), transform=transform)
    assert [(one.rows, len(one.different), one.missing, one.extra) for one in reports] == 2 * [(30, 30, [], [])]
    assert max(sizes) < 400_000
    assert max(pages) < 3 * 400_000
    assert len(pages) >= 10


@pytest.mark.long
async def test_pages_end_at_a_bound_in_bytes(cities: LocalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PIECE", 3 << 20)
    cities = replace(cities, downstreams={name: cities.downstreams[name] for name in ("copy", "changes")})
    psql(cities.database, "UPDATE shard_1.cities SET name = repeat(id::text, 1000000) WHERE id % 3 = 0")
    await carry_all(cities)
    most = 0

    def watched(*given: Any) -> tuple[pa.Table, bool]:
        nonlocal most
        page, whole = first(*given)
        most = max(most, page.nbytes)
        return page, whole

    first = comparing._first
    monkeypatch.setattr(comparing, "_first", watched)
    psql(cities.database, UNSEEN + "UPDATE shard_1.cities SET name = 'short' WHERE id = 27")
    assert found(verify(cities)) == {(name, "shard_1.cities"): ([], [], {27: ("name",)}) for name in cities.downstreams}
    assert 3 << 20 < most < 24 << 20  # the driver reads 16 MiB at once


@pytest.mark.long
async def test_a_row_that_does_not_pass_the_predicate_may_be_missing(shop: Shop) -> None:
    psql(
        shop.source,
        "SELECT tube.tube_table_ensure_attached('shop', 'customer', (SELECT shard FROM tube.tube_attachment"
        " WHERE tbl = 'customer'::regclass), 'id > 20')",
        UNSEEN + "INSERT INTO customer VALUES (-5, 'not wanted'), (400, 'wanted')",
    )
    reports = [one for one in verify(shop.config) if one.differing]
    assert [[int(id_) for id_ in one.missing] for one in reports] == [[400]] * 3
    assert not any(one.extra or one.different for one in reports)


@pytest.mark.long
async def test_a_sample_leaves_pages_out(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PAGE", 10)
    config = replace(shop.config, downstreams={"copy": shop.config.downstreams["copy"]})
    rows = sum(one.rows for one in verify(config, sample=0.5))
    assert 0 < rows < 400


async def test_the_command_says_what_differs(shop: Shop, tmp_path: Path) -> None:
    file = str(tmp_path / "shop.toml")
    done = await replicad_async("pipeline", "verify", file)
    assert done.returncode == 0, done.stderr
    assert "copy: public.customer: 300 rows, equal" in done.stdout
    psql(shop.target, "UPDATE customer SET name = 'spoilt' WHERE id = 5")
    done = await replicad_async("pipeline", "verify", file, "--json")
    assert done.returncode == 7
    assert "rows differ (1 different): public.customer in copy; run it again with --repair" in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["examples"]["different"] for line in lines if line["different"]] == [{"5": ["name"]}]
    done = await replicad_async("pipeline", "verify", file, "--sample", "0")
    assert done.returncode == 2
    assert "--sample: '0' is not valid" in done.stderr
