"""Roles that must not be trusted call every function of an installation, with hostile arguments, and read everything.

A role that may only connect, the operators' role of `replicad sql roles`, and a writer's. Each call is answered, or
refused by an error that is meant for callers; and those who may only look change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import asyncpg
import pytest
import trio

from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.literals import quote_literal
from replicad.postgres.schema_text import Roles, script
from tests.lengths import LONG
from tests.roles import DAEMON, as_role

pytestmark = pytest.mark.bare_database

STRANGER, OPERATOR, WRITER = "stranger_of_test", "operator_of_test", "writer_of_test"
LOOKS = {  # the relations that each role may read something of, beside those that PUBLIC may
    STRANGER: set[str](),
    OPERATOR: {
        "replicad.federation_destination", "replicad.federation_destination_room", "replicad.federation_edu",
        "replicad.federation_parked", "replicad.federation_sender", "replicad.federation_version",
        "replicad.sharding_version", "replicad.stream_ack", "replicad.stream_daemon", "replicad.stream_trouble",
        "replicad.stream_version", "tube.tube_attachment", "tube.tube_backfill", "tube.tube_lease", "tube.tube_parked",
        "tube.tube_registry", "tube.tube_report", "tube.tube_version",
    },
    WRITER: set[str](),
}  # fmt: skip
PUBLIC = {
    "replicad.stream", "replicad.stream_changes", "replicad.stream_generation", "replicad.stream_position",
    "replicad.stream_skip", "replicad.stream_writer", "replicad.writer_member",
    "replicad.writer_sharding", "replicad.writer_slot",
}  # fmt: skip
ROUNDS = 8 if LONG else 3  # calls of each function, with other arguments each
NO_RELATION = "could not open relation with OID"  # Postgres itself, to whoever looks at the last value of no sequence
INSIDE = ("XX", "08", "53", "54", "57", "58", "P0001", "P0004", "40")  # SQLSTATEs of failures, and not of refusals
TEXTS = ("events", "facts", "a", "", "\x01\x1b[2J\r\n", "x" * 70_000, "'; DROP TABLE replicad.stream; --", "%s%I$1\\")
HOSTILE = {
    "text": TEXTS,
    "name": TEXTS,
    "bigint": ("1", "0", "-1", str((1 << 63) - 1), str(-(1 << 63))),
    "integer": ("1", "0", "-1", str((1 << 31) - 1), str(-(1 << 31))),
    "smallint": ("1", "-32768", "32767"),
    "boolean": ("true", "false"),
    "jsonb": ("{}", "[]", "null", '"\\u0001"', "[" * 100 + "]" * 100, '[{"a": 1e131071}]'),
    "json": ("{}", "[]", "null", "[" * 100 + "]" * 100),
    "interval": ("1 second", "0", "-1 second", "170000000 years"),
    "timestamp with time zone": ("2020-01-01", "infinity", "-infinity"),
    "regclass": ("pg_catalog.pg_authid", "0", "4294967295"),
    "oid": ("0", "1", "4294967295"),
    "regrole": ("0", "postgres"),
    "double precision": ("1", "NaN", "Infinity", "-1e308"),
    "real": ("1", "NaN", "-Infinity"),
    "numeric": ("1", "NaN", "1e1000"),
    "uuid": ("00000000-0000-0000-0000-000000000000",),
    "xid8": ("0", "18446744073709551615"),
    "bytea": ("", "\\x00ff"),
}
FUNCTIONS = """
    SELECT format('%I.%I', n.nspname, p.proname) AS name,
        ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY a (t, i) ORDER BY i)
            AS types
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname IN ('replicad', 'tube') AND p.prokind = 'f'
        AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
    ORDER BY 1
