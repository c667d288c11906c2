"""What is done to attached tables without the tubes: renamed, altered, given triggers of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicad.errors import TubeRefused
from replicad.postgres.bridge import Database
from replicad.postgres.schema import script


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
    elif again == "doubled":  # as older versions left it
        await db.execute(
            "CREATE TRIGGER renamed_a_after_insert_trigger AFTER INSERT ON sh1.renamed REFERENCING NEW TABLE AS"
            " tube_new_rows FOR EACH STATEMENT EXECUTE FUNCTION tube.a_trigger('0')"
        )
    shard = 2 if again in ("altered", "doubled") else 1
    await db.execute(f"SELECT tube.tube_table_ensure_attached('a', 'sh1.renamed', {shard})")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == 8
    await db.execute("INSERT INTO sh1.renamed VALUES (1); UPDATE sh1.renamed SET id = 2; TRUNCATE sh1.renamed")
    rows = await db.fetch("SELECT op, shard, ids FROM tube.a ORDER BY seq")
    assert [tuple(row) for row in rows] == [("I", shard, [1]), ("U", shard, [2, 1]), ("D", shard, [2])]
    await db.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.renamed')")
    assert await db.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == 4


async def test_a_trigger_of_the_user_with_the_name_of_ours_is_not_replaced(db: Database) -> None:
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); SELECT tube.tube_ensure_exists('a');"
        "CREATE FUNCTION sh1.mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER t_a_after_insert_trigger AFTER INSERT ON sh1.t EXECUTE FUNCTION sh1.mine()"
    )
    with pytest.raises(TubeRefused, match="a trigger t_a_after_insert_trigger that is not of tube 'a'"):
        await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
    await db.execute("ALTER TRIGGER t_a_after_insert_trigger ON sh1.t RENAME TO mine")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t')")
