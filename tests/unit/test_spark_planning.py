"""Planning a micro-batch over the partitions of a tube: never too much, never nothing where there is something."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from replicad.protocol.tokens import Cursor
from replicad.spark.offsets import TubeOffset
from replicad.spark.planning import MOST_PODS, Budget, Goal, plan_all, plan_batch, shares
from replicad.tubes.commands import CursorAt, Part


@dataclass
class Tube:
    """What a daemon answers to PODS with plan=1: `pods[partition]` is a list of (seq, is backfill)."""

    pods: list[list[tuple[int, bool]]]
    most: int = 10**9
    asked: list[Part] = field(default_factory=list)

    def __call__(
        self,
        part: Part,
        after: Cursor,
        *,
        limit: int,
        ids: int | None = None,
        backfill: int | None = None,
        wait: float = 0.0,
    ) -> CursorAt:
        assert limit > 0
        self.asked.append(part)
        mine = self.pods[part.partition]
        regular = sorted(seq for seq, late in mine if not late and seq > after.regular)
        late = sorted(seq for seq, late in mine if late and seq > after.backfill)[
            : 10**9 if backfill is None else backfill
        ]
        room = min(limit, self.most, 10**9 if ids is None else ids)  # one id in each pod
        regular, late = regular[:room], late[: max(0, room - len(regular))]
        cursor = Cursor(max(regular, default=after.regular), max(late, default=after.backfill))
        return CursorAt("t", part, cursor, len(regular) + len(late))

    def start(self) -> TubeOffset:
        return TubeOffset.beginning(len(self.pods))


def tube_of(*counts: tuple[int, int]) -> Tube:
    """Partitions with so many regular and backfill pods."""
    seqs = iter(range(1, 10**6))
    return Tube([[(next(seqs), late) for late in [False] * regular + [True] * back] for regular, back in counts])


tubes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6).map(lambda c: tube_of(*c))


@given(tubes, st.integers(1, 100), st.one_of(st.none(), st.integers(0, 50)))
def test_a_plan_keeps_its_budget_and_takes_something_where_there_is_something(
    tube: Tube, pods: int, backfill: int | None
) -> None:
    end = plan_batch(tube, tube.start(), Budget(pods, None, backfill))
    assert end.pods <= pods
    late = sum(
        flag and seq <= place.cursor.backfill
        for mine, place in zip(tube.pods, end.places, strict=True)
        for seq, flag in mine
    )
    assert backfill is None or late <= backfill
    there = sum(not late or backfill != 0 for mine in tube.pods for _, late in mine)
    assert (end.pods > 0) == (there > 0)


some = st.one_of(st.none(), st.integers(1, 30))


@given(tubes, st.integers(1, 30), some, some, some)
@example(tube_of((0, 0), (0, 0), (3, 2)), 3, None, None, 1)
def test_planning_on_and_on_reads_everything_once_and_no_task_gets_more_than_its_ids(
    tube: Tube, pods: int, ids: int | None, backfill: int | None, of_task: int | None
) -> None:
    offset, total = tube.start(), sum(map(len, tube.pods))
    for _ in range(total + 1):
        end = plan_batch(tube, offset, Budget(pods, ids, backfill, of_task))
        for before, after in zip(offset.places, end.places, strict=True):
            assert of_task is None or after.pods - before.pods <= 2 * of_task, "regular ones, and backfill ones"
        if end == offset:
            break
        offset = end
    assert offset.pods == total


def test_what_one_partition_leaves_goes_to_the_others() -> None:
    end = plan_batch(tube_of((100, 0), (3, 0), (0, 0)), TubeOffset.beginning(3), Budget(30, None, 10))
    assert [place.pods for place in end.places] == [27, 3, 0]


def test_regular_pods_of_all_partitions_go_before_backfill() -> None:
    end = plan_batch(tube_of((0, 100), (50, 100)), TubeOffset.beginning(2), Budget(52, None, 20))
    assert [place.pods for place in end.places] == [1, 51]


def test_partitions_take_turns_at_coming_first() -> None:
    tube = tube_of((50, 0), (50, 0), (50, 0))
    offset = tube.start()
    for _ in range(3):
        offset = plan_batch(tube, offset, Budget(1))
    assert [place.pods for place in offset.places] == [1, 1, 1]
    assert shares(7, 3) == [3, 2, 2]


@given(tubes, st.integers(1, 20))
def test_plan_all_gets_everything_from_a_daemon_that_gives_little_at_once(tube: Tube, most: int) -> None:
    tube.most = most
    assert plan_all(tube, tube.start()).pods == sum(map(len, tube.pods))
    assert plan_all(tube, tube.start(), at_once=3) == plan_all(tube, tube.start())


def test_an_available_now_run_ends_although_regular_pods_keep_coming() -> None:
    tube = tube_of((5, 30), (5, 0))
    budget = Budget(4, None, 2)
    target = Goal([place.cursor for place in plan_all(tube, tube.start()).places])
    offset, seq = tube.start(), 10_000
    batches = 0
    while not target.reached(offset):
        batches += 1
        assert batches < 40
        offset = plan_batch(tube, offset, target.budget(offset, budget))
        for mine in tube.pods:  # more than a micro-batch may hold comes between two of them
            mine.extend((seq := seq + 1, False) for _ in range(5))


def planned(tube: Tube, budget: Budget) -> list[int]:
    """The pods of each partition in one batch."""
    return [place.pods for place in plan_batch(tube, tube.start(), budget).places]


def test_ids_and_backfill_pods_are_shared_and_pass_on_only_from_a_partition_without_pods() -> None:
    assert planned(tube_of((10, 0), (10, 0)), Budget(20, ids=4)) == [2, 2]
    assert planned(tube_of((1, 0), (9, 0)), Budget(4, ids=10)) == [1, 3]
    assert planned(tube_of((1, 0), (9, 0)), Budget(20, ids=4)) == [1, 2]
    assert planned(tube_of((0, 0), (9, 0)), Budget(20, ids=4)) == [0, 4]
    assert planned(tube_of((0, 9), (0, 9)), Budget(20, ids=20, backfill=4)) == [2, 2]
    assert planned(tube_of((1, 0), (0, 9)), Budget(20, ids=20, backfill=4)) == [1, 2]
    assert planned(tube_of((0, 0), (0, 9)), Budget(20, ids=20, backfill=4)) == [0, 4]
    assert planned(tube_of((5, 5)), Budget(10)) == [10]
    assert planned(tube_of((5, 5)), Budget(10, None, 2)) == [7]
    assert planned(tube_of((5, 5)), Budget(10, ids=3)) == [3]


def test_a_partition_without_a_share_is_not_asked_and_the_first_ones_get_the_rest() -> None:
    tube = tube_of((5, 0), (5, 0))
    assert planned(tube, Budget(20, ids=1)) == [1, 0]
    assert tube.asked == [Part(0, 2)]
    assert planned(tube_of((50, 0), (50, 0), (50, 0)), Budget(2)) == [1, 1, 0]


def test_plan_all_leaves_backfill_pods_out_if_it_is_asked_to() -> None:
    tube = tube_of((5, 7), (2, 1))
    assert plan_all(tube, tube.start(), backfill=0).pods == 7
    assert plan_all(tube, tube.start(), backfill=0, at_once=2).pods == 7


def test_a_goal_is_reached_by_both_cursors_of_each_of_its_partitions() -> None:
    tube = tube_of((5, 7), (2, 1))
    offset = plan_all(tube, tube.start())
    cursors = [place.cursor for place in offset.places]
    assert Goal(cursors).reached(offset)
    assert not Goal(cursors[:1]).reached(offset)
    for further in (Cursor(cursors[0].regular + 1, 0), Cursor(0, cursors[0].backfill + 1)):
        assert not Goal([further, cursors[1]]).reached(offset)
        assert not Goal([cursors[0], Cursor(further.regular + 99, 0)]).reached(offset)


def test_the_number_of_pods_is_limited_until_the_regular_ones_have_been_read() -> None:
    tube = tube_of((5, 7), (2, 1))
    offset, budget = plan_all(tube, tube.start()), Budget(4, 9, 2)
    cursors = [place.cursor for place in offset.places]
    ahead = Cursor(cursors[1].regular + 1, 0)
    assert Goal([cursors[0], ahead]).budget(offset, budget) is budget
    assert Goal(cursors).budget(offset, budget) == Budget(2 * MOST_PODS, None, 2)
