"""Who owns an attached table gets no right of replicad through predicates, routings or the planning of queries."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.errors import TubeRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema_text import PACKAGE
from tests.conftest import psql
from tests.roles import DAEMON, as_daemon


@pytest.fixture
def team(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role with a schema of its own, and in it a table whose columns and index call code of the role.

    The code fails unless it runs as the role, and unless RESET ROLE fails.
    """
    name = f"team_{abs(hash(database_url)) % 10**9}"
    psql(
        database_url,
        f"""CREATE ROLE {name} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {name}; SET ROLE {name};
        CREATE TYPE {name}.mood AS ENUM ('calm', 'wild');
        CREATE FUNCTION {name}.check_role() RETURNS void LANGUAGE plpgsql AS $trap$
        BEGIN
            IF current_user <> '{name}' THEN RAISE EXCEPTION 'code of {name} runs as %', current_user; END IF;
            BEGIN
                RESET ROLE;
                RAISE EXCEPTION 'code of {name} may reset the role' USING ERRCODE = 'RX001';
            EXCEPTION WHEN insufficient_privilege THEN NULL;
            END;
        END $trap$;
        CREATE FUNCTION {name}.told(mood {name}.mood) RETURNS text LANGUAGE plpgsql AS
            $$ BEGIN PERFORM {name}.check_role(); RETURN enum_out(mood); END $$;
        CREATE CAST ({name}.mood AS text) WITH FUNCTION {name}.told({name}.mood);
        CREATE TABLE {name}.t (id bigint PRIMARY KEY, mood {name}.mood NOT NULL, at int);
        GRANT INSERT, UPDATE, DELETE, TRUNCATE, SELECT, TRIGGER ON {name}.t TO PUBLIC;
        GRANT USAGE ON SCHEMA {name} TO PUBLIC""",
    )
    yield name
    psql(database_url, f"DROP OWNED BY {name} CASCADE")
    psql(postgres_url, f"DROP ROLE {name}")


async def pods(database: Database) -> list[tuple[str, int, list[int]]]:
    return [
        tuple(row) for row in await database.fetch("SELECT op, shard, ids FROM tube.a WHERE ids <> '{}' ORDER BY seq")
    ]


async def empty(database: Database) -> None:
    await database.execute("DELETE FROM tube.a")


ATTACH = "SELECT tube.tube_table_ensure_attached('a', '{team}.t', 3, $$mood::text = 'calm'$$, $$length(mood::text)$$)"


