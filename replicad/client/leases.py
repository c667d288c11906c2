"""The leases of a worker, as their holder sees them: claimed, trusted until a deadline, renewed, over (docs/leases.md).

The deadline counts from the moment at which the last granted request was *sent*. A CLAIM may wait longer than the lease
lives; then its answer shows only that the lease was given at some moment, and RENEW is sent before anything is trusted.
One request on one connection renews all leases of a worker together.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from sys import _current_frames as current_frames
from threading import get_ident
from traceback import extract_stack
from typing import Any

import anyio

from replicad.client.async_client import AsyncClient, when_ready
from replicad.client.refusals import may_pass
from replicad.client.sharing import LAST_ANSWER, Quota
from replicad.errors import LeaseHeld, LeaseLost, ReplicadError
from replicad.eventlog import get_logger
from replicad.loops import another_loop, await_answer, call_from_threads, open_plain_tasks
from replicad.tubes.commands import MAX_KEPT, Part

OpenClient = Callable[[], AbstractAsyncContextManager[AsyncClient]]

RENEWALS = 3  # in a time to live: one may fail
RETRIES = 10  # of a failed renewal in a time to live


@dataclass(frozen=True, slots=True)
class Past:
    """A lease that this process may still hold in Postgres: its term, and until when calls under it may still act.

    `note`: what its end leaves for the next reader (attempts.py). None: the note that is stored stays, because the
    lease was lost during a call, or because nothing was begun under it.
    """

    term: int
    until: float
    note: Mapping[str, Any] | None


async def give_back(client: AsyncClient, tube: str, part: Part, past: Past) -> None:
    """Store the last note of a lease, if it has one, and release it. Raises ReplicadError."""
    await note_end(client, tube, part, past)
    await client.release(tube, part, past.term)


async def note_end(client: AsyncClient, tube: str, part: Part, past: Past) -> None:
    """Store the last note of a lease, if it has one and is still held. Raises ReplicadError."""
    if past.note is not None:
        with suppress(LeaseLost):
            await client.attempt(tube, part, past.term, past.note)


@dataclass(frozen=True, slots=True)
class ClaimConnection:
    """The connection on which the partitions of a worker claim their leases, one after another (`turn`).

    A lease counts from the moment at which CLAIM is sent, so the time in which a claim waits for its turn must not
    count. `quota`: how many leases the worker may hold.
    """

    client: AsyncClient
    quota: Quota
    turn: anyio.Lock = field(default_factory=anyio.Lock)


class Holding:
    """The lease of one partition. `scope` is cancelled when it is over. `due`: when it should be renewed."""

    def __init__(self, tube: str, part: Part, key: str, ttl: float) -> None:
        """`key` is that of the process: its next connection is the same holder."""
        self._tube = tube
        self._part = part
        self._key = key
        self._ttl = ttl
        self._asked = 0.0
        self._lost: ReplicadError | None = None
        self.term = 0
        self.generation: str | None = None  # of the tube's history; the lease is void in any other
        self.due = 0.0
        self.scope = anyio.CancelScope()

    async def claim(self, claims: ClaimConnection, wait: float, answered: Callable[[], None]) -> None:
        """Get the lease and a deadline that is not near. `answered` is called when another worker has it.

        Then the daemon sends READY when it is free; it is asked again every `wait` seconds as well. A cancelled claim
        waits a moment for its answer: if the lease was given, `term` is set, and it can be given back.

        Raises:
            ReplicadError: the daemon's refusal but for LeaseHeld, or ConnectionLost.
            LeaseLost: RENEW takes longer than the lease lives.
        """
        while True:
            await claims.quota.wait_free()
            ready = anyio.Event()
            when_ready(claims.client, self._tube, self._part, ready.set)
            try:
                async with claims.turn:
                    if not claims.quota.free:  # other partitions were claimed meanwhile
                        continue
                    await await_answer(partial(self._ask, claims.client, wait), LAST_ANSWER)
                    claims.quota.take()
            except LeaseHeld:
                answered()
                with anyio.move_on_after(wait):
                    await ready.wait()
            else:
                return

    async def _ask(self, client: AsyncClient, wait: float) -> None:
        self._asked = anyio.current_time()
        holder = holder_word(client, self._key)
        lease = await client.claim(self._tube, self._part, ttl=self._ttl, wait=wait, holder=holder, ready=True)
        self.term, self.generation = lease.term, lease.generation
        if anyio.current_time() >= self._asked + self._ttl / RENEWALS:  # when in this time it was given is unknown
            self._asked = anyio.current_time()
            await client.renew(self._tube, self._part, self.term)
        if anyio.current_time() >= self._deadline():
            raise LeaseLost(
                f"RENEW of {self._part} of tube {self._tube} took longer than the lease lives ({self._ttl:g} s): "
                "give the worker a longer lease_ttl"
            )
        self.renewed(self._asked)

    def renewed(self, asked: float) -> None:
        """The lease was given or renewed by a request that was sent at `asked`. Any thread may call it."""
        self._asked = asked
        self.due = asked + self._ttl / RENEWALS

    async def watch(self) -> None:
        """Cancel the scope at the deadline, which another thread may move meanwhile.

        So the scope has no deadline of its own: after a blocked loop it would end before the deadline is looked at.
        """
        while anyio.current_time() < self._deadline():
            await anyio.sleep_until(self._deadline())
        self.scope.cancel()

    def try_again(self) -> None:
        """A renewal has failed for a reason that may pass. The deadline stays; the next try may be in time."""
        self.due = anyio.current_time() + self._ttl / RETRIES

    def lose(self, error: ReplicadError) -> None:
        """The daemon refused the term: stop now. `error` is what `failure` returns."""
        self._lost = self._lost or error
        self.scope.cancel()

    @property
    def lost(self) -> bool:
        """Whether the daemon refused the term."""
        return self._lost is not None

    @property
    def failure(self) -> ReplicadError:
        """The reason why the lease is over."""
        return self._lost or LeaseLost(f"the lease of {self._part} of {self._tube} was not renewed in time")

    def past(self, note: Mapping[str, Any] | None, *, busy: bool) -> Past:
        """The lease to give back before the next claim. `note`: of a clean end. `busy`: calls were cancelled.

        A cancelled call may still take effect, so no other worker may get its ids before the deadline.
        """
        over = self._lost is not None or anyio.current_time() >= self._deadline()
        return Past(self.term, self._deadline() if busy else 0.0, None if busy and over else note)

    def _deadline(self) -> float:
        return self._asked + self._ttl


def word_of(client: AsyncClient) -> str:
    """The client's name as one word of a command."""
    return "_".join(client._target.us.name.split())


