"""Backfills: three steps against transactions in flight, all at once or in pieces, and whose control pods are whose."""

from __future__ import annotations

import json
import random

import pytest
import trio

from replicad.errors import DatabaseError, TubeRefused
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.lengths import crossed

STEP3 = "SELECT tube.tube_backfill_step3($1, 'a', $2::text::regclass, $3)"
CHUNK = "SELECT * FROM tube.tube_backfill_chunk($1, 'a', $2::text::regclass, $3, NULL, $4, $5)"


@pytest.fixture
async def filled(db: Database) -> Database:
    """A tube `a` and the table sh1.t attached to it, with 1,000 rows of which 10 do not match the predicate."""
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY, born timestamptz, v integer);"
        "INSERT INTO sh1.t SELECT i, CASE WHEN i % 10 > 0 THEN timestamptz '2026-01-01' - i * interval '1 s' END,"
        " i % 100 FROM generate_series(1, 1000) i;"
        "SELECT tube.tube_ensure_exists('a', 1, 'v <> 7'), tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    return db


async def pods(db: Database, tube: str = "a") -> list[tuple[str, int, list[int], object]]:
    rows = await db.fetch(f"SELECT op, shard, ids, payload FROM tube.{tube} ORDER BY seq")
    return [(r["op"], r["shard"], r["ids"], json.loads(r["payload"]) if r["payload"] else None) for r in rows]


async def start(db: Database) -> str:
    text = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step2()")
    assert isinstance(text, str)
    return text


EXPECTED = [i for i in range(1000, 0, -1) if i % 10 and i % 100 != 7] + list(range(10, 1001, 10))


async def test_step_3_puts_all_ids_that_match_between_control_pods_in_the_order_asked_for(filled: Database) -> None:
    begun = await start(filled)
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "born") == 990
    first, *between, last = await pods(filled)
    assert first == ("B", 1, [], {"type": "backfill_start", "start_seq": begun})
    assert last == ("B", 1, [], {"type": "backfill_end", "start_seq": begun})
    assert [len(ids) for _, _, ids, _ in between] == [250, 250, 250, 240]
    got = [i for _, _, ids, _ in between for i in ids]
    assert got[:890] == EXPECTED[:890]
    assert sorted(got[890:]) == EXPECTED[890:]
    assert await filled.fetch_value("SELECT bool_and(seq > $1) FROM tube.a", int(begun))


async def test_a_shard_that_is_being_backfilled_is_left_alone_until_its_control_pods_are_gone(filled: Database) -> None:
    await filled.execute(
        "CREATE TABLE sh1.u (id bigint, v integer); SELECT tube.tube_table_ensure_attached('a', 'sh1.u')"
    )
    schedule = "SELECT tube.tube_backfill_schedule('a', 'id', $1, $2)"
    assert await filled.fetch_value(schedule, 2, 100) == 0
    assert await filled.fetch_value(schedule, 0, 1) == 2
    assert await filled.fetch_value(schedule, 0, 1) == 0
    assert await pods(filled) == [
        ("B", 1, [], {"type": "backfill_schedule", "tbl": f"sh1.{table}", "oid": oid, "order_col": "id"})
        for table, oid in await filled.fetch(
            "SELECT relname, oid::text FROM pg_class WHERE relname IN ('t', 'u') ORDER BY 1"
        )
    ]
    await filled.execute("TRUNCATE tube.a")
    begun = await start(filled)
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") == 990
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") is None
    assert await filled.fetch_value(STEP3, begun, "sh1.u", "id") == 0  # another table of the shard is not in the way
    assert await filled.fetch_value(schedule, 1, 1) == 0
    await filled.execute("DELETE FROM tube.a WHERE payload ->> 'type' = 'backfill_start'")
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") is None
    await filled.execute("DELETE FROM tube.a")
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") == 990


