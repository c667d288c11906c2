"""Which columns name a row in a tube, and what becomes of their values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from replicad.errors import DatabaseError, TubeRefused
from replicad.postgres.bridge import Database

Pod = tuple[str, int, list[int]]
Take = Callable[[str], Awaitable[list[Pod]]]

DOMAINS = "CREATE DOMAIN sh1.positive AS integer CHECK (VALUE > 0); CREATE DOMAIN sh1.film_id AS sh1.positive;"
WIDTHS = ["smallint", "integer", "bigint", "sh1.positive", "sh1.film_id"]


async def attach(db: Database, columns: str, more: str = "") -> None:
    """A tube `a`, and a table sh1.t of these columns that is attached to it."""
    await db.execute(
        f"CREATE SCHEMA sh1; {DOMAINS} CREATE TABLE sh1.t ({columns}); SELECT tube.tube_ensure_exists('a');"
        f"SELECT tube.tube_table_ensure_attached('a', 'sh1.t'{more})"
    )


async def backfill(db: Database, *, routed: bool = False, order: str = "NULL") -> None:
    """Backfill sh1.t by pieces of two ids."""
    step1 = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step2()")
    finished = False
    while not finished:
        finished = await db.fetch_value(
            f"SELECT finished FROM tube.tube_backfill_chunk($1, 'a', 'sh1.t', {order}, max_ids => 2)", step1
        )


@pytest.mark.parametrize("type", WIDTHS)
@pytest.mark.parametrize("name", ["film_id", "Film Id", "tube_row", "shard", "ids", "op"])
@pytest.mark.parametrize("more", ["", ", routing => '1'", ", predicate => 'v IS NULL OR v < 100'"])
async def test_an_integer_primary_key_of_any_width_and_name_is_the_key(
    db: Database, take: Take, type: str, name: str, more: str
) -> None:
    await attach(db, f'"{name}" {type} PRIMARY KEY, v integer', more)
    await db.execute("INSERT INTO sh1.t VALUES (7, 0), (3, NULL)")
    await db.execute(f'UPDATE sh1.t SET "{name}" = 8 WHERE "{name}" = 7')
    await db.execute("UPDATE sh1.t SET v = 1")
    await db.execute("SELECT sh1.t_touch('{3,5}')")
    await db.execute(f'DELETE FROM sh1.t WHERE "{name}" = 3')
    pods = await take("a")
    assert pods[:2] == [("I", 1, [7, 3]), ("U", 1, [8, 7])]
    assert [(op, shard, sorted(ids)) for op, shard, ids in pods[2:]] == [
        ("U", 1, [3, 8]), ("T", 1, [3, 5]), ("D", 1, [3])]  # fmt: skip
    await db.execute("TRUNCATE sh1.t")
    assert await take("a") == [("D", 1, [8])]


async def test_a_named_key_replaces_the_primary_key_and_stays_until_another_is_named(db: Database, take: Take) -> None:
    await attach(db, "id integer PRIMARY KEY, code bigint UNIQUE", ", key => '{code}'")
    await db.execute("INSERT INTO sh1.t VALUES (1, 100)")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'id > 0')")
    await db.execute("INSERT INTO sh1.t VALUES (2, 200)")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', key => '{id}')")
    await db.execute("UPDATE sh1.t SET code = 201 WHERE id = 2")
    assert [ids for _, _, ids in await take("a")] == [[100], [200], [2]]
    assert await db.fetch_value("SELECT key FROM tube.tube_list('sh1.t')") == ["id"]


async def test_a_renamed_key_fails_writes_until_the_table_is_attached_again(db: Database, take: Take) -> None:
    await attach(db, "film_id integer PRIMARY KEY")
    await db.execute("ALTER TABLE sh1.t RENAME film_id TO movie_id")
    with pytest.raises(DatabaseError, match="film_id"):
        await db.execute("INSERT INTO sh1.t VALUES (1)")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
    await db.execute("INSERT INTO sh1.t VALUES (1)")
    assert await take("a") == [("I", 1, [1])]


async def test_without_a_primary_key_the_column_id_is_the_key(db: Database, take: Take) -> None:
    await attach(db, "id integer, v integer")
    await db.execute("INSERT INTO sh1.t VALUES (4, 1), (NULL, 2)")
    assert await take("a") == [("I", 1, [4])]


@pytest.mark.parametrize(
    ("columns", "more", "reason"),
    [
        ("v integer", "", "no primary key and no column called id"),
        ("id integer PRIMARY KEY", ", key => '{code}'", "no column called code"),
        ("id integer PRIMARY KEY", ", key => '{}'", "no primary key and no column"),
        ("id integer PRIMARY KEY", ", key => '{ctid}'", "no column called ctid"),
    ],
)
async def test_a_table_without_such_a_key_is_refused(db: Database, columns: str, more: str, reason: str) -> None:
    with pytest.raises(TubeRefused, match=reason):
        await attach(db, columns, more)


async def test_partitions_and_heirs_have_the_key_of_their_table(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (film_id integer PRIMARY KEY, v integer) PARTITION BY RANGE (film_id);"
        "CREATE TABLE sh1.low (v integer, dropped integer, film_id integer NOT NULL);"
        "ALTER TABLE sh1.low DROP dropped; ALTER TABLE sh1.t ATTACH PARTITION sh1.low FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE sh1.parent (film_id integer PRIMARY KEY); CREATE TABLE sh1.heir () INHERITS (sh1.parent);"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'sh1.t'),"
        " tube.tube_table_ensure_attached('a', 'sh1.parent')"
    )
    await db.execute("INSERT INTO sh1.t VALUES (1)")
    await db.execute("INSERT INTO sh1.low (film_id) VALUES (2)")
    await db.execute("INSERT INTO sh1.heir VALUES (3)")
    await db.execute("UPDATE sh1.t SET v = 1 WHERE film_id = 2")
    await db.execute("UPDATE sh1.parent SET film_id = 4")
    assert [ids for _, _, ids in await take("a")] == [[1], [2], [3], [2], [4, 3]]


@pytest.mark.parametrize("type", WIDTHS)
@pytest.mark.parametrize("more", ["", ", routing => '(film_id % 2)::integer'"])
async def test_a_backfill_puts_every_key_once_by_pieces_and_as_a_whole(
    db: Database, take: Take, type: str, more: str
) -> None:
    await attach(db, f"film_id {type} PRIMARY KEY, v integer", more)
    await db.execute("INSERT INTO sh1.t SELECT i, nullif(i % 3, 0) FROM generate_series(1, 9) i")
    await take("a")
    await backfill(db)
    pods = await take("a")
    assert sorted(i for op, _, ids in pods if op == "B" for i in ids) == list(range(1, 10))
    await backfill(db, order="'v'")
    assert [i for op, _, ids in await take("a") if op == "B" for i in ids] == [1, 4, 7, 2, 5, 8, 3, 6, 9] or more
    step1 = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step3($1, 'a', 'sh1.t', NULL)", step1)
    assert sorted(i for op, _, ids in await take("a") if op == "B" for i in ids) == list(range(1, 10))


async def test_a_scheduled_backfill_has_the_order_of_the_key(db: Database) -> None:
    await attach(db, "film_id integer PRIMARY KEY")
    assert await db.fetch_value("SELECT tube.tube_backfill_schedule('a', NULL, 0, 9)") == 1
    assert await db.fetch_value("SELECT order_col FROM tube.tube_backfills('a')") == "film_id"
    assert await db.fetch_value("SELECT tube.tube_backfill_schedule('a', 'film_id', 0, 9)") == 0


async def test_attachments_with_the_key_id_share_one_function(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY); CREATE TABLE sh1.u (id smallint PRIMARY KEY);"
        "CREATE TABLE sh1.w (w_id integer PRIMARY KEY);"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'sh1.t'),"
        " tube.tube_table_ensure_attached('a', 'sh1.u'), tube.tube_table_ensure_attached('a', 'sh1.w')"
    )
    functions = await db.fetch("SELECT DISTINCT tgfoid::regproc::text FROM pg_trigger WHERE tgname ~ '_after_insert_'")
    assert len(functions) == 2
    assert "tube.a_trigger" in {row[0] for row in functions}