def holder_word(client: AsyncClient, key: str) -> str:
    """The holder of the leases of a process, by its key."""
    return f"{word_of(client)}!{key}"


def new_key() -> str:
    """A key for the leases of one process."""
    return secrets.token_hex(16)


log = get_logger(__name__)


class LeaseKeeper:
    """Renews the trusted leases of one worker. One request renews the lease that is due and all leases due soon.

    It runs in a thread with an event loop of its own, so that a function of the user that blocks the worker's event
    loop (`time.sleep`, a client library that waits) does not end the leases. If the worker's loop stands still for
    longer than `patience`, the leases are renewed no more.
    """

    def __init__(
        self, open_client: OpenClient, tube: str, ttl: float, patience: float, blocked: Callable[[], None]
    ) -> None:
        """`blocked` is called, in the worker's loop, when the loop has stood still for a third of `ttl`."""
        self._open_client = open_client
        self._tube = tube
        self._ttl = ttl
        self._patience = patience
        self._blocked = blocked
        self._held: dict[int, Holding] = {}  # by term; both threads use it
        self._alive = 0.0  # when the worker's loop ran
        self._in_worker: Callable[[Callable[[], None]], None]
        self._worker_thread = 0
        self._in_own: Callable[[Callable[[], None]], None] | None = None
        self._added = anyio.Event()  # of the own loop
        self._scope: anyio.CancelScope | None = None  # likewise
        self._over = False

    @contextmanager
    def keeping(self, holding: Holding) -> Iterator[None]:
        """Renew this lease during the block. When it is lost, its scope is cancelled."""
        self._held[holding.term] = holding
        self._in_own_loop(self._look)
        try:
            yield
        finally:
            self._held.pop(holding.term, None)

    async def run(self) -> None:
        """Renew until cancelled."""
        self._in_worker, self._worker_thread = call_from_threads(), get_ident()
        self._alive = anyio.current_time()
        run = another_loop()
        async with open_plain_tasks() as tasks:
            tasks.start_soon(self._show_life)
            try:
                await anyio.to_thread.run_sync(
                    partial(run, self._run), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                )
            finally:
                self._over = True
                self._in_own_loop(self._look)

    async def _show_life(self) -> None:
        while True:
            self._alive = anyio.current_time()
            await anyio.sleep(self._ttl / RENEWALS / 4)

    # --- in the own thread ---

    async def _run(self) -> None:
        """Renew until the scope is cancelled. The connection is this task's own: on others a request may take long."""
        self._in_own = call_from_threads()
        with anyio.CancelScope() as self._scope:
            self._look()  # it may be over already
            async with open_plain_tasks() as tasks:
                tasks.start_soon(self._watch)
                async with self._open_client() as client:
                    await self._renew_until_cancelled(client)

    async def _renew_until_cancelled(self, client: AsyncClient) -> None:
        while True:
            self._added = anyio.Event()
            now = anyio.current_time()
            due = min((holding.due for holding in self._held.copy().values()), default=float("inf"))
            if now < due:
                with anyio.CancelScope(deadline=due):
                    await self._added.wait()
            elif now > self._alive + self._patience:
                await anyio.sleep(self._ttl / RETRIES)
            else:
                await self._renew(client)

    async def _watch(self) -> None:
        """Report that the worker's loop stands still, and where."""
        reported = 0.0  # the last sign of life that was reported
        while True:
            await anyio.sleep(self._ttl / RENEWALS / 4)
            alive, late = self._alive, anyio.current_time() - self._alive
            if late > self._ttl / RENEWALS and alive != reported:
                reported = alive
                where = extract_stack(current_frames().get(self._worker_thread), limit=3)
                log.error(
                    "event_loop_blocked",
                    tube=self._tube,
                    seconds=round(late, 1),
                    where=" < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(where)),
                    remedy="call what blocks in a thread: asyncio.to_thread, trio.to_thread.run_sync",
                )
                self._in_worker(self._blocked)

    async def _renew(self, client: AsyncClient) -> None:
        asked = anyio.current_time()
        soon = asked + self._ttl / RENEWALS / 2
        held = self._held.copy()
        near = sorted((holding.due, term) for term, holding in held.items() if holding.due <= soon)
        group = {term: held[term] for _, term in islice(near, MAX_KEPT)}
        try:
            kept = set(await client.keep(self._tube, list(group)))
        except ReplicadError as error:
            log.info("renewal_failed", tube=self._tube, leases=len(group), code=error.code, error=str(error))
            for holding in group.values():
                if may_pass(error):
                    holding.try_again()
                else:
                    self._lose(holding, error)
            return
        for term, holding in group.items():
            if term in kept:
                holding.renewed(asked)
            else:
                self._lose(holding, LeaseLost(f"term {term} of tube {self._tube} is not held any more"))

    def _lose(self, holding: Holding, error: ReplicadError) -> None:
        self._held.pop(holding.term, None)
        self._in_worker(partial(holding.lose, error))

    def _look(self) -> None:
        self._added.set()
        if self._over and self._scope is not None:
            self._scope.cancel()

    def _in_own_loop(self, call: Callable[[], None]) -> None:
        if self._in_own is not None:  # else it begins with a look
            self._in_own(call)
