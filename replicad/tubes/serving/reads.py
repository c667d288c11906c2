"""Answers PODS: plans a read, waits where there is nothing yet, and sends the pods. Few pods come with the plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from replicad.daemon.service import Peer
from replicad.errors import CursorAhead, DatabaseError, DatabaseUnavailable
from replicad.protocol.tokens import Cursor
from replicad.tubes.bulk import Want
from replicad.tubes.commands import ARROW, CursorAt, Pods
from replicad.tubes.pods import Bounds, Span
from replicad.tubes.serving.books import Books
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.renewals import Renewals
from replicad.tubes.serving.waiters import JUST_NOW, Waiter, Waiters

MAX_LIMIT = 100_000  # pods in one answer; a worker that wants more asks again
DEFAULT_LIMIT = 1000

StillServed = Callable[[str], Awaitable[object]]
"""Raises UnknownTube, or TubeRefused if the tube can no longer be served."""


@dataclass(frozen=True, slots=True)
class Planned:
    """How far an answer goes. `lines`: its pods, if they were read already."""

    at: CursorAt
    lines: bytes = b""


class Reads:
    """The reads of all clients."""

    def __init__(
        self,
        books: Books,
        waiters: Waiters,
        readiness: Readiness,
        renewals: Renewals,
        *,
        still_served: StillServed,
        partitions: Callable[[str], int | None],
    ) -> None:
        """`partitions`: the number of partitions of a tube, if known."""
        self._pods = books.pods
        self._bulk = books.blocks
        self._waiters = waiters
        self._readiness = readiness
        self._renewals = renewals
        self._still_served = still_served
        self._partitions = partitions

    async def plan(self, peer: Peer, command: Pods, wait: float) -> Planned:
        """How far the answer goes, and how many pods it has. Waits up to `wait` seconds if there are none.

        Raises:
            CursorAhead, LeaseLost, PartitionsChanged, UnknownTube, TubeRefused: it cannot be answered.
        """
        await self.check(command.tube, command.after)
        if command.upto is not None:
            await self.check(command.tube, command.upto)
            return Planned(CursorAt(command.tube, command.part, command.upto, 0))
        if not wait:
            return await self._plan(command)
        until = trio.current_time() + wait
        return await (self._plan_or_want(peer, command, until) if command.ready else self._plan_or_wait(command, until))

    async def send(self, peer: Peer, command: Pods, upto: Cursor) -> int:
        """Send the pods that are planned; returns how many. Raises LeaseLost, also after some."""
        target = command.tube, command.part, command.term
        renew = partial(self._renewals.renew_if_due, *target)
        if command.encoding == ARROW:
            return await self._bulk.send(Want(*target, command.after, upto, command.payload), peer.send, renew)
        return await self._pods.lines(*target, Span(command.after, upto), sink=peer.send, renew=renew)

    async def check(self, tube: str, cursor: Cursor) -> None:
        """Refuse a cursor above the position: pods can still appear below it, and a read behind it would skip them."""
        position = await self._waiters.position(tube)
        if max(cursor.regular, cursor.backfill) > position:
            raise CursorAhead(
                f"cursor {cursor} lies beyond the position {position} of tube {tube}; use cursors from CURSOR answers"
            )

    async def _plan_or_want(self, peer: Peer, command: Pods, until: float) -> Planned:
        """The plan; if it has no pods, READY follows."""
        tube, part, after = command.tube, command.part, command.after
        read_to = self._read_to(command)
        self._readiness.want_pods(peer, tube, part, until, read_to)  # first: pods may come while it is planned
        if read_to is not None:
            return Planned(CursorAt(tube, part, after, 0))
        wanted = False
        try:
            planned = await self._plan(command)
            wanted = not planned.at.pods
            return planned
        finally:
            if not wanted:
                self._readiness.drop(peer, tube, part)

    async def _plan_or_wait(self, command: Pods, until: float) -> Planned:
        tube, part, term = command.tube, command.part, command.term
        came = trio.Event()
        waiter = Waiter(tube, part, came.set, self._read_to(command))
        with self._waiters.waiting(waiter), self._renewals.waiting(tube, term):
            if waiter.read_to is not None:
                with trio.move_on_at(min(until, trio.current_time() + JUST_NOW, self._renewals.due(tube, term))):
                    await came.wait()
                await self._still_served(tube)
                came = trio.Event()
                waiter.wake, waiter.read_to = came.set, None
            while True:
                planned = await self._plan(command)
                if planned.at.pods:
                    return planned
                while not came.is_set():
                    if trio.current_time() >= until:
                        return planned  # nothing came since it was planned
                    with trio.move_on_at(min(until, max(self._renewals.due(tube, term), trio.current_time()))):
                        await came.wait()
                    await self._renewals.renew_waiting(tube, part, term)
                await self._still_served(tube)
                came = trio.Event()
                waiter.wake = came.set

    def _read_to(self, command: Pods) -> int | None:
        """The position up to which nothing is behind the request's cursor, as its lease has read just now."""
        if command.part.partitions != self._partitions(command.tube):
            return None
        return self._waiters.take_end(command.tube, command.part, command.term, command.after)

    async def _plan(self, command: Pods) -> Planned:
        tube, part, term, after = command.tube, command.part, command.term, command.after
        limit = min(DEFAULT_LIMIT if command.limit is None else command.limit, MAX_LIMIT)
        bounds = Bounds(await self._waiters.position(tube), limit, command.ids, command.backfill)
        as_lines = not command.plan and command.encoding != ARROW
        if as_lines and part.partitions == self._partitions(tube):
            try:
                short = await self._pods.short(tube, part, term, after, bounds)
            except DatabaseUnavailable:
                raise
            except DatabaseError:  # the plan tells what is wrong
                short = None
            if short is not None:
                self._waiters.note_end(tube, part, term, short[0].cursor, bounds.position)
                return Planned(*short)
        return Planned(await self._pods.plan(tube, part, term, after, bounds))
