"""The ledger of a worker: nothing twice at once, nothing forgotten, nothing acked too early."""

from hypothesis import given
from hypothesis import strategies as st

from replicad.tubes.ledger import Ledger, Touch

PODS = st.lists(st.lists(st.integers(1, 8), max_size=5), max_size=20)
STEPS = st.lists(st.one_of(st.just("add"), st.integers(1, 4), st.just("done"), st.just("finished")), max_size=80)


@given(PODS, STEPS)
def test_a_pod_is_finished_exactly_when_each_of_its_ids_was_processed_after_it_came(
    pods: list[list[int]], steps: list[str | int]
) -> None:
    ledger = Ledger()
    coming = list(enumerate(pods, start=1))
    taken: list[Touch] = []
    owed: dict[int, set[int]] = {}  # seq: ids whose processing began after the pod came and has not ended
    begun_with: dict[int, set[int]] = {}
    finished: set[int] = set()

    def end(touch: Touch) -> None:
        ledger.done([touch.id])
        for seq in begun_with.pop(touch.id):
            owed[seq].discard(touch.id)

    def check() -> None:
        for seq in ledger.take_finished():
            assert owed.pop(seq) == set()
            finished.add(seq)
        assert all(owed.values())

    for step in steps:
        if step == "add" and coming:
            seq, ids = coming.pop(0)
            ledger.add(seq, 0, "U", ids)
            owed[seq] = set(ids)
        elif isinstance(step, int):
            for touch in ledger.take(step):
                assert touch.id not in {other.id for other in taken}  # never twice at once
                taken.append(touch)
                begun_with[touch.id] = {seq for seq, ids in owed.items() if touch.id in ids}
                assert set(touch.seqs) == begun_with[touch.id]
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
            begun_with[touch.id] = {seq for seq, ids in owed.items() if touch.id in ids}
    assert finished == {seq for seq, _ in enumerate(pods, start=1)} - {seq for seq, _ in coming}


def test_ids_that_waited_longest_come_first_and_a_busy_one_does_not_block_the_others() -> None:
    ledger = Ledger()
    ledger.add(1, 7, "I", [3, 1])
    ledger.add(2, 7, "U", [2, 3])
    assert [(t.id, t.op, t.seqs) for t in ledger.take(2)] == [(3, "U", (1, 2)), (1, "I", (1,))]
    ledger.add(3, 7, "D", [3, 4])
    assert [t.id for t in ledger.take(9)] == [2, 4]
    ledger.done([3])
    assert [(t.id, t.op, t.seqs) for t in ledger.take(9)] == [(3, "D", (3,))]


def test_a_control_pod_is_done_at_once() -> None:
    ledger = Ledger()
    ledger.add(5, 0, "B", [])
    assert ledger.take_finished() == [5]
    assert ledger.pods == 0
