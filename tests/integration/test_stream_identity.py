"""A stream follows the table that its user meant. Where the name that was given leads to another table, or the ids may
be rows of another table, the stream stops before the first such id, says what to do, and goes on when that is done.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import count

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import RowBatch
from replicad.errors import StreamRefused
from replicad.positions.horizon import Horizon
from replicad.postgres.bridge import Database
from replicad.streams import status
from replicad.streams.registry import Registry, horizon_source
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

NEW = "CREATE TABLE orders_new (LIKE orders INCLUDING ALL); INSERT INTO orders_new SELECT * FROM orders;"
SWAP = "ALTER TABLE orders RENAME TO orders_old; ALTER TABLE orders_new RENAME TO orders;"
INSERT = "INSERT INTO orders (body) SELECT 'new' FROM generate_series(1, 5)"
SWAPS = {  # what is done to the table, and whether rows of another table may then have ids of the stream
    "renamed": f"{NEW} BEGIN; {SWAP} ALTER SEQUENCE orders_id_seq OWNED BY orders.id; COMMIT; {INSERT}",
    "renamed, with rows in the same transaction": f"{NEW} BEGIN; {SWAP} {INSERT}; COMMIT",
    "schema renamed": "CREATE SCHEMA app_new; CREATE TABLE app_new.orders (LIKE orders INCLUDING ALL);"
    f"BEGIN; ALTER SCHEMA app RENAME TO app_old; ALTER SCHEMA app_new RENAME TO app; COMMIT; {INSERT}",
    "set schema": f"{NEW} CREATE SCHEMA old; BEGIN; ALTER TABLE orders SET SCHEMA old;"
    f"ALTER TABLE app.orders_new RENAME TO orders; COMMIT; {INSERT}",
    "a view": f"{NEW} BEGIN; ALTER TABLE orders RENAME TO orders_old; CREATE VIEW orders AS SELECT * FROM orders_new;"
    f"ALTER VIEW orders ALTER id SET DEFAULT nextval('orders_id_seq'); COMMIT; {INSERT}",
    "the sequence feeds another table": "CREATE TABLE other (id bigint DEFAULT nextval('orders_id_seq'), body text);"
    "INSERT INTO other (body) SELECT 'new' FROM generate_series(1, 5)",
    "the default is a function": "CREATE FUNCTION snow() RETURNS bigint LANGUAGE sql AS"
    " $$ SELECT (nextval('app.orders_id_seq') << 16) | 7 $$; ALTER TABLE orders ALTER id SET DEFAULT snow();" + INSERT,
}
HARMLESS = {
    "renamed only": f"ALTER TABLE orders RENAME TO purchases; {INSERT.replace('orders', 'purchases')}",
    "a partition is attached": "CREATE TABLE part (LIKE orders INCLUDING ALL); ALTER TABLE part INHERIT orders;"
    + INSERT,
    "a column is added": "ALTER TABLE orders ADD COLUMN more int DEFAULT 1;" + INSERT,
    "the sequence is renamed": "ALTER SEQUENCE orders_id_seq RENAME TO ids; CREATE SEQUENCE orders_id_seq;" + INSERT,
}


@pytest.fixture
async def orders(database: Database) -> Database:
    await database.execute(
        "CREATE SCHEMA app; CREATE TABLE app.orders (id bigserial PRIMARY KEY, body text);"
        "INSERT INTO app.orders (body) SELECT 'old' FROM generate_series(1, 20)"
    )
    await Registry(database).add("orders", "app.orders", "id")
    return database


async def run(db: Database, sql: str) -> None:
    await db.execute(f"SET search_path = app; {sql}; RESET search_path")


@pytest.mark.parametrize("kind", SWAPS)
async def test_no_position_passes_an_id_that_may_be_a_row_of_another_table(orders: Database, kind: str) -> None:
    """The poll itself finds out: its clock stands still, so that no check is due."""
    async with Horizon(orders, now=lambda: 0.0) as horizon:
        stream = await Registry(orders).load_stream("orders")
        horizon.watch("orders", horizon_source(stream))
        assert (await horizon.poll())["orders"].position == 20
        await run(orders, SWAPS[kind])
        for _ in range(3):
            reading = (await horizon.poll())["orders"]
            assert reading.position == 20
            assert isinstance(reading.refused, StreamRefused), kind
    [found] = (await status.overview(orders)).streams
    assert found.state != "ok"
    assert found.problem is not None
    assert str(reading.refused) == f'stream "orders" waits: {found.stream.fault}'


@pytest.mark.parametrize("kind", HARMLESS)
async def test_what_leaves_the_rows_where_they_are_stops_nothing(orders: Database, kind: str) -> None:
    async with Horizon(orders, now=lambda: 0.0) as horizon:
        stream = await Registry(orders).load_stream("orders")
        horizon.watch("orders", horizon_source(stream))
        assert (await horizon.poll())["orders"].position == 20
        await run(orders, HARMLESS[kind])
        reading = (await horizon.poll())["orders"]
        assert (reading.refused, reading.position) == (None, 25)
    assert (await Registry(orders).load_stream("orders")).fault is None


SWAPPED_POSITIONS = (
    "CREATE TABLE at_new (LIKE at INCLUDING ALL); INSERT INTO at_new SELECT * FROM at;"
    "BEGIN; ALTER TABLE at RENAME TO at_old; ALTER TABLE at_new RENAME TO at; COMMIT"
)


@pytest.mark.parametrize("follows", ["the new one", "the old one", "renamed back"])
async def test_a_table_of_positions_that_is_another_one_stops_its_stream_until_somebody_says_which_counts(
    orders: Database, database_url: str, follows: str
) -> None:
    await Registry(orders).remove("orders")
    await orders.execute(
        "CREATE TABLE app.at (stream_name text, instance_name text, stream_id bigint);"
        "INSERT INTO app.at VALUES ('orders', 'master', 20)"
    )
    await Registry(orders).add("orders", "app.orders", "id", method="positions_table", positions_table="app.at")
    clock = count()
    async with Horizon(orders, now=lambda: float(next(clock))) as horizon:
        horizon.watch("orders", horizon_source(await Registry(orders).load_stream("orders")))
        assert (await horizon.poll())["orders"].position == 20
        await run(orders, SWAPPED_POSITIONS)
        await orders.execute("UPDATE app.at SET stream_id = 25; UPDATE app.at_old SET stream_id = 23")
        with trio.fail_after(PATIENCE):
            while (reading := (await horizon.poll())["orders"]).refused is None:
                pass
    stream = await Registry(orders).load_stream("orders")
    assert "app.at is another relation now; the positions of the stream are in app.at_old" in str(reading.refused)
    remedies = re.findall(r"run: replicad (streams alter [^;]+)", str(stream.fault))
    if follows == "renamed back":
        await orders.execute("ALTER TABLE app.at RENAME TO at_new; ALTER TABLE app.at_old RENAME TO at")
    else:
        words = shlex.split(remedies[["the new one", "the old one"].index(follows)])
        done = await replicad_async(*words, "--database", database_url)
        assert done.returncode == 0, done.stderr
    stream = await Registry(orders).load_stream("orders")
    assert stream.fault is None
    async with Horizon(orders) as horizon:
        horizon.watch("orders", horizon_source(stream))
        assert (await horizon.poll())["orders"].position == (25 if follows == "the new one" else 23)
    assert len((await Registry(orders).lineages())["orders"].generations) == 1, "no reader is taken back"


@pytest.mark.parametrize(("kind", "same_rows"), [("renamed", True), ("renamed", False), ("schema renamed", False)])
async def test_readers_get_all_rows_of_the_new_table_when_the_printed_remedy_was_run(
    orders: Database, database_url: str, start_daemon: Start, kind: str, same_rows: bool
) -> None:
    rows: list[tuple[int, str]] = []
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(start_daemon())
        address = daemon.addresses[0]
        client = await stack.enter_async_context(open_client(address.host, address.port, name="reader"))
        follower = await stack.enter_async_context(
            client.follow({"orders": "EARLIEST"}, patience=None, first_patience=None)
        )
        nursery = await stack.enter_async_context(trio.open_nursery())

        async def collect() -> None:
            async for event in follower:
                if isinstance(event, RowBatch):
                    rows.extend((event.token, re.search(r'"body": ?"(\w+)"', row)[1]) for row in event.rows)  # type: ignore[index]

        nursery.start_soon(collect)
        with trio.fail_after(PATIENCE):
            while len(rows) < 20 or (await Registry(orders).load_stream("orders")).noted != 20:
                await trio.sleep(0.02)
            await run(orders, SWAPS[kind])
            while (problem := ((await status.overview(orders)).streams)[0].problem) is None:
                await trio.sleep(0.02)
            assert [id for id, _ in rows] == list(range(1, 21))
            remedy = re.search(r"run: replicad (streams alter orders --table app\.orders)", problem)
            assert remedy is not None, problem
            words = [*shlex.split(remedy[1]), *(["--same-rows"] if same_rows else []), "--database", database_url]
            done = await replicad_async(*words)
            assert done.returncode == 0, done.stderr
            there = [(row["id"], row["body"]) for row in await orders.fetch("SELECT * FROM app.orders ORDER BY id")]
            while rows[20:] != (there[20:] if same_rows else there):
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("says", ["same", "restarted"])
async def test_a_live_stream_asks_what_a_change_did_to_its_ids_and_readers_go_on_when_it_was_said(
    database: Database, database_url: str, start_daemon: Start, says: str
) -> None:
    await database.execute(
        "CREATE TABLE events (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text);"
        "INSERT INTO events (body) SELECT 'x' FROM generate_series(1, 20)"
    )
    await Registry(database).add("events", "events", "id")
    got: list[int] = []
    async with AsyncExitStack() as stack:
        address = (await stack.enter_async_context(start_daemon())).addresses[0]
        client = await stack.enter_async_context(open_client(address.host, address.port, name="reader"))
        follower = await stack.enter_async_context(
            client.follow({"events": "EARLIEST"}, patience=None, first_patience=None)
        )
        nursery = await stack.enter_async_context(trio.open_nursery())

        async def collect() -> None:
            async for event in follower:
                if isinstance(event, RowBatch):
                    got.extend(event.token for _ in event.rows)

        nursery.start_soon(collect)
        with trio.fail_after(PATIENCE):
            while len(got) < 20 or (await Registry(database).load_stream("events")).noted != 20:
                await trio.sleep(0.02)
            await database.execute("ALTER TABLE events ALTER COLUMN id TYPE bigint")
            await database.execute("INSERT INTO events (body) VALUES ('while it waits')")
            while (problem := ((await status.overview(database)).streams)[0].problem) is None:
                await trio.sleep(0.02)
            remedy = re.search(rf"run: replicad (streams alter events --sequence-changed {says})", problem)
            assert remedy is not None, problem
            await trio.sleep(0.5)
            assert got == [*range(1, 21)]
            done = await replicad_async(*shlex.split(remedy[1]), "--database", database_url)
            assert done.returncode == 0, done.stderr
            while got[20:] != ([21] if says == "same" else [*range(1, 22)]):
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_a_table_with_other_rows_is_not_taken_to_have_the_same(orders: Database) -> None:
    await run(orders, NEW + "UPDATE orders_new SET id = 21 WHERE id = 20")
    await orders.execute("INSERT INTO replicad.stream_position SELECT number, 0, 20, now() FROM replicad.stream")
    with pytest.raises(StreamRefused, match="do not have the same ids up to 20"):
        await Registry(orders).alter_table("orders", "app.orders_new", same_rows=True)


PARTS = """
    CREATE TABLE app.visits (id bigserial, day int NOT NULL, body text) PARTITION BY RANGE (day);
    CREATE TABLE app.visits_1 PARTITION OF app.visits FOR VALUES FROM (0) TO (10);
    CREATE TABLE app.visits_2 (LIKE app.visits INCLUDING ALL);
    ALTER TABLE app.visits ATTACH PARTITION app.visits_2 FOR VALUES FROM (10) TO (20);
    CREATE INDEX ON app.visits (id);
    INSERT INTO app.visits (day) VALUES (1), (11);
