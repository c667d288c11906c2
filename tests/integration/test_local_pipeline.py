"""Pipelines with `engine = "local"`: many tables of a database into Postgres and into files, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import trio

from replicad.client.blocking_client import BlockingClient
from replicad.errors import DownstreamError, TubeRefused, UsageError
from replicad.postgres.bridge import Database
from replicad.protocol.tokens import Cursor
from replicad.spark import enrich, preflight
from replicad.spark.database import connection, forget
from replicad.spark.holding import TubeHold
from replicad.spark.lake import Lake
from replicad.spark.local import writing
from replicad.spark.local.backlog import Backlog
from replicad.spark.local.config import LocalConfig, SinkMaker
from replicad.spark.local.engine import FEW_PODS, PodStream, run_local
from replicad.spark.local.file import load_local
from replicad.spark.local.groups import PostgresTables
from replicad.spark.local.tables import attach_new
from replicad.spark.local.touchlog import TouchChunk
from replicad.spark.options import SourceOptions
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks import parquet
from replicad.spark.sinks.postgres import PostgresSink, create_missing
from replicad.tubes.columns import schema as pods_schema
from tests.commands import replicad_async
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon
from tests.lengths import first
from tests.roles import as_role

SHOP = """
CREATE TABLE customer (id integer PRIMARY KEY, name text NOT NULL, at timestamptz, paid numeric(10, 2));
CREATE TABLE "Film" (film_id uuid PRIMARY KEY, title text, tags text[]);
CREATE TABLE film_actor (actor integer, film uuid, note text, PRIMARY KEY (actor, film));
INSERT INTO customer SELECT n, 'c' || n, 'infinity', n / 4.0 FROM generate_series(1, 300) n;
INSERT INTO "Film" SELECT md5(n::text)::uuid, 'f' || n, ARRAY['a', NULL, 'b'] FROM generate_series(1, 50) n;
INSERT INTO film_actor SELECT n % 7, md5(n::text)::uuid, 'x' FROM generate_series(1, 50) n;
"""
CONTENT = """
SELECT 'customer', id::text, md5(row(name, at, paid)::text) FROM customer
UNION ALL SELECT 'film', film_id::text, md5(row(title, tags)::text) FROM "Film"
UNION ALL SELECT 'actor', actor || ' ' || film, note FROM film_actor ORDER BY 1, 2"""


@dataclass(frozen=True, slots=True)
class Shop:
    """A source, a downstream of its own database on the same server, and the configuration of a pipeline."""

    source: str
    target: str
    config: LocalConfig

    def content(self, url: str) -> str:
        return psql(url, CONTENT)

    def run(self, **changes: Any) -> PipelineResult:
        return run_local(replace(self.config, **changes))

    def is_equal(self) -> bool:
        there = "SELECT to_regclass('customer'), to_regclass('\"Film\"'), to_regclass('film_actor')"
        return len(psql(self.target, there)) > 20 and self.content(self.source) == self.content(self.target)


FILE = """
[source]
tube = "shop"
port = {port}
[tables]
database = "{source}"
include = ["public.*"]
exclude = ["public.replicad*"]
out_of_range = "null"
[downstream.copy]
kind = "postgres"
url = "{target}"
{more}
[run]
engine = "local"
checkpoint = "checkpoint"
{run}
"""


@pytest.fixture
def target_url(database_url: str) -> Iterator[str]:
    """A database beside that of the test."""
    name = database_url.partition("?")[0].rpartition("/")[2]
    psql(database_url, f'CREATE DATABASE "{name}_copy" TEMPLATE template0')
    yield database_url.replace(f"/{name}", f"/{name}_copy", 1)
    psql(database_url, f'DROP DATABASE "{name}_copy" WITH (FORCE)')


@pytest.fixture
def shop(database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path) -> Shop:
    """Three tables, attached and scheduled for a backfill."""
    psql(database_url, SHOP)
    return shop_of(database_url, target_url, daemon, tmp_path)


def shop_of(source: str, target: str, daemon: Daemon, folder: Path, more: str = "", run: str = "") -> Shop:
    file = folder / "shop.toml"
    file.write_text(FILE.format(port=daemon.addresses[0].port, source=source, target=target, more=more, run=run))
    config = load_local(file)
    attach_new(config, create=True)
    return Shop(source, target, config)


@asynccontextmanager
async def running(config: LocalConfig) -> AsyncIterator[None]:
    """The pipeline runs during the block."""
    ended = threading.Event()
    live = replace(config, trigger=0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, partial(run_local, live, ended.is_set)))
        try:
            yield
        finally:
            ended.set()


async def eventually(holds: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not await trio.to_thread.run_sync(holds):
            await trio.sleep(0.1)


async def test_all_tables_of_a_database_come_with_their_keys_and_types(shop: Shop) -> None:
    await eventually_backfilled(shop)
    assert psql(shop.target, "SELECT data_type FROM information_schema.columns WHERE column_name = 'film_id'") == "uuid"
    async with running(shop.config):
        psql(
            shop.source,
            "UPDATE customer SET paid = paid + 1 WHERE id < 20; DELETE FROM customer WHERE id > 290",
            "DELETE FROM film_actor WHERE actor = 3; UPDATE film_actor SET actor = 100 + actor WHERE actor = 1",
        )
        await eventually(shop.is_equal)


async def eventually_backfilled(shop: Shop) -> None:
    """A run that ends by itself has the backfill that is scheduled, however soon after that it begins."""
    await trio.to_thread.run_sync(shop.run)
    assert shop.is_equal()


async def test_a_run_that_ends_by_itself_has_every_backfill_that_was_scheduled(shop: Shop) -> None:
    await eventually_backfilled(shop)
    psql(shop.target, "DELETE FROM customer WHERE id < 100; DELETE FROM film_actor")
    psql(shop.source, "SELECT count(*) FROM tube.tube_backfill_request('shop', NULL, 0, 100)")
    await eventually_backfilled(shop)
    psql(shop.target, "DROP TABLE customer")
    await trio.to_thread.run_sync(partial(shop.run, rebuild=True))
    assert shop.is_equal()


async def test_a_role_that_may_not_read_which_backfills_run_is_told_and_waits_for_those_that_are_scheduled(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The rights are those that docs/spark.md asks for."""
    await eventually_backfilled(shop)
    role = f"reader_{os.getpid()}"
    grants = f"GRANT USAGE ON SCHEMA tube TO {role}; GRANT SELECT ON tube.shop TO {role}"
    psql(shop.source, f"CREATE ROLE {role} LOGIN; {grants}")
    url = as_role(shop.source, role)
    awaited = preflight.AwaitedBackfills(url, "tube", "shop")
    try:
        assert not await trio.to_thread.run_sync(awaited.look)
        assert caplog.text.count("backfills_not_seen") == 1
        assert "GRANT SELECT ON tube.tube_backfill" in caplog.text
        psql(shop.source, "SELECT count(*) FROM tube.tube_backfill_request('shop', NULL, 0, 100)")
        assert await trio.to_thread.run_sync(awaited.look)
        assert caplog.text.count("backfills_not_seen") == 1
        assert not await trio.to_thread.run_sync(preflight.AwaitedBackfills(url, "tube", "elsewhere").look)
    finally:
        psql(shop.source, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_run_that_ends_by_itself_fails_if_a_backfill_does_not_go_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "STALLED", 2.0)
    await eventually_backfilled(shop)
    with psycopg.connect(shop.source) as other:
        other.execute("UPDATE \"Film\" SET title = 'open'")  # a backfill waits for the end of every writer
        psql(shop.source, "SELECT count(*) FROM tube.tube_backfill_request('shop', NULL, 0, 100)")
        with pytest.raises(TubeRefused, match=r'"Film".* has not gone on for 2 s'):
            await trio.to_thread.run_sync(shop.run)
    monkeypatch.undo()
    await eventually_backfilled(shop)


