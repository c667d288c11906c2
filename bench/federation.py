"""Facts per second delivered to a thousand local destinations by `replicad sender`.

Every fact goes to half of the destinations. The sender has delivered one to each when the others are committed;
the clock runs from that commit to the last delivery: reading, recording in Postgres, queues and HTTP. Beside it two
plain clients post the same bodies, made beforehand, at the same concurrency, to the same receiver: no stream, no
Postgres, no queues, nothing remembered. One is httpx, the other is what the sender sends with (`sender.transport`).
Each is one process; the receiver is another. Processor time says more than the rate where others use the machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Literal

import httpx
import psutil
import trio

from bench.report import Figure, Spread, rates
from bench.system import MARK, Daemon, Options, System, cpu, free_port, process, system
from replicad.sender.items import START, Transaction
from replicad.sender.settings import WEBHOOK, Delivery
from replicad.sender.transport import open_transport

DESTINATIONS = 1000
FACTS = 400  # at full scale
PER_FACT = 500  # destinations of a fact
PER_TRANSACTION = 50  # facts, as the sender has them
CONCURRENCY = 128  # requests at once, likewise
DONE = 300.0  # seconds to wait for the last delivery
Kind = Literal["httpx", "the sender's client"]
_HEAD = b"content-length:"
_spawn = get_context("spawn")


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one round, and of processor time: of the client or sender, of Postgres and of the receiver."""

    wall: float
    client: float
    postgres: float
    receiver: float


@dataclass(frozen=True, slots=True)
class Receiver:
    """A process that takes every POST; `taken` asks how many facts it has got since it was asked to begin anew."""

    port: int
    pipe: Connection
    process: psutil.Process

    def reset(self) -> None:
        """Count from 0 again."""
        self.pipe.send("reset")
        self.pipe.recv()

    def taken(self) -> int:
        """Facts received so far."""
        self.pipe.send("taken")
        return int(self.pipe.recv())


def run(options: Options) -> list[Figure]:
    """Delivered facts per second, to all destinations together; and where processor time goes."""
    facts = options.sized(FACTS)
    expected = facts * PER_FACT
    mine: list[Took] = []
    plain: dict[Kind, list[Took]] = {"httpx": [], "the sender's client": []}
    with system() as ours, ours.daemon() as daemon, _receiver() as receiver:
        ours.sql("CREATE TABLE facts (id bigserial PRIMARY KEY, body json NOT NULL)")
        ours.replicad("streams", "add", "facts", "--table", "public.facts", "--id", "id", "--row", "t.body")
        for number in range(options.runs):
            mine.append(_by_sender(ours, daemon, receiver, f"s{number}", facts))
            for kind, rounds in plain.items():
                rounds.append(_by_client(kind, receiver, facts))

    def rate(rounds: list[Took]) -> list[float]:
        return [expected / one.wall for one in rounds]

    def cost(rounds: list[Took], part: Callable[[Took], float]) -> str:
        return f"{median(part(one) for one in rounds) * 1e6 / expected:.1f} us"

    figures = [
        Figure(
            f"facts/s to {DESTINATIONS} destinations, {PER_FACT} for each fact",
            rates(rate(mine), "facts/s"),
            f"{kind}, no queues {rates(rate(rounds), 'facts/s')}",
            Spread.of_ratios(rate(mine), rate(rounds)),
            at_least=0.75,
        )
        for kind, rounds in plain.items()
    ]
    return [
        *figures,
        *(
            Figure(
                "processor time for a fact",
                f"sender {cost(mine, lambda took: took.client)}, Postgres {cost(mine, lambda took: took.postgres)}, "
                f"receiver {cost(mine, lambda took: took.receiver)}",
                f"{kind} {cost(rounds, lambda took: took.client)}, receiver {cost(rounds, lambda took: took.receiver)}",
                Spread.of_ratios([1 / one.client for one in mine], [1 / one.client for one in rounds]),
            )
            for kind, rounds in plain.items()
        ),
    ]


