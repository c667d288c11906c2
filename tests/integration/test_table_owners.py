"""Whoever owns a streamed table gets no right of the daemon, or of anybody else, through code that reading runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import trio

from replicad.config.settings import DatabaseSettings, ServerSettings
from replicad.daemon import daemon
from replicad.errors import DatabaseError, DatabaseRefused, StreamRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.streams import rows, status
from replicad.streams.chunks import Chunk
from replicad.streams.registry import Registry, Trimmed, row_source
from replicad.streams.serving.windows import Windows
from replicad.streams.table_rows import TableRows
from tests.conftest import PATIENCE, psql
from tests.daemons import open_daemon
from tests.roles import DAEMON, as_role

from .conftest import Connect, netcat_to

# What the code of the owner tries; each line is what it reports.
TRIES = """
    RESET ROLE
    SET ROLE NONE
    SET LOCAL ROLE postgres
    SET SESSION AUTHORIZATION DEFAULT
    RESET SESSION AUTHORIZATION
    ALTER ROLE {team} SUPERUSER
    CREATE TEMP TABLE trap (n int)
    INSERT INTO {team}.deferred VALUES (1)
    SET transaction_read_only = off
    COMMIT
    COPY (SELECT 1) TO PROGRAM 'true'
    GRANT {team} TO postgres
""".strip()
LASTING = """
    SET search_path = {team}
    SET application_name = 'trapped'
    PREPARE trap AS SELECT 1
    DECLARE trap CURSOR WITH HOLD FOR SELECT 1
    LISTEN trap
