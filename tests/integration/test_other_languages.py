"""The clients in other languages pass the checks of clients, follow a real daemon, and work a tube of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest
import trio

from replicad.conform.against_client import ClientUnderTest, run_checks
from replicad.conform.transcript import ConformanceCheck, Result, client_checks
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon

CLIENTS = Path(__file__).parents[2] / "clients"
LINES = 600  # of code, without comments: a client has fewer


MOST = (  # `make stress` runs all checks
    "rows that come byte by byte are whole",
    "a cut within a batch repeats the whole batch",
    "a cut in mid-line loses and repeats nothing",
    "a gap is noticed, and read again from the token",
    "the token of several writers is a vector",
    "an expired token discards everything and begins anew",
    "a position that goes back discards the rows above it",
    "a fork that is met on a resume discards rows and goes on from the named token",
    "a worker does not acknowledge before it has processed",
    "a worker whose lease is lost claims anew and reads from the start",
)


@pytest.fixture(scope="session")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program of the client in Go, built once."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    program = tmp_path_factory.mktemp("go") / "replicad"
    environment = {**os.environ, "GOCACHE": str(program.parent / "cache")}
    command = ["go", "build", "-o", str(program), "."]
    built = subprocess.run(
        command, cwd=CLIENTS / "go", env=environment, capture_output=True, timeout=240, check=False, text=True
    )
    assert built.returncode == 0, built.stderr
    return str(program)


@pytest.fixture(params=["node", "go"])
def program(request: pytest.FixtureRequest) -> str:
    """The words of the command that runs the client."""
    if request.param == "go":
        built: str = request.getfixturevalue("go_client")
        return built
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    return f"node {CLIENTS / 'node/replicad.mjs'}"


@pytest.mark.parametrize("file", ["node/replicad.mjs", "go/replicad.go"])
def test_a_client_is_one_short_file(file: str) -> None:
    lines = (CLIENTS / file).read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line.strip() and not re.match(r"\s*(//|/?\*)", line)]
    assert len(code) < LINES


def test_the_types_of_the_client_in_node_are_right() -> None:
    compiler = shutil.which("tsc")
    if compiler is None:
        pytest.skip("TypeScript is not installed")
    options = ["--allowJs", "--checkJs", "--noEmit", "--strict", "--target", "es2022", "--module", "nodenext"]
    done = subprocess.run(
        [compiler, *options, str(CLIENTS / "node/replicad.mjs")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


async def problems_of(client: ClientUnderTest, checks: Sequence[ConformanceCheck]) -> dict[str, str]:
    results: list[Result] = []
    with trio.fail_after(3 * PATIENCE):
        await run_checks(client, checks, results.append)
    assert len(results) == len(checks)
    return {result.check.name: result.problem for result in results if result.problem is not None}


def under_test(program: str) -> ClientUnderTest:
    return ClientUnderTest(f"{program} follow {{server}} {{stream}} {{token}}", f"{program} work {{server}} {{tube}}")


def found_most() -> list[ConformanceCheck]:
    chosen = [check for check in client_checks() if check.name in MOST]
    assert len(chosen) == len(MOST)
    return chosen


async def test_a_client_passes_the_checks_that_find_most(program: str) -> None:
    assert await problems_of(under_test(program), found_most()) == {}


@pytest.mark.long
async def test_a_client_passes_every_check(program: str) -> None:
    assert await problems_of(under_test(program), client_checks()) == {}


TAIL = f"{sys.executable} -m replicad tail {{stream}} --from {{token}} --server {{server}} --json"


async def test_replicad_tail_passes_the_checks_that_find_most() -> None:
    checks = [check for check in found_most() if "client" in check.needs]
    assert await problems_of(ClientUnderTest(TAIL), checks) == {}


@pytest.mark.long
async def test_replicad_tail_passes_every_check() -> None:
    assert await problems_of(ClientUnderTest(TAIL), [one for one in client_checks() if "client" in one.needs]) == {}


CARELESS = """
import json, socket, sys
host, port = sys.argv[1].split(":")
token = 0
while True:
    with socket.create_connection((host, int(port))) as wire:
        wire.sendall(b"REPLICATE conform EARLIEST\\n")
        for line in wire.makefile():
            words = line.rstrip("\\n").split(" ", 4)
            if words[0] == "RDATA":
                print(json.dumps({"instance": words[2], "token": words[3], "row": json.loads(words[4])}), flush=True)
"""


async def test_a_careless_client_fails_the_checks(tmp_path: Path) -> None:
    program = tmp_path / "careless.py"
    program.write_text(CARELESS)
    checks = [check for check in found_most() if "client" in check.needs and "byte" not in check.name]
    found = await problems_of(ClientUnderTest(f"{sys.executable} {program} {{server}}", patience=3.0), checks)
    assert found.keys() == {check.name for check in checks}


@contextmanager
def printing(command: str) -> Iterator[Queue[dict[str, object]]]:
    """The objects that a program prints."""
    process = subprocess.Popen(command.split(" "), stdout=subprocess.PIPE, text=True)
    printed: Queue[dict[str, object]] = Queue()
    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout or ():
            printed.put(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield printed
    finally:
        process.terminate()
        process.wait(PATIENCE)
        reader.join(PATIENCE)


async def test_a_client_follows_and_works_a_real_daemon(
    program: str, daemon: Daemon, events: Database, queue: Database
) -> None:
    await events.execute("INSERT INTO events (body) SELECT jsonb_build_array(n) FROM generate_series(1, 500) n")
    await queue.execute("SELECT tube.queue_touch(0, ARRAY[n, n + 1000], 'U') FROM generate_series(1, 50) n")
    address = daemon.addresses[0]
    where = f"{address.host}:{address.port}"

    def take() -> tuple[list[object], list[object]]:
        with (
            printing(f"{program} follow {where} events EARLIEST") as rows,
            printing(f"{program} work {where} queue") as ids,
        ):
            return [rows.get(timeout=PATIENCE) for _ in range(500)], [ids.get(timeout=PATIENCE) for _ in range(50)]

    rows, pods = await trio.to_thread.run_sync(take)
    assert rows == [{"stream": "events", "instance": "master", "token": n, "row": [n]} for n in range(1, 501)]
    assert sorted(pods, key=str) == sorted(({"tube": "queue", "ids": [n, n + 1000]} for n in range(1, 51)), key=str)
    left = await queue.fetch_value("SELECT count(*) FROM tube.queue")
    assert left <= 1, "each pod was acked before the next one was printed"