def _commit(ours: System, facts: int, per_fact: int, first: int = 1) -> None:
    """Add facts, each for so many destinations; a fact is about 90 bytes, with the mark that the receiver counts."""
    ours.sql(
        "INSERT INTO facts (body) SELECT json_build_object("
        f"'destinations', (SELECT json_agg('d' || (n + k * {DESTINATIONS // per_fact}) % {DESTINATIONS})"
        f" FROM generate_series(0, {per_fact - 1}) AS k), 'room', 'r' || n, 'pdu', json_build_object('event_id',"
        f" format('$%s{MARK.decode()}:example.com', lpad(n::text, 14, '0')), 'type', 'm.room.msg', 'n', n))"
        f" FROM generate_series({first}, {facts}) AS n"
    )


def _by_sender(ours: System, daemon: Daemon, receiver: Receiver, name: str, facts: int) -> Took:
    """From the commit to the last delivery; the sender has nothing on record from earlier rounds."""
    ours.sql(
        "TRUNCATE facts",
        "DO $$ BEGIN IF to_regclass('replicad.federation_fact') IS NOT NULL THEN TRUNCATE replicad.federation_fact, "
        "replicad.federation_destination, replicad.federation_destination_room, replicad.federation_edu CASCADE; "
        "END IF; END $$",
    )
    command = [
        sys.executable, "-m", "replicad", "sender", "--facts", "facts", "--form", "webhook", "--server",
        f"{daemon.host}:{daemon.port}", "--database", ours.url, "--from", "now", "--sender-name", name,
        "--url", f"http://127.0.0.1:{receiver.port}/{{destination}}/{{transaction}}", "--allow-private", "127.0.0.1",
        "--log-level", "warning",
    ]  # fmt: skip
    with (ours.folder / "sender.log").open("ab") as log, process(command, output=log) as sender:

        def wait_for(taken: int, pause: float = 0.01, nudge: Callable[[], None] = lambda: None) -> None:
            deadline = time.monotonic() + DONE
            while receiver.taken() < taken:
                if time.monotonic() > deadline or sender.poll() is not None:
                    said = (ours.folder / "sender.log").read_text(encoding="utf-8")[-500:]
                    raise RuntimeError(f"only {receiver.taken()} of {taken} facts were delivered; {said}")
                nudge()
                time.sleep(pause)

        receiver.reset()
        wait_for(1, 0.2, lambda: _commit(ours, 1, 1))  # it is not told when the sender has begun to follow
        receiver.reset()
        _commit(ours, 1, DESTINATIONS)
        wait_for(DESTINATIONS)
        receiver.reset()
        parts = (psutil.Process(sender.pid), receiver.process)
        before, database = [cpu(one) for one in parts], ours.cpu()
        began = time.monotonic()
        _commit(ours, facts, PER_FACT)
        wait_for(facts * PER_FACT)
        wall = time.monotonic() - began
        mine, theirs = (cpu(one) - spent for one, spent in zip(parts, before, strict=True))
        return Took(wall, mine, ours.cpu_since(database), theirs)


def _by_client(kind: Kind, receiver: Receiver, facts: int) -> Took:
    """For the same bodies by a plain client, after it has posted one to each destination."""
    here, there = _spawn.Pipe()
    poster = _spawn.Process(target=post, args=(there, kind, receiver.port, facts), daemon=True)
    poster.start()
    here.recv()
    receiver.reset()
    parts = (psutil.Process(poster.pid), receiver.process)
    before = [cpu(one) for one in parts]
    began = time.monotonic()
    here.send("go")
    here.recv()
    wall = time.monotonic() - began
    mine, theirs = (cpu(one) - spent for one, spent in zip(parts, before, strict=True))
    here.send("end")
    poster.join()
    if receiver.taken() != facts * PER_FACT:
        raise RuntimeError(f"{receiver.taken()} of {facts * PER_FACT} facts arrived by the plain client")
    return Took(wall, mine, 0.0, theirs)


