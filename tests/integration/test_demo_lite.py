"""The small demonstration succeeds without Spark, and the commands that it prints at its end work as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.drills import free_port

pytestmark = pytest.mark.long  # it starts a Postgres and ten commands

WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = sys.modules["pyarrow"] = None  # they cannot be imported, as where they are not installed
from replicad.cli.app import run
raise SystemExit(run(sys.argv[1:]))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A current folder that the account of the Postgres can enter."""
    with tempfile.TemporaryDirectory(prefix="replicad-demo-lite-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


def run_demo(place: Path) -> str:
    command = [sys.executable, "-c", WITHOUT_SPARK, "demo", "--lite"]
    environment = {**os.environ, "JAVA_HOME": "/nowhere"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(command: list[str], place: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)


def printed(text: str, word: str) -> list[str]:
    """The first command of that name in what comes next."""
    lines = text.partition("try it yourself")[2].splitlines()
    return shlex.split(next(line for line in lines if re.search(rf"replicad {word}", line)))


def test_the_small_demonstration_succeeds_without_java_and_spark(place: Path) -> None:
    text = run_demo(place)
    assert "Every row was received, once and in order." in text
    assert "Both sides are equal." in text


def test_the_commands_that_are_printed_work_as_they_are(place: Path) -> None:
    text = run_demo(place)
    port = str(free_port())
    with running([*printed(text, "serve"), "--listen", f"127.0.0.1:{port}"], place) as daemon:
        deadline = time.monotonic() + PATIENCE
        ping = [printed(text, "tail")[0], "ping", f"127.0.0.1:{port}"]
        while subprocess.run(ping, cwd=place, capture_output=True, check=False).returncode:
            assert daemon.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        tail = [*printed(text, "tail"), "--count", "1", "--server", f"127.0.0.1:{port}"]
        with running(tail, place) as follower:
            assert follower.stdout is not None
            assert "following events" in follower.stdout.readline()
            written = subprocess.run(printed(text, "psql"), cwd=place, capture_output=True, text=True, check=False)
            assert written.returncode == 0, written.stderr
            assert "[1]" in follower.stdout.readline()
        listed = subprocess.run(printed(text, "tubes"), cwd=place, capture_output=True, text=True, check=False)
        assert listed.returncode == 0, listed.stderr
        assert "orders" in listed.stdout
