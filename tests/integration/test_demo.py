"""The demonstration as a person runs it: it succeeds, may be broken off anywhere, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from replicad.demo.run import read_downstream
from tests.conftest import PATIENCE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("demo"),  # a Spark of its own each: one after another
]

RUN = 300.0  # seconds for a whole run; a calm machine takes a tenth of it


@dataclass
class Run:
    """A demonstration that runs in `folder`. Its processes are known by a variable of their environment."""

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The end of what it printed, for messages."""
        return "\n".join(self.lines[-10:])

    def read_until(self, text: str | None) -> bool:
        """Read what it prints up to a line with that text, or (None) to the end; False when it ended before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text is not None and text in line:
                return True
        return text is None

    def processes(self) -> list[str]:
        """All processes that it started, directly or not, and that are still there."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                ours = any(str(self.folder) in word for word in words)
                if (ours or process.environ().get("DEMO_MARK") == self.mark) and process.status() != "zombie":
                    found.append(" ".join(words)[:200])
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def wait_until_gone(self) -> list[str]:
        """The processes that are still there when there should be none."""
        deadline = time.monotonic() + PATIENCE
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[Run]:
    """Run `replicad demo` with that folder."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "replicad", "demo", "--folder", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEMO_MARK": mark},
        start_new_session=True,
    ) as process:
        run = Run(folder, process, mark)
        try:
            yield run
        finally:
            process.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is not below pytest's own, which every other run of pytest closes to the account of Postgres."""
    with tempfile.TemporaryDirectory(prefix="replicad-demo-") as made:
        Path(made).chmod(0o711)
        yield Path(made) / "demo"


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Spark is starting", signal.SIGINT),
        pytest.param("1. Starting", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("3. Starting the daemon", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_an_interrupt_leaves_no_process_behind(folder: Path, moment: str, number: signal.Signals) -> None:
    with demo(folder) as run:
        assert run.read_until(moment), run.said
        run.process.send_signal(number)
        if number is signal.SIGINT:
            run.process.send_signal(number)  # a second Ctrl-C must not cut the clean-up short
        assert run.read_until(None)
        assert run.process.wait(RUN) == 130, run.said
        assert run.wait_until_gone() == []
    assert not any("Traceback" in line for line in run.lines)


def test_it_succeeds_after_one_that_was_broken_off_and_both_sides_are_equal(folder: Path) -> None:
    with demo(folder) as run:
        assert run.read_until("4. Creating a tube"), run.said
        run.process.send_signal(signal.SIGINT)
        assert run.read_until(None)
        assert run.process.wait(RUN) == 130
    with demo(folder) as run:
        assert run.read_until(None)
        assert run.process.wait(RUN) == 0, run.said
        assert run.wait_until_gone() == []
    text = "\n".join(run.lines)
    assert "Both sides are equal." in text
    counted = {
        found[1]: int(found[2].replace(",", ""))
        for found in re.finditer(r"^ +([a-z][A-Za-z, -]+?) {2,}([0-9,]+)$", text, re.MULTILINE)
    }
    assert counted["rows loaded"] > 60_000
    assert counted["ids in them"] >= counted["rows loaded"] + counted["rows changed, deleted, inserted since"]
    now = counted["rows in Postgres now"]
    assert now == counted["rows downstream now"] == counted["rows that are equal in every column"]
    assert len(read_downstream(folder / "downstream")) == now
    for hint in ("serve --data-folder", "nc 127.0.0.1 9009", 'format("replicad")'):
        assert hint in text
