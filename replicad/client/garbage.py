"""Garbage collection of a worker: after a backfill, processes the ids that the downstream holds from before it.

A row that was deleted while the tube had no triggers leaves no touch. But the backfill has touched all rows that exist.
So an id that the downstream holds with a lower seq than the backfill's `start_seq` either was deleted from its table or
has a touch that is not processed yet. The worker asks for these ids (`stale_ids`) and processes them like any touch,
with operation G: the user's function finds a row and writes it, or finds none and deletes it. The control pod is acked
when the downstream has named none for a while; a worker that is killed before that begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from replicad.client.ledger import Ledger
from replicad.client.pods import Pod
from replicad.errors import DownstreamError
from replicad.eventlog import get_logger
from replicad.retry import Backoff

StaleIds = Callable[[int, int, int], Awaitable[Sequence[int]]]

FRUITLESS_STEPS = 10  # in a row that return the same ids again after they were processed; then it gives up

log = get_logger(__name__)


async def collect(
    stale_ids: StaleIds,
    ledger: Ledger,
    pod: Pod,
    before: int,
    *,
    step: int,
    settle: float,
    process: Callable[[], Awaitable[None]],
) -> int:
    """Process all ids that the downstream holds of the pod's shard for a seq below `before`; returns how many.

    `stale_ids(shard, before, limit)` returns some of them, or none if none is left; at most `step` are taken. If it
    raises, it is called again after a pause. It must return none for `settle` seconds. `process` is called when ids
    were added to the pod, which is held in the ledger, and again until all of them are done.

    Raises:
        DownstreamError: the downstream keeps returning the same ids after they were processed.
    """
    total = fruitless = 0
    before_that: list[int] = []
    empty = False
    backoff = Backoff(first=0.5, cap=30.0)
    while True:
        try:
            stale = list(await stale_ids(pod.shard, before, step))[:step]
        except Exception as error:  # noqa: BLE001 - of the user; it is called again
            log.warning("stale_ids_failed", shard=pod.shard, seq=pod.seq, error=repr(error))
            await trio.sleep(backoff.next_delay())
            continue
        backoff.reset()
        if not stale:
            if empty:
                return total
            empty = True
            await trio.sleep(settle)
            continue
        fruitless = fruitless + 1 if stale == before_that else 0
        if fruitless >= FRUITLESS_STEPS:
            raise DownstreamError(
                f"the downstream still names {len(stale)} stale ids of shard {pod.shard}, e.g. {stale[0]}, after they "
                "were written or deleted; does it keep the seq of touches with its rows?"
            )
        if empty or fruitless:  # recent writes may not be visible to it yet
            await trio.sleep(settle)
        empty, before_that = False, stale
        ledger.add_to(pod.seq, pod.shard, "G", stale)
        total += len(set(stale))
        while ledger.left(pod.seq) > 1:
            await process()
