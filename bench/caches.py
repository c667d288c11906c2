"""Cache invalidations per second to 200 workers: committed on our side, published by Redis on the other.

Every worker has a cache of its own and a connection of its own; they live in two processes. Ours follow the stream with
the trio client, as a program would, and keep its promises. Beside them the same caches are handed the same rows from
Redis pub/sub, by a reader that does nothing else: what it misses is lost. What is told is invalidations carried out in
all, by the time between the first and the last.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection

import trio

from bench.peers import Peer, redis
from bench.readers import PATIENCE, PROCESSES, Door, Heard, processes
from bench.report import Figure, Spread, rates
from bench.system import STREAM, Daemon, Options, System, system
from replicad.caches.trio_invalidator import CacheInvalidator
from replicad.client.trio_client import open_client

WORKERS = 200
ROWS = 3000  # invalidations in one transaction
_NAME = "get_user_by_id"
_KEY = "@user%d:example.com"

Run = Callable[["Worker", trio.TaskStatus[None]], Awaitable[None]]


def run(options: Options) -> list[Figure]:
    """One figure."""
    rows = options.sized(ROWS)
    mine: list[float] = []
    theirs: list[float] = []
    with system() as ours, ours.daemon() as daemon, redis() as peer:
        ours.replicad("caches", "enable")
        for _ in range(options.runs):
            mine.append(_by_us(ours, daemon, rows))
            if peer is not None:
                theirs.append(_by_redis(peer, rows))
    beside = f"Redis pub/sub {rates(theirs, 'rows/s')}" if theirs else ""
    ratio = Spread.of_ratios(mine, theirs) if theirs else None
    return [Figure(f"invalidations/s carried out by {WORKERS} workers", rates(mine, "rows/s"), beside, ratio)]


def _by_us(ours: System, daemon: Daemon, rows: int) -> float:
    door = Door(daemon.host, daemon.port, b"", b"")
    keys = f"jsonb_build_array(format('{_KEY.replace('%d', '%s')}', n))"
    with processes([(work, (_follow, door, WORKERS // PROCESSES, rows)) for _ in range(PROCESSES)]) as pipes:
        ours.sql(f"SELECT count(replicad.invalidate_cache('{_NAME}', {keys})) FROM generate_series(1, {rows}) n")
        return _rate(pipes)


def _by_redis(peer: Peer, rows: int) -> float:
    lines = [json.dumps([_NAME, [_KEY % n], 1490197670513]).encode() for n in range(1, rows + 1)]
    with processes([(work, (_subscribe, peer.door, WORKERS // PROCESSES, rows)) for _ in range(PROCESSES)]) as pipes:
        peer.publish(lines)
        return _rate(pipes)


def _rate(pipes: list[Connection]) -> float:
    parts: list[Heard] = [pipe.recv() for pipe in pipes]
    if any(part.lost for part in parts):
        raise RuntimeError(f"workers got too little: {parts}")
    return sum(part.rows for part in parts) / (max(part.last for part in parts) - min(part.first for part in parts))


class Worker(CacheInvalidator):
    """A cache that holds every entry there is, and notes when they went."""

    def __init__(self, door: Door, rows: int) -> None:
        super().__init__()
        self.door = door
        self.first = self.last = 0.0
        self.done = trio.Event()
        self._expected = rows
        self._users = self.cache(_NAME, max_entries=rows)

    def fill(self) -> None:
        """Once it is live."""
        for n in range(1, self._expected + 1):
            self._users.store(self._users.begin((_KEY % n,)), n)

    def apply(self, rows: Sequence[str]) -> None:
        """As in Caches."""
        self.first = self.first or time.monotonic()
        super().apply(rows)
        if self._rows == self._expected:
            self.last = time.monotonic()
            self.done.set()


def work(pipe: Connection, method: Run, door: Door, workers: int, rows: int) -> None:
    """The work of one process: say when all are live, then wait until all have carried out everything."""
    pipe.send(trio.run(_work, pipe, method, door, workers, rows))


async def _work(pipe: Connection, method: Run, door: Door, workers: int, rows: int) -> Heard:
    async with trio.open_nursery() as nursery:
        crowd = [Worker(door, rows) for _ in range(workers)]
        for worker in crowd:
            await nursery.start(functools.partial(_begin, method, worker))
            worker.fill()
        pipe.send("ready")
        with trio.move_on_after(PATIENCE):
            for worker in crowd:
                await worker.done.wait()
        nursery.cancel_scope.cancel()
    counts = [worker.statistics().caches[_NAME] for worker in crowd]
    lost = sum(count.invalidated < rows or count.entries > 0 for count in counts)
    return Heard(
        sum(count.invalidated for count in counts),
        min(worker.first for worker in crowd),
        max(worker.last for worker in crowd),
        lost,
    )


async def _begin(method: Run, worker: Worker, *, task_status: trio.TaskStatus[None]) -> None:
    await method(worker, task_status)


async def _follow(worker: Worker, task_status: trio.TaskStatus[None]) -> None:
    async with open_client(worker.door.host, worker.door.port, name="bench") as client:
        await worker.run(client, task_status=task_status)


async def _subscribe(worker: Worker, task_status: trio.TaskStatus[None]) -> None:
    """Messages of Redis: `*3 $7 message $5 bench $n row`, each on a line of its own."""
    mark = f"message\r\n${len(STREAM)}\r\n{STREAM}\r\n$".encode()
    async with await trio.open_tcp_stream(worker.door.host, worker.door.port) as link:
        await link.send_all(worker.door.hello)
        rest = b""
        while worker.door.ready not in rest:
            rest += await link.receive_some(4096)
        rest = b""
        worker.stand(live=True)
        task_status.started()
        while data := await link.receive_some(1 << 18):
            *messages, rest = (rest + data).split(b"*3\r\n$7\r\n" + mark)
            if rest.endswith(b"\r\n") and rest.count(b"\r\n") == 2:  # the last of the block is whole
                messages, rest = [*messages, rest], b""
            for message in messages:
                if message:
                    worker.apply([message.split(b"\r\n", 2)[1].decode()])
