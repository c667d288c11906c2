"""What a worker was doing when its process ended, kept in Postgres for the worker that gets the partition after it.

An id for which the user's function ends the process (out of memory, `os._exit`, a crash of a library) raises nothing,
and would end every worker after it. So the worker stores a note with each partition (ATTEMPT). At a clean end it says
so. A worker that finds another note is *careful* until it has processed what the worker before may have read:

1. It stores the ids of each call before the call, and calls with few ids.
2. If it ends as well, the next one makes the ids of these calls alone, each while no other call runs in the process.
3. An id with which the process has ended ENDS times, alone, is parked.

So such an id ends four processes, and everything else is processed. A lease that was lost during a call counts like an
end: a call that blocks the event loop does not let the lease be renewed.

The note also has how often ids have failed alone. So an id that always fails is parked after its tries, however often
its partition moves from one worker to the next meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import anyio

from replicad.client.async_client import AsyncClient
from replicad.client.ledger import Touch
from replicad.errors import DownstreamError
from replicad.eventlog import get_logger
from replicad.tubes.commands import Part

ENDS = 2  # of processes, with one id alone, before it is parked: one may have been stopped for another reason
CAREFUL_IDS = 128  # in all calls of a careful partition at a time: they are tried one by one after another end
CAREFUL_ROWS = 250_000  # processed under a lease, after which a worker is careful no more: more are not read ahead
MOST_KEPT = 300  # ids in a note, so that it fits into a line
MOST_TRIES = 2000  # failing ids in the note at an end: up to 400 kB of a line, which may have 1 MB
LONGEST_KEY = 32  # characters of an id in a note; of a longer id its hash is kept

log = get_logger(__name__)


def row_key(touch: Touch) -> str:
    """The name of an id in a note."""
    return _short(f"{touch.shard}/{touch.id}")


def control_key(seq: int) -> str:
    """The name of a control pod in a note."""
    return f"control/{seq}"


def _short(key: str) -> str:
    return key if len(key) <= LONGEST_KEY else sha256(key.encode()).hexdigest()[:LONGEST_KEY]


class Turns:
    """The calls of the user's functions in one process: many at a time, or one alone."""

    def __init__(self) -> None:
        self._running = 0
        self._alone = 0  # that run or wait
        self._changed: anyio.Event | None = None  # while somebody waits: a worker may be made outside of its loop

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """A call during the block. `alone`: no other call runs meanwhile."""
        self._alone += alone
        try:
            while self._running if alone else self._alone:
                self._changed = self._changed or anyio.Event()
                await self._changed.wait()
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            self._alone -= alone
            if self._changed is not None:
                self._changed.set()
                self._changed = None


class Attempts:
    """The notes of one partition, under one lease."""

    def __init__(self, client: AsyncClient, tube: str, part: Part, tries: dict[str, int]) -> None:
        """`tries`: how often ids have failed alone, by `row_key`. `begin` adds those of the readers before."""
        self._tries = tries
        self._client = client
        self._tube = tube
        self._part = part
        self._term = 0
        self._running: Counter[str] = Counter()  # the keys of calls under way
        self._alone = False
        self._suspects: set[str] = set()
        self._ends: dict[str, int] = {}
        self._asked = self._written = 0  # notes
        self._writing = anyio.Lock()
        self._left = CAREFUL_ROWS
        self.careful = False

    async def begin(self, term: int) -> None:
        """Read the note of the reader before, and store a note of this one. Raises ReplicadError."""
        before = await self._client.attempt(self._tube, self._part, term) or {"clean": True}
        self._tries.update(_numbers(before.get("tries")))
        if not before.get("clean"):
            self.careful = True
            calls = _keys(before.get("calls"))
            self._ends = _numbers(before.get("ends"))
            self._suspects = {*_keys(before.get("suspects")), *calls}
            if before.get("alone") and len(calls) == 1:
                self._ends[calls[0]] = self._ends.get(calls[0], 0) + 1
            tell = log.info if before.get("given_back") else log.warning
            tell(
                "reader_is_careful" if before.get("given_back") else "reader_ended_uncleanly",
                tube=self._tube,
                part=str(self._part),
                calls=calls[:10],
                ends=self._ends,
            )
        self._term = term
        await self._write()

    def last_note(self) -> dict[str, Any] | None:
        """The note of a clean end. None if `begin` has not read the note before, which stays then.

        A reader that is still careful has not processed all that the reader before it may have read.
        """
        if not self._term:
            return None
        note = self._note() | {"given_back": True} if self.careful else {"clean": True}
        return note | self._most_tries(MOST_TRIES)

    def is_suspect(self, key: str) -> bool:
        """Whether the process before may have ended because of this id: it is processed alone."""
        return key in self._suspects

    def verdict(self, key: str) -> DownstreamError | None:
        """Why this id is parked without a call; None if it is not."""
        ends = self._ends.get(key, 0)
        if ends < ENDS:
            return None
        return DownstreamError(
            f"{ends} processes of workers have ended, or have lost their lease, while only this was processed"
        )

    @asynccontextmanager
    async def call(self, keys: Sequence[str], *, alone: bool = False) -> AsyncIterator[None]:
        """A call with these ids during the block. Raises ReplicadError if they could not be stored before it."""
        if not self.careful:
            yield
            return
        self._running.update(keys)
        self._alone = alone
        try:
            await self._write()
            yield
        finally:
            self._running.subtract(keys)
            self._running = +self._running
            self._alone = False
        self.forget(keys)
        self._left -= len(keys)

    def forget(self, keys: Iterable[str]) -> None:
        """These ids were processed or parked, so they have ended no process."""
        for key in keys:
            self._suspects.discard(key)
            self._ends.pop(key, None)

    async def relax(self, *, empty: bool) -> None:
        """Be careful no more, if all that the reader before has read was processed. `empty`: nothing is left to do."""
        if self.careful and (empty or self._left <= 0):
            self.careful = False
            self._suspects, self._ends = set(), {}
            await self._write()

    async def _write(self) -> None:
        """Store the present state. Calls that wait for one another's notes are stored with one request."""
        self._asked += 1
        mine = self._asked
        async with self._writing:
            if self._written < mine:
                newest, note = self._asked, self._note()
                await self._client.attempt(self._tube, self._part, self._term, note)
                self._written = newest

    def _note(self) -> dict[str, Any]:
        note: dict[str, Any] = {"clean": False}
        if self._running:
            note["calls"] = list(self._running)[:MOST_KEPT]
            note["alone"] = self._alone
        if self._suspects:
            note["suspects"] = list(self._suspects)[: MOST_KEPT - len(note.get("calls", ()))]
        if self._ends:
            note["ends"] = dict(list(self._ends.items())[:50])
        return note | self._most_tries(MOST_KEPT)

    def _most_tries(self, most: int) -> dict[str, Any]:
        tries = self._tries
        kept = tries if len(tries) <= most else dict(heapq.nlargest(most, tries.items(), key=lambda item: item[1]))
        return {"tries": kept} if kept else {}


def _keys(found: Any) -> list[str]:
    return [str(key) for key in found] if isinstance(found, list) else []


def _numbers(found: Any) -> dict[str, int]:
    return {str(key): int(number) for key, number in found.items()} if isinstance(found, dict) else {}
