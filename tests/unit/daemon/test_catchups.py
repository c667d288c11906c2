"""Catching up without Postgres: reads are shared, wait for no socket, and a client that takes too little is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from replicad.daemon.fairness import Asker
from replicad.daemon.service import HangUp
from replicad.errors import DatabaseError, TokenExpired
from replicad.protocol.connection import CloseReason
from replicad.streams.chunks import Chunk
from replicad.streams.rows import ChunkSink
from replicad.streams.serving.catchups import CatchupLimits, Catchups, PieceSizes
from replicad.streams.serving.copying import Copying, Taking
from replicad.streams.serving.served_stream import ServedStream
from replicad.streams.serving.starts import Start

from .conftest import Streams, open_streams, settle
from .memory_streams import MemoryRows, MemoryStore

SMALL = CatchupLimits(connections=1, cache_bytes=1 << 20, sizes=PieceSizes(100, 100, 400))


class Counted(MemoryStore):
    """Counts what catch-ups read, and reads under way. A read takes `seconds`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.rows_read = self.now = self.most = 0
        self.seconds = 0.1
        self.blocks = 0  # reads in blocks
        self.refuses_blocks = False

    def catchup_rows(self, stream: Any) -> MemoryRows:  # type: ignore[override]
        store = self

        class Rows(MemoryRows):
            async def copy_blocks(self, *args: Any, **options: Any) -> int:
                store.blocks += 1
                if store.refuses_blocks:
                    raise DatabaseError("a row of the piece cannot be read")
                return await super().copy_blocks(*args, **options)

            async def _copy(self, after: int, wanted: Any, sink: ChunkSink, limit: int | None) -> int:
                chunks: list[Chunk] = []

                async def keep(chunk: Chunk) -> None:
                    chunks.append(chunk)

                store.now += 1
                store.most = max(store.most, store.now)
                try:
                    count = await super()._copy(after, wanted, keep, limit)  # the snapshot
                    await trio.sleep(store.seconds)
                finally:
                    store.now -= 1
                store.reads += 1
                store.rows_read += count
                for chunk in chunks:
                    await sink(chunk)
                return count

        return Rows(self, stream)


class Socket:
    """A peer that takes `speed` bytes a second."""

    def __init__(self, number: int, speed: float = float("inf")) -> None:
        self.asker = Asker("127.0.0.1", number)
        self.speed = speed
        self.lines: list[str] = []

    async def send(self, *pieces: bytes, to_go: float) -> None:
        await trio.sleep(sum(map(len, pieces)) / self.speed)
        self.lines += b"".join(pieces).decode().splitlines()

    @property
    def ids(self) -> list[int]:
        return [int(line.split()[3]) for line in self.lines if line.startswith("RDATA")]


@asynccontextmanager
async def opened(
    rows: int, limits: CatchupLimits = SMALL
) -> AsyncIterator[tuple[Streams, Counted, Catchups, ServedStream]]:
    store = Counted()
    async with open_streams("s", store=store, catchups=limits) as streams:
        await streams.write("s", *range(1, rows + 1))
        yield streams, store, streams.service.catchups, streams.publisher.served["s"]


def copying(catchups: Catchups, feed: ServedStream, socket: Socket, after: int = 0, **pace: float) -> Copying:
    limits = catchups.limits
    taking = Taking(socket, int(pace.get("pace", limits.pace)), pace.get("seconds", limits.pace_seconds))  # type: ignore[arg-type]
    start = Start(feed, feed.lane(linear=False), {"master": after}, after, feed.stream.epoch)
    return Copying(catchups, taking, start)


def upto(feed: ServedStream) -> Mapping[str, int]:
    return feed.channel.boundary.positions


async def test_clients_that_need_the_same_rows_share_one_read_of_each(autojump_clock: MockClock) -> None:
    async with opened(200) as (_, store, catchups, feed), trio.open_nursery() as nursery:
        sockets = [Socket(number) for number in range(20)]
        for number, socket in enumerate(sockets):
            nursery.start_soon(copying(catchups, feed, socket, number % 5).copy, upto(feed))
        await settle(60)
        for number, socket in enumerate(sockets):
            assert socket.ids == list(range(number % 5 + 1, 201))
        assert store.rows_read <= 1.2 * 200
        assert store.most == 1, "there is one connection"


