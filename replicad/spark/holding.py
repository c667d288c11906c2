"""The driver's lease on a whole tube (`0/1`, whatever its number of partitions), renewed by a thread.

One query owns one tube. A lost connection is opened again. A lost lease is claimed again; tasks then read under its new
term. Nothing is connected before the first request, because Spark also creates readers in processes that only plan.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

from replicad.client.blocking_client import BlockingClient
from replicad.errors import (
    ConnectionLost,
    CursorAhead,
    DatabaseUnavailable,
    LeaseForked,
    LeaseHeld,
    LeaseLost,
    ReplicadError,
    UsageError,
)
from replicad.protocol.tokens import Cursor
from replicad.spark.options import SourceOptions, endpoint_of, retries_of
from replicad.tubes.commands import CursorAt, Part, Seen

T = TypeVar("T")

WHOLE = Part(0, 1)
BEATS = 3  # renewals in one time to live: two may fail
CLAIM_SLICE = 10.0  # seconds of waiting in one CLAIM; daemons limit it
POSITION_PATIENCE = 5.0  # seconds in which a daemon that has just started learns the tube's position
SHARED = "shared"  # the key of a holder that was given without one: several processes of a query may claim as it
_ANOTHER = "tube {} was dropped and made again"
_SIDE_TIMEOUT = 5.0  # seconds for an answer to a renewal, and to the release at the end

log = logging.getLogger("replicad.spark")


def holder_name(consumer: str | None, kind: str, number: int | str) -> str:
    """The name of the holder, which an ERROR lease_held shows: `demo/query@host/4711-c0ffee`."""
    host = "".join(letter if "!" <= letter <= "~" else "-" for letter in socket.gethostname())
    return f"{consumer or 'spark'}/{kind}@{host}/{number}"[:255]


class TubeHold:
    """A tube and its lease, for one query. Requests are for one thread at a time; renewals have their own thread.

    `holder` None: a name that is unique to this process, so that no other process gets the same term. All connections
    of one holder share the lease by the key behind the `!` (docs/leases.md).
    """

    def __init__(
        self, options: SourceOptions, *, holder: str | None = None, ttl: float | None = None, renewing: bool = True
    ) -> None:
        assert options.tube is not None
        self.tube: str = options.tube
        given = holder or holder_name(options.consumer, "query", f"{os.getpid()}-{secrets.token_hex(4)}")
        self.holder, _, key = given.partition("!")  # without the key, which is secret
        self._claims_as = f"{self.holder}!{key or (SHARED if holder else secrets.token_hex(16))}"
        self._options = options
        self._ttl = options.lease_ttl if ttl is None else ttl
        self._client = endpoint_of(options).connect(self.holder)
        # for renewals: the first connection may be waiting for an answer for a long time
        self._side = endpoint_of(options, timeout=_SIDE_TIMEOUT).connect(f"{self.holder}/renew"[:255])
        self._lock = threading.RLock()  # reentrant: SIGTERM may interrupt the main thread while it has the lock
        self._term: int | None = None
        self.made: int | None = None  # when the tube was made; known after the first request
        self.generation: str | None = None  # of the tube's history, in which the lease was given
        self._entered: str | None = None  # the generation of the cursors that requests name; None: they name none yet
        self._renewing = renewing
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # --- requests ---

    def partitions(self) -> int:
        """The tube's number of partitions now.

        Raises:
            UnknownTube, ConnectionLost, NotAuthorised.
        """
        partitions, made = self._look()
        if self.made is None:
            self._check_keys()
            self.made = made
        return partitions

    def expect(self, made: int | None) -> None:
        """Check that the tube was made then; None: any.

        Every claim checks that it is still the same tube. A tube that is dropped loses its leases. So no request
        reaches another tube under a term of this one.

        Raises:
            CursorAhead: the tube was dropped and made again.
        """
        if made is not None and self.made is None:
            self.partitions()
        if made is not None and self.made not in (None, made):
            raise CursorAhead(_ANOTHER.format(self.tube))

    def enter(self, generation: str | None) -> None:
        """From now on requests name cursors of this generation. None: of the present one.

        Raises:
            LeaseForked: it is not the present one: history has forked. The cursors are void.
            LeaseHeld: as `term`.
        """
        self.term()
        self._entered = generation or self.generation
        self._check_generation()

    def seen(self, generation: str, seq: int) -> Seen:
        """Say that pods up to `seq` of an earlier generation were passed on; the answer says which of them are lost."""
        return self._with_retries(lambda client: client.seen(self.tube, generation, seq))

    def _check_generation(self) -> None:
        if self._entered not in (None, self.generation):
            raise LeaseForked(f"{LeaseForked.FORKED}: cursors of tube {self.tube} are of an earlier generation")

    def _check_keys(self) -> None:
        """Raise UsageError if the tube has ids of another kind than the query expects."""
        found, expected = self._with_retries(lambda client: client.tube_keys(self.tube)), self._options.keys
        if found != expected:
            raise UsageError(
                f"tube {self.tube} has ids of kind {found}, and the query expects {expected}: set the option "
                f'keys={found} (in the file of a pipeline: keys = "{found}" in [source])'
            )

    def _look(self) -> tuple[int, int | None]:
        return self._with_retries(lambda client: client.tube_made(self.tube))

    def term(self) -> int:
        """The term of the lease. Claims the lease if there is none.

        Raises:
            LeaseHeld: another query still had the tube after `leaseWait`.
        """
        with self._lock:
            known = self._term
        return known if known is not None else self._claim()

    def plan(
        self,
        part: Part,
        after: Cursor,
        *,
        limit: int,
        ids: int | None = None,
        backfill: int | None = None,
        wait: float = 0.0,
    ) -> CursorAt:
        """How far a read of a partition from `after` would get (see `tubes.commands.Pods`).

        Raises:
            CursorAhead: `after` lies beyond the tube's position.
        """
        return self._with_lease(
            lambda client, term: client.plan(
                self.tube, part, term, after, limit=limit, ids=ids, backfill=backfill, wait=wait
            )
        )

    def ack(self, part: Part, after: Cursor, upto: Cursor) -> int:
        """Remove the pods of (after, upto]; returns how many there were. Safe to repeat."""
        return self._with_lease(lambda client, term: client.ack_upto(self.tube, part, term, after=after, upto=upto))

    def _with_lease(self, request: Callable[[BlockingClient, int], T]) -> T:
        """Run a request under the lease. If the lease was lost, claim it again and repeat the request once."""
        patient_until = time.monotonic() + POSITION_PATIENCE
        lost_before = False
        while True:
            term = self.term()
            self._check_generation()
            try:
                return self._with_retries(lambda client, term=term: request(client, term))  # type: ignore[misc]
            except LeaseLost as error:
                self._forget(term)
                if lost_before:
                    raise
                lost_before = True
                log.warning("lease of tube %s lost, claiming it again: %s", self.tube, error)
            except CursorAhead:
                if time.monotonic() >= patient_until:
                    raise
                time.sleep(0.1)

    def _with_retries(self, request: Callable[[BlockingClient], T]) -> T:
        """Run a request and repeat it when the connection is lost. All requests are safe to repeat."""
        retries = retries_of(self._options)
        while True:
            try:
                return request(self._client)
            except (ConnectionLost, DatabaseUnavailable):
                if not retries.pause():
                    raise

    # --- the lease ---

    def _claim(self) -> int:
        deadline = time.monotonic() + self._options.claim_wait
        wait = 0.0
        while True:
            try:
                lease = self._with_retries(
                    lambda client, wait=wait: client.claim(  # type: ignore[misc]
                        self.tube, WHOLE, ttl=self._ttl, wait=wait, holder=self._claims_as
                    )
                )
                break
            except LeaseHeld as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LeaseHeld(f"{error} (waited {self._options.claim_wait:g} s, see option leaseWait)") from error
                if not wait:
                    log.warning("%s; waiting up to %.0f s for it", error, left)
                wait = min(left, CLAIM_SLICE)
        term: int = lease.term
        _, made = self._look()
        known, self.made = self.made, made
        if known not in (None, made):
            with suppress(ReplicadError):  # it expires anyway
                self._side.release(self.tube, WHOLE, term)
            raise CursorAhead(_ANOTHER.format(self.tube))
        with self._lock:
            self._term, self.generation = term, lease.generation
        if self._renewing and self._thread is None:
            self._thread = threading.Thread(target=self._renew_forever, name="replicad-renew", daemon=True)
            self._thread.start()
        return term

    def _forget(self, term: int | None) -> None:
        with self._lock:
            if self._term == term:
                self._term = None

    def _renew_forever(self) -> None:
        failing = False
        with self._side:
            while not self._stopping.is_set():
                with self._lock:
                    term = self._term
                try:
                    if term is not None:
                        self._side.renew(self.tube, WHOLE, term)
                    failing = False
                except LeaseLost:
                    self._forget(term)
                except ReplicadError as error:  # tried again below; the query's own requests report it to the user
                    if not failing and not self._stopping.is_set():
                        log.warning("lease of tube %s not renewed, trying again: %s", self.tube, error)
                    failing = True
                self._stopping.wait(self._ttl / BEATS)

    def release(self) -> None:
        """Release the lease now, so that the next query need not wait. Best effort, with a time limit.

        Uses the connection of the renewals because it is open already: when Spark stops a query, it kills this process
        a millisecond or two later.
        """
        with self._lock:
            term, self._term = self._term, None
        if term is None:
            return
        try:
            self._side.release(self.tube, WHOLE, term)
        except ReplicadError as error:
            log.warning("lease of tube %s not released, it expires in %g s: %s", self.tube, self._ttl, error)

    def close(self) -> None:
        """Close the connections and end the renewals. The lease stays until it expires; see `release`."""
        self._stopping.set()
        self._client.close()
        self._side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
