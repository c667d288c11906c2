"""What a worker has passed on in each generation of its tube's history, and what it is told after a fork.

A generation is a stretch of history that did not fork (docs/positions.md). After a fork the daemon answers which
touches are unknown: the worker has passed them on, and the present history may not have them. The user's `on_fork` is
called with them, until it returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio

from replicad.client.async_client import AsyncClient
from replicad.eventlog import get_logger
from replicad.loops import calling
from replicad.tubes.commands import Seen


@dataclass(frozen=True, slots=True)
class TubeFork:
    """After a fork of history, the touches with a seq in (after, upto] are unknown.

    The worker has passed them on, so their changes are downstream; the database may not have them. `since`: when it was
    certain for the last time that it had all touches. `state`: `unknown`, run `replicad tubes backfill` for all shards
    to bring the downstream up to date; `scheduled`, these backfills are scheduled; `healed`, they are done.
    """

    tube: str
    after: int
    upto: int
    since: datetime | None
    state: str


OnFork = Callable[[TubeFork], Awaitable[None]]

log = get_logger(__name__)


class WorkerHistory:
    """The generations in which one worker has held leases, with the highest seq that it has passed on in each.

    An earlier generation is remembered until the daemon says that all is mended: a later fork may lose what is known in
    the database about the fork before.
    """

    def __init__(self, tube: str, on_fork: OnFork | None) -> None:
        self._tube = tube
        self._on_fork = on_fork
        self._present: str | None = None
        self._passed_on: dict[str, int] = {}
        self._told: dict[str, int] = {}  # the same, as far as the user's function was called about it
        self._asking: anyio.Lock | None = None  # made when it is used: a worker may be made outside of its loop

    def note(self, generation: str | None, seq: int) -> None:
        """A pod with this seq is passed on, under a lease of that generation."""
        if generation is not None:
            self._passed_on[generation] = max(seq, self._passed_on.get(generation, 0))

    async def enter(self, client: AsyncClient, generation: str | None) -> None:
        """A lease of this generation was claimed: ask what is left of the generations before.

        Raises:
            ReplicadError: the daemon could not answer; it is asked with the next claim.
        """
        if generation is not None and generation != self._present:
            async with self._one_at_a_time():
                self._present = generation
            await self.ask(client)

    def _one_at_a_time(self) -> anyio.Lock:
        self._asking = self._asking or anyio.Lock()
        return self._asking

    @property
    def open(self) -> bool:
        """Whether something of an earlier generation is not mended."""
        return any(generation != self._present for generation in self._passed_on)

    async def ask(self, client: AsyncClient) -> None:
        """Ask what is left of earlier generations. Raises ReplicadError."""
        async with self._one_at_a_time():
            for earlier, seq in [item for item in self._passed_on.items() if item[0] != self._present]:
                answer = await client.seen(self._tube, earlier, seq)
                told = answer.state == "same" or self._told.get(earlier) == seq or await self._tell(answer)
                if told:
                    self._told[earlier] = seq
                if told and answer.mended is not None and self._passed_on[earlier] == seq:
                    self.note(self._present, answer.mended)
                    del self._passed_on[earlier], self._told[earlier]

    async def _tell(self, answer: Seen) -> bool:
        since = None if answer.since is None else datetime.fromtimestamp(answer.since / 1_000_000, UTC)
        fork = TubeFork(self._tube, answer.shared or 0, answer.seq, since, answer.state or "unknown")
        log.warning("touches_unknown", tube=self._tube, after=fork.after, upto=fork.upto, state=fork.state)
        if self._on_fork is None:
            return True
        try:
            with calling():
                await self._on_fork(fork)
        except Exception as error:  # noqa: BLE001 - of the user; it is called again
            log.warning("on_fork_failed", tube=self._tube, error=repr(error))
            return False
        return True
