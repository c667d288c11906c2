"""An older replicad: the tree of a commit, unpacked into a folder, and what can be asked of it from outside."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
V1 = "3a734cf9ccc7714f0fd5007b5fa8b948b3400956"  # the last commit whose parts are all of version 1


def unpack(commit: str, folder: Path) -> Path:
    """The tree of the commit in `folder`, which is returned.

    Without a repository around the tests (an unpacked archive of the sources) the test is skipped. A repository that
    lacks the commit is a failure: CI has to fetch the whole history.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("the older program comes from the history of the repository, and these sources are not in one")
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "replicad"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.fail(
            f"commit {commit[:7]} is not in this repository ({done.stderr.decode().strip()}); it holds the older "
            "program. Fetch the whole history: git fetch --unshallow"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(tree: Path, **more: str) -> dict[str, str]:
    """The variables with which a Python imports replicad from that tree, and no settings of another replicad."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
    return {**clean, "PYTHONPATH": str(tree), **more}


def command(tree: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `replicad` from that tree."""
    return subprocess.run(
        [sys.executable, "-m", "replicad", *words],
        cwd=tree, env=environment(tree, **more), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def versions(tree: Path) -> dict[str, int]:
    """The version of each part in that tree."""
    code = "import json; from replicad.postgres.schema import VERSIONS; print(json.dumps(VERSIONS))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment(tree), capture_output=True, text=True, check=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found
