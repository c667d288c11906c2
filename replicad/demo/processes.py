"""The processes that the demonstration starts, and the promise that none of them outlives it.

Each runs in a session of its own, so that Ctrl-C in the terminal reaches us alone; `until_interrupted` turns it into
the cancellation of one scope, and every process is ended, shielded, where that scope unwinds. As signals are only
acted on at trio's checkpoints, none can come between the start of a process and the code that will end it.
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
_STOP = 8.0  # seconds for a polite end (the daemon promises 5) before SIGKILL
_LOOK = 0.02  # seconds between looks at a file or a process


@asynccontextmanager
async def until_interrupted() -> AsyncIterator[None]:
    """SIGINT, SIGTERM and SIGHUP cancel the block, once; when it has unwound, KeyboardInterrupt is raised."""
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
    """Run a command with its output in the file `log`; at the end of the block it and its children are gone."""
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
    """End a process that leads its own session: SIGTERM, and SIGKILL for whatever of it is left after a while."""
    process.terminate()
    with trio.move_on_after(_STOP):
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """Our environment without the settings of another replicad (`REPLICAD_*`), and with `more`."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}, **more}


@asynccontextmanager
async def running_daemon(url: str, folder: Path) -> AsyncIterator[Address]:
    """Run `replicad serve` on the database at `url` and a free port of the loopback; yields where it listens.

    Raises:
        EnvironmentRefused: it ended instead of listening, or took too long; the message has its last words.
    """
    ready, log = folder / "daemon.address", folder / "daemon.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    async with running(command, log, clean_environment(REPLICAD_DATABASE=url)) as process:
        with trio.move_on_after(_START):
            while process.poll() is None and not ready.exists():
                await trio.sleep(_LOOK)
        if not ready.exists():
            raise EnvironmentRefused(f"the daemon did not start: {last_line(log)} (all of it is in {log})")
        yield parse_address(ready.read_text(encoding="utf-8").strip())


def last_line(log: Path) -> str:
    """The last line of a file that is not empty, at most 300 characters of it."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
