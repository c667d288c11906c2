"""The tables of four applications, attached with their primary keys to one tube for each schema: all drain equal.

Only the names of the tables and the names and types of their keys are those of the applications: Pagila, Chinook,
Synapse (schema 72, its tables with primary keys), and Kill Bill, whose tables have a number and a unique uuid each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio

from replicad.client.async_client import AsyncClient, open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.lengths import first

PAGILA = """
actor: actor_id integer
address: address_id integer
category: category_id integer
city: city_id integer
country: country_id integer
customer: customer_id integer
film: film_id integer
film_actor: actor_id integer, film_id integer
film_category: film_id integer, category_id integer
film_embedding: film_id integer
inventory: inventory_id integer
language: language_id integer
payment: payment_date timestamptz, payment_id integer
rental: rental_id integer
staff: staff_id integer
store: store_id integer
"""
CHINOOK = """
album: album_id integer
artist: artist_id integer
customer: customer_id integer
employee: employee_id integer
genre: genre_id integer
invoice: invoice_id integer
invoice_line: invoice_line_id integer
media_type: media_type_id integer
playlist: playlist_id integer
playlist_track: playlist_id integer, track_id integer
track: track_id integer
"""
SYNAPSE = """
access_tokens: id bigint
account_validity: user_id text
application_services_state: as_id text
dehydrated_devices: user_id text
destination_rooms: destination text, room_id text
destinations: destination text
event_auth_chain_to_calculate: event_id text
event_auth_chains: event_id text
event_expiry: event_id text
event_labels: event_id text, label text
event_reports: id bigint
ex_outlier_stream: event_stream_ordering bigint
instance_map: instance_id integer
open_id_tokens: token text
partial_state_rooms: room_id text
push_rules: id bigint
push_rules_enable: id bigint
pusher_throttle: pusher bigint, room_id text
pushers: id bigint
refresh_tokens: id bigint
room_retention: room_id text, event_id text
room_stats_current: room_id text
rooms: room_id text
state_groups: id bigint
threepid_validation_session: session_id text
threepid_validation_token: token text
user_stats_current: user_id text
users_to_send_full_presence_to: user_id text
"""
KILL_BILL = """
accounts: id uuid
account_history: record_id bigint
bundles: id uuid
invoices: id uuid
invoice_items: id uuid
payments: id uuid
payment_history: record_id bigint
subscriptions: id uuid
tenants: id uuid
tags: id uuid
"""
SCHEMAS = {"pagila": PAGILA, "chinook": CHINOOK, "synapse": SYNAPSE, "kill_bill": KILL_BILL}
VALUES = {  # SQL on the number n for a new value
    "integer": "n",
    "bigint": "n + 3000000000",
    "text": "'@user ' || n || ':\"example\"'",
    "uuid": "md5(n::text)::uuid",
    "timestamptz": "'2026-03-29 00:30:00+00'::timestamptz + n * interval '1 hour'",
}


@pytest.fixture
def open_worker_client(daemon: Daemon) -> Callable[[], AbstractAsyncContextManager[AsyncClient]]:
    address = daemon.addresses[0]
    return lambda: open_client(address.host, address.port, name="worker")


def columns_of(key: str) -> list[tuple[str, str]]:
    """The names and types of the columns of a key."""
    return [(name, type) for name, _, type in (column.partition(" ") for column in key.split(", "))]


def text_of(key: str) -> str:
    """SQL on a row for the id of its key in a tube of texts."""
    names = [f"{name}::text" for name, _ in columns_of(key)]
    return names[0] if len(names) == 1 else f"json_build_array({', '.join(names)})::text"


@pytest.mark.parametrize("schema", first(1, SCHEMAS))
async def test_every_table_of_an_application_is_attached_by_its_primary_key_and_drains_equal(
    database: Database, open_worker_client: Callable[[], AbstractAsyncContextManager[AsyncClient]], schema: str
) -> None:
    tables = [line.split(": ") for line in SCHEMAS[schema].strip().splitlines()]
    await database.execute(f"CREATE SCHEMA {schema}; SELECT tube.tube_ensure_exists('all', 3, keys => 'text')")
    for shard, (table, key) in enumerate(tables):
        columns = columns_of(key)
        await database.execute(
            f"CREATE TABLE {schema}.{table} ({key}, v integer, PRIMARY KEY ({', '.join(name for name, _ in columns)}))"
            + (" PARTITION BY RANGE (payment_date)" if table == "payment" else "")
        )
        if table == "payment":
            await database.execute(f"CREATE TABLE {schema}.payment_1 PARTITION OF {schema}.payment DEFAULT")
        rows = f"SELECT {', '.join(VALUES[type] for _, type in columns)}, n FROM generate_series"
        await database.execute(f"INSERT INTO {schema}.{table} {rows}(1, 5) n")
        await database.execute(f"SELECT tube.tube_table_ensure_attached('all', '{schema}.{table}', {shard})")
        await database.execute(f"INSERT INTO {schema}.{table} {rows}(6, 12) n")
        await database.execute(f"UPDATE {schema}.{table} SET v = v * 10 WHERE v > 8")
        await database.execute(f"DELETE FROM {schema}.{table} WHERE v = 7")
    downstream: dict[tuple[int, str], int] = {}

    async def handle(batch: Batch) -> None:
        for touch in batch.touches:
            table, key = tables[touch.shard]
            found = await database.fetch(f"SELECT v FROM {schema}.{table} WHERE {text_of(key)} = $1", touch.id)
            downstream.pop((touch.shard, touch.id), None)
            if found:
                downstream[touch.shard, touch.id] = found[0]["v"]

    settings = WorkerSettings(poll=1.0, backoff_first=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "all", handle, settings=settings).run)
        await database.execute("SELECT tube.tube_backfill_schedule('all', NULL, 0, 1000)")
        with trio.fail_after(PATIENCE):
            while await database.fetch_value('SELECT count(*) FROM tube."all"'):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    expected = {
        (shard, row["id"]): row["v"]
        for shard, (table, key) in enumerate(tables)
        for row in await database.fetch(f"SELECT {text_of(key)} AS id, v FROM {schema}.{table}")
    }
    assert len(expected) == 11 * len(tables)
    assert downstream == expected
    assert not await database.fetch("SELECT FROM tube.tube_parked")
