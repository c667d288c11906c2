"""`replicad pipeline run` as a process that gets a signal together with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cities import Cities
from fake_daemon import FakeDaemon

from replicad.spark.database import forget
from tests.conftest import PATIENCE

pytestmark = pytest.mark.spark

STARTING = 3 * PATIENCE  # seconds; the first batch needs a JVM and some Python workers
ENDING = 30.0  # seconds; a batch that failed waits for up to a minute
FILE = """
[source]
tube = "t"
port = {port}
[enrich]
database = "{url}"
table = "shard_{{shard:04d}}.cities"
[downstream]
kind = "class"
class = "own_downstream:{kind}"
folder = "{folder}"
[run]
checkpoint = "checkpoint"
trigger = "0s"
tries = 100
[spark]
"spark.master" = "local[1]"
"""


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    yield Cities(database_url, daemon)
    forget(database_url)


@pytest.fixture
def start(cities: Cities, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts the command with a downstream, in a process group of its own, and waits for the first batch."""
    started: list[subprocess.Popen[str]] = []
    out = tmp_path / "out"

    def begin(kind: str) -> subprocess.Popen[str]:
        out.mkdir()
        path = tmp_path / "pipeline.toml"
        path.write_text(FILE.format(port=cities.daemon.port, url=cities.url, kind=kind, folder=out))
        command = [
            sys.executable,
            "-m",
            "replicad",
            "pipeline",
            "run",
            str(path),
            "--spark-log",
            tmp_path / "spark.log",
        ]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with (tmp_path / "stderr").open("w") as errors:
            made = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
        started.append(made)
        deadline = time.monotonic() + STARTING
        while not (out / "begun").exists():
            assert made.poll() is None, (tmp_path / "stderr").read_text()
            assert time.monotonic() < deadline, (tmp_path / "stderr").read_text()
            time.sleep(0.05)
        return made

    yield begin
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_batch_in_hand_is_finished_before_a_pipeline_ends_by_a_signal_to_its_group(
    start: Callable[[str], subprocess.Popen[str]], cities: Cities, tmp_path: Path
) -> None:
    cities.put(1, [1, 2], 7)
    command = start("Slow")
    os.killpg(command.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(3)  # it waits for the batch
    (tmp_path / "out" / "go").touch()
    summary, _ = command.communicate(timeout=STARTING)
    said = (tmp_path / "stderr").read_text()
    assert (command.returncode, "Traceback" in said) == (0, False), said
    assert "1 batches in" in summary
    assert "2 rows written" in summary
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1.1", "1.2", "begun", "go"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_batch_that_fails_and_waits_does_not_delay_the_end(
    start: Callable[[str], subprocess.Popen[str]], cities: Cities, tmp_path: Path
) -> None:
    cities.put(1, [1, 2], 7)
    command = start("Broken")
    deadline = time.monotonic() + STARTING
    while "batch_failed" not in (tmp_path / "stderr").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begun = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)
    command.communicate(timeout=STARTING)
    said = (tmp_path / "stderr").read_text()
    assert time.monotonic() - begun < ENDING, said
    assert (command.returncode, "Traceback" in said) == (0, False), said
    assert "does not like 2 rows" in said
