"""Streams of changes through a daemon: snapshots, events over HTTP, troubles, and copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.changes import ChangeOp, TableCopy, apply_changes, read_changes
from replicad.client.events import RowBatch
from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Database
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.sse import event_source

from .test_http import ANY_PORT, ask

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


@pytest.fixture
def paces() -> Paces:
    return replace(Paces(), streams=StreamIntervals(changes=0.05))


@pytest.fixture
async def orders(database: Database) -> Registry:
    """A table with two rows, and the stream of its changes; a snapshot is asked for."""
    await database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer integer, note text);"
        "INSERT INTO orders VALUES (1, 7), (2, 8)"
    )
    registry = Registry(database)
    await registry.add_changes("orders", "public.orders", RecordedChanges(old=True, filters=("customer",)))
    await registry.request_snapshot("orders")
    return registry


async def test_a_daemon_sends_the_snapshot_and_changes_as_events_of_their_kind(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    async with start_daemon() as daemon, event_source(daemon.http, "/streams/orders/live?after=EARLIEST") as source:
        await source.until("read")
        await source.until("read")
        await database.execute("INSERT INTO orders VALUES (3, 7, 'x')")
        await database.execute("UPDATE orders SET note = 'y' WHERE id = 3")
        await database.execute("DELETE FROM orders WHERE id = 3")
        await database.execute("TRUNCATE orders")
        events = [await source.until(name) for name in ("insert", "update", "delete", "truncate")]
        assert [event.data["row"].get("key") for event in events] == [3, 3, 3, None]
        assert events[1].data["row"]["old"] == {"id": 3, "customer": 7, "note": "x"}
        page = await ask(daemon.http, "/streams/orders/rows?after=EARLIEST&limit=300")
        assert '"op":"r"' in page.text


async def test_a_copy_in_postgres_follows_and_resumes_through_a_restart(
    orders: Registry, database: Database, database_url: str, start_daemon: Start
) -> None:
    await database.execute("CREATE TABLE copied (LIKE orders INCLUDING ALL)")
    token: Any = "EARLIEST"
    with psycopg.connect(database_url) as connection:
        cursor = connection.cursor()
        copy = TableCopy(cursor, "copied", ("id",), mark="%s")
        for turn in range(2):
            await database.execute(
                f"INSERT INTO orders SELECT i, i % 9, 'n' FROM generate_series({turn}10, {turn}99) AS i;"
                f"UPDATE orders SET id = -id WHERE id % 7 = 0; DELETE FROM orders WHERE id % 5 = {turn}"
            )
            async with start_daemon() as daemon:
                with trio.fail_after(PATIENCE):
                    while any(one.finished_at is None for one in await orders.snapshots()):
                        await trio.sleep(0.02)
                last = await database.fetch_value("SELECT max(id) FROM replicad.change_1")
                async with (
                    open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client,
                    client.follow({"orders": str(token)}) as follower,
                ):
                    async for event in follower:
                        assert isinstance(event, RowBatch)
                        apply_changes(copy, read_changes(event))
                        token = event.token
                        if token == last:
                            break
            connection.commit()
            for one, other in (("orders", "copied"), ("copied", "orders")):
                assert await database.fetch(f"SELECT * FROM {one} EXCEPT SELECT * FROM {other}") == []


async def test_disabled_triggers_are_a_trouble_until_all_rows_are_sent_anew(
    orders: Registry, database: Database, database_url: str, start_daemon: Start
) -> None:
    async with start_daemon() as daemon:
        await database.execute("ALTER TABLE orders DISABLE TRIGGER ALL; INSERT INTO orders VALUES (3)")
        with trio.fail_after(PATIENCE):
            while (why := daemon.troubles.why("changes", "orders")) is None:
                await daemon.troubles.next_change().wait()
        assert "replicad streams snapshot orders --anew" in why
        done = await replicad_async("streams", "snapshot", "orders", "--anew", "--database", database_url)
        assert "has 3 rows" in done.stdout
        with trio.fail_after(PATIENCE):
            while daemon.troubles.why("changes", "orders") is not None:
                await daemon.troubles.next_change().wait()


async def test_the_commands_add_and_remove_a_stream_of_changes(database: Database, database_url: str) -> None:
    await database.execute("CREATE TABLE t (id integer PRIMARY KEY, a text); INSERT INTO t VALUES (1), (2)")
    add = ("streams", "add", "t", "--table", "public.t", "--database", database_url)
    refused = await replicad_async(*add)
    assert refused.returncode == 2
    assert "--changes" in refused.stderr
    refused = await replicad_async(*add, "--id", "id", "--old")
    assert "belong to --changes" in refused.stderr
    done = await replicad_async(*add, "--changes", "--snapshot", "--filter", "a", "--columns", "a")
    assert "the snapshot has 2 rows" in done.stdout, done.stderr
    again = await replicad_async(*add, "--changes", "--snapshot", "--filter", "a", "--columns", "a")
    assert "is registered already" in again.stdout
    removed = await replicad_async("streams", "remove", "t", "--yes", "--database", database_url)
    assert "with its triggers on public.t" in removed.stdout


def test_the_operations_of_changes_have_different_letters() -> None:
    assert len({op.value[0] for op in ChangeOp}) == len(ChangeOp)
