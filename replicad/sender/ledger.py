"""Writes down how destinations stand, many in one statement: whoever comes while one runs goes with the next.

So a thousand destinations cost a handful of commits and not a thousand. The last word on a destination counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from replicad.sender.store import Entry

MOST = 1000  # entries in a statement: enough to make the commit's cost small beside theirs


class Writing(Protocol):
    """What the ledger needs of the store."""

    async def write(self, entries: list[Entry]) -> None:
        """Write the entries down, all or none."""


@dataclass(slots=True)
class _Batch:
    entries: dict[str, Entry] = field(default_factory=dict)
    written: trio.Event = field(default_factory=trio.Event)


class Ledger:
    """See the module. `run` does the writing; when it raises, nothing that waits is ever told that it was written."""

    def __init__(self, store: Writing) -> None:
        self._store = store
        self._next = _Batch()
        self._running: _Batch | None = None
        self._work = trio.Event()

    def post(self, entry: Entry) -> None:
        """Have an entry written soon. One for the same destination that still waits is replaced."""
        before = self._next.entries.get(entry.name)
        if before is not None and before.done_edus:
            entry = replace(entry, done_edus=before.done_edus + entry.done_edus)
        self._next.entries[entry.name] = entry
        self._work.set()

    async def write(self, entry: Entry) -> None:
        """Have an entry written; returns when it is."""
        self.post(entry)
        await self._next.written.wait()

    async def settle(self, name: str) -> None:
        """Wait until nothing about a destination waits to be written."""
        for batch in (self._running, self._next):
            if batch is not None and name in batch.entries:
                await batch.written.wait()

    async def drain(self) -> None:
        """Wait until nothing at all waits to be written."""
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
        """Write all that waits now; only for `run`, and for the end when `run` has ended."""
        self._running, self._next = self._next, _Batch()
        entries = list(self._running.entries.values())
        for start in range(0, len(entries), MOST):
            await self._store.write(entries[start : start + MOST])
        self._running.written.set()
        self._running = None
