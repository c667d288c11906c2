"""The command line in processes of their own, forked from one that has loaded what commands need.

A fresh interpreter spends most of a second on imports for a command that works for some milliseconds, and the suite
runs hundreds. What is about the start itself (imports, signals, terminals) still begins with `python -m replicad`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import trio

from tests.conftest import PATIENCE

_ROOT = Path(__file__).parents[1]
_LOADED = [  # what some commands import only when they need it, but for Spark
    "tests.commands",
    *(
        ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((_ROOT / "replicad").rglob("*.py"))
        if not {"spark", "demo", "__main__.py"} & {*path.parts}
    ),
]


@cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def replicad(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `replicad WORDS` to its end: exit status and both outputs. `env`: the whole environment; default: ours."""
    folder = Path.cwd() if cwd is None else cwd
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        arguments = (words, str(folder), dict(os.environ if env is None else env), out.name, err.name)
        process = _forks().Process(target=_run, args=arguments)
        process.start()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(words, PATIENCE, out.read(), err.read())
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, out.read().decode(), err.read().decode())


async def replicad_async(*words: str) -> subprocess.CompletedProcess[str]:
    """`replicad`, while other tasks go on."""
    return await trio.to_thread.run_sync(lambda: replicad(*words))


def _run(words: tuple[str, ...], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name, number in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    gc.freeze()  # what was loaded before stays: a look at all of it takes longer than many a command
    from replicad.cli import main

    main(words)
