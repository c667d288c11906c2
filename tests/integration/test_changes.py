"""Streams of changes through a daemon: snapshots, events over HTTP, troubles, and copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.changes import ChangeOp, TableCopy, apply_changes, read_changes
from replicad.client.events import RowBatch
from replicad.config.settings import ServerSettings
from replicad.errors import TokenExpired
from replicad.postgres.bridge import Database
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.serving import audit, filters
from replicad.streams.serving.filters import FilteredReader
from replicad.streams.serving.intervals import StreamIntervals
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.sse import event_source

from .conftest import netcat_to
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
            while (why := daemon.troubles.why("stream", "orders")) is None:
                await daemon.troubles.next_change().wait()
        assert "replicad streams snapshot orders --anew" in why
        done = await replicad_async("streams", "snapshot", "orders", "--anew", "--database", database_url)
        assert "has 3 rows" in done.stdout
        with trio.fail_after(PATIENCE):
            while daemon.troubles.why("stream", "orders") is not None:
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


async def test_readers_of_a_value_get_its_changes_alone_live_and_old_and_positions_move(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    while await orders.snapshot_step(1):
        pass
    await database.execute("UPDATE orders SET note = 'old' WHERE id = 1")
    async with start_daemon(paces=replace(Paces(), streams=StreamIntervals(filtered=0.05))) as daemon:
        async with netcat_to(daemon) as seven, netcat_to(daemon) as eight:
            await seven.send("REPLICATE orders EARLIEST where=customer=7")
            await eight.send("REPLICATE orders where=customer=8")
            found = await seven.until(r'RDATA orders master \d+ {"op":"u","key":1,.*"old".*')
            assert [line.split(" ", 4)[4][7] for line in found if line.startswith("RDATA")] == ["s", "s", "r", "u"]
            await eight.expect("SERVER .*", "WRITERS orders .*", r"POSITION orders master (\d+) \1")
            await database.execute("UPDATE orders SET customer = 8 WHERE id = 1")
            await database.execute("UPDATE orders SET note = 'x' WHERE id = 1; INSERT INTO orders VALUES (9, 7)")
            gone = await seven.until(r'RDATA orders master \d+ {"op":"i","key":9,.*')
            assert [line.split(" ", 4)[4][7] for line in gone if line.startswith("RDATA")] == ["d", "i"]
            came = await eight.until(r'RDATA orders master \d+ {"op":"u","key":1,.*"note":"x".*')
            assert [line.split(" ", 4)[4][7] for line in came if line.startswith("RDATA")] == ["s", "i", "u"]
            many = "INSERT INTO orders SELECT i, 7, E'a\ttab' FROM generate_series(100, 499) AS i"
            await database.execute(many)
            assert len(await seven.until(r'RDATA orders master \d+ {"op":"i","key":499,.*')) >= 400
            await database.execute("INSERT INTO orders VALUES (10, 5)")
            last = await database.fetch_value("SELECT max(id) FROM replicad.change_1")
            moved = [
                await seven.until(rf"POSITION orders master \d+ {last}"),
                await eight.until(rf"POSITION .* {last}"),
            ]
            assert not any('"key":10' in line for lines in moved for line in lines)
            await database.execute("TRUNCATE orders")
            await seven.until(r'RDATA orders master \d+ {"op":"t",.*')
            await eight.until(r'RDATA orders master \d+ {"op":"t",.*')


async def test_positions_of_many_readers_of_values_go_out_in_small_groups(
    orders: Registry, database: Database, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So changes do not wait for a round of them, which takes a second with 10,000 readers."""
    turn, moved, move = 0, list[int](), FilteredReader.move

    def note(reader: FilteredReader, position: int) -> None:
        moved.append(turn)
        move(reader, position)

    monkeypatch.setattr(filters, "MOVED", 3)
    async with (
        start_daemon(paces=replace(Paces(), streams=StreamIntervals(filtered=0.05))) as daemon,
        AsyncExitStack() as stack,
    ):
        readers = [await stack.enter_async_context(netcat_to(daemon)) for _ in range(10)]
        for number, reader in enumerate(readers):
            await reader.send(f"REPLICATE orders where=customer={number + 100}")
            await reader.until("POSITION orders .*")
        await database.execute("INSERT INTO orders VALUES (9, 7)")
        last = await database.fetch_value("SELECT max(id) FROM replicad.change_1")
        for reader in readers:
            await reader.until(rf"POSITION orders master \d+ {last}")
        monkeypatch.setattr(FilteredReader, "move", note)
        with trio.fail_after(PATIENCE):
            while len(moved) < 40:
                turn += 1
                await trio.lowlevel.checkpoint()
        assert max(Counter(moved).values()) <= 3


