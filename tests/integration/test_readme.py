"""README.md, "By hand", walked as it stands: its blocks are typed into shells beside a `replicad serve`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

pytestmark = pytest.mark.postgres

README = Path(__file__).parents[2] / "README.md"
USUAL = "127.0.0.1 9009"  # where the page says that the daemon listens
TYPED = re.compile(r"(\S+) {2,}you type this\b.*")


def blocks(section: str) -> list[list[str]]:
    """The lines of each block of code in a section."""
    page = README.read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


class Shells:
    """Terminals in one folder, whose commands find the program of this tree and a free port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        program = folder / "bin/replicad"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m replicad "$@"\n')
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
        self.environment = {
            **kept,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "REPLICAD_LISTEN": f"127.0.0.1:{port}",  # the page's port may be taken on this machine
            "REPLICAD_SERVER": f"127.0.0.1:{port}",
            "REPLICAD_SERVER_NAME": "db1.example.org",
            "PYTHONPATH": str(README.parent),
        }

    def run(self, line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serve(self) -> Iterator[str]:
        """`replicad serve`; yields what it has logged until it is ready."""
        command = ["replicad", "serve", "--log-format", "text"]
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stderr is not None
            log = ""
            while " ready " not in log:
                line = daemon.stderr.readline()
                assert line, f"it ended: {log}"
                log += line
            yield log
            daemon.send_signal(signal.SIGINT)
            daemon.communicate(timeout=PATIENCE)


class Netcat:
    """What `nc` shows: lines as they come, without the PINGs behind the first one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.lines = self.socket.makefile("r", encoding="utf-8", newline="\n")

    def next_line(self, *, pings: bool) -> str:
        """The next line that the page shows: it shows the first PING only, and no WRITERS."""
        while True:
            line = self.lines.readline().rstrip("\n")
            if not line.startswith("WRITERS ") and (pings or not line.startswith("PING ")):
                return line

    def walk(self, page: list[str]) -> None:
        """Type what the page types, and compare what comes with what it shows."""
        for shown in page:
            typed = TYPED.fullmatch(shown)
            if typed:
                self.socket.sendall(f"{typed[1]}\n".encode())
                continue
            line = self.next_line(pings=shown.startswith("PING "))
            wanted = re.escape(shown) if not shown.startswith("PING") else r"PING \d+"
            assert re.fullmatch(wanted, line), f"{shown!r} is on the page, and {line!r} came"


@pytest.fixture
def shells(postgres_folder: Path) -> Shells:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    return Shells(postgres_folder, port)


def test_by_hand_is_followed_as_it_stands(shells: Shells) -> None:
    assert blocks("By hand"), "the section has blocks of code"
    with shells.serve() as log:
        assert re.search(r"postgres_started\s.*psql='replicad psql'", log), log
        netcat = None
        for block in blocks("By hand"):
            for number, line in enumerate(block):
                if line == f"$ nc {USUAL}":
                    netcat = Netcat(shells.port)
                    netcat.walk(block[number + 1 :])
                    break
                if line.startswith("$ "):
                    shells.run(line[2:])
                else:
                    assert netcat is not None, line
                    netcat.walk([line])
        assert netcat is not None
        assert (
            shells.run("replicad tail events --from EARLIEST --count 1") == 'events master 1 {"id":1,"kind":"signup"}\n'
        )
