"""The ledger of a worker: nothing twice at once, nothing forgotten, nothing acked too early."""

import sys
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.client.ledger import IdQueue, Ledger, Row, Touch

PODS = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(1, 8), max_size=5)), max_size=20)
STEPS = st.lists(st.one_of(st.just("add"), st.integers(1, 4), st.just("done"), st.just("finished")), max_size=80)


@given(PODS, STEPS)
def test_a_pod_is_finished_exactly_when_each_of_its_ids_was_processed_after_it_came(
    pods: list[tuple[int, list[int]]], steps: list[str | int]
) -> None:
    ledger = Ledger()
    coming = list(enumerate(pods, start=1))
    taken: list[Touch] = []
    owed: dict[int, set[Row]] = {}  # seq: ids whose processing began after the pod came and has not ended
    begun_with: dict[Row, set[int]] = {}
    finished: set[int] = set()

    def end(touch: Touch) -> None:
        ledger.done([touch])
        row = (touch.shard, touch.id)
        for seq in begun_with.pop(row):
            owed[seq].discard(row)

    def check() -> None:
        for seq in ledger.take_finished():
            assert owed.pop(seq) == set()
            finished.add(seq)
        assert all(owed.values())

    for step in steps:
        if step == "add" and coming:
            seq, (shard, ids) = coming.pop(0)
            ledger.add(seq, shard, "U", ids)
            owed[seq] = {(shard, id) for id in ids}
        elif isinstance(step, int):
            for touch in ledger.take(step):
                row = (touch.shard, touch.id)
                assert row not in {(other.shard, other.id) for other in taken}  # never twice at once
                taken.append(touch)
                begun_with[row] = {seq for seq, rows in owed.items() if row in rows}
                assert set(touch.seqs) == begun_with[row]
        elif step == "done" and taken:
            end(taken.pop(0))
        elif step == "finished":
            check()
    while taken or ledger.pods:
        for touch in taken:
            end(touch)
        check()
        taken = ledger.take(3)
        for touch in taken:
            row = (touch.shard, touch.id)
            begun_with[row] = {seq for seq, rows in owed.items() if row in rows}
    assert finished == {seq for seq, _ in enumerate(pods, start=1)} - {seq for seq, _ in coming}


def test_ids_that_waited_longest_come_first_and_a_busy_one_does_not_block_the_others() -> None:
    ledger = Ledger()
    ledger.add(1, 7, "I", [3, 1])
    ledger.add(2, 7, "U", [2, 3])
    first = ledger.take(2)
    assert [(t.id, t.op, t.seqs) for t in first] == [(3, "U", (1, 2)), (1, "I", (1,))]
    ledger.add(3, 7, "D", [3, 4])
    assert [t.id for t in ledger.take(9)] == [2, 4]
    ledger.done(first[:1])
    assert [(t.id, t.op, t.seqs) for t in ledger.take(9)] == [(3, "D", (3,))]


def test_a_control_pod_is_done_at_once() -> None:
    ledger = Ledger()
    ledger.add(5, 0, "B", [])
    assert ledger.take_finished() == [5]
    assert ledger.pods == 0


def test_the_same_id_in_two_shards_is_two_rows() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "U", [7])
    ledger.add(2, 4, "I", [7])
    taken = ledger.take(9)
    assert [(t.shard, t.id, t.op, t.seqs) for t in taken] == [(0, 7, "U", (1,)), (4, 7, "I", (2,))]
    ledger.done(taken[1:])
    assert ledger.take_finished() == [2]


def test_a_held_pod_waits_for_what_is_added_to_it_and_for_being_let_go() -> None:
    ledger = Ledger()
    ledger.add(1, 3, "B", [5])
    ledger.add(2, 3, "B", [], held=True)
    assert ledger.oldest == 1
    ledger.done(ledger.take(9))
    assert ledger.take_finished() == [1]
    assert ledger.oldest == 2
    ledger.add_to(2, 3, "G", [8, 9])
    taken = ledger.take(9)
    assert [(t.id, t.op, t.seq) for t in taken] == [(8, "G", 2), (9, "G", 2)]
    ledger.let_go(2)
    assert (ledger.take_finished(), ledger.left(2)) == ([], 2)
    ledger.done(taken)
    assert ledger.take_finished() == [2]


@pytest.mark.parametrize("make", [lambda n: n + 10**12, lambda n: f"{n:08x}-9c0b-4ef8-bb6d-6bb9bd380a11"])
def test_the_memory_of_a_ledger_is_estimated_well_enough_for_a_budget(make: Callable[[int], int]) -> None:
    pods = [[make(250 * pod + n) for n in range(250)] for pod in range(100)]  # the ids are counted by their size
    tracemalloc.start()
    ledger = Ledger()
    for seq, ids in enumerate(pods):
        ledger.add(seq + 1000, 0, "U", ids)
    measured = tracemalloc.get_traced_memory()[0] + sum(sys.getsizeof(id) for ids in pods for id in ids)
    tracemalloc.stop()
    assert 0.7 * measured < ledger.memory < 1.5 * measured
    ledger.done(ledger.take(10**6))
    assert ledger.take_finished() == list(range(1000, 1100))
    assert ledger.memory == 0


def test_a_live_touch_of_a_row_does_not_wait_for_the_backfill() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "B", [1, 2, 3])
    ledger.add(2, 0, "U", [3])
    ledger.add(3, 0, "B", [3])
    assert [(t.id, t.op, t.seqs) for t in ledger.take(9, IdQueue.LIVE)] == [(3, "B", (1, 2, 3))]
    assert [t.id for t in ledger.take(1, IdQueue.BACKFILL, newest=True)] == [2]
    assert [t.id for t in ledger.take(9)] == [1]


def test_a_row_that_is_processed_once_more_is_not_taken_meanwhile() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "U", [1])
    (touch,) = ledger.take(1)
    assert not ledger.borrow(touch)
    ledger.done([touch])
    assert ledger.borrow(touch)
    ledger.add(2, 0, "U", [1])
    assert ledger.take(9) == []
    ledger.give_back(touch)
    assert [t.seqs for t in ledger.take(9)] == [(2,)]


def test_a_pod_is_known_until_it_is_taken_as_finished() -> None:
    ledger = Ledger()
    assert (ledger.left(1), ledger.has(1)) == (0, False)
    ledger.add(1, 0, "U", [7])
    assert (ledger.left(1), ledger.has(1)) == (1, True)
    [touch] = ledger.take(9)
    assert not ledger.borrow(touch), "it is busy"
    ledger.done([touch])
    assert (ledger.left(1), ledger.has(1)) == (0, True)
    assert ledger.take_finished() == [1]
    assert not ledger.has(1)
    assert ledger.borrow(touch)
    assert not ledger.borrow(touch)
