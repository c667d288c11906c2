"""docs/sql.md has every public function and nothing else, and no page speaks of a function that is internal."""

from __future__ import annotations

import re

import pytest

from replicad.errors import by_code
from replicad.postgres import schema, schema_text
from tests.schema import page

# for who changes replicad
DESIGN = {"architecture.md", "positions.md", "leases.md", "protocol-notes.md", "specs.md", "where.md"}
PAGES = [page.ROOT / "README.md", page.ROOT / "protocol.md", *sorted((page.ROOT / "docs").glob("*.md"))]
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
def test_a_public_file_creates_functions_and_nothing_else(part: str) -> None:
    for file in (schema.PARTS[part].folder / "public").glob("*.sql"):
        created = re.findall(r"^CREATE (.*?)\w+\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(created) == {"OR REPLACE FUNCTION "}, file.name


def test_pages_for_users_name_no_internal_function() -> None:
    found = {
        f"{file.name}: {name}"
        for file in PAGES
        if file.name not in DESIGN
        for name in INTERNAL & set(re.findall(r"\w+", file.read_text("utf-8")))
    }
    assert found == set(), "make the function public, or leave it out"


def test_files_of_both_folders_are_installed_in_the_order_of_their_numbers() -> None:
    for part, declared in schema.PARTS.items():
        files = [*declared.folder.glob("[0-9]*.sql"), *declared.folder.glob("public/*.sql")]
        names = sorted(file.name for file in files)
        assert len(set(names)) == len(names), "two files of one name"
        script = schema.script(part, "here", "up")
        assert re.findall(r"^-- ([0-9]\w+\.sql)$", script, re.MULTILINE) == names
