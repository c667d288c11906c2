"""What the pages of the documentation show can be run as it stands there, and does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"
LONG = {"orders_copy", "presence", "redis_follower"}  # and all with Spark
EXAMPLES = [
    pytest.param(
        path,
        id=path.stem,
        marks=[pytest.mark.long] if path.stem in LONG or "replicad.spark" in path.read_text("utf-8") else [],
    )
    for path in sorted((DOCS / "examples").glob("*.py"))
]
SMALLER = {"lag": ["--rows", "20000", "--seconds", "3"]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_to_its_end_and_a_page_tells_of_it(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), *SMALLER.get(example.stem, [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,  # one of them starts a Spark and runs a pipeline
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert any(f"examples/{example.name}" in page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
