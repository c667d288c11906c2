"""The deadlines of all sessions, which one task works off: PINGs to be sent, clients that are too late.

A timer or a task for each of ten thousand idle connections would cost more than the connections themselves. The task
wakes at most once in EARLY seconds and handles together what is due by then. PINGs go out up to so much early. Sessions
that were sent a PING together have one deadline from then on, so the heap has a hundredth of their number.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from typing import Any, Protocol

import trio

from replicad.protocol.commands import Ping

EARLY = 0.05  # seconds; what a PING may come before it is due: a hundredth of its interval
SLICE = 50  # sessions that are handled before other tasks run: less than a millisecond


class Punctual(Protocol):
    """What has deadlines."""

    def mind(self, now: float) -> float:
        """Do what is due at `now`, PINGs also EARLY seconds before; returns the next deadline. Never raises."""


class Deadlines:
    """One entry for each member: the time at which it must be called next."""

    def __init__(self) -> None:
        self._heap: list[float] = []  # the keys of `_due`
        self._due: dict[float, list[list[Any]]] = {}  # [deadline, member]; no member: it was replaced
        self._entries: dict[Punctual, list[Any]] = {}
        self._sooner = trio.Event()  # set when a deadline comes before those that `run` knew
        self._sleeps_until = float("-inf")
        self._ping = b""
        self._ping_at = float("-inf")

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, member: Punctual, deadline: float) -> None:
        """Call `member.mind` at the deadline, or before, if one that is earlier was set already."""
        entry = self._entries.get(member)
        if entry is None or deadline < entry[0]:
            self._put(member, deadline)

    def forget(self, member: Punctual) -> None:
        """Call it no more; safe to repeat."""
        entry = self._entries.pop(member, None)
        if entry is not None:
            entry[1] = None

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
        called: list[list[Any]] = []  # entered afterwards: a deadline within EARLY must not come up again
        while self._heap and self._heap[0] <= now + EARLY:
            for entry in self._due.pop(heappop(self._heap)):
                member: Punctual | None = entry[1]
                if member is None:
                    continue
                entry[0] = member.mind(now)
                called.append(entry)
                if len(called) % SLICE == 0:
                    await trio.lowlevel.checkpoint()
        for entry in called:
            if entry[1] is not None:  # else its member was forgotten meanwhile, or has another one
                self._enter(entry)

    def _put(self, member: Punctual, deadline: float) -> None:
        self.forget(member)
        self._entries[member] = entry = [deadline, member]
        self._enter(entry)
        if deadline < self._sleeps_until:
            self._sooner.set()

    def _enter(self, entry: list[Any]) -> None:
        deadline = entry[0]
        together = self._due.get(deadline)
        if together is None:
            self._due[deadline] = [entry]
            heappush(self._heap, deadline)
        else:
            together.append(entry)
