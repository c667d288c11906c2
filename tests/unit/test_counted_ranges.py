"""Ranges of a table far below the position: each is counted in turn, and they stay few."""

from __future__ import annotations

import random

from replicad.streams.serving.windows import GRAIN, LOWEST, MOST_RANGES, CountedRange, CountedRanges


def looked(found: CountedRanges, rows: dict[int, int], most: int = 10**9) -> dict[int, int]:
    """A look at all that is due; by the beginning of a range, how many rows it has more than before."""
    more = {}
    for after in found.due():
        one = found.beginning(after)
        if one is None:
            continue
        inside = sorted(id for id in rows if one.after < id <= one.upto)
        upto = inside[most - 1] if one.rows is None and len(inside) > most else one.upto
        counted = CountedRange(one.after, upto, sum(rows[id] for id in inside if id <= upto), 1)
        if one.rows is not None and counted.rows is not None and counted.rows > one.rows:
            more[one.after] = counted.rows - one.rows
        found.note(counted)
    return more


def test_rows_that_turn_up_are_noticed_once_and_removed_ones_hide_no_later_ones() -> None:
    found, rows = CountedRanges(), dict.fromkeys(range(1, 31), 1)
    found.reach(30)
    assert looked(found, rows) == {}
    for id in range(1, 11):
        del rows[id]
    assert looked(found, rows) == {}
    rows[3] = 2
    assert looked(found, rows) == {LOWEST: 2}
    assert looked(found, rows) == {}


def test_new_and_old_ranges_are_counted_by_turns() -> None:
    found = CountedRanges([CountedRange(n, n + 10, 20_000 if n < 50 else None) for n in range(0, 100, 10)], turn=20)
    assert list(found.due()) == [90, 20, 80, 30, 70, 40, 60, 0, 50, 10]
    found.note(CountedRange(20, 30, 20_000))
    assert list(found.due())[1] == 30


def test_what_is_above_a_fork_and_what_was_attached_is_counted_anew() -> None:
    found = CountedRanges([CountedRange(n, n + 10, 20_000) for n in range(0, 100, 10)])
    found.forget(12, 31)
    assert [one.after for one in found.ranges if one.rows is None] == [10, 20, 30]
    found.cut(55)
    assert found.upto == 55
    assert found.ranges[-1] == CountedRange(50, 55)
    found.cut(50)
    assert found.ranges[-1] == CountedRange(40, 50, 20_000)
    found.cut(-5)
    assert found.ranges == []


def test_ranges_that_follow_one_another_have_all_ids_and_are_few_whatever_comes() -> None:
    dice = random.Random(1)
    found, rows, top = CountedRanges(), {}, 0
    for _ in range(60):
        for _ in range(dice.randrange(200)):
            top += 1
            rows[top] = dice.randrange(1, 200)
        found.reach(top)
        assert looked(found, rows, most=dice.randrange(1, 300)) == {}
        for id in dice.sample(sorted(rows), len(rows) // 50):
            rows[id] -= rows[id] // 2
        if dice.random() < 0.1:
            found.cut(dice.randrange(top))
        assert all(one.upto == two.after for one, two in zip(found.ranges, found.ranges[1:], strict=False))
        assert not found.ranges or found.ranges[0].after == LOWEST
    while any(one.rows is None for one in found.ranges):
        looked(found, rows)
    assert sum(one.rows or 0 for one in found.ranges) >= sum(rows[id] for id in rows if id <= found.upto)
    assert all((a.rows or 0) + (b.rows or 0) > GRAIN / 2 for a, b in zip(found.ranges, found.ranges[1:]))  # noqa: B905


def test_there_are_never_more_ranges_than_the_bound() -> None:
    found = CountedRanges()
    for n in range(1, 3 * MOST_RANGES):
        found.reach(n)
        found.note(CountedRange(n - 1 if n > 1 else LOWEST, n, GRAIN))
        assert len(found.ranges) <= MOST_RANGES
    assert sum(one.rows or 0 for one in found.ranges) == GRAIN * (3 * MOST_RANGES - 1)
