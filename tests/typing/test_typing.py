"""What mypy --strict makes of users' programs: the exact types of events and answers, and an error for each misuse.

The programs on the pages are checked too: those of `CHECKED` by mypy, and the imports of all pages by importing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api_page import FACES
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample.py"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOWTO = ("search-index", "copy-to-postgres", "redis-cache", "retention", "two-daemons")
CHECKED = [ROOT / "README.md", ROOT / "docs/streams.md", *(ROOT / f"docs/howto/{name}.md" for name in HOWTO)]
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "api.md")]


def blocks(page: Path) -> list[str]:
    """The programs on a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def programs() -> list[str]:
    """The programs that mypy checks."""
    return [text for page in CHECKED for text in blocks(page)]


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of the sample and of the programs of the pages for users.

    It runs in a process of its own: in ours it would raise the limit of recursion for all tests that follow. The cache
    of the project's own run makes this take a second or two.
    """
    folder = tmp_path_factory.mktemp("pages")
    found = programs()
    assert len(found) >= 5
    for number, text in enumerate(found):
        (folder / f"page_{number}.py").write_text(text, encoding="utf-8")
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, str(SAMPLE), *map(str, sorted(folder.iterdir()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert not done.stderr
    return done.stdout


@pytest.mark.xdist_group("mypy")
def test_a_users_program_has_exact_types_in_both_clients(verdict: str) -> None:
    marks = [re.search(r"# E: ([a-z -]+)$", line) for line in SAMPLE.read_text().splitlines()]
    expected = {(number, code) for number, mark in enumerate(marks, 1) if mark for code in mark[1].split()}
    found = re.findall(r"^[^\n:]*sample\.py:(\d+): error: .*\[([a-z-]+)\]$", verdict, re.M)
    assert {(int(number), code) for number, code in found} == expected, verdict
    revealed = re.findall(r"Revealed type is \"(.*)\"", verdict)
    assert len(revealed) == 2
    for text in revealed:
        assert re.fullmatch(r".*events\.RowBatch\].* \| .*events\.Reset\].*", text), text
        assert "Any" not in text


@pytest.mark.xdist_group("mypy")
def test_the_programs_of_the_pages_have_no_error_of_types(verdict: str) -> None:
    assert "page_" not in verdict
    checked = len(programs()) + 1
    assert re.search(rf"^Found \d+ errors in 1 file \(checked {checked} source files\)$", verdict, re.M), verdict


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_programs_of_a_page_import_is_there_and_public(page: Path) -> None:
    for text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom | ast.Import) and page.parent.name != "howto":  # tests run those
                exec(ast.unparse(node), {})
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replicad"):
                assert node.module in ("replicad", *FACES), f"{page.name}: {ast.unparse(node)}"
