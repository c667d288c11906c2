"""The lease of one partition as its holder sees it: asked for, trusted until a deadline, over (docs/leases.md).

The deadline counts from the moment at which the last granted request was *sent*. A CLAIM may wait longer than the lease
lives; then its answer says only that the lease was given at some moment, and RENEW is sent before anything is trusted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

import trio

from replicad.client.refusals import may_pass
from replicad.client.trio_client import TrioClient
from replicad.errors import LeaseLost, ReplicadError
from replicad.eventlog import get_logger
from replicad.tubes.commands import Part

OpenClient = Callable[[], AbstractAsyncContextManager[TrioClient]]

RENEWALS = 3  # in a time to live: one may fail
RETRIES = 10  # of a failed renewal in a time to live
RELEASE_TIMEOUT = 1.0  # seconds to release the lease

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Past:
    """A lease that this process had and may still hold in Postgres: its term, and when calls under it may still act."""

    term: int
    until: float


class Holding:
    """Claims, renews and releases the lease of one partition. `scope` is cancelled when the lease is over."""

    def __init__(self, open_client: OpenClient, tube: str, part: Part, key: str, ttl: float) -> None:
        """`key` is that of the process: its next connection is the same holder."""
        self._open_client = open_client
        self._tube = tube
        self._part = part
        self._key = key
        self._ttl = ttl
        self._asked = 0.0
        self._lost: ReplicadError | None = None
        self.term = 0
        self.scope = trio.CancelScope()

    async def claim(self, client: TrioClient, wait: float, past: Past | None) -> None:
        """Get the lease and a deadline that is not near. `past`: the lease before, which is given back first.

        Raises:
            ReplicadError: the daemon's refusal, or ConnectionLost.
            LeaseLost: RENEW takes longer than the lease lives.
        """
        if past is not None:
            await trio.sleep_until(past.until)
            await client.release(self._tube, self._part, past.term)
        self._asked = trio.current_time()
        holder = f"{word_of(client)}!{self._key}"
        lease = await client.claim(self._tube, self._part, ttl=self._ttl, wait=wait, holder=holder)
        self.term = lease.term
        if trio.current_time() >= self._next_renewal():  # CLAIM waited: when the lease was given is unknown
            self._asked = trio.current_time()
            await client.renew(self._tube, self._part, self.term)
        if trio.current_time() >= self._deadline():
            raise LeaseLost(
                f"RENEW of {self._part} of tube {self._tube} took longer than the lease lives ({self._ttl:g} s): "
                "give the worker a longer lease_ttl"
            )
        self.scope.deadline = self._deadline()

    async def keep_renewing(self) -> None:
        """Renew until the lease is lost, which cancels `scope`. On a connection of its own: the other one may wait."""
        async with self._open_client() as client:
            due = self._next_renewal()
            while True:
                await trio.sleep_until(due)
                asked = trio.current_time()
                try:
                    await client.renew(self._tube, self._part, self.term)
                except ReplicadError as error:
                    if not may_pass(error):
                        self.lose(error)
                        return
                    # The deadline stays; the next try may be in time.
                    log.info("renewal_failed", tube=self._tube, part=str(self._part), error=str(error))
                    due = trio.current_time() + self._ttl / RETRIES
                else:
                    self._asked = asked
                    self.scope.deadline = self._deadline()
                    due = self._next_renewal()

    def lose(self, error: ReplicadError) -> None:
        """The daemon refused the term: stop now. `error` is what `failure` returns."""
        self._lost = self._lost or error
        self.scope.cancel()

    @property
    def failure(self) -> ReplicadError:
        """Why the lease is over."""
        return self._lost or LeaseLost(f"the lease of {self._part} of {self._tube} was not renewed in time")

    def past(self, *, busy: bool) -> Past:
        """What to give back before the next claim. `busy`: calls were cancelled.

        A cancelled call may still take effect, so nobody may have its ids before the deadline.
        """
        return Past(self.term, self._deadline() if busy else 0.0)

    async def release(self) -> bool:
        """Release the lease so that another worker can begin at once; False if that failed, for it can expire too."""
        with trio.move_on_after(RELEASE_TIMEOUT, shield=True), suppress(ReplicadError):
            async with self._open_client() as client:  # the other connection may be in the middle of an answer
                await client.release(self._tube, self._part, self.term)
                return True
        return False

    def _next_renewal(self) -> float:
        return self._asked + self._ttl / RENEWALS

    def _deadline(self) -> float:
        return self._asked + self._ttl


def word_of(client: TrioClient) -> str:
    """The client's name as one word of a command."""
    return "_".join(client._target.us.name.split())


def new_key() -> str:
    """A key for the leases of one process."""
    return secrets.token_hex(16)
