"""What each feature needs in Postgres: one entry for a right, with a use of the feature that fails without it.

`tests/integration/test_rights_needed.py` takes each right away in turn. The table in docs/access.md is made from this:

    python -m tests.rights
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from replicad.config.settings import DatabaseSettings
from replicad.errors import StreamRefused
from replicad.operations.doctor.checks import CHECKS, Level, examine
from replicad.operations.doctor.seen import Evidence
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.streams.registry import Registry
from tests.conftest import psql
from tests.roles import as_role

PAGE = Path(__file__).parents[1] / "docs/access.md"
SECTION = re.compile(r"(<!-- rights of features -->\n).*?(<!-- end of rights -->)", re.DOTALL)

SETUP = """
    CREATE SCHEMA app AUTHORIZATION {owner};
    CREATE SCHEMA super;
    SET ROLE {owner};
    CREATE TABLE app.orders (id bigserial PRIMARY KEY);
    CREATE TABLE app.facts (id bigserial PRIMARY KEY);
    GRANT USAGE ON SCHEMA app TO {writer};
    GRANT INSERT ON app.orders, app.facts TO {writer};
    RESET ROLE;
    CREATE TABLE super.plain (id bigserial PRIMARY KEY);
    CREATE TABLE super.kept (stream_name text, instance_name text, stream_id bigint);
    GRANT USAGE ON SCHEMA super TO {daemon};
    GRANT SELECT ON super.plain, super.plain_id_seq, super.kept TO {daemon};
"""
INSTALLED = """
    SELECT replicad.stream_add('orders', 'app.orders', 'id');
    SELECT replicad.stream_add('facts', 'app.facts', 'id', method => 'reservation');
    SELECT replicad.stream_add('plain', 'super.plain', 'id');
    SELECT replicad.stream_add('kept', 'super.plain', 'id', method => 'positions_table', positions => 'super.kept');
    SELECT replicad.writer_enable('orders'), replicad.cache_enable();
    SELECT tube.tube_ensure_exists('a');
    SELECT tube.tube_table_ensure_attached('a', 'app.orders', 0);
    GRANT SELECT ON replicad.stream_ack, replicad.stream_mark, replicad.federation_sender TO {owner};
    GRANT USAGE ON SCHEMA tube TO {writer};
"""


@dataclass(frozen=True)
class World:
    """A database with every feature. `url` is a superuser's; `names`: the roles by what they do, and the database."""

    url: str
    names: dict[str, str]

    def open(self, role: str) -> AbstractAsyncContextManager[Database]:
        return open_database(as_role(self.url, self.names[role]), size=1, application_name="rights")

    def sql(self, text: str) -> str:
        """Run it as the superuser."""
        return psql(self.url, text.format(**self.names))


@dataclass(frozen=True)
class Right:
    """`role` needs `grant` for `feature`. Without it `use` raises, with the GRANT `said` (default: the same)."""

    feature: str
    role: str
    grant: str
    use: Callable[[World], Awaitable[None]]
    said: str = ""


async def _install(world: World) -> None:
    async with world.open("daemon") as db:
        await schema.install(db, "stream", "fresh")
    world.sql("DROP SCHEMA fresh CASCADE")


async def _read_as_owner(world: World) -> None:
    world.sql(DROP_READERS.replace("FOLDER", "replicad"))
    async with world.open("daemon") as db:
        await Registry(db).ensure_readers()
        denied = (await Registry(db).load_stream("orders")).denied
        if denied is not None:
            raise StreamRefused(denied)


# The readers that exist go on; a stream of another owner, or an upgrade, needs new ones.
DROP_READERS = """
    DO $$ DECLARE f regprocedure; BEGIN
        FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = 'FOLDER'::regnamespace AND proname ~ '^reader_1_' LOOP
            EXECUTE 'DROP FUNCTION ' || f;
        END LOOP;
    END $$
"""


async def _attach(world: World) -> None:
    world.sql("SELECT tube.tube_table_ensure_detached('a', 'app.orders');" + DROP_READERS.replace("FOLDER", "tube"))
    oid = world.sql("SELECT 'app.orders'::regclass::oid")  # the name alone would need USAGE on the schema
    async with world.open("daemon") as db:
        await db.execute(f"SELECT tube.tube_table_ensure_attached('a', {oid}::oid::regclass, 0)")


def _serve(name: str) -> Callable[[World], Awaitable[None]]:
    async def use(world: World) -> None:
        async with world.open("daemon") as db:
            denied = (await Registry(db).load_stream(name)).denied
            if denied is not None:
                raise StreamRefused(denied)

    return use


