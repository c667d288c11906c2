"""One partition of a worker under one lease: reads pods ahead, processes their ids, acks, and parks what always fails.

Whatever can fail with one id or pod goes one way: it is tried again after growing pauses, then parked, and the others
go on. Something is parked after `tries` only while others succeed, because when everything fails the downstream is
probably unavailable. An id that fails alone proves nothing, so just one is parked without proof, until a call succeeds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from replicad.client.garbage import FRUITLESS_STEPS, collect
from replicad.client.holding import Desk, Holding
from replicad.client.keeping import Keeper
from replicad.client.ledger import Ledger, Touch
from replicad.client.pods import Pod, garbage_before
from replicad.client.trio_client import TrioClient, when_ready
from replicad.client.work import Batch, Work
from replicad.errors import DownstreamError, RemoteError, RemoteProtocolError, ReplicadError
from replicad.eventlog import get_logger
from replicad.nurseries import open_plain_nursery
from replicad.protocol.tokens import START, Cursor
from replicad.retry import Backoff
from replicad.tubes.commands import Part

ERROR_LENGTH = 2000  # characters of an error that is kept with what it parked

T = TypeVar("T")

log = get_logger(__name__)


class Partition:
    """One partition under one lease."""

    def __init__(self, work: Work, client: TrioClient, desk: Desk, keeper: Keeper, part: Part) -> None:
        """`client` is for pods; other partitions may use it too. `desk` is for the claim, `keeper` renews the lease."""
        self._work_for = work
        self._settings = work.settings
        self._counts = work.statistics
        self._client = client
        self.part = part
        self._tube = work.tube
        self._log = log.bind(tube=work.tube, part=str(part))
        self._ledger = Ledger()
        self._cursor = START
        self._one_by_one = 0  # pods to read alone, because a read of several has failed
        self._failed_reads = 0  # of the next pod
        self._stirred = trio.Event()  # set when a batch has ended, or pods have come; then replaced
        self._read_at = 0.0  # when to read again, if nothing stirs before
        self._ready = False  # READY came since the last read began
        self._processed = trio.Event()  # set when ids were processed; then replaced
        self._ends: dict[int, tuple[Pod, int]] = {}  # seq: held control pod of a backfill, and its start_seq
        self._successes = 0
        self._desk = desk
        self._keeper = keeper
        self._lease = Holding(work.tube, part, work.key, work.settings.lease_ttl)

    async def run(self, backoff: Backoff) -> None:
        """Claim the lease and work until it is lost.

        Raises:
            ReplicadError: the daemon's refusal (LeaseHeld, LeaseLost, PartitionsChanged), or ConnectionLost.
        """
        lease = self._lease
        try:
            await lease.claim(self._desk, self._settings.poll, self._work_for.past.get(self.part))
            backoff.reset()
            with lease.scope, self._keeper.keeping(lease):
                async with open_plain_nursery() as nursery:
                    await self._work(nursery)
        finally:
            if lease.term:
                self._work_for.past[self.part] = lease.past(busy=self._ledger.busy > 0)
        raise lease.failure

    async def _work(self, nursery: trio.Nursery) -> None:
        settings = self._settings
        calls = trio.CapacityLimiter(settings.parallelism)
        while True:
            self._stirred = trio.Event()
            await self._ack()
            if (end := self._ends.pop(self._ledger.oldest or 0, None)) is not None:
                nursery.start_soon(self._collect, *end)
            came = 0
            if self._ledger.pods < settings.max_pods and trio.current_time() >= self._read_at:
                came = await self._read(nursery)
            while calls.available_tokens and (touches := self._ledger.take(settings.batch_ids)):
                await calls.acquire_on_behalf_of(touches[0])
                nursery.start_soon(self._process, touches, calls)
            if not came:
                with trio.move_on_at(self._read_at if self._ledger.pods < settings.max_pods else float("inf")):
                    await self._stirred.wait()

    # --- pods ---

    async def _read(self, nursery: trio.Nursery) -> int:
        """Read pods ahead. If there are none, the daemon sends READY when there are."""
        settings = self._settings
        self._ready, self._read_at = False, 0.0
        when_ready(self._client, self._tube, self.part, self._read_soon)
        limit = 1 if self._one_by_one else settings.max_pods - self._ledger.pods
        try:
            found = await self._client.pods(
                self._tube,
                self.part,
                self._lease.term,
                self._cursor,
                limit=limit,
                backfill=0 if settings.exclude_backfill else None,
                wait=settings.poll,
                ready=True,
            )
        except (RemoteProtocolError, RemoteError) as error:  # a pod that is too long, or is no pod
            await self._skip_unreadable(error, alone=limit == 1)
            return 0
        self._failed_reads = 0
        self._one_by_one = max(0, self._one_by_one - 1)
        self._cursor = found.end.cursor
        if not found and not self._ready:
            self._read_at = trio.current_time() + settings.poll
        for pod in found:
            await self._take(pod, nursery)
        return len(found)

    def _read_soon(self) -> None:
        """READY came, or the connection has ended."""
        self._ready, self._read_at = True, 0.0
        self._stirred.set()

    async def _skip_unreadable(self, error: ReplicadError, *, alone: bool) -> None:
        """Read one pod at a time from here on; park the pod that cannot be read alone."""
        if not alone:
            self._log.warning("pods_unreadable", cursor=str(self._cursor), error=str(error))
            self._one_by_one = self._settings.max_pods
            return
        self._failed_reads += 1
        self._counts.failed_calls += 1
        await trio.sleep(self._pause(self._failed_reads - 1))
        certain = isinstance(error, RemoteProtocolError)  # another error may be one of the daemon
        if not 0 < self._settings.tries <= self._failed_reads or not (certain or self._unproven_once()):
            return
        backfill = 0 if self._settings.exclude_backfill else None
        planned = await self._client.plan(
            self._tube, self.part, self._lease.term, self._cursor, limit=1, backfill=backfill
        )
        if planned.pods and await self._put_aside(_last(self._cursor, planned.cursor), [], self._failed_reads, error):
            self._cursor = planned.cursor
            self._failed_reads = 0

    async def _take(self, pod: Pod, nursery: trio.Nursery) -> None:
        """Note a pod that was read. A control pod is given to the user's function first."""
        work = self._work_for
        before = None if pod.ids or work.stale_ids is None else garbage_before(pod.payload)
        self._ledger.add(pod.seq, pod.shard, pod.op, pod.ids, held=True)
        error = None
        if not pod.ids and work.control is not None:
            error = await self._attempt(work.control, pod)
        if error is None:
            self._end_hold(pod, before)
        else:
            nursery.start_soon(self._retry_control, pod, before, error)

    def _end_hold(self, pod: Pod, before: int | None) -> None:
        if before is None:
            self._ledger.let_go(pod.seq)
        else:
            self._ends[pod.seq] = (pod, before)
        self._stirred.set()

    async def _retry_control(self, pod: Pod, before: int | None, failure: Exception) -> None:
        """Give a control pod to the user's function until it succeeds or is parked. Other pods go on meanwhile."""
        assert self._work_for.control is not None
        error: Exception | None = failure
        tries, successes = 1, self._successes
        while error is not None:
            if self._may_park(tries, successes):
                if await self._put_aside(pod.seq, [], tries, error):
                    self._ledger.forget(pod.seq)
                    self._stirred.set()
                return
            await trio.sleep(self._pause(tries - 1))
            tries += 1
            error = await self._attempt(self._work_for.control, pod)
        self._end_hold(pod, before)

    async def _ack(self) -> None:
        if finished := self._ledger.take_finished():
            acked = await self._client.ack(self._tube, self.part, self._lease.term, finished)
            self._counts.acked_pods += acked

    # --- garbage ---

    async def _collect(self, pod: Pod, before: int) -> None:
        """Collect the garbage of a shard; called when all earlier pods are done."""
        assert self._work_for.stale_ids is not None
        say = self._log.bind(shard=pod.shard, seq=pod.seq)
        try:
            garbage = await collect(
                self._work_for.stale_ids,
                self._ledger,
                pod,
                before,
                step=self._settings.garbage_ids,
                settle=self._settings.garbage_settle,
                process=self._wait_processed,
            )
        except DownstreamError as error:
            say.error("garbage_kept", error=str(error))
            if await self._put_aside(pod.seq, [], FRUITLESS_STEPS, error):
                self._ledger.forget(pod.seq)
        else:
            say.info("garbage_collected", ids=garbage)
            self._counts.garbage += garbage
            self._ledger.let_go(pod.seq)
        self._stirred.set()

    async def _wait_processed(self) -> None:
        self._stirred.set()  # there is something to process
        await self._processed.wait()

    # --- ids ---

    async def _process(self, touches: list[Touch], calls: trio.CapacityLimiter) -> None:
        """Process ids until each is done or parked; a batch that fails is halved."""
        todo: list[tuple[list[Touch], int, int]] = [(touches, 0, self._successes)]  # ids, tries, successes before
        while todo:
            batch, tries, before = todo.pop(0)
            whole = Batch(self._tube, tuple(batch), self.part, self._lease.term)
            error = await self._attempt(self._work_for.handle, whole)
            if error is None:
                self._successes += 1
                self._work_for.unproven.discard(self.part.partition)
                self._counts.processed += len(batch)
                self._finish(batch)
            elif len(batch) == 1 and self._may_park(tries + 1, before):
                await self._park(batch[0], tries + 1, error)
            else:
                await trio.sleep(self._pause(tries))
                if len(batch) > 1:
                    middle = len(batch) // 2
                    todo[:0] = [(batch[:middle], tries, before), (batch[middle:], tries, before)]
                else:
                    todo.append((batch, tries + 1, before))
        calls.release_on_behalf_of(touches[0])
        self._stirred.set()

    async def _attempt(self, function: Callable[[T], Awaitable[None]], what: T) -> Exception | None:
        """Call a function of the user; returns why it failed. One that hangs has failed."""
        limit = self._settings.call_timeout
        error: Exception
        try:
            with trio.move_on_after(limit) as scope:
                await function(what)
            if not scope.cancelled_caught:
                return None
            error = TimeoutError(f"the call was cancelled because it took longer than {limit:g} s (call_timeout)")
        except Exception as failure:  # noqa: BLE001 - of the user; the ids are tried again
            error = failure
        self._counts.failed_calls += 1
        self._log.warning("batch_failed", ids=len(what.touches) if isinstance(what, Batch) else 0, error=repr(error))
        return error

    def _may_park(self, tries: int, before: int) -> bool:
        """Whether something that has failed that often is parked. `before`: the successes when it was tried first."""
        if not 0 < self._settings.tries <= tries:
            return False
        return self._successes > before or (self._ledger.rows <= 1 and self._unproven_once())

    def _unproven_once(self) -> bool:
        """True once, until a call succeeds: something may be parked although nothing else succeeds."""
        if self.part.partition in self._work_for.unproven:
            return False
        self._work_for.unproven.add(self.part.partition)
        return True

    def _pause(self, tries: int) -> float:
        return Backoff(self._settings.backoff_first, self._settings.backoff_cap).whole(tries)

    def _finish(self, touches: list[Touch]) -> None:
        self._ledger.done(touches)
        self._processed.set()
        self._processed = trio.Event()
        self._stirred.set()

    async def _put_aside(self, seq: int, ids: list[int], tries: int, error: Exception) -> bool:
        """Park ids of a pod, or all of it; False if the daemon refused, which ends the lease."""
        text = " ".join(repr(error).split())[:ERROR_LENGTH]
        try:
            await self._client.park(self._tube, self.part, self._lease.term, seq, ids, tries=tries, error=text)
        except ReplicadError as refused:  # the lease is over; `run` raises it
            self._lease.lose(refused)
            return False
        self._counts.parked += 1
        self._log.warning("parked", seq=seq, ids=ids or "all", tries=tries, error=repr(error))
        return True

    async def _park(self, touch: Touch, tries: int, error: Exception) -> None:
        for seq in touch.seqs:
            if not await self._put_aside(seq, [touch.id], tries, error):
                return
        self._finish([touch])


def _last(before: Cursor, after: Cursor) -> int:
    """The seq of the one pod between two cursors."""
    return after.regular if after.regular != before.regular else after.backfill
