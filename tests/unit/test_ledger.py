"""The ledger of a worker: nothing twice at once, nothing forgotten, nothing acked too early."""

import itertools
import sys
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from replicad.client.ledger import (
    FRUITLESS_STEPS,
    POD_BYTES,
    ROW_BYTES,
    IdQueue,
    Ledger,
    Row,
    Touch,
    collect,
)
from replicad.client.requests import Pod
from replicad.errors import DownstreamError

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


def test_a_row_that_is_touched_while_it_is_busy_comes_again_once_with_all_touches_in_the_more_urgent_queue() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "U", [1])
    [touch] = ledger.take(1)
    ledger.add(2, 0, "B", [1])
    assert (ledger.rows, ledger.take(9)) == (1, [])
    ledger.add(3, 0, "U", [1])
    ledger.add(4, 0, "B", [1])
    ledger.done([touch])
    assert (ledger.waiting(IdQueue.LIVE), ledger.waiting(IdQueue.BACKFILL), ledger.rows) == (1, 0, 1)
    [again] = ledger.take(9)
    assert (again.seqs, again.op, again.seq) == ((2, 3, 4), "B", 4)
    assert ledger.take_finished() == [1]
    ledger.done([again])
    assert (ledger.take_finished(), ledger.take(9), ledger.memory) == ([2, 3, 4], [], 0)


def test_a_row_that_is_touched_by_a_backfill_alone_while_it_is_busy_waits_with_the_backfill() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "U", [1])
    [touch] = ledger.take(1)
    ledger.add(2, 0, "B", [1])
    ledger.add(3, 0, "B", [1])
    ledger.done([touch])
    assert (ledger.waiting(IdQueue.LIVE), ledger.waiting(IdQueue.BACKFILL)) == (0, 1)
    assert [t.seqs for t in ledger.take(9, IdQueue.BACKFILL)] == [(2, 3)]


def test_touches_of_a_row_that_waits_are_joined_in_its_place() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "B", [1, 2])
    ledger.add(2, 0, "B", [1])
    assert ledger.memory == 2 * ROW_BYTES + 2 * POD_BYTES + sys.getsizeof(1) + sys.getsizeof(2)
    assert [(t.id, t.seqs) for t in ledger.take(9)] == [(1, (1, 2)), (2, (1,))]
    ledger.add(3, 5, "U", [1])
    ledger.add(4, 5, "D", [2])
    ledger.add(5, 5, "D", [1])
    assert [(t.id, t.op, t.seqs) for t in ledger.take(9)] == [(1, "D", (3, 5)), (2, "D", (4,))]


def test_the_memory_of_a_busy_row_has_its_touch_and_what_comes_after_it() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "U", [10**6])
    size = sys.getsizeof(10**6)
    ledger.take(1)
    assert ledger.memory == 2 * ROW_BYTES + POD_BYTES + size
    ledger.add(2, 0, "U", [10**6])
    assert ledger.memory == 3 * ROW_BYTES + 2 * POD_BYTES + size


def test_a_parked_pod_is_forgotten_and_the_oldest_one_is_the_first_that_is_not_done() -> None:
    ledger = Ledger()
    assert ledger.oldest is None
    ledger.add(1, 0, "U", [], held=True)
    ledger.add(2, 0, "U", [1])
    ledger.tables[0] = "public.film"
    assert (ledger.oldest, ledger.pods, ledger.left(1)) == (1, 2, 1)
    ledger.forget(1)
    assert (ledger.oldest, ledger.pods, ledger.take_finished()) == (2, 1, [])
    [touch] = ledger.take(9)
    assert (touch.table, ledger.busy) == ("public.film", 1)


