"""Gives free memory back to the system after a rush.

The allocator of glibc keeps what lies below the last byte in use: hundreds of megabytes after thousands of clients that
sent half a line each. Python has lists of free objects beside it, thousands that lie all over the memory of a rush and
keep its pages. Elsewhere (musl, macOS) nothing is done.

Python's own allocator has blocks of 1 MiB, and each stays as long as one small object in it lives. So the unit and the
image start the daemon with PYTHONMALLOC=malloc (docs/operating.md, "Sizing").
"""

from __future__ import annotations

import ctypes
import gc
from typing import Protocol

import structlog
import trio

LOOK = 2.0  # seconds
SPARE = 8 << 20  # bytes that may be free; the next rush needs them again
CALM = 500  # tasks; with so many a collection of all objects takes up to 50 ms

log = structlog.get_logger()


class Allocator(Protocol):
    """Who gets memory from the system."""

    def free(self) -> int:
        """Bytes that nothing is in, given back or not."""

    def give_back(self) -> None:
        """Return free memory to the system. Takes up to a tenth of a second for hundreds of megabytes."""


async def give_back_forever(allocator: Allocator, calm: int = CALM) -> None:
    """Give memory back that is free at two looks one after the other, until cancelled.

    Python's lists are emptied before. While more than `calm` tasks live that takes too long. Then memory is given back
    once more when fewer live, or when the collector of cycles has looked at all objects, which empties the lists too.
    """
    kept = last = 0  # bytes that were free after it was given back last, and at the last look
    full: int | None = None  # collections of all objects when it was given back last, if the lists were full then
    while True:
        await trio.sleep(LOOK)
        free = allocator.free()
        kept = min(kept, free)
        is_calm = trio.lowlevel.current_statistics().tasks_living <= calm
        if min(free, last) > kept + SPARE or (full is not None and (is_calm or _collections() > full)):
            emptied = is_calm or (full is not None and _collections() > full)
            if is_calm:
                gc.collect()
            full = None if emptied else _collections()
            await trio.to_thread.run_sync(allocator.give_back)
            log.debug("memory_given_back", free=free, before=kept)
            kept = allocator.free()
        last = free


def _collections() -> int:
    """How often all objects were looked at, and Python's lists of free ones emptied."""
    return int(gc.get_stats()[-1]["collections"])


def allocator_of_this_process() -> Allocator | None:
    """None: it is not that of glibc 2.33 and newer."""
    library = ctypes.CDLL(None)
    return _Glibc(library) if hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim") else None


class _Figures(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class _Glibc:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._figures = library.mallinfo2
        self._figures.restype = _Figures
        self._trim = library.malloc_trim
        self._trim.argtypes = [ctypes.c_size_t]

    def free(self) -> int:
        return int(self._figures().fordblks)

    def give_back(self) -> None:
        self._trim(0)
