"""A worker without Spark: a trio program that passes the touched ids of a tube to the user's async function.

It is a TCP client of the daemon. One task per partition claims the lease, reads pods ahead up to a bound, processes
their ids in parallel batches (an id only once at a time), and acks each pod as soon as all its ids are processed
(partition.py). A worker that cannot renew its lease stops processing before another can claim it (holding.py). After a
backfill it collects garbage (garbage.py), if the user gives `stale_ids`.

All partitions share a few connections, and one request renews all leases (keeping.py). Nothing polls: the daemon sends
READY when a partition has pods or its lease is free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial

import trio

from replicad.client.garbage import StaleIds
from replicad.client.holding import Desk, OpenClient, word_of
from replicad.client.keeping import Keeper
from replicad.client.partition import Partition
from replicad.client.refusals import may_pass
from replicad.client.work import Batch, Handle, HandleControl, Work, WorkerSettings, WorkerStatistics
from replicad.errors import CursorAhead, Forbidden, LeaseLost, PartitionsChanged, ReplicadError
from replicad.eventlog import get_logger
from replicad.groups import leaves, raise_as_it_was
from replicad.nurseries import open_plain_nursery
from replicad.retry import Backoff
from replicad.tubes.commands import Part

__all__ = ["Batch", "Worker", "WorkerSettings", "WorkerStatistics"]

ASK_AGAIN = 5.0  # seconds before a worker whose partitions do not exist asks whether they do
CONNECTIONS = 4  # for the pods of all partitions; one more is for claims, and one for renewals
RELEASE_TIMEOUT = 3.0  # seconds to release all leases at the end
REPORT_INTERVAL = 10.0  # seconds between two reports of the counts, for `replicad top`
ROUND = 60.0  # seconds: a number of partitions that changes more often is followed with growing pauses

log = get_logger(__name__)


class Worker:
    """Processes the partitions of one tube until cancelled.

    `open_client` makes a client; it is called a few times, whatever the number of partitions. `handle` processes a
    batch and returns when the downstream has it; if it raises or takes longer than `call_timeout`, the batch is tried
    again, in halves. An id that fails alone `tries` times is parked: while others succeed, always; while nothing else
    succeeds, the downstream may be unavailable, so only one id of a partition is parked until a call succeeds.

    `control` is called with control pods, yours and those of backfills, when they are read; pods read before may still
    be in progress. A pod for which it fails is tried again and parked like an id; pods behind it go on meanwhile.

    Its counts, failed calls among them, are reported to the daemon, and `replicad top` shows them.

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
        self._only = None if partitions is None else frozenset(partitions)
        self._work = Work(open_client, tube, handle, control, stale_ids, settings or WorkerSettings())

    @property
    def statistics(self) -> WorkerStatistics:
        """What was done since the start."""
        return self._work.statistics

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            UnknownTube, NotAuthorised: trying again would not help.
        """
        work, backoff = self._work, Backoff(first=0.2, cap=10.0)
        while True:
            began = trio.current_time()
            partitions = await self._ask_for_partitions()
            mine = [n for n in range(partitions) if self._only is None or n in self._only]
            if not mine:
                chosen = sorted(self._only or ())
                log.warning("no_such_partitions", tube=work.tube, chosen=chosen, partitions=partitions)
                await trio.sleep(max(ASK_AGAIN, work.settings.poll))
                continue
            try:
                await self._work_until_changed([Part(number, partitions) for number in mine])
            except BaseException:
                await self._release_idle()
                raise
            log.info("partitions_changed", tube=work.tube, before=partitions)
            await self._give_back()
            if trio.current_time() >= began + ROUND:
                backoff.reset()
            await trio.sleep(backoff.next_delay())

    async def _work_until_changed(self, parts: Sequence[Part]) -> None:
        """Work on these partitions until their number changes. Raises the first failure of one of them."""
        work = self._work
        failures: list[Exception] = []
        changed = trio.Event()
        keeper = Keeper(work.open_client, work.tube, work.settings.lease_ttl)
        async with AsyncExitStack() as stack:
            count = min(CONNECTIONS, len(parts))
            clients = [await stack.enter_async_context(work.open_client()) for _ in range(count)]
            desk = Desk(await stack.enter_async_context(work.open_client()))
            async with open_plain_nursery() as nursery:
                nursery.start_soon(self._report)
                nursery.start_soon(keeper.run)
                for part in parts:
                    made = partial(Partition, work, clients[part.partition % count], desk, keeper, part)
                    nursery.start_soon(self._note_failure, made, changed, failures)
                await changed.wait()
        if failures:
            raise_as_it_was(failures[0])

    async def _note_failure(
        self, made: Callable[[], Partition], changed: trio.Event, failures: list[Exception]
    ) -> None:
        """Work on a partition. The first failure ends the worker, and is the one that `run` raises."""
        try:
            await self._keep_working(made, changed)
        except Exception as error:  # noqa: BLE001 - raised by `run`
            failures.append(error)
            changed.set()

    async def _report(self) -> None:
        """Report the counts, failed calls among them, when they have changed. Without the right to report: never."""
        work = self._work
        reported: dict[str, int] | None = None
        while True:
            await trio.sleep(REPORT_INTERVAL)
            counts = asdict(work.statistics)
            if counts == reported:
                continue
            try:
                async with work.open_client() as client:
                    await client.report(work.tube, f"{word_of(client)}.{work.key[:6]}", counts)
            except Forbidden:
                return
            except ReplicadError as error:
                log.info("report_failed", tube=work.tube, code=error.code, error=str(error))
            else:
                reported = counts

    async def _give_back(self) -> None:
        """Release the leases of partitions that are no more: they would keep us from the new ones until they expire."""
        while self._work.past:
            part, past = self._work.past.popitem()
            await trio.sleep_until(past.until)
            with suppress(ReplicadError):
                async with self._work.open_client() as client:
                    await client.release(self._work.tube, part, past.term)

    async def _release_idle(self) -> None:
        """The worker ends: release its leases, so that others can begin at once.

        A cancelled call may still take effect: the lease of a partition where there was one expires instead.
        """
        now = trio.current_time()
        idle = {part: past for part, past in self._work.past.items() if past.until <= now}
        if idle:
            with trio.move_on_after(RELEASE_TIMEOUT, shield=True), suppress(ReplicadError):
                async with self._work.open_client() as client:
                    for part, past in idle.items():
                        await client.release(self._work.tube, part, past.term)

    async def _ask_for_partitions(self) -> int:
        backoff = Backoff(first=0.2, cap=10.0)
        while True:
            try:
                async with self._work.open_client() as client:
                    return await client.tube(self._work.tube)
            except ReplicadError as error:
                if not may_pass(error):
                    raise
                log.info("tube_unknown_yet", tube=self._work.tube, code=error.code, error=str(error))
            await trio.sleep(backoff.next_delay())

    async def _keep_working(self, made: Callable[[], Partition], changed: trio.Event) -> None:
        """Work on a partition until the number of partitions changes; begin again after lost leases and connections."""
        backoff = Backoff(first=0.2, cap=10.0)
        while True:
            try:
                partition = made()
                await partition.run(backoff)
            except PartitionsChanged:
                changed.set()
                return
            except (ReplicadError, ExceptionGroup) as failure:
                error = _first(failure)
                if not isinstance(error, LeaseLost | CursorAhead) and not may_pass(error):
                    raise_as_it_was(error)
                self.statistics.leases_lost += isinstance(error, LeaseLost)
                log.info(
                    "partition_interrupted",
                    tube=self._work.tube,
                    part=str(partition.part),
                    code=error.code,
                    error=str(error),
                )
            await trio.sleep(backoff.next_delay())


def _first(failure: Exception) -> ReplicadError:
    """The failure, or of several at once one that trying again does not cure. Raises what is no refusal."""
    found = leaves(failure)
    for error in found:
        if not isinstance(error, ReplicadError):
            raise_as_it_was(error)
    refusals = [error for error in found if isinstance(error, ReplicadError)]
    return next((error for error in refusals if not may_pass(error)), refusals[0])
