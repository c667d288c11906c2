"""The pure part of positions: single rules by example, and all of them together against a simulated Postgres.

The simulation knows what the product must find out: which ids can still appear. Whatever is published is checked
against it, with a poll split into its statements and writers let loose in between. Each rule is then broken in the
simulation's own poller (never in the product), to show that the simulation would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.positions.lockwatch import Hold, LockWatch, TableWatch
from tests.lengths import examples


def fed(watch: LockWatch, last_value: int, *holds: Hold, writers: tuple[str, ...] = ()) -> int | None:
    """One poll of a server that flushes everything at once."""
    watch.feed(last_value, last_value, holds, writers)
    watch.flushed_upto(last_value)
    return watch.position


def test_position_is_the_last_value_when_nobody_holds() -> None:
    watch = LockWatch(published=0)
    assert fed(watch, 7) == 7


def test_new_holder_keeps_the_position_at_the_last_value_before_it_was_listed() -> None:
    watch = LockWatch(published=0)
    fed(watch, 5)
    assert fed(watch, 9, Hold("a")) == 5
    assert fed(watch, 12, Hold("a"), Hold("b")) == 5
    assert watch.lowest == "a"
    assert fed(watch, 13, Hold("b")) == 9
    assert fed(watch, 13) == 13


def test_a_second_list_of_the_same_poll_lets_go_what_only_a_short_transaction_held() -> None:
    watch = LockWatch(published=0)
    fed(watch, 5)
    assert fed(watch, 9, Hold("short")) == 5
    assert watch.held_newly
    assert fed(watch, 9, Hold("later")) == 9
    assert fed(watch, 12, Hold("later")) == 9
    assert watch.lowest == "later"
    assert not watch.held_newly


def test_holders_at_the_first_poll_have_the_published_position_as_their_bound() -> None:
    watch = LockWatch(published=4)
    assert fed(watch, 9, Hold("old")) == 4
    assert fed(watch, 9) == 9


def test_without_a_published_position_nothing_is_published_while_older_transactions_are_open() -> None:
    watch = LockWatch()
    assert fed(watch, 9, Hold("old")) is None
    assert fed(watch, 12, Hold("old"), Hold("new")) is None
    assert watch.lowest == "old"
    assert fed(watch, 12, Hold("new")) == 9


def test_prepared_transaction_takes_the_lowest_bound_of_the_poll_before() -> None:
    watch = LockWatch(published=0)
    fed(watch, 3)
    fed(watch, 5, Hold("a"))
    fed(watch, 8, Hold("a"), Hold("b"))
    assert fed(watch, 9, Hold("-1/77", prepared=True), Hold("b")) == 3


def test_reservation_counts_by_its_own_bound_even_at_the_first_poll() -> None:
    watch = LockWatch()
    assert fed(watch, 9, Hold("r", bound=6)) == 6


def test_reservation_that_changes_hands_keeps_counting_by_its_own_bound() -> None:
    watch = LockWatch(published=0)
    assert fed(watch, 20, Hold("writer", bound=5)) == 5
    assert fed(watch, 40, Hold("who inserts its id", bound=5)) == 5


def test_reservation_locked_late_does_not_pull_the_position_back() -> None:
    watch = LockWatch(published=0)
    fed(watch, 20)
    assert fed(watch, 21, Hold("r", bound=10)) == 20


def test_reservation_that_another_session_takes_over_keeps_its_old_bound() -> None:
    watch = LockWatch(published=0)
    fed(watch, 6, Hold("w:5", bound=5))
    fed(watch, 100, Hold("w:5", bound=5))
    assert fed(watch, 101, Hold("c:5", bound=5)) == 5


def test_known_writer_holds_back_only_itself_and_an_unknown_holder_everybody() -> None:
    watch = LockWatch(published=0)
    names = ("A", "B")
    fed(watch, 5, writers=names)
    fed(watch, 9, Hold("a", writer="A"), writers=names)
    assert (watch.position, watch.per_writer) == (5, {"A": 5, "B": 9})
    fed(watch, 12, Hold("a", writer="A"), Hold("x", writer="psql"), writers=names)
    assert (watch.position, watch.per_writer) == (5, {"A": 5, "B": 9})
    fed(watch, 12, Hold("x", writer="psql"), writers=names)
    assert (watch.position, watch.per_writer) == (9, {"A": 9, "B": 9})


def test_holder_that_changes_its_name_holds_back_everybody_from_then_on() -> None:
    watch = LockWatch(published=0)
    names = ("A", "B")
    fed(watch, 5, writers=names)
    fed(watch, 9, Hold("h", writer="A"), writers=names)
    fed(watch, 12, Hold("h", writer="B"), writers=names)
    assert watch.per_writer == {"A": 5, "B": 9}
    fed(watch, 15, Hold("h", writer="B"), writers=names)
    assert watch.per_writer == {"A": 5, "B": 9}


def test_writer_that_prepares_its_transaction_still_holds_back_only_itself() -> None:
    watch = LockWatch(published=0)
    names = ("A", "B")
    fed(watch, 5, writers=names)
    fed(watch, 9, Hold("h", writer="A"), writers=names)
    fed(watch, 12, Hold("h", prepared=True), writers=names)
    assert watch.per_writer == {"A": 5, "B": 12}


def test_unflushed_last_value_is_not_published_until_the_wal_is_on_disk() -> None:
    watch = LockWatch(published=3)
    watch.feed(8, 1000, ())
    watch.flushed_upto(999)
    assert (watch.position, watch.waits_for_flush) == (3, True)
    watch.feed(9, 1100, ())
    watch.flushed_upto(1050)
    assert watch.position == 8
    watch.all_flushed()
    assert (watch.position, watch.waits_for_flush) == (9, False)


def test_last_value_that_rests_is_flushed_when_its_first_reading_was() -> None:
    watch = LockWatch(published=3)
    watch.feed(8, 1000, ())
    watch.feed(8, 5000, ())
    watch.flushed_upto(1000)
    assert watch.position == 8


def test_last_value_below_the_published_position_ends_the_watch_until_it_begins_anew() -> None:
    watch = LockWatch(published=50)
    assert fed(watch, 60) == 60
    fed(watch, 7)
    assert watch.went_back
    fed(watch, 90)
    watch.restart()
    fed(watch, 95)
    assert (watch.went_back, watch.position) == (True, 60), "climbing back, or a lost connection, makes nothing good"


def test_a_watch_that_begins_anew_waits_for_the_transactions_that_saw_both_sides() -> None:
    watch = LockWatch(published=7)
    assert fed(watch, 9, Hold("a")) == 7
    assert fed(watch, 12) == 12


def test_last_value_below_what_one_writer_was_published_to_ends_the_watch_too() -> None:
    watch = LockWatch(published=5, per_writer={"A": 5, "B": 40})
    fed(watch, 30, writers=("A", "B"))
    assert watch.went_back


def test_last_value_that_fell_but_not_below_the_position_makes_all_bounds_fall_to_the_position() -> None:
    watch = LockWatch(published=5)
    watch.feed(30, 900, ())  # nothing of this is flushed
    watch.flushed_upto(0)
    watch.feed(20, 100, (Hold("a"),))
    watch.flushed_upto(100)
    assert (watch.position, watch.went_back) == (5, False)


def test_after_a_restart_unpublished_readings_no_longer_count() -> None:
    watch = LockWatch(published=5)
    watch.feed(30, 900, ())
    watch.flushed_upto(0)
    watch.restart()
    assert fed(watch, 35, Hold("a")) == 5


def test_memory_stays_bounded_while_nothing_is_ever_flushed() -> None:
    watch = LockWatch(published=0)
    for k in range(10_000):
        watch.feed(k, k + 1, ())
    watch.flushed_upto(5_000)
    assert watch.position is not None
    assert watch.position <= 5_000
    watch.all_flushed()
    assert watch.position == 9_999


def test_published_positions_of_a_table_are_passed_on_when_flushed() -> None:
    watch = TableWatch()
    watch.feed({"A": 5, "B": 9}, 100)
    watch.flushed_upto(99)
    assert watch.position is None
    watch.flushed_upto(100)
    assert (watch.position, watch.per_writer, watch.lowest, watch.went_back) == (5, {"A": 5, "B": 9}, "A", False)


def test_late_writer_in_a_positions_table_does_not_pull_the_position_back_but_a_falling_one_ends_the_watch() -> None:
    watch = TableWatch(published=5, per_writer={"A": 5})
    watch.feed({"A": 8, "new": 1}, 1)
    watch.flushed_upto(1)
    assert (watch.position, watch.per_writer, watch.went_back) == (5, {"A": 8, "new": 5}, False)
    watch.feed({"A": 6, "new": 7}, 2)
    watch.flushed_upto(2)
    watch.feed({"A": 9, "new": 9}, 3)
    watch.flushed_upto(3)
    assert (watch.position, watch.went_back) == (5, True)


# --- the simulation --------------------------------------------------------------------------------


@dataclass
class Transaction:
    key: str
    writer: str | None  # its application_name
    instance: str  # whose rows it writes; only a name that is a writer's tells that
    ids: list[int] = field(default_factory=list)
    holds: bool = False
    prepared: bool = False
    reserved: int | None = None  # bound of its reservation, in worlds that reserve


@dataclass
class World:
    """A table, its sequence, its WAL and the transactions that write to it."""

    rng: Random
    reserving: bool = False
    flushing: float = 0.7  # how likely a commit or a poll flushes the WAL
    last_value: int = 0
    wal: int = 0
    flushed: int = 0
    durable: int = 0  # last_value as it was at `flushed`
    names: int = 0
    open: list[Transaction] = field(default_factory=list)

    def steps(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            self.step()

    def step(self) -> None:
        """One thing that some writer does."""
        action = self.rng.choice(
            ("begin", "lock", "lock", "id", "id", "id", "end", "end", "savepoint", "prepare", "flush")
        )
        chosen = self.rng.choice(self.open) if self.open else None
        if action == "begin" and len(self.open) < 5:
            self.names += 1
            writer, instance = self.rng.choice((("A", "A"), ("B", "B"), ("psql", "A"), ("psql", "B")))
            self.open.append(Transaction(f"3/{self.names}", writer, instance))
        elif action == "flush" and self.rng.random() < self.flushing:
            self.flush()
        elif chosen is not None:
            self.act(action, chosen)

    def act(self, action: str, chosen: Transaction) -> None:
        if action == "lock" and not chosen.prepared and not chosen.holds:
            if self.reserving and chosen.reserved is None:
                chosen.reserved = self.last_value  # read, then others may run before the lock is there
            else:
                chosen.holds = True
        elif action == "id" and chosen.holds and not chosen.prepared:
            self.last_value += 1
            chosen.ids.append(self.last_value)
            self.wal += 1
        elif action == "prepare" and chosen.holds and not chosen.prepared:
            chosen.prepared, chosen.writer = True, None
            if self.rng.random() < 0.5:
                self.names += 1
                chosen.key = f"-1/{self.names}"
            self.wal += 1
            self.flush()
        elif action == "savepoint" and not chosen.prepared:
            chosen.ids.clear()  # rolled back; in Postgres the lock goes with the savepoint that took it
            chosen.holds, chosen.reserved = False, None
        elif action == "end":
            self.end(chosen, commit=self.rng.random() < 0.6)

    def end(self, chosen: Transaction, *, commit: bool) -> None:
        self.open.remove(chosen)
        if commit:
            self.wal += 1
            if chosen.ids and self.rng.random() < self.flushing:  # the others have synchronous_commit = off
                self.flush()

    def flush(self) -> None:
        self.flushed, self.durable = self.wal, self.last_value

    def crash(self) -> None:
        """All but prepared transactions are gone, and so is what was not flushed."""
        self.open = [t for t in self.open if t.prepared]
        self.wal, self.last_value = self.flushed, self.durable

    def holders(self) -> list[Hold]:
        return [Hold(t.key, t.writer, t.prepared, t.reserved) for t in self.open if t.holds]


class Poller:
    """Statement by statement; subclasses below break one rule each."""

    def __init__(self, world: World, between: Callable[[], None], *, published: int | None = 0) -> None:
        self.world, self.between = world, between
        self.watch = LockWatch(published)

    def poll(self) -> None:
        last_value, wal = self.world.last_value, self.world.wal
        self.between()
        self.feed(last_value, wal, self.list_holders())
        if self.watch.held_newly:
            self.flush()
            self.feed(last_value, wal, self.list_holders())
        self.flush()

    def list_holders(self) -> list[Hold]:
        holders = self.world.holders()
        self.between()
        return holders

    def feed(self, last_value: int, wal: int, holders: list[Hold]) -> None:
        self.watch.feed(last_value, wal, holders, ("A", "B"))

    def flush(self) -> None:
        self.watch.flushed_upto(self.world.flushed)
        if self.watch.waits_for_flush and self.world.rng.random() < self.world.flushing:
            self.world.flush()
            self.watch.all_flushed()

    def reconnect(self) -> None:
        self.watch.restart()


class Violation(Exception):
    """A position was published that is not true."""


def run(seed: int, poller_type: type[Poller] = Poller, *, reserving: bool = False, start: int = 0) -> None:
    """Random steps, polls and crashes, then peace. Raises Violation. `start`: steps before the first poll."""
    rng = Random(seed)
    world = World(rng, reserving, rng.choice((0.1, 0.7)))
    poller = poller_type(world, lambda: world.steps(3), published=rng.choice((0, None)))
    world.steps(start)
    seen: dict[str | None, int] = {None: 0, "A": 0, "B": 0}
    for _ in range(60):
        if rng.random() < 0.03:
            world.crash()
            world.steps(20)
            poller.reconnect()
            check_nothing_published_is_issued_again(world, seen)
        world.steps(3)
        poller.poll()
        check(world, poller.watch, seen)
    for transaction in list(world.open):
        world.end(transaction, commit=True)
    poller.between = lambda: None
    world.flush()
    poller.poll()
    check(world, poller.watch, seen)
    if seen != dict.fromkeys((None, "A", "B"), world.last_value):
        raise Violation(f"all is quiet at {world.last_value}, but {seen} are published")


def check_nothing_published_is_issued_again(world: World, seen: dict[str | None, int]) -> None:
    if world.last_value < max(seen.values()):
        raise Violation(f"after a crash {world.last_value + 1} is issued again, published up to {seen}")


def check(world: World, watch: LockWatch, seen: dict[str | None, int]) -> None:
    positions: dict[str | None, int] = {None: watch.position if watch.position is not None else 0, **watch.per_writer}
    for name, position in positions.items():
        if position < seen[name] or watch.went_back:
            raise Violation(f"{name} went back to {position} from {seen[name]}")
        seen[name] = position
        for transaction in world.open:
            late = [n for n in transaction.ids if n <= position]
            if late and name in (None, transaction.instance):
                raise Violation(f"{late} can still appear at or below {position} of {name}")
    check_nothing_published_is_issued_again(world, seen)


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 30))
def test_no_published_position_is_ever_untrue(seed: int, reserving: bool, start: int) -> None:
    run(seed, reserving=reserving, start=start)


class LocksBeforeLastValue(Poller):
    def poll(self) -> None:
        holders = self.list_holders()
        last_value, wal = self.world.last_value, self.world.wal
        self.between()
        self.feed(last_value, wal, holders)
        self.flush()


class TornRead(Poller):
    def feed(self, last_value: int, wal: int, holders: list[Hold]) -> None:
        ahead = 3 if self.world.rng.random() < 0.1 else 0
        super().feed(last_value + ahead, wal, holders)


class FreshBoundForPrepared(Poller):
    def list_holders(self) -> list[Hold]:
        return [Hold(hold.key, hold.writer) for hold in super().list_holders()]


class FirstPollTakesHoldersForNew(Poller):
    def poll(self) -> None:
        if self.watch.last_value is None:
            self.watch.feed(self.world.last_value, self.world.wal, (), ("A", "B"))
        super().poll()


class BlindToPrepared(Poller):
    def list_holders(self) -> list[Hold]:
        return [hold for hold in super().list_holders() if not hold.prepared]


class PublishesUnflushed(Poller):
    def flush(self) -> None:
        self.watch.all_flushed()


class KeepsBoundsOverACrash(Poller):
    def reconnect(self) -> None:
        pass


class ForgetsBounds(Poller):
    def list_holders(self) -> list[Hold]:
        return [Hold(f"{hold.key}@{self.world.wal}", hold.writer) for hold in super().list_holders()]


class TakesEveryHolderForAWriter(Poller):
    def list_holders(self) -> list[Hold]:
        return [Hold(h.key, h.writer if h.writer in ("A", "B") else "A", h.prepared) for h in super().list_holders()]


@pytest.mark.parametrize(
    "broken",
    [
        LocksBeforeLastValue,
        TornRead,
        FreshBoundForPrepared,
        FirstPollTakesHoldersForNew,
        BlindToPrepared,
        PublishesUnflushed,
        KeepsBoundsOverACrash,
        ForgetsBounds,
        TakesEveryHolderForAWriter,
    ],
)
def test_simulation_notices_when_a_rule_is_broken(broken: type[Poller]) -> None:
    def violated(seed: int) -> bool:
        try:
            run(seed, broken, start=10)
        except Violation:
            return True
        return False

    assert any(violated(seed) for seed in range(1000))


# --- single statements, each of which a mutant has shown to be untested (docs/dev/mutants.md) ---


def test_a_new_watch_knows_no_holder_and_waits_for_nothing() -> None:
    for watch in (LockWatch(), LockWatch(published=4), TableWatch(), TableWatch(published=4)):
        assert watch.lowest is None
        assert not watch.waits_for_flush
    assert LockWatch().held_newly is False


def test_a_published_position_needs_no_flush_at_the_begin_and_after_a_restart() -> None:
    watch = LockWatch(published=5)
    watch.feed(5, 100, ())
    assert not watch.waits_for_flush
    watch.feed(9, 200, ())
    assert watch.waits_for_flush
    watch.flushed_upto(200)
    watch.restart()
    assert watch.held_newly is False
    watch.feed(9, 300, ())
    assert not watch.waits_for_flush


def test_a_writer_that_holds_since_before_the_first_poll_stays_at_the_published_position() -> None:
    watch = LockWatch(published=4)
    assert fed(watch, 9, Hold("old", writer="a"), writers=("a", "b")) == 4
    assert watch.per_writer == {"a": 4, "b": 9}


def test_bounds_that_pass_to_another_name_count_once_the_wal_is_on_disk() -> None:
    for later in (Hold("p", prepared=True), Hold("t", writer="b")):
        watch = LockWatch(published=0)
        watch.feed(5, 50, (), ("a", "b"))
        watch.feed(9, 90, [Hold("t", writer="a")], ("a", "b"))
        watch.feed(9, 95, [later], ("a", "b"))
        assert watch.position == 0
        watch.all_flushed()
        assert watch.position == 5


def test_a_reservation_holds_back_its_own_writer_only() -> None:
    watch = LockWatch(published=0)
    fed(watch, 5, writers=("a", "b"))
    fed(watch, 9, Hold("r", writer="a", bound=6), writers=("a", "b"))
    assert watch.per_writer == {"a": 6, "b": 9}


def test_the_position_of_a_writer_never_falls_and_begins_at_the_common_one() -> None:
    watch = LockWatch(published=0)
    fed(watch, 5, writers=("a", "b"))
    fed(watch, 9, Hold("x", writer="b"), writers=("a", "b"))
    assert watch.per_writer == {"a": 9, "b": 5}
    fed(watch, 10, Hold("x", writer="b"), Hold("r", writer="a", bound=7), writers=("a", "b"))
    assert watch.per_writer == {"a": 9, "b": 5}
    watch = LockWatch(published=9)
    fed(watch, 10, Hold("r", writer="c", bound=3), writers=("c",))
    assert (watch.position, watch.per_writer) == (9, {"c": 9})


def test_a_holder_of_whom_nothing_is_known_is_below_every_bound() -> None:
    watch = LockWatch()
    fed(watch, -1, Hold("r", bound=-5), Hold("old"))
    assert watch.lowest == "old"


def test_a_table_without_rows_says_nothing_and_a_row_that_vanishes_is_no_fall() -> None:
    watch = TableWatch()
    watch.feed({"a": 3, "b": 5}, 1)
    watch.all_flushed()
    assert (watch.position, watch.lowest) == (3, "a")
    watch.feed({}, 2)
    watch.all_flushed()
    watch.feed({"b": 5, "a": 4}, 3)
    watch.feed({"b": 5, "a": 4}, 9)  # the same once more
    watch.flushed_upto(3)
    assert not watch.waits_for_flush
    assert (watch.position, watch.went_back, watch.lowest) == (4, False, "a")
    watch.feed({"b": 5}, 10)
    watch.all_flushed()
    assert (watch.position, watch.went_back, watch.lowest) == (5, False, None)


def test_a_table_behind_what_was_published_has_gone_back_and_a_late_writer_has_not() -> None:
    watch = TableWatch(published=5, per_writer={"a": 9})
    watch.feed({"a": 7}, 1)
    watch.all_flushed()
    assert watch.went_back
    watch = TableWatch()
    for rows in ({"z": 3, "b": 5}, {"z": 3, "b": 5, "c": 1}, {"z": 3, "b": 5, "c": 2}):
        watch.feed(rows, 1)
        watch.all_flushed()
        assert not watch.went_back
    assert watch.per_writer == {"z": 3, "b": 5, "c": 3}
    assert watch.lowest == "c"
    watch.feed({"z": 6, "b": 6, "c": 6}, 2)
    watch.all_flushed()
    assert (watch.position, watch.lowest) == (6, None)