@pytest.mark.parametrize(("page", "order"), crossed([1, 60, 990, 5000], ["born", "id", "v"]))
async def test_a_backfill_in_pieces_puts_the_same_ids_in_the_same_order(
    filled: Database, page: int, order: str
) -> None:
    if page == 1:
        await filled.execute("DELETE FROM sh1.t WHERE id > 30; TRUNCATE tube.a")
    begun, calls, total = await start(filled), 0, 0
    finished = False
    while not finished:
        async with filled.connection() as connection:  # whoever goes on has settings of its own
            style = random.choice(["SQL, DMY", "German", "Postgres, MDY"])
            await connection.execute(f"SET datestyle = '{style}'; SET timezone = 'Asia/Kolkata'")
            row = await connection.fetch_row(CHUNK, begun if not calls else "1", "sh1.t", order, page, 250)
        assert row is not None
        finished, total, calls = row["finished"], total + row["ids"], calls + 1
        progress = await filled.fetch_row("SELECT * FROM tube.tube_backfill")
        assert progress is not None
        assert (progress["ids"], progress["finished"], progress["start_seq"]) == (total, finished, begun)
    first, *between, last = await pods(filled)
    assert first == ("B", 1, [], {"type": "backfill_start", "start_seq": begun})
    assert last == ("B", 1, [], {"type": "backfill_end", "start_seq": begun})
    expected = await filled.fetch(f"SELECT id FROM sh1.t WHERE v <> 7 ORDER BY {order}, id")
    assert [i for _, _, ids, _ in between for i in ids] == [row["id"] for row in expected]
    assert calls == total // page + 1
    again = await filled.fetch_row(CHUNK, begun, "sh1.t", order, page, 250)
    assert (again["ids"], again["finished"]) == (None, True)  # type: ignore[index]


async def test_a_piece_that_was_rolled_back_comes_again_and_schedule_and_step_3_keep_out_meanwhile(
    filled: Database,
) -> None:
    begun = await start(filled)
    await filled.execute(CHUNK, begun, "sh1.t", "id", 400, 250)
    async with filled.connection() as crashing:
        await crashing.execute("BEGIN")
        await crashing.execute(CHUNK, begun, "sh1.t", "id", 400, 250)
        crashing.terminate()
    await filled.execute("DELETE FROM tube.a")
    assert await filled.fetch_value("SELECT tube.tube_backfill_schedule('a', 'id', 0, 9)") == 0
    assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") is None
    for _ in range(2):
        await filled.execute(CHUNK, begun, "sh1.t", "id", 400, 250)
    assert sum(len(ids) for _, _, ids, _ in await pods(filled)) == 590
    assert (await pods(filled))[-1][3] == {"type": "backfill_end", "start_seq": begun}


@pytest.mark.parametrize("pieces", [False, True])
async def test_with_routing_each_shard_that_occurs_has_control_pods_of_its_own(filled: Database, pieces: bool) -> None:
    await filled.execute(
        "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 9, 'id <= 300', 'CASE WHEN v > 2 THEN v % 3 END')"
    )
    begun = await start(filled)
    if pieces:
        while not (await filled.fetch_row(CHUNK, begun, "sh1.t", "id", 80, 50))["finished"]:  # type: ignore[index]
            pass
    else:
        assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") == 297
    found = await pods(filled)
    for shard in (0, 1, 2, 9):
        mine = [(ids, payload) for _, s, ids, payload in found if s == shard]
        assert mine[0] == ([], {"type": "backfill_start", "start_seq": begun})
        assert mine[-1] == ([], {"type": "backfill_end", "start_seq": begun})
        condition = "v <= 2" if shard == 9 else f"v > 2 AND v % 3 = {shard}"
        expected = await filled.fetch(f"SELECT id FROM sh1.t WHERE v <> 7 AND id <= 300 AND {condition} ORDER BY id")
        assert [i for ids, _ in mine for i in ids] == [row["id"] for row in expected]
    assert {shard for _, shard, _, _ in found} == {0, 1, 2, 9}


