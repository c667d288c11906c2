"""The daemon's backfiller: it is broken off and goes on, waits while the tube is full, and for who may still write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.tubes.backfill import Backfiller, BackfillIntervals
from replicad.tubes.serving.waiting import TubeIntervals
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces

ROWS = 5000
PUT_IN = "payload ->> 'type' IS DISTINCT FROM 'backfill_schedule'"  # all but what asked for the backfill


def at_pace(**changes: Any) -> Paces:
    """The daemon's usual pace, but for its backfills."""
    return Paces(tubes=TubeIntervals(backfills=BackfillIntervals(**changes)))


@pytest.fixture
async def items(database: Database) -> Database:
    """A table of 5,000 rows, attached to an empty tube of one partition."""
    from replicad.postgres import schema

    await schema.install(database, "tube")
    await database.execute("SELECT tube.tube_ensure_exists('items')")
    await database.execute(
        f"CREATE TABLE items AS SELECT g::bigint AS id FROM generate_series(1, {ROWS}) AS g;"
        "ALTER TABLE items ADD PRIMARY KEY (id);"
        "SELECT tube.tube_table_ensure_attached('items', 'items', 0)"
    )
    return database


async def until(look: Callable[[], Any]) -> None:
    with trio.fail_after(PATIENCE):
        while not await look():
            await trio.sleep(0.01)


async def contents(database: Database) -> tuple[list[int], list[str]]:
    """The ids in the tube in the order of their pods, and the types of the control pods."""
    rows = await database.fetch("SELECT ids, payload ->> 'type' AS type FROM tube.items ORDER BY seq")
    return [id for row in rows for id in row["ids"]], [row["type"] for row in rows if not row["ids"]]