@pytest.mark.parametrize("found_by", first(1, ["the flush", "the next batch"]))
async def test_batches_that_a_crash_of_the_downstream_takes_away_are_written_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """They are visible before they are on the disk, and acked only then."""
    may_flush, calls = threading.Event(), []
    flush = PostgresTables.flush

    def waits(self: PostgresTables, query: str) -> None:
        calls.append(query)
        may_flush.wait(PATIENCE)
        flush(self, query)

    if found_by == "the next batch":
        monkeypatch.setattr(writing, "FLUSH_EVERY", 1000.0)
        monkeypatch.setattr(writing, "FLUSH_IDLE", 1000.0)
    await eventually_backfilled(shop)
    assert psql(shop.source, "SELECT count(*) FROM tube.shop") == "0"
    monkeypatch.setattr(PostgresTables, "flush", waits)
    async with running(shop.config):
        psql(shop.source, "UPDATE customer SET name = 'later' WHERE id < 10; DELETE FROM film_actor WHERE actor = 3")
        await eventually(shop.is_equal)
        if found_by == "the flush":
            await eventually(lambda: bool(calls))
        assert psql(shop.source, "SELECT count(*) > 0 FROM tube.shop") == "t"
        psql(
            shop.target,
            "UPDATE customer SET name = 'before' WHERE id < 10;"
            "UPDATE replicad_pipeline.replicad_batches SET batch = batch - 1;"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        if found_by == "the next batch":
            psql(shop.source, "UPDATE customer SET name = 'last' WHERE id = 300")
        may_flush.set()
        await eventually(shop.is_equal)
        if found_by == "the flush":
            await eventually(lambda: psql(shop.source, "SELECT count(*) FROM tube.shop") == "0")
    assert psql(shop.source, "SELECT count(*) FROM tube.shop") == "0"
    assert shop.is_equal()


@pytest.mark.parametrize("consistency", first(1, ["rows", "transaction"]))
async def test_rows_that_are_longer_than_a_piece_reach_a_downstream_in_the_same_database(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, consistency: str
) -> None:
    """A look-up that is given up closes its connection, and neither the downstream's nor, for ever, the snapshot's."""
    maker = SinkMaker("postgres", lambda _schema, table: PostgresSink(shop.source, f'dw."{table}"'), shop.source)
    config = replace(shop.config, downstreams={"same": maker}, consistency=consistency)
    monkeypatch.setattr(enrich, "PIECE", 1 << 20)
    content = "SELECT md5(string_agg(name, ',' ORDER BY id)) FROM {}customer"
    async with running(config):
        await eventually(lambda: psql(shop.source, "SELECT to_regclass('dw.customer') IS NOT NULL") == "t")
        psql(shop.source, "UPDATE customer SET name = repeat(md5(id::text), 10000) WHERE id <= 40")
        await eventually(
            lambda: psql(shop.source, content.format("dw.")) == psql(shop.source, content.format("")) != ""
        )


async def test_a_column_downstream_that_gets_a_narrower_type_ends_the_run(shop: Shop) -> None:
    """The types of the columns are not looked up for each batch; a change of them is seen all the same."""
    with pytest.RaisesGroup(
        pytest.RaisesExc(DownstreamError, match="cannot hold the rows unchanged"), flatten_subgroups=True
    ):
        async with running(replace(shop.config, tries=1)):
            await eventually(shop.is_equal)
            psql(shop.target, "ALTER TABLE customer ALTER COLUMN paid TYPE numeric(8, 1)")
            psql(shop.source, "UPDATE customer SET paid = 1.25 WHERE id = 5")
            await trio.sleep_forever()
    assert psql(shop.target, "SELECT paid FROM customer WHERE id = 5") == "1.3"


async def test_a_downstream_that_was_put_back_is_noticed(shop: Shop) -> None:
    await eventually_backfilled(shop)
    psql(shop.target, "CREATE TABLE saved AS SELECT * FROM replicad_pipeline.replicad_batches")
    psql(shop.source, "UPDATE customer SET name = 'later' WHERE id < 10")
    await eventually_backfilled(shop)
    psql(
        shop.target,
        "UPDATE replicad_pipeline.replicad_batches b SET batch = s.batch FROM saved s WHERE s.query = b.query",
        "UPDATE customer SET name = 'older' WHERE id < 10",
        "DROP TABLE saved",
    )
    with pytest.raises(UsageError, match="put back from an older copy"):
        await trio.to_thread.run_sync(shop.run)
    assert psql(shop.source, "SELECT count(*) FROM tube.tube_lease") == "0", "the next pipeline need not wait for it"
    async with running(replace(shop.config, rebuild=True)):
        await eventually(shop.is_equal)


async def test_a_downstream_and_a_checkpoint_that_were_put_back_together_are_noticed(shop: Shop) -> None:
    """They agree with each other, but the source knows of later batches, whose pods are acked."""
    await eventually_backfilled(shop)
    psql(shop.target, "CREATE TABLE saved AS SELECT * FROM replicad_pipeline.replicad_batches")
    saved = {path: path.read_text() for path in shop.config.checkpoint.iterdir() if path.is_file()}
    psql(shop.source, "UPDATE customer SET name = 'later' WHERE id < 10")
    await eventually_backfilled(shop)
    psql(
        shop.target,
        "UPDATE replicad_pipeline.replicad_batches b SET batch = s.batch FROM saved s WHERE s.query = b.query",
        "UPDATE customer SET name = 'older' WHERE id < 10",
        "DROP TABLE saved",
    )
    for path, text in saved.items():
        path.write_text(text)
    with pytest.raises(UsageError, match="put back together with the checkpoint, or both are new"):
        await trio.to_thread.run_sync(shop.run)
    async with running(replace(shop.config, rebuild=True)):
        await eventually(shop.is_equal)
        await eventually(lambda: psql(shop.source, "SELECT count(*) FROM tube.shop") == "0")
    assert (await trio.to_thread.run_sync(shop.run)).batches == 0


async def test_a_refused_row_is_parked_and_the_others_are_written(shop: Shop) -> None:
    await eventually_backfilled(shop)
    psql(shop.target, "ALTER TABLE customer ADD CHECK (name <> 'bad')")
    psql(shop.source, "UPDATE customer SET name = 'good' WHERE id = 1; UPDATE customer SET name = 'bad' WHERE id = 2")
    async with running(replace(shop.config, tries=2)):
        await eventually(lambda: psql(shop.source, "SELECT count(*) FROM tube.tube_parked") == "1")
        await eventually(lambda: psql(shop.target, "SELECT name FROM customer WHERE id = 1") == "good")
    assert psql(shop.source, "SELECT keys, error FROM tube.tube_parked").startswith("{2}|")


async def test_a_batch_is_a_span_in_the_traces_of_its_rows(shop: Shop, finished: Any) -> None:
    await eventually_backfilled(shop)
    finished.clear()
    one, other = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")
    psql(shop.source, f"UPDATE customer SET name = CASE id WHEN 1 THEN '{one}' ELSE '{other}' END WHERE id < 4")
    config = replace(shop.config, traceparent="name")
    async with running(config):
        await eventually(shop.is_equal)
    batch, *_ = finished.get_finished_spans()
    assert (batch.name, batch.attributes["messaging.destination.name"]) == ("replicad batch", "shop")
    assert (batch.attributes["messaging.batch.message_count"], batch.status.is_unset) == (3, True)
    assert f"{batch.context.trace_id:032x}" == f"{batch.parent.trace_id:032x}"
    assert {f"{span.span_id:016x}" for span in (batch.parent, *(link.context for link in batch.links))} == {
        "a" * 16,
        "b" * 16,
    }
    assert 0 < batch.end_time - batch.start_time < PATIENCE * 1e9
    psql(shop.target, "ALTER TABLE customer ADD CHECK (id <> 5 OR name = 'c5')")
    psql(shop.source, f"UPDATE customer SET name = '{one}' WHERE id = 5")
    finished.clear()
    async with running(replace(config, tries=1)):
        await eventually(lambda: psql(shop.source, "SELECT count(*) FROM tube.tube_parked") == "1")
    failed = finished.get_finished_spans()[0]
    assert (failed.status.is_ok, "customer_check" in failed.status.description) == (False, True)
    assert f"{failed.parent.span_id:016x}" == "a" * 16


async def test_two_downstreams_share_a_touch_and_one_that_fails_holds_nothing(
    database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    psql(database_url, SHOP)
    more = f'[downstream.lake]\nkind = "parquet"\nfolder = "{tmp_path}/lake/{{schema}}.{{table}}"'
    shop = shop_of(database_url, target_url, daemon, tmp_path, more)
    config = replace(shop.config, backlog_after=0.2)
    async with running(config):
        await eventually(shop.is_equal)
        psql(target_url, "ALTER TABLE customer RENAME TO away")
        psql(database_url, "UPDATE customer SET name = 'new' WHERE id <= 5; DELETE FROM customer WHERE id = 6")

        def lake() -> set[str]:
            rows = parquet.table(tmp_path / "lake" / "public.customer").to_pylist()
            return {row["id"] for row in rows if row["name"] == "new"} - {row["id"] for row in rows if row["id"] == 6}

        await eventually(lambda: lake() == {1, 2, 3, 4, 5})
        await eventually(lambda: psql(database_url, "SELECT to_regclass('tube.shop_copy')") != "")
        await eventually(lambda: psql(database_url, "SELECT sum(cardinality(ids)) >= 6 FROM tube.shop_copy") == "t")
        await eventually(lambda: psql(database_url, "SELECT count(*) FROM tube.shop WHERE ids <> '{}'") == "0")
        psql(target_url, "ALTER TABLE away RENAME TO customer")
        await eventually(shop.is_equal)
        await eventually(lambda: psql(database_url, "SELECT count(*) FROM tube.shop_copy") == "0")


async def test_a_lake_rests_after_a_batch_until_enough_has_come(
    database: Database,
    database_url: str,
    target_url: str,
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other downstream does not, and nothing is acked meanwhile; what the lake lacks at the end comes next time."""
    psql(database_url, SHOP)
    more = f'[downstream.lake]\nkind = "delta"\nuri = "{tmp_path}/lake/{{schema}}.{{table}}"'
    shop = shop_of(database_url, target_url, daemon, tmp_path, more)

    def lake() -> int:
        return Lake(str(tmp_path / "lake" / "public.customer")).arrow().to_pydict()["name"].count("new")

    await eventually_backfilled(shop)
    await trio.to_thread.run_sync(shop.run)
    monkeypatch.setattr(writing, "REST", 1e9)
    monkeypatch.setattr(writing, "LONGEST_REST", 2 * PATIENCE)
    monkeypatch.setattr(writing, "ENOUGH", 5)
    async with running(shop.config):
        psql(database_url, "UPDATE customer SET name = 'new' WHERE id = 1")
        await eventually(lambda: lake() == 1)
        for number in range(2, 6):
            psql(database_url, f"UPDATE customer SET name = 'new' WHERE id = {number}")
            await eventually(shop.is_equal)
            assert lake() == 1
        assert psql(database_url, "SELECT count(*) FROM tube.shop WHERE ids <> '{}'") == "4"
        psql(database_url, "UPDATE customer SET name = 'new' WHERE id = 6")
        await eventually(lambda: lake() == 6)
        psql(database_url, "UPDATE customer SET name = 'new' WHERE id = 7")
        await eventually(shop.is_equal)
    await trio.to_thread.run_sync(shop.run)
    assert lake() == 7


@pytest.mark.parametrize("made", ["SCHEMA IF NOT EXISTS dw", "TABLE IF NOT EXISTS made (id bigint PRIMARY KEY)"])
async def test_what_another_session_makes_at_the_same_time_is_there(
    database: Database, database_url: str, made: str
) -> None:
    """As two pipelines that start at once do, or one beside the last statement of a process that was killed."""
    statement = f"CREATE {made}"

    def make() -> None:
        with connection(database_url).cursor() as cursor:
            create_missing(cursor, [statement])
        forget(database_url)

    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
    async with trio.open_nursery() as nursery:
        with psycopg.connect(database_url) as other:
            other.execute(statement)
            nursery.start_soon(trio.to_thread.run_sync, make)
            await eventually(lambda: psql(database_url, blocked) == "1")
            other.commit()


async def test_a_backlog_is_bounded_in_bytes(
    database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    """Five ids of 2 kB, where a backlog may have fifty ids."""
    more = f'[downstream.lake]\nkind = "parquet"\nfolder = "{tmp_path}/lake/{{schema}}.{{table}}"'
    psql(database_url, SHOP)
    shop = shop_of(database_url, target_url, daemon, tmp_path, more)
    config = replace(shop.config, options={**shop.config.options, "keys": "text"}, backlog_ids=50)
    keys = [f"{number:02000}" for number in range(5)]
    row = {"seq": 1, "op": "U", "shard": 1, "ids": keys, "payload": None, "ts": datetime.now(UTC)}
    pods = pa.RecordBatch.from_pylist([row], schema=pods_schema(payload=True, keys="text"))
    backlog = Backlog(config, "copy")
    assert backlog.may_grow()
    backlog.add(TouchChunk.of(1, [pods], Cursor(1, 0)))
    assert not backlog.may_grow()
    after_restart = Backlog(config, "copy")
    assert (after_restart.is_used, after_restart.may_grow()) == (True, False)


FAMILY = """
CREATE TABLE parent (id integer PRIMARY KEY, code text UNIQUE, tag text NOT NULL UNIQUE);
CREATE TABLE child (id integer PRIMARY KEY, parent integer NOT NULL {references});
"""


@pytest.fixture
def family(database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path) -> Shop:
    """Parents and children; downstream their foreign key is not deferrable, and has constraints of its own."""
    psql(database_url, FAMILY.format(references="REFERENCES parent"))
    psql(target_url, FAMILY.format(references="REFERENCES parent"))
    psql(target_url, "ALTER TABLE parent ADD _seq bigint; ALTER TABLE child ADD _seq bigint")
    psql(
        database_url,
        "INSERT INTO parent SELECT n, 'c' || n, 't' || n FROM generate_series(1, 100) n",
        "INSERT INTO child SELECT n, n FROM generate_series(1, 100) n",
    )
    return shop_of(database_url, target_url, daemon, tmp_path)


def relatives(url: str) -> str:
    return psql(url, "SELECT id, code, tag FROM parent ORDER BY 1", "SELECT id, parent FROM child ORDER BY 1")


async def test_foreign_keys_and_unique_values_downstream_hold_no_row_back(family: Shop) -> None:
    def equal() -> bool:
        return relatives(family.source) == relatives(family.target)

    async with running(family.config):
        await eventually(equal)
        psql(
            family.source,
            "INSERT INTO parent VALUES (200, 'new', 'new'); INSERT INTO child VALUES (200, 200)",
            "BEGIN; DELETE FROM child WHERE parent = 7; DELETE FROM parent WHERE id = 7; COMMIT",
            "BEGIN; UPDATE parent SET code = NULL WHERE id = 1; UPDATE parent SET code = 'c1' WHERE id = 2;"
            "UPDATE parent SET code = 'c2' WHERE id = 1; COMMIT",
            "BEGIN; UPDATE parent SET tag = '-' WHERE id = 1; UPDATE parent SET tag = 't1' WHERE id = 2;"
            "UPDATE parent SET tag = 't2' WHERE id = 1; COMMIT",
        )
        await eventually(equal)
    assert psql(family.source, "SELECT count(*) FROM tube.tube_parked") == "0"


async def test_a_child_without_its_parent_waits_and_comes_with_it(family: Shop) -> None:
    async with running(family.config):
        await eventually(lambda: relatives(family.source) == relatives(family.target))
    psql(family.source, "ALTER TABLE child DROP CONSTRAINT child_parent_fkey", "INSERT INTO child VALUES (300, 300)")
    psql(family.source, "INSERT INTO child VALUES (301, 1)")
    async with running(family.config):
        await eventually(lambda: psql(family.target, "SELECT count(*) FROM child WHERE id = 301") == "1")
        waiting = "SELECT tbl, key, waits_for FROM replicad_pipeline.replicad_waiting"
        assert psql(family.target, waiting) == "public.child|300|public.parent"
        psql(family.source, "INSERT INTO parent VALUES (300, 'late', 'late')")
        await eventually(lambda: relatives(family.source) == relatives(family.target))
        assert psql(family.target, waiting) == ""
    assert psql(family.source, "SELECT count(*) FROM tube.tube_parked") == "0"


async def test_init_writes_the_file_attaches_and_backfills(
    database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    psql(database_url, SHOP, "CREATE TABLE audit_log (at timestamptz)")
    file, port = tmp_path / "shop.toml", str(daemon.addresses[0].port)
    words = ["pipeline", "init", str(file), "--database", database_url, "--to", target_url, "--port", port]
    refused = await replicad_async(*words)
    assert refused.returncode != 0
    assert "public.audit_log" in refused.stderr
    assert not file.exists()
    done = await replicad_async(*words, "--exclude", "public.audit_*", "--exclude", "public.replicad*")
    assert done.returncode == 0, done.stderr
    assert "3 tables are attached" in done.stdout
    assert len(file.read_text().splitlines()) <= 25
    shop = Shop(database_url, target_url, load_local(file))
    async with running(shop.config):
        await eventually(shop.is_equal)
        psql(database_url, "CREATE TABLE later (id integer PRIMARY KEY); INSERT INTO later VALUES (7)")
        await eventually(lambda: psql(target_url, "SELECT to_regclass('later')") != "")
        await eventually(lambda: psql(target_url, "SELECT id FROM later") == "7")


async def test_a_file_for_one_table_of_each_shard_works_with_this_engine_too(
    database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    psql(
        database_url,
        "SELECT tube.tube_ensure_exists('cities')",
        "CREATE SCHEMA s_1; CREATE SCHEMA s_2; CREATE TABLE s_1.city (id integer PRIMARY KEY, name text)",
        "CREATE TABLE s_2.city (id integer PRIMARY KEY, name text)",
        "SELECT tube.tube_table_ensure_attached('cities', t) FROM unnest(ARRAY['s_1.city', 's_2.city']::regclass[]) t",
        "INSERT INTO s_1.city SELECT n, 'a' FROM generate_series(1, 20) n; INSERT INTO s_2.city VALUES (1, 'b')",
        "DELETE FROM s_1.city WHERE id > 10",
    )
    file = tmp_path / "cities.toml"
    file.write_text(
        f'''
[source]
tube = "cities"
port = {daemon.addresses[0].port}
[enrich]
database = "{database_url}"
table = "s_{{shard}}.city"
[downstream]
kind = "postgres"
url = "{target_url}"
table = "cities"
[run]
engine = "local"
checkpoint = "checkpoint"
'''
    )
    done = await replicad_async("pipeline", "run", str(file))
    assert done.returncode == 0, done.stderr
    found = psql(target_url, "SELECT _shard, count(*), max(name) FROM cities GROUP BY 1 ORDER BY 1")
    assert found == "1|10|a\n2|1|b"
    assert psql(database_url, "SELECT count(*) FROM tube.cities") == "0"


@pytest.mark.long
async def test_a_table_that_is_dropped_behind_its_backfill_stops_no_other(shop: Shop, database: Database) -> None:
    await eventually_backfilled(shop)
    await trio.to_thread.run_sync(shop.run)
    psql(shop.source, "SELECT count(*) FROM tube.tube_backfill_request('shop', NULL, 0, 100)")
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.shop WHERE cardinality(ids) = 0") < 6:
            await trio.sleep(0.05)
    psql(shop.source, "DROP TABLE film_actor; UPDATE customer SET name = 'later' WHERE id < 10")
    async with running(shop.config):
        await eventually(lambda: psql(shop.target, "SELECT count(*) FROM customer WHERE name = 'later'") == "9")
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT count(*) FROM tube.shop"):
                await trio.sleep(0.05)
    assert psql(shop.target, "SELECT count(*) FROM film_actor") == "50", "no row downstream is taken for deleted"


async def test_a_lake_of_changes_follows_and_is_compacted_beside_the_pipeline(
    database: Database, database_url: str, target_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    psql(database_url, SHOP)
    more = '[downstream.lake]\nkind = "delta"\nuri = "lake/{schema}.{table}"\nmode = "changes"'
    shop = shop_of(database_url, target_url, daemon, tmp_path, more)
    folder = tmp_path / "lake" / "public.customer"

    def is_followed(statement: str, expected: list[tuple[int, str]]) -> Callable[[], bool]:
        psql(shop.source, statement)

        def holds() -> bool:
            if not (folder / "_delta_log").exists():
                return False
            rows = Lake(str(folder)).arrow().sort_by("id").to_pylist()
            return [(row["id"], row["name"]) for row in rows[-2:]] == expected

        return holds

    async with running(shop.config):
        await eventually(is_followed("UPDATE customer SET name = 'new' WHERE id = 299", [(299, "new"), (300, "c300")]))
        await eventually(is_followed("DELETE FROM customer WHERE id = 300", [(298, "c298"), (299, "new")]))
        done = await replicad_async("pipeline", "compact", str(tmp_path / "shop.toml"))
        assert done.returncode == 0, done.stderr
        assert f"{folder}: " in done.stdout
        await eventually(is_followed("DELETE FROM customer WHERE id = 298", [(297, "c297"), (299, "new")]))


async def test_few_pods_are_read_as_lines_and_many_as_blocks_and_none_twice(
    items: Database, database_url: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    del items
    forms: list[str] = []
    for name in ("pod_blocks", "pod_chunks"):
        call = getattr(BlockingClient, name)
        monkeypatch.setattr(BlockingClient, name, lambda *words, name=name, call=call, **bounds: (
            forms.append(name), call(*words, **bounds))[1])  # fmt: skip
    address = daemon.addresses[0]
    options = SourceOptions(host=address.host, port=address.port, tube="items")
    counts: list[int] = []

    def read() -> list[int]:
        found: list[int] = []
        with TubeHold(options, holder="test") as hold, closing(PodStream(options, "test/pods")) as stream:
            hold.partitions()
            for pods in (3, 3, 100, 2, 1):
                upto = len(found) + pods
                psql(database_url, *(f"INSERT INTO items VALUES ({n}, 0)" for n in range(len(found) + 1, upto + 1)))
                while len(found) < upto:
                    chunk = stream.read(hold.term(), backfill=True, wait=5.0)
                    assert chunk is not None
                    counts.append(chunk.count)
                    found += chunk.touches.column("id").to_pylist()
            assert stream.read(hold.term(), backfill=True, wait=0.0) is None
        return found

    assert sorted(await trio.to_thread.run_sync(read)) == list(range(1, 110))
    assert forms == ["pod_blocks", *("pod_chunks" if count < FEW_PODS else "pod_blocks" for count in counts)]
    assert FEW_PODS in counts, "an answer of lines has no more pods, however many there are"