"""
RELATIONS = """
    SELECT format('%I.%I', n.nspname, c.relname) AS name, has_any_column_privilege($1, c.oid, 'SELECT') AS looks
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname IN ('replicad', 'tube') AND c.relkind IN ('r', 'v', 'm', 'p') ORDER BY 1
"""


@pytest.fixture
async def installed(database: Database) -> Database:
    """An installation with every part, two streams, a cache, and a tube with a table, that belongs to the daemon."""
    await database.execute(script(Roles(DAEMON, ["owner_of_test"], [WRITER], [OPERATOR])))
    await database.execute(
        f"DO $$ BEGIN IF to_regrole('{STRANGER}') IS NULL THEN CREATE ROLE {STRANGER} LOGIN; END IF; END $$"
    )
    for part in schema.PARTS:
        await schema.install(database, part)
    await database.execute(
        "CREATE TABLE events (id bigserial PRIMARY KEY); CREATE TABLE facts (id bigserial PRIMARY KEY);"
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY);"
        "SELECT replicad.stream_add('events', 'events', 'id');"
        "SELECT replicad.stream_add('facts', 'facts', 'id', method => 'reservation');"
        "SELECT replicad.cache_enable(), replicad.writer_enable('events');"
        "SELECT tube.tube_ensure_exists('a', 1), tube.tube_table_ensure_attached('a', 'sh1.t');"
        f"GRANT USAGE ON SCHEMA sh1 TO {WRITER}; GRANT INSERT ON events, facts, sh1.t TO {WRITER}"
    )
    await database.execute(script(Roles(DAEMON, ["owner_of_test"], [WRITER], [OPERATOR])))
    return database


async def contents(database: Database) -> dict[str, str]:
    """A digest of each relation's rows."""
    found = {}
    for row in await database.fetch(RELATIONS, STRANGER):
        query = f"SELECT md5(coalesce(string_agg(x::text, '' ORDER BY x::text), '')) FROM {row['name']} x"
        found[row["name"]] = await database.fetch_value(query)
    return found


def calls(functions: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Each function with arguments of its types, and with NULLs."""
    for name, types in functions:
        for number in range(ROUNDS):
            given = []
            for place, kind in enumerate(types):
                some = HOSTILE.get(kind) or ("{}", "{NULL}", "{NULL,1}" if "text" not in kind else '{"\x02"}')
                value = some[(number + place) % len(some)]
                known = kind in HOSTILE or kind.endswith("[]")
                given.append(f"{quote_literal(value)}::{kind}" if known else f"NULL::{kind}")
            yield f"SELECT * FROM {name}({', '.join(given)})"
        yield f"SELECT * FROM {name}({', '.join(f'NULL::{kind}' for kind in types)})"


def called_as(url: str, role: str, statements: Sequence[str]) -> list[tuple[str, str, str]]:
    """The statements, each in a transaction of its own, whose errors are failures from inside: SQLSTATE and text."""

    async def run() -> list[tuple[str, str, str]]:
        failures = []
        connection = await asyncpg.connect(as_role(url, role))
        try:
            await connection.execute("SET statement_timeout = '5s'")
            for statement in statements:
                try:
                    await connection.execute(statement)
                except asyncpg.PostgresError as error:
                    if (error.sqlstate or "XX").startswith(INSIDE) and not str(error).startswith(NO_RELATION):
                        failures.append((statement[:300], error.sqlstate, str(error)[:200]))
        finally:
            await connection.close()
        return failures

    return asyncio.run(run())


@pytest.mark.parametrize("role", [STRANGER, OPERATOR, WRITER])
async def test_no_call_of_a_function_fails_from_inside_or_changes_what_a_role_may_only_look_at(
    installed: Database, database_url: str, role: str
) -> None:
    functions = [(row["name"], row["types"]) for row in await installed.fetch(FUNCTIONS)]
    before = await contents(installed)
    failures = await trio.to_thread.run_sync(called_as, database_url, role, list(calls(functions)))
    assert not failures, "\n".join(map(str, failures))
    if role != WRITER:
        assert await contents(installed) == before


@pytest.mark.parametrize("role", [STRANGER, OPERATOR, WRITER])
async def test_a_role_reads_no_more_than_it_needs(installed: Database, role: str) -> None:
    found = {row["name"] for row in await installed.fetch(RELATIONS, role) if row["looks"]}
    assert found == PUBLIC | LOOKS[role]
    terms = "SELECT has_column_privilege($1, 'tube.tube_lease', 'term', 'SELECT')"
    assert not await installed.fetch_value(terms, role), "who knows a term speaks for the lease"
