"""What comments and docstrings refer a reader to is in the repository: pages, files of code, files of SQL.

A clone has nothing else. So no text of the package cites a private document, and no text names a file that was moved.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.source import IN_ONE_PROCESS, PACKAGE, ROOT, Module, modules

pytestmark = IN_ONE_PROCESS

# Words by which texts have cited what only their author had.
PRIVATE = re.compile(
    r"\bseeds?\s+\d+"
    r"|\bdesign:"
    r"|(?<!\w)\((?:the )?(?:positions|fan-?out|isolation|generations|tubes|faults|access|protocol-facts)(?:\.md)?\)",
    re.IGNORECASE,
)
COMMENT = re.compile(r"(?:^|\s)#\s?(.*)")
PAGE = re.compile(r"\b(?:docs/[\w./-]+\.(?:md|py)|protocol\.md|README\.md|CHANGELOG\.md|CONTRIBUTING\.md)")
CODE = re.compile(r"(?<![\w./*-])((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|sql))\b")
IN_PAGES = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|sql|toml|json))`")
PLACEHOLDER = re.compile(r"^synapse/|/N\.sql|^sql/part\.toml$")  # files of others, and forms of names
WHERE = ROOT / "docs/dev/where.md"
ROOTS = (PACKAGE, ROOT / "tests", ROOT)  # of the files in it
FILE = re.compile(r"[\w./*<>-]+\.(?:py|sql|js|lua|json|toml|md)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
FORM = re.compile(r"<|^sql/upgrade/N\.sql$")  # forms of names
KEYS = {"schema/up.sql", "tube/tables.sql"}  # of the texts of SQL parts (schema_text.load): no paths


def of_python(module: Module) -> Iterator[str]:
    """The comments and docstrings of a module, each as one line."""
    block: list[str] = []
    for line in module.text.splitlines():
        if comment := COMMENT.search(line):
            block.append(comment[1])
        elif block:
            yield " ".join(block)
            block = []
    yield " ".join(block)
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())


def of_sql(path: Path) -> str:
    """The comments of a file of SQL, as one line."""
    return " ".join(re.findall(r"--\s?(.*)", path.read_text(encoding="utf-8")))


@cache
def texts() -> list[tuple[str, str]]:
    """Every comment and docstring of the package, with the file that it stands in."""
    found = [(module.path, text) for module in modules() for text in of_python(module)]
    found += [(path, of_sql(path)) for path in sorted(PACKAGE.rglob("*.sql"))]
    return [(path.relative_to(ROOT).as_posix(), text) for path, text in found if text]


def test_there_are_texts_to_look_at() -> None:
    assert len(texts()) > 2000
    assert {"replicad/tubes/leases.py", "replicad/tubes/sql/leases.sql"} <= {where for where, _ in texts()}


def test_no_text_cites_a_document_that_a_clone_does_not_have() -> None:
    cited = [f"{where}: {found.group()}" for where, text in texts() for found in PRIVATE.finditer(text)]
    assert cited == [], "cite a page of docs/, protocol.md or a public standard, or state the reason itself"


def test_every_page_that_a_text_names_exists() -> None:
    named = {(where, page) for where, text in texts() for page in PAGE.findall(text)}
    assert len(named) > 10
    assert sorted((where, page) for where, page in named if not (ROOT / page).is_file()) == []


def test_every_file_of_code_that_a_text_names_exists() -> None:
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for folder in ("replicad", "pyspark_replicad", "tests", "bench", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sql")
    ]
    named = {(where, name) for where, text in texts() for name in CODE.findall(PAGE.sub("", text))}
    assert len(named) > 20
    gone = [(where, name) for where, name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert sorted((where, name) for where, name in gone if name not in KEYS) == [], "was it moved or renamed?"


def test_every_file_of_code_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "protocol.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, name) for page in pages for name in IN_PAGES.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 80
    roots = (ROOT, ROOT / "replicad", ROOT / "tests", ROOT / "docs")  # pages leave the folder of the package out
    gone = [(page, name) for page, name in named if not any((root / name).is_file() for root in roots)]
    assert sorted((page, name) for page, name in gone if not PLACEHOLDER.search(name)) == []


class Line(NamedTuple):
    """A line of docs/dev/where.md: the files that it names, those of them that are missing, and its names of code."""

    files: list[Path]
    missing: list[str]
    names: list[str]


def read_line(line: str) -> Line:
    """A file is given from one of ROOTS on, or by its name alone: then it is in the folder of the file before it."""
    found = Line([], [], [])
    for word in re.findall(r"`([^`]+)`", line):
        if not FILE.fullmatch(word):
            found.names.extend([word.rpartition(".")[2]] if NAME.fullmatch(word) else [])
        elif not FORM.search(word):
            folders = [*ROOTS, *(found.files[-1].parent for _ in found.files[-1:])]
            there = [path for folder in folders for path in sorted(folder.glob(word))]
            if not there and "/" not in word and not found.files:  # a file that several features have
                there = sorted(PACKAGE.glob(f"*/{word}"))
            found.files.extend(there)
            found.missing.extend([] if there else [word])
    return found


def where() -> list[tuple[str, Line]]:
    return [(line, read_line(line)) for line in WHERE.read_text(encoding="utf-8").splitlines()]


def test_the_page_of_changes_names_only_files_that_are_there() -> None:
    assert len({path for _, found in where() for path in found.files}) > 150
    assert [(word, line) for line, found in where() for word in found.missing] == [], "was it moved or renamed?"


def test_what_the_page_of_changes_says_of_a_file_is_in_it() -> None:
    gone = []
    for line, found in where():
        text = "\n".join(path.read_text(encoding="utf-8") for path in found.files)
        gone += [(name, line) for name in found.names if found.files and not re.search(rf"\b{name}\b", text)]
    assert gone == [], "was it renamed, or moved into another file?"


def test_a_line_that_is_not_true_is_found() -> None:
    line = "| `daemon/gone.py`, `daemon/outbox.py`, `cuts.py`, `journal_gone.py` | `QUEUED_BYTES`, `Outbox.no_such` |"
    found = read_line(line)
    assert found.missing == ["daemon/gone.py", "journal_gone.py"]
    assert [path.name for path in found.files] == ["outbox.py", "cuts.py"]
    assert found.names == ["QUEUED_BYTES", "no_such"]


@pytest.mark.parametrize(
    "text",
    ["sent in each (seed 001, keep alives)", "Seed 12 says so", "in order (design: positions):", "safe (positions)."],
)
def test_a_private_citation_is_found(text: str) -> None:
    assert PRIVATE.search(text)


@pytest.mark.parametrize(
    "text",
    ["the seed of a random number", "self.seal(told)", "why it is safe (docs/positions.md)", "stream_check(positions)"],
)
def test_what_is_no_private_citation_passes(text: str) -> None:
    assert not PRIVATE.search(text)
