"""A feature is one folder and one line: without them, in a copy of the package, all that is left works.

Beside the folder and the line, the contracts in pyproject.toml name features; there the names have to go too.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicad import features
from tests.conftest import PATIENCE
from tests.roles import as_daemon

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests/unit"
FEATURES = ("presence", "caches", "sharding", "sender", "redis", "spark", "operations", "conform", "nats")
GOES_ALONG = {"spark": "demo"}  # the demonstration shows Spark
LINES = {"presence": "USER_SYNC w1 @a:b PHONE start 5"}  # what the feature's clients would send
OF_ALL = {"test_desired.py", "test_protocol_page.py"}  # tests of what all features have together
OF_REPOSITORY = "parents[2]"  # so does a test find pages and the like, which a copy has not
COMMANDS_OF_ALL = {"test_protocol_commands.py", "test_protocol_characters.py"}  # cases of presence among the others

IMPORT_ALL = """
import importlib, pkgutil, sys, replicad
gone, along = sys.argv[1:]
names = [one.name for one in pkgutil.walk_packages(replicad.__path__, "replicad.")]
for name in names:
    if not name.endswith("__main__") and not name.startswith(f"replicad.{along or '-'}"):
        importlib.import_module(name)
print(len(names), replicad.__file__)
for name in replicad.__all__:
    try:
        getattr(replicad, name)
    except ModuleNotFoundError as error:
        assert error.name == f"replicad.{gone}", error
"""


class Copy:
    """A copy of the package without one feature."""

    def __init__(self, folder: Path, feature: str) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "replicad", folder / "replicad", ignore=ignored)
        shutil.rmtree(folder / "replicad" / feature)
        self._without(folder / "replicad/features.py", rf'^    Listed\(.*"replicad\.{feature}\b.*\n')
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._without(folder / "pyproject.toml", rf'"replicad\.{feature}\b[\w.]*"(?:, ?)?')

    def _without(self, file: Path, pattern: str) -> None:
        text, count = re.subn(pattern, "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert count
        file.write_text(text, encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder)}

    def run(self, *command: str, status: int = 0, timeout: float = PATIENCE) -> str:
        """What a command prints on both outputs; it has to end with `status`."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == status, said[-5000:]
        return said

    def replicad(self, *words: str, status: int = 0) -> str:
        return self.run(sys.executable, "-m", "replicad", *words, status=status)

    @contextmanager
    def daemon(self, url: str) -> Iterator[tuple[str, int]]:
        """A daemon of the copy; the address where it listens."""
        ready = self.folder / "ready"
        command = [sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        with (self.folder / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, "--database", as_daemon(url)], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
            try:
                deadline = time.monotonic() + PATIENCE
                while not ready.exists():
                    assert process.poll() is None, (self.folder / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                host, _, port = ready.read_text().strip().rpartition(":")
                yield host, int(port)
            finally:
                process.terminate()
                assert process.wait(PATIENCE) == 0, (self.folder / "log").read_text()


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name == "presence" else [pytest.mark.long]) for name in FEATURES]
)
def feature(request: pytest.FixtureRequest) -> str:
    """Each feature. The quick form is the one that has all of SQL, commands on the wire, a service and a group."""
    name: str = request.param
    return name


@pytest.fixture
def copy(feature: str, tmp_path: Path) -> Copy:
    return Copy(tmp_path, feature)


def groups(feature: str) -> list[str]:
    """The feature's groups on the command line."""
    return [name for name, module in features.command_modules().items() if module.startswith(f"replicad.{feature}.")]


def test_all_other_modules_the_command_line_and_the_sql_work(copy: Copy, feature: str) -> None:
    said = copy.run(sys.executable, "-c", IMPORT_ALL, feature, GOES_ALONG.get(feature, ""))
    assert str(copy.folder) in said
    listed = copy.replicad("--help")
    for name in groups(feature):
        assert not re.search(rf"^  {name}\b", listed, re.MULTILINE)
        assert "No such command" in copy.replicad(name, status=2)
    assert "CREATE TABLE" in copy.replicad("sql", "up")
    assert copy.replicad("sql", "up", "stream", "tube")


def test_the_contracts_of_imports_are_kept(copy: Copy) -> None:
    said = copy.run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert "The core knows no feature KEPT" in said
    assert " 0 broken" in said


@pytest.mark.bare_database
def test_a_daemon_serves_and_knows_no_command_of_the_feature(copy: Copy, feature: str, database_url: str) -> None:
    line = LINES.get(feature, f"{feature.upper()} 1")
    with copy.daemon(database_url) as address, socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(f"NAME program\nSTREAMS\nREPLICATE\n{line}\n".encode())
        said = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert re.search(r"^STREAMS$", said, re.MULTILINE)
    assert "PING no stream" in said
    assert f"ERROR bad_line: unknown command '{line.split()[0]}'" in said


@pytest.mark.long
def test_the_unit_tests_of_the_core_pass(copy: Copy, feature: str) -> None:
    shutil.copytree(ROOT / "tests", copy.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    left_out = OF_ALL | (COMMANDS_OF_ALL if feature == "presence" else set())
    chosen = [f"tests/unit/{name}" for name in _of_core() if name not in left_out]
    assert len(chosen) > 25
    options = ("-q", "-p", "no:cacheprovider", "-n", "2", "-x")
    said = copy.run(sys.executable, "-m", "pytest", *options, *chosen, timeout=10 * PATIENCE)
    assert " passed" in said


def _of_core() -> list[str]:
    """The unit tests that name no feature, neither themselves nor by what they import, and no page."""
    names = "|".join(FEATURES)
    helpers = [
        file.stem for file in (ROOT / "tests").glob("*.py") if re.search(rf"replicad\.({names})\b", file.read_text())
    ]
    theirs = re.compile(rf"replicad(\.| import )({names}|demo)\b|tests\.({'|'.join(helpers)})\b")
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(UNIT.glob("test_*.py"))}
    return [name for name, text in texts.items() if not theirs.search(text) and OF_REPOSITORY not in text]
