"""When free memory is given back to the system."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
import trio
import trio.testing

from replicad.daemon.process import SPARE, give_back_forever


class Heap:
    """An allocator with these figures, one for each look; what is free stays counted when it was given back."""

    def __init__(self, free: Iterable[int]) -> None:
        self._free = iter(free)
        self._last = 0
        self.given: list[int] = []

    def free(self) -> int:
        if self.given and self.given[-1] < 0:  # asked right after it was given back
            self.given[-1] = self._last
            return self._last
        self._last = next(self._free)
        return self._last

    def give_back(self) -> None:
        self.given.append(-1)


@pytest.mark.parametrize(
    ("free", "given"),
    [
        pytest.param([SPARE] * 5, [], id="so much may be free"),
        pytest.param([9 * SPARE, 0] * 5, [], id="it is used again"),
        pytest.param([9 * SPARE] * 9, [9 * SPARE], id="once, though it stays counted"),
        pytest.param([9 * SPARE] * 3 + [0] + [4 * SPARE] * 3, [9 * SPARE, 4 * SPARE], id="after each rush"),
    ],
)
async def test_memory_goes_back_when_it_is_free_at_two_looks(
    free: list[int], given: list[int], autojump_clock: trio.testing.MockClock
) -> None:
    heap = Heap(free)
    with pytest.raises(RuntimeError, match="StopIteration"):  # the figures are at their end
        await give_back_forever(heap)
    assert heap.given == given


@pytest.mark.parametrize(
    ("calm", "given"),
    [pytest.param(1000, [1, 1, 1], id="they are emptied at once"), pytest.param(0, [1, 2, 2], id="when others do it")],
)
async def test_memory_that_pythons_lists_of_free_objects_keep_goes_back_too(
    calm: int, given: list[int], autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[int] = []

    def figures() -> Iterator[int]:
        for _ in range(3):
            yield from [9 * SPARE] * 9
            seen.append(len(heap.given))
            gc.collect()  # as the collector of cycles does at times

    heap = Heap(figures())
    collections = gc.get_stats()[-1]["collections"]
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await give_back_forever(heap, calm)
    finally:
        gc.enable()
    assert seen == given
    assert gc.get_stats()[-1]["collections"] == collections + 3 + (calm > 0)


PROCESS = """
from pathlib import Path
from replicad.daemon.process import allocator_of_this_process

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

allocator = allocator_of_this_process()
if allocator is None:
    print("no allocator of glibc 2.33 or newer")
    raise SystemExit
before = allocator.free()
blocks = [b"x" * 50_000 for _ in range(1000)]  # too small for blocks of their own
last = b"x" * 50_000
del blocks
assert allocator.free() > before + 40_000_000, (before, allocator.free())
full = resident()
allocator.give_back()
assert resident() < full - 40_000_000, (full, resident())
"""


def test_the_process_is_smaller_afterwards() -> None:
    """In a process of its own: this one may have so much free memory already that it takes none for this."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    if done.stdout:
        pytest.skip(done.stdout)
