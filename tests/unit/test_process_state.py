"""A test that leaves its process changed is found, whatever it has changed."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import structlog

from replicad.config.logs import configure_logs
from replicad.config.settings import LogSettings
from tests.process_state import differences, state


def change_handlers(undo: ExitStack) -> None:
    undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))


def change_recursion(undo: ExitStack) -> None:
    undo.callback(sys.setrecursionlimit, sys.getrecursionlimit())
    sys.setrecursionlimit(1 << 14)


def change_environment(undo: ExitStack) -> None:
    undo.callback(os.environ.pop, "REPLICAD_LEFT_BEHIND")
    os.environ["REPLICAD_LEFT_BEHIND"] = "1"


def change_folder(undo: ExitStack) -> None:
    undo.callback(os.chdir, os.getcwd())
    os.chdir("/")


def change_umask(undo: ExitStack) -> None:
    undo.callback(os.umask, os.umask(0o123))


def change_collector(undo: ExitStack) -> None:
    undo.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(12345)


def change_path(undo: ExitStack) -> None:
    undo.callback(sys.path.remove, "left behind")
    sys.path.append("left behind")


def change_logs(undo: ExitStack) -> None:
    configure_logs(LogSettings())  # as every command does that serves


CHANGES = {
    "signal handlers": change_handlers,
    "the limit of recursion": change_recursion,
    "the environment": change_environment,
    "the current folder": change_folder,
    "the umask": change_umask,
    "the garbage collector": change_collector,
    "sys.path": change_path,
    "structlog": change_logs,
}


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_test_leaves_changed_is_named(name: str, undo: ExitStack) -> None:
    change: Callable[[ExitStack], None] = CHANGES[name]
    before = state()
    assert differences(before, state()) == []
    change(undo)
    assert any(line.startswith(f"{name}: ") for line in differences(before, state()))


def test_a_logger_that_was_used_by_a_command_can_be_captured_later() -> None:
    log = structlog.get_logger()
    configure_logs(LogSettings())
    log.info("used")
    with structlog.testing.capture_logs() as found:
        log.info("again")
    assert [entry["event"] for entry in found] == ["again"]
