"""What a role that only looks sees: the state of the daemons, and no state that comes from its own missing rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replicad.postgres.bridge import Database
from replicad.postgres.schema_text import Roles, script
from replicad.streams.registry import Registry
from tests.commands import replicad_async
from tests.conftest import psql
from tests.daemons import Daemon
from tests.roles import DAEMON, as_role

from .test_tubes_contained import until, until_true
from .test_tubes_parted import Looks, looked

__all__ = ["looked"]

OWNER, OPERATOR = "orders_owner", "orders_ops"
LOOKS = (
    ["streams", "list"],
    ["streams", "show", "orders"],
    ["tubes", "list"],
    ["tubes", "stats"],
    ["tubes", "parked", "list", "t"],
    ["sender", "parked", "list"],
    ["status"],
    ["doctor"],
)


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    """The database for the operator; roles, a stream and a tube are made as `replicad sql roles` and the docs say."""
    roles = script(Roles(DAEMON, owners=[OWNER], operators=[OPERATOR]))
    psql(database_url, roles)
    psql(
        database_url,
        f"CREATE SCHEMA app AUTHORIZATION {OWNER}",
        f"SET ROLE {OWNER}; CREATE TABLE app.orders (id bigserial PRIMARY KEY, body text);"
        "CREATE FUNCTION app.wanted(text) RETURNS boolean LANGUAGE sql AS $$ SELECT $1 <> 'x' $$",
        "INSERT INTO app.orders (body) VALUES ('a'), ('b')",
    )
    yield as_role(database_url, OPERATOR)
    psql(database_url, *(f"DROP OWNED BY {role} CASCADE" for role in (OWNER, OPERATOR)))
    psql(database_url, *(f"DROP ROLE {role}" for role in (OWNER, OPERATOR)))


async def prepare(db: Database, url: str, daemon: Daemon) -> None:
    await Registry(db).add("orders", "app.orders", "id")
    await db.execute(
        "SELECT tube.tube_ensure_exists('t');"
        "SELECT tube.tube_table_ensure_attached('t', 'app.orders', 0, 'app.wanted(body)', 'length(body)')"
    )
    psql(as_role(url, "postgres"), script(Roles(DAEMON, owners=[OWNER], operators=[OPERATOR])))
    published = "SELECT count(*) FROM replicad.stream_position WHERE position = 2"
    await until_true(lambda: psql(as_role(url, "postgres"), published).strip() == "1")


async def look(url: str) -> dict[str, str]:
    """What each command prints."""
    found = {}
    for words in LOOKS:
        done = await replicad_async(*words, "--database", url)
        found[" ".join(words)] = f"{done.stdout}{done.stderr}"
        assert done.returncode in (0, 1, 2), (words, done.stderr)
        assert "Traceback" not in done.stderr, words
    return found


async def test_an_operator_sees_no_fault_where_there_is_none(database: Database, daemon: Daemon, url: str) -> None:
    await prepare(database, url, daemon)
    found = await look(url)
    for command, said in found.items():
        assert "denied" not in said, command
        assert "GRANT" not in said, command
        assert "FAILING" not in said, command
    assert "what daemons publish is shown" in found["streams list"]
    assert "not checked" in next(line for line in found["doctor"].splitlines() if " readers " in line)


async def test_an_operator_sees_what_daemons_report(database: Database, daemon: Daemon, url: str) -> None:
    await prepare(database, url, daemon)
    await database.execute("ALTER TABLE app.orders DISABLE TRIGGER USER; ALTER SEQUENCE app.orders_id_seq CACHE 10")
    await until_true(lambda: daemon.troubles.why("tube", "t") and daemon.troubles.why("stream", "orders"))

    async def told() -> bool:
        found = await look(url)
        stream = all("CACHE 1" in found[one] for one in ("streams list", "status", "doctor"))
        return stream and all("are not recorded" in found[one] for one in ("tubes list", "status", "doctor"))

    await until(told)


async def test_without_a_daemon_no_stream_is_ok_for_an_operator(database: Database, url: str) -> None:
    await Registry(database).add("orders", "app.orders", "id")
    psql(as_role(url, "postgres"), script(Roles(DAEMON, owners=[OWNER], operators=[OPERATOR])))
    found = await replicad_async("streams", "list", "--json", "--database", url)
    assert '"state":"no_daemon"' in found.stdout.replace(" ", "")


async def test_a_right_that_the_daemon_lost_is_not_told_as_triggers_that_cannot_run(
    database: Database, daemon: Daemon, url: str, looked: Looks
) -> None:
    await prepare(database, url, daemon)
    reader = await database.fetch_value("SELECT tube.tube_reader($1::regrole::oid)::text", OWNER)
    await database.execute(f"REVOKE {OWNER} FROM {DAEMON}; REVOKE EXECUTE ON FUNCTION {reader} FROM {DAEMON}")
    await database.execute("ALTER TABLE app.orders ADD COLUMN more integer")
    await looked()
    await until_true(lambda: "each write" not in (daemon.troubles.why("tube", "t") or ""))  # a trial was under way
    await database.execute("INSERT INTO app.orders (body) VALUES ('c')")
    assert await database.fetch_value("SELECT count(*) FROM tube.t") == 1
