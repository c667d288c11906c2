"""Several tables in one tube: a shard of its own for each, which says of which table an id is."""

from __future__ import annotations

import time

import pytest
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import TubeRefused
from replicad.postgres.bridge import Database
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import OpenClient

SHOP = """
CREATE TABLE customer (id bigint PRIMARY KEY, name text);
CREATE TABLE "Film" (film_id uuid PRIMARY KEY, title text);
CREATE TABLE film_actor (actor integer, film uuid, PRIMARY KEY (actor, film));
CREATE TABLE audit_log (at timestamptz);
"""
QUICK = WorkerSettings(poll=1.0, lease_ttl=5.0)


@pytest.fixture
async def shop(database: Database, database_url: str, daemon: Daemon) -> Database:
    """A database with the tables of SHOP, all but one of them in the tube `shop`."""
    await database.execute(SHOP)
    await database.execute("SELECT tube.tube_ensure_exists('shop')")
    done = await replicad_async(
        "tubes", "attach", "shop", "public.*", "--exclude", "public.audit_*", "--database", database_url
    )
    assert done.returncode == 0, done.stderr
    return database


async def shards(database: Database) -> dict[str, int]:
    rows = await database.fetch("SELECT * FROM tube.tube_tables_of('shop')")
    return {row["tbl"]: row["shard"] for row in rows}


async def test_a_pattern_attaches_tables_of_all_keys_each_with_a_shard_of_its_own(
    shop: Database, database_url: str
) -> None:
    found = await shards(shop)
    assert sorted(found) == ['public."Film"', "public.customer", "public.film_actor"]
    assert len(set(found.values())) == 3
    assert await shop.fetch_value("SELECT keys FROM tube.tube_registry") == "text"
    await shop.execute("CREATE TABLE rental (id integer PRIMARY KEY)")
    again = await replicad_async(
        "tubes", "attach", "shop", "public.*", "--exclude", "public.audit_*", "--database", database_url
    )
    assert again.returncode == 0, again.stderr
    after = await shards(shop)
    assert found.items() <= after.items(), "a table keeps its shard"
    assert after["public.rental"] == max(found.values()) + 1


async def test_a_shard_is_never_given_to_another_table(shop: Database) -> None:
    before = await shards(shop)
    last = max(before, key=lambda name: before[name])
    await shop.execute(f"DROP TABLE {last}")
    await shop.execute("CREATE TABLE newer (id integer PRIMARY KEY)")
    await shop.execute(
        "SELECT tube.tube_table_ensure_attached('shop', 'newer', tube.tube_shard_ensure('shop', 'newer'))"
    )
    after = await shards(shop)
    assert after["public.newer"] == before[last] + 1
    assert after[last] == before[last], "it is known of which table its pods are"


async def test_tables_without_a_key_are_named_and_nothing_is_attached(shop: Database, database_url: str) -> None:
    done = await replicad_async("tubes", "attach", "shop", "public.audit*", "--database", database_url)
    assert done.returncode != 0
    assert "public.audit_log" in done.stderr
    assert "--exclude" in done.stderr
    assert len(await shards(shop)) == 3


async def test_a_routing_and_own_shards_exclude_each_other(database: Database, daemon: Daemon) -> None:
    await database.execute(SHOP)
    await database.execute("SELECT tube.tube_ensure_exists('shop')")
    await database.execute("SELECT tube.tube_table_ensure_attached('shop', 'customer', routing => 'id::integer')")
    with pytest.raises(TubeRefused, match="a shard of its own"):
        await database.execute("""SELECT tube.tube_shard_ensure('shop', '"Film"')""")


async def test_a_worker_learns_of_which_table_each_touch_is(shop: Database, open_worker_client: OpenClient) -> None:
    await shop.execute("INSERT INTO customer VALUES (1, 'a'); INSERT INTO film_actor VALUES (1, md5('f')::uuid)")
    await shop.execute("""INSERT INTO "Film" VALUES (md5('f')::uuid, 'f')""")
    seen: dict[str | None, set[str]] = {}
    done = trio.Event()

    async def handle(batch: Batch) -> None:
        for touch in batch.touches:
            seen.setdefault(touch.table, set()).add(touch.id)
        if len(seen) == 3:
            done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "shop", handle, settings=QUICK).run)
        with trio.fail_after(PATIENCE):
            await done.wait()
        nursery.cancel_scope.cancel()
    film = await shop.fetch_value("SELECT md5('f')::uuid::text")
    assert seen == {"public.customer": {"1"}, 'public."Film"': {film}, "public.film_actor": {f'["1", "{film}"]'}}


async def test_one_table_is_backfilled_alone(shop: Database, database_url: str) -> None:
    await shop.execute("INSERT INTO customer SELECT n, '' FROM generate_series(1, 3) n; DELETE FROM tube.shop")
    done = await replicad_async("tubes", "backfill", "shop", "--table", "public.customer", "--database", database_url)
    assert done.returncode == 0, done.stderr
    assert "1 shard scheduled" in done.stdout
    mine = (await shards(shop))["public.customer"]
    with trio.fail_after(PATIENCE):
        while await shop.fetch_value("SELECT NOT coalesce(bool_or(finished), false) FROM tube.tube_backfill"):
            await trio.sleep(0.05)
    assert await shop.fetch_value("SELECT array_agg(DISTINCT shard) FROM tube.shop") == [mine]


@pytest.mark.long
async def test_three_hundred_tables_are_attached_within_a_minute(
    database: Database, database_url: str, daemon: Daemon
) -> None:
    await database.execute(
        "DO $$ BEGIN FOR n IN 1..300 LOOP EXECUTE format('CREATE TABLE many_%s (id integer PRIMARY KEY)', n);"
        " END LOOP; END $$"
    )
    await database.execute("SELECT tube.tube_ensure_exists('shop')")
    begun = time.monotonic()
    done = await replicad_async("tubes", "attach", "shop", "public.many_*", "--database", database_url)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 60
    assert await database.fetch_value("SELECT count(DISTINCT shard) FROM tube.tube_attachment") == 300