@pytest.mark.parametrize("pieces", [False, True])
async def test_with_routing_a_shard_that_became_empty_has_control_pods_so_that_its_garbage_is_collected(
    filled: Database, pieces: bool
) -> None:
    attach = "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 0, NULL, 'v % 4')"
    await filled.execute(
        "CREATE TABLE sh1.other (id bigint, v integer); SELECT tube.tube_table_ensure_attached('a', 'sh1.other', 77);"
        + attach
    )
    await filled.execute("UPDATE sh1.t SET v = v; INSERT INTO sh1.other VALUES (1, 1)")
    await filled.execute("SELECT tube.tube_lease_claim('a', 1, 0, 'w', '1 hour', '{}')")
    term = await filled.fetch_value("SELECT term FROM tube.tube_lease")
    seqs = "(SELECT array_agg(seq) FROM tube.a WHERE shard IN (0, 1))"
    assert await filled.fetch_value(f"SELECT pods FROM tube.tube_ack('a', 1, 0, $1, {seqs})", term) == 2
    parked = await filled.fetch_row("SELECT seq, ids FROM tube.a WHERE shard = 3 LIMIT 1")
    await filled.execute("SELECT tube.tube_park('a', 1, 0, $1, $2, $3::bigint[]::text[], 1, 'x')", term, *parked)  # type: ignore[misc]
    removed = await filled.fetch_value("SELECT count(*) FROM tube.a")
    last = await filled.fetch_value("SELECT max(seq) FROM tube.a")
    assert (
        await filled.fetch_value("SELECT pods FROM tube.tube_ack_upto('a', 1, 0, $1, 0, 0, $2, 0)", term, last)
        == removed
    )
    await filled.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.t'); DELETE FROM sh1.t WHERE v % 4 > 0")
    await filled.execute(attach)
    for _ in range(2):  # the second one knows the shards of the first, although it was never acked
        begun = await start(filled)
        if pieces:
            while not (await filled.fetch_row(CHUNK, begun, "sh1.t", "id", 80, 50))["finished"]:  # type: ignore[index]
                pass
        else:
            assert await filled.fetch_value(STEP3, begun, "sh1.t", "id") == 250
        found = await pods(filled)
        for shard in (0, 1, 2, 3):
            mine = [payload["type"] for _, s, _, payload in found if s == shard and isinstance(payload, dict)]
            assert mine == ["backfill_start", "backfill_end"]
        assert {shard for _, shard, _, _ in found} == {0, 1, 2, 3}  # 77 belongs to another table
        await filled.execute("TRUNCATE tube.a; TRUNCATE tube.tube_shard")


async def test_partitioned_tables_are_backfilled_as_a_whole(db: Database) -> None:
    await db.execute(
        "CREATE TABLE p (id integer, at date) PARTITION BY RANGE (id);"
        " CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE p2 PARTITION OF p DEFAULT; INSERT INTO p SELECT i, '2026-01-01' FROM generate_series(0, 19) i;"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'p', 3)"
    )
    assert await db.fetch_value(STEP3, await start(db), "p", "id") == 20
    assert (await pods(db))[1][:3] == ("B", 3, list(range(20)))


async def test_step_2_waits_for_every_pod_writer_in_flight_and_for_nobody_else(filled: Database) -> None:
    async with filled.connection() as early, filled.connection() as reader, filled.connection() as late:
        async with early.transaction(), reader.transaction():
            await reader.fetch("SELECT * FROM sh1.t")
            await reader.execute("CREATE TABLE elsewhere (id bigint)")
            await early.execute("UPDATE sh1.t SET v = v WHERE id = 5")
            begun = int(await filled.fetch_value("SELECT tube.tube_backfill_step1()"))
            with pytest.raises(
                DatabaseError, match=r"did not end within 00:00:00.2: pid \d+ \(replicad test, UPDATE sh1.t"
            ):
                await filled.execute("SELECT tube.tube_backfill_step2('0.2 s')")
            done = trio.Event()

            async def wait() -> None:
                await filled.execute("SELECT tube.tube_backfill_step2()")
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.sleep(0.1)
                assert not done.is_set()
                async with late.transaction():
                    await late.execute("UPDATE sh1.t SET v = v WHERE id = 6")
                    await early.execute("ROLLBACK")
                    with trio.fail_after(PATIENCE):
                        await done.wait()
            await early.execute("BEGIN")
    assert await filled.fetch_value("SELECT bool_and(seq > $1) FROM tube.a", begun)


