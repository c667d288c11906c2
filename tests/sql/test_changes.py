"""What a write to a table puts into its stream of changes, and what is refused, shown and repaired."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from replicad.errors import DatabaseError, StreamRefused
from replicad.postgres.bridge import Database, open_database
from replicad.streams import status
from replicad.streams.registry import RecordedChanges, Registry
from tests.roles import as_role

T = "CREATE TABLE t (id bigint PRIMARY KEY, customer integer, body text)"


async def changes(db: Database, number: int = 1) -> list[tuple[Any, ...]]:
    """The recorded changes: op, key and row; what they are of a description is its columns."""
    rows = await db.fetch(
        f'SELECT op::text, key::text, coalesce("row", old)::text AS data FROM replicad.change_{number} ORDER BY id'
    )
    found = []
    for row in rows:
        data = None if row["data"] is None else json.loads(row["data"])
        if row["op"] == "s":
            data = [column["name"] for column in data["columns"]]
        found.append((row["op"], None if row["key"] is None else json.loads(row["key"]), data))
    return found


async def record(db: Database, sql: str = T, **recorded: Any) -> Registry:
    """Make a table, and a stream of its changes; forget the description of the table."""
    await db.execute(sql)
    registry = Registry(db)
    await registry.add_changes("t", "public.t", RecordedChanges(**recorded))
    await db.execute("DELETE FROM replicad.change_1")
    return registry


async def test_each_way_to_write_is_recorded_with_keys_and_rows(database: Database) -> None:
    await record(database, columns=("customer",))
    await database.execute("INSERT INTO t VALUES (1, 7), (2, 8)")
    await database.execute("UPDATE t SET customer = 9 WHERE id = 1")
    await database.execute("UPDATE t SET id = 3 WHERE id = 2")
    await database.execute("UPDATE t SET customer = 0 WHERE id = 99")
    await database.execute("DELETE FROM t WHERE id = 3")
    await database.execute("TRUNCATE t")
    found = await changes(database)
    assert sorted(found[3:5]) == [("d", 2, None), ("i", 3, {"id": 3, "customer": 8})]
    assert found[:3] + found[5:] == [
        ("i", 1, {"id": 1, "customer": 7}),
        ("i", 2, {"id": 2, "customer": 8}),
        ("u", 1, {"id": 1, "customer": 9}),
        ("d", 3, None),
        ("t", None, None),
    ]


@pytest.mark.parametrize("rows", [1, 17, 10_000, 10_001])
async def test_an_update_of_any_number_of_rows_is_recorded_once_for_each_row(database: Database, rows: int) -> None:
    await record(database)
    await database.execute(f"INSERT INTO t SELECT i, 1 FROM generate_series(1, {rows}) AS i")
    await database.execute("UPDATE t SET customer = 2")
    found = await database.fetch(
        "SELECT op::text, count(*) AS n, count(DISTINCT key::text) AS keys FROM replicad.change_1 GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row) for row in found] == [("i", rows, rows), ("u", rows, rows)]


NAMES = ("r", "t", "n", "q", "gone", "data", "change_new", "change_moment", "Key 1")  # as in the SQL of triggers


PARTED = (
    "CREATE TABLE t (region text, id integer, n integer, PRIMARY KEY (region, id)) PARTITION BY LIST (region);"
    "CREATE TABLE t_a PARTITION OF t FOR VALUES IN ('a');"
    "CREATE TABLE t_b PARTITION OF t DEFAULT PARTITION BY RANGE (id); CREATE TABLE t_c PARTITION OF t_b DEFAULT;"
    "INSERT INTO t VALUES ('a', 1, 0), ('b', 1, 0), ('b', 2, 0), ('b', 3, 0)"
)
MERGED = (
    "MERGE INTO {} AS t USING (VALUES ('b', 10, 1), ('b', 1, 1), ('b', 11, 1), ('b', 2, 2), ('b', 3, 3)) "
    "AS s (region, id, n) ON t.region = s.region AND t.id = s.id "
    "WHEN NOT MATCHED THEN INSERT VALUES (s.region, s.id, s.n) "
    "WHEN MATCHED AND s.n = 1 THEN UPDATE SET n = 1 WHEN MATCHED AND s.n = 2 THEN UPDATE SET id = 20 "
    "WHEN MATCHED THEN UPDATE SET region = 'a'"
)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("target", ["t", "t_b"])
async def test_a_merge_into_partitions_that_inserts_before_it_updates_is_recorded(
    database: Database, target: str, old: bool
) -> None:
    await record(database, PARTED, old=old)
    merged = MERGED.format(target)
    if target == "t_b":  # a statement on one of its partitions cannot move a row out of it
        merged = merged.replace("region = 'a'", "id = 21")
    await database.execute(merged)
    assert {(op, tuple(key)) for op, key, _ in await changes(database)} == {
        ("i", ("b", 10)),
        ("i", ("b", 11)),
        ("u", ("b", 1)),
        ("d", ("b", 2)),
        ("i", ("b", 20)),
        ("d", ("b", 3)),
        ("i", ("a", 3) if target == "t" else ("b", 21)),
    }


@pytest.mark.parametrize("way", ["DO $$ BEGIN {}; END $$", "UPDATE t SET id = 8 WHERE id = 9; {}"])
async def test_rows_that_a_merge_moves_are_recorded_with_their_old_rows_and_filters(
    database: Database, way: str
) -> None:
    await record(database, PARTED, old=True, filters=("n",))
    merge = (
        "MERGE INTO t USING (VALUES (1)) AS s (id) ON t.region = 'b' AND t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET region = 'a', id = 9, n = 7"
    )
    await database.execute(way.format(merge))
    rows = await database.fetch('SELECT op::text, "row"::text, old::text, by_1 FROM replicad.change_1 ORDER BY id')
    assert {tuple(row) for row in rows if row["old"]} == {("d", None, '{"region":"b","id":1,"n":0}', "0")}
    assert {tuple(row)[:2] for row in rows if row["by_1"] == "7"} == {("i", '{"region":"a","id":9,"n":7}')}


async def test_rows_that_an_update_moves_are_recorded_once(database: Database) -> None:
    await record(database, PARTED)
    await database.execute("UPDATE t SET region = 'a', id = id + 10 WHERE region = 'b'")
    found = [(op, *key) for op, key, _ in await changes(database)]
    assert sorted(found) == [*(("d", "b", i) for i in (1, 2, 3)), *(("i", "a", i) for i in (11, 12, 13))]


async def test_a_merge_that_moves_rows_after_a_column_came_is_recorded(database: Database) -> None:
    await record(database, PARTED)
    await database.execute("ALTER TABLE t ADD COLUMN extra integer DEFAULT 5")
    await database.execute(
        MERGED.format("t").replace("VALUES (s.region, s.id, s.n)", "VALUES (s.region, s.id, s.n, 6)")
    )
    found = await changes(database)
    assert {(op, *key) for op, key, _ in found if key and key[1] in (3, 20)} == {
        ("d", "b", 3),
        ("i", "a", 3),
        ("i", "b", 20),
    }
    assert {row["extra"] for op, key, row in found if op == "i" and key == ["a", 3]} == {5}


async def test_a_column_of_the_key_may_get_another_type_where_no_partition_depends_on_it(database: Database) -> None:
    registry = await record(
        database,
        PARTED.replace("PARTITION BY RANGE (id)", "").replace("CREATE TABLE t_c PARTITION OF t_b DEFAULT;", ""),
    )
    await database.execute("ALTER TABLE t ALTER COLUMN id TYPE bigint")
    assert await registry.look_after_changes() == []
    await database.execute("UPDATE t SET id = 5000000000 WHERE region = 'a'")
    found = await changes(database)
    assert sorted(one[:2] for one in found[-2:]) == [("d", ["a", 1]), ("i", ["a", 5000000000])]


async def test_a_new_partition_that_depends_on_another_column_is_followed_there_too(database: Database) -> None:
    registry = await record(
        database,
        "CREATE TABLE t (region text, id integer, n integer, PRIMARY KEY (region, id, n)) PARTITION BY LIST (region);"
        "CREATE TABLE t_a PARTITION OF t DEFAULT",
    )
    await database.execute(
        "CREATE TABLE t_b PARTITION OF t FOR VALUES IN ('b') PARTITION BY RANGE (id);"
        "CREATE TABLE t_low PARTITION OF t_b FOR VALUES FROM (0) TO (10); CREATE TABLE t_high PARTITION OF t_b DEFAULT"
    )
    assert await registry.look_after_changes() == []
    await database.execute("INSERT INTO t VALUES ('b', 1, 0)")
    await database.execute("ALTER TABLE t RENAME COLUMN region TO area")
    fault = "SELECT replicad.stream_changes_fault(s) FROM replicad.stream s"
    assert await database.fetch_value(fault) is None
    for _ in range(2):
        assert await registry.look_after_changes() == []
    merge = "MERGE INTO t USING (VALUES (1)) AS s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET id = 20"
    await database.execute(merge)
    assert {(op, *key) for op, key, _ in await changes(database) if key} >= {("d", "b", 1, 0), ("i", "b", 20, 0)}
    await database.execute(
        "CREATE TABLE t_c PARTITION OF t FOR VALUES IN ('c') PARTITION BY RANGE (n);"
        "CREATE TABLE t_d PARTITION OF t_c DEFAULT; INSERT INTO t VALUES ('c', 1, 0)"
    )
    [[_, code, why]] = await registry.look_after_changes()
    assert (code, "t_c depend on another column" in why) == ("changes_missed", True)


@pytest.mark.parametrize(
    "way",
    [
        "SET TimeZone = 'America/New_York'; SET DateStyle = 'German'; {}",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.region := 'a'; RETURN NEW; END $$;"
        "CREATE TRIGGER zz BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION f(); {}",
        "ALTER TABLE t_b DISABLE TRIGGER ALL; SELECT replicad.stream_changes_ensure(1);"
        "SET session_replication_role = replica; {}",
    ],
)
async def test_a_moved_row_is_recorded_whatever_the_session_has_set_and_other_triggers_do(
    database: Database, way: str
) -> None:
    await record(database, PARTED + "; ALTER TABLE t ADD COLUMN at timestamptz DEFAULT now()", where="t.n > -1")
    merge = (
        "MERGE INTO t USING (VALUES (1)) AS s (id) ON t.region = 'b' AND t.id = s.id WHEN MATCHED THEN UPDATE "
        "SET id = 9, region = CASE current_setting('DateStyle') WHEN 'ISO, MDY' THEN 'c' ELSE 'a' END"
    )
    await database.execute(way.format(merge))
    found = {(op, *key) for op, key, _ in await changes(database)}
    assert ("d", "b", 1) in found
    assert found & {("i", "a", 9), ("i", "c", 9)}


async def test_a_nested_write_is_recorded_in_its_order_whatever_the_zone_of_its_function(database: Database) -> None:
    await record(database)
    await database.execute(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql SET timezone = 'Asia/Tokyo' AS "
        "$$ BEGIN UPDATE t SET customer = 78 WHERE id = NEW.id AND customer = 77; RETURN NULL; END $$;"
        "CREATE TRIGGER a AFTER UPDATE ON t FOR EACH ROW EXECUTE FUNCTION f(); INSERT INTO t VALUES (1, 0);"
        "SET timezone = 'UTC'"
    )
    await database.execute("UPDATE t SET customer = 77")
    assert (await changes(database))[-1][2]["customer"] == 78


async def test_of_a_merge_only_what_it_moves_is_recorded_row_by_row(database: Database) -> None:
    await record(database, PARTED)
    await database.execute(
        "MERGE INTO t USING (SELECT 'b', g, 1 FROM generate_series(1, 100) AS g) AS s (region, id, n) "
        "ON t.region = s.region AND t.id = s.id WHEN MATCHED AND t.id = 2 THEN UPDATE SET region = 'a' "
        "WHEN MATCHED THEN UPDATE SET n = 5 WHEN NOT MATCHED THEN INSERT VALUES (s.region, s.id, s.n)"
    )
    found = [(op, *key) for op, key, _ in await changes(database)]
    assert len(found) == len(set(found)) + 1, "what is inserted is there once, what is moved twice"


async def test_a_fault_names_triggers_of_rows_that_are_off_on_a_partition(database: Database) -> None:
    registry = await record(database, PARTED)
    assert await registry.look_after_changes() == []
    await database.execute('ALTER TABLE t_a DISABLE TRIGGER "~replicad_change_1_moves"')
    [[_, code, why]] = await registry.look_after_changes()
    assert (code, "missing or disabled" in why) == ("changes_missed", True)
    await registry.request_snapshot("t", anew=True)
    assert await registry.look_after_changes() == []


async def test_a_partitioned_table_of_an_older_version_gets_what_merge_needs_and_nothing_counts_as_missed(
    database: Database,
) -> None:
    registry = await record(database, PARTED)
    await database.execute(
        'DROP TRIGGER "~replicad_change_1_merge" ON t; DROP TRIGGER "~replicad_change_1_moves" ON t;'
        'DROP TRIGGER "~replicad_change_1_gone" ON t; DROP TRIGGER "~replicad_change_1_come" ON t;'
        "SELECT replicad.stream_changes_note(1);"
        "UPDATE replicad.stream_changes SET marks = NULL"
    )
    for _ in range(2):
        assert await registry.look_after_changes() == []
    await database.execute(
        "ALTER TABLE t DETACH PARTITION t_a; DROP TABLE t_a; CREATE TABLE t_a PARTITION OF t FOR VALUES IN ('a')"
    )
    await database.execute(MERGED.format("t"))
    assert ("i", ["b", 20]) in [found[:2] for found in await changes(database)]
    await database.execute('DROP TRIGGER "~replicad_change_1_merge" ON t')
    [[name, code, _], *_] = await registry.look_after_changes()
    assert (name, code) == ("t", "changes_missed")
    await registry.remove("t")
    assert await database.fetch_value("SELECT count(*) FROM pg_trigger WHERE tgname ~ '^~?replicad'") == 0


async def test_columns_may_have_the_names_that_the_trigger_uses(database: Database) -> None:
    columns = ", ".join(f'"{name}" integer DEFAULT {number}' for number, name in enumerate(NAMES))
    await record(database, f"CREATE TABLE t (key integer PRIMARY KEY, {columns})", key=("key",), filters=("n", "r"))
    row = {"key": 1} | {name: number for number, name in enumerate(NAMES)}
    await database.execute(
        "INSERT INTO t VALUES (1); UPDATE t SET r = 10; DO $$ BEGIN UPDATE t SET t = 11; UPDATE t SET q = 12; END $$"
    )
    assert await changes(database) == [
        ("i", 1, row),
        ("d", 1, None),
        ("i", 1, row := row | {"r": 10}),
        ("u", 1, row := row | {"t": 11}),
        ("u", 1, row | {"q": 12}),
    ]


@pytest.mark.parametrize(
    ("columns", "old", "new"),
    [
        ("a numeric", ["1.0"], ["1.00"]),
        ("a integer[]", ["'{1}'", "'{2,3}'"], ["'{1}'", "'{2,4}'"]),
        ("a text, b date", ["'x', '2026-01-01'"], ["'x', '2026-01-02'"]),
        ("a text, b integer[]", ["'x', '{}'"], ["'x', '{{1}}'"]),
        ("a jsonb", ["'[1.0]'"], ["'[1.00]'"]),
    ],
)
async def test_keys_of_any_type_stay_or_change_as_they_are_sent(
    database: Database, columns: str, old: list[str], new: list[str]
) -> None:
    names = [column.split()[0] for column in columns.split(", ")]
    await record(database, f"CREATE TABLE t ({columns}, n integer, PRIMARY KEY ({', '.join(names)}))")
    for row in old:
        await database.execute(f"INSERT INTO t VALUES ({row})")
    before = await changes(database)
    await database.execute("UPDATE t SET n = 1")
    assert [found[:2] for found in (await changes(database))[len(old) :]] == [("u", key) for _, key, _ in before]
    await database.execute(
        f"UPDATE t SET ({', '.join(names)}) = ROW({new[-1]}) WHERE ({', '.join(names)}) = ({old[-1]})"
    )
    rows = await database.fetch("SELECT op::text, key::text FROM replicad.change_1 ORDER BY id")
    lost, got = sorted(map(tuple, rows[2 * len(old) :]))
    assert (lost[0], got[0]) == ("d", "i")
    assert lost[1] == rows[len(old) - 1]["key"] != got[1]


async def test_a_column_of_another_type_and_place_but_an_old_name_is_described_and_sent(database: Database) -> None:
    await record(database, 'CREATE TABLE t (gone json, id text COLLATE "C" PRIMARY KEY, n integer)', filters=("n",))
    await database.execute("INSERT INTO t VALUES ('[]', '1', 5); UPDATE t SET gone = NULL")
    await database.execute(
        "ALTER TABLE t DROP COLUMN gone, ALTER COLUMN id TYPE integer USING id::integer,"
        "ALTER COLUMN n TYPE json USING to_json(n)"
    )
    await database.execute("UPDATE t SET id = id; DELETE FROM t")
    assert await changes(database) == [
        ("i", "1", {"gone": [], "id": "1", "n": 5}),
        ("u", "1", {"gone": None, "id": "1", "n": 5}),
        ("s", None, ["id", "n"]), ("u", 1, {"id": 1, "n": 5}), ("d", 1, None),
    ]  # fmt: skip


async def test_rows_that_leave_or_enter_the_condition_are_deleted_and_inserted(database: Database) -> None:
    await record(database, where="t.customer > 5 -- only these", old=True)
    await database.execute("INSERT INTO t VALUES (1, 7), (2, 1)")
    await database.execute("UPDATE t SET customer = 8 WHERE id = 2")
    await database.execute("UPDATE t SET customer = NULL WHERE id = 1")
    await database.execute("UPDATE t SET body = 'x' WHERE id = 1")
    assert [found[:2] for found in await changes(database)] == [("i", 1), ("i", 2), ("d", 1)]


async def test_a_large_column_that_was_not_changed_can_be_left_out(database: Database) -> None:
    await record(database, omit=True)
    await database.execute("INSERT INTO t SELECT 1, 7, string_agg(md5(i::text), '') FROM generate_series(1, 99) AS i")
    await database.execute("UPDATE t SET customer = 8")
    await database.execute("UPDATE t SET body = 'short'")
    await database.execute("UPDATE t SET customer = 9, id = 2")
    kinds = [(op, sorted(data) if data else None) for op, _, data in await changes(database)]
    whole = ["body", "customer", "id"]
    assert kinds[:3] == [("i", whole), ("u", ["customer", "id"]), ("u", whole)]
    assert sorted(kinds[3:], key=str) == [("d", None), ("i", whole)], "the row under its new key is whole"


async def test_a_row_that_gets_another_value_of_a_filter_is_deleted_for_one_reader_and_inserted_for_the_other(
    database: Database,
) -> None:
    await record(database, filters=("customer",))
    await database.execute("INSERT INTO t VALUES (1, 7)")
    await database.execute("UPDATE t SET body = 'x'")
    await database.execute("UPDATE t SET customer = 8")
    await database.execute("DO $$ BEGIN UPDATE t SET body = 'y'; UPDATE t SET customer = 9; END $$")
    rows = await database.fetch("SELECT op::text, by_1 FROM replicad.change_1 ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("i", "7"), ("u", "7"), ("d", "7"), ("i", "8"), ("u", "8"), ("d", "8"), ("i", "9"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "write",
    [
        "UPDATE t SET customer = 8, body = 'of 8'",
        "UPDATE t SET customer = 8, body = 'of 8', id = 2",
        "DO $$ BEGIN UPDATE t SET body = 'of 7'; UPDATE t SET customer = 8, body = 'of 8'; END $$",
        "DO $$ BEGIN UPDATE t SET body = 'of 7'; UPDATE t SET customer = 8, body = 'of 8', id = 2; END $$",
        "INSERT INTO t VALUES (1, 8, 'of 8') ON CONFLICT (id) DO UPDATE SET customer = 8, body = 'of 8'",
        "WITH a AS (UPDATE t SET customer = 8, body = 'of 8' RETURNING id) INSERT INTO t SELECT 6, 8, 'of 8' FROM a",
        "UPDATE t SET customer = NULL, body = 'of nobody'",
        "DO $$ BEGIN UPDATE t SET body = 'of 7'; UPDATE t SET customer = NULL, body = 'of nobody'; END $$",
        "DO $$ BEGIN UPDATE t SET body = 'of 7'; DELETE FROM t; INSERT INTO t VALUES (1, 8, 'of 8'); END $$",
    ],
)
async def test_no_row_is_sent_as_the_old_one_of_a_row_with_another_value_of_a_filter(
    database: Database, write: str
) -> None:
    await record(database, filters=("customer",), old=True)
    await database.execute("INSERT INTO t VALUES (1, 7, 'of 7')")
    await database.execute(write)
    rows = await database.fetch(
        "SELECT op::text, by_1, \"row\" ->> 'body' AS new, old ->> 'body' AS old FROM replicad.change_1"
    )
    for op, value, new, old in map(tuple, rows):
        assert {new, old} <= {None, f"of {value or 'nobody'}"}, (op, value, new, old)
    assert {value for _, value, _, _ in map(tuple, rows)} == {"7", None if "nobody" in write else "8"}


async def test_a_filter_whose_column_was_dropped_has_no_value_and_the_others_keep_theirs(database: Database) -> None:
    registry = await record(database, filters=("customer", "body"), old=True)
    await database.execute("INSERT INTO t VALUES (1, 7, 'x'); ALTER TABLE t DROP COLUMN customer")
    for number in range(2):
        await database.execute("UPDATE t SET id = id + 1; UPDATE t SET body = body || 'y' WHERE id = 0")
        await database.execute("DO $$ BEGIN UPDATE t SET id = id + 1; UPDATE t SET id = id - 1; END $$")
        await registry.look_after_changes()
        assert (await registry.load_stream("t")).filters == (None, "body"), number
    rows = await database.fetch("SELECT by_1, by_2 FROM replicad.change_1 WHERE op <> 's' ORDER BY id")
    assert [tuple(row) for row in rows[1:]] == [(None, "x")] * (len(rows) - 1)


async def test_each_change_of_columns_is_described_before_the_first_change_that_has_it(database: Database) -> None:
    registry = await record(database, "CREATE TABLE t (gone integer, id integer PRIMARY KEY, n integer)")
    await database.execute("INSERT INTO t VALUES (0, 1, 5)")
    for number, change in enumerate(
        ("DROP COLUMN gone", "ADD COLUMN more text", "RENAME COLUMN id TO key", "ALTER COLUMN n TYPE text")
    ):
        await database.execute(f"ALTER TABLE t {change}")
        if number % 2:
            await registry.look_after_changes()  # the daemon renews the trigger function; without it, it works too
        await database.execute("UPDATE t SET n = '7'")
    assert await changes(database) == [
        ("i", 1, {"gone": 0, "id": 1, "n": 5}),
        ("s", None, ["id", "n"]), ("u", 1, {"id": 1, "n": 7}),
        ("s", None, ["id", "n", "more"]), ("u", 1, {"id": 1, "n": 7, "more": None}),
        ("s", None, ["key", "n", "more"]), ("u", 1, {"key": 1, "n": 7, "more": None}),
        ("s", None, ["key", "n", "more"]), ("u", 1, {"key": 1, "n": "7", "more": None}),
    ]  # fmt: skip
    assert await database.fetch_value("SELECT array_agg(DISTINCT schema ORDER BY schema) FROM replicad.change_1") == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip


async def test_statements_of_replicas_and_of_other_roles_are_recorded(database: Database, database_url: str) -> None:
    await record(database)
    await database.execute(
        "SET session_replication_role = replica; INSERT INTO t VALUES (1); RESET session_replication_role"
    )
    if not await database.fetch_value("SELECT true FROM pg_roles WHERE rolname = 'plain_writer'"):
        await database.execute("CREATE ROLE plain_writer LOGIN")
    await database.execute("GRANT INSERT ON t TO plain_writer")
    async with open_database(as_role(database_url, "plain_writer"), size=1, application_name="writer") as other:
        with pytest.raises(DatabaseError, match="permission denied"):
            await other.execute("DELETE FROM replicad.change_1")
        await other.execute("INSERT INTO t VALUES (2)")
    assert [key for _, key, _ in await changes(database)] == [1, 2]
    await database.execute("REVOKE ALL ON t FROM plain_writer")


async def test_values_have_one_text_whatever_the_session_has_set(database: Database) -> None:
    await record(database, "CREATE TABLE t (id integer PRIMARY KEY, at timestamptz, f float8, b bytea, i interval)")
    row = "'2026-01-02 03:04:05+00', 0.1::float8 + 0.2, '\\x01ff', '1 day 2 hours'"
    await database.execute(f"INSERT INTO t VALUES (1, {row})")
    await database.execute(
        "SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'German'; SET IntervalStyle = 'iso_8601';"
        f"SET bytea_output = 'escape'; SET extra_float_digits = -10; INSERT INTO t VALUES (2, {row}); RESET ALL"
    )
    one, other = ({**data, "id": 0} for _, _, data in await changes(database))
    assert one == other


async def test_new_partitions_are_followed_and_rows_that_they_bring_are_read(database: Database) -> None:
    parts = "CREATE TABLE t (id integer PRIMARY KEY, n integer) PARTITION BY RANGE (id)"
    registry = await record(database, f"{parts}; CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    await database.execute(
        "CREATE TABLE t_2 (n integer, id integer PRIMARY KEY); INSERT INTO t_2 VALUES (0, 11);"
        "ALTER TABLE t ATTACH PARTITION t_2 FOR VALUES FROM (10) TO (20)"
    )
    assert await registry.look_after_changes() == []
    await database.execute("INSERT INTO t_2 VALUES (0, 12)")
    while (step := await registry.snapshot_step(1)) is not None:
        assert step.waits_for == ()
    await database.execute("UPDATE t SET id = 5 WHERE id = 12; TRUNCATE t_2")
    found = [(op, key) for op, key, _ in await changes(database) if op != "s"]
    assert found[0] == ("i", 12)
    assert found[1:3] == [("r", 11), ("r", 12)]
    assert sorted(found[3:5]) == [("d", 12), ("i", 5)]
    assert found[5:] == [("d", 11)]
    assert (await status.show(database, "t")).state != status.UNRECORDED


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        ("ALTER TABLE t_1 DISABLE TRIGGER ALL", "missing or disabled"),
        ("ALTER TABLE t_1 DISABLE TRIGGER ALL; ALTER TABLE t_1 ENABLE ALWAYS TRIGGER replicad_change_1_insert;"
         "ALTER TABLE t_1 ENABLE ALWAYS TRIGGER replicad_change_1_update;"
         "ALTER TABLE t_1 ENABLE ALWAYS TRIGGER replicad_change_1_delete;"
         "ALTER TABLE t_1 ENABLE ALWAYS TRIGGER replicad_change_1_truncate", "were off or changed"),
        ("ALTER TABLE t DETACH PARTITION t_1", "detached or dropped"),
        ("DROP TABLE t_1", "detached or dropped"),
    ],
)  # fmt: skip
async def test_what_may_have_been_missed_is_shown_until_all_rows_are_sent_anew(
    database: Database, harm: str, problem: str
) -> None:
    parts = "CREATE TABLE t (id integer PRIMARY KEY) PARTITION BY RANGE (id)"
    registry = await record(
        database,
        f"{parts}; CREATE TABLE t_1 PARTITION OF t DEFAULT; CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (0) TO (9)",
    )
    await database.execute("INSERT INTO t VALUES (1)")
    await database.execute(harm)
    await registry.look_after_changes()
    shown = await status.show(database, "t")
    assert shown.state == status.UNRECORDED
    assert problem in (shown.problem or "")
    assert "replicad streams snapshot t --anew" in (shown.problem or "")
    await registry.request_snapshot("t", anew=True)
    await registry.look_after_changes()
    assert (await status.show(database, "t")).state != status.UNRECORDED
    while await registry.snapshot_step(1) is not None:
        pass
    assert [found[:2] for found in await changes(database)][-3:] == [("t", None), ("s", None), ("r", 1)]


async def test_a_look_leaves_a_stream_that_another_session_has_locked_to_the_next_one(database: Database) -> None:
    registry = await record(database)
    await database.execute("UPDATE replicad.stream_changes SET extended = NULL")
    async with database.connection() as other:
        await other.execute("BEGIN; SELECT FROM replicad.stream_changes FOR UPDATE")
        assert await registry.look_after_changes() == []
        await other.execute("ROLLBACK")
    await registry.look_after_changes()
    assert await database.fetch_value("SELECT extended IS NOT NULL FROM replicad.stream_changes")


async def test_a_chunk_waits_for_writers_that_may_have_lower_ids_and_reports_them(database: Database) -> None:
    registry = await record(database)
    await database.execute("INSERT INTO t VALUES (1, 0), (2, 0)")
    await registry.request_snapshot("t")
    step = "SELECT number, sent, finished, cardinality(waits_for) FROM replicad.stream_snapshot_step(1, 10, '50 ms')"
    async with database.connection() as writer:
        await writer.execute("BEGIN; UPDATE t SET customer = 9 WHERE id = 1")
        assert tuple(await database.fetch_row(step)) == (1, 0, False, 1)
        await writer.execute("PREPARE TRANSACTION 'changes'")
        assert tuple(await database.fetch_row(step)) == (1, 0, False, 1), "a prepared transaction counts"
        await database.execute("COMMIT PREPARED 'changes'")
    assert tuple(await database.fetch_row(step)) == (1, 2, True, None)
    assert [found[:2] for found in await changes(database)][-2:] == [("r", 1), ("r", 2)]
    assert (await changes(database))[-2][2]["customer"] == 9


async def test_a_chunk_does_not_end_a_transaction_that_locks_a_partition_and_then_the_table(database: Database) -> None:
    registry = await record(
        database,
        "CREATE TABLE t (id bigint PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10); CREATE TABLE high PARTITION OF t DEFAULT;"
        "INSERT INTO t VALUES (1), (11)",
    )
    await registry.request_snapshot("t")
    async with database.connection() as other:
        await other.execute("BEGIN; SET LOCAL deadlock_timeout = '1 s'; LOCK TABLE low IN ACCESS EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.execute, "SELECT pg_sleep(0.05); LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            waiting = await registry.snapshot_step(1)
        assert waiting is not None
        assert (waiting.rows, waiting.finished, len(waiting.waits_for)) == (0, False, 1)
        await other.execute("COMMIT")
    done = await registry.snapshot_step(1)
    assert done is not None
    assert (done.rows, done.finished) == (2, True)


REFUSED = {
    "CREATE TABLE t (id bigint)": "has no primary key",
    "CREATE TABLE t (id bigint PRIMARY KEY DEFERRABLE)": "checked at once",
    "CREATE TABLE t (id bigint PRIMARY KEY); CREATE TABLE u () INHERITS (t)": "has heirs",
    "CREATE TABLE u (id bigint PRIMARY KEY) PARTITION BY HASH (id);"
    "CREATE TABLE t PARTITION OF u FOR VALUES WITH (MODULUS 1, REMAINDER 0)": "is a partition",
    "CREATE VIEW t AS SELECT 1 AS id": "is a view",
    "CREATE UNLOGGED TABLE t (id bigint PRIMARY KEY)": "is unlogged",
}


@pytest.mark.parametrize("sql", REFUSED)
async def test_a_table_whose_changes_cannot_be_recorded_is_refused(database: Database, sql: str) -> None:
    await database.execute(sql)
    with pytest.raises(StreamRefused, match=REFUSED[sql]):
        await Registry(database).add_changes("t", "public.t", RecordedChanges())


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (RecordedChanges(key=("customer",)), "not the key of a unique index"),
        (RecordedChanges(columns=("nothing",)), 'no column nothing'),
        (RecordedChanges(where="nothing > 1"), "does not fit table"),
        (RecordedChanges(where="t.customer"), "does not fit table"),
        (RecordedChanges(filters=("customer", "customer")), "named twice"),
    ],
)  # fmt: skip
async def test_what_cannot_be_recorded_is_refused(database: Database, recorded: RecordedChanges, reason: str) -> None:
    await database.execute(T)
    with pytest.raises(StreamRefused, match=reason):
        await Registry(database).add_changes("t", "public.t", recorded)


async def test_it_is_added_once_and_removed_without_a_trace(database: Database) -> None:
    registry = await record(database, filters=("customer",), where="true", columns=("customer", "body"))
    same = RecordedChanges(filters=("customer",), where="true", columns=("body", "customer", "id"))
    assert not (await registry.add_changes("t", "public.t", same)).new
    with pytest.raises(StreamRefused, match="there is a stream t already"):
        await registry.add_changes("t", "public.t", RecordedChanges(old=True))
    await registry.remove("t")
    left = (
        "SELECT relname FROM pg_class WHERE relname ~ '^change_' UNION SELECT proname FROM pg_proc WHERE proname ~ "
        "'^change_' UNION SELECT tgname FROM pg_trigger WHERE tgname ~ '^replicad'"
    )
    assert await database.fetch(left) == []
    await database.execute("INSERT INTO t VALUES (1)")
