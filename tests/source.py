"""The package as it is written: what tests about its text read. Parsed once for each process.

Tests that use it have `pytestmark = IN_ONE_PROCESS`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.collector import uncollected

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replicad"
IN_ONE_PROCESS = pytest.mark.xdist_group("source")


@dataclass(frozen=True)
class Module:
    """One file of Python: its path, its text, its tree, and all nodes of that."""

    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def name(self) -> str:
        """As it is imported."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> tuple[Module, ...]:
    """All of the package."""
    with uncollected():
        return tuple(_module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def constants() -> frozenset[str]:
    """All texts that stand in the code."""
    found = (node.value for module in modules() for node in module.nodes if isinstance(node, ast.Constant))
    return frozenset(value for value in found if isinstance(value, str))


def _module(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return Module(path, text, tree, tuple(ast.walk(tree)))
