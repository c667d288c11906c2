"""What messages about Postgres show of a URL, and what they never show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicad
from replicad import errors
from replicad.postgres import failures
from replicad.postgres.failures import Target, parse_target, while_connecting, while_running
from replicad.postgres.literals import fill, quote_ident, quote_literal


def test_every_state_that_our_sql_raises_has_its_class_here() -> None:
    """So nobody takes a state for a second meaning: RS099 alone never leaves the function that raises it."""
    raised = {
        state
        for file in Path(replicad.__file__).parent.rglob("*.sql")
        for state in re.findall(r"'(R[A-Z]\d{3})'", file.read_text(encoding="utf-8"))
    }
    assert len(raised) > 15
    assert raised - {"RS099"} <= set(failures._OURS)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("postgresql://me:secret@db:5433/app", Target("db:5433", "app", "me")),
        ("postgres://me@db/app", Target("db:5432", "app", "me")),
        ("postgresql://me@db", Target("db:5432", "me", "me")),
        ("postgresql:///app?host=/run/pg&user=me", Target("/run/pg", "app", "me")),
        ("postgresql://me@/app?host=%2Frun%2Fpg&port=6000", Target("/run/pg", "app", "me")),
        ("postgresql://me@[::1]/app", Target("[::1]:5432", "app", "me")),
        ("postgresql://me@[::1]:6000/app", Target("[::1]:6000", "app", "me")),
        ("postgresql://m%40e:p%40ss@db/a%20b", Target("db:5432", "a b", "m@e")),
        ("postgresql://me:p@ss@db/app", Target("db:5432", "app", "me")),
        ("postgresql://", Target("localhost:5432", "(default)", "(default)")),
        ("postgresql:///app?service=prod&user=me", Target("service prod", "app", "me")),
        ("postgresql://me@one:1,two:2/app", Target("one:1,two:2", "app", "me")),
    ],
)
def test_target_shows_host_database_and_user(url: str, target: Target) -> None:
    assert parse_target(url) == target


@given(st.text("abcXYZ0189-_.!*~", min_size=6))
def test_password_is_in_no_message(password: str) -> None:
    url = f"postgresql://u:{password}@h/d"
    target = parse_target(url)
    for error in (OSError(url), TimeoutError(url), ValueError(f"cannot use {url}"), ValueError(f"password={password}")):
        for told in (while_connecting(error, target, 1), while_running(error, target, connection_lost=True)):
            assert password not in str(told).replace("password", "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(), errors.DatabaseUnavailable),
        (FileNotFoundError(), errors.DatabaseUnavailable),
        (TimeoutError(), errors.DatabaseUnavailable),
        (ValueError("sslmode"), errors.DatabaseRefused),
    ],
)
def test_failure_to_connect_says_where_and_what_to_do(error: Exception, kind: type[errors.DatabaseError]) -> None:
    told = while_connecting(error, Target("db:5432", "app", "me"), 3)
    assert type(told) is kind
    assert "db:5432" in str(told)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:12/34secret@db/app",
        "postgresql://me:1/s@cret34@db/app",
        "postgresql://me:12#34secret@db/app",
        "postgresql://me:12?34secret@db/app",
        "postgresql://me:se/cret34@db/app",
    ],
)
def test_a_password_that_ends_the_host_is_refused_and_no_part_of_it_is_shown(url: str) -> None:
    with pytest.raises(errors.UsageError, match="%2F") as caught:
        parse_target(url)
    assert not re.search(r"12|34|cret", str(caught.value))


class TooMany(Exception):
    sqlstate = "53300"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ('too many connections for role "me"', 'role "me" is reached: raise it by ALTER ROLE "me" CONNECTION LIMIT'),
        ('too many connections for database "app"', 'raise it by ALTER DATABASE "app" CONNECTION LIMIT'),
        ("sorry, too many clients already", "raise max_connections"),
    ],
)
def test_the_limit_that_is_reached_is_named(said: str, remedy: str) -> None:
    found = while_connecting(TooMany(said), Target("db:5432", "app", "me"), 3)
    assert isinstance(found, errors.DatabaseUnavailable)
    assert remedy in str(found)


def test_placeholders_are_filled_by_number() -> None:
    assert fill("SELECT $2, $1, $2, $3", ["a", 2, None]) == "SELECT ('2'::bigint), 'a', ('2'::bigint), NULL"
    assert fill("SELECT '$1'", []) == "SELECT '$1'"


@pytest.mark.parametrize(("query", "args"), [("SELECT $2", [1]), ("SELECT 1", [1]), ("SELECT $2", [1, 2])])
def test_placeholders_and_arguments_have_to_match(query: str, args: list[object]) -> None:
    with pytest.raises((IndexError, ValueError)):
        fill(query, args)


def test_what_has_no_safe_form_is_refused() -> None:
    for value in (b"bytes", object(), [1, "mixed"], {"a": 1}):
        with pytest.raises(TypeError):
            quote_literal(value)
    for text in ("", "a\x00b"):
        with pytest.raises(ValueError, match="NUL"):
            quote_ident(text)
    with pytest.raises(ValueError, match="NUL"):
        quote_literal("a\x00b")
