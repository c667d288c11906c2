"""Cache invalidations per second to 200 workers: committed on our side, published by Redis on the other.

Every worker has a cache of its own and a connection of its own; they live in two processes. Ours follow the stream with
the async client, as a program would, and keep its promises. Beside them the same caches are handed the same rows from
Redis pub/sub, by a reader that does nothing else: what it misses is lost. It hands over message by message, as clients
of Redis do, or (which none does) all messages together that were received together, as ours does. What is told is
invalidations carried out in all, by the time between the first and the last, and the processor time of workers and
server for each.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import trio

from bench.pubsub import Peer, redis
from bench.readers import PATIENCE, PROCESSES, Door, Heard, processes
from bench.report import Figure, Spread, rates
from bench.system import STREAM, Daemon, Options, System, cpu, system
from replicad.caches.async_invalidator import CacheInvalidator
from replicad.client.async_client import open_client

WORKERS = 200
ROWS = 3000  # invalidations in one transaction
_NAME = "get_user_by_id"
_KEY = "@user%d:example.com"


@dataclass(frozen=True, slots=True)
class Took:
    """One round: invalidations in a second, and processor time for each, in microseconds."""

    rate: float
    workers: float
    server: float


Run = Callable[["Worker", trio.TaskStatus[None]], Awaitable[None]]


def run(options: Options) -> list[Figure]:
    """One figure."""
    rows = options.sized(ROWS)
    mine: list[Took] = []
    theirs: dict[str, list[Took]] = {"message by message": [], "together": []}
    with system() as ours, ours.daemon() as daemon, redis() as peer:
        ours.replicad("caches", "enable")
        for _ in range(options.runs):
            mine.append(_by_us(ours, daemon, rows))
            for how, rounds in theirs.items() if peer is not None else ():
                rounds.append(_by_redis(peer, rows, together=how == "together"))

    def figures(what: str, part: Callable[[Took], float], tell: Callable[[Sequence[float]], str]) -> list[Figure]:
        own = [part(one) for one in mine]
        others = {how: [part(one) for one in rounds] for how, rounds in theirs.items() if rounds}
        return [
            Figure(what, tell(own), f"Redis pub/sub, {how}: {tell(values)}", Spread.of_ratios(own, values))
            for how, values in others.items()
        ] or [Figure(what, tell(own))]

    def time_of(values: Sequence[float]) -> str:
        return f"{median(values):.2f} us"

    return [
        *figures(
            f"invalidations/s carried out by {WORKERS} workers", lambda one: one.rate, lambda all: rates(all, "rows/s")
        ),
        *figures("processor time of a worker for each", lambda one: one.workers, time_of),
        *figures("of the server (daemon, redis-server)", lambda one: one.server, time_of),
    ]


def _by_us(ours: System, daemon: Daemon, rows: int) -> Took:
    door = Door(daemon.host, daemon.port, b"", b"")
    keys = f"jsonb_build_array(format('{_KEY.replace('%d', '%s')}', n))"
    with processes([(work, (_follow, door, WORKERS // PROCESSES, rows)) for _ in range(PROCESSES)]) as pipes:
        before = daemon.cpu()
        ours.sql(f"SELECT count(replicad.invalidate_cache('{_NAME}', {keys})) FROM generate_series(1, {rows}) n")
        return _took(pipes, lambda: daemon.cpu() - before)


def _by_redis(peer: Peer, rows: int, *, together: bool) -> Took:
    lines = [json.dumps([_NAME, [_KEY % n], 1490197670513]).encode() for n in range(1, rows + 1)]
    with processes(
        [
            (work, (_subscribe_together if together else _subscribe, peer.door, WORKERS // PROCESSES, rows))
            for _ in range(PROCESSES)
        ]
    ) as pipes:
        before = cpu(peer.process)
        peer.publish(lines)
        return _took(pipes, lambda: cpu(peer.process) - before)


def _took(pipes: list[Connection], of_server: Callable[[], float]) -> Took:
    found: list[tuple[Heard, float]] = [pipe.recv() for pipe in pipes]
    parts = [part for part, _ in found]
    if any(part.lost for part in parts):
        raise RuntimeError(f"workers got too little: {parts}")
    rows = sum(part.rows for part in parts)
    wall = max(part.last for part in parts) - min(part.first for part in parts)
    return Took(rows / wall, sum(spent for _, spent in found) * 1e6 / rows, of_server() * 1e6 / rows)


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


async def _work(pipe: Connection, method: Run, door: Door, workers: int, rows: int) -> tuple[Heard, float]:
    async with trio.open_nursery() as nursery:
        crowd = [Worker(door, rows) for _ in range(workers)]
        for worker in crowd:
            await nursery.start(functools.partial(_begin, method, worker))
            worker.fill()
        pipe.send("ready")
        before = time.process_time()
        with trio.move_on_after(PATIENCE):
            for worker in crowd:
                await worker.done.wait()
        spent = time.process_time() - before
        nursery.cancel_scope.cancel()
    counts = [worker.statistics().caches[_NAME] for worker in crowd]
    lost = sum(count.invalidated < rows or count.entries > 0 for count in counts)
    heard = Heard(
        sum(count.invalidated for count in counts),
        min(worker.first for worker in crowd),
        max(worker.last for worker in crowd),
        lost,
    )
    return heard, spent


async def _begin(method: Run, worker: Worker, *, task_status: trio.TaskStatus[None]) -> None:
    await method(worker, task_status)


async def _follow(worker: Worker, task_status: trio.TaskStatus[None]) -> None:
    async with open_client(worker.door.host, worker.door.port, name="bench") as client:
        await worker.run(client, task_status=task_status)


async def _subscribe(worker: Worker, task_status: trio.TaskStatus[None]) -> None:
    async for rows in _messages(worker, task_status):
        for row in rows:
            worker.apply([row])


async def _subscribe_together(worker: Worker, task_status: trio.TaskStatus[None]) -> None:
    async for rows in _messages(worker, task_status):
        worker.apply(rows)


async def _messages(worker: Worker, task_status: trio.TaskStatus[None]) -> AsyncIterator[list[str]]:
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
            if rows := [message.split(b"\r\n", 2)[1].decode() for message in messages if message]:
                yield rows
