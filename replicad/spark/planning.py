"""How many pods of each partition of a tube go into the next micro-batch.

Asks a daemon for plans through one callable. Knows neither sockets nor Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from replicad.protocol.tokens import Cursor
from replicad.spark.offsets import TubeCursor, TubeOffset
from replicad.tubes.commands import CursorAt, Part

MOST_PODS = 100_000  # pods per request if there is no limit; a daemon may answer with fewer
_ROUNDS = 3  # of dividing the rest of the budget among partitions that have more; each costs them a round trip


Ask = Callable[..., CursorAt]  # with the arguments of `TubeHold.plan`


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one micro-batch: pods, ids (about), and backfill pods among the pods. None: no separate limit.

    `ids_of_task` is a limit for each partition, about: its regular pods may have so many, and its backfill pods too.
    """

    pods: int
    ids: int | None = None
    backfill: int | None = None
    ids_of_task: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The unread pods of all partitions together: their number, and whether there are backfill pods among them."""

    pods: int
    backfill: bool


def plan_batch(ask: Ask, start: TubeOffset, budget: Budget, waiting: Waiting | None = None) -> TubeOffset:
    """The end of the micro-batch that begins at `start`; `start` itself if there are no pods.

    Every partition gets an equal share; what one does not use goes to the others. The regular pods of all partitions
    come before the backfill pods of any. With `waiting` no more is asked when so many pods were found.
    """
    plan = _Plan(ask, list(start.places), start.pods, budget.ids_of_task)
    if len(start.places) == 1 or budget.ids is not None:
        plan.fill_at_once(budget)
    else:
        left = plan.fill(budget.pods, regular=True, enough=None if waiting is None else waiting.pods)
        if waiting is not None and not waiting.backfill:
            return plan.end
        plan.fill(left if budget.backfill is None else min(left, budget.backfill), regular=False)
    return plan.end


def plan_all(ask: Ask, start: TubeOffset, backfill: int | None = None, *, at_once: int = 1) -> TubeOffset:
    """The end of all pods that there are now behind `start`; `backfill=0` leaves backfill pods out.

    `at_once` partitions are planned at the same time, in as many threads.
    """

    def to_the_end(number: int) -> TubeCursor:
        return _to_the_end(ask, start.part(number), start.places[number], backfill)

    numbers = range(start.partitions)
    if min(at_once, len(numbers)) <= 1:
        return TubeOffset(tuple(map(to_the_end, numbers)))
    with ThreadPoolExecutor(at_once) as pool:
        return TubeOffset(tuple(pool.map(to_the_end, numbers)))


def shares(total: int, count: int) -> list[int]:
    """Divide `total` into `count` integers that differ by one at most, the larger ones first."""
    small, larger = divmod(total, count)
    return [small + (number < larger) for number in range(count)]


class _Plan:
    """An unfinished plan: the places reached so far. `turn` chooses the partition that comes first. `most_ids` is a
    limit for each question.
    """

    def __init__(self, ask: Ask, places: list[TubeCursor], turn: int, most_ids: int | None) -> None:
        self._ask = ask
        self._most_ids = most_ids
        self._places = places
        count = len(places)
        self._order = [(turn + number) % count for number in range(count)]

    @property
    def end(self) -> TubeOffset:
        return TubeOffset(tuple(self._places))

    def fill(self, total: int, *, regular: bool, enough: int | None = None) -> int:
        """Divide `total` pods among the partitions; returns how many were not used.

        The unused share of a partition goes to the next partition. The rest at the end of a round goes to the
        partitions that used all of their share. There are no more than `enough` pods; None: not known.
        """
        began, unfinished, taken = list(self._places), self._order, 0
        for _ in range(_ROUNDS):
            if not total or not unfinished:
                break
            carried, full = 0, []
            for number, share in zip(unfinished, shares(total, len(unfinished)), strict=True):
                offered = share + carried
                got = self._advance_more(began[number], number, offered, regular=regular)
                carried = max(0, offered - got)
                taken += got
                if enough is not None and taken >= enough:
                    return 0
                if got >= offered:
                    full.append(number)
            total, unfinished = carried, full
        return total

    def fill_at_once(self, budget: Budget) -> None:
        """Ask each partition once. An answer does not give the number of ids or backfill pods, so their shares pass to
        the next partition only if this partition has no pods.
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

    def _advance_more(self, began: TubeCursor, number: int, pods: int, *, regular: bool) -> int:
        """`_advance` in a round of several. With a limit of ids for a task the partition is asked again from where
        the first round `began`: asked from where it is, it would get that many ids in each round.
        """
        if not pods or self._most_ids is None:
            return self._advance(number, pods, None, 0 if regular else pods)
        so_far = self._places[number]
        had = so_far.pods - began.pods
        self._places[number] = began
        got = self._advance(number, had + pods, None, 0 if regular else had + pods) - had
        if got <= 0:
            self._places[number] = so_far
        return max(0, got)

    def _advance(self, number: int, pods: int, ids: int | None, backfill: int | None) -> int:
        """Take up to `pods` more from a partition; returns how many there were."""
        if not pods:
            return 0
        place = self._places[number]
        ids = min((one for one in (ids, self._most_ids) if one is not None), default=None)
        got = self._ask(Part(number, len(self._places)), place.cursor, limit=pods, ids=ids, backfill=backfill)
        self._places[number] = place.advanced(got.cursor, got.pods)
        return got.pods


def _to_the_end(ask: Ask, part: Part, place: TubeCursor, backfill: int | None) -> TubeCursor:
    """The end of a partition now. It stops at the first answer that is not full, so writers cannot prolong it."""
    full = 1
    while True:
        got = ask(part, place.cursor, limit=MOST_PODS, backfill=backfill)
        place = place.advanced(got.cursor, got.pods)
        if got.pods < full:
            return place
        full = got.pods


@dataclass(frozen=True, slots=True)
class Goal:
    """Where an AvailableNow query ends: behind the pods that were there when it began. `cursors` by partition."""

    cursors: Sequence[Cursor]

    def reached(self, offset: TubeOffset) -> bool:
        """Whether all of them have been read. False if the number of partitions has changed."""
        return len(self.cursors) == len(offset.places) and all(
            place.cursor.regular >= aim.regular and place.cursor.backfill >= aim.backfill
            for place, aim in zip(offset.places, self.cursors, strict=True)
        )

    def budget(self, offset: TubeOffset, budget: Budget) -> Budget:
        """The budget of the next micro-batch.

        Regular pods that arrive meanwhile come before backfill pods and could delay them for ever. So the number of
        pods is limited only until the regular pods that were there when the query began have been read.
        """
        regular_left = any(
            place.cursor.regular < aim.regular for place, aim in zip(offset.places, self.cursors, strict=True)
        )
        return budget if regular_left else replace(budget, pods=MOST_PODS * len(self.cursors), ids=None)
