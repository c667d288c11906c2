"""A worker without Spark: a trio program that passes the touched ids of a tube to the user's async function.

It is a TCP client of the daemon. One task per partition claims the lease, reads pods ahead up to a bound, processes
their ids in parallel batches (an id only once at a time), and acks each pod as soon as all its ids are processed.

A batch that fails is tried again after a growing pause, in halves, until failing ids are alone. An id that keeps
failing is parked, but only while others succeed: when everything fails, the downstream is probably unavailable, and
the worker waits. A worker that cannot renew its lease stops processing before another can claim it. After a backfill it
collects garbage (garbage.py), if the user gives `stale_ids`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import trio

from replicad.client.garbage import FRUITLESS_STEPS, StaleIds, collect
from replicad.client.holding import Holding, OpenClient, Past, new_key
from replicad.client.ledger import Ledger, Touch
from replicad.client.pods import Pod, garbage_before
from replicad.client.refusals import may_pass
from replicad.client.trio_client import TrioClient
from replicad.errors import (
    CursorAhead,
    DownstreamError,
    LeaseHeld,
    LeaseLost,
    PartitionsChanged,
    ReplicadError,
)
from replicad.eventlog import get_logger
from replicad.nurseries import open_plain_nursery
from replicad.protocol.tokens import START
from replicad.retry import Backoff
from replicad.tubes.commands import Part

Handle = Callable[["Batch"], Awaitable[None]]
HandleControl = Callable[[Pod], Awaitable[None]]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids to process, each once, the oldest first."""

    tube: str
    touches: tuple[Touch, ...]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The bounds of a worker, for each of its partitions. Times in seconds."""

    batch_ids: int = 500  # ids in one call of the function
    parallelism: int = 4  # calls at the same time
    max_pods: int = 1000  # pods read and not acked
    exclude_backfill: bool = False  # leave backfill pods where they are, for a downstream under pressure
    lease_ttl: float = 30.0
    poll: float = 20.0  # how long one request waits for pods
    tries: int = 5  # of a single id before it is parked; 0: without limit
    backoff_first: float = 0.5
    backoff_cap: float = 60.0
    garbage_ids: int = 1000  # stale ids in one call of `stale_ids`
    garbage_settle: float = 1.0  # how long `stale_ids` must return none; as long as a write may stay invisible there


@dataclass(slots=True)
class WorkerStatistics:
    """Counted since the start."""

    processed: int = 0
    failed_calls: int = 0
    parked: int = 0
    garbage: int = 0
    acked_pods: int = 0
    leases_lost: int = 0


class Worker:
    """Processes the partitions of one tube until cancelled.

    `open_client` makes a client; it is called for each partition and for each lease's renewals. `handle` processes a
    batch and returns when the downstream has it; if it raises, the batch is tried again. `control` is called with
    control pods, yours and those of backfills, when they are read; pods read before may still be in progress.

    `stale_ids(shard, before, limit)` is for garbage collection after a backfill: it returns up to `limit` ids that the
    downstream holds for the shard and wrote for a `Touch.seq` below `before`. `handle` gets them with op G.
    """

    def __init__(
        self,
        open_client: OpenClient,
        tube: str,
        handle: Handle,
        *,
        partitions: Collection[int] | None = None,
        control: HandleControl | None = None,
        stale_ids: StaleIds | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        """`partitions` None: all of them."""
        self._open_client = open_client
        self._tube = tube
        self._handle = handle
        self._only = None if partitions is None else frozenset(partitions)
        self._control = control
        self._stale_ids = stale_ids
        self._settings = settings or WorkerSettings()
        self._key = new_key()
        self._past: dict[Part, Past] = {}  # leases that may still be held in Postgres
        self.statistics = WorkerStatistics()

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            UnknownTube, NotAuthorised: trying again would not help.
        """
        while True:
            partitions = await self._ask_for_partitions()
            mine = [n for n in range(partitions) if self._only is None or n in self._only]
            changed = trio.Event()
            async with open_plain_nursery() as nursery:
                for number in mine:
                    nursery.start_soon(self._keep_working, Part(number, partitions), changed)
                with trio.move_on_after(math.inf if mine else self._settings.poll):
                    await changed.wait()
            log.info("partitions_changed", tube=self._tube, before=partitions)
            await self._give_back()

    async def _give_back(self) -> None:
        """Release the leases of partitions that are no more: they would keep us from the new ones until they expire."""
        while self._past:
            part, past = self._past.popitem()
            await trio.sleep_until(past.until)
            with suppress(ReplicadError):
                async with self._open_client() as client:
                    await client.release(self._tube, part, past.term)

    async def _ask_for_partitions(self) -> int:
        backoff = Backoff(first=0.2, cap=10.0)
        while True:
            try:
                async with self._open_client() as client:
                    return await client.tube(self._tube)
            except ReplicadError as error:
                if not may_pass(error):
                    raise
                log.info("tube_unknown_yet", tube=self._tube, code=error.code, error=str(error))
            await trio.sleep(backoff.next_delay())

    async def _keep_working(self, part: Part, changed: trio.Event) -> None:
        """Work on a partition until the number of partitions changes; begin again after lost leases and connections."""
        backoff = Backoff(first=0.2, cap=10.0)
        while True:
            try:
                async with self._open_client() as client:
                    await _Partition(self, client, part).run(backoff)
            except PartitionsChanged:
                changed.set()
                return
            except ReplicadError as error:
                if not isinstance(error, LeaseHeld | LeaseLost | CursorAhead) and not may_pass(error):
                    raise
                self.statistics.leases_lost += isinstance(error, LeaseLost)
                log.info("partition_interrupted", tube=self._tube, part=str(part), code=error.code, error=str(error))
            await trio.sleep(backoff.next_delay())