async def test_a_backfill_that_is_broken_off_again_and_again_goes_on_and_every_id_comes_once(
    items: Database, start_daemon: Callable[..., Any]
) -> None:
    paces = at_pace(piece=1200, max_backlog=1)  # so that it stops after each piece
    await items.fetch_value("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    seen: list[int] = []
    marks: list[str] = []
    pieces = 0
    while "backfill_end" not in marks:
        async with start_daemon(paces):
            await until(lambda: items.fetch_value(f"SELECT count(*) FROM tube.items WHERE {PUT_IN}"))
        ids, types = await contents(items)
        await items.execute(f"DELETE FROM tube.items WHERE {PUT_IN}")
        seen += ids
        marks += types
        pieces += 1
    assert seen == list(range(1, ROWS + 1))
    assert marks == ["backfill_start", "backfill_end"]
    assert pieces > 3


@pytest.mark.parametrize("paces", [at_pace(piece=250, max_backlog=5)])
async def test_a_full_tube_holds_the_backfill_back(items: Database, daemon: Daemon) -> None:
    await items.fetch_value("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    most = 0
    gone: list[int] = []
    with trio.fail_after(PATIENCE):
        while len(gone) < ROWS:
            count = await items.fetch_value("SELECT count(*) FROM tube.items")
            most = max(most, count)
            if count >= 5 or len(gone) > ROWS - 1500:
                row = await items.fetch_row(
                    "DELETE FROM tube.items "
                    "WHERE seq = (SELECT min(seq) FROM tube.items WHERE cardinality(ids) > 0) RETURNING ids"
                )
                gone += row["ids"] if row is not None else []
    assert gone == list(range(1, ROWS + 1))
    assert most <= 5 + 3  # a piece more than the bound, and the control pods


@pytest.mark.parametrize("paces", [at_pace(writers=0.2)])
async def test_a_transaction_that_may_still_write_pods_is_waited_for(items: Database, daemon: Daemon) -> None:
    async with items.connection() as connection, connection.transaction():
        await connection.execute("INSERT INTO items VALUES (99999)")
        await items.fetch_value("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
        await trio.sleep(2.5)  # a look, and several time-outs of the wait
        assert (await contents(items))[1] == ["backfill_schedule"]
    await until(lambda: items.fetch_value("SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'"))
    ids, marks = await contents(items)
    assert marks == ["backfill_start", "backfill_end"]
    assert sorted(ids) == sorted([*range(1, ROWS + 1), 99999, 99999])


@pytest.mark.parametrize("paces", [at_pace(piece=250, max_backlog=1, turn=3.0)])
async def test_a_tube_with_many_full_partitions_delays_no_other_tube(items: Database, daemon: Daemon) -> None:
    await items.execute("SELECT tube.tube_ensure_exists('full', 16)")
    for shard in range(16):
        await items.execute(
            f"CREATE TABLE full_{shard} (id bigint);"
            f"SELECT tube.tube_table_ensure_attached('full', 'full_{shard}', {shard});"
            f"INSERT INTO full_{shard} SELECT generate_series(1, 300); DELETE FROM tube.full"
        )
    await items.execute("SELECT tube.tube_backfill_schedule('full', 'id', 0, 99)")
    query = "SELECT count(*) >= 3 FROM tube.tube_backfills('full') WHERE state = 'running'"
    await until(lambda: items.fetch_value(query))
    await items.execute("DELETE FROM items WHERE id > 200; DELETE FROM tube.items")
    await items.execute("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    await until(lambda: items.fetch_value("SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'"))
    assert await items.fetch_value("SELECT count(*) FROM tube.tube_backfills('full')") == 16


@pytest.mark.parametrize("paces", [at_pace(piece=250, max_backlog=1, backlog=0.05, retry=0.2)])
async def test_a_running_backfill_is_cancelled_and_does_not_begin_again(items: Database, daemon: Daemon) -> None:
    await items.execute("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    await until(lambda: items.fetch_value("SELECT count(*) = 1 FROM tube.tube_backfills() WHERE state = 'running'"))
    assert await items.fetch_value("SELECT tube.tube_backfill_cancel('items')") == 1
    await items.execute("DELETE FROM tube.items")  # there is room for the next piece
    await trio.sleep(2.5)
    assert await contents(items) == ([], [])
    await items.execute("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    await until(lambda: items.fetch_value("SELECT count(*) = 1 FROM tube.tube_backfills() WHERE state = 'running'"))


@pytest.mark.parametrize("paces", [at_pace(retry=0.2)])
async def test_a_backfill_whose_table_is_detached_or_renamed_is_no_trouble(items: Database, daemon: Daemon) -> None:
    await items.execute(
        "CREATE TABLE other (id bigint); SELECT tube.tube_table_ensure_attached('items', 'other', 5);"
        "BEGIN; LOCK TABLE tube.items; SELECT tube.tube_backfill_schedule('items', 'id', 0, 9);"
        "SELECT tube.tube_table_ensure_detached('items', 'other'); ALTER TABLE items RENAME TO renamed; COMMIT"
    )
    await until(lambda: items.fetch_value("SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'"))
    assert (await contents(items))[0] == list(range(1, ROWS + 1))
    assert daemon.troubles.why("tube", "items") is None


async def test_a_piece_may_take_longer_than_other_statements(items: Database, start_daemon: Callable[..., Any]) -> None:
    await items.execute("DELETE FROM items WHERE id > 100; DELETE FROM tube.items")
    await items.execute("SELECT tube.tube_ensure_exists('items', 1, 'pg_sleep(0.02) IS NOT NULL')")
    await items.execute("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    async with start_daemon(at_pace(retry=0.1, retry_max=0.1), statement_timeout=0.5):
        end = "SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'"
        await until(lambda: items.fetch_value(end))


async def test_a_first_piece_that_reads_for_long_does_not_hold_the_position_of_the_tube(items: Database) -> None:
    await items.execute("DELETE FROM items WHERE id > 60; DELETE FROM tube.items")
    await items.execute("SELECT tube.tube_ensure_exists('items', 1, 'pg_sleep(0.02) IS NOT NULL')")
    async with items.connection() as reader, trio.open_nursery() as nursery:
        pid = await reader.fetch_value("SELECT pg_backend_pid()")
        chunk = "SELECT * FROM tube.tube_backfill_chunk('1', 'items', 'items', 'id')"
        nursery.start_soon(reader.fetch_row, chunk)
        reading = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'PgSleep'"
        await until(lambda: items.fetch_value(reading))
        assert await items.fetch_value(f"SELECT count(*) FROM tube.tube_writers() WHERE pid = {pid}") == 0
    assert (await contents(items))[0] == list(range(1, 61))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_backfill_whose_table_was_dropped_names_the_command_that_cancels_it(
    items: Database, start_daemon: Callable[..., Any], begun: bool
) -> None:
    await items.execute("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
    if begun:
        await items.fetch_row("SELECT * FROM tube.tube_backfill_chunk('1', 'items', 'items', 'id', NULL, 10)")
        await items.execute("DELETE FROM tube.items WHERE payload ->> 'type' = 'backfill_schedule'")
    await items.execute("DROP TABLE items")
    async with start_daemon(at_pace(retry=0.1)) as daemon:

        async def refused() -> bool:
            return "replicad tubes backfill items --shard 0 --cancel" in (daemon.troubles.why("tube", "items") or "")

        await until(refused)
        assert await items.fetch_value("SELECT tube.tube_backfill_cancel('items', 0, 0)") == 1

        async def over() -> bool:
            return not await refused()

        await until(over)


async def test_one_look_runs_all_backfills_that_are_scheduled_one_after_another(
    items: Database, start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tables take less time than passes between two looks. Here no second look comes."""
    tables = 20
    await items.execute(
        "".join(
            f"CREATE TABLE items_{shard} (id bigint PRIMARY KEY); INSERT INTO items_{shard} VALUES ({shard});"
            f"SELECT tube.tube_table_ensure_attached('items', 'items_{shard}', {shard});"
            for shard in range(1, tables + 1)
        )
    )
    await items.execute(f"SELECT tube.tube_backfill_schedule('items', 'id', 1, {tables})")
    looks = 0
    find = Backfiller.run

    async def look_once(backfiller: Backfiller, *args: Any) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            await find(backfiller, *args)

    monkeypatch.setattr(Backfiller, "run", look_once)

    async def all_done() -> bool:
        ended = "SELECT count(*) FROM tube.items WHERE payload ->> 'type' = 'backfill_end'"
        return bool(await items.fetch_value(ended) == tables)

    async with start_daemon():
        await until(all_done)
