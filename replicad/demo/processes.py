"""Start the processes of the demonstration, and end all of them with it.

Each process leads a session of its own, so that Ctrl-C in the terminal reaches only the demonstration. Ctrl-C cancels
the block of `until_interrupted`, and the clean-up of that block ends every process. trio handles signals only at its
checkpoints, so none can come between the start of a process and the code that will end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from replicad.config.settings import Address, parse_address
from replicad.errors import EnvironmentRefused

_START = 60.0  # seconds for a daemon to listen; installing the schema on a slow disk takes a few
_STOP = 8.0  # seconds between SIGTERM and SIGKILL; the daemon ends within 5
_LOOK = 0.02  # seconds between two checks of a file or a process


@asynccontextmanager
async def until_interrupted() -> AsyncIterator[None]:
    """SIGINT, SIGTERM and SIGHUP cancel the block. After its clean-up KeyboardInterrupt is raised."""
    interrupted = False
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal interrupted
                async for _ in signals:
                    interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            yield
            nursery.cancel_scope.cancel()
    if interrupted:
        raise KeyboardInterrupt


@asynccontextmanager
async def running(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> AsyncIterator[trio.Process]:
    """Run a command with its output in the file `log`. The end of the block ends it and its children."""
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await end(process)


async def end(process: trio.Process) -> None:
    """End a process that leads a session: SIGTERM, and after `_STOP` seconds SIGKILL to it and its children."""
    process.terminate()
    with trio.move_on_after(_STOP):
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without the user's settings (`REPLICAD_*`), and with `more`."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}, **more}


@asynccontextmanager
async def running_daemon(url: str, folder: Path) -> AsyncIterator[Address]:
    """Run `replicad serve` on the database at `url` and a free port of the loopback; yields its address.

    Raises:
        EnvironmentRefused: it ended, or does not listen in time; the message has the last line of its log.
    """
    ready, log = folder / "daemon.address", folder / "daemon.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    async with running(command, log, clean_environment(REPLICAD_DATABASE=url)) as process:
        with trio.move_on_after(_START):
            while process.poll() is None and not ready.exists():
                await trio.sleep(_LOOK)
        if not ready.exists():
            raise EnvironmentRefused(f"the daemon did not start: {last_line(log)} (its log is {log})")
        yield parse_address(ready.read_text(encoding="utf-8").strip())


def last_line(log: Path) -> str:
    """The last line of a file that is not blank, at most 300 characters of it."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it logged nothing"
