"""The tubes' SQL on every other Postgres that this machine has (Debian's, say), from 15 on, in one long scenario.

All tests of this folder run against one of them with REPLICAD_TEST_POSTGRES=URL; this file sees to it that a statement
that an older version does not know is noticed without that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from replicad.errors import LeaseHeld, LeaseLost, PartitionsChanged, TubeRefused
from replicad.postgres.bridge import Database, Row, open_database
from replicad.postgres.schema import script
from tests.other_servers import PROGRAMS, other_server

CATALOGS = """
    SELECT array_agg(name ORDER BY name) FROM (
        SELECT oid::regclass::text FROM pg_class WHERE relnamespace <> 'pg_toast'::regnamespace
        UNION ALL SELECT oid::regprocedure::text FROM pg_proc
        UNION ALL SELECT tgname::text FROM pg_trigger
    ) AS objects (name)
"""


@pytest.fixture(params=PROGRAMS, ids=str)
def other_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a fresh server of another version."""
    with other_server(request.param) as url:
        yield url


async def test_the_whole_interface_works_on_it_and_leaves_no_trace(
    other_url: str, psql_script: Callable[[str, str], str]
) -> None:
    async with open_database(other_url, size=4, application_name="replicad test") as db:
        before = await db.fetch_value(CATALOGS)
        for _ in range(2):
            psql_script(other_url, script("tube", "tube", "up"))
        await writes(db)
        await reads(db)
        await backfills(db)
        await db.execute("DROP SCHEMA sh7 CASCADE")
        psql_script(other_url, script("tube", "tube", "down"))
        assert await db.fetch_value(CATALOGS) == before


async def writes(db: Database) -> None:
    await db.execute(
        'CREATE SCHEMA sh7; CREATE TABLE sh7."T.t" (id bigint, v integer) PARTITION BY RANGE (id);'
        'CREATE TABLE sh7.low PARTITION OF sh7."T.t" FOR VALUES FROM (0) TO (1000);'
        'CREATE TABLE sh7.high PARTITION OF sh7."T.t" DEFAULT;'
        "SELECT tube.tube_ensure_exists('a', 2, 'v > 0'), tube.tube_ensure_exists('b', 3);"
        "SELECT tube.tube_table_ensure_attached('a', 'sh7.\"T.t\"');"
        "SELECT tube.tube_table_ensure_attached('b', 'sh7.\"T.t\"', 1, 'v < 9', 'v');"
    )
    for statement in (
        'INSERT INTO sh7."T.t" SELECT i, i % 10 FROM generate_series(1, 300) i',
        "UPDATE sh7.low SET v = 0 WHERE id = 1", 'UPDATE sh7."T.t" SET id = 5000 WHERE id = 2',
        "DELETE FROM sh7.high WHERE id = 5000",
        'MERGE INTO sh7."T.t" t USING (VALUES (3)) AS s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET v = 4',
        "SELECT sh7.\"T.t_touch\"('{3}')", "SELECT tube.a_touch(1, '{}', 'T', '{\"x\": 1}')", "TRUNCATE sh7.low",
    ):  # fmt: skip
        await db.execute(statement)
    rows = await db.fetch("SELECT op, shard, cardinality(ids) AS ids FROM tube.a ORDER BY seq")
    assert [tuple(row) for row in rows] == [
        ("I", 7, 250), ("I", 7, 20), ("U", 7, 1), ("U", 7, 2), ("D", 7, 1), ("U", 7, 1), ("T", 7, 1), ("T", 1, 0),
        ("D", 7, 250), ("D", 7, 18),
    ]  # fmt: skip
    rows = await db.fetch("SELECT op, shard, ids FROM tube.b WHERE op IN ('U', 'T') ORDER BY seq, shard")
    assert [tuple(row) for row in rows] == [
        ("U", 0, [1]), ("U", 1, [1]), ("U", 2, [5000, 2]), ("U", 3, [3]), ("U", 4, [3]), ("T", 4, [3]),
    ]  # fmt: skip
    with pytest.raises(TubeRefused, match="does not fit"):
        await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh7.\"T.t\"', 1, 'nope')")


async def reads(db: Database) -> None:
    term = await db.fetch_value("SELECT term FROM tube.tube_lease_claim('a', 2, 1, 'me', '1 s', '{}')")
    with pytest.raises(LeaseHeld):
        await db.execute("SELECT tube.tube_lease_claim('a', 1, 0, 'you', '1 s', NULL)")
    plan = await db.fetch_row("SELECT * FROM tube.tube_plan('a', 2, 1, $1, 0, 0, 1000000, 5, 10000, 1)", term)
    assert plan is not None
    assert (plan["pods"], plan["ids"]) == (5, 274)
    query = await db.fetch_value("SELECT tube.tube_lines_sql('a', 2, 1, $1, 0, 0, $2, 0)", term, plan["regular"])
    assert len(await collect(db.copy_out, query)) == 5
    seqs = [row["seq"] for row in await db.fetch(await db.fetch_value("SELECT tube.tube_pods_sql('a', 2, 1)"))]
    assert await db.fetch_value("SELECT pods FROM tube.tube_ack('a', 2, 1, $1, $2)", term, seqs[:1]) == 1
    assert await db.fetch_value("SELECT tube.tube_park('a', 2, 1, $1, $2, NULL, 3, 'bad')", term, seqs[1]) == 20
    assert await db.fetch_value("SELECT tube.tube_parked_replay('a')") == 1
    assert (
        await db.fetch_value("SELECT pods FROM tube.tube_ack_upto('a', 2, 1, $1, 0, 0, $2, 0)", term, plan["regular"])
        == 3
    )
    assert await db.fetch_value("SELECT tube.tube_lease_release('a', 2, 1, $1)", term)
    with pytest.raises(LeaseLost):
        await db.fetch(query)
    assert [row["inc_count"] for row in await db.fetch("SELECT * FROM tube.tube_stats() WHERE tube = 'a'")] == [0, 6]
    await db.execute("SELECT tube.tube_ensure_exists('a', 3, 'v > 0')")
    with pytest.raises(PartitionsChanged):
        await db.execute("SELECT tube.tube_pods_delete('a', 2, 1, '{1}')")


async def backfills(db: Database) -> None:
    await db.execute('INSERT INTO sh7."T.t" SELECT i, 5 FROM generate_series(1, 600) i; TRUNCATE tube.a, tube.b')
    begun = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step2()")
    assert await db.fetch_value("SELECT tube.tube_backfill_schedule('a', 'id', 0, 9)") == 1
    assert await db.fetch_value("SELECT tube.tube_backfill_step3($1, 'a', 'sh7.\"T.t\"', 'id')", begun) == 600
    pieces: list[Row] = []
    while not (pieces and pieces[-1]["finished"]):
        row = await db.fetch_row(
            "SELECT * FROM tube.tube_backfill_chunk($1, 'b', 'sh7.\"T.t\"', 'v', NULL, 250)", begun
        )
        assert row is not None
        pieces.append(row)
    assert [row["ids"] for row in pieces] == [250, 250, 100]
    insert = "SELECT tube.tube_pods_insert('a, b', 'SELECT i AS id, i AS row_number FROM generate_series(1, 9) i', 3)"
    assert await db.fetch_value(insert) == 9


async def collect(copy_out: Callable[..., Awaitable[int]], query: str) -> list[bytes]:
    chunks: list[bytes] = []

    async def keep(chunk: bytes) -> None:
        chunks.append(chunk)

    await copy_out(query, sink=keep)
    return b"".join(chunks).splitlines()
