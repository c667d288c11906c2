"""Tubes and attachments: creating, altering, refusing, listing, dropping; names of every kind; partitioned tables."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio

from replicad.errors import DatabaseError, TubeError, TubeRefused, UnknownTube, UsageError
from replicad.postgres.bridge import Connection, Database, quote_ident

Take = Callable[[str], Awaitable[list[tuple[str, int, list[int]]]]]

LONG = "x" * 63
HOSTILE = ['Robert"); DROP TABLE', "it's", "MiXed", "a.b.c", "ünïcödé ∑", "SELECT", LONG, "é" * 31]


async def attach(db: Database, tube: str, table: str, *arguments: object) -> None:
    marks = "".join(f", ${n + 3}" for n in range(len(arguments)))
    await db.execute(f"SELECT tube.tube_table_ensure_attached($1, $2::text::regclass{marks})", tube, table, *arguments)


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_identifier_works_as_schema_table_and_tube(db: Database, take: Take, name: str) -> None:
    tube = name.replace(" ", "_")[: 50 if name.isascii() else 25]
    table = f"{quote_ident(name + '7' if len(name) < 31 else name[:-1] + '7')}.{quote_ident(name)}"
    await db.execute(f"CREATE SCHEMA {table.rpartition('.')[0] if '.' not in name else quote_ident(name + '7')}")
    await db.execute(f"CREATE TABLE {table} (id bigint, {quote_ident(name)} integer)")
    await db.execute("SELECT tube.tube_ensure_exists($1, 3, $2)", tube, f"{quote_ident(name)} > 0 -- a comment")
    for _ in range(2):
        await attach(db, tube, table)
    await db.execute(f"INSERT INTO {table} VALUES (1, 1), (2, 0), (3, 1)")
    await db.execute(f"UPDATE {table} SET {quote_ident(name)} = 0 WHERE id = 1")
    await db.execute(f"DELETE FROM {table} WHERE id = 3")
    await db.execute(f"INSERT INTO {table} VALUES (4, 5)")
    await db.execute(f"TRUNCATE {table}")
    assert await take(tube) == [("I", 7, [1, 3]), ("U", 7, [1]), ("D", 7, [3]), ("I", 7, [4]), ("D", 7, [4])]

    touch = quote_ident(await db.fetch_value("SELECT tube.tube_object_name($1, '_touch')", name))
    schema = table[: -len(quote_ident(name)) - 1]
    assert await db.fetch_value(f"SELECT {schema}.{touch}('{{8, 9}}')") == 1
    start = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute(f"INSERT INTO {table} VALUES (5, 5)")
    await db.execute("SELECT tube.tube_backfill_step3($1, $2, $3::text::regclass, $4)", start, tube, table, name)
    assert await take(tube) == [
        ("T", 7, [8, 9]), ("I", 7, [5]), ("backfill_start", 7, []), ("B", 7, [5]), ("backfill_end", 7, []),
    ]  # fmt: skip
    await db.execute("SELECT tube.tube_ensure_absent($1)", tube)
    assert (
        await db.fetch("SELECT FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk' AND tgname !~ '^RI_'")
        == []
    )


@pytest.mark.parametrize("name", ["", "a b", "a\tb", "a\nb", "a\x7fb", "x" * 51, "é" * 26, None])
async def test_a_tube_whose_name_would_break_a_line_or_an_index_is_refused(db: Database, name: str | None) -> None:
    with pytest.raises(UsageError, match="no white space"):
        await db.execute("SELECT tube.tube_ensure_exists($1)", name)


async def test_a_tube_never_takes_the_place_of_something_else(db: Database) -> None:
    for name in ("tube_registry", "tube_seq", "tube_parked_tube", "tube_truncate", "tube_check"):
        with pytest.raises(TubeRefused, match=f"{name}.*is taken"):
            await db.execute("SELECT tube.tube_ensure_exists($1)", name)
    await db.execute("CREATE TABLE tube.b_control (); CREATE TABLE tube.c_pods_4 ()")
    with pytest.raises(TubeRefused, match="b_control"):
        await db.execute("SELECT tube.tube_ensure_exists('b')")
    with pytest.raises(TubeRefused, match="c_pods_4"):
        await db.execute("SELECT tube.tube_ensure_exists('c', 4)")
    await db.execute("DROP TABLE tube.b_control, tube.c_pods_4")
    assert await db.fetch("SELECT * FROM tube.tube_list()") == []


@pytest.mark.parametrize("partitions", [0, -1, 32769, None])
async def test_a_tube_has_1_to_32768_partitions(db: Database, partitions: int | None) -> None:
    with pytest.raises(UsageError, match="1 to 32768"):
        await db.execute("SELECT tube.tube_ensure_exists('a', $1)", partitions)


async def test_a_tube_has_the_columns_index_and_storage_that_its_users_rely_on(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 4)")
    columns = await db.fetch(
        "SELECT attname, format_type(atttypid, atttypmod), attstorage FROM pg_attribute"
        " WHERE attrelid = 'tube.a'::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert [tuple(row) for row in columns] == [
        ("seq", "bigint", b"p"), ("op", "character(1)", b"x"), ("shard", "integer", b"p"), ("ids", "bigint[]", b"p"),
        ("payload", "jsonb", b"x"), ("ts", "timestamp with time zone", b"p"),
    ]  # fmt: skip
    assert await db.fetch_value("SELECT seqcache FROM pg_sequence WHERE seqrelid = 'tube.tube_seq'::regclass") == 1
    assert await db.fetch_value("SELECT tube.a_touch(1, array(SELECT generate_series(1, 900)), 'T', NULL, 900)") == 1
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    indexes = await db.fetch("SELECT indexname FROM pg_indexes WHERE tablename = 'a' ORDER BY 1")
    assert [row[0] for row in indexes] == ["a_control", "a_pkey", "a_pods_2"]
    assert await db.fetch_value("SELECT count(*) FROM tube.a") == 1


async def test_ensuring_what_is_so_already_writes_nothing_and_waits_for_nobody(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); SELECT tube.tube_ensure_exists('a', 2, 'id > 0')"
    )
    await attach(db, "a", "sh1.t")
    state = (
        "SELECT array_agg(x::text) FROM (SELECT xmin::text || oid AS x FROM pg_proc WHERE oid >= 16384 UNION ALL"
        " SELECT xmin::text || oid FROM pg_trigger WHERE oid >= 16384 UNION ALL"
        " SELECT xmin::text || oid FROM pg_class WHERE oid >= 16384 ORDER BY 1) AS y"
    )
    before = await db.fetch_value(state)
    async with db.connection() as busy, busy.transaction():
        await busy.execute("INSERT INTO sh1.t VALUES (1)")
        async with db.connection() as connection:
            await connection.execute("SET lock_timeout = '1s'")
            await connection.execute("SELECT tube.tube_ensure_exists('a', 2, 'id > 0')")
            await connection.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
    assert await db.fetch_value(state) == before


async def test_an_index_that_readers_hold_is_dropped_later_and_stops_nobody(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 1)")
    async with db.connection() as reader, reader.transaction():
        await reader.fetch("SELECT * FROM tube.a")
        await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
        await db.execute("SELECT tube.a_touch(1, '{1}', 'T')")
        assert await db.fetch_value("SELECT to_regclass('tube.a_pods_1') IS NOT NULL")
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    assert await db.fetch_value("SELECT to_regclass('tube.a_pods_1') IS NULL")
    assert await db.fetch_value("SELECT to_regclass('tube.a_pods_2') IS NOT NULL")


async def test_the_shard_comes_from_the_schemas_name_or_is_the_lowest_free_one(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh0042; CREATE SCHEMA sh99999999999; CREATE TABLE sh0042.t (id bigint);"
        "CREATE TABLE sh99999999999.t (id bigint); CREATE TABLE public.t (id bigint);"
        " SELECT tube.tube_ensure_exists('a')"
    )
    await attach(db, "a", "sh0042.t")
    with pytest.raises(TubeRefused, match="from 0 up"):
        await attach(db, "a", "public.t", -1)
    await attach(db, "a", "public.t", 3)
    await attach(db, "a", "public.t")  # what it has is kept
    await attach(db, "a", "sh99999999999.t")
    await db.execute("CREATE TABLE public.u (id bigint); CREATE TABLE public.v (id bigint, at integer)")
    await attach(db, "a", "public.u")
    await attach(db, "a", "public.v", None, None, "at")
    assert [tuple(row) for row in await db.fetch("SELECT tbl::text, shard FROM tube.tube_list() ORDER BY 1")] == [
        ("sh0042.t", 42), ("sh99999999999.t", 0), ("t", 3), ("u", 1), ("v", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("CREATE TABLE sh1.t (nr bigint)", "no primary key and no column called id"),
        ("CREATE TABLE sh1.t (id json)", "its type json has no order"),
        ("CREATE VIEW sh1.t AS SELECT 1::bigint AS id", "no ordinary or partitioned table"),
        ("CREATE TABLE sh1.p (id bigint) PARTITION BY RANGE (id); CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s"
         " FOREIGN DATA WRAPPER w; CREATE TABLE sh1.t (id bigint) PARTITION BY RANGE (id);"
         " CREATE FOREIGN TABLE sh1.f PARTITION OF sh1.t DEFAULT SERVER s", "no ordinary or partitioned table.*sh1.f"),
    ],
)  # fmt: skip
async def test_a_table_that_cannot_be_followed_is_refused_with_the_reason(db: Database, ddl: str, reason: str) -> None:
    await db.execute(f"CREATE SCHEMA sh1; {ddl}; SELECT tube.tube_ensure_exists('a')")
    with pytest.raises(TubeRefused, match=reason):
        await attach(db, "a", "sh1.t")
    await db.execute("DROP FOREIGN DATA WRAPPER IF EXISTS w CASCADE")


async def test_tubes_do_not_follow_tubes_temporary_tables_or_what_they_follow_already(db: Database) -> None:
    await db.execute(
        "SELECT tube.tube_ensure_exists('a'); CREATE TABLE p1 (id bigint) PARTITION BY RANGE (id);"
        "CREATE TABLE p1_low PARTITION OF p1 FOR VALUES FROM (0) TO (10)"
    )
    for own in ("tube.tube_parked", "tube.a"):
        with pytest.raises(TubeRefused, match="a table of the tubes themselves"):
            await attach(db, "a", own, 1)
    async with db.connection() as connection:
        await connection.execute("CREATE TEMP TABLE t1 (id bigint)")
        with pytest.raises(TubeRefused, match="temporary"):
            await connection.execute("SELECT tube.tube_table_ensure_attached('a', 't1', 1)")
    await attach(db, "a", "p1", 1)
    with pytest.raises(TubeRefused, match=r"attached through public.p1"):
        await attach(db, "a", "p1_low", 2)
    with pytest.raises(TubeRefused, match=r"through public.p1"):
        await db.execute("SELECT tube.tube_table_ensure_detached('a', 'p1_low')")
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'p1')")
    await attach(db, "a", "p1_low", 2)
    with pytest.raises(TubeRefused, match="attached by itself"):
        await attach(db, "a", "p1", 1)
    with pytest.raises(UnknownTube, match="no tube 'b'"):
        await attach(db, "b", "p1", 1)


@pytest.mark.parametrize(
    ("what", "expression", "reason"),
    [
        ("predicate", "nope = 1", "column .nope. does not exist"),
        ("predicate", "status", "yields text instead of boolean"),
        ("predicate", "count(*) > 0", "aggregate"),
        ("predicate", "status = 'a') OR (true", "argument of OR"),
        ("predicate", "true /* open", "unterminated"),
        ("predicate", "id, status", "yields record"),
        ("routing", "id", "yields bigint instead of integer.*1024"),
        ("routing", "generate_series(1, 2)", "set-returning"),
        ("routing", "status", "yields text instead of integer"),
    ],
)
async def test_expressions_are_checked_against_the_table_when_they_are_set(
    db: Database, what: str, expression: str, reason: str
) -> None:
    await db.execute("CREATE TABLE t1 (id bigint, status text); SELECT tube.tube_ensure_exists('a')")
    predicate, routing = (expression, None) if what == "predicate" else (None, expression)
    with pytest.raises(TubeRefused, match=rf"(?s){what} .* does not fit table public.t1: .*{reason}"):
        await attach(db, "a", "t1", 1, predicate, routing)
    with pytest.raises(TubeRefused, match="is empty"):
        await attach(db, "a", "t1", 1, " ", None)
    await attach(db, "a", "t1", 1)
    if what == "predicate":
        with pytest.raises(TubeRefused, match=reason):
            await db.execute("SELECT tube.tube_ensure_exists('a', 1, $1)", expression)
    await db.execute("INSERT INTO t1 VALUES (1)")
    assert await db.fetch_value("SELECT count(*) FROM tube.a") == 1


async def test_a_predicate_that_is_not_sql_is_refused_before_any_table_is_attached(db: Database) -> None:
    for predicate in ("status = = 1", "true /* open", "'open"):
        with pytest.raises(TubeRefused, match="is not SQL"):
            await db.execute("SELECT tube.tube_ensure_exists('a', 1, $1)", predicate)


async def test_detaching_and_dropping_are_idempotent_and_take_everything_with_them(db: Database) -> None:
    await db.execute("CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint)")
    for tube in ("a", "b", "c"):
        await db.execute("SELECT tube.tube_ensure_exists($1)", tube)
        await attach(db, tube, "sh1.t")
    await db.execute("ALTER TABLE sh1.t RENAME TO renamed")
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.renamed')")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 8
    assert await db.fetch_value("SELECT sh1.renamed_touch('{1}')") == 2
    assert await db.fetch_value("SELECT to_regproc('sh1.t_touch') IS NULL")
    await db.execute("SELECT tube.tube_ensure_absent('b')")
    assert await db.fetch_value("SELECT sh1.renamed_touch('{1}')") == 1
    for _ in range(2):
        await db.execute("SELECT tube.tube_table_ensure_detached(NULL, 'sh1.renamed')")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 0
    assert await db.fetch_value("SELECT to_regproc('sh1.renamed_touch') IS NULL")
    for tube in ("a", "b", "c", "c", "never"):
        await db.execute("SELECT tube.tube_ensure_absent($1)", tube)
    assert await db.fetch("SELECT * FROM tube.tube_list()") == []


async def test_a_dropped_table_leaves_the_list_and_takes_its_touch_function_along_at_the_next_change(
    db: Database,
) -> None:
    await db.execute("CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); CREATE TABLE sh1.u (id bigint)")
    await db.execute("SELECT tube.tube_ensure_exists('a'), tube.tube_ensure_exists('b')")
    await attach(db, "a", "sh1.t")
    await attach(db, "b", "sh1.t")
    await db.execute("DROP TABLE sh1.t")
    assert [row["tbl"] for row in await db.fetch("SELECT * FROM tube.tube_list()")] == [None, None]
    await db.execute("SELECT tube.tube_ensure_absent('b')")
    await db.execute("SELECT tube.tube_ensure_exists('a', 2, 'id > 0')")
    await attach(db, "a", "sh1.u")
    assert await db.fetch_value("SELECT to_regproc('sh1.t_touch') IS NULL AND to_regproc('sh1.u_touch') IS NOT NULL")
    assert await db.fetch_value("SELECT count(*) FROM tube.tube_attachment") == 1


async def test_a_function_of_the_users_own_is_never_overwritten(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); SELECT tube.tube_ensure_exists('a');"
        "CREATE FUNCTION sh1.t_touch(bigint[], character, jsonb, integer) RETURNS bigint LANGUAGE"
        " sql AS 'SELECT 42::bigint'"
    )
    with pytest.raises(TubeRefused, match="t_touch exists and is not ours"):
        await attach(db, "a", "sh1.t")
    assert await db.fetch_value("SELECT sh1.t_touch('{}', 'T', NULL, 1)") == 42


async def test_the_list_shows_tubes_without_tables_expressions_and_partitions_that_were_made_later(
    db: Database,
) -> None:
    await db.execute(
        "SELECT tube.tube_ensure_exists('a', 3, 'id > 5'), tube.tube_ensure_exists('empty');"
        "CREATE TABLE p1 (id bigint) PARTITION BY RANGE (id);"
        "SELECT tube.tube_table_ensure_attached('a', 'p1', 4, 'id < 9', 'id::integer');"
        "CREATE TABLE p1_low PARTITION OF p1 FOR VALUES FROM (0) TO (10)"
    )
    rows = [tuple(row) for row in await db.fetch("SELECT * FROM tube.tube_list()")]
    assert [(*r[:3], r[4], *r[5:7]) for r in rows] == [
        ("a", "id > 5", 3, 4, "id < 9", "id::integer"), ("empty", None, 1, None, None, None),
    ]  # fmt: skip
    assert await db.fetch_value("SELECT unattached::text FROM tube.tube_list('p1')") == "{p1_low}"
    await attach(db, "a", "p1", 4)
    assert await db.fetch_value("SELECT unattached::text FROM tube.tube_list('p1')") == "{}"


async def test_predicates_see_the_callers_schemas_but_none_where_everybody_may_create_objects(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA lib; CREATE FUNCTION lib.is_live(text) RETURNS boolean LANGUAGE sql AS $$ SELECT $1 = 'live' $$;"
        "CREATE SCHEMA open; GRANT CREATE ON SCHEMA open TO PUBLIC;"
        "CREATE FUNCTION open.is_live(text) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;"
        "CREATE TABLE public.t (id bigint, status text); SELECT tube.tube_ensure_exists('a')"
    )
    async with db.connection() as connection:
        await connection.execute("SET search_path = open, lib, public")
        await connection.execute("SELECT tube.tube_table_ensure_attached('a', 't', 1, 'is_live(status)')")
    await db.execute("INSERT INTO t VALUES (1, 'live'), (2, 'dead')")
    assert await db.fetch_value("SELECT ids FROM tube.a") == [1]
    async with db.connection() as connection:
        await connection.execute("SET search_path = open, public")
        with pytest.raises(TubeRefused, match=r"is_live.*looked up along public, pg_temp"):
            await connection.execute("SELECT tube.tube_table_ensure_attached('a', 't', 1, 'is_live(status)')")


async def test_two_tubes_can_be_attached_and_dropped_at_the_same_time(db: Database) -> None:
    await db.execute("CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); CREATE TABLE sh1.u (id bigint)")

    async def churn(tube: str) -> None:
        for _ in range(6):
            await db.execute("SELECT tube.tube_ensure_exists($1, 2)", tube)
            for table in ("sh1.t", "sh1.u"):
                await attach(db, tube, table)
            await db.execute("INSERT INTO sh1.t VALUES (1)")
            await db.execute("SELECT tube.tube_ensure_absent($1)", tube)

    async with trio.open_nursery() as nursery:
        for tube in ("a", "b", "c"):
            nursery.start_soon(churn, tube)
    assert await db.fetch("SELECT * FROM tube.tube_list()") == []
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 0
    with pytest.raises(DatabaseError):
        await db.execute("SELECT sh1.t_touch('{1}')")


async def test_whoever_changes_a_tube_meets_writers_backfills_and_workers_without_a_deadlock(db: Database) -> None:
    await db.execute("CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY)")
    await db.execute("INSERT INTO sh1.t SELECT generate_series(1, 3000)")
    # Whoever is in a circle is told at once, so that a short test has many chances to see one.
    chance = random.Random(11)
    done: Counter[str] = Counter()
    gone = ("42P01", "42883", "XX000")  # a table, a function, or what was just being looked up

    async def write(connection: Connection) -> None:
        await connection.execute("UPDATE sh1.t SET id = id WHERE id <= $1", chance.randrange(5))

    async def backfill(connection: Connection) -> None:
        step1 = await connection.fetch_value("SELECT tube.tube_backfill_step1()")
        finished = False
        while not finished:
            row = await connection.fetch_row(
                "SELECT * FROM tube.tube_backfill_chunk($1, 'a', 'sh1.t', 'id', NULL, 2000)", step1
            )
            finished = row is None or row["finished"]
        await connection.execute("DELETE FROM tube.a WHERE op = 'B'")

    async def work(connection: Connection) -> None:
        number = chance.choice([1, 2, 3])
        lease = await connection.fetch_row(
            "SELECT * FROM tube.tube_lease_claim('a', $1, 0, 'me', '1 hour', '{}')", number
        )
        assert lease is not None
        seqs = [row["seq"] for row in await connection.fetch("SELECT seq FROM tube.a ORDER BY seq LIMIT 4")]
        await connection.execute("SELECT pods FROM tube.tube_ack('a', $1, 0, $2, $3)", number, lease["term"], seqs[:3])
        for seq in seqs[3:]:
            await connection.execute(
                "SELECT tube.tube_park('a', $1, 0, $2, $3, NULL, 1, 'no')", number, lease["term"], seq
            )
        await connection.execute("SELECT tube.tube_parked_replay('a')")
        await connection.execute("SELECT tube.tube_lease_release('a', $1, 0, $2)", number, lease["term"])

    async def repartition(connection: Connection) -> None:
        await connection.execute("SELECT tube.tube_ensure_exists('a', $1)", chance.choice([1, 2, 3]))

    async def detach(connection: Connection) -> None:
        await connection.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.t')")
        await attach(db, "a", "sh1.t")

    async def drop(connection: Connection) -> None:
        await connection.execute("SELECT tube.tube_ensure_absent('a')")
        await connection.execute("SELECT tube.tube_ensure_exists('a', 2)")
        await attach(db, "a", "sh1.t")

    async def churn(what: Callable[[Connection], Awaitable[None]]) -> None:
        async with db.connection() as connection:
            await connection.execute("SET deadlock_timeout = '5ms'")
            while True:
                try:
                    await what(connection)
                    done[what.__name__] += 1
                except TubeError:
                    pass  # the tube, the attachment or the partition is not there just now
                except DatabaseError as error:
                    if error.sqlstate not in gone:
                        raise

    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await attach(db, "a", "sh1.t")
    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for what in (write, write, backfill, work, work, repartition, detach, drop):
                nursery.start_soon(churn, what)
            while min(done[what.__name__] for what in (write, backfill, work, repartition, detach, drop)) < 5:
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert len(done) == 6, done
