"""What mypy --strict makes of a user's program: the exact types of events and answers, and an error for each misuse."""

from __future__ import annotations

import re
from pathlib import Path

import mypy.api

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample.py"


def test_a_users_program_has_exact_types_in_both_clients() -> None:
    # The cache of the project's own mypy run makes this take a second or two.
    out, err, _ = mypy.api.run(
        [
            "--strict",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            str(SAMPLE),
        ]
    )
    assert not err
    marks = [re.search(r"# E: ([a-z-]+)$", line) for line in SAMPLE.read_text().splitlines()]
    expected = {(number, mark[1]) for number, mark in enumerate(marks, 1) if mark}
    found = re.findall(r"^[^\n:]*:(\d+): error: .*\[([a-z-]+)\]$", out, re.M)
    assert {(int(number), code) for number, code in found} == expected, out
    revealed = re.findall(r"Revealed type is \"(.*)\"", out)
    assert len(revealed) == 2
    for text in revealed:
        assert re.fullmatch(r".*events\.RowBatch\].* \| .*events\.Reset\].*", text), text
        assert "Any" not in text