"""


async def test_a_partition_that_is_detached_stops_nothing(orders: Database) -> None:
    await orders.execute(PARTS)
    await Registry(orders).add("visits", "app.visits", "id")
    stream = await Registry(orders).load_stream("visits")
    assert await Registry(orders).publish(stream, 2, {})
    await orders.execute("ALTER TABLE app.visits DETACH PARTITION app.visits_2")
    assert (await Registry(orders).load_stream("visits")).fault is None
    assert await Registry(orders).publish(stream, 3, {})  # the files of the table are other ones from here on
    assert (await Registry(orders).load_stream("visits")).fault is None
    await orders.execute("CREATE TABLE app.visits_copy (LIKE app.visits INCLUDING ALL)")
    assert "app.visits_copy" in str((await Registry(orders).load_stream("visits")).fault)


@pytest.mark.parametrize(
    ("name", "own", "joins"),
    [
        ("visits", "bigserial", "ALTER TABLE app.visits ATTACH PARTITION app.own FOR VALUES FROM (20) TO (30)"),
        ("orders", "bigserial", "ALTER TABLE app.own INHERIT app.orders"),
        ("orders", "bigint GENERATED BY DEFAULT AS IDENTITY", "ALTER TABLE app.own INHERIT app.orders"),
    ],
)
async def test_a_part_with_ids_of_its_own_stops_the_stream_until_it_draws_from_the_same_sequence(
    orders: Database, name: str, own: str, joins: str
) -> None:
    await orders.execute(PARTS)
    await Registry(orders).add("visits", "app.visits", "id")
    await orders.execute(f"CREATE TABLE app.own (id {own} NOT NULL, day int NOT NULL, body text); {joins}")
    fault = (await Registry(orders).load_stream(name)).fault
    assert fault is not None
    assert "app.own" in fault
    await orders.execute(fault.partition("; run: ")[2])
    assert (await Registry(orders).load_stream(name)).fault is None
