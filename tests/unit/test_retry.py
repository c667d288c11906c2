"""Retries, which wait by themselves; Backoff is proven with the clients and the sender."""

from __future__ import annotations

from replicad.retry import Retries


class Clock:
    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept.append(seconds)


def test_pauses_double_up_to_the_cap_until_all_tries_are_used() -> None:
    clock = Clock()
    retries = Retries(1, 5, most=4, now=clock.now, sleep=clock.sleep)
    assert [retries.pause() for _ in range(6)] == [True, True, True, True, False, False]
    assert clock.slept == [1, 2, 4, 5]


def test_no_try_begins_later_than_the_patience_allows() -> None:
    clock = Clock()
    retries = Retries(1, 5, patience=4, now=clock.now, sleep=clock.sleep)
    assert [retries.pause() for _ in range(3)] == [True, True, False]
    assert clock.slept == [1, 2]