class _Partition:
    """One partition under one lease."""

    def __init__(self, worker: Worker, client: TrioClient, part: Part) -> None:
        self._worker = worker
        self._settings = worker._settings
        self._client = client
        self._part = part
        self._tube = worker._tube
        self._ledger = Ledger()
        self._cursor = START
        self._ended = trio.Event()  # set when a batch has ended; then replaced
        self._processed = trio.Event()  # set when ids were processed; then replaced
        self._ends: deque[tuple[Pod, int]] = deque()  # held control pods of backfills whose garbage is to be collected
        self._successes = 0
        self._lease = Holding(worker._open_client, worker._tube, part, worker._key, worker._settings.lease_ttl)

    async def run(self, backoff: Backoff) -> None:
        """Claim the lease and work until it is lost.

        Raises:
            ReplicadError: the daemon's refusal (LeaseHeld, LeaseLost, PartitionsChanged), or ConnectionLost.
        """
        lease = self._lease
        try:
            await lease.claim(self._client, self._settings.poll, self._worker._past.get(self._part))
            backoff.reset()
            with lease.scope:
                async with open_plain_nursery() as nursery:
                    nursery.start_soon(lease.keep_renewing)
                    await self._work(nursery)
        finally:
            await self._leave()
        raise lease.failure

    async def _leave(self) -> None:
        """Release the lease, or keep its term for the next claim. A cancelled call of the user's function may still
        take effect. So no worker may have its ids before the lease expires.
        """
        if not self._lease.term:
            return  # none was had
        busy = self._ledger.busy > 0
        if busy or self._lease.scope.cancel_called or not await self._lease.release():
            self._worker._past[self._part] = self._lease.past(busy=busy)
        else:
            self._worker._past.pop(self._part, None)

    async def _work(self, nursery: trio.Nursery) -> None:
        settings = self._settings
        calls = trio.CapacityLimiter(settings.parallelism)
        while True:
            self._ended = trio.Event()
            await self._ack()
            if self._ends and self._ledger.oldest == self._ends[0][0].seq:
                nursery.start_soon(self._collect, *self._ends.popleft())
            came = 0
            if self._ledger.pods < settings.max_pods:
                came = await self._read()
            while calls.available_tokens and (touches := self._ledger.take(settings.batch_ids)):
                await calls.acquire_on_behalf_of(touches[0])
                nursery.start_soon(self._process, touches, calls)
            if not came and self._ledger.pods:
                with trio.move_on_after(1.0):  # then read again, even if no batch has ended
                    await self._ended.wait()

    async def _read(self) -> int:
        """Read pods ahead; waits for them only if none is in progress."""
        settings = self._settings
        found = await self._client.pods(
            self._tube,
            self._part,
            self._lease.term,
            self._cursor,
            limit=settings.max_pods - self._ledger.pods,
            backfill=0 if settings.exclude_backfill else None,
            wait=0.0 if self._ledger.pods else settings.poll,
        )
        self._cursor = found.end.cursor
        for pod in found.pods:
            if not pod.ids and self._worker._control is not None:
                await self._worker._control(pod)
            before = None if pod.ids or self._worker._stale_ids is None else garbage_before(pod.payload)
            self._ledger.add(pod.seq, pod.shard, pod.op, pod.ids, held=before is not None)
            if before is not None:
                self._ends.append((pod, before))
        return len(found.pods)

    async def _ack(self) -> None:
        if finished := self._ledger.take_finished():
            self._worker.statistics.acked_pods += await self._client.ack(
                self._tube, self._part, self._lease.term, finished
            )

    async def _collect(self, pod: Pod, before: int) -> None:
        """Collect the garbage of a shard; called when all earlier pods are done."""
        assert self._worker._stale_ids is not None
        say = log.bind(tube=self._tube, part=str(self._part), shard=pod.shard, seq=pod.seq)
        try:
            garbage = await collect(
                self._worker._stale_ids,
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
            self._worker.statistics.garbage += garbage
            self._ledger.let_go(pod.seq)
        self._ended.set()

    async def _wait_processed(self) -> None:
        self._ended.set()  # there is something to process
        await self._processed.wait()

    async def _process(self, touches: list[Touch], calls: trio.CapacityLimiter) -> None:
        """Process ids until each is done or parked; a batch that fails is halved."""
        todo: list[tuple[list[Touch], int, int]] = [(touches, 0, self._successes)]  # ids, tries, successes before
        while todo:
            batch, tries, before = todo.pop(0)
            error = await self._call(batch)
            if error is None:
                self._successes += 1
                self._worker.statistics.processed += len(batch)
                self._finish(batch)
                continue
            await trio.sleep(self._pause(tries))
            if len(batch) > 1:
                middle = len(batch) // 2
                todo[:0] = [(batch[:middle], tries, before), (batch[middle:], tries, before)]
            elif self._settings.tries and tries + 1 >= self._settings.tries and self._successes > before:
                await self._park(batch[0], tries + 1, error)
            else:
                todo.append((batch, tries + 1, before))
        calls.release_on_behalf_of(touches[0])
        self._ended.set()

    async def _call(self, touches: list[Touch]) -> Exception | None:
        try:
            await self._worker._handle(Batch(self._tube, tuple(touches)))
        except Exception as error:  # noqa: BLE001 - of the user; the ids are tried again
            self._worker.statistics.failed_calls += 1
            log.warning("batch_failed", tube=self._tube, part=str(self._part), ids=len(touches), error=repr(error))
            return error
        return None

    def _pause(self, tries: int) -> float:
        return Backoff(self._settings.backoff_first, self._settings.backoff_cap).whole(tries)

    def _finish(self, touches: list[Touch]) -> None:
        self._ledger.done(touches)
        self._processed.set()
        self._processed = trio.Event()
        self._ended.set()

    async def _put_aside(self, seq: int, ids: list[int], tries: int, error: Exception) -> bool:
        """Park ids of a pod, or all of it; False if the daemon refused, which ends the lease."""
        text = " ".join(repr(error).split())
        try:
            await self._client.park(self._tube, self._part, self._lease.term, seq, ids, tries=tries, error=text)
        except ReplicadError as refused:  # the lease is over; `run` raises it
            self._lease.lose(refused)
            return False
        return True

    async def _park(self, touch: Touch, tries: int, error: Exception) -> None:
        for seq in touch.seqs:
            if not await self._put_aside(seq, [touch.id], tries, error):
                return
        self._finish([touch])
        self._worker.statistics.parked += 1
        log.warning("id_parked", tube=self._tube, part=str(self._part), id=touch.id, tries=tries, error=repr(error))
