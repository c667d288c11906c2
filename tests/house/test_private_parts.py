"""Which private parts of libraries the product uses: docs/dev/architecture.md lists all of them, and they exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = ("loop", "spark", "super()")  # whose private parts may have the names of ours
OF_TUPLES = {"_asdict", "_replace"}  # public, for all their names
PAGE = (ROOT / "docs/dev/architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.]+): ([^|]+)` \| `([\w/]+\.py)` \|", PAGE, re.MULTILINE)
PARTS = [(module, part, file) for module, text, file in ROWS for part in re.findall(r"_\w+", text)]


def private_parts(tree: ast.Module) -> set[str]:
    """The private attributes that the code takes of objects of other classes than its own, or replaces."""
    own, used = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if ast.unparse(node.value) in FOREIGN:
                used.add(node.attr + "!")
            else:
                (own if of_self else used).add(node.attr)
    return {part.removesuffix("!") for part in used if part.endswith("!") or part not in own} - OF_TUPLES


def test_the_page_lists_the_private_parts_that_the_code_uses() -> None:
    files = sorted((ROOT / "replicad").rglob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    ours = {
        node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    used = {
        (part, str(file.relative_to(ROOT / "replicad")))
        for file, tree in trees.items()
        for part in private_parts(tree)
        if part not in ours or part in {part for _, part, of in PARTS if file.name in of}
    }
    assert used == {(part, file) for _, part, file in PARTS}


@pytest.mark.parametrize(("module", "part"), [(module, part) for module, part, _ in PARTS])
def test_each_of_them_exists(module: str, part: str) -> None:
    pytest.importorskip(module.partition(".")[0])
    found = importlib.import_module(module)
    classes = [one for one in vars(found).values() if inspect.isclass(one)]
    assert any(hasattr(one, part) for one in classes) or re.search(rf"\b{part}\b", inspect.getsource(found))
