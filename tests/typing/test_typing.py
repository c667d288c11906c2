"""What mypy --strict makes of users' programs: the exact types of events and answers, and an error for each misuse.

The programs on the pages are checked too: README.md by mypy, and the imports of all pages by importing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mypy.api
import pytest

from tests.api_page import FACES

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample.py"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "api.md")]


def blocks(page: Path) -> list[str]:
    """The programs on a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def check(*programs: Path) -> str:
    """What mypy says of programs. The cache of the project's own run makes this take a second or two."""
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    out, err, _ = mypy.api.run([*options, *map(str, programs)])
    assert not err
    return out


def test_a_users_program_has_exact_types_in_both_clients() -> None:
    out = check(SAMPLE)
    marks = [re.search(r"# E: ([a-z -]+)$", line) for line in SAMPLE.read_text().splitlines()]
    expected = {(number, code) for number, mark in enumerate(marks, 1) if mark for code in mark[1].split()}
    found = re.findall(r"^[^\n:]*:(\d+): error: .*\[([a-z-]+)\]$", out, re.M)
    assert {(int(number), code) for number, code in found} == expected, out
    revealed = re.findall(r"Revealed type is \"(.*)\"", out)
    assert len(revealed) == 2
    for text in revealed:
        assert re.fullmatch(r".*events\.RowBatch\].* \| .*events\.Reset\].*", text), text
        assert "Any" not in text


def test_the_programs_of_the_readme_have_no_error_of_types(tmp_path: Path) -> None:
    found = blocks(ROOT / "README.md")
    assert len(found) >= 3
    programs = [tmp_path / f"readme_{number}.py" for number in range(len(found))]
    for program, text in zip(programs, found, strict=True):
        program.write_text(text, encoding="utf-8")
    out = check(*programs)
    assert out.startswith("Success"), out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_programs_of_a_page_import_is_there_and_public(page: Path) -> None:
    for text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                exec(ast.unparse(node), {})
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replicad"):
                assert node.module in ("replicad", *FACES), f"{page.name}: {ast.unparse(node)}"