async def test_predicates_and_routings_run_as_the_owner_of_the_table_whoever_writes(
    database: Database, database_url: str, team: str
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('a')")
    await database.execute(ATTACH.format(team=team))
    psql(database_url, f"CREATE ROLE {team}_writer")
    try:
        for role in ("postgres", f"{team}_writer", team):
            psql(
                database_url,
                f"SET ROLE {role}; INSERT INTO {team}.t VALUES (1, 'calm', 5), (2, 'wild', 6), (3, 'calm', 7);"
                f"UPDATE {team}.t SET mood = 'wild' WHERE id = 3; DELETE FROM {team}.t WHERE id = 1;"
                f"INSERT INTO {team}.t VALUES (4, 'calm', 8); TRUNCATE {team}.t",
            )
            assert await pods(database) == [
                ("I", 4, [1, 3]),
                ("U", 4, [3]),
                ("D", 4, [1]),
                ("I", 4, [4]),
                ("D", 4, [4]),
            ]
            await empty(database)
    finally:
        psql(database_url, f"DROP OWNED BY {team}_writer; DROP ROLE {team}_writer")


async def test_backfills_and_touches_by_hand_read_the_table_as_its_owner(
    database: Database, database_url: str, team: str
) -> None:
    psql(
        database_url,
        f"""SET ROLE {team};
        CREATE FUNCTION {team}.trap(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS
            $$ BEGIN PERFORM {team}.check_role(); RETURN n; END $$;
        CREATE INDEX ON {team}.t ((at + {team}.trap(1)));
        INSERT INTO {team}.t SELECT g, CASE g % 2 WHEN 0 THEN 'calm' ELSE 'wild' END::{team}.mood, 100 - g
            FROM generate_series(1, 10) g""",
    )
    await database.execute("SELECT tube.tube_ensure_exists('a')")
    await database.execute(ATTACH.format(team=team))
    start = await database.fetch_value("SELECT tube.tube_backfill_step1()")
    assert (
        await database.fetch_value(
            "SELECT tube.tube_backfill_step3($1, 'a', $2::text::regclass, 'at')", start, f"{team}.t"
        )
        == 5
    )
    assert await pods(database) == [("B", 4, [10, 8, 6, 4, 2])]
    await empty(database)
    start = await database.fetch_value("SELECT tube.tube_backfill_step1()")
    done = False
    while not done:
        row = await database.fetch_row(
            "SELECT * FROM tube.tube_backfill_chunk($1, 'a', $2::text::regclass, 'at', max_ids => 2)",
            start,
            f"{team}.t",
        )
        assert row is not None
        done = row["finished"]
    assert await pods(database) == [("B", 4, [10, 8]), ("B", 4, [6, 4]), ("B", 4, [2])]
    await empty(database)
    await database.execute(f"SELECT {team}.t_touch(ARRAY[1, 2, 99])")
    assert await pods(database) == [("T", 3, [99]), ("T", 4, [1, 2])]


async def test_a_role_that_is_no_member_of_the_owner_is_told_which_grant_is_missing(
    database: Database, database_url: str, postgres_url: str, team: str
) -> None:
    daemon = f"{team}_daemon"
    name = urlsplit(database_url).path[1:]
    psql(database_url, f"CREATE ROLE {daemon} LOGIN; GRANT CREATE ON DATABASE {name} TO {daemon}")
    psql(database_url, f"GRANT CREATE ON SCHEMA {team} TO {daemon}")
    parts = urlsplit(database_url)
    url = urlunsplit(parts._replace(netloc=f"{daemon}@{parts.netloc.rpartition('@')[2]}"))
    attach = ATTACH.format(team=team).replace("tube.", "mine.")
    try:
        async with open_database(url, size=1, application_name="daemon") as mine:
            await schema.install(mine, "tube", "mine")
            await mine.execute("SELECT mine.tube_ensure_exists('a')")
            with pytest.raises(TubeRefused, match=f"run: GRANT {team} TO {daemon}"):
                await mine.execute(attach)
            psql(database_url, f"GRANT {team} TO {daemon}")
            await mine.execute(attach)
            psql(database_url, f"SET ROLE {team}; INSERT INTO {team}.t VALUES (1, 'calm', 5)")
            assert await mine.fetch_value("SELECT ids FROM mine.a") == [1]
            assert await schema.uninstall(mine, "tube", "mine")
        assert await database.fetch_value("SELECT count(*) FROM pg_namespace WHERE nspname = 'mine'") == 0
    finally:
        psql(database_url, f"DROP OWNED BY {daemon} CASCADE")
        psql(postgres_url, f"DROP OWNED BY {daemon} CASCADE; DROP ROLE {daemon}")


def test_readers_of_streams_and_of_tubes_have_the_same_body() -> None:
    texts = [
        (PACKAGE / file).read_text(encoding="utf-8").split("$body$")[1]
        for file in ("streams/sql/readers.sql", "tubes/sql/owners.sql")
    ]
    assert texts[0] == texts[1]


@pytest.fixture
def teammate(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role of which the daemon's role is a member, with a schema of its own."""
    psql(
        database_url, "CREATE ROLE teammate; CREATE SCHEMA s_0001 AUTHORIZATION teammate", f"GRANT teammate TO {DAEMON}"
    )
    yield "teammate"
    psql(database_url, "DROP OWNED BY teammate CASCADE")
    psql(postgres_url, "DROP ROLE teammate")


async def attach(db: Database, owner: str) -> None:
    """As a superuser: a table of this owner, in tube a with a predicate."""
    await db.execute(f"SET ROLE {owner}; CREATE TABLE s_0001.t (id bigint PRIMARY KEY, n integer); RESET ROLE")
    await db.execute(
        "SELECT tube.tube_ensure_exists('a', 2), tube.tube_ensure_exists('b', 2);"
        "SELECT tube.tube_table_ensure_attached('a', 's_0001.t', predicate => 'n > 5')"
    )


async def test_the_daemons_role_attaches_and_detaches_a_table_that_a_superuser_has_attached(
    database: Database, database_url: str, teammate: str
) -> None:
    await attach(database, teammate)
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as daemon:
        await daemon.execute("SELECT tube.tube_table_ensure_attached('b', 's_0001.t')")
        await database.execute("INSERT INTO s_0001.t VALUES (1, 7); SELECT s_0001.t_touch('{1}')")
        await daemon.execute("SELECT tube.tube_table_ensure_detached('a', 's_0001.t')")
        await daemon.execute("SELECT tube.tube_table_ensure_detached('b', 's_0001.t')")
    assert await database.fetch_value("SELECT array_agg(ids::text ORDER BY seq) FROM tube.b") == ["{1}", "{1}"]
    assert await database.fetch_value("SELECT to_regproc('s_0001.t_touch')") is None


async def test_a_function_of_a_superuser_that_the_daemons_role_would_replace_says_who_can(
    database: Database, database_url: str, teammate: str
) -> None:
    await attach(database, "postgres")
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as daemon:
        with pytest.raises(TubeRefused, match=r"belongs to role postgres, .* do the same as a superuser"):
            await daemon.execute("SELECT tube.tube_ensure_exists('a', 3, predicate => 'n < 100')")
    await database.execute("SELECT tube.tube_ensure_exists('a', 3, predicate => 'n < 100')")
