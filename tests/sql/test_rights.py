"""Who may run the functions that replicad installs: the catalogue of a full installation, pinned name by name.

A function without SECURITY DEFINER does only what its caller may do anyway, so PUBLIC may run most of them. One with it
does what its *owner* may do: each of them stands here with the reason why its callers cannot misuse that.
"""

from __future__ import annotations

import pytest

from replicad.postgres import schema
from replicad.postgres.bridge import Database, Row

pytestmark = pytest.mark.bare_database

ASKS = "asks whether the session's role may write the table"
# SECURITY DEFINER, and PUBLIC may run it: what bounds the harm.
DEFINERS_OF_PUBLIC = {
    "replicad.writer_join": ASKS,
    "replicad.writer_beat": ASKS,
    "replicad.writer_expel": ASKS,
    "replicad.writer_retire": ASKS,
    "replicad.writer_leave": ASKS,
    "replicad.writer_take": ASKS,
    "replicad.writer_give": ASKS,
    "replicad.writer_owns": "writes nothing; it locks what pg_advisory_xact_lock_shared locks without any right",
    "replicad.stream_prove": "asks whether the session may write the stream, or has taken an id",
    "replicad.stream_unprove": "lets go of a lock of the caller's own session",
    "replicad.stream_held": "shows bounds, which pg_locks shows to every role",
    "replicad.stream_trim_note": "notes what only the owner of the table, who alone may trim it, has trimmed",
    "replicad.stream_shape_ensure": "describes the present columns of a table, once, in the stream of its changes",
    "sh1.t_touch": ASKS,
    "tube.a_touch": "PUBLIC may not use the schema of the tubes",
}
# SECURITY DEFINER, and only who was granted EXECUTE, or a trigger, runs it.
DEFINERS = {
    "replicad.cache_write": "the right to invalidate caches",
    "replicad.stream_change_truncated": "a trigger, put on a table by stream_add_changes",
    "tube.a_trigger": "a trigger, put on a table by tube_table_ensure_attached",
    "tube.tube_truncate_trigger": "a trigger, put on a table by tube_table_ensure_attached",
}
# PUBLIC may not run these, though they have no rights of their own: they are the owner's.
OWNERS = {
    "replicad": (
        "cache_enable cache_disable cache_names "
        "stream_add_changes stream_changes_remove stream_changes_ensure stream_change_function_ensure "
        "stream_change_lines "
        "stream_change_truncated stream_changes_look stream_changes_note stream_change_detach stream_snapshot_request "
        "stream_snapshot_step stream_give stream_belong "
        "stream_add stream_remove stream_note stream_fork stream_rewind stream_keep "
        "stream_keep_rules stream_keep_upto stream_trim_kept stream_trimmer_ensure "
        "stream_continue stream_generation_add stream_mark_position stream_writers_ensure stream_writers_discover "
        "stream_writers_retire stream_writers_last stream_writers_idle stream_guard_attach stream_guard_build "
        "stream_guard_detach stream_alter stream_check_parts "
        "stream_writer_holder stream_kept_upto stream_sequence_changed "
        "stream_check stream_check_row stream_trouble_write stream_troubles stream_skip_id stream_skip_undo "
        "stream_daemon_beat stream_daemon_leave stream_daemons "
        "stream_max_row stream_relay_channel stream_relay_secret stream_proof_key "
        "stream_reader_ensure stream_readers_ensure stream_as_owner "
        "writer_enable writer_disable writer_changed writer_lock writer_lock_slots"
    ),
}
# Without a search_path of their own: inlined, or called for each row (the guard of a reserved stream).
# They name what they need in full, or need nothing.
NO_PATH = {
    *("replicad.stream_instance", "replicad.stream_json", "replicad.stream_lock_key", "replicad.writer_slot_of"),
    "replicad.stream_moved",
}
NO_PATH |= {"replicad.writer_lock_key", "replicad.cache_instance", "replicad.stream_guard_2"}
NO_PATH |= {f"{declared.schema}.{part}_on_disk" for part, declared in schema.PARTS.items()}

FUNCTIONS = """
    SELECT n.nspname || '.' || p.proname AS name, p.prosecdef AS definer,
        has_function_privilege('nobody_of_rights', p.oid, 'EXECUTE') AS public,
        (SELECT s FROM unnest(p.proconfig) s WHERE s ~ '^search_path=') AS path
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname IN ('replicad', 'tube', 'sh1', 'public') ORDER BY 1
"""


@pytest.fixture
async def functions(database: Database) -> list[Row]:
    """All functions of an installation with every part, a stream of each method and a tube with a table."""
    for part in schema.PARTS:
        await schema.install(database, part)
    await database.execute(
        "CREATE TABLE events (id bigserial PRIMARY KEY); CREATE TABLE facts (id bigserial PRIMARY KEY);"
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY);"
        "SELECT replicad.stream_add('events', 'events', 'id');"
        "SELECT replicad.stream_add('facts', 'facts', 'id', method => 'reservation');"
        "SELECT replicad.cache_enable(), replicad.writer_enable('events');"
        "SELECT tube.tube_ensure_exists('a', 1), tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    async with database.connection() as connection:
        await connection.execute("BEGIN; CREATE ROLE nobody_of_rights")
        found = await connection.fetch(FUNCTIONS)
        await connection.execute("ROLLBACK")
    return found


async def test_each_function_with_its_owners_rights_is_known_with_what_bounds_it(functions: list[Row]) -> None:
    definers = {row["name"] for row in functions if row["definer"]}
    assert definers == DEFINERS_OF_PUBLIC.keys() | DEFINERS.keys()
    assert {row["name"] for row in functions if row["definer"] and row["public"]} == DEFINERS_OF_PUBLIC.keys()


async def test_what_public_may_not_run_is_pinned(functions: list[Row]) -> None:
    closed = {row["name"] for row in functions if not row["public"]}
    assert (
        closed == {f"{folder}.{name}" for folder, names in OWNERS.items() for name in names.split()} | DEFINERS.keys()
    )


async def test_every_function_looks_its_neighbours_up_in_its_own_schema(functions: list[Row]) -> None:
    """One that looked them up in the caller's search_path would run a stranger's function of the same name."""
    assert {row["name"] for row in functions if row["path"] is None} == NO_PATH
    for row in functions:
        path = (row["path"] or "search_path=pg_temp").removeprefix("search_path=").replace('"', "").split(", ")
        assert path[-1] == "pg_temp", f"{row['name']}: temporary objects are found first unless pg_temp is named last"
        assert set(path[:-1]) <= {"replicad", "tube", "sh1", "public", "pg_catalog", ""}, row["name"]


async def test_public_may_use_no_table_but_read_what_writers_need(database: Database, functions: list[Row]) -> None:
    found = await database.fetch(
        "SELECT c.relname AS name, string_agg(a.privilege_type, ', ') AS rights FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) a "
        "WHERE n.nspname IN ('replicad', 'tube') AND a.grantee = 0 GROUP BY 1 ORDER BY 1"
    )
    assert {row["name"]: row["rights"] for row in found} == dict.fromkeys(
        ["stream", "stream_changes", "stream_generation", "stream_position", "stream_writer", "writer_member",
            "writer_sharding", "writer_slot"], "SELECT"
    )  # fmt: skip
