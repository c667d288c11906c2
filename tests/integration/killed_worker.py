"""A worker as a process of its own, for tests that kill it: prints each id when its processing begins and ends.

Arguments: host, port, tube, and the id at which it stops for ever, as a worker that hangs in its downstream.
"""

from __future__ import annotations

import sys

import trio

from replicad.client.async_client import open_client
from replicad.client.worker import Batch, Worker, WorkerSettings

HOST, PORT, TUBE, STOP_AT = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


async def handle(batch: Batch) -> None:
    for touch in batch.touches:
        print("begin", touch.id, flush=True)
        if touch.id == STOP_AT:
            await trio.sleep_forever()
        print("end", touch.id, flush=True)


settings = WorkerSettings(batch_ids=10, lease_ttl=2.0, poll=1.0)
trio.run(Worker(lambda: open_client(HOST, PORT, name="to-be-killed"), TUBE, handle, settings=settings).run)
