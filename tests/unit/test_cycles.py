"""Garbage in reference cycles goes soon, and no look at all objects takes a larger share of the time than it may."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio

from replicad.daemon.process import ALL, SHARE, TASK, YOUNG, CycleCollector


class _Node:
    """Refers to itself, so that only the collector finds it."""

    def __init__(self) -> None:
        self.itself = self


class _Clock:
    """A clock that a test moves, and a collector of which each look takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks: list[tuple[float, int]] = []
        self.takes = {1: 0.0, 2: 0.0}

    def __call__(self) -> float:
        return self.now

    def collect(self, generation: int) -> None:
        self.looks.append((self.now, generation))
        self.now += self.takes[generation]


def test_a_cycle_is_gone_soon_although_nothing_is_made_meanwhile() -> None:
    async def main() -> None:
        gone = weakref.ref(_Node())
        with trio.fail_after(60):
            while gone() is not None:
                await trio.sleep(YOUNG / 2)
        assert not gc.isenabled()

    trio.run(main, instruments=[CycleCollector()])
    assert gc.isenabled()


def test_a_cycle_that_was_old_when_it_became_garbage_goes_with_the_next_look_at_all() -> None:
    clock = _Clock()
    collector = CycleCollector(clock, gc.collect, lambda: 0)
    node = _Node()
    gone = weakref.ref(node)
    gc.collect()  # old now
    del node
    collector.before_io_wait(0)
    assert gone() is not None
    clock.now += ALL
    collector.before_io_wait(0)
    assert gone() is None


def test_new_objects_are_looked_at_in_every_turn_that_comes_late_enough() -> None:
    clock = _Clock()
    clock.takes[1] = 0.002
    collector = CycleCollector(clock, clock.collect, lambda: 0)
    for _ in range(100):
        collector.before_io_wait(0)
        clock.now += YOUNG / 4
    gaps = [after - before for (before, _), (after, _) in zip(clock.looks, clock.looks[1:], strict=False)]
    assert {generation for _, generation in clock.looks} == {1}
    assert all(YOUNG + 0.002 <= gap <= 1.5 * YOUNG + 0.002 for gap in gaps)


@pytest.mark.parametrize("takes", [0.0, 0.03, 0.5])
def test_looks_at_all_objects_take_no_larger_share_of_the_time_than_they_may(takes: float) -> None:
    clock = _Clock()
    clock.takes[2] = takes
    collector = CycleCollector(clock, clock.collect, lambda: 0)
    began = clock.now
    while clock.now < began + 5000:
        collector.before_io_wait(0)
        clock.now += 0.1
    looks = sum(generation == 2 for _, generation in clock.looks)
    assert looks * takes <= SHARE * (clock.now - began) + takes
    assert looks >= (clock.now - began) / (max(ALL, takes / SHARE) + 1 + takes) - 1


def test_the_first_look_at_all_objects_of_a_crowd_waits_until_it_takes_no_larger_share_or_the_crowd_is_gone() -> None:
    clock, tasks = _Clock(), 30_000
    collector = CycleCollector(clock, clock.collect, lambda: tasks)
    began = clock.now
    while not any(generation == 2 for _, generation in clock.looks):
        collector.before_io_wait(0)
        clock.now += 1
    assert clock.now - began >= tasks * TASK / SHARE
    clock.looks.clear()
    began = clock.now
    for _ in range(2 * int(ALL)):
        collector.before_io_wait(0)
        clock.now += 1
        tasks = 0 if clock.now > began + ALL / 2 else tasks
    assert any(generation == 2 for _, generation in clock.looks)
