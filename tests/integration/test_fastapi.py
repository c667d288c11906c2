"""The application of docs/howto/fastapi.md, run by uvicorn as the page says, on a real daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trio

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.redis_servers import free_port
from tests.source import ROOT

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PAGE = (ROOT / "docs/howto/fastapi.md").read_text(encoding="utf-8")


@contextmanager
def serving(folder: Path, daemon: Daemon) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (options,) = re.findall(r"^uvicorn app:app (.*)$", PAGE, re.MULTILINE)
    (folder / "app.py").write_text(program)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "app:app",
        *options.split(),
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    environment = {**os.environ, "REPLICAD_PORT": str(daemon.addresses[0].port), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        try:
            yield process, port
        finally:
            process.kill()


async def test_the_application_sends_rows_resumes_and_gives_its_leases_back(
    events: Database, queue: Database, daemon: Daemon, tmp_path: Path
) -> None:
    def insert(*numbers: int) -> str:
        return f"INSERT INTO events (body) SELECT jsonb_build_object('n', n) FROM unnest(ARRAY{list(numbers)}) n"

    async def read(port: int, wanted: int, headers: dict[str, str]) -> tuple[list[int], str]:
        """As many rows as are wanted, and the last id."""
        found: list[int] = []
        last = ""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as browser:
            async with browser.stream("GET", "/live?token=EARLIEST", headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        last = line[4:]
                    elif line.startswith("data: "):
                        found += [
                            json.loads(row)["n"] if isinstance(row, str) else row["n"] for row in json.loads(line[6:])
                        ]
                    if len(found) >= wanted and not line:
                        break
        return found, last

    await events.execute(insert(1, 2))
    await queue.execute("SELECT tube.queue_touch(0, '{7,8}', 'T')")
    with serving(tmp_path, daemon) as (process, port), trio.fail_after(PATIENCE):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as browser:
            indexed: list[int] = []
            while indexed != [7, 8]:
                await trio.sleep(0.05)
                try:
                    indexed = (await browser.get("/indexed")).json()
                except httpx.ConnectError:
                    assert process.poll() is None, process.stderr and process.stderr.read().decode()
        rows, last = await read(port, 2, {})
        assert rows == [1, 2]
        await events.execute(insert(3))
        assert (await read(port, 1, {"last-event-id": last}))[0] == [3]
        process.send_signal(signal.SIGTERM)
        _, said = await trio.to_thread.run_sync(process.communicate)
        assert b"Traceback" not in said, said.decode()
    assert await queue.fetch_value("SELECT count(*) FROM tube.tube_lease") == 0
