"""The deadlines of all sessions, which one task works off: PINGs to be sent, clients that are too late.

A timer or a task for each of ten thousand idle connections would cost more than the connections themselves. Deadlines
within EARLY seconds of each other share a slot of a timer wheel. The task wakes when a slot begins and handles all that
is in it, so PINGs go out up to so much early. What ends before its deadline leaves nothing behind: small things that a
crowd leaves for a minute keep the memory of the whole crowd from going back to the system.
"""

from __future__ import annotations

import time
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import trio

from replicad.protocol.commands import Ping

if TYPE_CHECKING:
    from replicad.daemon.session import Session

EARLY = 0.05  # seconds; what a PING may come before it is due: a hundredth of its interval
SLICE = 50  # sessions that are handled before other tasks run: less than a millisecond
EMPTY = 20  # slots without members that the heap may have, beside as many as have members


class _Slot:
    """The members whose deadlines lie within EARLY seconds from its begin."""

    __slots__ = ("begin", "members")

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.members: set[Session] = set()


class Deadlines:
    """Each member is in the slot of the time at which it must be called next. A member without a deadline is in no
    slot.
    """

    def __init__(self) -> None:
        self._slots: dict[float, _Slot] = {}  # by their begin; slots with members
        self._heap: list[float] = []  # begins of the slots, and of some removed ones
        self._slot_of: dict[Session, _Slot] = {}
        self._sooner = trio.Event()  # set when a deadline is earlier than all that `run` knew
        self._sleeps_until = float("-inf")
        self._ping = b""
        self._ping_at = float("-inf")

    def __len__(self) -> int:
        """How many members have a deadline."""
        return len(self._slot_of)

    @property
    def remembered(self) -> int:
        """How many slots it keeps; of the empty slots it removes all but a few."""
        return len(self._heap)

    def set(self, member: Session, deadline: float) -> None:
        """Call `member.mind` at the deadline, or before, if an earlier deadline was set already."""
        slot = self._slot_of.get(member)
        if slot is None or deadline < slot.begin:
            self._put(member, deadline)

    def forget(self, member: Session) -> None:
        """Call it no more; safe to repeat."""
        slot = self._slot_of.pop(member, None)
        if slot is None:
            return
        slot.members.discard(member)
        if not slot.members and self._slots.get(slot.begin) is slot:
            del self._slots[slot.begin]
            if len(self._heap) > 2 * len(self._slots) + EMPTY:
                self._heap = list(self._slots)
                heapify(self._heap)

    def ping(self, now: float) -> bytes:
        """The line of a PING, rendered once for all that are sent within EARLY seconds."""
        if now >= self._ping_at + EARLY:
            # PING carries the sender's wall-clock time in ms, as in Synapse. Nothing depends on it.
            self._ping = f"{Ping(str(int(time.time() * 1000))).render()}\n".encode()
            self._ping_at = now
        return self._ping

    async def run(self) -> None:
        """Call the members until cancelled."""
        while True:
            if self._heap:
                self._sleeps_until = max(self._heap[0], trio.current_time() + EARLY / 2)
            else:
                self._sleeps_until = float("inf")
            if self._sooner.is_set():
                self._sooner = trio.Event()
            with trio.move_on_at(self._sleeps_until):
                await self._sooner.wait()
            await self._call_due()

    async def _call_due(self) -> None:
        now = trio.current_time()
        due: list[Session] = []  # taken out first: a deadline that is set again may be in the same slot
        while self._heap and self._heap[0] <= now:
            slot = self._slots.pop(heappop(self._heap), None)
            if slot is not None:
                due += slot.members
        for done, member in enumerate(due, start=1):
            if member in self._slot_of:  # else it was forgotten meanwhile
                self._put(member, member.mind(now))
            if done % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def _put(self, member: Session, deadline: float) -> None:
        self.forget(member)
        if deadline == float("inf"):
            return
        begin = int(deadline / EARLY) * EARLY
        slot = self._slots.get(begin)
        if slot is None:
            slot = self._slots[begin] = _Slot(begin)
            heappush(self._heap, begin)
        slot.members.add(member)
        self._slot_of[member] = slot
        if begin < self._sleeps_until:
            self._sooner.set()
