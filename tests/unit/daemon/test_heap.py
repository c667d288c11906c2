"""When free memory is given back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from replicad.daemon.heap import SPARE, allocator_of_this_process, give_back_forever


class Heap:
    """An allocator with these figures, one for each look; what is free stays counted when it was given back."""

    def __init__(self, *free: int) -> None:
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
    heap = Heap(*free)
    with pytest.raises(RuntimeError, match="StopIteration"):  # the figures are at their end
        await give_back_forever(heap)
    assert heap.given == given


def test_the_process_is_smaller_afterwards() -> None:
    allocator = allocator_of_this_process()
    if allocator is None:
        pytest.skip("not glibc 2.33 or newer")
    before = allocator.free()
    blocks = [b"x" * 50_000 for _ in range(1000)]  # too small for blocks of their own
    last = b"x" * 50_000
    del blocks
    assert allocator.free() > before + 40_000_000
    full = _resident()
    allocator.give_back()
    assert _resident() < full - 40_000_000
    assert len(last) == 50_000


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
