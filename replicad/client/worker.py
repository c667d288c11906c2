"""A worker without Spark: it passes the touched ids of a tube to the user's async function, on trio or asyncio.

It is a TCP client of the daemon. One task per partition claims the lease, reads pods ahead up to a bound, processes
their ids in parallel batches (an id only once at a time), and acks each pod as soon as all its ids are processed. A
worker that cannot renew its lease stops processing before another can claim it (leases.py). After a backfill it
collects garbage (ledger.py), if the user gives `stale_ids`.

All partitions share a few connections, and one request renews all leases. Nothing polls: the daemon sends READY when a
partition has pods or its lease is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from replicad.client.async_client import AsyncClient, when_ready
from replicad.client.attempts import CAREFUL_IDS, Attempts, Turns, control_key, row_key
from replicad.client.calls import Calls, CallTimeout
from replicad.client.ending import ended_in_order
from replicad.client.leases import (
    ClaimConnection,
    Holding,
    LeaseKeeper,
    OpenClient,
    Past,
    give_back,
    holder_word,
    new_key,
    note_end,
    word_of,
)
from replicad.client.ledger import FRUITLESS_STEPS, ROW_BYTES, Ledger, StaleIds, Touch, collect
from replicad.client.refusals import may_pass
from replicad.client.requests import Pod, garbage_before
from replicad.client.sharing import PartitionSharing, Quota
from replicad.client.triage import Triage, Trial
from replicad.client.worker_history import OnFork, WorkerHistory
from replicad.errors import (
    CursorAhead,
    DownstreamError,
    Forbidden,
    LeaseLost,
    PartitionsChanged,
    RemoteError,
    RemoteProtocolError,
    ReplicadError,
)
from replicad.eventlog import get_logger
from replicad.groups import leaves, raise_as_it_was
from replicad.loops import calling, open_plain_tasks, outliving
from replicad.protocol.tokens import START, Cursor
from replicad.retry import Backoff
from replicad.tracing import span
from replicad.tubes.commands import MAX_TABLES, Part
from replicad.tubes.keys import Key

Handle = Callable[["Batch"], Awaitable[None]]
HandleControl = Callable[[Pod], Awaitable[None]]

WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids to process, each once, the oldest first.

    `term` is the term of the lease under which they are processed. Of two leases of a partition (`part`), the later
    lease has the higher term. A downstream that keeps the highest term of each partition can refuse writes of a worker
    whose lease is lost.
    """

    tube: str
    touches: tuple[Touch, ...]
    part: Part = WHOLE
    term: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The bounds of a worker; `batch_ids` and `parallelism` are for each of its partitions. Times in seconds."""

    batch_ids: int = 500  # ids in one call of the function
    parallelism: int = 4  # calls at the same time; one of them is kept for live ids during a backfill
    memory: int = 64 << 20  # bytes of pods that were read and not acked, of all partitions together
    exclude_backfill: bool = False  # leave backfill pods where they are, for a downstream under pressure
    lease_ttl: float = 30.0
    poll: float = 20.0  # after so long a partition without pods, or without its lease, asks again, though no READY came
    tries: int = 5  # of an id, or of a pod that cannot be read, before it is parked; 0: without limit
    call_timeout: float = 60.0  # a call that takes longer is cancelled and has failed: a hanging call keeps its lease
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
    blocked_loops: int = 0  # times that the event loop stood still for a third of `lease_ttl`
    lost_calls: int = 0  # calls that did not return after `call_timeout`, though they were cancelled


@dataclass(slots=True)
class Work:
    """One tube, the functions that process its ids, and the counts. Shared by a worker and its partitions.

    `past`: leases that this process may still hold in Postgres. `unproven`: partitions where something was parked while
    nothing else succeeded, until something does.
    """

    open_client: OpenClient
    tube: str
    handle: Handle
    control: HandleControl | None
    stale_ids: StaleIds | None
    settings: WorkerSettings
    history: WorkerHistory
    statistics: WorkerStatistics = field(default_factory=WorkerStatistics)
    key: str = field(default_factory=new_key)
    past: dict[Part, Past] = field(default_factory=dict)
    unproven: set[int] = field(default_factory=set)
    turns: Turns = field(default_factory=Turns)
    calls: Calls = field(default_factory=Calls)
    ledgers: list[Ledger] = field(default_factory=list)  # of the partitions under a lease, which share the memory


ERROR_LENGTH = 2000  # characters of an error that is kept with what it parked
SHORTEST_ERROR = 60  # characters of each of several errors that are kept together

T = TypeVar("T")

log = get_logger(__name__)


READ_PODS = 1000  # in one answer
READ_IDS = 10_000  # in one answer, about: adding them to the ledger takes 10 ms, in which nothing else runs
LOG_INTERVAL = 1.0  # seconds between two entries of the log about failed calls: a burst of poison fails thousands
PARKED_AT_ONCE = 500  # ids, after which their pods are acked; those of one pod are parked with one request
EARLY_MOST = 500  # pods above the tube's position that were read and not acked: PODS lists them in its line
TABLES_ASKED = 60.0  # seconds for which the name of a table is used
BACKFILL_SHARE = 0.5  # of the memory: the rest is for live pods


class WorkQueue(Generic[T]):
    """Things that wait for one task. A cancelled `take` leaves them."""

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._more = anyio.Event()

    def __bool__(self) -> bool:
        return bool(self._things)

    def put(self, thing: T) -> None:
        """Add one at the end."""
        self._things.append(thing)
        self._more.set()

    async def take(self) -> T:
        """Wait for the first, and remove it."""
        while not self._things:
            self._more = anyio.Event()
            await self._more.wait()
        return self._things.popleft()


class Partition:
    """One partition under one lease: reads pods ahead, processes their ids, acks, and parks what always fails.

    Whatever can fail with one id or pod is handled in one way: it is tried again after growing pauses, then parked, and
    the others go on (`triage`). It is parked after `tries` only while others succeed, because when everything fails the
    downstream is probably unavailable. An id that fails alone proves nothing, so just one id is parked without proof,
    until a call succeeds.
    """

    def __init__(
        self, work: Work, client: AsyncClient, claims: ClaimConnection, keeper: LeaseKeeper, part: Part
    ) -> None:
        """`client` is for pods; other partitions may use it too. `claims` claims the lease, `keeper` renews it."""
        self._work_for = work
        self._settings = settings = work.settings
        self._counts = work.statistics
        self._client = client
        self.part = part
        self._tube = work.tube
        self._log = log.bind(tube=work.tube, part=str(part))
        self._ledger = Ledger()
        self._triage = Triage(
            self._ledger,
            places=settings.parallelism,
            batch_ids=settings.batch_ids,
            tries=settings.tries,
            backoff=Backoff(settings.backoff_first, settings.backoff_cap),
            without_proof=self._unproven_once,
        )
        self._attempts = Attempts(client, work.tube, part, self._triage.failing)
        self._cursor = START
        self._tables_until = 0.0  # when the names of tables are asked for again
        self._early: set[int] = set()  # seqs above the cursor that were read and not acked
        self._left_early = False  # the last read asked for none above the position: too many were read
        self._calls = 0  # of the user's functions that are under way, or were cancelled and may still take effect
        self._giving_back = False
        self._one_by_one = 0  # pods to read alone, because a read of several has failed
        self._failed_reads = 0  # of the next pod
        self._stirred = anyio.Event()  # set when a batch has ended, or pods have come; then replaced
        self._read_at = 0.0  # when to read again, if nothing stirs before
        self._ready = False  # READY came since the last read began
        self._left_backfill = False  # the last read left out backfill pods, for which there was no memory
        self._processed = anyio.Event()  # set when ids were processed; then replaced
        self._ends: dict[int, tuple[Pod, int]] = {}  # seq: held control pod of a backfill, and its start_seq
        self._controls: WorkQueue[tuple[Pod, int | None]] = WorkQueue()
        self._logged_at = float("-inf")
        self._to_park: WorkQueue[tuple[Touch, int, Exception]] = WorkQueue()
        self._claims = claims
        self._keeper = keeper
        self._lease = Holding(work.tube, part, work.key, work.settings.lease_ttl)

    async def run(self, backoff: Backoff) -> None:
        """Claim the lease and work until it was given back.

        Raises:
            ReplicadError: it is lost, or was not given: the daemon's refusal (LeaseLost, PartitionsChanged), or
                ConnectionLost.
        """
        lease, held = self._lease, False
        await self._end_past()
        try:
            try:
                await lease.claim(self._claims, self._settings.poll, backoff.reset)
                held = True
                backoff.reset()
                await self._hold(lease)
            finally:
                if lease.term:
                    note = self._attempts.last_note()
                    self._work_for.past[self.part] = lease.past(note, busy=self._calls > 0)
            await self._end_past()
        finally:
            if held:
                self._claims.quota.give()

    async def _hold(self, lease: Holding) -> None:
        """Work under the lease until it is to be given back. Raises ReplicadError if it is lost."""
        self._work_for.ledgers.append(self._ledger)
        try:
            with lease.scope, self._keeper.keeping(lease):
                async with open_plain_tasks() as tasks:
                    tasks.start_soon(lease.watch)
                    await self._work_for.history.enter(self._client, lease.generation)
                    await self._attempts.begin(lease.term)
                    self._set_care()
                    await self._work(tasks)
                    tasks.cancel_scope.cancel()
        finally:
            self._work_for.ledgers.remove(self._ledger)
        if lease.scope.cancelled_caught or lease.lost:
            raise lease.failure

    async def _end_past(self) -> None:
        """Give back the lease before, if this process may still hold it. Raises ReplicadError."""
        if (past := self._work_for.past.get(self.part)) is not None:
            await anyio.sleep_until(past.until)
            await give_back(self._claims.client, self._tube, self.part, past)
            del self._work_for.past[self.part]

    @property
    def held(self) -> bool:
        """Whether its lease is held."""
        return self._ledger in self._work_for.ledgers

    @property
    def giving_back(self) -> bool:
        """Whether its lease is about to be given back."""
        return self._giving_back

    @property
    def load(self) -> tuple[int, int]:
        """What would be lost if it were given back: its calls have to be waited for, and its pods read again."""
        return self._calls, self._ledger.memory

    def give_back(self) -> None:
        """Begin no more calls, and give the lease back when the present calls have ended."""
        self._giving_back = True
        self._stirred.set()

    async def _work(self, tasks: TaskGroup) -> None:
        """Work until the lease is to be given back and no call is under way."""
        tasks.start_soon(self._call_control, tasks)
        tasks.start_soon(self._park_failed)
        while True:
            self._stirred = anyio.Event()
            await self._ack()
            if self._giving_back:
                if not self._calls:
                    return
                await self._stirred.wait()
                continue
            if (end := self._ends.pop(self._ledger.oldest or 0, None)) is not None:
                tasks.start_soon(self._collect, *end)
            await self._begin_calls(tasks)
            came = await self._read() if self._wants_pods() else 0
            await self._begin_calls(tasks)
            if not came:
                with anyio.CancelScope(deadline=min(self._triage.due(), self._read_due())):
                    await self._stirred.wait()

    def _set_care(self) -> None:
        """Make the calls as small as the state of the attempts requires."""
        attempts, triage = self._attempts, self._triage
        settings = self._settings
        careful = max(1, min(settings.batch_ids, CAREFUL_IDS // settings.parallelism))
        triage.most = careful if attempts.careful else settings.batch_ids
        triage.is_suspect = (lambda touch: attempts.is_suspect(row_key(touch))) if attempts.careful else None

    async def _begin_calls(self, tasks: TaskGroup) -> None:
        while (trial := self._triage.next(anyio.current_time())) is not None:
            tasks.start_soon(self._process, trial)
            await anyio.lowlevel.checkpoint()  # so that the oldest ids begin first: trio runs new tasks in any order

    # --- pods ---

    def _room(self, share: float = 1.0) -> int:
        """The bytes that this partition may still read, of a share of its memory."""
        all_of_us, ledgers = self._settings.memory, self._work_for.ledgers
        others = sum(ledger.memory for ledger in ledgers if ledger is not self._ledger)
        return int(min(all_of_us / len(ledgers), all_of_us - others) * share) - self._ledger.memory

    def _wants_pods(self) -> bool:
        if self._left_backfill and self._room(BACKFILL_SHARE / 2) > 0:
            self._read_at = 0.0
        return anyio.current_time() >= self._read_due()

    def _read_due(self) -> float:
        return self._read_at if self._room(0.9) > 0 or not self._ledger.pods else float("inf")

    async def _read(self) -> int:
        """Read pods ahead. If there are none, the daemon sends READY when there are."""
        settings = self._settings
        self._ready, self._read_at = False, 0.0
        when_ready(self._client, self._tube, self.part, self._read_soon)
        limit = 1 if self._one_by_one else READ_PODS
        only_live = settings.exclude_backfill or (self._room(BACKFILL_SHARE) <= 0 and self._ledger.pods > 0)
        self._left_backfill = only_live and not settings.exclude_backfill
        ids = max(1, min(READ_IDS, self._room(1.0 if only_live else BACKFILL_SHARE) // ROW_BYTES))
        backfill = 0 if only_live else None
        early = tuple(sorted(self._early)) or (0,)
        self._left_early = len(early) > EARLY_MOST
        only_final = self._left_early or self._one_by_one  # the plan of a pod that cannot be read has no early pods
        try:
            found = await self._client.pods(
                self._tube,
                self.part,
                self._lease.term,
                self._cursor,
                limit=limit,
                ids=ids,
                backfill=backfill,
                wait=settings.poll,
                ready=True,
                early=None if only_final else early,
            )
        except (RemoteProtocolError, RemoteError) as error:  # a pod that is too long, or is no pod
            await self._skip_unreadable(error, alone=limit == 1)
            return 0
        self._failed_reads = 0
        self._one_by_one = max(0, self._one_by_one - 1)
        self._cursor = found.end.cursor
        empty = not found and not self._ledger.pods
        if empty:
            self._triage.failing.clear()  # of ids that were processed or parked, perhaps by another worker
        if self._attempts.careful:
            await self._attempts.relax(empty=empty)
            self._set_care()
        if not found and not self._ready:
            self._read_at = anyio.current_time() + settings.poll
        await self._learn_tables({pod.shard for pod in found})
        came = 0
        for pod in found:
            if pod.seq > (self._cursor.backfill if pod.op == "B" else self._cursor.regular):
                self._early.add(pod.seq)
            else:
                self._early.discard(pod.seq)
            if not self._ledger.has(pod.seq):  # else it was read early
                self._take(pod)
                came += 1
        return came

    async def _learn_tables(self, shards: set[int]) -> None:
        """Ask of which tables these shards are. A table may be renamed, so after TABLES_ASKED it is asked again."""
        known, now = self._ledger.tables, anyio.current_time()
        if now >= self._tables_until:
            known.clear()
            self._tables_until = now + TABLES_ASKED
        unknown = sorted(shards.difference(known))
        for at in range(0, len(unknown), MAX_TABLES):
            asked = unknown[at : at + MAX_TABLES]
            found = await self._client.tables_of(self._tube, asked)
            known.update({shard: found[shard].name if shard in found else None for shard in asked})

    def _read_soon(self) -> None:
        """READY came, or the connection has ended."""
        self._ready, self._read_at = True, 0.0
        self._stirred.set()

    async def _skip_unreadable(self, error: ReplicadError, *, alone: bool) -> None:
        """Read one pod at a time from here on; park the pod that cannot be read alone."""
        if not alone:
            self._log.warning("pods_unreadable", cursor=str(self._cursor), error=str(error))
            self._one_by_one = READ_PODS
            return
        self._failed_reads += 1
        self._counts.failed_calls += 1
        self._read_at = anyio.current_time() + self._pause(self._failed_reads - 1)
        certain = isinstance(error, RemoteProtocolError)  # another error may come from the daemon
        if not 0 < self._settings.tries <= self._failed_reads or not (certain or self._unproven_once()):
            return
        backfill = 0 if self._settings.exclude_backfill else None
        planned = await self._client.plan(
            self._tube, self.part, self._lease.term, self._cursor, limit=1, backfill=backfill
        )
        if planned.pods and await self._put_aside(
            _last(self._cursor, planned.cursor), [], self._failed_reads, _text(error)
        ):
            self._cursor = planned.cursor
            self._failed_reads = 0
            self._read_at = 0.0

    def _take(self, pod: Pod) -> None:
        """Note a pod that was read. A control pod is given to the user's function, one after another."""
        work = self._work_for
        before = None if pod.ids or work.stale_ids is None else garbage_before(pod.payload)
        control = not pod.ids and work.control is not None
        self._ledger.add(pod.seq, pod.shard, pod.op, pod.ids, held=control or before is not None)
        if control:
            self._controls.put((pod, before))
        elif before is not None:
            self._ends[pod.seq] = (pod, before)

    async def _call_control(self, tasks: TaskGroup) -> None:
        """Give the control pods to the user's function, in their order. A pod that fails is tried again beside."""
        while True:
            pod, before = await self._controls.take()
            successes = self._triage.successes
            if (verdict := self._attempts.verdict(control_key(pod.seq))) is not None:
                if await self._put_aside(pod.seq, [], 1, _text(verdict)):
                    self._ledger.forget(pod.seq)
                    self._stirred.set()
                continue
            error = await self._try_control(pod)
            if error is None:
                self._end_hold(pod, before)
            else:
                tasks.start_soon(self._retry_control, pod, before, error, successes)

    def _end_hold(self, pod: Pod, before: int | None) -> None:
        if before is None:
            self._ledger.let_go(pod.seq)
        else:
            self._ends[pod.seq] = (pod, before)
        self._stirred.set()

    async def _retry_control(self, pod: Pod, before: int | None, failure: Exception, successes: int) -> None:
        """Give a control pod to the user's function until it succeeds or is parked. Other pods go on meanwhile."""
        error: Exception | None = failure
        tries = 1
        while error is not None:
            if self._may_park(tries, successes):
                if await self._put_aside(pod.seq, [], tries, _text(error)):
                    self._ledger.forget(pod.seq)
                    self._stirred.set()
                return
            await anyio.sleep(self._pause(tries - 1))
            tries += 1
            error = await self._try_control(pod)
        self._end_hold(pod, before)

    async def _try_control(self, pod: Pod) -> Exception | None:
        assert self._work_for.control is not None
        async with self._call_about(pod):
            return await self._attempt(self._work_for.control, pod)

    @asynccontextmanager
    async def _call_about(self, pod: Pod) -> AsyncIterator[None]:
        """A call because of a control pod during the block."""
        key = control_key(pod.seq)
        alone = self._attempts.is_suspect(key)
        async with self._work_for.turns.turn(alone=alone), self._attempts.call([key], alone=alone):
            yield

    async def _ack(self) -> None:
        if finished := self._ledger.take_finished():
            acked = await self._client.ack(self._tube, self.part, self._lease.term, finished)
            self._counts.acked_pods += acked
            self._early.difference_update(finished)
            if self._left_early and len(self._early) <= EARLY_MOST // 2:
                self._read_at, self._left_early = 0.0, False

    # --- garbage ---

    async def _collect(self, pod: Pod, before: int) -> None:
        """Collect the garbage of a shard; called when all earlier pods are done."""
        say = self._log.bind(shard=pod.shard, seq=pod.seq)
        try:
            if (verdict := self._attempts.verdict(control_key(pod.seq))) is not None:
                raise verdict
            garbage = await collect(
                partial(self._stale_ids, pod),
                self._ledger,
                pod,
                before,
                step=self._settings.garbage_ids,
                settle=self._settings.garbage_settle,
                process=self._wait_processed,
            )
        except DownstreamError as error:
            say.error("garbage_kept", error=str(error))
            if await self._put_aside(pod.seq, [], FRUITLESS_STEPS, _text(error)):
                self._ledger.forget(pod.seq)
        else:
            say.info("garbage_collected", ids=garbage)
            self._counts.garbage += garbage
            self._ledger.let_go(pod.seq)
        self._stirred.set()

    async def _stale_ids(self, pod: Pod, shard: int, before: int, limit: int) -> Sequence[Key]:
        assert self._work_for.stale_ids is not None
        async with self._call_about(pod), self._counted():
            with calling():
                return await self._work_for.stale_ids(shard, before, limit)

    async def _wait_processed(self) -> None:
        self._stirred.set()  # there is something to process
        await self._processed.wait()

    # --- ids ---

    async def _process(self, trial: Trial) -> None:
        """Process the ids of a trial; what becomes of ids for which it fails is decided by the triage."""
        keys = [row_key(touch) for touch in trial.touches] if self._attempts.careful else []
        if trial.alone and (verdict := self._attempts.verdict(keys[0])) is not None:
            self._triage.drop(trial)
            self._to_park.put((trial.touches[0], trial.tries, verdict))
            self._stirred.set()
            return
        whole = Batch(self._tube, tuple(trial.touches), self.part, self._lease.term)
        self._work_for.history.note(self._lease.generation, max(touch.seq for touch in whole.touches))
        async with self._work_for.turns.turn(alone=trial.alone), self._attempts.call(keys, alone=trial.alone):
            began = anyio.current_time()
            about: dict[str, str | int] = {
                "messaging.system": "replicad",
                "messaging.destination.name": self._tube,
                "messaging.destination.partition.id": str(self.part),
                "messaging.batch.message_count": len(trial.touches),
            }
            with span("replicad handle", "CONSUMER", about) as opened:
                error = await self._attempt(self._work_for.handle, whole)
                if error is not None:
                    opened.fail(repr(error))
            now = anyio.current_time()
        if error is None:
            self._triage.succeeded(trial, now, slow=now - began > self._settings.call_timeout / 4)
            self._work_for.unproven.discard(self.part.partition)
            if not trial.again:
                self._counts.processed += len(trial.touches)
                self._finish(trial.touches)
        elif self._triage.failed(trial, now, hung=isinstance(error, CallTimeout), tries=self._tries_of(error)):
            self._to_park.put((trial.touches[0], trial.tries, error))
        self._stirred.set()

    async def _attempt(self, function: Callable[[T], Awaitable[None]], what: T) -> Exception | None:
        """Call a function of the user; returns the error if it failed. A call that hangs has failed."""
        async with self._counted():
            error = await self._work_for.calls.call(partial(function, what), self._settings.call_timeout)
        if error is None:
            return None
        self._counts.failed_calls += 1
        self._counts.lost_calls += isinstance(error, CallTimeout) and error.lost
        now = anyio.current_time()
        if now >= self._logged_at + LOG_INTERVAL:
            self._logged_at = now
            ids = len(what.touches) if isinstance(what, Batch) else 0
            self._log.warning("batch_failed", ids=ids, error=repr(error), failed_calls=self._counts.failed_calls)
        return error

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """A call of a function of the user during the block. It does not begin if the lease is about to be given back.

        A call that was cancelled stays counted.
        """
        if self._giving_back:
            await anyio.sleep_forever()  # until the present calls have ended
        self._calls += 1
        try:
            yield
        except Exception:
            self._end_call()
            raise
        self._end_call()

    def _end_call(self) -> None:
        self._calls -= 1
        self._stirred.set()

    def _tries_of(self, error: Exception) -> int:
        """For how many tries a failure counts. Each call that does not return costs a thread, so two are enough."""
        return (self._settings.tries + 1) // 2 if isinstance(error, CallTimeout) and error.lost else 1

    def _may_park(self, tries: int, before: int) -> bool:
        """Whether something that has failed that often is parked. `before`: the successes when it was tried first."""
        if not 0 < self._settings.tries <= tries:
            return False
        return self._triage.successes > before or (self._ledger.rows <= 1 and self._unproven_once())

    def _unproven_once(self) -> bool:
        """True once, until a call succeeds: something may be parked although nothing else succeeds."""
        if self.part.partition in self._work_for.unproven:
            return False
        self._work_for.unproven.add(self.part.partition)
        return True

    def _pause(self, tries: int) -> float:
        return Backoff(self._settings.backoff_first, self._settings.backoff_cap).whole(tries)

    def _finish(self, touches: Sequence[Touch]) -> None:
        self._ledger.done(touches)
        self._processed.set()
        self._processed = anyio.Event()
        self._stirred.set()

    async def _put_aside(self, seq: int, ids: list[Key], tries: int, error: str) -> bool:
        """Park ids of a pod, or all of it; False if the daemon refused, which ends the lease."""
        try:
            await self._client.park(self._tube, self.part, self._lease.term, seq, ids, tries=tries, error=error)
        except ReplicadError as refused:  # the lease is over; `run` raises it
            self._lease.lose(refused)
            return False
        self._counts.parked += max(1, len(ids))
        self._log.warning("parked", seq=seq, ids=ids or "all", tries=tries, error=error)
        return True

    async def _park_failed(self) -> None:
        """Park the ids that have failed too often. They hold no place meanwhile."""
        while True:
            failed = [await self._to_park.take()]
            while self._to_park and len(failed) < PARKED_AT_ONCE:
                failed.append(await self._to_park.take())
            of_pods: dict[tuple[int, int], dict[Key, Exception]] = {}  # by seq and tries
            for touch, tries, error in failed:
                for seq in touch.seqs:
                    of_pods.setdefault((seq, tries), {})[touch.id] = error
            for (seq, tries), errors in of_pods.items():
                if not await self._put_aside(seq, list(errors), tries, _text_of(errors)):
                    return
            keys = [row_key(touch) for touch, _, _ in failed]
            self._attempts.forget(keys)
            for key in keys:
                self._triage.failing.pop(key, None)
            self._finish([touch for touch, _, _ in failed])


