"""Which allocator the daemon has: that of the C library, where free memory can be given back page by page.

Python's own has blocks of 1 MiB, and each stays as long as one small object in it lives. After a crowd of thousands of
clients that was 75 MiB. It is chosen by a variable of the environment, before Python starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

VARIABLE = "PYTHONMALLOC"
_OLDEST = (2, 33)  # of glibc: has the figures that `daemon/heap.py` needs


def choose_allocator(program: str, arguments: Sequence[str]) -> None:
    """Start Python again, in this process, if it is to serve and no allocator was chosen (PYTHONMALLOC).

    It takes some 20 ms, as nothing else is imported yet. `program`: the script. A script that was read from a pipe
    cannot be started again.
    """
    chosen = VARIABLE in os.environ or sys.flags.dev_mode
    again = bool(sys.executable) and (program == "-c" or os.path.isfile(program))
    if "serve" in arguments and again and not chosen and is_suitable():
        os.environ[VARIABLE] = "malloc"
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same program again
        except OSError:  # a sandbox may forbid it; the daemon serves as well without
            del os.environ[VARIABLE]


def is_suitable() -> bool:
    """Whether memory can be given back page by page: the C library is a glibc that is new enough."""
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return False
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    numbers = version.split(".")[:2]
    return name == "glibc" and all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) >= _OLDEST
