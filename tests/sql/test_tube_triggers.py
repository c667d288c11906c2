"""What a write to an attached table puts into its tubes, statement by statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from replicad.errors import DatabaseError, TubeRefused
from replicad.postgres.bridge import Database
from tests.lengths import crossed

Take = Callable[[str], Awaitable[list[tuple[str, int, list[int]]]]]

T = "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint, v integer); SELECT tube.tube_ensure_exists('a');"
ATTACHED = T + "SELECT tube.tube_table_ensure_attached('a', 'sh1.t');"


async def test_each_statement_becomes_one_pod_with_its_operation_in_the_order_of_its_rows(
    db: Database, take: Take
) -> None:
    await db.execute(ATTACHED)
    await db.execute("INSERT INTO sh1.t VALUES (9, 0), (3, 0), (7, 0)")
    await db.execute("UPDATE sh1.t SET v = 1 WHERE id IN (3, 7)")
    await db.execute("UPDATE sh1.t SET v = 1 WHERE id = 12345")
    await db.execute("DELETE FROM sh1.t WHERE id = 9")
    await db.execute("DELETE FROM sh1.t WHERE id = 9")
    assert await take("a") == [("I", 1, [9, 3, 7]), ("U", 1, [3, 7]), ("D", 1, [9])]


@pytest.mark.parametrize(
    ("rows", "extra"), crossed([16, 17, 250, 251, 500, 1001], ["", ", predicate => 'v >= 0'", ", routing => '1'"])
)
async def test_more_than_250_ids_become_several_pods_in_order(db: Database, take: Take, rows: int, extra: str) -> None:
    await db.execute(T + f"SELECT tube.tube_table_ensure_attached('a', 'sh1.t'{extra})")
    expected = [list(range(low, min(low + 250, rows + 1))) for low in range(1, rows + 1, 250)]
    await db.execute(f"INSERT INTO sh1.t SELECT i, 0 FROM generate_series(1, {rows}) i")
    assert await take("a") == [("I", 1, ids) for ids in expected]
    await db.execute("UPDATE sh1.t SET v = 1")
    assert await take("a") == [("U", 1, ids) for ids in expected]
    await db.execute("DELETE FROM sh1.t")
    assert await take("a") == [("D", 1, ids) for ids in expected]


async def test_every_way_to_write_is_seen(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.parent (id bigint PRIMARY KEY);"
        "CREATE TABLE sh1.t (id bigint PRIMARY KEY REFERENCES sh1.parent ON DELETE CASCADE, v integer);"
        "INSERT INTO sh1.parent SELECT generate_series(1, 9);"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    async with db.connection() as connection:
        await connection.copy_in("t", schema="sh1", columns=["id", "v"], records=[(1, 0), (2, 0)])
    await db.execute("INSERT INTO sh1.t VALUES (2, 0), (3, 0) ON CONFLICT (id) DO UPDATE SET v = 9")
    await db.execute(
        "MERGE INTO sh1.t USING (VALUES (1), (2), (4)) AS s (id) ON t.id = s.id"
        " WHEN MATCHED AND t.id = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET v = 5 WHEN NOT MATCHED"
        " THEN INSERT VALUES (s.id)"
    )
    await db.execute(
        "WITH gone AS (DELETE FROM sh1.t WHERE id = 4 RETURNING id) INSERT INTO sh1.t SELECT id + 1 FROM gone"
    )
    await db.execute("DELETE FROM sh1.parent WHERE id IN (2, 3)")
    pods = await take("a")
    assert pods[:1] == [("I", 1, [1, 2])]
    assert sorted(pods[1:3]) == [("I", 1, [3]), ("U", 1, [2])]
    assert sorted(pods[3:6]) == [("D", 1, [1]), ("I", 1, [4]), ("U", 1, [2])]
    assert sorted(pods[6:8]) == [("D", 1, [4]), ("I", 1, [5])]
    assert sorted(i for _, _, ids in pods[8:] for i in ids) == [2, 3]


PARTED = (
    T.replace("(id bigint, v integer)", "(id bigint, v integer) PARTITION BY RANGE (id)")
    + "CREATE TABLE sh1.low PARTITION OF sh1.t FOR VALUES FROM (0) TO (100);"
    "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0');"
    "CREATE TABLE sh1.high PARTITION OF sh1.t DEFAULT PARTITION BY RANGE (v);"
    "CREATE TABLE sh1.sub PARTITION OF sh1.high DEFAULT;"
    "CREATE TABLE sh1.five PARTITION OF sh1.high FOR VALUES FROM (5) TO (6);"
    "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0');"
    "INSERT INTO sh1.t VALUES (1, 0), (2, 1), (3, 1), (400, 1), (401, 1)"
)
MERGED = (
    "MERGE INTO sh1.t USING (VALUES (10), (1), (2), (3), (400)) AS s (id) ON t.id = s.id"
    " WHEN MATCHED AND t.id = 1 THEN UPDATE SET v = 5 WHEN MATCHED AND t.id = 2 THEN UPDATE SET id = 20"
    " WHEN MATCHED AND t.id = 3 THEN UPDATE SET id = 300 WHEN MATCHED THEN UPDATE SET v = 5"
    " WHEN NOT MATCHED THEN INSERT VALUES (s.id, 1)"
)


@pytest.mark.parametrize(
    "way",
    [
        "{}",
        "/* of an application */ {}",
        "DO $$ BEGIN {}; END $$",
        "PREPARE p AS {} ;; EXECUTE p",
        "CREATE FUNCTION public.f() RETURNS void LANGUAGE sql AS $$ {} $$ ;; SELECT public.f()",
        "CREATE FUNCTION public.f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN {}; END $$ ;; SELECT public.f()",
        "CREATE TABLE public.u (a integer); CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN {}; RETURN NEW; END $$; CREATE TRIGGER z BEFORE INSERT ON public.u FOR EACH ROW "
        "EXECUTE FUNCTION public.f() ;; INSERT INTO public.u VALUES (1)",
        "UPDATE sh1.t SET id = 500 WHERE id = 401; {}",
        "SET TimeZone = 'America/New_York'; {}",
        'CREATE FUNCTION public."update"() RETURNS void LANGUAGE sql AS $$ {} $$ ;; SELECT public."update"()',
    ],
)
async def test_a_merge_into_partitions_is_seen_with_what_it_moves_and_what_it_updates_after_an_insert(
    db: Database, take: Take, way: str
) -> None:
    await db.execute(PARTED)
    await take("a")
    async with db.connection() as connection:
        for text in way.format(MERGED).split(";;"):  # each is all that Postgres shows of what the client has sent
            await connection.execute(text)
    seen = {i for _, _, ids in await take("a") for i in ids}
    assert seen - {401, 500} == {1, 2, 3, 10, 20, 300, 400}


async def test_the_same_holds_for_a_merge_that_the_client_has_prepared(db: Database, take: Take) -> None:
    await db.execute(PARTED)
    await take("a")
    for _ in range(3):
        await db.fetch("UPDATE sh1.t SET id = $1 WHERE id = $1", 1)
    await db.fetch(MERGED.replace("(10)", "($1::bigint)"), 10)
    assert {i for _, _, ids in await take("a") for i in ids} == {1, 2, 3, 10, 20, 300, 400}


async def test_a_merge_that_moves_rows_between_partitions_of_an_expression_is_seen(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (p text, id bigint) PARTITION BY LIST (lower(p));"
        "CREATE TABLE sh1.a PARTITION OF sh1.t FOR VALUES IN ('a'); CREATE TABLE sh1.b PARTITION OF sh1.t DEFAULT;"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'sh1.t');"
        "INSERT INTO sh1.t VALUES ('A', 1)"
    )
    await take("a")
    await db.execute(
        "MERGE INTO sh1.t USING (VALUES (1)) AS s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET p = 'c'"
    )
    assert {i for _, _, ids in await take("a") for i in ids} == {1}


async def test_triggers_of_rows_that_are_gone_or_off_are_named_and_made_again(db: Database, take: Take) -> None:
    await db.execute(PARTED)
    state = "SELECT count(*) FROM tube.tube_missed WHERE lasts"
    await db.execute('DROP TRIGGER "~replicad_a_moves" ON sh1.t; SELECT tube.tube_triggers_check()')
    assert await db.fetch_value(state) == 1
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0')")
    assert await db.fetch_value(state) == 0
    await db.execute('ALTER TABLE sh1.low DISABLE TRIGGER "~replicad_a_gone"; SELECT tube.tube_triggers_check()')
    assert await db.fetch_value(state) == 1
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0')")
    assert await db.fetch_value(state) == 0
    await take("a")
    await db.execute(MERGED)
    assert {i for _, _, ids in await take("a") for i in ids} >= {2, 3, 20, 300}


async def test_rows_that_an_update_moves_are_seen_once(db: Database, take: Take) -> None:
    await db.execute(PARTED)
    await take("a")
    await db.execute("UPDATE sh1.t SET id = id + 200 WHERE id < 100")
    assert await take("a") == [("U", 1, [202, 203, 2, 3])]
    await db.execute("UPDATE sh1.t SET v = 5 WHERE id = 400")
    assert await take("a") == [("U", 1, [400])]


async def test_partitions_take_what_merge_needs_from_their_table_and_all_of_it_goes(db: Database) -> None:
    triggers = "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'"
    columns = "SELECT encode(tgargs, 'escape') FROM pg_trigger WHERE tgrelid = 'sh1.t'::regclass AND tgtype & 63 = 19"
    await db.execute(PARTED)
    made = await db.fetch_value(triggers)
    assert made == 5 * 8, "of five tables"
    assert "{id,v}" in await db.fetch_value(columns)
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0')")
    assert await db.fetch_value(triggers) == made
    await db.execute(
        "CREATE TABLE sh1.more PARTITION OF sh1.t FOR VALUES FROM (1000) TO (2000) PARTITION BY RANGE ((v + 1))"
    )
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', predicate => 'v > 0')")
    assert "{id,v}" not in await db.fetch_value(columns), "an expression: each UPDATE counts"
    await db.execute("ALTER TABLE sh1.t DETACH PARTITION sh1.low; SELECT tube.tube_triggers_check()")
    assert await db.fetch_value("SELECT count(*) FROM tube.tube_missed") == 0
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.t')")
    assert await db.fetch_value(triggers) == 0


async def test_a_changed_id_touches_the_old_one_as_well_however_many(db: Database, take: Take) -> None:
    await db.execute(ATTACHED + "INSERT INTO sh1.t SELECT i, 0 FROM generate_series(1, 300) i")
    await take("a")
    await db.execute("UPDATE sh1.t SET id = 1000 WHERE id = 1")
    assert await take("a") == [("U", 1, [1000, 1])]
    await db.execute("UPDATE sh1.t SET id = id + 1 WHERE id BETWEEN 2 AND 5")
    assert await take("a") == [("U", 1, [3, 4, 5, 6, 2])]
    await db.execute("UPDATE sh1.t SET id = id + 10000")
    pods = await take("a")
    assert [len(ids) for _, _, ids in pods] == [250, 250, 99]
    assert {i for _, _, ids in pods for i in ids} == {*range(3, 301), 6, 1000} | {
        i + 10000 for i in (*range(3, 301), 1000)
    }


async def test_rows_without_an_id_are_passed_over(db: Database, take: Take) -> None:
    await db.execute(ATTACHED + "INSERT INTO sh1.t VALUES (NULL, 1), (5, 1), (NULL, 2)")
    await db.execute("UPDATE sh1.t SET id = 6 WHERE v = 2")
    await db.execute("UPDATE sh1.t SET id = NULL WHERE id = 5")
    await db.execute("DELETE FROM sh1.t WHERE id IS NULL")
    assert await take("a") == [("I", 1, [5]), ("U", 1, [6]), ("U", 1, [5])]


@pytest.mark.parametrize("kind", ["smallint", "integer"])
async def test_ids_of_smaller_types_are_bigint_in_the_tube(db: Database, take: Take, kind: str) -> None:
    await db.execute(ATTACHED.replace("id bigint", f"id {kind}"))
    await db.execute("INSERT INTO sh1.t SELECT i, i FROM generate_series(1, 300) i")
    await db.execute("UPDATE sh1.t SET v = 1, id = id + 1000 WHERE id = 7")
    await db.execute("SELECT sh1.t_touch('{5000000000}')")
    assert [ids for _, _, ids in await take("a")][2:] == [[1007, 7], [5000000000]]


@pytest.mark.parametrize("where", ["tube", "attachment", "both"])
async def test_a_row_that_leaves_the_predicate_is_touched_once_more(db: Database, take: Take, where: str) -> None:
    await db.execute(T)
    await db.execute("SELECT tube.tube_ensure_exists('a', 1, $1)", {"tube": "v = 1", "both": "v > 0"}.get(where))
    await db.execute(
        "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', NULL, $1)",
        {"attachment": "v = 1", "both": "v < 2"}.get(where),
    )
    await db.execute("INSERT INTO sh1.t VALUES (1, 1), (2, 0), (3, NULL), (4, 1)")
    assert await take("a") == [("I", 1, [1, 4])]
    await db.execute("UPDATE sh1.t SET v = 0 WHERE id = 1")
    assert await take("a") == [("U", 1, [1])]
    await db.execute("UPDATE sh1.t SET v = 0 WHERE id = 1")
    await db.execute("DELETE FROM sh1.t WHERE id = 1")
    assert await take("a") == []
    await db.execute("UPDATE sh1.t SET v = 1 WHERE id = 2")
    await db.execute("UPDATE sh1.t SET v = v WHERE id = 2")
    await db.execute("UPDATE sh1.t SET v = NULL")
    await db.execute("DELETE FROM sh1.t")
    pods = await take("a")
    assert pods[:2] == [("U", 1, [2])] * 2
    assert [(op, shard, sorted(ids)) for op, shard, ids in pods[2:]] == [("U", 1, [2, 4])]


async def test_altering_a_tubes_predicate_takes_effect_on_every_table_at_once(db: Database, take: Take) -> None:
    await db.execute(ATTACHED + "CREATE TABLE sh1.u (id bigint, v integer);")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.u', 2, 'id > 0', 'v')")
    await db.execute("SELECT tube.tube_ensure_exists('a', 1, 'v > 5')")
    for table in ("t", "u"):
        await db.execute(f"INSERT INTO sh1.{table} VALUES (1, 3), (2, 6)")
    assert await take("a") == [("I", 1, [2]), ("I", 6, [2])]
    await db.execute("SELECT tube.tube_ensure_exists('a')")
    for table in ("t", "u"):
        await db.execute(f"INSERT INTO sh1.{table} VALUES (1, 3), (2, 6)")
    assert await take("a") == [("I", 1, [1, 2]), ("I", 3, [1]), ("I", 6, [2])]


async def test_routing_places_each_row_and_a_move_touches_both_shards_a_delete_the_old_one(
    db: Database, take: Take
) -> None:
    await db.execute(T + "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 9, NULL, 'v')")
    await db.execute("INSERT INTO sh1.t VALUES (1, 4), (2, 3), (3, 4), (4, NULL), (5, -3)")
    assert await take("a") == [("I", 3, [2]), ("I", 4, [1, 3]), ("I", 9, [4]), ("I", 2147483645, [5])]
    await db.execute("UPDATE sh1.t SET v = 5 WHERE id = 1")
    assert await take("a") == [("U", 4, [1]), ("U", 5, [1])]
    await db.execute("UPDATE sh1.t SET v = v WHERE id IN (1, 2)")
    assert await take("a") == [("U", 3, [2]), ("U", 5, [1])]
    await db.execute("UPDATE sh1.t SET id = 20 WHERE id = 2")
    assert await take("a") == [("U", 3, [20, 2])]
    await db.execute("DELETE FROM sh1.t WHERE id IN (1, 4)")
    assert await take("a") == [("D", 5, [1]), ("D", 9, [4])]
    await db.execute("SELECT sh1.t_touch('{3, 20, 999, NULL}'), sh1.t_touch('{}', 'T', '{}')")
    assert await take("a") == [("T", 3, [20]), ("T", 4, [3]), ("T", 9, [999]), ("T", 9, [])]
    await db.execute("TRUNCATE sh1.t")
    assert await take("a") == [("D", 3, [20]), ("D", 4, [3]), ("D", 2147483645, [5])]


async def test_predicates_may_use_columns_called_like_the_languages_variables(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE TABLE t1 (id bigint, found boolean, tg_op text, tg_argv integer, ids bigint[], op text, shard integer);"
        "SELECT tube.tube_ensure_exists('a', 1, 'found AND tg_op = ''x''');"
        "SELECT tube.tube_table_ensure_attached('a', 't1', 1, 'ids[1] = 7 AND op = ''y''', 'shard + tg_argv')"
    )
    await db.execute("INSERT INTO t1 VALUES (1, true, 'x', 1, '{7}', 'y', 5), (2, false, 'x', 1, '{7}', 'y', 5)")
    await db.execute("UPDATE t1 SET shard = 8")
    await db.execute("SELECT t1_touch('{1}')")
    assert await take("a") == [("I", 6, [1]), ("U", 6, [1]), ("U", 9, [1]), ("T", 9, [1])]


async def test_altering_the_table_breaks_no_session_that_has_written_to_it(db: Database, take: Take) -> None:
    await db.execute(ATTACHED.replace("id bigint", "gone text, id integer").replace("'sh1.t')", "'sh1.t', 1, 'v > 0')"))
    async with db.connection() as session:
        write = (
            "INSERT INTO sh1.t (id, v) VALUES (1, 1)", "UPDATE sh1.t SET v = 2 WHERE id = 1", "DELETE FROM sh1.t",
        )  # fmt: skip
        for change in (
            "SELECT 1", "ALTER TABLE sh1.t ADD COLUMN extra text DEFAULT 'x'", "ALTER TABLE sh1.t ALTER id TYPE bigint",
            "ALTER TABLE sh1.t DROP COLUMN gone", "SELECT tube.tube_ensure_exists('a', 3)",
            "ALTER TABLE sh1.t RENAME TO renamed; ALTER TABLE sh1.renamed RENAME TO t",
            "ALTER TABLE sh1.t ALTER v TYPE bigint",
        ):  # fmt: skip
            await db.execute(change)
            for statement in write * 7:  # beyond the sixth, plans are kept for good
                await session.execute(statement)
    assert await take("a") == [("I", 1, [1]), ("U", 1, [1]), ("D", 1, [1])] * 49


async def test_a_session_that_calls_itself_a_backfill_writes_backfill_pods_only(db: Database, take: Take) -> None:
    await db.execute(ATTACHED)
    async with db.connection() as connection:
        await connection.execute("SET application_name = 'nightly backfill of all'")
        await connection.execute("INSERT INTO sh1.t SELECT i, 0 FROM generate_series(1, 251) i")
        for statement in (
            "UPDATE sh1.t SET v = 1 WHERE id = 1", "DELETE FROM sh1.t WHERE id = 1", "TRUNCATE sh1.t",
            "SELECT sh1.t_touch('{5}'), tube.a_touch(3, '{6}', 'U'), tube.a_touch(3, '{}', 'T', '{\"x\": 1}')",
            "SELECT tube.tube_pods_insert('a', 'SELECT 1 AS id, 1 AS row_number', 1, 'U')",
        ):  # fmt: skip
            await connection.execute(statement)
    assert {op for op, _, _ in await take("a")} == {"B"}


async def test_truncating_touches_every_id_that_goes_as_deleted(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY, v integer);"
        "CREATE TABLE sh1.child (id bigint, t bigint REFERENCES sh1.t); SELECT tube.tube_ensure_exists('a');"
        "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, 'v = 1'),"
        " tube.tube_table_ensure_attached('a', 'sh1.child', 2);"
        "INSERT INTO sh1.t SELECT i, i % 2 FROM generate_series(1, 600) i; INSERT INTO sh1.child VALUES (7, 1)"
    )
    await take("a")
    await db.execute("TRUNCATE sh1.t CASCADE")
    pods = await take("a")
    assert {i for _, shard, ids in pods if shard == 1 for i in ids} == set(range(1, 601, 2))
    assert [(op, shard, len(ids)) for op, shard, ids in pods] == [("D", 1, 250), ("D", 1, 50), ("D", 2, 1)]
    await db.execute("TRUNCATE sh1.t CASCADE")
    assert await take("a") == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_truncating_with_an_old_snapshot_is_refused_because_newer_rows_would_be_missed(
    db: Database, take: Take, level: str
) -> None:
    await db.execute(ATTACHED + "INSERT INTO sh1.t VALUES (1, 0)")
    await take("a")
    async with db.connection() as old:
        await old.execute(f"BEGIN ISOLATION LEVEL {level}")
        await old.execute("SELECT count(*) FROM sh1.t")
        await db.execute("INSERT INTO sh1.t VALUES (2, 0)")
        with pytest.raises(TubeRefused, match=f"sh1.t is attached to tube 'a'.*READ COMMITTED.*{level}"):
            await old.execute("TRUNCATE sh1.t")
        await old.execute("ROLLBACK")
    assert await take("a") == [("I", 1, [2])]
    await db.execute("TRUNCATE sh1.t")
    assert await take("a") == [("D", 1, [1, 2])]


async def test_partitioned_tables_are_seen_through_the_table_and_through_each_partition_once(
    db: Database, take: Take
) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (v integer, id bigint NOT NULL) PARTITION BY RANGE (id);"
        "CREATE TABLE sh1.low (id bigint NOT NULL, v integer);"
        " ALTER TABLE sh1.t ATTACH PARTITION sh1.low FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE sh1.high PARTITION OF sh1.t FOR VALUES FROM (100) TO (1000) PARTITION BY RANGE (v);"
        "CREATE TABLE sh1.high_1 PARTITION OF sh1.high DEFAULT;"
        "SELECT tube.tube_ensure_exists('a', 1, 'v > 0'), tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    await db.execute("INSERT INTO sh1.t (id, v) VALUES (1, 1), (101, 1), (2, 0)")
    await db.execute("INSERT INTO sh1.low VALUES (3, 1)")
    await db.execute("INSERT INTO sh1.high (id, v) VALUES (102, 1)")
    await db.execute("INSERT INTO sh1.high_1 (id, v) VALUES (103, 1)")
    await db.execute("UPDATE sh1.t SET id = 150 WHERE id = 3")
    await db.execute("UPDATE sh1.high_1 SET v = 2 WHERE id = 150")
    await db.execute("DELETE FROM sh1.t WHERE id = 101")
    assert await take("a") == [
        ("I", 1, [1, 101]), ("I", 1, [3]), ("I", 1, [102]), ("I", 1, [103]), ("U", 1, [150, 3]), ("U", 1, [150]),
        ("D", 1, [101]),
    ]  # fmt: skip
    await db.execute("CREATE TABLE sh1.later PARTITION OF sh1.t FOR VALUES FROM (1000) TO (2000)")
    await db.execute("INSERT INTO sh1.t (id, v) VALUES (1001, 1)")
    await db.execute("TRUNCATE sh1.low")
    await db.execute("TRUNCATE sh1.t")
    pods = await take("a")
    assert pods[:2] == [("I", 1, [1001]), ("D", 1, [1])]
    assert sorted(i for op, _, ids in pods[2:] for i in ids) == [102, 103, 150, 1001]
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
    await db.execute("INSERT INTO sh1.later (id, v) VALUES (1002, 1)")
    await db.execute(
        "ALTER TABLE sh1.t DETACH PARTITION sh1.later; SELECT tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    await db.execute("INSERT INTO sh1.later (id, v) VALUES (1003, 1)")
    assert await take("a") == [("I", 1, [1002]), ("I", 1, [1003])], "a detached partition is attached by itself"
    await db.execute("SELECT tube.tube_table_ensure_detached('a', t) FROM unnest('{sh1.t,sh1.later}'::regclass[]) AS t")
    await db.execute("INSERT INTO sh1.low VALUES (3, 1); INSERT INTO sh1.t VALUES (1, 4)")
    assert await take("a") == []
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 0


async def test_heirs_are_seen_through_the_table_and_by_themselves(db: Database, take: Take) -> None:
    await db.execute(
        ATTACHED.replace(
            "SELECT tube.tube_ens", "CREATE TABLE sh1.heir (extra text) INHERITS (sh1.t); SELECT tube.tube_ens"
        )
    )
    await db.execute("INSERT INTO sh1.t VALUES (1, 0)")
    await db.execute("INSERT INTO sh1.heir VALUES (2, 0)")
    await db.execute("UPDATE sh1.t SET v = 1")
    await db.execute("CREATE TABLE sh1.later () INHERITS (sh1.t); INSERT INTO sh1.later VALUES (3, 0)")
    await db.execute("TRUNCATE sh1.t")
    pods = await take("a")
    assert pods[:3] == [("I", 1, [1]), ("I", 1, [2]), ("U", 1, [1, 2])]
    assert sorted(i for op, _, ids in pods[3:] for i in ids) == [1, 2, 3]


async def test_writers_need_no_right_on_the_tubes_and_get_none(db: Database, take: Take) -> None:
    role = "tube_writer_" + (await db.fetch_value("SELECT current_database()"))
    await db.execute(
        ATTACHED.replace(
            "CREATE SCHEMA sh1", f"CREATE ROLE {role}; CREATE SCHEMA sh1; GRANT USAGE ON SCHEMA sh1 TO {role}"
        )
        + f"GRANT INSERT, UPDATE, DELETE, SELECT, TRUNCATE ON sh1.t TO {role}"
    )
    async with db.connection() as connection:
        await connection.execute(f"SET ROLE {role}")
        await connection.execute("CREATE TEMP TABLE a (seq bigint, op text, shard integer, ids bigint[])")
        await connection.execute("SET search_path = pg_temp, pg_catalog")
        await connection.execute("INSERT INTO sh1.t VALUES (1, 0), (2, 0)")
        await connection.execute("UPDATE sh1.t SET v = 1 WHERE id = 2")
        await connection.execute("DELETE FROM sh1.t WHERE id = 2")
        await connection.execute("SELECT sh1.t_touch('{5}')")
        await connection.execute("TRUNCATE sh1.t")
        for forbidden in (
            "SELECT * FROM tube.a", "SELECT tube.a_touch(1, '{1}', 'T')", "SELECT * FROM tube.tube_list()",
            "CREATE TEMP TABLE mine (id bigint);"
            " CREATE TRIGGER x AFTER INSERT ON mine EXECUTE FUNCTION tube.a_trigger('1')",
        ):  # fmt: skip
            with pytest.raises(DatabaseError, match="permission denied"):
                await connection.execute(forbidden)
        await connection.execute("RESET ROLE")
        await connection.execute(f"REVOKE INSERT, UPDATE, DELETE ON sh1.t FROM {role}; SET ROLE {role}")
        with pytest.raises(DatabaseError, match=rf"GRANT UPDATE ON sh1\.t TO {role}") as refused:
            await connection.execute("SELECT sh1.t_touch('{5}')")
        assert refused.value.sqlstate == "42501"
        await connection.execute("RESET ROLE")
    assert await take("a") == [("I", 1, [1, 2]), ("U", 1, [2]), ("D", 1, [2]), ("T", 1, [5]), ("D", 1, [1])]
    await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_row_security_hides_no_row_from_a_tube(db: Database, take: Take) -> None:
    role = "tube_secure_" + (await db.fetch_value("SELECT current_database()"))
    await db.execute(
        ATTACHED + f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA sh1 TO {role}; GRANT ALL ON sh1.t TO {role};"
        "ALTER TABLE sh1.t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON sh1.t USING (v = 1) WITH CHECK (true)"
    )
    async with db.connection() as connection:
        await connection.execute(f"SET ROLE {role}; SET row_security = on")  # as in a program's session
        await connection.execute("INSERT INTO sh1.t VALUES (1, 0), (2, 1)")
        await connection.execute("TRUNCATE sh1.t")
        await connection.execute("RESET ROLE; SET row_security = off")
    assert await take("a") == [("I", 1, [1, 2]), ("D", 1, [1, 2])]
    await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_touching_by_hand_chunks_in_order_and_refuses_what_makes_no_pod(db: Database, take: Take) -> None:
    await db.execute(T)
    touch = "SELECT tube.a_touch($1, $2::text::bigint[], $3, $4::text::jsonb, $5)"
    assert await db.fetch_value(touch, 3, "[0:6]={7,6,5,NULL,3,2,1}", "U", '{"why": 1}', 4) == 2
    assert await db.fetch_value(touch, 3, "{{1,2},{3,4}}", "T", None, 250) == 1
    assert await db.fetch_value(touch, 3, "{}", "T", '{"type": "ping"}', 250) == 1
    assert await db.fetch_value(touch, 3, "{NULL}", "T", None, 250) == 0
    assert await db.fetch_value(touch, 3, None, "T", None, 250) == 0
    assert await db.fetch_value("SELECT count(*) FROM tube.a WHERE payload ->> 'why' = '1'") == 2
    assert await take("a") == [("U", 3, [7, 6, 5, 3]), ("U", 3, [2, 1]), ("T", 3, [1, 2, 3, 4]), ("ping", 3, [])]
    for shard, op, size, reason in [
        (-1, "T", 250, "from 0 up"), (None, "T", 250, "from 0 up"), (1, "G", 250, "no operation 'G'"),
        (1, '"', 250, "no operation"), (1, None, 250, "no operation"), (1, "T", 0, "1 to 900"),
        (1, "T", 901, "1 to 900"),
    ]:  # fmt: skip
        with pytest.raises(TubeRefused, match=reason):
            await db.execute(touch, shard, "{1}", op, None, size)
