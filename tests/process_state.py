"""What all tests of one process share beside their files, and no test may leave changed.

A test that raises the limit of recursion, say, changes what a later one proves: which one that is depends on how the
tests were divided among processes. So each test is compared with itself before and after.
"""

from __future__ import annotations

import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

_SIGNALS: Final = (  # but SIGALRM, which pytest-timeout has
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGPIPE, signal.SIGCHLD, signal.SIGWINCH),
)
_OF_PYTEST: Final = ("PYTEST_CURRENT_TEST",)  # differs in every phase of a test


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _logger(name: str | None) -> tuple[object, ...]:
    logger = logging.getLogger(name)
    ours = [handler for handler in logger.handlers if not type(handler).__module__.startswith("_pytest.")]
    return logger.level, logger.propagate, logger.disabled, ours


_LOOKS: Final[Mapping[str, Callable[[], Any]]] = {
    "the limit of recursion": sys.getrecursionlimit,
    "the interval between threads": sys.getswitchinterval,
    "the digits of an int": sys.get_int_max_str_digits,
    "the garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "signal handlers": lambda: {number.name: signal.getsignal(number) for number in _SIGNALS},
    "the environment": lambda: {name: value for name, value in os.environ.items() if name not in _OF_PYTEST},
    "the current folder": os.getcwd,
    "the umask": _umask,
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "sys.path": lambda: list(sys.path),
    "hooks": lambda: (sys.excepthook, threading.excepthook, sys.getprofile(), sys.gettrace()),
    # That of open files is not here: every daemon raises it for the rest of its process.
    "limits of the process": lambda: (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        resource.getrlimit(resource.RLIMIT_CORE),
    ),
    "loggers": lambda: {
        "root": _logger(None),
        "replicad": _logger("replicad"),
        "disabled": logging.root.manager.disable,
    },
    "structlog": structlog.get_config,
}


def state() -> dict[str, Any]:
    """Everything that is looked at, by what it is called in a report. Takes a quarter of a millisecond."""
    return {name: look() for name, look in _LOOKS.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each thing that is not as it was before."""
    return [f"{name}: {_shown(before[name], after[name])}" for name in before if before[name] != after[name]]


def _shown(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in keys)
    return f"was {before!r} and is {after!r}"