def test_a_live_touch_takes_its_row_out_of_the_backfill_and_another_backfill_leaves_it_there() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "B", [1, 2])
    ledger.add(2, 0, "B", [1])
    assert ledger.take(9, IdQueue.LIVE) == []
    ledger.add(3, 0, "U", [2])
    assert [(one.id, one.op, one.seqs) for one in ledger.take(9, IdQueue.LIVE)] == [(2, "U", (1, 3))]
    assert [(one.id, one.op, one.seqs) for one in ledger.take(9, IdQueue.BACKFILL)] == [(1, "B", (1, 2))]


class Downstream:
    """Stale ids, as the user's functions see them: `answers` one after the other, then none."""

    def __init__(self, *answers: list[int] | Exception) -> None:
        self.ledger = Ledger()
        self.pod = Pod(9, "B", 4, [], {"type": "backfill_end"}, datetime.now(UTC))
        self.answers = list(answers)
        self.asked: list[tuple[int, int, int, float]] = []
        self.processed: list[tuple[int, str, int, tuple[int, ...]]] = []
        self.ledger.add(9, 4, "B", [], held=True)

    async def stale_ids(self, shard: int, before: int, limit: int) -> list[int]:
        self.asked.append((shard, before, limit, trio.current_time()))
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def process(self) -> None:
        """One id at a time, so that it is called again until all are done."""
        touches = self.ledger.take(1)
        self.processed += [(one.id, one.op, one.shard, one.seqs) for one in touches]
        await trio.lowlevel.checkpoint()
        self.ledger.done(touches)

    async def collect(self, step: int = 3, settle: float = 5.0) -> int:
        return await collect(self.stale_ids, self.ledger, self.pod, 70, step=step, settle=settle, process=self.process)

    @property
    def waits(self) -> list[float]:
        """Seconds between the questions."""
        return [later[3] - sooner[3] for sooner, later in itertools.pairwise(self.asked)]


async def test_stale_ids_are_processed_until_none_was_named_for_a_while(autojump_clock: MockClock) -> None:
    there = Downstream([1, 2], [3], [], [4])
    assert await there.collect() == 4
    assert there.processed == [(id, "G", 4, (9,)) for id in (1, 2, 3, 4)]
    assert {one[:3] for one in there.asked} == {(4, 70, 3)}
    assert there.waits == [0, 0, 5, 5, 5], "it settles after none, before what comes after none, and before the end"
    assert (there.ledger.left(9), there.ledger.take_finished()) == (1, []), "the pod is still held"


async def test_no_more_ids_than_a_step_are_taken_and_each_counts_once(autojump_clock: MockClock) -> None:
    there = Downstream([1, 1, 2, 3, 4])
    assert await there.collect(step=4) == 3
    assert [one[0] for one in there.processed] == [1, 2, 3]


async def test_a_question_that_fails_is_asked_again_after_a_growing_pause(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    there = Downstream(ValueError("away"), ValueError("away"), [1], ValueError("away"))
    assert await there.collect(settle=0.0) == 1
    first, second, _, third, *_ = there.waits
    assert 0 < first <= 0.5 < second <= 1.0
    assert 0 < third <= 0.5, "an answer ends the growth"
    assert caplog.messages == ["stale_ids_failed shard=4 seq=9 error=ValueError('away')"] * 3


async def test_a_downstream_that_goes_on_to_name_what_was_processed_is_given_up(autojump_clock: MockClock) -> None:
    there = Downstream(*[[7, 8]] * 30)
    with pytest.raises(DownstreamError, match=r"2 stale ids of shard 4, e\.g\. 7, after .* does it keep"):
        await there.collect()
    assert len(there.asked) == 1 + FRUITLESS_STEPS
    assert there.waits == [0, *[5] * (FRUITLESS_STEPS - 1)], "it waits before it tries the same ids again"


async def test_other_ids_between_the_same_ones_are_progress(autojump_clock: MockClock) -> None:
    same = [[7]] * FRUITLESS_STEPS
    there = Downstream(*same, [8], *same)
    assert await there.collect() == 2 * FRUITLESS_STEPS + 1
