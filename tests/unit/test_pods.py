"""Pods in lines: whatever their size, one piece after another has each pod once and in order."""

from __future__ import annotations

import re
from typing import cast

import pytest

from replicad.postgres.bridge import Database, Sink
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from replicad.tubes.pods import PIECE_BYTES, PodBook, Span

CHUNK = 256 * 1024  # bytes: a line may come in many of them


class Queue:
    """A database with one partition of a tube: its pods by seq, as lines."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.lines = {seq: b"RDATA t 0/1 %d %s\n" % (seq, b"1" * size) for seq, size in sizes.items()}

    async def fetch_value(self, _sql: str, *args: object) -> str:
        after, upto = cast("tuple[int, int]", (args[-4], args[-2]))
        return f"SELECT pods in ({after}, {upto}]"

    async def copy_out(self, query: str, *, sink: Sink) -> int:
        after, upto, limit = (int(number) for number in re.findall(r"\d+", query))
        found = [line for seq, line in sorted(self.lines.items()) if after < seq <= upto][:limit]
        data = b"".join(found)
        for at in range(0, len(data), CHUNK):
            await sink(data[at : at + CHUNK])
        return len(found)


@pytest.mark.parametrize(
    "sizes",
    [
        {1: PIECE_BYTES + CHUNK},
        {1: 10, 2: 3 * PIECE_BYTES, 3: 10, 4: PIECE_BYTES, 5: PIECE_BYTES, 9: 10},
        dict.fromkeys(range(1, 600), 20_000),
    ],
    ids=["one above the bound", "among others", "many"],
)
async def test_each_pod_is_read_once_though_one_alone_exceeds_the_bound_of_a_piece(sizes: dict[int, int]) -> None:
    queue = Queue(sizes)
    database = cast("Database", queue)
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    async def renew() -> None:
        pass

    book = PodBook(database, database, database, "tube")
    span = Span(Cursor(0, 0), Cursor(max(sizes), 0))
    assert await book.lines("t", Part(0, 1), 1, span, sink=send, renew=renew) == len(sizes)
    assert b"".join(sent) == b"".join(queue.lines.values())
