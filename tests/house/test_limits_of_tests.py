"""Limits in tests are for what hangs, never for what is slow: below PATIENCE none stands in a test with real time.

A limit of some seconds holds on a quiet machine and breaks on a busy one, where everything is right. A test that must
tell "at once" from "when the time is over" makes the time long (an hour), and waits for PATIENCE.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

TESTS = Path(__file__).parents[1]
FOLDERS = ("integration", "sql", "spark", "stress")  # the clock of tests/unit jumps
CLOCKS = ("monotonic", "current_time", "perf_counter")
STARTS = ("run", "communicate", "check_output")  # of processes


def seconds(node: ast.AST | None) -> float:
    """The number that is written there; without end for everything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return float("inf")


def name_of(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def reads_clock(node: ast.AST) -> bool:
    return any(name_of(part) in CLOCKS for part in ast.walk(node))


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Line and seconds of everything that fails a test when it takes longer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) == "fail_after" and node.args:
            yield node.lineno, seconds(node.args[0])
        elif isinstance(node, ast.Call) and name_of(node) in STARTS:
            for keyword in node.keywords:
                if keyword.arg == "timeout":
                    yield node.lineno, seconds(keyword.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and name_of(node.left) in CLOCKS:
            yield node.lineno, seconds(node.right)
        elif isinstance(node, ast.Assert):
            for compared in ast.walk(node.test):
                if isinstance(compared, ast.Compare) and isinstance(compared.ops[-1], ast.Lt | ast.LtE):
                    differences = [part for part in ast.walk(compared) if isinstance(part, ast.BinOp)]
                    if any(isinstance(part.op, ast.Sub) and reads_clock(part) for part in differences):
                        yield node.lineno, seconds(compared.comparators[-1])


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_limit_of_a_test_with_real_time_is_below_patience(folder: str) -> None:
    short = [
        f"{path.relative_to(TESTS)}:{line}: {limit:g} s"
        for path in sorted((TESTS / folder).rglob("*.py"))
        for line, limit in limits(ast.parse(path.read_text(encoding="utf-8")))
        if limit < PATIENCE
    ]
    assert short == [], "use PATIENCE of tests/conftest.py"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("with trio.fail_after(10):\n    pass", 10),
        ("deadline = time.monotonic() + 20", 20),
        ("subprocess.run(command, timeout=30)", 30),
        ("assert time.monotonic() - began < 5", 5),
        ("assert 0.9 <= trio.current_time() - began < 10", 10),
        ("with trio.fail_after(PATIENCE):\n    pass", float("inf")),
    ],
)
def test_a_limit_is_found_whatever_its_form(source: str, limit: float) -> None:
    assert [found for _, found in limits(ast.parse(source))] == [limit]


def test_pytest_gives_up_later_than_a_test_does(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > PATIENCE
