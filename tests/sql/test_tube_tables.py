"""What is done to attached tables without the tubes: renamed, altered, given triggers of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicad.postgres.bridge import Database
from replicad.postgres.schema import script

from .conftest import run_psql


@pytest.mark.parametrize("again", ["attached", "altered", "upgraded", "doubled"])
async def test_a_renamed_table_keeps_one_set_of_triggers(
    db: Database, tube_url: str, psql_script: Callable[[str, str], str], again: str
) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); SELECT tube.tube_ensure_exists('a', 2), "
        "tube.tube_ensure_exists('b'), tube.tube_table_ensure_attached('a', 'sh1.t', 1),"
        "tube.tube_table_ensure_attached('b', 'sh1.t', 1); ALTER TABLE sh1.t RENAME TO renamed"
    )
    if again == "upgraded":
        psql_script(tube_url, script("tube", "tube", "up"))
    elif again == "doubled":  # somebody has made one by hand
        await db.execute(
            "CREATE TRIGGER renamed_a_after_insert_trigger AFTER INSERT ON sh1.renamed REFERENCING NEW TABLE AS"
            " tube_new_rows FOR EACH STATEMENT EXECUTE FUNCTION tube.a_trigger('0')"
        )
    shard = 2 if again in ("altered", "doubled") else 1
    await db.execute(f"SELECT tube.tube_table_ensure_attached('a', 'sh1.renamed', {shard})")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 8
    await db.execute("INSERT INTO sh1.renamed VALUES (1); UPDATE sh1.renamed SET id = 2; TRUNCATE sh1.renamed")
    rows = await db.fetch("SELECT op, shard, ids FROM tube.a ORDER BY seq")
    assert [tuple(row) for row in rows] == [("I", shard, [1]), ("U", shard, [2, 1]), ("D", shard, [2])]
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.renamed')")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 4


async def test_a_trigger_of_the_user_with_the_name_of_ours_is_not_replaced(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); SELECT tube.tube_ensure_exists('a');"
        "CREATE FUNCTION sh1.mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER t_a_after_insert_trigger AFTER INSERT ON sh1.t EXECUTE FUNCTION sh1.mine()"
    )
    for _ in range(2):
        await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
        found = await db.fetch(
            "SELECT tgname::text, tgfoid::regproc::text FROM pg_trigger WHERE tgtype & 4 > 0 AND NOT tgisinternal"
            " AND tgname <> 'on_disk'"
            " ORDER BY 1"
        )
        assert [tuple(row) for row in found] == [
            ("t_a_after_insert_2_trigger", "tube.a_trigger"), ("t_a_after_insert_trigger", "sh1.mine"),
        ]  # fmt: skip
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.t')")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'") == 1


CHANGES = {
    "renamed": "ALTER TABLE sh1.t RENAME v TO w",
    "retyped": "ALTER TABLE sh1.t ALTER v TYPE text",
    "dropped": "ALTER TABLE sh1.t DROP v",
    "id renamed": "ALTER TABLE sh1.t RENAME id TO number",
    "id retyped": "ALTER TABLE sh1.t ALTER id TYPE text USING 'x' || id",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("extra", ["predicate => 'v > 0'", "routing => 'v + 1'"])
async def test_the_error_of_a_write_after_a_column_was_changed_names_the_tube_and_the_command(
    db: Database, tube_url: str, change: str, extra: str
) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint, v integer); SELECT tube.tube_ensure_exists('a*/b/*c'),"
        f"tube.tube_table_ensure_attached('a*/b/*c', 'sh1.t', 0, {extra}); INSERT INTO sh1.t VALUES (1, 1);"
        + CHANGES[change]
    )
    values, number = (
        ("'2'", "id") if change == "dropped" else ("'2', '2'", "number" if change == "id renamed" else "id")
    )
    for write in (f"INSERT INTO sh1.t VALUES ({values})", f"UPDATE sh1.t SET {number} = {number}", "DELETE FROM sh1.t"):
        error = run_psql(tube_url, write).stderr
        if change == "id retyped" and write.startswith("INSERT"):
            continue  # a text of digits is an id all the same
        assert "records this write in tube a* /b/ *c of replicad" in error
        assert "replicad tubes attach" in error
        assert "replicad tubes detach" in error
