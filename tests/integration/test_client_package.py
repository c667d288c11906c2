"""The two distributions: replicad-client has what clients need, replicad all other files, and none is in both."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import trio

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.source import ROOT

pytest.importorskip("hatchling", reason="hatchling is not installed: it is in the group `dev`")

CLIENT = ROOT / "clients/python"
NEEDED = ("anyio", "idna", "typing_extensions")  # what `pip install anyio` brings
MOST = 300_000  # bytes of the wheel
FOREIGN = ("trio", "trio_asyncio", "asyncpg", "click", "structlog", "pyarrow", "psycopg")

USE = """
import asyncio, json, sys
from replicad import BlockingClient, BlockingWorker, RowBatch, Worker, __version__, open_client
from replicad import CacheInvalidator, BlockingCacheInvalidator, open_presence, read_changes, apply_changes
from replicad.caches import blocking_invalidate

address = sys.argv[1]
with BlockingClient(address, name="blocking") as client, client.follow({"events": "EARLIEST"}) as events:
    found = [json.loads(row) for _, event in zip(range(2), events) for row in event.rows]

async def main():
    ids = []
    async def handle(batch):
        ids.extend(touch.id for touch in batch.touches)
        if len(ids) >= 2:
            working.cancel()
    working = asyncio.create_task(Worker(lambda: open_client(address, name="worker"), "queue", handle).run())
    async with open_client(address, name="async") as client, client.follow({"events": "EARLIEST"}) as events:
        async for event in events:
            assert isinstance(event, RowBatch)
            break
    await asyncio.wait([working])
    return sorted(ids)

ids = asyncio.run(main())
try:
    from replicad import open_sharded_writer
except ImportError as error:
    refused = str(error)
try:
    open_client("redis://127.0.0.1", name="x")
    asyncio.run(open_client("redis://127.0.0.1", name="x", server_name="a").__aenter__())
except Exception as error:
    redis = str(error)
print(json.dumps({"rows": found, "ids": ids, "version": __version__, "refused": refused, "redis": redis,
    "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both, by the name of the distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (CLIENT, ROOT):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0]: path for path in folder.iterdir()}


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_each_file_is_in_one_of_the_two_wheels(wheels: dict[str, Path]) -> None:
    client, rest = files(wheels["replicad_client"]), files(wheels["replicad"])
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "replicad", "pyspark_replicad"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert client & rest == set()
    assert client | rest == {name for name in tracked if (ROOT / name).exists()}
    assert wheels["replicad_client"].stat().st_size < MOST


@pytest.mark.long
def test_the_sdists_have_every_file_of_the_wheels(wheels: dict[str, Path], tmp_path: Path) -> None:
    """`python -m build` makes the wheels of the sdists, so a file that an sdist lacks is in neither."""
    for source, name in ((CLIENT, "replicad_client"), (ROOT, "replicad")):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        (made,) = tmp_path.glob(f"{name}-*.tar.gz")
        with tarfile.open(made) as sdist:
            packed = {entry.partition("/")[2] for entry in sdist.getnames()}
        assert files(wheels[name]) - packed == set()


def test_both_lists_and_versions_are_the_same() -> None:
    client = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = client["tool"]["hatch"]["build"]["include"]
    assert listed == whole["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    assert client["project"]["version"] == whole["project"]["version"]
    assert f"replicad-client=={whole['project']['version']}" in whole["project"]["dependencies"]
    assert [line.partition(">")[0] for line in client["project"]["dependencies"]] == ["anyio"]


@pytest.fixture
def empty_python(wheels: dict[str, Path], tmp_path: Path) -> Path:
    """A Python of its own, with the wheel of the clients and what anyio needs, and nothing else."""
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin/python"
    (site,) = place.glob("lib/python*/site-packages")
    for name in NEEDED:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        origin = Path(found.origin)
        source = origin.parent if found.submodule_search_locations else origin
        (site / source.name).symlink_to(source)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*install, "--no-compile", str(wheels["replicad_client"])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.long
async def test_an_empty_environment_with_the_client_follows_a_stream_and_works_a_tube(
    events: Database, queue: Database, daemon: Daemon, empty_python: Path, tmp_path: Path
) -> None:
    await events.execute("INSERT INTO events (body) VALUES ('{\"n\": 1}'), ('{\"n\": 2}')")
    await queue.execute("SELECT tube.queue_touch(0, '{7,8}', 'T')")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(empty_python), "-c", USE, str(daemon.addresses[0])]
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            command, cwd=tmp_path, env=kept, capture_stdout=True, capture_stderr=True, check=False
        )
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert said["rows"] == [{"n": 1}, {"n": 2}]
    assert said["ids"] == [7, 8]
    assert said["version"] == tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]["version"]
    assert (
        said["refused"]
        == "replicad.open_sharded_writer is not part of the package replicad-client: pip install replicad"
    )
    assert "pip install 'replicad[redis]'" in said["redis"]
    assert set(said["modules"]) & set(FOREIGN) == set()