async def test_step_2_waits_for_prepared_transactions_too(filled: Database) -> None:
    if await filled.fetch_value("SELECT current_setting('max_prepared_transactions')::integer") == 0:
        pytest.skip("this server has no prepared transactions")
    async with filled.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute("UPDATE sh1.t SET v = v WHERE id = 5")
        done = trio.Event()

        async def wait() -> None:
            await filled.execute("SELECT tube.tube_backfill_step2()")
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.1)
            await connection.execute("PREPARE TRANSACTION 'tube test'")
            try:
                await trio.sleep(0.2)
                early = done.is_set()
                with pytest.raises(DatabaseError, match="prepared transaction 'tube test'"):
                    await filled.execute("SELECT tube.tube_backfill_step2('0.1 s')")
            finally:
                await connection.execute("COMMIT PREPARED 'tube test'")
        assert not early


CHANGES = {
    "predicate": "SELECT tube.tube_ensure_exists('a', 1, 'v <> 8')",
    "all rows": "SELECT tube.tube_ensure_exists('a', 1)",
}


@pytest.mark.parametrize("written_to", ["sh1.t", "sh1.heir"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_row_of_a_statement_that_began_under_an_earlier_predicate_is_in_the_backfill_after_it(
    filled: Database, written_to: str, change: str
) -> None:
    """Its session runs the trigger function that it has loaded before, and it has no lock on the tube until then."""
    await filled.execute("CREATE TABLE sh1.heir () INHERITS (sh1.t)")
    await filled.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
    insert = f"INSERT INTO {written_to} SELECT 5007, now(), 7 WHERE pg_advisory_xact_lock(4711) IS NOT NULL"
    async with filled.connection() as holder, filled.connection() as writer, trio.open_nursery() as nursery:
        await writer.execute(f"INSERT INTO {written_to} VALUES (5001, now(), 7)")
        async with holder.transaction():
            await holder.execute("SELECT pg_advisory_xact_lock(4711)")
            nursery.start_soon(writer.execute, insert)
            waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            with trio.fail_after(PATIENCE):
                while not await filled.fetch_value(waits):
                    await trio.sleep(0.01)
            await filled.execute(CHANGES[change])
            begun = await filled.fetch_value("SELECT tube.tube_backfill_step1()")
            with pytest.raises(DatabaseError, match=r"pid \d+ \(replicad test, INSERT INTO sh1"):
                await filled.execute("SELECT tube.tube_backfill_step2('0.2 s')")
        await filled.execute("SELECT tube.tube_backfill_step2()")
        await filled.fetch_value(STEP3, begun, "sh1.t", "id")
    assert 5007 in [one for _, _, ids, _ in await pods(filled) for one in ids]


async def requested(db: Database) -> list[str]:
    return [row["state"] for row in await db.fetch("SELECT state FROM tube.tube_backfill_request('a', NULL, 0, 9)")]


async def test_a_backfill_that_is_asked_for_while_another_runs_or_is_in_the_tube_is_queued_once(
    filled: Database,
) -> None:
    assert await requested(filled) == ["scheduled"]
    assert await requested(filled) == ["present"]
    await filled.execute("DELETE FROM tube.a")
    begun = await start(filled)
    await filled.fetch_row(CHUNK, begun, "sh1.t", "id", 10, 250)
    assert await requested(filled) == ["queued"]
    assert await requested(filled) == ["present"]
    await filled.execute("DELETE FROM tube.a WHERE payload ->> 'type' = 'backfill_schedule'")
    await filled.fetch_row(CHUNK, begun, "sh1.t", "id", 10_000, 250)
    assert await filled.fetch_value("SELECT finished FROM tube.tube_backfill")
    assert await requested(filled) == ["queued"], "its ids are in the tube"
    await filled.execute("DELETE FROM tube.a WHERE payload ->> 'type' = 'backfill_schedule'")
    assert await filled.fetch_value("SELECT tube.tube_backfill_schedule('a', 'id', 0, 9)") == 0, "as pg-tube has it"


async def test_a_backfill_in_the_order_of_a_composite_column_has_the_rows_with_a_null_field(db: Database) -> None:
    """Of such a row value neither IS NULL nor IS NOT NULL is true."""
    await db.execute(
        "CREATE TYPE place AS (a integer, b integer); CREATE DOMAIN home AS place;"
        "CREATE TABLE houses (id bigint PRIMARY KEY, at place, home home);"
        "INSERT INTO houses SELECT id, at::place, at::place FROM (VALUES (1, '(1,)'), (2, NULL), (3, '(,)'),"
        " (4, '(1,1)'), (5, '(,1)'), (6, '(1,)'), (7, NULL), (8, '(2,)')) AS v (id, at);"
        "SELECT tube.tube_ensure_exists('a', 1), tube.tube_table_ensure_attached('a', 'houses', 1)"
    )
    for column in ("at", "home"):
        for size in (1, 2, 3, 100):
            begun = await start(db)
            finished = False
            while not finished:
                row = await db.fetch_row(CHUNK, begun, "houses", column, size, 250)
                assert row is not None
                finished = row["finished"]
            put = [one for _, _, ids, _ in await pods(db) for one in ids]
            assert sorted(put) == list(range(1, 9)), (column, size)
            assert put[0] == 4, "rows without a NULL come first"
            await db.execute("DELETE FROM tube.a")


async def test_steps_out_of_order_or_on_the_wrong_table_are_refused(filled: Database) -> None:
    await filled.execute("CREATE TABLE sh1.u (id bigint)")
    for begun, table, order, reason in [
        ("x", "sh1.t", "id", "not what step 1"),
        (None, "sh1.t", "id", "not what step 1"),
        ("1", "sh1.u", "id", "not attached"),
        ("1", "sh1.t", "nope", "no column 'nope'"),
        ("1", "sh1.t", "ctid", "no column"),
    ]:
        with pytest.raises(TubeRefused, match=reason):
            await filled.fetch_value(STEP3, begun, table, order)
        with pytest.raises(TubeRefused, match=reason):
            await filled.fetch_value(CHUNK, begun, table, order, 10, 250)
    with pytest.raises(TubeRefused, match="no column"):
        await filled.fetch_value("SELECT tube.tube_backfill_schedule('a', 'nope', 0, 9)")
    async with filled.connection() as connection:
        with pytest.raises(TubeRefused, match="READ COMMITTED"):
            async with connection.transaction(isolation="repeatable_read"):
                await connection.execute("SELECT tube.tube_backfill_step2()")
    assert await pods(filled) == []


async def test_of_two_backfills_of_one_table_at_once_one_is_left_alone(filled: Database) -> None:
    begun = await start(filled)
    results: list[int | None] = []

    async def backfill() -> None:
        results.append(await filled.fetch_value(STEP3, begun, "sh1.t", "id"))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(backfill)
    assert sorted(results, key=lambda r: r or 0) == [None, None, None, 990]


async def test_a_backfill_in_pieces_leaves_out_no_row_where_a_database_rounds_its_numbers(db: Database) -> None:
    """The place where a piece ends is kept as text: `0.3` in place of 0.29999999999999982 would skip the next row."""
    await db.execute("CREATE TABLE rounded (id bigint PRIMARY KEY, at float8)")
    await db.execute("INSERT INTO rounded VALUES (1, 0.29999999999999982), (2, 0.2999999999999999)")
    await db.execute("SELECT tube.tube_ensure_exists('r', 1)")
    await db.execute("SELECT tube.tube_table_ensure_attached('r', 'rounded', 1)")
    async with db.connection() as connection:
        await connection.execute("SET extra_float_digits = 0")
        step1 = await connection.fetch_value("SELECT tube.tube_backfill_step1()")
        await connection.execute("SELECT tube.tube_backfill_step2()")
        put = 0
        for _ in range(4):
            row = await connection.fetch_row(
                "SELECT * FROM tube.tube_backfill_chunk($1, 'r', 'rounded', 'at', 1, 1)", step1
            )
            assert row is not None
            put += row["ids"] or 0
            if row["finished"]:
                break
    assert put == 2
