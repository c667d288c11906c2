"""Facts per second delivered to a thousand local destinations by `replicad sender`.

Every fact goes to half of the destinations. The sender has delivered one to each when the others are committed;
the clock runs from that commit to the last delivery: reading, recording in Postgres, queues and HTTP. Beside it a
plain client (httpx) posts the same bodies, made beforehand, at the same concurrency, to the same receiver: no
stream, no Postgres, no queues, nothing remembered. The sender uses the connections of that client (httpcore) without
what is around them. Both are one process; the receiver is another.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import httpx
import trio

from bench.report import Figure, Spread, rates
from bench.system import MARK, Daemon, Options, System, free_port, process, system

DESTINATIONS = 1000
FACTS = 400  # at full scale
PER_FACT = 500  # destinations of a fact
PER_TRANSACTION = 50  # facts, as the sender has them
CONCURRENCY = 128  # requests at once, likewise
DONE = 300.0  # seconds to wait for the last delivery
_HEAD = b"content-length:"
_spawn = get_context("spawn")


@dataclass(frozen=True, slots=True)
class Receiver:
    """A process that takes every POST; `taken` asks how many facts it has got since it was asked to begin anew."""

    port: int
    pipe: Connection

    def reset(self) -> None:
        """Count from 0 again."""
        self.pipe.send("reset")
        self.pipe.recv()

    def taken(self) -> int:
        """Facts received so far."""
        self.pipe.send("taken")
        return int(self.pipe.recv())


def run(options: Options) -> list[Figure]:
    """Delivered facts per second, to all destinations together."""
    facts = options.sized(FACTS)
    expected = facts * PER_FACT
    mine, plain = [], []
    with system() as ours, ours.daemon() as daemon, _receiver() as receiver:
        ours.sql("CREATE TABLE facts (id bigserial PRIMARY KEY, body json NOT NULL)")
        ours.replicad("streams", "add", "facts", "--table", "public.facts", "--id", "id", "--row", "t.body")
        for number in range(options.runs):
            mine.append(expected / _by_sender(ours, daemon, receiver, f"s{number}", facts))
            plain.append(expected / _by_client(receiver, facts))
    return [
        Figure(
            f"facts/s to {DESTINATIONS} destinations, {PER_FACT} for each fact",
            rates(mine, "facts/s"),
            f"httpx, no queues {rates(plain, 'facts/s')}",
            Spread.of_ratios(mine, plain),
        )
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


def _by_sender(ours: System, daemon: Daemon, receiver: Receiver, name: str, facts: int) -> float:
    """Seconds from the commit to the last delivery; the sender has nothing on record from earlier rounds."""
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
        began = time.monotonic()
        _commit(ours, facts, PER_FACT)
        wait_for(facts * PER_FACT)
        return time.monotonic() - began


def _by_client(receiver: Receiver, facts: int) -> float:
    """Seconds that a plain client takes for the same bodies, after it has posted one to each destination."""
    here, there = _spawn.Pipe()
    poster = _spawn.Process(target=post, args=(there, receiver.port, facts), daemon=True)
    poster.start()
    here.recv()
    receiver.reset()
    began = time.monotonic()
    here.send("go")
    here.recv()
    took = time.monotonic() - began
    poster.join()
    if receiver.taken() != facts * PER_FACT:
        raise RuntimeError(f"{receiver.taken()} of {facts * PER_FACT} facts arrived by the plain client")
    return took


def post(pipe: Connection, port: int, facts: int) -> None:
    """The work of the plain client's process."""
    each = facts * PER_FACT // DESTINATIONS
    sizes = [min(PER_TRANSACTION, each - done) for done in range(0, each, PER_TRANSACTION)]
    pdu = {"event_id": f"${0:014}{MARK.decode()}:example.com", "type": "m.room.msg", "n": 0}
    bodies = [json.dumps({"facts": [pdu] * size, "updates": []}).encode() for size in sizes]
    jobs = [
        (f"http://127.0.0.1:{port}/d{name}/{n}", body) for n, body in enumerate(bodies) for name in range(DESTINATIONS)
    ]
    trio.run(_post_all, pipe, iter([(url, b"") for url, _ in jobs[:DESTINATIONS]]), iter(jobs))


async def _post_all(pipe: Connection, warming: Iterator[tuple[str, bytes]], jobs: Iterator[tuple[str, bytes]]) -> None:
    limits = httpx.Limits(max_connections=CONCURRENCY // 16, max_keepalive_connections=CONCURRENCY // 16)
    clients: Sequence[httpx.AsyncClient] = [
        httpx.AsyncClient(limits=limits, trust_env=False, timeout=60) for _ in range(16)
    ]

    async def work(client: httpx.AsyncClient, jobs: Iterator[tuple[str, bytes]]) -> None:
        for url, body in jobs:
            (await client.post(url, content=body, headers={"content-type": "application/json"})).raise_for_status()

    for some in (warming, jobs):
        async with trio.open_nursery() as nursery:
            for number in range(CONCURRENCY):
                nursery.start_soon(work, clients[number % len(clients)], some)
        pipe.send("done")
        if some is warming:
            await trio.to_thread.run_sync(pipe.recv)


@contextmanager
def _receiver() -> Iterator[Receiver]:
    here, there = _spawn.Pipe()
    port = free_port()
    receiver = _spawn.Process(target=receive, args=(there, port), daemon=True)
    receiver.start()
    here.recv()
    try:
        yield Receiver(port, here)
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