async def _see_sessions(world: World) -> None:
    async with world.open("daemon") as db:
        seen = Evidence(db, DatabaseSettings(database=world.url))
        found = [one async for check, one in examine(seen, [c for c in CHECKS if c.name in ("schema", "rights")])]
    wrong = [one for one in found if one.level is not Level.FINE]
    if wrong:
        raise StreamRefused(f"{wrong[0].text}; {wrong[0].remedy}")


def _as(role: str, statement: str) -> Callable[[World], Awaitable[None]]:
    async def use(world: World) -> None:
        async with world.open(role) as db, db.connection() as connection:
            await connection.execute("BEGIN")
            await connection.execute(statement)
            await connection.execute("ROLLBACK")

    return use


def _trim(**how: object) -> Callable[[World], Awaitable[None]]:
    async def use(world: World) -> None:
        async with world.open("owner") as db:
            await Registry(db).trim("orders", **how)  # type: ignore[arg-type]

    return use


RIGHTS = (
    Right("install and upgrade replicad's schemas, which then belong to the daemon", "daemon",
        "CREATE ON DATABASE {database}", _install),
    Right("serve streams on tables of another role, read as that role", "daemon", "{owner}", _read_as_owner),
    Right("attach tables of another role to tubes", "daemon", "{owner}", _attach),
    Right("serve streams on tables of a superuser", "daemon", "USAGE ON SCHEMA super", _serve("plain")),
    Right("the same", "daemon", "SELECT ON super.plain", _serve("plain")),
    Right("the same", "daemon", "SELECT ON SEQUENCE super.plain_id_seq", _serve("plain")),
    Right("positions that writers keep in a table of a superuser", "daemon", "SELECT ON super.kept", _serve("kept")),
    Right("show the age and the query of what holds a stream back", "daemon", "pg_read_all_stats", _see_sessions),
    Right("write to a stream", "writer", "INSERT ON app.orders", _as("writer", "INSERT INTO app.orders VALUES (1)"),
        "SELECT ON TABLE orders"),
    Right("reserve ids", "writer", "USAGE ON SEQUENCE app.facts_id_seq",
        _as("writer", "SELECT replicad.stream_next('facts')")),
    Right("share the keys of a stream", "writer", "INSERT ON app.orders",
        _as("writer", "SELECT replicad.writer_join('orders', 'w', '10 s')")),
    Right("invalidate caches", "writer", "EXECUTE ON FUNCTION replicad.cache_write(text, jsonb)",
        _as("writer", "SELECT replicad.invalidate_cache('f', '[1]')")),
    Right("touch ids of an attached table (`TABLE_touch`)", "writer", "INSERT ON app.orders",
        _as("writer", "SELECT app.orders_touch('{1}')"), "UPDATE ON app.orders"),
    Right("put ids into a tube (`TUBE_touch`)", "writer", "USAGE ON SCHEMA tube",
        _as("writer", "SELECT tube.a_touch(0, '{1}', 'T')")),
    Right("trim a stream by what was acknowledged (and own its table)", "owner", "SELECT ON TABLE replicad.stream_ack",
        _trim(acked=True), "SELECT ON TABLE stream_ack"),
    Right("the same", "owner", "SELECT ON TABLE replicad.federation_sender", _trim(acked=True),
        "SELECT ON TABLE federation_sender"),
    Right("trim a stream by age (and own its table)", "owner", "SELECT ON TABLE replicad.stream_mark",
        _trim(older_than=timedelta(days=1)), "SELECT ON TABLE stream_mark"),
)  # fmt: skip

SHOWN = {
    "database": "app", "owner": "app_owner", "daemon": "replicad", "writer": "app", "super": "billing",
}  # fmt: skip


def render(page: str) -> str:
    """The page with the table; what is around it stays."""
    return SECTION.sub(lambda found: found[1] + table() + found[2], page)


def table() -> str:
    """A row for each right, with blank lines around them."""
    roles = {"daemon": "the daemon", "writer": "a writer", "owner": "the owner of the table"}
    rows = [f"| {one.feature} | {roles[one.role]} | `GRANT {shown(one)}` |" for one in RIGHTS]
    return "\n".join(["", "| to do | who | needs |", "|---|---|---|", *rows, "", ""])


def shown(right: Right) -> str:
    """The GRANT with the names of the docs."""
    text = right.grant.format(**SHOWN)
    return f"{text} TO {SHOWN[right.role]}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
