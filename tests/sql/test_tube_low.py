"""Low-water marks: reads pass no pods that were acked, miss none, and the daemon moves the marks."""

from __future__ import annotations

import json

from replicad.postgres.bridge import Database
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from replicad.tubes.pods import MARK_EVERY, PodBook, PodReadBounds

FILL = """
    INSERT INTO tube.a (op, shard, ids)
    SELECT CASE WHEN i % 3 = 0 THEN 'B' ELSE 'U' END, i % 8, ARRAY[i] FROM generate_series(1, {0}) i
"""
CLAIM = "SELECT term FROM tube.tube_lease_claim('a', $1, 0, 'me', '1 hour', '{}')"


async def test_reads_begin_behind_acked_pods_that_vacuum_may_not_remove_and_miss_none(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    read = "SELECT tube.tube_range_sql(tube.tube_find('a'), $1, $2, $3, upto => $4, pods => 10)"

    async def pages(partitions: int, backfill: bool, upto: int) -> int:
        """How many pages a read from the start touches."""
        query = await db.fetch_value(read, partitions, 0, backfill, upto)
        plan = json.loads(await db.fetch_value("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + query))[0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    async with db.connection() as snapshot, db.connection() as late:
        await snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tube.a")
        await db.execute(FILL.format(20_000))
        await db.execute("DELETE FROM tube.a")
        await late.execute("BEGIN; SELECT tube.a_touch(0, '{7}', 'U'); SELECT tube.a_touch(0, '{8}', 'B')")
        position = await db.fetch_value("SELECT last_value - 2 FROM tube.tube_seq")  # that of the tube: late holds it
        await db.execute(FILL.format(300))
        upto = await db.fetch_value("SELECT last_value FROM tube.tube_seq")
        expected = {}
        for case in [(n, backfill) for n in (1, 2) for backfill in (False, True)]:
            assert await pages(*case, upto) > 40
            expected[case] = [r["seq"] for r in await db.fetch(await db.fetch_value(read, case[0], 0, case[1], upto))]
        for partition in (0, 1):
            await db.execute("SELECT tube.tube_low_raise('a', 2, $1, $2)", partition, position)
        await db.execute("SELECT tube.tube_low_raise('a', 1, 0, $1)", position)
        for case, seqs in expected.items():
            assert await pages(*case, upto) < 20
            assert [r["seq"] for r in await db.fetch(await db.fetch_value(read, case[0], 0, case[1], upto))] == seqs
        await late.execute("COMMIT")
        for n in (1, 2):
            for backfill, seq in ((False, position + 1), (True, position + 2)):
                first = (await db.fetch(await db.fetch_value(read, n, 0, backfill, upto)))[0]
                assert (first["seq"], first["ids"]) == (seq, [7 + backfill])
        await db.execute("SELECT tube.tube_low_raise('a', 1, 0, $1)", upto)
        assert {r["seq"] for r in await db.fetch("SELECT seq FROM tube.tube_low")} == {position}
        await snapshot.execute("ROLLBACK")
    statement = "SELECT inc_count, inc_min_seq FROM tube.tube_stats() WHERE partition = 0"
    row = await db.fetch_row(statement)
    await db.execute("DELETE FROM tube.tube_low")
    assert row == await db.fetch_row(statement)


async def test_a_daemon_moves_the_mark_while_its_workers_ack(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await db.execute(FILL.format(12_000))
    last = await db.fetch_value("SELECT max(seq) FROM tube.a")
    term = await db.fetch_value(CLAIM, 2)
    book, part, start = PodBook(db, db, db, "tube"), Part(0, 2), Cursor(0, 0)
    planned = await book.plan("a", part, term, start, PodReadBounds(last, MARK_EVERY))
    assert await book.ack_upto("a", part, term, start, planned.cursor) == MARK_EVERY
    first = await db.fetch_value("SELECT min(seq) FROM tube.a WHERE shard % 2 = 0 AND op <> 'B'")
    mark = "SELECT seq FROM tube.tube_low WHERE (partitions, partition) = (2, 0) AND NOT backfill"
    assert await db.fetch_value(mark) == first - 1
    assert (await book.plan("a", part, term, start, PodReadBounds(last, 1))).cursor.regular == first


async def test_a_mark_above_the_position_is_not_believed_and_goes_with_the_tube(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a'); SELECT tube.a_touch(0, '{7}', 'U')")
    seq = await db.fetch_value("SELECT seq FROM tube.a")
    term = await db.fetch_value(CLAIM, 1)  # begins the first generation, which begins the marks anew
    await db.execute("SELECT tube.tube_low_put('a', 1, 0, false, $1)", seq + 100)
    plan = "SELECT pods FROM tube.tube_plan('a', 1, 0, $1, 0, 0, $2, 10)"
    assert await db.fetch_value(plan, term, seq) == 1
    assert await db.fetch_value(plan, term, seq + 100) == 0
    await db.execute("SELECT tube.tube_ensure_absent('a')")
    assert await db.fetch_value("SELECT count(*) FROM tube.tube_low") == 0
