"""Pods in lines: whatever their size, one piece after another has each pod once and in order."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import cast

import pytest
import trio
import trio.testing

from replicad.postgres.bridge import Database, Sink
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from replicad.tubes.pods import COPY_SECONDS, LOOK, MOST_BYTES, PodBook, RenewLease, Span

CHUNK = 256 * 1024  # bytes: a line may come in many of them


class Queue:
    """A database with one partition of a tube: its pods by seq, as lines."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.lines = {seq: b"RDATA t 0/1 %d %s\n" % (seq, b"1" * size) for seq, size in sizes.items()}
        self.pause = 0.0  # seconds before each chunk
        self.copied = 0  # bytes
        self.copies: list[float] = []  # seconds that each COPY has taken

    async def fetch_value(self, _sql: str, *args: object) -> str:
        after, upto = cast("tuple[int, int]", (args[-4], args[-2]))
        return f"SELECT pods in ({after}, {upto}]"

    async def copy_out(self, query: str, *, sink: Sink, lock: str) -> int:
        after, upto, *limit = (int(number) for number in re.findall(r"\d+", query))
        found = [line for seq, line in sorted(self.lines.items()) if after < seq <= upto]
        found = found[: limit[0]] if limit else found
        data = b"".join(found)
        began = trio.current_time()
        try:
            for at in range(0, len(data), CHUNK):
                await trio.sleep(self.pause)
                self.copied += len(data[at : at + CHUNK])
                await sink(data[at : at + CHUNK])
        finally:
            self.copies.append(trio.current_time() - began)
        return len(found)


@pytest.mark.parametrize(
    "sizes",
    [
        {1: MOST_BYTES + CHUNK},
        {1: 10, 2: 3 * MOST_BYTES, 3: 10, 4: MOST_BYTES, 5: MOST_BYTES, 9: 10},
        dict.fromkeys(range(1, 600), 20_000),
    ],
    ids=["one above the bound", "among others", "many"],
)
async def test_each_pod_is_read_once_though_one_alone_exceeds_the_bound_of_a_piece(sizes: dict[int, int]) -> None:
    queue = Queue(sizes)
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    assert await _read(queue, send) == len(sizes)
    assert b"".join(sent) == b"".join(queue.lines.values())


async def test_a_reader_that_stops_holds_no_copy_and_bounded_memory_and_its_lease_is_renewed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    queue = Queue(dict.fromkeys(range(1, 2000), 20_000))
    renewals: list[float] = []
    copies = 0
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        nonlocal copies
        if not sent:
            await trio.sleep(60)
            copies = len(queue.copies)
            assert queue.copied < MOST_BYTES + 2 * CHUNK
        sent.append(data)

    async def renew() -> None:
        renewals.append(trio.current_time())

    assert await _read(queue, send, renew) == len(queue.lines)
    assert b"".join(sent) == b"".join(queue.lines.values())
    assert copies == 1, "the COPY that was cancelled, and no other one before there is room"
    assert max(after - before for before, after in pairwise(renewals)) <= LOOK


async def test_no_copy_takes_long_however_long_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    queue = Queue(dict.fromkeys(range(1, 2000), 20_000))
    queue.pause = 0.1
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    assert await _read(queue, send) == len(queue.lines)
    assert b"".join(sent) == b"".join(queue.lines.values())
    assert max(queue.copies) <= COPY_SECONDS + 2 * queue.pause


async def _nothing() -> None:
    pass


async def _read(queue: Queue, send: Sink, renew: RenewLease = _nothing) -> int:
    """All pods of the queue."""
    database = cast("Database", queue)
    book = PodBook(database, database, database, "tube")
    span = Span(Cursor(0, 0), Cursor(max(queue.lines), 0))
    return await book.lines("t", Part(0, 1), 1, span, sink=send, renew=renew)
