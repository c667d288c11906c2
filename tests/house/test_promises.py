"""Each sentence of the pages about access and operation that says never, nothing, only or cannot has a test that tries
it, or a reason why it promises nothing. tests/promises.toml is the list.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source import ROOT

TESTS = ROOT / "tests"
LISTED: dict[str, dict[str, str | list[str]]] = tomllib.loads((TESTS / "promises.toml").read_text(encoding="utf-8"))
PAGES = (
    *(
        f"docs/{name}.md"
        for name in ("access", "transports", "operating", "limits", "command-line", "doctor", "metrics")
    ),
    "SECURITY.md",
)
WORDS = re.compile(r"\b(?:never|nothing|only|cannot)\b", re.IGNORECASE)
ITEM = re.compile(r"(?:-|\d+\.) ")
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z*`(\[])")  # of a sentence, before the next one
BRACES = re.compile(r"```.*?```", re.DOTALL)


def pieces(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables, each on one line. Blocks of code and headings are none."""
    held: list[str] = []
    for line in [*BRACES.sub("\n", text).splitlines(), ""]:
        words = line.strip()
        if not words or words[0] in "#|" or ITEM.match(words):
            yield " ".join(held)
            held = []
        if words.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", words.strip("|")))
        elif words and not words.startswith("#"):
            held.append(ITEM.sub("", words, count=1) if ITEM.match(words) else words)


def promises(text: str) -> list[str]:
    """The sentences with one of the words."""
    return [one for piece in pieces(text) for one in END.split(piece) if WORDS.search(one)]


def is_in(part: str, sentence: str) -> bool:
    """`=` before the part: it is the whole sentence."""
    return sentence == part[1:] if part.startswith("=") else part in sentence


@cache
def functions(file: Path) -> frozenset[str]:
    """The tests in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_"))


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and name in functions(path)


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_of_a_page_has_an_entry(page: str) -> None:
    found = promises((ROOT / page).read_text(encoding="utf-8"))
    missing = [one for one in found if not any(is_in(part, one) for part in LISTED[page])]
    assert not missing, f"write what tries it into tests/promises.toml, or promise less: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_each_entry_is_a_promise_of_its_page(page: str) -> None:
    found = promises((ROOT / page).read_text(encoding="utf-8"))
    stale = [part for part in LISTED[page] if not any(is_in(part, one) for one in found)]
    assert not stale, f"no sentence of {page} says this any more; take it out of tests/promises.toml: {stale}"


def test_each_entry_names_tests_that_exist_or_gives_a_reason() -> None:
    assert set(LISTED) == set(PAGES)
    entries = [(part, found) for page in LISTED.values() for part, found in page.items()]
    assert not [part for part, found in entries if not found or (isinstance(found, str) and len(found.split()) < 3)]
    named = {test for _, found in entries if isinstance(found, list) for test in found}
    assert not sorted(test for test in named if not exists(test))
    tried = sum(isinstance(found, list) for _, found in entries)
    assert tried > 0.8 * len(entries)


def test_a_promise_is_found_wherever_it_stands() -> None:
    text = "# Only a head\nIt never\nstops. It\ndoes. Nothing more.\n\n"
    text += "| a | cannot be |\n- an *only*\n  child\n```\nonly\n```\n"
    assert promises(text) == ["It never stops.", "Nothing more.", "cannot be", "an *only* child"]
    assert not exists("house/test_promises.py::test_none")
    assert not exists("house/test_promises.py")
    assert exists("house/test_promises.py::test_a_promise_is_found_wherever_it_stands")
