"""`replicad serve` and `replicad tail` as processes: what a person at a terminal sees, and what survives a kill."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, psql
from tests.lengths import first
from tests.roles import as_daemon

pytestmark = pytest.mark.postgres

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(database_url: str) -> Iterator[Start]:
    """Start a command of ours as a process on the test's database; it is killed at the end if need be."""
    with ExitStack() as stack:

        def start_words(*words: str) -> subprocess.Popen[str]:
            url = as_daemon(database_url) if words[0] == "serve" else database_url
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "replicad", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "REPLICAD_DATABASE": url},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start_words


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(file: Path) -> str:
    """The content of a file, once it is there."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not come"
        time.sleep(0.02)
    return file.read_text().strip()


@contextmanager
def serving(start: Start, folder: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A daemon of its own process; yields its address."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    daemon = start("serve", "--ready-file", str(ready), *words)
    yield wait_for(ready), daemon
    daemon.kill()
    daemon.wait(PATIENCE)


@pytest.mark.long
def test_tail_misses_and_repeats_nothing_when_the_daemon_is_killed_and_comes_back(
    start: Start, database_url: str, tmp_path: Path
) -> None:
    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY, data text)")
    assert start("streams", "add", "events", "--table", "public.events", "--id", "id").wait(PATIENCE) == 0
    insert = "INSERT INTO events (data) SELECT 'x' FROM generate_series(1, 10)"
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    with serving(start, tmp_path, *listen) as (address, daemon):
        tail = start("tail", "--from", "EARLIEST", "--json", "--server", address)
        assert tail.stdout is not None
        assert tail.stderr is not None
        psql(database_url, insert)
        rows = [json.loads(tail.stdout.readline()) for _ in range(10)]
        assert "following events at" in tail.stderr.readline()
        daemon.kill()
        assert "trying again in" in tail.stderr.readline()
    psql(database_url, insert)
    with serving(start, tmp_path, *listen):
        psql(database_url, insert)
        rows += [json.loads(tail.stdout.readline()) for _ in range(20)]
        tail.send_signal(signal.SIGINT)
        assert tail.wait(PATIENCE) == 130
        hint = re.search(r"to go on: replicad (tail events --from .*)$", tail.stderr.read(), re.MULTILINE)
        assert [row["token"] for row in rows] == [row["row"]["id"] for row in rows] == list(range(1, 31))
        assert {row["stream"] for row in rows} == {"events"}
        assert hint is not None
        psql(database_url, insert)
        again = start(*shlex.split(hint[1]), "--count", "10")  # it names the server too
        out, err = again.communicate(timeout=PATIENCE)
        assert [json.loads(line)["token"] for line in out.splitlines()] == list(range(31, 41))
        assert again.returncode == 0
        assert "Traceback" not in err


def test_the_daemon_ends_cleanly_on_a_signal_and_frees_its_port(start: Start, tmp_path: Path) -> None:
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving(start, tmp_path, *listen, "--log-format", "json", "--stop-grace", "600") as (_, daemon):
            assert start("ping", "--timeout", "60", listen[1]).wait(PATIENCE) == 0
            daemon.send_signal(number)
            assert daemon.wait(PATIENCE) == 0, "it waits for its grace to be over, though nothing is left to be done"
            assert daemon.stderr is not None
            events = [json.loads(line)["event"] for line in daemon.stderr.read().splitlines()]
            assert events[-2:] == ["stopping", "stopped"]
            assert not (tmp_path / "ready").exists()
            assert start("ping", listen[1]).wait(PATIENCE) == 4


@pytest.mark.parametrize(
    ("words", "status", "said"),
    first(
        4,
        [
            (["serve", "--listen", "{taken}"], 3, "{taken}"),
            (["serve", "--database", "postgresql://nobody:hunter2@127.0.0.1:1/x"], 4, "127.0.0.1:1"),
            (["serve", "--listen", "192.0.2.1:9009", "--insecure"], 3, "192.0.2.1:9009"),
            (["serve", "--listen", "192.0.2.1:9009"], 2, "--insecure"),
            (["serve", "--tls-cert", "/does/not/exist"], 2, "--tls-cert"),
            (["tail", "--server", "127.0.0.1:1", "--token-file", "/does/not/exist"], 2, "--token-file"),
            (["tail", "events", "more", "--from", "58"], 2, "--from 58"),
            (["tail", "events", "--from", "x"], 7, "token"),
        ],
    ),
)
def test_what_cannot_start_is_one_sentence(start: Start, words: list[str], status: int, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        process = start(*(word.format(taken=taken) for word in words))
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("replicad: ")
    assert said.format(taken=taken) in last
    assert "Traceback" not in err
    assert "hunter2" not in err
