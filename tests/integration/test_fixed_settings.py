"""The same row is the same text, whatever is set for the database, the role, or a function that its owner may alter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from replicad.errors import DatabaseError
from replicad.fixed_settings import FIXED
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema_text import PACKAGE
from replicad.streams.chunks import Chunk
from replicad.streams.registry import Registry, row_source
from tests.conftest import psql
from tests.roles import as_role

TABLE = """
    SET ROLE {0};
    CREATE TABLE {0}.m (id bigserial PRIMARY KEY, f float8, fa float4[], i interval, b bytea, d date, at timestamptz,
        money money, t text);
    INSERT INTO {0}.m (f, fa, i, b, d, at, money, t) VALUES (0.1::float8 + 0.2, '{{1.1,NULL}}',
        '-1 year 2 mons -3 days', '\\x00ff5c', '2026-01-02', '2026-01-02 03:04:05+02', 1234.5, 'a''b\\c');
"""
ROW = r"""jsonb_build_array(to_char(t.f, '9D99L'), to_char(t.d, 'TMMonth'), 'a\b',
    t.t = NULL, '01/02/2003'::date, '{null}'::text[], quote_ident('a'), t.i::text, t.f::text, t.money::text)"""
OTHERS = {
    "TimeZone": "Asia/Tokyo",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "-2",
    "bytea_output": "escape",
    "xmlbinary": "hex",
    "gin_fuzzy_search_limit": "1",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "standard_conforming_strings": "off",
    "quote_all_identifiers": "on",
    "row_security": "on",
    "timezone_abbreviations": "India",
}
ELSEWHERE = ("exit_on_error",)  # what no session survives, or what ends sessions and is not about text


@pytest.fixture
def owner(database_url: str, postgres_url: str) -> Iterator[str]:
    name = f"setter_{abs(hash(database_url)) % 10**9}"
    psql(database_url, f"CREATE ROLE {name} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {name}", TABLE.format(name))
    yield name
    psql(postgres_url, f"ALTER DATABASE {urlsplit(database_url).path[1:]} RESET ALL", f"ALTER ROLE {name} RESET ALL")
    psql(database_url, f"DROP OWNED BY {name} CASCADE")
    psql(postgres_url, f"DROP ROLE {name}")


async def read(url: str, name: str) -> tuple[list[bytes], list[bytes]]:
    """The rows of both streams, by each way of reading, in a new session."""
    found: list[list[bytes]] = []
    async with open_database(url, size=1, application_name="reads") as db:
        for stream in (f"{name}_whole", f"{name}_row"):
            source = row_source(await Registry(db).load_stream(stream))
            got: list[bytes] = []

            async def keep(chunk: Chunk, got: list[bytes] = got) -> None:
                got.append(bytes(chunk.data))

            await source.copy_range(db, 0, 10, keep)
            await source.copy_range(db, 0, 1 << 40, keep)
            await source.copy_blocks(db, 0, 10, keep, step=5, max_line=10_000)
            assert len(set(got)) == 1, "the same by each way"
            found.append(got)
    return found[0], found[1]


async def other_settings(database: Database) -> list[tuple[str, str]]:
    """Another value for each setting that a session can have."""
    rows = await database.fetch(
        "SELECT name, vartype, setting, enumvals FROM pg_settings WHERE context IN ('user', 'superuser') "
        "AND vartype IN ('bool', 'enum') AND name NOT LIKE 'transaction%' AND name <> ALL ($1)",
        list(ELSEWHERE),
    )
    changed = dict(OTHERS)
    for row in rows:
        values = row["enumvals"] or ["on", "off"]
        if others := [value for value in values if value != row["setting"]]:
            changed.setdefault(row["name"], others[0])
    return list(changed.items())


@pytest.mark.parametrize("way", ["database", "role", "role in database", "reader"])
async def test_rows_are_the_same_text_whatever_is_set(
    database: Database, database_url: str, owner: str, way: str
) -> None:
    await Registry(database).add(f"{owner}_whole", f"{owner}.m", "id")
    added = await Registry(database).add(f"{owner}_row", f"{owner}.m", "id", row=ROW)
    reader = added.stream.reader
    assert reader is not None
    await database.execute(
        f"GRANT USAGE ON SCHEMA replicad TO {owner}; GRANT SELECT ON ALL TABLES IN SCHEMA replicad TO {owner}"
    )
    urls = [database_url] if way in ("database", "reader") else [as_role(database_url, owner)]
    if way == "database":
        urls.append(as_role(database_url, owner))
    before = [await read(url, owner) for url in urls]
    name = await database.fetch_value("SELECT current_database()")
    what = {
        "database": f"DATABASE {name}",
        "role": f"ROLE {owner}",
        "role in database": f"ROLE {owner} IN DATABASE {name}",
        "reader": f"FUNCTION {reader}(oid, text, text, bigint)",
    }[way]
    refused = []
    for setting, value in await other_settings(database) if way == "database" else OTHERS.items():
        try:
            await database.execute(f"ALTER {what} SET {setting} = '{value}'")
        except DatabaseError:  # this server cannot have it
            refused.append(setting)
    assert not FIXED.keys() & set(refused)
    assert [await read(url, owner) for url in urls] == before


def test_readers_have_the_settings_of_sessions() -> None:
    body = (PACKAGE / "postgres/sql/reader_body.sql").read_text(encoding="utf-8")
    asked = re.findall(r"current_setting\('(\w+)'\)", body)
    [expected] = re.findall(r"OPERATOR\(pg_catalog\.<>\) '(off\|.*)' THEN", body)
    assert dict(zip(asked, expected.split("|"), strict=True)) == FIXED
    assert dict(re.findall(r"\('(\w+)', '([^']*)'\)", body)) == FIXED
