"""Answers PODS: plans a read, waits where there is nothing yet, and sends the pods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from replicad.daemon.service import Peer
from replicad.errors import CursorAhead
from replicad.protocol.tokens import Cursor
from replicad.tubes.bulk import Want
from replicad.tubes.commands import ARROW, CursorAt, Pods
from replicad.tubes.pods import Span
from replicad.tubes.serving.books import Books
from replicad.tubes.serving.readiness import Readiness
from replicad.tubes.serving.renewals import Renewals
from replicad.tubes.serving.waiters import Waiter, Waiters

MAX_LIMIT = 100_000  # pods in one answer; a worker that wants more asks again
DEFAULT_LIMIT = 1000

StillServed = Callable[[str], Awaitable[object]]
"""Raises UnknownTube, or TubeRefused if the tube can no longer be served."""


class Reads:
    """The reads of all clients."""

    def __init__(
        self, books: Books, waiters: Waiters, readiness: Readiness, renewals: Renewals, still_served: StillServed
    ) -> None:
        self._pods = books.pods
        self._bulk = books.blocks
        self._waiters = waiters
        self._readiness = readiness
        self._renewals = renewals
        self._still_served = still_served

    async def plan(self, peer: Peer, command: Pods, wait: float) -> CursorAt:
        """How far the answer goes, and how many pods it has. Waits up to `wait` seconds if there are none.

        Raises:
            CursorAhead, LeaseLost, PartitionsChanged, UnknownTube, TubeRefused: it cannot be answered.
        """
        await self.check(command.tube, command.after)
        if command.upto is not None:
            await self.check(command.tube, command.upto)
            return CursorAt(command.tube, command.part, command.upto, 0)
        if not wait:
            return await self._plan(command)
        until = trio.current_time() + wait
        return await (self._plan_or_want(peer, command, until) if command.ready else self._plan_or_wait(command, until))

    async def send(self, peer: Peer, command: Pods, upto: Cursor) -> int:
        """Send the pods up to the cursor; returns how many. Raises LeaseLost, also after some."""
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

    async def _plan_or_want(self, peer: Peer, command: Pods, until: float) -> CursorAt:
        """The plan; if it has no pods, READY follows."""
        self._readiness.want_pods(peer, command.tube, command.part, until)  # first: pods may come while it is planned
        wanted = False
        try:
            planned = await self._plan(command)
            wanted = not planned.pods
            return planned
        finally:
            if not wanted:
                self._readiness.drop(peer, command.tube, command.part)

    async def _plan_or_wait(self, command: Pods, until: float) -> CursorAt:
        tube, part, term = command.tube, command.part, command.term
        came = trio.Event()
        waiter = Waiter(tube, part, came.set)
        with self._waiters.waiting(waiter), self._renewals.waiting(tube, term):
            while True:
                planned = await self._plan(command)
                if planned.pods:
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

    async def _plan(self, command: Pods) -> CursorAt:
        return await self._pods.plan(
            command.tube,
            command.part,
            command.term,
            command.after,
            await self._waiters.position(command.tube),
            limit=min(DEFAULT_LIMIT if command.limit is None else command.limit, MAX_LIMIT),
            ids=command.ids,
            backfill=command.backfill,
        )