def _text(error: Exception, most: int = ERROR_LENGTH) -> str:
    """An error as it is kept with what it parked."""
    return " ".join(repr(error).split())[:most]


def _text_of(errors: Mapping[Key, Exception]) -> str:
    """The errors of ids that are parked together: one that all have, or each with its id, as far as there is room."""
    texts = {id: _text(error) for id, error in errors.items()}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    room = max(SHORTEST_ERROR, ERROR_LENGTH // len(texts) - 2)
    return "; ".join(f"{id}: {text}"[:room] for id, text in texts.items())[:ERROR_LENGTH]


def _last(before: Cursor, after: Cursor) -> int:
    """The seq of the one pod between two cursors."""
    return after.regular if after.regular != before.regular else after.backfill


ASK_AGAIN = 5.0  # seconds before a worker whose partitions do not exist asks whether they do
PARTITIONS_ASKED = 5.0  # seconds; a worker of a tube with one partition asks for their number as often
CONNECTIONS = 4  # for the pods of all partitions; one more is for claims, and one for renewals
RELEASE_TIMEOUT = 3.0  # seconds to release all leases at the end
REPORT_INTERVAL = 10.0  # seconds between two reports of the counts, for `replicad top`
ROUND = 60.0  # seconds: a number of partitions that changes more often is followed with growing pauses


class Worker:
    """Processes the partitions of one tube until cancelled.

    `open_client` makes a client; it is called a few times, whatever the number of partitions, and once in a thread with
    an event loop of its own, which renews the leases. `handle` processes a batch and returns when the downstream has
    it; if it raises or takes longer than `call_timeout`, the ids are divided and tried again. An id that fails `tries`
    times, the first and the last time alone, is parked: while others succeed, always; while nothing else succeeds, the
    downstream may be unavailable, so only one id of a partition is parked until a call succeeds. `handle` may get an id
    again at any time. An id with which the process ends is parked by the workers after it (docs/tubes.md).

    `control` is called with control pods, your own and the ones of backfills, when they are read; pods read before may
    still be in progress. A pod for which it fails is tried again and parked like an id; pods behind it go on meanwhile.

    Its counts, failed calls among them, are reported to the daemon, and `replicad top` shows them.

    `stale_ids(shard, before, limit)` is for garbage collection after a backfill: it returns up to `limit` ids that the
    downstream holds for the shard and wrote for a `Touch.seq` below `before`. `handle` gets them with op G.

    `on_fork` is called with the touches that a failover, a restore or a crash of Postgres has made unknown: a
    `TubeFork`.
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
        on_fork: OnFork | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        """`partitions` None: all of them."""
        self._only = None if partitions is None else frozenset(partitions)
        history = WorkerHistory(tube, on_fork)
        self._work = Work(open_client, tube, handle, control, stale_ids, settings or WorkerSettings(), history)
        self._at_work: list[Partition] = []

    @property
    def statistics(self) -> WorkerStatistics:
        """The counts since the start."""
        return self._work.statistics

    async def run(self) -> None:
        """Work until cancelled, or until SIGTERM, if nobody else handles it: then the leases are given back and the
        process ends.

        Raises:
            UnknownTube, NotAuthorised: trying again would not help.
        """
        async with ended_in_order():
            await self._run()

    async def _run(self) -> None:
        work, backoff = self._work, Backoff(first=0.2, cap=10.0)
        while True:
            began = anyio.current_time()
            partitions = await self._ask_for_partitions()
            mine = [n for n in range(partitions) if self._only is None or n in self._only]
            if not mine:
                chosen = sorted(self._only or ())
                log.warning("no_such_partitions", tube=work.tube, chosen=chosen, partitions=partitions)
                await anyio.sleep(max(ASK_AGAIN, work.settings.poll))
                continue
            try:
                await self._work_until_changed([Part(number, partitions) for number in mine])
            except BaseException:
                await self._release_idle()
                raise
            log.info("partitions_changed", tube=work.tube, before=partitions)
            await self._give_back()
            if anyio.current_time() >= began + ROUND:
                backoff.reset()
            await anyio.sleep(backoff.next_delay())

    async def _work_until_changed(self, parts: Sequence[Part]) -> None:
        """Work on these partitions until their number changes. Raises the first failure of a partition."""
        work = self._work
        failures: list[Exception] = []
        changed = anyio.Event()
        keeper = LeaseKeeper(
            work.open_client, work.tube, work.settings.lease_ttl, work.settings.call_timeout, self._note_blocked
        )
        async with AsyncExitStack() as stack:
            count = min(CONNECTIONS, len(parts))
            clients = [await stack.enter_async_context(work.open_client()) for _ in range(count)]
            quota = Quota(float("inf") if self._only is not None else 0)
            claims = ClaimConnection(await stack.enter_async_context(outliving(work.open_client)), quota)
            async with open_plain_tasks() as tasks:
                work.calls.begin(tasks)
                tasks.start_soon(self._report)
                tasks.start_soon(keeper.run)
                for part in parts:
                    made = partial(Partition, work, clients[part.partition % count], claims, keeper, part)
                    tasks.start_soon(self._note_failure, partial(self._keep_working, made), changed, failures)
                if self._only is None:
                    share = partial(self._share, claims, len(parts))
                    tasks.start_soon(self._note_failure, share, changed, failures)
                elif WHOLE in parts:
                    tasks.start_soon(self._notice_partitions, claims.client, changed)
                await changed.wait()
        if failures:
            raise_as_it_was(failures[0])

    async def _notice_partitions(self, client: AsyncClient, changed: anyio.Event) -> None:
        """Set `changed` when the tube has more than one partition. No request about 0/1 shows it: 0/1 is always the
        whole tube, and while this worker has its lease no other worker gets a partition.
        """
        while True:
            await anyio.sleep(PARTITIONS_ASKED)
            try:
                if await client.tube(self._work.tube) != 1:
                    changed.set()
                    return
            except ReplicadError as error:  # the requests for pods show it too, and decide
                log.info("partitions_not_asked", tube=self._work.tube, code=error.code, error=str(error))

    async def _note_failure(
        self, task: Callable[[], Awaitable[None]], changed: anyio.Event, failures: list[Exception]
    ) -> None:
        """Run a task that ends when the number of partitions changes. A failure ends the worker: `run` raises it."""
        try:
            await task()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            failures.append(error)
        changed.set()

    async def _share(self, claims: ClaimConnection, partitions: int) -> None:
        """Divide the partitions with other workers until their number changes."""
        work = self._work
        sharing = PartitionSharing(work.tube, claims.quota, work.settings.lease_ttl, self._give_one)
        await sharing.follow(claims.client, holder_word(claims.client, work.key), partitions)

    def _give_one(self) -> None:
        """Give a partition back, unless one is being given back: the one with the least to wait for."""
        held = [partition for partition in self._at_work if partition.held]
        if held and not any(partition.giving_back for partition in self._at_work):
            min(held, key=lambda partition: partition.load).give_back()

    def _note_blocked(self) -> None:
        self.statistics.blocked_loops += 1

    async def _report(self) -> None:
        """Report the counts, failed calls among them, when they have changed. Without the right to report: never."""
        work = self._work
        reported: dict[str, int] | None = None
        while True:
            await anyio.sleep(REPORT_INTERVAL)
            if work.history.open:
                await self._ask_about_forks()
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

    async def _ask_about_forks(self) -> None:
        work = self._work
        try:
            async with work.open_client() as client:
                await work.history.ask(client)
        except ReplicadError as error:
            log.info("fork_not_asked", tube=work.tube, code=error.code, error=str(error))

    async def _give_back(self) -> None:
        """Release the leases of partitions that are no more: they would keep us from the new ones until they expire."""
        while self._work.past:
            part, past = self._work.past.popitem()
            await anyio.sleep_until(past.until)
            with suppress(ReplicadError):
                async with self._work.open_client() as client:
                    await give_back(client, self._work.tube, part, past)

    async def _release_idle(self) -> None:
        """The worker ends: release its leases, so that others can begin at once.

        A cancelled call may still take effect: the lease of a partition where there was one expires instead.
        """
        work, now = self._work, anyio.current_time()
        with anyio.move_on_after(RELEASE_TIMEOUT, shield=True), suppress(ReplicadError):
            async with work.open_client() as client:
                if self._only is None:  # first: others ask for their share when a lease is over
                    await client.share(work.tube, holder=holder_word(client, work.key), ttl=0)
                for part, past in work.past.items():
                    await (give_back if past.until <= now else note_end)(client, work.tube, part, past)

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
            await anyio.sleep(backoff.next_delay())

    async def _keep_working(self, made: Callable[[], Partition]) -> None:
        """Work on a partition until the number of partitions changes; begin again after lost leases and connections."""
        backoff = Backoff(first=0.2, cap=10.0)
        while True:
            partition = made()
            self._at_work.append(partition)
            try:
                await partition.run(backoff)
                continue  # it was given back
            except PartitionsChanged:
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
            finally:
                self._at_work.remove(partition)
            await anyio.sleep(backoff.next_delay())


def _first(failure: Exception) -> ReplicadError:
    """The failure, or of several failures a failure that trying again does not cure. Raises an error that is no
    refusal.
    """
    found = leaves(failure)
    for error in found:
        if not isinstance(error, ReplicadError):
            raise_as_it_was(error)
    refusals = [error for error in found if isinstance(error, ReplicadError)]
    return next((error for error in refusals if not may_pass(error)), refusals[0])