async def test_rows_are_read_in_blocks_where_ids_are_dense_and_one_by_one_where_not(autojump_clock: MockClock) -> None:
    limits = CatchupLimits(connections=1, cache_bytes=1 << 20, sizes=PieceSizes(100, 100, 400, block=100))
    dense, far = range(1, 401), range(10**15, 10**15 + 400)
    sparse = range(10**6, 10**8, 10**6)
    async with opened(len(dense), limits) as (streams, store, catchups, feed):
        await streams.write("s", *sparse, *far)

        async def catch_up(after: int) -> tuple[int, int]:
            store.reads = store.blocks = 0
            socket = Socket(after)
            await copying(catchups, feed, socket, after).copy(upto(feed))
            assert socket.ids == [id for id in (*dense, *sparse, *far) if id > after]
            feed.late_rows += 1  # what was read is forgotten
            return store.reads, store.blocks

        reads, blocks = await catch_up(0)
        assert reads < 80, "a gap of any width is passed over in one read"
        assert blocks > 20, "most of the dense ids"
        store.refuses_blocks = True
        reads, blocks = await catch_up(0)
        assert 1 <= blocks <= reads / 16 + 1, "what failed is not tried again at once"
        store.refuses_blocks = False
        streams.store.change("s", unique_ids=False)
        await settle(5)
        assert not feed.stream.unique_ids
        assert (await catch_up(0))[1] == 0


async def test_a_client_that_takes_little_keeps_no_read_waiting(autojump_clock: MockClock) -> None:
    async with opened(200) as (_, store, catchups, feed), trio.open_nursery() as nursery:
        slow = [Socket(number, speed=10.0) for number in range(1, 9)]
        for number, socket in enumerate(slow):
            nursery.start_soon(copying(catchups, feed, socket, 20 * number, pace=0).copy, upto(feed))
        await settle(5)
        assert store.now == 0, "all of them are sending, and nothing is held for it"
        quick = Socket(0)
        with trio.fail_after(60):
            await copying(catchups, feed, quick).copy(upto(feed))
        assert quick.ids == list(range(1, 201))
        assert all(len(socket.ids) < 60 for socket in slow)
        nursery.cancel_scope.cancel()


async def test_many_reads_of_one_client_do_not_delay_the_one_of_another(autojump_clock: MockClock) -> None:
    async with opened(400) as (_, store, catchups, feed), trio.open_nursery() as nursery:
        store.seconds = 1.0
        for place in range(10):
            greedy = copying(catchups, feed, Socket(1), 40 * place)
            nursery.start_soon(greedy.copy, {"master": 40 * place + 2})
        await wait_all_tasks_blocked()
        polite = Socket(2)
        began = trio.current_time()
        await copying(catchups, feed, polite, 399).copy({"master": 400})
        assert polite.ids == [400]
        assert trio.current_time() - began < 3.5, "the read under way, one more of the other client, and its own"
        nursery.cancel_scope.cancel()


async def test_a_client_below_the_pace_is_cut_and_told_the_setting(autojump_clock: MockClock) -> None:
    async with opened(200) as (_, _, catchups, feed):
        with pytest.raises(HangUp, match="--catchup-pace is 100") as cut:
            await copying(catchups, feed, Socket(1, 50.0), pace=100, seconds=10.0).copy(upto(feed))
        assert cut.value.reason is CloseReason.SLOW_READER
        assert trio.current_time() < 60
        steady = Socket(2, 150.0)
        await copying(catchups, feed, steady, pace=100, seconds=10.0).copy(upto(feed))
        assert len(steady.ids) == 200


async def test_time_in_which_postgres_gives_nothing_does_not_count_against_a_client(autojump_clock: MockClock) -> None:
    async with opened(50) as (_, store, catchups, feed):
        store.seconds = 30.0
        socket = Socket(1, 1000.0)
        await copying(catchups, feed, socket, pace=500, seconds=1.0).copy(upto(feed))
        assert len(socket.ids) == 50


async def test_pieces_leave_memory_when_nobody_uses_them_and_never_exceed_the_bound(autojump_clock: MockClock) -> None:
    limits = CatchupLimits(cache_bytes=20_000, sizes=PieceSizes(1000, 1000, 3000))
    async with opened(2000, limits) as (_, store, catchups, feed):
        socket = Socket(1)
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while True:
                    assert catchups.statistics().bytes <= 20_000
                    await trio.sleep(0.01)

            nursery.start_soon(watch)
            await copying(catchups, feed, socket).copy(upto(feed))
            nursery.cancel_scope.cancel()
        assert len(socket.ids) == store.rows_read == 2000
        assert catchups.statistics().pieces > 0
        await settle(10)
        assert (catchups.statistics().pieces, catchups.statistics().bytes) == (0, 0)


