"""How many partitions a worker holds, when several workers divide the partitions of a tube (docs/tubes.md).

Each worker says regularly that it is alive (SHARE), and gets the number of partitions that it should hold. It claims no
more than these, and gives back what it has above them, one partition at a time, while other workers wait for theirs.

No partition stays free because of a number that is wrong or old: a worker that was killed is counted for a while, and a
worker that was counted may claim nothing. A partition that nobody has claimed for PATIENCE intervals is claimed by a
worker above its share, and given back when another one wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio

from replicad.client.async_client import AsyncClient, when_ready
from replicad.client.refusals import may_pass
from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.loops import await_answer
from replicad.retry import Backoff
from replicad.tubes.commands import PartitionShare

INTERVAL = 5.0  # seconds between two SHAREs; a worker that begins or ends is noticed within them
SHARES = 3  # in a time to live of the leases at least: a worker counts for as long as its leases last
PATIENCE = 1.5  # intervals for which a partition stays free before a worker claims it above its share
LAST_ANSWER = 1.5  # seconds that a cancelled CLAIM or SHARE waits for its answer; an end by SIGTERM takes 5 at most
MOVING = 0.1  # seconds before the next SHARE while partitions move; then growing up to the interval

log = get_logger(__name__)


class Quota:
    """How many leases a worker may hold, and how many it holds. `changed` is set at the next end of a lease."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.held = 0
        self.changed = anyio.Event()
        self._has_room = anyio.Event()

    @property
    def free(self) -> bool:
        """Whether another lease may be claimed."""
        return self.held < self.most

    def allow(self, most: float) -> None:
        """From now on so many leases may be held."""
        self.most = most
        self._look()

    def take(self) -> None:
        """A lease was claimed."""
        self.held += 1

    def give(self) -> None:
        """A lease is over."""
        self.held -= 1
        self._look()
        self.stir()

    def stir(self) -> None:
        """A lease of this or of another worker is over."""
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_free(self) -> None:
        """Wait until another lease may be claimed."""
        while not self.free:
            await self._has_room.wait()

    def _look(self) -> None:
        if self.free:
            self._has_room.set()
            self._has_room = anyio.Event()


class PartitionSharing:
    """The share of one worker. `give_one` begins to give a partition back, unless one is being given back already."""

    def __init__(self, tube: str, quota: Quota, ttl: float, give_one: Callable[[], None]) -> None:
        """`ttl`: of the worker's leases, in seconds."""
        self._tube = tube
        self._quota = quota
        self._ttl = ttl
        self._interval = min(INTERVAL, ttl / SHARES)
        self._give_one = give_one
        self._free_since: float | None = None

    async def follow(self, client: AsyncClient, holder: str, partitions: int) -> None:
        """Follow the share until the tube has another number of partitions than these.

        It asks on the connection for claims: a worker that cannot claim is not counted either.

        Raises:
            ReplicadError: the daemon refuses it for good.
        """
        pause = Backoff(MOVING, self._interval)
        while True:
            changed = self._quota.changed  # taken first: a lease may end before the answer is here
            when_ready(client, self._tube, None, self._quota.stir)
            try:
                share = await await_answer(
                    partial(client.share, self._tube, holder=holder, ttl=self._ttl, ready=True), LAST_ANSWER
                )
            except ReplicadError as error:
                if not may_pass(error):
                    raise
                log.info("share_unknown", tube=self._tube, code=error.code, error=str(error))
                await anyio.sleep(pause.next_delay())
                continue
            if share.partitions != partitions:
                return
            moving = self.settle(share, anyio.current_time())
            with anyio.move_on_after(pause.next_delay() if moving else self._interval):
                await changed.wait()
            if changed.is_set() == moving:
                pause.reset()
            elif changed.is_set():
                await anyio.sleep(pause.next_delay())

    def settle(self, share: PartitionShare, now: float) -> bool:
        """Follow one answer. True: this worker holds too many, so the next answer is wanted soon."""
        quota, most, free = self._quota, share.most or 0, share.free or 0
        if not free:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        if free and now - (self._free_since or now) >= PATIENCE * self._interval:
            quota.allow(max(most, quota.held + -(-free // max(1, share.workers or 1))))
            return False
        quota.allow(most)
        if quota.held > most and not free:
            self._give_one()
        return quota.held > most