""".strip()


def attack(team: str) -> str:
    """SQL that the owner runs: a table whose rows run his code when they are made JSON."""
    tries = json.dumps([line.strip().format(team=team) for line in (*TRIES.splitlines(), *LASTING.splitlines())])
    return f"""
        SET ROLE {team};
        CREATE TABLE {team}.deferred (n int);
        CREATE TYPE {team}.mood AS ENUM ('calm');
        CREATE FUNCTION {team}.evil(mood {team}.mood) RETURNS json LANGUAGE plpgsql AS $evil$
        DECLARE
            result jsonb := '{{}}';
            step text;
        BEGIN
            FOR step IN SELECT jsonb_array_elements_text('{tries.replace("'", "''")}') LOOP
                BEGIN
                    EXECUTE step;
                    result := result || jsonb_build_object(step, 'done as ' || current_user);
                EXCEPTION WHEN OTHERS THEN
                    result := result || jsonb_build_object(step, SQLERRM);
                END;
            END LOOP;
            RETURN result || jsonb_build_object('user', current_user);
        END
        $evil$;
        CREATE CAST ({team}.mood AS json) WITH FUNCTION {team}.evil({team}.mood) AS ASSIGNMENT;
        CREATE TABLE {team}.events (id bigserial PRIMARY KEY, mood {team}.mood DEFAULT 'calm', by text);
        RESET ROLE;
    """


@pytest.fixture
def team(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role that may log in, with a schema of its own and nothing else."""
    name = f"team_{abs(hash(database_url)) % 10**9}"
    psql(database_url, f"CREATE ROLE {name} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {name}; GRANT {name} TO {DAEMON}")
    yield name
    psql(database_url, f"DROP OWNED BY {name} CASCADE")
    psql(postgres_url, f"DROP ROLE {name}")


async def lines_of(db: Database, name: str, after: int = 0, upto: int = 1 << 40) -> list[str]:
    """The rows of a stream, as the daemon reads them."""
    source = row_source(await Registry(db).load_stream(name))
    data = b""

    async def take(chunk: Chunk) -> None:
        nonlocal data
        data += chunk.data

    assert await source.copy_range(db, after, upto, take) == data.count(b"\n")
    return data.decode().splitlines()


async def test_the_code_of_a_tables_owner_runs_with_his_rights_and_leaves_nothing_behind(
    events: Database, database_url: str, team: str, netcat: Connect
) -> None:
    psql(database_url, attack(team))
    await Registry(events).add("moods", f"{team}.events", "id")
    async with netcat() as nc:
        await nc.send("REPLICATE moods NOW")
        await nc.until("POSITION moods master .*")
        psql(database_url, f"INSERT INTO {team}.events (by) VALUES ('one')")
        line = (await nc.until("RDATA moods master 1 .*"))[-1]
    told = json.loads(line.split(" ", 4)[4])["mood"]
    assert told.pop("user") == team
    for step in TRIES.splitlines():
        assert "done" not in told[step.strip().format(team=team)], step
    assert not await events.fetch_value("SELECT rolsuper FROM pg_roles WHERE rolname = $1", team)


async def test_what_the_code_of_a_tables_owner_sets_in_our_session_is_gone_before_the_next_statement(
    database_url: str, team: str, database: Database
) -> None:
    psql(database_url, attack(team) + f"INSERT INTO {team}.events (by) VALUES ('one')")
    await Registry(database).add("moods", f"{team}.events", "id")
    async with open_database(database_url, size=1, application_name="honest") as one:
        for limit in (1, 10_000):  # by a prepared statement, and by COPY
            [line] = await lines_of(one, "moods", 0, limit)
            told = json.loads(line.split(" ", 4)[4])["mood"]
            assert told[LASTING.splitlines()[0].format(team=team).strip()] == f"done as {team}"
            assert await one.fetch_value("SELECT current_setting('search_path')") == '"$user", public'
            assert await one.fetch_value("SELECT current_setting('application_name')") == "honest"
            assert await one.fetch_value("SELECT count(*) FROM pg_prepared_statements WHERE from_sql") == 0
            assert await one.fetch_value("SELECT count(*) FROM pg_cursors WHERE name = 'trap'") == 0
            assert await one.fetch_value("SELECT count(*) FROM pg_listening_channels()") == 0
            assert await one.fetch_value("SELECT current_user::text") == "postgres"
            assert await one.execute("CREATE TEMP TABLE IF NOT EXISTS mine (n int)") == "CREATE TABLE", "not read-only"


@pytest.mark.parametrize(
    "trap",
    [
        "CREATE INDEX ON {team}.plain ((id + {team}.trap(1)))",
        "CREATE INDEX ON {team}.plain (id) WHERE {team}.trap(1) > 0",
        "CREATE STATISTICS {team}.some ON (id + {team}.trap(1)), by FROM {team}.plain",
    ],
    ids=["index", "predicate", "statistics"],
)
async def test_code_that_planning_a_query_runs_has_the_owners_rights_in_every_statement_on_the_table(
    database_url: str, team: str, database: Database, trap: str
) -> None:
    """A constant call of an immutable function is evaluated when a query on the table is planned, whatever it reads."""
    psql(
        database_url,
        f"""SET ROLE {team};
        CREATE FUNCTION {team}.trap(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $trap$
        BEGIN
            IF current_user <> '{team}' THEN RAISE EXCEPTION 'code of {team} runs as %', current_user; END IF;
            RETURN n;
        END $trap$;
        CREATE TABLE {team}.plain (id bigserial PRIMARY KEY, by text);
        INSERT INTO {team}.plain (by) VALUES ('one'), ('two');
        {trap.format(team=team)}""",
    )
    with pytest.raises(DatabaseError, match=f"code of {team} runs as postgres"):
        await database.fetch(f"SELECT id FROM {team}.plain t WHERE id > 0 ORDER BY id")
    await Registry(database).add("plain", f"{team}.plain", "id", instance_column="by", row="to_jsonb(t.id)")
    stream = await Registry(database).load_stream("plain")
    source = row_source(stream)
    assert await lines_of(database, "plain") == ["RDATA plain one 1 1", "RDATA plain two 2 2"]
    assert await source.ends(database, 0, 100) == (1, 2)
    assert await source.count(database, 0, 100) == 2
    assert await source.earliest(database) == 0
    assert await source.last_tokens(database, 0, 100) == {"one": 1, "two": 2}
    assert set(stream.writers) == {"one", "two"}
    assert await database.fetch("SELECT * FROM replicad.stream_writers_idle('plain', 1)") == [("one",)]


@pytest.mark.parametrize("flip", ["SECURITY INVOKER", "SECURITY INVOKER SET role = {team}", "STABLE", "IMMUTABLE"])
async def test_a_reader_that_its_owner_has_altered_runs_nothing(
    database_url: str, team: str, database: Database, flip: str
) -> None:
    psql(database_url, attack(team) + f"INSERT INTO {team}.events (by) VALUES ('one')")
    await Registry(database).add("moods", f"{team}.events", "id")
    reader = (await Registry(database).load_stream("moods")).reader
    assert reader is not None
    psql(database_url, f"SET ROLE {team}; ALTER FUNCTION {reader}(oid, text, text, bigint) {flip.format(team=team)}")
    for upto in (1, 10_000):
        with pytest.raises(DatabaseError, match=r"reader was altered|not allowed in a non-volatile function"):
            await lines_of(database, "moods", 0, upto)
    assert await database.fetch_value("SELECT count(*) FROM pg_prepared_statements WHERE from_sql") == 0


async def test_nobody_else_may_call_a_reader_or_replace_it(database_url: str, team: str, database: Database) -> None:
    psql(database_url, attack(team))
    await Registry(database).add("moods", f"{team}.events", "id")
    reader = (await Registry(database).load_stream("moods")).reader
    assert reader is not None
    psql(database_url, f"CREATE ROLE {team}_two LOGIN IN ROLE pg_monitor")
    try:
        async with open_database(as_role(database_url, f"{team}_two"), size=1, application_name="two") as two:
            with pytest.raises(DatabaseError, match="permission denied for function reader_1"):
                await two.fetch(f"SELECT * FROM {reader}($1::oid, 'SELECT 1::text', '', 1)", 1)
            stream = await Registry(two).load_stream("moods")
            needed = re.search(r"run: (GRANT EXECUTE ON FUNCTION \S*reader_1.*?) TO (\S+)", stream.denied or "")
            assert needed is not None, stream.denied
            with pytest.raises(DatabaseError, match="GRANT EXECUTE ON FUNCTION"):
                await row_source(stream).count(two, 0, 10)
            psql(database_url, f"{needed[1]} TO {needed[2]}")
            stream = await Registry(two).load_stream("moods")
            assert "EXECUTE" not in (stream.denied or "")
            assert await row_source(stream).count(two, 0, 10) == 0
            psql(database_url, f"REVOKE {needed[1][6:]} FROM {needed[2]}")
    finally:
        psql(database_url, f"DROP ROLE {team}_two")
    async with open_database(as_role(database_url, team), size=1, application_name="owner") as owner:
        for statement in (
            f"CREATE OR REPLACE FUNCTION {reader}(tbl oid, query text, path text, bound bigint) RETURNS SETOF text"
            " LANGUAGE sql SECURITY DEFINER AS 'SELECT query'",
            f"ALTER FUNCTION {reader}(oid, text, text, bigint) RENAME TO reader_1_{'0' * 32}",
        ):
            with pytest.raises(DatabaseError, match="permission denied for schema replicad"):
                await owner.execute(statement)


async def test_a_bad_row_is_found_and_what_is_before_it_is_sent(
    database_url: str, team: str, database: Database
) -> None:
    psql(
        database_url,
        f"SET ROLE {team}; CREATE TABLE {team}.plain (id bigserial PRIMARY KEY, n int);"
        f"INSERT INTO {team}.plain (n) SELECT 500 - g FROM generate_series(1, 9000) g;"
        f"ANALYZE {team}.plain",
    )
    await Registry(database).add("good", f"{team}.plain", "id", row="to_jsonb(t.n)")
    psql(database_url, "UPDATE replicad.stream SET row_sql = 'to_jsonb(1000 / t.n)'")
    source = row_source(await Registry(database).load_stream("good"))
    got: list[Chunk] = []

    async def take(chunk: Chunk) -> None:
        got.append(chunk)

    assert await source.copy_blocks(database, 500, 9000, take, step=100, max_line=1000) == 8500
    assert [chunk.token for chunk in got] == list(range(600, 9001, 100))
    got.clear()
    with pytest.raises(DatabaseError, match="division by zero"):
        await source.copy_blocks(database, 0, 9000, take, step=2, max_line=1000)
    assert [chunk.token for chunk in got] == list(range(2, 2 * len(got) + 1, 2))
    assert 400 < (got[-1].token or 0) < 500
    got.clear()
    with pytest.raises(DatabaseError, match="division by zero"):
        await source.copy_range(database, 0, 9000, take)
    assert 440 < (got[-1].token or 0) < 500, "PL/pgSQL fetches up to 50 rows ahead"
    found = await TableRows(source, database, database).find_unreadable((0, 9000))
    assert found is not None
    assert (found.row_id, "division by zero" in str(found)) == (500, True)


@pytest.mark.parametrize("unique", [True, False])
async def test_a_large_range_is_read_in_blocks_that_end_at_complete_ids(
    database_url: str, team: str, database: Database, unique: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK", 1000)
    key = "PRIMARY KEY" if unique else ""
    psql(
        database_url,
        f"SET ROLE {team}; CREATE TABLE {team}.plain (id bigserial {key}, by text, n text);"
        f"CREATE INDEX ON {team}.plain (id);"
        f"INSERT INTO {team}.plain (id, by, n) SELECT g / {1 if unique else 7}, 'w' || g % 3, repeat('é', g % 97)"
        " FROM generate_series(1, 3000) g",
    )
    await Registry(database).add("wide", f"{team}.plain", "id", instance_column="by", row="to_jsonb(t.n)")
    mine = await lines_of(database, "wide", -1)
    in_blocks: list[str] = []

    async def take(chunk: Chunk) -> None:
        in_blocks.extend(chunk.data.decode().splitlines(keepends=True))

    if unique:
        source = row_source(await Registry(database).load_stream("wide"))
        assert source.reader is not None
        assert await source.copy_blocks(database, -1, 3001, take, step=80, max_line=1000) == 3000
    psql(database_url, f"ALTER TABLE {team}.plain OWNER TO postgres")
    assert (await Registry(database).load_stream("wide")).reader is None
    direct = await lines_of(database, "wide", -1)
    assert len(mine) == 3000
    if unique:
        assert [f"{line}\n" for line in mine] == in_blocks
    if not unique:  # the order of the rows of one id is not determined, and so which of them end a batch
        mine, direct = ([line.partition(' "')[2] for line in sorted(lines)] for lines in (mine, direct))
        mine, direct = sorted(mine), sorted(direct)
    assert mine == direct


async def test_without_the_owners_role_the_sentence_says_which_grant_is_missing(
    database_url: str, team: str, postgres_url: str
) -> None:
    """A daemon that is no superuser, on a schema of its own."""
    daemon = f"{team}_daemon"
    psql(
        database_url,
        f"CREATE ROLE {daemon} LOGIN; GRANT CREATE ON DATABASE {urlsplit(database_url).path[1:]} TO {daemon}",
    )
    psql(database_url, attack(team) + f"INSERT INTO {team}.events (by) VALUES ('one')")
    try:
        async with open_database(as_role(database_url, daemon), size=1, application_name="daemon") as db:
            await schema.install(db, "stream", "mine")
            psql(
                database_url,
                f"GRANT USAGE ON SCHEMA {team} TO {daemon}; GRANT SELECT ON ALL TABLES IN SCHEMA {team} TO {daemon}",
            )
            psql(database_url, f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA {team} TO {daemon}")
            with pytest.raises(StreamRefused, match=f"run: GRANT {team} TO {daemon}"):
                await Registry(db, "mine").add("moods", f"{team}.events", "id")
            psql(database_url, f"GRANT {team} TO {daemon}")
            stream = (await Registry(db, "mine").add("moods", f"{team}.events", "id")).stream
            assert stream.denied is None
            got: list[Chunk] = []

            async def take(chunk: Chunk) -> None:
                got.append(chunk)

            await row_source(stream, schema="mine").copy_range(db, 0, 10, take)
            told = json.loads(got[0].data.split(b" ", 4)[4])["mood"]
            assert told["user"] == team
            assert not [step for step in TRIES.splitlines() if "done" in told[step.strip().format(team=team)]]
    finally:
        psql(database_url, f"DROP OWNED BY {daemon} CASCADE")
        psql(postgres_url, f"DROP OWNED BY {daemon} CASCADE; DROP ROLE {daemon}")


async def test_only_the_owner_trims_his_stream_with_a_connection_of_his_own(
    database_url: str, team: str, database: Database
) -> None:
    psql(database_url, attack(team) + f"INSERT INTO {team}.events (by) SELECT 'one' FROM generate_series(1, 5)")
    stream = (await Registry(database).add("moods", f"{team}.events", "id")).stream
    assert await Registry(database).publish(stream, 4, {"master": 4})
    with pytest.raises(StreamRefused, match=f"connect as role {team}"):
        await Registry(database).trim("moods", before=3)
    async with open_database(as_role(database_url, team), size=1, application_name="owner") as owner:
        assert await Registry(owner).trim("moods", before=3) == Trimmed(3, 3)
        with pytest.raises(StreamRefused, match="no reader was sent"):
            await Registry(owner).trim("moods", before=5)
    psql(database_url, f"CREATE ROLE {team}_two LOGIN")
    try:
        async with open_database(as_role(database_url, f"{team}_two"), size=1, application_name="two") as two:
            with pytest.raises(DatabaseError, match="may not delete"):
                await two.execute(f"SELECT replicad.stream_trim_note({stream.number}, 1000, true)")
    finally:
        psql(database_url, f"DROP ROLE {team}_two")
    assert (await Registry(database).load_stream("moods")).trimmed_upto == 3


async def test_the_daemon_refuses_to_be_a_superuser_of_a_postgres_that_is_not_the_embedded_one(
    database_url: str, team: str, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = replace(settings, database=DatabaseSettings(database=database_url))
    async with open_daemon(named, database_url, least=False):
        """The embedded one is recognised."""
    monkeypatch.setattr(daemon, "is_embedded", lambda data: False)
    with pytest.raises(
        DatabaseRefused, match=r"role postgres is a superuser.*GRANT CREATE ON DATABASE.*--allow-superuser"
    ):
        async with open_daemon(named, database_url, least=False):
            pass
    psql(database_url, f"GRANT postgres TO {team}")
    with pytest.raises(DatabaseRefused, match=f"role {team} is a superuser"):
        async with open_daemon(named, as_role(database_url, team)):
            pass
    async with open_daemon(replace(named, allow_superuser=True), database_url, least=False):
        """It is meant."""


@pytest.mark.bare_database
async def test_a_daemon_with_create_on_the_database_and_the_owners_role_serves_streams_and_tubes(
    database: Database, database_url: str, postgres_url: str, team: str, settings: ServerSettings
) -> None:
    """As on a managed Postgres: nobody is a superuser, and the owner's role is all that was granted."""
    role = f"{team}_daemon"
    name = urlsplit(database_url).path[1:]
    psql(database_url, f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {name} TO {role}; GRANT {team} TO {role}")
    psql(database_url, attack(team))
    url = as_role(database_url, role)
    try:
        async with open_daemon(settings, url) as daemon, open_database(url, size=1, application_name="admin") as admin:
            for method in ("lock_watch", "reservation"):
                await Registry(admin).add(method, f"{team}.events", "id", method=method)
                async with netcat_to(daemon) as nc:
                    await nc.send(f"REPLICATE {method} NOW")
                    await nc.until(f"POSITION {method} master .*")
                    before = await database.fetch_value(f"SELECT coalesce(max(id), 0) FROM {team}.events")
                    async with open_database(as_role(database_url, team), size=1, application_name="writer") as writer:
                        await writer.execute(
                            f"INSERT INTO {team}.events (by) VALUES ('one')"
                            if method == "lock_watch"
                            else f"INSERT INTO {team}.events (id, by) VALUES (replicad.stream_next('{method}'), 'one')"
                        )
                    line = (await nc.until(f"RDATA {method} master {before + 1} .*"))[-1]
                assert json.loads(line.split(" ", 4)[4])["mood"]["user"] == team
                await Registry(admin).remove(method)
            await admin.execute("SELECT tube.tube_ensure_exists('a')")
            await admin.execute(f"SELECT tube.tube_table_ensure_attached('a', '{team}.events', 0, $$by = 'two'$$)")
            await admin.execute("SELECT tube.tube_backfill_schedule('a', 'id', 0, 0)")
            psql(database_url, f"SET ROLE {team}; INSERT INTO {team}.events (id, by) VALUES (900, 'two'), (901, 'one')")
            assert await database.fetch_value("SELECT ids FROM tube.a WHERE op = 'I'") == [900]
            with trio.fail_after(60):
                while not await database.fetch_value("SELECT count(*) FROM tube.a WHERE op = 'B' AND ids = '{900}'"):
                    await trio.sleep(0.05)
            assert not daemon.troubles.of("database", "database")
    finally:
        psql(database_url, f"DROP OWNED BY {role} CASCADE")
        psql(postgres_url, f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


async def test_rows_of_another_owner_that_were_there_before_the_daemon_started_are_sent(
    database: Database, database_url: str, team: str, settings: ServerSettings
) -> None:
    """No id is taken in this run of the daemon, so that the rows tell which ids were given out."""
    psql(database_url, f"SET ROLE {team}; CREATE TABLE {team}.plain (id bigserial PRIMARY KEY, body json)")
    await Registry(database).add("plain", f"{team}.plain", "id", row="body")
    await database.execute(f"INSERT INTO {team}.plain (body) VALUES ('1'), ('2')")
    async with open_daemon(settings, as_role(database_url, DAEMON)) as daemon, netcat_to(daemon) as nc:
        with trio.fail_after(PATIENCE):
            await daemon.publisher.find("plain")
            await nc.send("REPLICATE plain EARLIEST")
            await nc.until("RDATA plain master 2 2")


async def test_positions_unused_sequences_and_looks_for_late_rows_are_read_as_the_owner(
    events: Database, database_url: str, team: str, netcat: Connect
) -> None:
    psql(
        database_url,
        f"""SET ROLE {team};
        CREATE FUNCTION {team}.trap(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $trap$
        BEGIN
            IF current_user <> '{team}' THEN RAISE EXCEPTION 'code of {team} runs as %', current_user; END IF;
            RETURN n;
        END $trap$;
        CREATE TABLE {team}.plain (id bigserial PRIMARY KEY, by text);
        CREATE TABLE {team}.positions (stream_name text, instance_name text, stream_id bigint);
        CREATE INDEX ON {team}.plain ((id + {team}.trap(1)));
        CREATE INDEX ON {team}.positions ((stream_id + {team}.trap(1)));
        INSERT INTO {team}.positions VALUES ('published', 'w', 0);
        ALTER SEQUENCE {team}.plain_id_seq RESTART WITH 41""",
    )
    await Registry(events).add(
        "published", f"{team}.plain", "id", instance_column="by", row="to_jsonb(t.id)",
        method="positions_table", positions_table=f"{team}.positions",
    )  # fmt: skip
    await Registry(events).add("watched", f"{team}.plain", "id", instance_column="by", row="to_jsonb(t.id)")
    async with netcat() as nc:
        await nc.send("REPLICATE watched NOW")
        await nc.until("POSITION watched master 40 40")  # the sequence has issued nothing, and will begin at 41
        await nc.send("REPLICATE published NOW")
        await nc.until("POSITION published .*")
        psql(
            database_url,
            f"SET ROLE {team}; INSERT INTO {team}.plain (by) VALUES ('w');UPDATE {team}.positions SET stream_id = 41",
        )
        await nc.until("RDATA published w 41 41")
    stream = await Registry(events).load_stream("watched")
    async with Windows(events, 100, "replicad").looking(stream) as look:
        window = await look.window(0, 100)
        assert (list(window.ids), window.counts) == ([41], None)
        assert await look.attached(f"{team}.plain", 50, 50) == [(1, 41, 41, False)]


async def test_a_renamed_owner_and_a_restore_without_owners_leave_readers_that_work_or_are_made_again(
    database_url: str, postgres_url: str, team: str, database: Database
) -> None:
    psql(database_url, f"SET ROLE {team}; CREATE TABLE {team}.plain (id bigserial PRIMARY KEY, n int)")
    psql(database_url, f"INSERT INTO {team}.plain (n) VALUES (7)")
    await Registry(database).add("plain", f"{team}.plain", "id", row="to_jsonb(t.n)")
    psql(database_url, f"ALTER ROLE {team} RENAME TO {team}_new")
    try:
        assert await lines_of(database, "plain") == ["RDATA plain master 1 7"], (
            "it is found by its owner, not by its name"
        )
        # As pg_restore --no-owner leaves it: the reader belongs to whoever restores, and the table again to its owner.
        psql(
            database_url,
            "DO $$ BEGIN EXECUTE (SELECT format('ALTER FUNCTION %s OWNER TO postgres', oid::regprocedure) FROM pg_proc"
            " WHERE proname ~ '^reader_1_'); END $$",
        )
        assert "reader_missing" in str((await Registry(database).load_stream("plain")).reader)
        with pytest.raises(DatabaseError, match=r"stream_reader_ensure|GRANT"):
            await lines_of(database, "plain")
        await Registry(database).ensure_readers()  # as each daemon does when it begins
        assert await lines_of(database, "plain") == ["RDATA plain master 1 7"]
        psql(database_url, f"ALTER TABLE {team}.plain OWNER TO {DAEMON}")
        await Registry(database).ensure_readers()
        assert await lines_of(database, "plain") == ["RDATA plain master 1 7"]
    finally:
        psql(postgres_url, f"ALTER ROLE {team}_new RENAME TO {team}")


async def test_a_role_that_may_only_use_the_schema_can_hold_a_watched_stream_back_and_is_named(
    events: Database, database_url: str, team: str, netcat: Connect
) -> None:
    """PREPARE of an INSERT takes the lock of a writer before rights are checked. docs/access.md has it.

    A stream whose ids are reserved is not held back.
    """
    psql(database_url, f"GRANT USAGE ON SCHEMA public TO {team}")
    await events.execute("CREATE TABLE kept (id bigserial PRIMARY KEY, body jsonb)")
    await Registry(events).add("kept", "public.kept", "id", row="body", method="reservation")
    async with netcat() as nc, open_database(as_role(database_url, team), size=1, application_name="idler") as other:
        await nc.send("REPLICATE events NOW", "REPLICATE kept NOW")
        await nc.until("POSITION kept .*")
        with pytest.raises(DatabaseError, match="permission denied"):
            await other.execute("INSERT INTO public.events (body) VALUES ('1')")
        async with other.connection() as connection:
            await connection.execute("BEGIN")
            await connection.execute("PREPARE p AS INSERT INTO public.events (body) VALUES ('1')")
            await connection.execute("PREPARE q AS INSERT INTO public.kept (body) VALUES ('1')")
            await events.execute("INSERT INTO events (body) VALUES ('1')")
            await events.execute("INSERT INTO kept (id, body) VALUES (replicad.stream_next('kept'), '2')")
            await nc.until(r"RDATA kept master \d+ 2")
            seen = await status.show(events, "events")
            assert (seen.lag_rows, seen.held_by and seen.held_by.application_name) == (1, "idler")
            await connection.execute("ROLLBACK")
        await nc.until("RDATA events master 1 1")


@pytest.mark.bare_database
async def test_who_may_merely_connect_delays_an_installation_for_a_bounded_time_and_is_named(
    database_url: str, team: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LOCK_WAIT", 0.2)
    async with open_database(as_role(database_url, team), size=1, application_name="nobody") as other:
        async with other.connection() as connection:
            await connection.execute("SELECT pg_advisory_lock(hashtext('replicad schema'), hashtext('replicad'))")
            with pytest.raises(DatabaseError, match=rf"pid \d+ \(nobody, role {team}\) holds the lock") as failed:
                await schema.install(database, "stream")
            assert "nothing was changed" in str(failed.value)
            await connection.execute("SELECT pg_advisory_unlock_all()")
    assert await schema.install(database, "stream") is schema.Outcome.INSTALLED
