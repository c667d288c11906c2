"""Which ids a partition gives to the user's function next, and what becomes of the ids for which it failed.

It decides only: it calls nothing, sleeps for nothing, and gets the time as an argument.

A *trial* is a call with some ids. A trial of several ids that failed is divided, until each failing id is alone. An id
that failed alone is tried again after growing pauses, and parked after `tries`. A trial that waits for its time holds
no place, so failing ids delay the others only by their calls.

Ids that have failed alone and are due at the same time are tried again *together*, up to TOGETHER of them in one call.
Such a trial is not divided when it fails: it counts as one failure of each id. The first try and the last one before an
id is parked are alone, so no id is parked because of another. So a thousand failing ids cost two thousand calls and a
few more, however many tries they have.

An id may be parked only while other calls succeed, because when everything fails, the downstream is probably
unavailable. If only failing ids are left, one id that was processed before is processed once more: its success shows
that the downstream works. (A worker may process any id again at any time; pods are delivered at least once.)

After DOUBT failures in a row it is *in doubt*: one call at a time, with one id, and a growing pause between two calls.
The ids come from all that were read, because the oldest ids may be the ones that always fail.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import count
from random import random

from replicad.client.attempts import row_key
from replicad.client.ledger import IdQueue, Ledger, Touch
from replicad.retry import Backoff

TOGETHER = 50  # ids that have failed alone, in one call: a failing id costs two calls more at most
DOUBT = 32  # failed calls in a row without a success, after which calls are made one at a time
SOON = 0.001  # seconds
DOUBT_GROWTH = 1.15  # of the pause between two calls: with one good id in 40 it is found within two minutes


@dataclass(slots=True)
class Trial:
    """A call with these ids. `lane`: the queue that they come from; None: they have failed before.

    `tries`: how often the one id has failed alone; `before`: the number of successes when its first try alone began,
    and `began`: when the present call began. `again`: the id was processed before, and is processed once more.
    `probe`: the call began in doubt. `alone`: no other call runs in the process meanwhile. `apart`: it is not tried
    together with others. `members`: the trials that are tried together in this one.
    """

    touches: Sequence[Touch]
    lane: IdQueue | None = None
    tries: int = 0
    before: int = 0
    began: int = 0
    again: bool = False
    probe: bool = False
    alone: bool = False
    apart: bool = False
    members: Sequence[Trial] = ()


@dataclass(order=True, slots=True)
class _Timed:
    due: float
    number: int
    trial: Trial = field(compare=False)


class Triage:
    """The trials of one partition, under one lease."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        places: int,
        batch_ids: int,
        tries: int,
        backoff: Backoff,
        without_proof: Callable[[], bool],
        chance: Callable[[], float] = random,
    ) -> None:
        """`places`: calls at the same time. `tries` 0: nothing is parked.

        `without_proof` is asked when the only id in the ledger has failed `tries` times and no call has succeeded.
        `chance` gives numbers in [0, 1).
        """
        self._ledger = ledger
        self._places = places
        self._most = batch_ids
        self._tries = tries
        self._backoff = backoff
        self._without_proof = without_proof
        self._chance = chance
        self._size = batch_ids  # of the next new trial: halved by a failure, doubled by a success
        self._parts: deque[Trial] = deque()  # of failed trials of several ids
        self._alone: list[_Timed] = []  # a heap
        self._unproven: list[_Timed] = []  # a heap: failed `tries` times, and no call has succeeded since the first
        self._number = count()
        self._running: dict[IdQueue | None, int] = {IdQueue.LIVE: 0, IdQueue.BACKFILL: 0, None: 0}
        self._turn = 0
        self._in_a_row = 0  # failures since the last success
        self._next_probe = 0.0
        self._probes = 0  # failures of probes since it is in doubt
        self._proof: Touch | None = None  # an id that was processed
        self._proof_at = 0.0
        self.successes = 0
        self.failing: dict[str, int] = {}  # by `row_key`: how often ids have failed alone, also under leases before
        self.most = batch_ids  # ids in a trial
        self.is_suspect: Callable[[Touch], bool] | None = None  # whether an id is tried alone

    @property
    def in_doubt(self) -> bool:
        """Whether so many calls failed in a row that the downstream may be unavailable."""
        return self._in_a_row >= DOUBT

    def due(self) -> float:
        """When `next` may return a trial although nothing else has happened."""
        times = [timed[0].due for timed in (self._alone, self._unproven) if timed]
        if self.in_doubt and (self._parts or any(map(self._ledger.waiting, IdQueue))):
            return self._next_probe
        if self._proof is not None and (self._unproven or self.in_doubt):
            times.append(self._proof_at)
        if self.in_doubt:
            return max(self._next_probe, min(times, default=float("inf")))
        return min(times, default=float("inf"))

    def next(self, now: float) -> Trial | None:
        """The trial to begin now; None if there is none, or no place for it. `succeeded` or `failed` ends it."""
        running = sum(self._running.values())
        if running >= self._places:
            return None
        self._turn += 1
        if not self.in_doubt:
            trial = self._choose(now)
        elif running or now < self._next_probe:
            return None
        else:
            trial = self._probe(now)
        if trial is not None:
            trial.began, trial.probe = self.successes, self.in_doubt
            self._running[trial.lane] += 1
        return trial

    def _choose(self, now: float) -> Trial | None:
        """The next trial while calls succeed.

        Live ids may have every place. Backfills and failed ids leave one place free for live ids, so that a live id
        does not wait for the end of a long call. One place is for failed ids, even if live ids never end.
        """
        failed = self._has_failed(now)
        if failed and not self._running[None] and (self._places > 1 or self._turn % 2):
            return self._take_failed(now)
        if self._ledger.waiting(IdQueue.LIVE):
            return self._take_new(IdQueue.LIVE)
        others = self._running[IdQueue.BACKFILL] + self._running[None]
        if others and others >= self._places - 1:
            return None
        backfill = self._ledger.waiting(IdQueue.BACKFILL)
        if failed and (not backfill or self._running[None] < self._running[IdQueue.BACKFILL]):
            return self._take_failed(now)
        return self._take_new(IdQueue.BACKFILL) if backfill else None

    def _has_failed(self, now: float) -> bool:
        if self._parts or any(timed and timed[0].due <= now for timed in (self._alone, self._unproven)):
            return True
        return bool(self._unproven) and self._proof is not None and self._proof_at <= now

    def _take_failed(self, now: float) -> Trial:
        if self._unproven and self._proof_at <= now and (proof := self._take_proof()) is not None:
            return proof
        if self._parts and (self._turn % 5 or not self._alone or self._alone[0].due > now):  # there may be good ids
            return self._parts.popleft()
        heap = min((timed for timed in (self._alone, self._unproven) if timed), key=lambda timed: timed[0])
        first = heapq.heappop(heap).trial
        return self._join_others(first, now) if heap is self._alone and self._may_join(first) else first

    def _may_join(self, trial: Trial) -> bool:
        """Whether ids are tried again together: not for the last time, and without a limit every second time."""
        last = trial.tries + 1 >= self._tries if self._tries else trial.tries % 2 == 0
        return not (last or trial.alone or trial.apart)

    def _join_others(self, first: Trial, now: float) -> Trial:
        """A trial with the ids that are due as well and may be tried together."""
        members, most = [first], min(TOGETHER, self.most)
        while (
            self._alone and len(members) < most and self._alone[0].due <= now and self._may_join(self._alone[0].trial)
        ):
            members.append(heapq.heappop(self._alone).trial)
        if len(members) == 1:
            return first
        return Trial([trial.touches[0] for trial in members], members=members)

    def _take_proof(self) -> Trial | None:
        """The id that was processed before, once more; None if there is none, or if it was touched meanwhile."""
        proof, self._proof = self._proof, None
        return Trial((proof,), again=True) if proof is not None and self._ledger.borrow(proof) else None

    def _take_new(self, lane: IdQueue) -> Trial:
        newest = self._in_a_row > 0 and self._turn % 2 == 0  # the ids behind the ids that fail may be good
        touches = self._ledger.take(min(self._size, self.most), lane, newest=newest)
        if self.is_suspect is not None:
            suspects = [touch for touch in touches if self.is_suspect(touch)]
            self._parts.extend(Trial((touch,), alone=True) for touch in suspects)
            touches = [touch for touch in touches if touch not in suspects]
        return Trial(touches, lane) if touches else self._parts.popleft()

    def _probe(self, now: float) -> Trial | None:
        """One id of all that wait. New ids, ids of failed trials, and ids that have failed alone take turns.

        An id that was processed before is the best probe, if there is one.
        """
        if self._proof_at <= now and (proof := self._take_proof()) is not None:
            return proof
        new = [lane for lane in IdQueue if self._ledger.waiting(lane)]
        timed = [heap for heap in (self._alone, self._unproven) if heap and heap[0].due <= now]
        kinds = [kind for kind, found in (("new", new), ("part", self._parts), ("alone", timed)) if found]
        if not kinds:
            return None
        match kinds[self._turn % len(kinds)]:
            case "new":
                return Trial(self._ledger.take(1, new[self._any_of(new)], newest=self._chance() < 0.5))
            case "part":
                place = self._any_of(self._parts)
                touches = list(self._parts[place].touches)
                one = touches.pop(self._any_of(touches))
                alone = self._parts[place].alone
                self._parts[place].touches = touches
                if not touches:
                    del self._parts[place]
                return Trial((one,), alone=alone)
            case _:
                return heapq.heappop(min(timed, key=lambda heap: heap[0])).trial

    def _any_of(self, many: Sized) -> int:
        return int(self._chance() * len(many))

    # --- outcomes ---

    def succeeded(self, trial: Trial, now: float, *, slow: bool = False) -> None:
        """The call has processed its ids. `slow`: a longer call might exceed its time limit."""
        self._end(trial)
        self.successes += 1
        self._in_a_row = 0
        self._proof = trial.touches[-1]
        if self.failing:
            for touch in trial.touches:
                self.failing.pop(row_key(touch), None)
        if trial.lane is not None and not slow:
            self._size = min(self._most, max(self._size, 2 * len(trial.touches)))
        unproven, self._unproven = self._unproven, []
        for timed in unproven:
            self._wait(self._alone, now, timed.trial)

    def failed(self, trial: Trial, now: float, *, tries: int = 1, hung: bool = False) -> bool:
        """The call has failed. True: park its one id, which is not tried again.

        `tries`: for how many failures it counts. `hung`: it has exceeded its time limit.
        """
        self._end(trial)
        self._in_a_row += 1
        if self._in_a_row == DOUBT:
            self._probes = 0
            self._next_probe = now if self._proof is not None else now + self._backoff.first / 10
        elif trial.probe:
            self._probes += 1
            pause = self._backoff.first / 10 * DOUBT_GROWTH ** min(self._probes, 100)
            self._next_probe = now + min(self._backoff.cap, pause)
        if trial.again:
            self._proof, self._proof_at = trial.touches[0], self._next_probe + SOON  # the next probe is another id
            return False
        for member in trial.members:
            member.apart = hung
            self._failed_alone(member, now, 1)
        if trial.members:
            return False
        ids = len(trial.touches)
        if trial.lane is not None:
            self._size = max(1, min(self._size, ids) // 2)
        if ids > 1:
            step = 1 if hung else max(1, min(ids // 2, self._size))
            self._parts.extend(Trial(trial.touches[at : at + step]) for at in range(0, ids, step))
            return False
        if not trial.tries:
            trial.before = trial.began
        trial.lane = None
        return self._failed_alone(trial, now, tries)

    def _failed_alone(self, trial: Trial, now: float, tries: int) -> bool:
        """The one id of the trial has failed, for so many tries. True: park it."""
        key = row_key(trial.touches[0])
        self.failing[key] = trial.tries = max(trial.tries, self.failing.get(key, 0)) + tries
        enough = 0 < self._tries <= trial.tries
        if enough and (self.successes > trial.before or (self._ledger.rows <= 1 and self._without_proof())):
            return True
        self._wait(self._unproven if enough else self._alone, now + self._backoff.whole(trial.tries - 1), trial)
        return False

    def drop(self, trial: Trial) -> None:
        """The ids of a trial are parked without a call."""
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        self._running[trial.lane] -= 1
        if trial.again:
            self._ledger.give_back(trial.touches[0])

    def _wait(self, heap: list[_Timed], due: float, trial: Trial) -> None:
        heapq.heappush(heap, _Timed(due, next(self._number), trial))
