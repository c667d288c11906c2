"""A disk that is full for some processes: writes beyond a size of the file fail, as they do on a full disk."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

import psutil

UNLIMITED = resource.RLIM_INFINITY


def limit_files(pid: int | None, size: int) -> None:
    """Limit the size of files for a process and its children."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid or 0)
        for process in [first, *first.children(recursive=True)]:
            with suppress(ProcessLookupError):
                try:
                    _limit(process.pid, size)
                except PermissionError:  # another account's processes may be limited by that account only
                    _limit_as_owner(process, size)


def _limit(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _limit_as_owner(process: psutil.Process, size: int) -> None:
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.setresgid(*process.gids())
            os.setresuid(*process.uids())
            _limit(process.pid, size)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0 or not process.is_running()