def post(pipe: Connection, kind: Kind, port: int, facts: int) -> None:
    """The work of the plain client's process."""
    each = facts * PER_FACT // DESTINATIONS
    sizes = [min(PER_TRANSACTION, each - done) for done in range(0, each, PER_TRANSACTION)]
    pdu = {"event_id": f"${0:014}{MARK.decode()}:example.com", "type": "m.room.msg", "n": 0}
    bodies = [(json.dumps(pdu, separators=(",", ":")),) * size for size in sizes]
    jobs = [(f"d{name}", n, body) for n, body in enumerate(bodies) for name in range(DESTINATIONS)]
    trio.run(_post_all, pipe, kind, port, iter([(name, n, ()) for name, n, _ in jobs[:DESTINATIONS]]), iter(jobs))


Job = tuple[str, int, tuple[str, ...]]  # the name of a destination, the number of the transaction, its facts
Send = Callable[[Job], Awaitable[None]]


async def _post_all(pipe: Connection, kind: Kind, port: int, warming: Iterator[Job], jobs: Iterator[Job]) -> None:
    async def work(send: Send, jobs: Iterator[Job]) -> None:
        for job in jobs:
            await send(job)

    async with _httpx(port) if kind == "httpx" else _transport(port) as senders:
        for some in (warming, jobs):
            async with trio.open_nursery() as nursery:
                for number in range(CONCURRENCY):
                    nursery.start_soon(work, senders[number % len(senders)], some)
            pipe.send("done")
            await trio.to_thread.run_sync(pipe.recv)


@asynccontextmanager
async def _httpx(port: int) -> AsyncIterator[Sequence[Send]]:
    limits = httpx.Limits(max_connections=CONCURRENCY // 16, max_keepalive_connections=CONCURRENCY // 16)

    def sender(client: httpx.AsyncClient) -> Send:
        async def send(job: Job) -> None:
            name, number, facts = job
            body = f'{{"facts":[{",".join(facts)}],"updates":[]}}'.encode()
            url = f"http://127.0.0.1:{port}/{name}/{number}"
            answer = await client.post(url, content=body, headers={"content-type": "application/json"})
            answer.raise_for_status()

        return send

    yield [sender(httpx.AsyncClient(limits=limits, trust_env=False, timeout=60)) for _ in range(16)]


@asynccontextmanager
async def _transport(port: int) -> AsyncIterator[Sequence[Send]]:
    url = f"http://127.0.0.1:{port}/{{destination}}/{{transaction}}"
    async with open_transport(Delivery(form=WEBHOOK, url=url, allow_private=("127.0.0.1",))) as transport:

        async def send(job: Job) -> None:
            name, number, facts = job
            outcome = await transport.send(name, Transaction(f"{number:032x}", number, 0, START, facts, ()))
            if not outcome.delivered:
                raise RuntimeError(outcome.reason)

        yield [send]


@contextmanager
def _receiver() -> Iterator[Receiver]:
    here, there = _spawn.Pipe()
    port = free_port()
    receiver = _spawn.Process(target=receive, args=(there, port), daemon=True)
    receiver.start()
    here.recv()
    try:
        yield Receiver(port, here, psutil.Process(receiver.pid))
    finally:
        receiver.kill()
        receiver.join()


def receive(pipe: Connection, port: int) -> None:
    """The work of the receiver's process."""
    asyncio.run(_receive(pipe, port))


async def _receive(pipe: Connection, port: int) -> None:
    counted = [0]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Taker(counted), "127.0.0.1", port, backlog=1024)
    pipe.send("ready")

    def answer() -> None:
        if pipe.recv() == "reset":
            counted[0] = 0
        pipe.send(counted[0])

    loop.add_reader(pipe.fileno(), answer)
    async with server:
        await server.serve_forever()


class _Taker(asyncio.Protocol):
    """Answers each request as soon as it is whole."""

    def __init__(self, counted: list[int]) -> None:
        self._counted = counted
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.index(_HEAD) + len(_HEAD)
            whole = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
            if len(self._data) < whole:
                return
            self._counted[0] += self._data.count(MARK, end, whole)
            self._data = self._data[whole:]
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
