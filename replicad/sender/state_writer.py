"""Stores the state of destinations, many in one statement. Entries that come while one runs go into the next.

So a thousand destinations cost a few commits and not a thousand. Of each destination the last entry counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from replicad.sender.store import Entry

MOST = 1000  # entries in a statement, so that the cost of a commit is small


class Writing(Protocol):
    """The method of the store that this needs."""

    async def write(self, entries: list[Entry]) -> None:
        """Store the entries, all or none."""


@dataclass(slots=True)
class _Batch:
    entries: dict[str, Entry] = field(default_factory=dict)
    written: trio.Event = field(default_factory=trio.Event)


class StateWriter:
    """See the module. `run` writes. If it raises, calls of `write` that wait never return."""

    def __init__(self, store: Writing) -> None:
        self._store = store
        self._next = _Batch()
        self._running: _Batch | None = None
        self._work = trio.Event()

    def post(self, entry: Entry) -> None:
        """Write an entry soon. It replaces one for the same destination that still waits."""
        before = self._next.entries.get(entry.name)
        if before is not None:
            entry = replace(entry, done_edus=before.done_edus + entry.done_edus, parked=before.parked + entry.parked)
        self._next.entries[entry.name] = entry
        self._work.set()

    async def write(self, entry: Entry) -> None:
        """Write an entry; returns when it is stored."""
        self.post(entry)
        await self._next.written.wait()

    async def settle(self, name: str) -> None:
        """Wait until no entry of a destination waits to be written."""
        for batch in (self._running, self._next):
            if batch is not None and name in batch.entries:
                await batch.written.wait()

    async def drain(self) -> None:
        """Wait until no entry waits to be written."""
        while self.waiting:
            await (self._running or self._next).written.wait()

    @property
    def waiting(self) -> int:
        """Entries that are not written yet."""
        return len(self._next.entries) + (len(self._running.entries) if self._running else 0)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self.flush()

    async def flush(self) -> None:
        """Write all entries now. Only for `run`, and after `run` has ended."""
        self._running, self._next = self._next, _Batch()
        entries = list(self._running.entries.values())
        for start in range(0, len(entries), MOST):
            await self._store.write(entries[start : start + MOST])
        self._running.written.set()
        self._running = None
