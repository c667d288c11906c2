"""Files of queries: a line `-- name: <query>` opens each query, and a file that is wrong is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicad.postgres.statements import MOST_BYTES, load_sql, read_queries

FILE = """\
-- What this file is about.

-- name: first
-- A comment of the query is part of its text.
SELECT 1
WHERE 'x' <> '-- name: no_query'

-- name: second_2
SELECT 2;

SELECT 3;
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "topic.sql"


def test_a_query_is_the_text_between_its_name_and_the_next_name(file: Path) -> None:
    file.write_text(FILE, encoding="utf-8")
    assert read_queries([file]) == {
        "first": "-- A comment of the query is part of its text.\nSELECT 1\nWHERE 'x' <> '-- name: no_query'\n",
        "second_2": "SELECT 2;\n\nSELECT 3;\n",
    }


def test_the_last_line_of_a_file_may_lack_its_end(file: Path) -> None:
    file.write_text("-- name: only\nSELECT 1", encoding="utf-8")
    assert read_queries([file]) == {"only": "SELECT 1\n"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SELECT 1\n-- name: a\nSELECT 2\n", "has SQL before the first line"),
        ("SELECT 1\n", "has SQL before the first line"),
        ("-- name: a\nSELECT 1\n-- name: a\nSELECT 1\n", "the query a is in .* and again in"),
        ("-- name: a\n-- a comment\n\n-- name: b\nSELECT 1\n", "the query a in .* has no SQL"),
        ("-- name: a", "the query a in .* has no SQL"),
        ("-- name:\nSELECT 1\n", "names no query"),
        ("-- name: a b\nSELECT 1\n", "names no query"),
        ("-- name:a\nSELECT 1\n", "names no query"),
        ("-- name: A\nSELECT 1\n", "names no query"),
        (f"-- name: {'a' * 64}\nSELECT 1\n", "names no query"),
        (f"-- name: a\nSELECT 1{' ' * MOST_BYTES}\n", f"has at most {MOST_BYTES}"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(file: Path, text: str, problem: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=problem) as refused:
        read_queries([file])
    assert str(file) in str(refused.value)


def test_a_name_that_two_files_have_is_refused_with_both(tmp_path: Path) -> None:
    one, two = tmp_path / "one.sql", tmp_path / "two.sql"
    for path in (one, two):
        path.write_text("-- name: a\nSELECT 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="names are unique") as refused:
        read_queries([one, two])
    assert str(one) in str(refused.value)
    assert str(two) in str(refused.value)


def test_a_query_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="-- name: no_such_query"):
        load_sql("no_such_query")
