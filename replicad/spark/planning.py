"""How much of a tube goes into the next micro-batch, divided fairly over its partitions.

Asks a daemon for plans through one callable; knows neither sockets nor Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from replicad.protocol.tokens import Cursor
from replicad.spark.offsets import Place, TubeOffset
from replicad.tubes.commands import CursorAt, Part

MOST_PODS = 100_000  # what we ask for at once where there is no limit; a daemon may give fewer
_ROUNDS = 3  # in which what some partitions leave of the budget is offered to the others; each costs them a round trip


class Ask(Protocol):
    """Asks where reading would get to: PODS with plan=1 (see `protocol.tubing.Pods`)."""

    def __call__(
        self,
        part: Part,
        after: Cursor,
        *,
        limit: int,
        ids: int | None = None,
        backfill: int | None = None,
        wait: float = 0.0,
    ) -> CursorAt: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """What one micro-batch may hold: pods, ids (about), and backfill pods among the pods. None: no limit of its own."""

    pods: int
    ids: int | None = None
    backfill: int | None = None


def plan_batch(ask: Ask, start: TubeOffset, budget: Budget) -> TubeOffset:
    """The end of the micro-batch that begins at `start`; `start` itself where there is nothing.

    Every partition gets its share, and what one leaves goes to the others. Regular pods go before backfill
    pods, across all partitions too.
    """
    plan = _Plan(ask, list(start.places), start.pods)
    if len(start.places) == 1 or budget.ids is not None:
        plan.fill_at_once(budget)
    else:
        left = plan.fill(budget.pods, regular=True)
        plan.fill(left if budget.backfill is None else min(left, budget.backfill), regular=False)
    return plan.end


def plan_all(ask: Ask, start: TubeOffset, backfill: int | None = None, *, at_once: int = 1) -> TubeOffset:
    """The end of everything that there is now behind `start`; `backfill=0` leaves backfill pods out.

    `at_once` partitions are asked about at the same time, from as many threads.
    """

    def to_the_end(number: int) -> Place:
        return _to_the_end(ask, start.part(number), start.places[number], backfill)

    numbers = range(start.partitions)
    if min(at_once, len(numbers)) <= 1:
        return TubeOffset(tuple(map(to_the_end, numbers)))
    with ThreadPoolExecutor(at_once) as pool:
        return TubeOffset(tuple(pool.map(to_the_end, numbers)))


def shares(total: int, count: int) -> list[int]:
    """Divide `total` into `count` whole shares that differ by one at most, the larger ones first."""
    small, larger = divmod(total, count)
    return [small + (number < larger) for number in range(count)]


class _Plan:
    """A plan in the making: the places reached so far. `turn` says which partition comes first this time."""

    def __init__(self, ask: Ask, places: list[Place], turn: int) -> None:
        self._ask = ask
        self._places = places
        count = len(places)
        self._order = [(turn + number) % count for number in range(count)]

    @property
    def end(self) -> TubeOffset:
        return TubeOffset(tuple(self._places))

    def fill(self, total: int, *, regular: bool) -> int:
        """Share `total` pods out to the partitions; returns what nobody wanted.

        Whatever a partition leaves goes to the next one, and what is left then to those that took all they were
        offered.
        """
        hungry = self._order
        for _ in range(_ROUNDS):
            if not total or not hungry:
                break
            carried, still = 0, []
            for number, share in zip(hungry, shares(total, len(hungry)), strict=True):
                offered = share + carried
                got = self._advance(number, offered, None, 0 if regular else offered)
                carried = max(0, offered - got)
                if got >= offered:
                    still.append(number)
            total, hungry = carried, still
        return total

    def fill_at_once(self, budget: Budget) -> None:
        """One answer from each partition. It does not say how many ids or backfill pods it has,
        only that it has none.
        """
        count = len(self._order)
        carried = [0, 0, 0]
        for number, *three in zip(
            self._order,
            shares(budget.pods, count),
            shares(budget.ids or 0, count),
            shares(budget.backfill or 0, count),
            strict=True,
        ):
            pods, ids, backfill = (share + more for share, more in zip(three, carried, strict=True))
            may_read = ids > 0 or budget.ids is None
            got = self._advance(
                number,
                pods if may_read else 0,
                None if budget.ids is None else ids,
                None if budget.backfill is None else backfill,
            )
            carried = [pods - got, *((0, 0) if got else (ids, backfill))]

    def _advance(self, number: int, pods: int, ids: int | None, backfill: int | None) -> int:
        """Take up to `pods` more from a partition; returns how many there were."""
        if not pods:
            return 0
        place = self._places[number]
        got = self._ask(Part(number, len(self._places)), place.cursor, limit=pods, ids=ids, backfill=backfill)
        self._places[number] = place.advanced(got.cursor, got.pods)
        return got.pods


def _to_the_end(ask: Ask, part: Part, place: Place, backfill: int | None) -> Place:
    """Everything that a partition has now. It ends although writers go on:
    the first answer that is not full is the last.
    """
    full = 1
    while True:
        got = ask(part, place.cursor, limit=MOST_PODS, backfill=backfill)
        place = place.advanced(got.cursor, got.pods)
        if got.pods < full:
            return place
        full = got.pods


@dataclass(frozen=True, slots=True)
class Goal:
    """Where an AvailableNow query ends: what was there when it began. `cursors` by partition."""

    cursors: Sequence[Cursor]

    def reached(self, offset: TubeOffset) -> bool:
        """Whether all of it has been read. With another number of partitions by now, it has not."""
        return len(self.cursors) == len(offset.places) and all(
            place.cursor.regular >= aim.regular and place.cursor.backfill >= aim.backfill
            for place, aim in zip(offset.places, self.cursors, strict=True)
        )

    def budget(self, offset: TubeOffset, budget: Budget) -> Budget:
        """The budget of the next micro-batch on the way there.

        Regular pods that arrive meanwhile go first, as always; so that they cannot keep the backfill waiting for ever,
        they count against the budget only until the regular pods of the beginning are done.
        """
        regular_left = any(
            place.cursor.regular < aim.regular for place, aim in zip(offset.places, self.cursors, strict=True)
        )
        return budget if regular_left else replace(budget, pods=MOST_PODS * len(self.cursors), ids=None)
