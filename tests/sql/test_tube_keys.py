"""Which columns name a row in a tube, and what becomes of their values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replicad.errors import DatabaseError, TubeRefused
from replicad.postgres.bridge import Database
from replicad.postgres.schema import script
from tests.lengths import crossed

Pod = tuple[str, int, list[Any]]
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


@pytest.mark.parametrize(
    ("name", "type", "more"),
    crossed(
        ["film_id", "Film Id", "tube_row", "shard", "ids", "op"],
        WIDTHS,
        ["", ", routing => '1'", ", predicate => 'v IS NULL OR v < 100'"],
        turns=2,
    ),
)
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


U = "00000000-0000-4000-8000-0000000000"
TEXTS = {  # the columns, SQL on a number n for the columns of the key, and the text of its key for n = 1
    "uuid": ("k uuid PRIMARY KEY", f"('{U}' || lpad(n::text, 2, '0'))::uuid", f"{U}01"),
    "text": ("k text PRIMARY KEY", "E'a \"\\\\,{}\\n%é' || n", 'a "\\,{}\n%é1'),
    "varchar": ("k varchar(9) PRIMARY KEY", "'c' || n", "c1"),
    "char": ("k char(9) PRIMARY KEY", "'c' || n", "c1"),
    "bytea": ("k bytea PRIMARY KEY", "decode(lpad(n::text, 2, '0'), 'hex')", "\\x01"),
    "date": ("k date PRIMARY KEY", "'2026-02-02'::date + n::integer", "2026-02-03"),
    "timestamptz": ("k timestamptz PRIMARY KEY", "'2026-02-02 23:00+00'::timestamptz + n * interval '1 h'",
        "2026-02-03 00:00:00+00"),
    "interval": ("k interval PRIMARY KEY", "n * interval '36 h'", "36:00:00"),
    "numeric": ("k numeric PRIMARY KEY", "n + 0.50", "1.50"),
    "float": ("k float8 PRIMARY KEY", "n / 10.0", "0.1"),
    "boolean": ("k boolean, l integer, PRIMARY KEY (k, l)", "n % 2 = 1, n", '["true", "1"]'),
    "enum": ("k sh1.mood, l integer, PRIMARY KEY (k, l)", "'cold \"'::sh1.mood, n", '["cold \\"", "1"]'),
    "domain": ("k sh1.mail PRIMARY KEY", "'m@' || n", "m@1"),
    "pair": ('"A b" integer, l text, PRIMARY KEY (l, "A b")', "n, 'é \"' || n", '["é \\"1", "1"]'),
    "three": ("k date, l uuid, m bytea, PRIMARY KEY (k, l, m)",
        f"'2026-02-02'::date, '{U}01'::uuid, decode(lpad(n::text, 2, '0'), 'hex')",
        f'["2026-02-02", "{U}01", "\\\\x01"]'),
}  # fmt: skip
TYPES = "CREATE TYPE sh1.mood AS ENUM ('cold \"'); CREATE DOMAIN sh1.mail AS text CHECK (VALUE ~ '@');"


def text_of(columns: str, key: str) -> str:
    """SQL on a row for the text of its key."""
    return "k::text" if "PRIMARY KEY (" not in columns else "json_build_array({})::text".format(
        ", ".join(f"{name}::text" for name in columns.split("PRIMARY KEY (")[1].rstrip(")").split(", ")))  # fmt: skip


async def attach_texts(db: Database, kind: str, more: str = "") -> tuple[str, str, str]:
    """`attach` a table of TEXTS with a column v. Returns the SQL of TEXTS, that of the text, and the first text."""
    columns, row, first = TEXTS[kind]
    await db.execute(
        f"CREATE SCHEMA sh1; {TYPES} CREATE TABLE sh1.t ({columns}, v integer); SELECT tube.tube_ensure_exists('a');"
        f"SELECT tube.tube_table_ensure_attached('a', 'sh1.t'{more})"
    )
    return row, text_of(columns, first), first


async def texts(db: Database, key: str, where: str = "true") -> list[str]:
    async with db.connection() as connection:
        return [row[0] for row in await connection.fetch(f"SELECT {key} FROM sh1.t WHERE {where} ORDER BY v")]


SETTING = (
    "SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = iso_8601; SET bytea_output = escape;"
)


@pytest.mark.parametrize(("kind", "more"), crossed(TEXTS, ["", ", routing => 'v % 2'", ", predicate => 'v < 1000'"]))
async def test_keys_of_all_types_are_texts_in_the_tube_whatever_the_settings(
    db: Database, take: Take, kind: str, more: str
) -> None:
    row, key, first = await attach_texts(db, kind, more)
    async with db.connection() as connection:
        await connection.execute(SETTING + f"INSERT INTO sh1.t SELECT {row}, n FROM generate_series(1, 30) n")
        await connection.execute("UPDATE sh1.t SET v = v + 2 WHERE v = 1")
        await connection.execute("RESET ALL")
    everything = await texts(db, key)
    assert first in everything
    pods = await take("a")
    assert [sorted(i for op, _, ids in pods if op == one for i in ids) for one in "IU"] == [sorted(everything), [first]]
    async with db.connection() as connection:
        await connection.execute(SETTING)
        await connection.fetch("SELECT sh1.t_touch($1::text[])", [first])
        await connection.execute("DELETE FROM sh1.t WHERE v = 3; TRUNCATE sh1.t; RESET ALL")
    pods = await take("a")
    assert pods[0] == ("T", 1, [first])
    assert sorted(i for op, _, ids in pods[1:] for i in ids) == sorted(everything)
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.t')")
    assert not await db.fetch("SELECT FROM pg_proc WHERE pronamespace = 'sh1'::regnamespace")


@pytest.mark.parametrize(("kind", "count"), crossed(TEXTS, [3, 40]))
async def test_a_changed_key_touches_both(db: Database, take: Take, kind: str, count: int) -> None:
    row, key, _ = await attach_texts(db, kind)
    await db.execute(f"INSERT INTO sh1.t SELECT {row}, n FROM generate_series(1, {count}) n")
    before = await texts(db, key)
    await take("a")
    columns = await db.fetch_value(
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute"
        " WHERE attrelid = 'sh1.t'::regclass AND attnum > 0 AND attname <> 'v'"
    )
    await db.execute(f"UPDATE sh1.t AS t SET ({columns}) = (SELECT {row} FROM (SELECT t.v + 50 AS n) AS x)")
    after = await texts(db, key)
    assert not set(before) & set(after)
    assert sorted(i for _, _, ids in await take("a") for i in ids) == sorted([*before, *after])


@pytest.mark.parametrize(("kind", "more"), crossed(TEXTS, ["", ", routing => 'v % 2'"]))
async def test_a_backfill_by_pieces_puts_every_key_once(db: Database, take: Take, kind: str, more: str) -> None:
    row, key, _ = await attach_texts(db, kind, more)
    await db.execute(f"INSERT INTO sh1.t SELECT {row}, n FROM generate_series(1, 9) n")
    await take("a")
    everything = await texts(db, key)
    for order in ("NULL", "'v'"):
        await backfill(db, order=order)
        found = [i for op, _, ids in await take("a") if op == "B" for i in ids]
        assert sorted(found) == sorted(everything)
    assert found == everything or more
    step1 = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step3($1, 'a', 'sh1.t', NULL)", step1)
    found = [i for op, _, ids in await take("a") if op == "B" for i in ids]
    assert sorted(found) == sorted(everything)


async def test_a_key_in_another_form_is_touched_in_the_form_of_its_row(db: Database, take: Take) -> None:
    row, _, first = await attach_texts(db, "three", ", routing => 'v'")
    await db.execute(f"INSERT INTO sh1.t SELECT {row}, n FROM generate_series(1, 2) n")
    await take("a")
    other = f'["2 Feb 2026","{U.upper()}01","\\\\x01"]'
    await db.execute("SELECT sh1.t_touch(ARRAY[$1, NULL, $2])", other, first)
    assert await take("a") == [("T", 1, [first, first])]
    with pytest.raises(DatabaseError, match="invalid input syntax"):
        await db.execute("SELECT sh1.t_touch('{nonsense}')")


async def test_long_keys_fail_no_write_and_are_read_again(db: Database, take: Take) -> None:
    await attach(db, "id text, v integer")
    keys = ["x" * size + str(size) for size in (1, 2000, 7000, 9000, 100_000)]
    await db.execute("INSERT INTO sh1.t SELECT unnest($1::text[]), 1", keys)
    await db.execute("UPDATE sh1.t SET v = 2")
    await db.execute("INSERT INTO sh1.t SELECT repeat('y', 600) || i, 1 FROM generate_series(1, 300) i")
    pods = await take("a")
    assert pods[:2] == [("I", 1, keys), ("U", 1, keys)]
    assert [len(ids) for _, _, ids in pods[2:]] == [100, 100, 100]


async def test_the_first_table_of_a_tube_decides_its_kind_of_keys(db: Database, take: Take) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.docs (id uuid PRIMARY KEY);"
        "CREATE TABLE sh1.films (film_id integer PRIMARY KEY);"
        "CREATE TABLE sh1.casts (film_id integer, actor_id integer, PRIMARY KEY (film_id, actor_id));"
        "SELECT tube.tube_ensure_exists('ids'), tube.tube_ensure_exists('texts'),"
        " tube.tube_ensure_exists('held', keys => 'bigint'),"
        " tube.tube_table_ensure_attached('ids', 'sh1.films'), tube.tube_table_ensure_attached('texts', 'sh1.docs')"
    )
    with pytest.raises(TubeRefused, match=r"keys of kind bigint: its key \(id\) is uuid.*--keys text"):
        await db.execute("SELECT tube.tube_table_ensure_attached('ids', 'sh1.docs')")
    with pytest.raises(TubeRefused, match="keys of kind bigint, and tables, pods or parked ids"):
        await db.execute("SELECT tube.tube_ensure_exists('ids', keys => 'text')")
    await db.execute(
        "SELECT tube.tube_table_ensure_attached('texts', 'sh1.films'),"
        " tube.tube_table_ensure_attached('texts', 'sh1.casts')"
    )
    await db.execute(
        "INSERT INTO sh1.films VALUES (3); INSERT INTO sh1.casts VALUES (3, 4); SELECT sh1.films_touch('{5}')"
    )
    assert await take("texts") == [("I", 1, ["3"]), ("I", 1, ['["3", "4"]']), ("T", 1, ["5"])]
    assert await take("ids") == [("I", 1, [3]), ("T", 1, [5])]
    await db.execute("SELECT tube.held_touch(1, '{7}', 'T')")
    with pytest.raises(TubeRefused, match="tables, pods or parked ids"):
        await db.execute("SELECT tube.tube_table_ensure_attached('held', 'sh1.docs')")
    await take("held")
    await db.execute("SELECT tube.tube_table_ensure_attached('held', 'sh1.docs')")
    await db.execute("SELECT tube.held_touch(1, '{7,x}', 'T')")
    assert await take("held") == [("T", 1, ["7", "x"])]
    await db.execute(
        "SELECT tube.tube_table_ensure_detached('held', 'sh1.docs');"
        "SELECT tube.tube_ensure_exists('held', keys => 'bigint')"
    )
    await db.execute("SELECT tube.held_touch(1, '{7}', 'T')")
    assert await take("held") == [("T", 1, [7])]


@pytest.mark.parametrize(
    ("columns", "more", "reason"),
    [
        ("id integer, code integer", ", key => '{id,code}'", "may be NULL"),
        ("id integer NOT NULL", ", key => '{id,id}'", "a column twice"),
        ("id json NOT NULL", "", "its type json has no order"),
    ],
)
async def test_columns_that_name_no_row_are_refused(db: Database, columns: str, more: str, reason: str) -> None:
    with pytest.raises(TubeRefused, match=reason):
        await attach(db, columns, more)


async def test_a_table_has_one_key_in_all_its_tubes(db: Database) -> None:
    await attach(db, "id integer PRIMARY KEY, code integer")
    await db.execute("SELECT tube.tube_ensure_exists('b')")
    with pytest.raises(TubeRefused, match=r"its key in tube 'a' is \(id\)"):
        await db.execute("SELECT tube.tube_table_ensure_attached('b', 'sh1.t', key => '{code}')")


async def test_texts_are_parked_and_replayed(db: Database, take: Take) -> None:
    await attach(db, "id text PRIMARY KEY")
    await db.execute("INSERT INTO sh1.t VALUES ('a'), ('b,\"c'), ('d')")
    term = await db.fetch_value("SELECT term FROM tube.tube_lease_claim('a', 1, 0, 'me', '1 h', '{}')")
    seq = await db.fetch_value("SELECT seq FROM tube.a")
    parked = await db.fetch_value("SELECT tube.tube_park('a', 1, 0, $1, $2, $3, 1, 'x')", term, seq, ['b,"c', "none"])
    assert parked == 1
    (row,) = await db.fetch("SELECT ids, keys FROM tube.tube_parked_list('a')")
    assert (row["ids"], row["keys"]) == ([], ['b,"c'])
    assert await take("a") == [("I", 1, ["a", "d"])]
    await db.execute("SELECT tube.tube_parked_replay('a')")
    assert await take("a") == [("I", 1, ['b,"c'])]


async def test_ids_of_a_query_are_texts_in_a_tube_of_texts(db: Database, take: Take) -> None:
    await attach(db, "id uuid PRIMARY KEY")
    await db.execute(f"SELECT tube.tube_pods_insert('a', $$SELECT '{U}01'::uuid AS id, 1 AS row_number$$, 4)")
    assert await take("a") == [("B", 4, [f"{U}01"])]
    await db.execute("SELECT tube.tube_ensure_exists('b')")
    with pytest.raises(TubeRefused, match="different kinds"):
        await db.execute("SELECT tube.tube_pods_insert('a,b', 'SELECT 1 AS id, 1 AS row_number', 4)")


async def test_another_predicate_of_the_tube_holds_for_a_table_with_a_key_of_its_own(db: Database) -> None:
    """Altering a tube replaces its trigger functions and not the triggers, so their names must stay."""
    await db.execute(
        "CREATE TABLE films (film_id bigint PRIMARY KEY, v integer); SELECT tube.tube_ensure_exists('a', 1),"
        "tube.tube_table_ensure_attached('a', 'films', 0), tube.tube_ensure_exists('a', 1, 'v > 0')"
    )
    await db.execute("INSERT INTO films VALUES (1, 0), (2, 1)")
    assert await db.fetch_value("SELECT array_agg(id) FROM (SELECT unnest(ids) AS id FROM tube.a) AS put") == [2]


@pytest.mark.parametrize("kind", ["uuid", "text", "date", "three", "pair"])
@pytest.mark.parametrize("more", ["", ", routing => 'v'"])
async def test_keys_of_a_table_of_another_role_are_read_with_its_rights(
    db: Database, take: Take, kind: str, more: str
) -> None:
    columns, row, first = TEXTS[kind]
    owner = "key_owner_of_tests"
    await db.execute(
        f"DO $$ BEGIN CREATE ROLE {owner}; EXCEPTION WHEN duplicate_object THEN NULL; END $$;"
        f"CREATE SCHEMA sh1 AUTHORIZATION {owner}; {TYPES} CREATE TABLE sh1.t ({columns}, v integer);"
        f"ALTER TABLE sh1.t OWNER TO {owner}; SELECT tube.tube_ensure_exists('a');"
        f"SELECT tube.tube_table_ensure_attached('a', 'sh1.t'{more})"
    )
    await db.execute(SETTING + f"INSERT INTO sh1.t SELECT {row}, n FROM generate_series(1, 3) n; RESET ALL")
    shards = [1, 2, 3] if more else [1]
    everything = await texts(db, text_of(columns, first))
    assert [shard for _, shard, _ in await take("a")] == shards
    await db.fetch("SELECT sh1.t_touch($1::text[])", everything)
    pods = await take("a")
    assert [shard for _, shard, _ in pods] == shards
    assert [i for _, _, ids in pods for i in ids] == everything
    await backfill(db)
    assert [i for op, _, ids in await take("a") if op == "B" for i in ids] == everything
    step1 = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step3($1, 'a', 'sh1.t', 'v')", step1)
    assert [i for op, _, ids in await take("a") if op == "B" for i in ids] == everything
    await db.execute(SETTING + "TRUNCATE sh1.t; RESET ALL")
    pods = await take("a")
    assert sorted(i for _, _, ids in pods for i in ids) == sorted(everything)
    assert [shard for _, shard, _ in pods] == shards
    await db.execute(f"SELECT tube.tube_ensure_absent('a'); DROP OWNED BY {owner} CASCADE; DROP ROLE {owner}")


@pytest.mark.parametrize("keys", ["bigint", "text"])
async def test_a_new_tube_has_one_trigger_function_which_the_key_id_uses(db: Database, keys: str) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', keys => $1)", keys)
    functions = "SELECT proname FROM pg_proc WHERE proname ~ '^a_trigger'"
    assert [row[0] for row in await db.fetch(functions)] == ["a_trigger"]
    await db.execute("CREATE TABLE t (id uuid PRIMARY KEY)" if keys == "text" else "CREATE TABLE t (id integer)")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 't', 1)")
    assert [row[0] for row in await db.fetch(functions)] == ["a_trigger"]


async def test_an_upgrade_keeps_tubes_of_texts(db: Database, take: Take, tube_url: str, psql_script: Any) -> None:
    await attach_texts(db, "three", ", routing => 'v'")
    before = await db.fetch("SELECT proname, prosrc FROM pg_proc WHERE proname ~ '^(a|t)_t' ORDER BY 1")
    psql_script(tube_url, script("tube", "tube", "up"))
    assert await db.fetch("SELECT proname, prosrc FROM pg_proc WHERE proname ~ '^(a|t)_t' ORDER BY 1") == before
    await db.execute(f"INSERT INTO sh1.t SELECT {TEXTS['three'][1]}, n FROM generate_series(1, 1) n")
    assert await take("a") == [("I", 1, [TEXTS["three"][2]])]


async def test_a_key_that_gets_another_type_has_its_text_whatever_the_settings(db: Database, take: Take) -> None:
    await attach(db, "id text PRIMARY KEY")
    await db.execute("INSERT INTO sh1.t VALUES ('2026-02-03')")
    await db.execute("ALTER TABLE sh1.t ALTER id TYPE date USING id::date")
    await db.execute(SETTING + "INSERT INTO sh1.t VALUES ('2026-02-04'::date); RESET ALL")
    assert [ids for _, _, ids in await take("a")] == [["2026-02-03"], ["2026-02-04"]]