async def test_a_filtered_reader_resumes_and_has_each_change_of_its_value_once(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    insert = "INSERT INTO orders SELECT i, i % 9 FROM generate_series($1::int, $1::int + 999) AS i"
    seen: list[int] = []
    token = "EARLIEST"
    for turn in range(3):
        await database.execute(insert, 1000 * turn + 1000)
        async with (
            start_daemon() as daemon,
            open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client,
            client.follow({"orders": token}, where=("customer", "4")) as follower,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(
                database.execute, "UPDATE orders SET id = -id WHERE customer = 4 AND id >= $1", 1000 * turn + 1000
            )
            wanted = (turn + 1) * 111 * 3
            with trio.fail_after(PATIENCE):
                async for event in follower:
                    if isinstance(event, RowBatch):
                        seen += [c.key for c in read_changes(event) if c.op.value in ("insert", "delete")]
                        token = str(event.token)
                        if len(seen) >= wanted:
                            break
    expected = await database.fetch(
        "SELECT key::text::int FROM replicad.change_1 WHERE by_1 = '4' AND op IN ('i', 'd') ORDER BY id"
    )
    assert seen == [row[0] for row in expected]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "REPLICATE orders where=note=7",
            "stream_refused: stream orders has no filter 'note': its filters are customer;.*",
        ),
        ("REPLICATE orders where=customer=7 linear", "stream_refused: .*not read with `linear`.*"),
        ("REPLICATE orders linear where=customer=7", "stream_refused: .*not read with `linear`.*"),
        ("REPLICATE orders linear where=customer=7 linear", "bad_line: .*the form is .*"),
        ("REPLICATE orders linear linear", "bad_token: .*"),
        ("REPLICATE orders where=customer=7 where=customer=8", "bad_line: .*repeated option 'where=customer=8'.*"),
        ("REPLICATE orders where=7", "bad_line: .*column=value.*"),
        ("REPLICATE orders where=customer=%00", "bad_line: .*U\\+0000.*"),
        ("REPLICATE orders where=customer=%ff", "bad_line: .*no UTF-8.*"),
    ],
)
async def test_a_filter_that_the_stream_does_not_have_is_refused(
    orders: Registry, start_daemon: Start, line: str, error: str
) -> None:
    async with start_daemon() as daemon, netcat_to(daemon) as client:
        await orders.load_stream("orders")
        await client.send(line)
        await client.expect("SERVER .*", f"ERROR {error}")


