"""`replicad pipeline verify` finds every row that differs downstream, and none that is only on its way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from replicad.errors import DownstreamDiffers, UsageError
from replicad.postgres.bridge import Database
from replicad.spark import verify as comparing
from replicad.spark.local.config import SinkMaker
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.verify import TableReport, raise_if_different, summary, verify
from tests.commands import replicad_async
from tests.conftest import psql
from tests.daemons import Daemon
from tests.integration.test_local_pipeline import SHOP, Shop, eventually_backfilled, shop_of, target_url

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


def found(reports: list[TableReport]) -> dict[tuple[str, str], tuple[object, ...]]:
    """What differs, by downstream and table."""
    return {(one.downstream, one.table): (one.missing, one.extra, one.different) for one in reports if one.differing}


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


async def test_nothing_differs_while_a_backfill_is_under_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_BUSY", "SELECT 1::bigint /* {schema} {tube} */")
    psql(shop.source, UNSEEN + "DELETE FROM customer WHERE id = 3")
    report = next(one for one in verify(shop.config, wait=0) if one.table == "public.customer")
    assert (report.differing, report.in_flight) == (0, 1)
    assert summary(report).endswith("1 in flight (a backfill is under way), the others equal")


async def test_an_index_is_not_called_equal_and_the_others_are_compared(shop: Shop) -> None:
    index = SinkMaker("bulk", lambda _schema, table: BulkSink("http://127.0.0.1:1", table))
    reports = verify(replace(shop.config, downstreams={"search": index, **shop.config.downstreams}))
    assert [one.downstream for one in reports if not one.compared] == 3 * ["search"]
    assert sum(one.rows for one in reports) == 3 * 400
    assert summary(reports[0]).endswith("not compared, because this downstream cannot be read back")
    with pytest.raises(UsageError, match="downstream search cannot be compared"):
        raise_if_different(reports)


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
