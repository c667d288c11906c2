"""SQL and its users fit: each query has a file, each file of a query is loaded by name, each function is called."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import replicad

PACKAGE = Path(replicad.__file__).parent
PAGES = [PACKAGE.parent / "README.md", PACKAGE.parent / "protocol.md", *(PACKAGE.parent / "docs").glob("*.md")]
LOADERS = ("load_sql", "statement", "Ask")  # functions whose first argument is the name of a query
FUNCTION = re.compile(r"^CREATE\s+(?:OR\s+REPLACE\s+)?(?:FUNCTION|PROCEDURE)\s+(\w+)", re.MULTILINE)
NO_CALL = re.compile(r"--[^\n]*|^COMMENT ON [^;]*;|^(?:GRANT|REVOKE) [^;]*;", re.MULTILINE)
SPOKEN = {"tube_pods_sql", "tube_pods_delete", "tube_backfill_step3"}  # for users who speak SQL: their files say how

NAMES = sorted(path.stem for path in PACKAGE.glob("*/sql/query/*.sql"))


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def texts() -> set[str]:
    """All string constants of the package."""
    return {
        node.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def asked() -> set[str]:
    """The names of queries that the package asks for in so many words."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in LOADERS:
                found.add(str(node.args[0].value))
    return found


def test_every_file_of_a_query_is_named_by_the_code() -> None:
    assert [name for name in NAMES if name not in texts()] == [], "nothing loads these files of sql/query"


def test_every_query_that_the_code_names_has_a_file() -> None:
    names = asked()
    assert len(names) > 30
    assert sorted(names - set(NAMES)) == [], "there is no such file in sql/query"


def test_every_function_of_the_schema_is_called_or_documented() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("sql/**/*.sql"))}
    used = "\n".join([*(NO_CALL.sub("", text) for text in files.values()), *texts()])
    words = Counter(re.findall(r"\w+", used))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    idle = []
    for path, text in files.items():
        for name in FUNCTION.findall(text) if path.name[0].isdigit() else []:
            short = name.removeprefix("federation_")  # the sender's store puts schema and prefix in
            called = words[name] > 1 or f"{{}}{short}(" in used  # one word is its creation
            if not called and name not in SPOKEN and name not in pages:
                idle.append(name)
    assert idle == [], "nothing calls these functions and no page names them"


@pytest.mark.parametrize("name", sorted(SPOKEN))
def test_a_function_that_only_users_call_says_so_in_its_file(name: str) -> None:
    [file] = PACKAGE.rglob(f"[0-9]*_{name}.sql")
    assert file.read_text(encoding="utf-8").startswith(f"-- {name}(")
