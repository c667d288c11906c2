"""The garbage collector of the processes that run tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector never looks at what is made here, nor at what there was before.

    For what stays until the process ends: modules, tests, trees of syntax. Those are a million objects, and every full
    collection of the run would look at all of them again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
