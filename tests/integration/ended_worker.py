"""A worker as a process of its own that some ids end: `os._exit`, as a process that the kernel kills for its memory.

Arguments: host, port, tube, the ids that end it (comma separated), and `control` if control pods end it too. It prints
each id that was processed.
"""

from __future__ import annotations

import os
import sys

import trio

from replicad.client.async_client import open_client
from replicad.client.requests import Pod
from replicad.client.worker import Batch, Worker, WorkerSettings

HOST, PORT, TUBE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ENDS = set(map(int, sys.argv[4].split(",")))
CONTROL_ENDS = sys.argv[5:] == ["control"]


async def handle(batch: Batch) -> None:
    await trio.sleep(0.01)
    ids = [touch.id for touch in batch.touches]
    if ENDS & set(ids):
        os._exit(9)
    print(*ids, sep="\n", flush=True)


async def control(pod: Pod) -> None:
    if CONTROL_ENDS:
        os._exit(9)


settings = WorkerSettings(lease_ttl=1.0, poll=0.5)
worker = Worker(lambda: open_client(HOST, PORT, name="ended"), TUBE, handle, control=control, settings=settings)
trio.run(worker.run)
