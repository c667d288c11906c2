"""SQLSTATEs are written in one file, each with its meaning."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from replicad import sqlstates
from replicad.sqlstates import means
from tests.source import IN_ONE_PROCESS, modules

pytestmark = IN_ONE_PROCESS

FILE = Path(sqlstates.__file__)
MEANINGS = {name: value for name, value in vars(sqlstates).items() if name.isupper() and isinstance(value, tuple)}
CODES = {state for meaning in MEANINGS.values() for state in meaning if len(state) == 5} - set(sqlstates.NOT_OWNER)


def test_no_other_file_writes_a_state_that_has_a_name() -> None:
    found = [
        f"{module.name}:{node.lineno} {node.value}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in CODES and module.path != FILE
    ]
    assert len(CODES) > 10
    assert found == [], "use the name in sqlstates.py"


def test_every_meaning_is_said_in_a_sentence() -> None:
    body = ast.parse(FILE.read_text(encoding="utf-8")).body
    said = {
        line.target.id
        for line, after in pairwise(body)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and "." in str(after.value.value)
    }
    assert said == set(MEANINGS)


@pytest.mark.parametrize(
    ("state", "meaning", "expected"),
    [
        ("42P01", sqlstates.MISSING, True),
        ("42P02", sqlstates.MISSING, False),
        ("28P01", sqlstates.NO_LOGIN, True),
        ("28000", sqlstates.WRONG_PASSWORD, False),
        ("57P04", sqlstates.UNAVAILABLE, False),
        ("57P04", sqlstates.TRANSIENT, True),
        ("57014", sqlstates.TRANSIENT, False),
        ("", sqlstates.NEVER, False),
        (None, sqlstates.NEVER, False),
    ],
)
def test_a_state_means_what_it_or_its_class_means(
    state: str | None, meaning: sqlstates.Meaning, expected: bool
) -> None:
    assert means(state, meaning) is expected
