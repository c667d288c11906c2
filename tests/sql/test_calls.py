"""Calls of SQL functions by name: with parameters and with constants, arguments get the types of the signature."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database
from replicad.postgres.literals import fill, quote_argument
from replicad.postgres.statements import call_row, call_rows, call_value, rows_call, value_call

SCHEMA = "odd schema"
FUNCTIONS = """
CREATE SCHEMA "odd schema";
CREATE FUNCTION "odd schema".shown(
    a text, b integer, c smallint, d bigint[], e text[], f interval, g boolean, h float8, i jsonb = '{}'
) RETURNS text LANGUAGE sql AS $$ SELECT row(a, b, c, d, e, extract(epoch FROM f), g, h, i)::text $$;
CREATE FUNCTION "odd schema".pairs(n integer, OUT first bigint, OUT second bigint[]) RETURNS SETOF record
LANGUAGE sql AS $$ SELECT i, ARRAY[i, -i] FROM generate_series(1, n) i $$;
"""
ARGUMENTS: list[tuple[Any, ...]] = [
    ("x", 1, 2, [3, 4], ["a", "b"], timedelta(seconds=90.5), True, 1.5),
    ('it\'s \\ "so" {,}', -1, 0, [], ["it's", "\\", '"', "{,}", "", "NULL"], timedelta(microseconds=1), False, 1e300),
    (None, None, None, None, None, None, None, None),
    ("", 0, 0, [-5], [], timedelta(days=400), True, 0.0, '{"k": [1, "it\'s"]}'),
]


@pytest.fixture
async def prepared(database: Database) -> Database:
    async with database.connection() as connection:
        await connection.execute(FUNCTIONS)
    return database


@pytest.mark.parametrize("args", ARGUMENTS)
async def test_constants_are_taken_as_parameters_are(prepared: Database, args: tuple[Any, ...]) -> None:
    given = await call_value(prepared, SCHEMA, "shown", *args)
    written = await prepared.fetch_value(fill(value_call(SCHEMA, "shown", len(args)), args, quote_argument))
    assert given == written


async def test_a_call_gives_rows_the_first_row_or_a_value(prepared: Database) -> None:
    rows = await call_rows(prepared, SCHEMA, "pairs", 2)
    assert [tuple(row) for row in rows] == [(1, [1, -1]), (2, [2, -2])]
    assert dict(await call_row(prepared, SCHEMA, "pairs", 1)) == {"first": 1, "second": [1, -1]}
    assert await call_row(prepared, SCHEMA, "pairs", 0) is None
    assert await call_value(prepared, "pg_catalog", "abs", -3.0, result="bigint") == 3


async def test_columns_may_be_chosen_and_cast(prepared: Database) -> None:
    [row] = await call_rows(prepared, SCHEMA, "pairs", 1, columns="second::text AS text, first")
    assert dict(row) == {"text": "{1,-1}", "first": 1}
    [(text,)] = await call_rows(prepared, SCHEMA, "pairs", 1, columns="to_json(pairs)::text")
    assert text == '{"first":1,"second":[1,-1]}'


async def test_a_function_that_is_not_there_is_an_error_of_the_database(prepared: Database) -> None:
    with pytest.raises(DatabaseError, match="nothing"):
        await call_value(prepared, SCHEMA, "nothing", 1)


def test_the_text_of_a_call_is_made_once() -> None:
    assert rows_call(SCHEMA, "f", 2) is rows_call(SCHEMA, "f", 2)
    assert rows_call(SCHEMA, "f", 2) == 'SELECT * FROM "odd schema"."f"($1, $2)'


@pytest.mark.parametrize("value", [b"x", [True], [1.5], [None], {"a": 1}, object()])
def test_arguments_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        quote_argument(value)
