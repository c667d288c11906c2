"""Any interleaving of rows, forks, trims, clients that come and go, reads that take long and pieces that are dropped:
each client ends with exactly the rows that there are.

Clients take the rows of earlier positions only from pieces, and these are small. A client discards what a POSITION that
goes back or a refused token takes from it, as protocol.md says.
"""

from __future__ import annotations

import re
from typing import Any

import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replicad.daemon.journal import JournalLimits
from replicad.positions.horizon import Fork, Reading
from replicad.streams.chunks import Chunk
from replicad.streams.registry import Published
from replicad.streams.rows import ChunkSink
from replicad.streams.serving.catchups import CatchupLimits, PieceSizes
from replicad.streams.serving.intervals import StreamIntervals
from tests.lengths import examples

from .conftest import Client, Streams, on_a_jumping_clock, open_streams, settle
from .memory_streams import BEGAN, MemoryRows, MemoryStore

CLIENTS = 5


class Slow(MemoryStore):
    """Reads of catch-ups see the rows at once, and pass them on when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = trio.Event()
        self.gate.set()

    def catchup_rows(self, stream: Any) -> MemoryRows:  # type: ignore[override]
        store = self

        class Rows(MemoryRows):
            async def _copy(self, after: int, wanted: Any, sink: ChunkSink, limit: int | None) -> int:
                chunks: list[Chunk] = []

                async def keep(chunk: Chunk) -> None:
                    chunks.append(chunk)

                count = await super()._copy(after, wanted, keep, limit)
                await store.gate.wait()
                for chunk in chunks:
                    await sink(chunk)
                return count

        return Rows(self, stream)


class Reader:
    """Keeps rows and a token, as a client does."""

    def __init__(self, *, linear: bool) -> None:
        self.linear = linear
        self.client: Client | None = None
        self.rows: dict[int, str] = {}
        self.epoch = ""
        self.at = 0

    async def come(self, streams: Streams) -> None:
        if self.client is None:
            self.client = streams.connect()
            token = f"{self.epoch}!{self.at}" if self.epoch else str(self.at)
            self._take(await self.client.say(f"REPLICATE s {token}{' linear' if self.linear else ''}"))

    async def listen(self, seconds: float = 0.3) -> None:
        if self.client is not None:
            self._take(await self.client.lines(seconds))
            if self.client is not None and self.client.reason is not None:
                self.client = None

    async def leave(self) -> None:
        if self.client is not None:
            await self.listen()
        if self.client is not None:
            await self.client.leave()
            self.client = None

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            word, *rest = line.split(" ")
            if word == "WRITERS":
                self.epoch = rest[1]
            elif word == "POSITION":
                self._move(int(rest[3]))
            elif word == "RDATA":
                assert int(rest[2]) > self.at, "no row comes twice"
                self.at = int(rest[2])
                self.rows[self.at] = rest[3]
            elif found := re.search(r"forked after .* resume from (\w+)!(\d+)", line):
                self.epoch = found[1]
                self._move(int(found[2]))
                self.client = None
            elif "ERROR token_expired" in line or "EARLIEST" in line:
                self.rows, self.at, self.epoch, self.client = {}, 0, "", None
            else:
                assert line.startswith("ERROR"), line
                self.client = None

    def _move(self, at: int) -> None:
        self.at = at
        self.rows = {id: body for id, body in self.rows.items() if id <= at}


class Database:
    """Rows whose bodies say in which generation they were written. Everything that is committed is published."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.last = 0
        self.generation = 0

    def write(self, number: int) -> None:
        self.streams.store.insert("s", *range(self.last + 1, self.last + number + 1), body=str(self.generation))
        self.last += number
        self.streams.positions.tell("s", self.last)

    async def fork(self, back: int) -> None:
        """A restore: the last rows are gone, and other rows get their ids."""
        shared = max(self.last - back, 0)
        table = self.streams.store.tables["s"]
        table.rows = [row for row in table.rows if row[0] <= shared]
        self.streams.store.notes["s"] = Published(shared, {"master": shared}, BEGAN)
        self.streams.positions.say("s", Reading(fork=Fork("restored")))
        await settle()
        self.generation += 1
        self.last = shared
        self.write(back // 2 + 1)


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "come", "come", "leave", "listen", "fork", "shut", "open", "drop", "late"]),
        st.integers(0, CLIENTS - 1),
    ),
    min_size=15,
    max_size=50,
)


async def _live(plan: list[tuple[str, int]]) -> None:
    journal = JournalLimits(max_bytes=120, max_chunks=4)  # so small that who lags must catch up from pieces
    small = CatchupLimits(connections=2, cache_bytes=4096, sizes=PieceSizes(20, 40, 200, block=20))
    store = Slow()
    async with open_streams(
        "s", limits=journal, store=store, catchups=small, pace=StreamIntervals(ahead=1.0)
    ) as streams:
        database = Database(streams)
        database.write(10)
        await settle()
        readers = [Reader(linear=number == 0) for number in range(CLIENTS)]
        for step, number in plan:
            match step:
                case "write":
                    database.write(5 * number + 1)
                case "come":
                    await readers[number].come(streams)
                case "leave":
                    await readers[number].leave()
                case "listen":
                    await readers[number].listen()
                case "fork":
                    await database.fork(3 * number)
                case "shut" if store.gate.is_set():
                    store.gate = trio.Event()
                case "open":
                    store.gate.set()
                case "drop":
                    streams.service.catchups.trimmed(streams.publisher.served["s"], 10 * number)
                case "late":
                    streams.publisher.served["s"].late_rows += 1
        store.gate.set()
        await settle(10)
        rows = {id: body for id, _, body in store.tables["s"].rows}
        for _ in range(4):  # who is refused comes again
            for one in readers:
                await one.come(streams)
                await one.listen(5)
        for one in readers:
            assert one.rows == rows
        assert streams.service.catchups.statistics().bytes <= 4096
        assert streams.troubles.current() == []


@given(steps)
# A piece of the generation before arrives after a fork: the audit must not count its rows as sent in the present one.
@example([("shut", 0), ("come", 3), ("fork", 2), ("open", 0), ("fork", 3)])
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
def test_every_client_ends_with_exactly_the_rows_that_there_are(plan: list[tuple[str, int]]) -> None:
    on_a_jumping_clock(_live, plan)
