"""docs/sql.md has every public function and nothing else, and no page speaks of a function that is internal."""

from __future__ import annotations

import re

import pytest

from replicad.errors import by_code
from replicad.postgres import schema, schema_text
from tests.schema import page

# for who changes replicad
DESIGN = {"architecture.md", "positions.md", "leases.md", "protocol-notes.md", "specs.md", "where.md"}
PAGES = [page.ROOT / "README.md", page.ROOT / "protocol.md", *sorted((page.ROOT / "docs").rglob("*.md"))]
PUBLIC = {name for part in schema.PARTS for name in page.public(part)}
INTERNAL = {name for part in schema.PARTS for name in schema_text.created(part).routines} - PUBLIC - set(by_code())


def test_the_page_is_what_the_files_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run `python -m tests.schema.page`"


def test_every_public_function_is_on_the_page_and_nothing_else() -> None:
    listed = re.findall(r"^\| `(\w+)\(", page.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)
    assert len(PUBLIC) > 50
    assert len(INTERNAL) > 100


@pytest.mark.parametrize("part", schema.PARTS)
def test_a_public_function_is_described_in_the_file_that_creates_it(part: str) -> None:
    for name, text in schema_text.files(part):
        created = re.findall(r"^CREATE OR REPLACE FUNCTION (\w+)\(", text, re.MULTILINE)
        described = [function for function, _ in page.COMMENT.findall(text)]
        assert len(described) == text.count("\nCOMMENT ON FUNCTION"), name
        assert len(set(described)) == len(described), name
        assert set(described) <= set(created), name


def test_pages_for_users_name_no_internal_function() -> None:
    found = {
        f"{file.name}: {name}"
        for file in PAGES
        if file.name not in DESIGN
        for name in INTERNAL & set(re.findall(r"\w+", file.read_text("utf-8")))
    }
    assert found == set(), "make the function public, or leave it out"


def test_every_file_of_a_part_is_listed_and_installed_in_the_order_of_the_list() -> None:
    for part, declared in schema.PARTS.items():
        there = {file.name for file in declared.folder.rglob("*.sql") if file.parent.name not in ("query", "upgrade")}
        assert sorted(declared.files) == sorted(there - {"down.sql"}), "`files` in part.toml lists each file once"
        script = schema.script(part, "here", "up")
        assert re.findall(r"^-- (\w+\.sql)$", script, re.MULTILINE) == list(declared.files)
