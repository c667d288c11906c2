"""Garbage collection of a worker: after a backfill, what the downstream holds from before it is looked at once more.

A row that was deleted while nobody listened leaves no touch. But all rows that exist were touched by the backfill, so
what the downstream holds of the shard with a lower seq than the backfill's `start_seq` is either gone from its table or
on its way here. Those ids are asked for and go through the same path as any touch, with operation G; whoever
processes them finds a row and writes it, or none and deletes it. Only when the downstream has named none for a while is
the control pod acked: a worker that dies before begins anew.
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

FRUITLESS_STEPS = 10  # in which the downstream names the same ids again after they were processed

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
    """Have everything processed that the downstream holds of the pod's shard from before `before`; how many ids.

    `stale_ids(shard, before, limit)` names some of it, at most `step` ids are taken, and none means that nothing is
    left; where it raises it is asked again, with pauses. `settle`: seconds that it has to name none. `process` is
    called when ids were added to the pod, which is held in the ledger, and again until all of them are done.

    Raises:
        DownstreamError: the downstream keeps naming the same ids after they were processed.
    """
    total = fruitless = 0
    before_that: list[int] = []
    empty = False
    backoff = Backoff(first=0.5, cap=30.0)
    while True:
        try:
            stale = list(await stale_ids(pod.shard, before, step))[:step]
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises, it is asked again
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
        if empty or fruitless:  # what was written a moment ago may not be visible to it yet
            await trio.sleep(settle)
        empty, before_that = False, stale
        ledger.add_to(pod.seq, pod.shard, "G", stale)
        total += len(set(stale))
        while ledger.left(pod.seq) > 1:
            await process()
