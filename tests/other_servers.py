"""Servers of every other PostgreSQL that this machine has (Debian's, say), from 15 on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import PATIENCE

PROGRAMS = sorted(
    path.parent
    for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")
    if path.parent.parent.name.isdigit() and int(path.parent.parent.name) >= 15
)


@contextmanager
def other_server(programs: Path) -> Iterator[str]:
    """URL of a fresh server made with the programs of one installation, run as `postgres` where we are root."""
    root = os.geteuid() == 0

    def run(name: str, *arguments: str) -> None:
        user = {"user": "postgres", "group": "postgres", "extra_groups": []} if root else {}
        subprocess.run(  # type: ignore[call-overload]
            [programs / name, "-D", str(data), *arguments],
            cwd="/",
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE,
            **user,
        )

    with tempfile.TemporaryDirectory(prefix="replicad-test-") as folder:
        data = Path(folder) / "data"
        if root:
            shutil.chown(folder, "postgres", "postgres")
        run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c autovacuum=off"
        run("pg_ctl", "-w", "-l", str(data / "log"), "-o", options, "start")
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