async def test_a_piece_is_kept_for_a_client_that_is_on_its_way_to_it(autojump_clock: MockClock) -> None:
    async with opened(200) as (_, store, catchups, feed), trio.open_nursery() as nursery:
        quick, slow = Socket(1), Socket(2, 100.0)
        for socket in (quick, slow):
            nursery.start_soon(copying(catchups, feed, socket, pace=0).copy, upto(feed))
        await settle(10)
        assert len(quick.ids) == 200
        assert len(slow.ids) < 100
        await settle(60)
        assert slow.ids == quick.ids
        assert store.rows_read == 200


async def test_a_piece_that_is_dropped_while_it_is_sent_is_read_again_from_there(autojump_clock: MockClock) -> None:
    async with opened(300) as (_, _, catchups, feed), trio.open_nursery() as nursery:
        socket = Socket(1, 500.0)
        job = copying(catchups, feed, socket, pace=0)

        async def drop() -> None:
            while True:
                await trio.sleep(0.37)
                catchups.trimmed(feed, 1000)

        nursery.start_soon(drop)
        assert await job.copy(upto(feed))
        assert socket.ids == list(range(1, 301))
        nursery.cancel_scope.cancel()


async def test_rows_that_were_trimmed_and_rows_that_came_late_are_not_taken_from_memory(
    autojump_clock: MockClock,
) -> None:
    async with opened(40) as (streams, store, catchups, feed):
        await copying(catchups, feed, Socket(1)).copy(upto(feed))
        store.tables["s"].rows.remove((7, "master", "1"))
        before = Socket(2)
        await copying(catchups, feed, before).copy(upto(feed))
        assert 7 in before.ids, "it is in memory"
        feed.late_rows += 1  # as the alarm does
        after = Socket(3)
        await copying(catchups, feed, after).copy(upto(feed))
        assert 7 not in after.ids
        store.tables["s"].trimmed_upto = 20
        [refused] = await streams.connect().say("REPLICATE s 10")
        assert refused.startswith("ERROR token_expired")
        with pytest.raises(TokenExpired):
            await copying(catchups, feed, Socket(4)).copy(upto(feed))


async def test_a_renewed_row_expression_is_used_from_the_next_piece_on(autojump_clock: MockClock) -> None:
    async with opened(40) as (streams, store, catchups, feed):
        await copying(catchups, feed, Socket(1)).copy(upto(feed))
        store.tables["s"].rows = [(id, writer, "2") for id, writer, _ in store.tables["s"].rows]
        store.change("s", row="another")
        await settle(3)
        lines = await streams.connect().say("REPLICATE s 0")
        assert {line.split()[4] for line in lines if "RDATA" in line} == {"2"}


async def test_a_client_catches_up_with_a_bounded_number_of_streams_at_a_time(autojump_clock: MockClock) -> None:
    names = [f"s{number}" for number in range(6)]
    store = Counted()
    limits = CatchupLimits(connections=10, per_client=2)
    async with open_streams(*names, store=store, catchups=limits) as streams:
        for name in names:
            await streams.write(name, 1, 2, 3)
        store.seconds = 1.0
        client = streams.connect()
        lines = await client.say(*(f"REPLICATE {name} 0" for name in names))
        assert sum("POSITION" in line for line in lines) == 6, "each is answered at once"
        lines += await client.lines(20)
        assert sum("RDATA" in line for line in lines) == 18
        assert store.most == 2


async def test_what_a_client_catches_up_with_is_shown_with_the_ids_to_go_also_while_it_waits(
    autojump_clock: MockClock,
) -> None:
    store = Counted()
    async with open_streams("s", "t", store=store, catchups=replace(SMALL, per_client=1)) as streams:
        for name in ("s", "t"):
            await streams.write(name, *range(1, 201))
        store.seconds = 10.0
        client = streams.connect()
        await client.say("REPLICATE s EARLIEST", "REPLICATE t EARLIEST")
        await client.lines(15)
        number = client.session.number
        (first, second) = sorted(streams.service.catchups.following()[number], key=lambda one: one.stream)
        assert (first.stream, second.stream) == ("s", "t")
        assert 0 < (first.ids_left or 0) < 200, "a piece of it was sent"
        assert second.ids_left == 200, "it waits for its turn"
        assert first.behind_s is second.behind_s is None
        store.seconds = 0.0
        await client.lines(30)
        assert streams.service.catchups.following() == {}
        assert [one.stream for one in client.session.view(trio.current_time()).following] == ["s", "t"]