async def test_two_browsers_with_two_values_see_their_changes_alone(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    async with (
        start_daemon() as daemon,
        event_source(daemon.http, "/streams/orders/live?customer=7&after=NOW") as seven,
        event_source(daemon.http, "/streams/orders/live?customer=8&after=NOW") as eight,
    ):
        with trio.fail_after(PATIENCE):
            assert {(await reader.until("position")).name for reader in (seven, eight)} == {"position"}
            await database.execute("UPDATE orders SET note = 'x'")
            assert (await seven.until("update")).data["row"]["key"] == 1
            assert (await eight.until("update")).data["row"]["key"] == 2
        with trio.fail_after(PATIENCE):
            refused = await ask(daemon.http, "/streams/orders/live?customer=7&note=8")
        assert refused.status == 400


async def test_the_columns_are_described_before_the_first_change_from_every_start(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    """Also after the recorded descriptions were removed with old changes."""
    while await orders.snapshot_step(1, size=2):
        pass
    await database.execute("INSERT INTO orders VALUES (3, 7); ALTER TABLE orders ADD COLUMN extra text")
    await database.execute("INSERT INTO orders VALUES (4, 7); INSERT INTO orders VALUES (5, 8)")
    paces = Paces(streams=StreamIntervals(keep=0.05))
    async with start_daemon(paces) as daemon, open_client("127.0.0.1", daemon.addresses[0].port, name="r") as client:
        last = await database.fetch_value("SELECT max(id) FROM replicad.change_1")
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT max(position) FROM replicad.stream_position") != last:
                await trio.sleep(0.01)
        rows = await database.fetch("SELECT id, by_1 FROM replicad.change_1 ORDER BY id")
        last_of_seven = max(row["id"] for row in rows if row["by_1"] == "7")
        for first in (0, *(row["id"] for row in rows[:-1])):
            for where in (None, ("customer", "7")) if first < last_of_seven else (None,):
                begun = await first_changes(client, first or "EARLIEST", where)
                assert begun[0].op is ChangeOp.SCHEMA, (first, where)
                assert begun[-1].schema in {one.schema for one in begun if one.op is ChangeOp.SCHEMA}, (first, where)
                page = await ask(daemon.http, f"/streams/orders/rows?after={first}" + ("&customer=7" if where else ""))
                assert '"row":{"op":"s"' in page.text.splitlines()[0], (first, where)
        await orders.set_keep("orders", keep_for=None, keep_rows=1)
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT count(*) FROM replicad.change_1") > 1:
                await trio.sleep(0.01)
        await orders.set_keep("orders", keep_for=None, keep_rows=None)
        async with netcat_to(daemon) as linear, netcat_to(daemon) as everything, netcat_to(daemon) as now:
            await linear.send("REPLICATE orders EARLIEST linear")
            await everything.send("REPLICATE")
            await now.send("REPLICATE orders NOW where=customer=7")
            for reader in (linear, everything, now):
                await reader.until("POSITION orders .*")
            await database.execute("INSERT INTO orders VALUES (6, 7)")
            described = r'RDATA orders master batch {"op":"s","row":{.*"extra".*},"schema":2,.*}'
            for reader, more in ((linear, 2), (everything, 1), (now, 1)):
                found = [line for line in await reader.until(r'RDATA orders master \d+ .*"key":6.*') if "RDATA" in line]
                assert re.fullmatch(described, found[0])
                assert len(found) == 1 + more
        assert [one.op for one in await first_changes(client, "EARLIEST", None)] == [ChangeOp.SCHEMA, ChangeOp.INSERT]
        empty = await ask(daemon.http, "/streams/orders/rows?after=" + str(last + 1))
        assert empty.text == "", "a page without changes describes nothing"


async def first_changes(client: Any, token: object, where: tuple[str, str] | None) -> list[Any]:
    """The changes of the first batch that a reader gets."""
    with trio.fail_after(PATIENCE):
        async with client.follow({"orders": str(token)}, where=where) as follower:
            async for event in follower:
                if isinstance(event, RowBatch):
                    return list(read_changes(event))
    raise AssertionError(token)


async def jump(db: Database, ids: int, number: int = 1) -> None:
    """Take so many ids of the table of changes and write none of them."""
    await db.execute(
        "SELECT count(nextval(pg_get_serial_sequence($2, 'id'))) FROM generate_series(1, $1)",
        ids,
        f"replicad.change_{number}",
    )


async def published(db: Database) -> int:
    """Wait until the position of the last change is noted; returns it."""
    upto = int(await db.fetch_value("SELECT max(id) FROM replicad.change_1"))
    with trio.fail_after(PATIENCE):
        while (await db.fetch_value("SELECT max(position) FROM replicad.stream_position") or 0) < upto:
            await trio.sleep(0.01)
    return upto


PARTS = "SELECT array_agg(first ORDER BY first) FROM replicad.stream_change_parts(1)"
RANGE = 1 << 28  # ids of a partition
LAST = "SELECT last_value FROM replicad.change_1_id_seq"


async def test_old_changes_go_by_whole_partitions_beside_a_snapshot_that_is_held(
    orders: Registry, database: Database, database_url: str, start_daemon: Start
) -> None:
    while await orders.snapshot_step(1):
        pass
    with psycopg.connect(database_url) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM orders")
        async with start_daemon(paces=Paces(streams=StreamIntervals(changes=0.05, keep=0.05))) as daemon:
            await database.execute(
                "INSERT INTO replicad.stream_ack "
                "SELECT number, 'slow', 3, replicad.stream_epoch(s), now() FROM replicad.stream s"
            )
            await orders.set_keep("orders", keep_for=None, keep_rows=15)
            for turn in range(3):
                await jump(database, 100_000)
                with trio.fail_after(PATIENCE):  # the partition is closed
                    while await database.fetch_value(LAST) < (turn + 1) * RANGE:
                        await trio.sleep(0.01)
                await database.execute(
                    "INSERT INTO orders SELECT i, 7 FROM generate_series($1::int, $1::int + 9) AS i", 100 * turn + 10
                )
            await trio.sleep(0.3)  # several rounds
            assert (await database.fetch_value(PARTS))[0] == 1, "a reader that is known has not acknowledged them"
            async with open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client:
                async with client.follow({"orders": "3"}) as follower, netcat_to(daemon) as late:
                    keys = list[Any]()
                    async for event in follower:
                        keys += [c.key for c in read_changes(event)] if isinstance(event, RowBatch) else []
                        if keys[-1:] == [219]:
                            break
                    await orders.forget_acks("orders", "slow")
                    with trio.fail_after(PATIENCE):
                        while (await database.fetch_value(PARTS))[0] != 2 * RANGE + 1:
                            await trio.sleep(0.01)
                    await late.send("REPLICATE orders 3")
                    await late.expect("SERVER .*", "ERROR token_expired: .*")
                    await late.send("REPLICATE orders EARLIEST")
                    await late.until('RDATA orders master batch {"op":"s".*')
                    await database.execute("INSERT INTO orders VALUES (999, 7)")
                    await late.until('RDATA orders master .*"key":999.*')
                    async for event in follower:
                        if isinstance(event, RowBatch) and [c.key for c in read_changes(event)][-1:] == [999]:
                            break
            assert daemon.troubles.why("stream", "orders") is None
            assert daemon.troubles.why("changes", "orders") is None
            trimmed = await database.fetch_value("SELECT trimmed_upto FROM replicad.stream")
            assert trimmed == 2 * RANGE, f"the first ranges, and no single row of the third: {trimmed}"
            assert (await database.fetch_value(PARTS))[0] == 2 * RANGE + 1


async def test_a_read_that_begins_while_a_partition_is_dropped_is_refused_or_whole(
    orders: Registry, database: Database, database_url: str, start_daemon: Start
) -> None:
    """The DROP has its lock until it is committed: whoever waits for it must not find fewer rows and no error."""
    while await orders.snapshot_step(1):
        pass
    await jump(database, 100_000)
    await orders.look_after_changes()
    await database.execute("INSERT INTO orders SELECT i, 7 FROM generate_series(100, 139) AS i")
    async with (
        start_daemon() as daemon,
        open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client,
        netcat_to(daemon) as everything,
        netcat_to(daemon) as part,
        netcat_to(daemon) as linear,
        netcat_to(daemon) as within,
        trio.open_nursery() as nursery,
    ):
        assert await first_changes(client, 3, None)
        await published(database)
        await orders.set_keep("orders", keep_for=None, keep_rows=20)
        page: list[Any] = []

        async def read_page(after: int, where: str = "") -> None:
            page.append(await ask(daemon.http, f"/streams/orders/rows?after={after}{where}"))

        with psycopg.connect(database_url) as trimmer:
            with trio.fail_after(PATIENCE):  # it gives up after 0.1 s where somebody reads the table just then
                while not trimmer.execute("SELECT partitions FROM replicad.stream_trim_kept('orders', 100)").fetchone()[
                    0
                ]:  # type: ignore[index]
                    trimmer.rollback()
                    await trio.sleep(0.05)
            await everything.send("REPLICATE orders 3")
            await part.send("REPLICATE orders 3 where=customer=7")
            await linear.send("REPLICATE orders 3 linear")
            await within.send(f"REPLICATE orders {RANGE}")
            nursery.start_soon(read_page, 3)
            nursery.start_soon(read_page, 3, "&customer=7")
            with trio.fail_after(PATIENCE):
                while not await database.fetch_value(
                    "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND database = "
                    "(SELECT oid FROM pg_database WHERE datname = current_database())"
                ):
                    await trio.sleep(0.01)
            trimmer.commit()
        for reader in (everything, part, linear):
            await reader.until("ERROR token_expired: .*")
        rows = await within.until('RDATA orders master .*"key":139.*')
        assert len([line for line in rows if '"op":"i"' in line]) == 40
        with trio.fail_after(PATIENCE):
            while len(page) < 2:
                await trio.sleep(0.01)
        assert [one.status for one in page] == [410, 410]
        with pytest.raises(TokenExpired):
            await first_changes(client, 3, None)
        assert daemon.troubles.why("stream", "orders") is None


@pytest.mark.long
async def test_the_audit_takes_rotation_neither_for_lost_nor_for_late_rows_and_still_finds_late_ones(
    orders: Registry,
    database: Database,
    database_url: str,
    start_daemon: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also rows of a transaction that had begun before the partition was made into which it writes."""
    monkeypatch.setattr(audit, "IDLE_SHARE", 10.0)
    looks, gate = 0, trio.Event()
    gate.set()
    look = audit.Audit.look

    async def gated(self: audit.Audit, name: str, served: Any) -> None:
        nonlocal looks
        await gate.wait()
        await look(self, name, served)
        looks += 1

    async def looked() -> None:
        upto = looks + 2
        with trio.fail_after(PATIENCE):
            while looks < upto:
                await trio.sleep(0.01)

    monkeypatch.setattr(audit.Audit, "look", gated)
    while await orders.snapshot_step(1):
        pass
    paces = Paces(streams=StreamIntervals(late_look=0.02, audit_after=0.05, look=0.1, keep=0.05, changes=3600.0))
    async with start_daemon(paces) as daemon:
        await looked()
        with psycopg.connect(database_url) as long:
            long.execute("INSERT INTO orders VALUES (50, 7)")
            gate = trio.Event()
            await jump(database, 100_000)
            await orders.look_after_changes()
            assert await database.fetch_value(LAST) == RANGE, "the partition is closed"
            await jump(database, 20_000)
            long.execute("INSERT INTO orders SELECT i, 7 FROM generate_series(100, 199) AS i")
            long.commit()
            assert await database.fetch_value("SELECT count(*) FROM replicad.change_1_rest") == 0
            await published(database)
            gate.set()
        await looked()
        assert daemon.troubles.why("stream", "orders") is None
        await orders.set_keep("orders", keep_for=None, keep_rows=50)
        with trio.fail_after(PATIENCE):
            while (await database.fetch_value(PARTS))[0] == 1:
                await trio.sleep(0.01)
        await looked()
        assert daemon.troubles.why("stream", "orders") is None
        for command in (("streams", "list"), ("doctor",)):
            done = await replicad_async(*command, "--database", database_url)
            assert done.returncode == 0, done.stdout + done.stderr
        await orders.set_keep("orders", keep_for=None, keep_rows=None)  # else it may remove the late row first
        await jump(database, 5)
        await database.execute("INSERT INTO orders VALUES (300, 7)")
        late = await published(database) - 2
        await looked()
        await database.execute("INSERT INTO replicad.change_1 (id, op, key, schema) VALUES ($1, 'd', '9', 1)", late)
        with trio.fail_after(PATIENCE):
            while "turned up at or below" not in (daemon.troubles.why("stream", "orders") or ""):
                await trio.sleep(0.01)


async def test_ids_that_no_partition_is_made_for_are_kept_and_the_next_ranges_begin_beyond_them(
    orders: Registry, database: Database, start_daemon: Start
) -> None:
    """No daemon runs, and writers take a billion ids."""
    while await orders.snapshot_step(1):
        pass
    await jump(database, 300_000)
    await database.execute("INSERT INTO orders VALUES (9, 7); DELETE FROM orders WHERE id = 9")
    assert await database.fetch_value("SELECT count(*) FROM replicad.change_1_rest") == 0
    await database.execute("SELECT setval('replicad.change_1_id_seq', $1)", 4 * RANGE)
    await database.execute("INSERT INTO orders SELECT i, 7 FROM generate_series(10, 19) AS i")
    assert await database.fetch_value("SELECT count(*) FROM replicad.change_1_rest") == 10
    await orders.look_after_changes()
    assert (await database.fetch_value(PARTS))[-1] > 4 * RANGE + 10_000
    await jump(database, 20_000)
    await database.execute("UPDATE orders SET note = 'x' WHERE id < 15")
    assert await database.fetch_value("SELECT count(*) FROM replicad.change_1_rest") == 10
    paces = Paces(streams=StreamIntervals(keep=0.05, changes=0.05))
    async with start_daemon(paces) as daemon, open_client("127.0.0.1", daemon.addresses[0].port, name="r") as client:
        copy: dict[Any, dict[str, Any]] = {}
        with trio.fail_after(PATIENCE):
            async with client.follow({"orders": "EARLIEST"}) as follower:
                async for event in follower:
                    apply_changes(copy, read_changes(event) if isinstance(event, RowBatch) else ())
                    if copy.get(14, {}).get("note") == "x":
                        break
        assert sorted(copy) == [1, 2, *range(10, 20)]
        await published(database)
        await orders.set_keep("orders", keep_for=None, keep_rows=3)
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT pg_relation_size('replicad.change_1_rest')"):
                await trio.sleep(0.01)
        assert await first_changes(client, "EARLIEST", None)


@pytest.mark.long
async def test_a_statement_that_outlasts_several_partitions_is_recorded(orders: Registry, database: Database) -> None:
    """It sees only the partitions that there were when it began, while daemons close them and make others."""
    await database.execute("CREATE TABLE slow (id integer PRIMARY KEY)")
    await orders.add_changes("slow", "public.slow", RecordedChanges(where="pg_sleep(0.01) IS NOT NULL"))
    ended = trio.Event()

    async def write() -> None:
        await database.execute("INSERT INTO slow SELECT generate_series(1, 100)")
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while not ended.is_set():
            await database.execute("SELECT count(nextval('replicad.change_2_id_seq')) FROM generate_series(1, 100000)")
            await orders.look_after_changes()
    found = await database.fetch_row(
        "SELECT count(*) AS rows, count(DISTINCT tableoid) AS parts, "
        "bool_or(tableoid = 'replicad.change_2_rest'::regclass) AS rest FROM replicad.change_2 WHERE op = 'i'"
    )
    assert found is not None
    assert (found["rows"], found["rest"]) == (100, False)
    assert found["parts"] > 2
    taken = await database.fetch_value("SELECT last_value FROM replicad.change_2_id_seq")
    await jump(database, 300_000, 2)
    await orders.look_after_changes()
    last = await database.fetch_value("SELECT last_value FROM replicad.change_2_id_seq")
    assert last > taken + 300_000, "the partition is closed once the statement has ended"


def test_the_operations_of_changes_have_different_letters() -> None:
    assert len({op.value[0] for op in ChangeOp}) == len(ChangeOp)
