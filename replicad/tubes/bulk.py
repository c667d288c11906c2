"""Send the pods of a range as Arrow blocks. Postgres packs the columns of the next block while a block is sent.

One statement per piece, not one COPY: a slow reader then holds neither a connection nor a snapshot, and a lost lease is
noticed with the next piece, because every statement checks the lease. No pod can appear in the range meanwhile
(docs/positions.md), so many snapshots show the same pods as one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from replicad.postgres.bridge import Database
from replicad.postgres.statements import call_value
from replicad.protocol.tokens import Cursor
from replicad.tubes import columns
from replicad.tubes.columns import Columns
from replicad.tubes.commands import Part
from replicad.tubes.pods import Pass, read_ahead

ROWS = 16  # a statement returns at most: see tube_columns_sql
MAX_PODS = 128  # per row, so that no piece exceeds 25 MB even when pods of 8 kB each follow small ones
_GROWTH = 4  # a row of the next piece has at most so many times the pods of a row of this one
_LONG = 4 << 20  # bytes; a larger piece takes more than a few ms to render and is rendered in a worker thread

BlockSink = Callable[..., Awaitable[None]]  # sends its arguments, the parts of one block, without a gap
RenewLease = Callable[[], Awaitable[None]]  # renews the lease when it is time


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a row of the statement."""

    row_bytes: int = 60 << 10  # target: beyond 64 kB Postgres is slower; a block then has some 640 kB
    first_pods: int = 16  # in a row of the first piece, when the size of pods is unknown (8 kB at most, plus payload)


@dataclass(frozen=True, slots=True)
class Want:
    """What to read: exactly the pods of (after, upto], with or without payloads, under the lease with `term`."""

    tube: str
    part: Part
    term: int
    after: Cursor
    upto: Cursor
    payload: bool = False

    def halves(self) -> list[tuple[bool, int, int]]:
        """(backfill, after, upto) of the regular and the backfill half of the range, without empty ranges."""
        both = [
            (False, self.after.regular, self.upto.regular),
            (True, self.after.backfill, self.upto.backfill),
        ]
        return [half for half in both if half[1] < half[2]]


class BulkBook:
    """Reads pods of the tubes of one schema as blocks. `db` is the pool for long statements."""

    def __init__(self, db: Database, schema: str, sizes: Sizes = Sizes()) -> None:
        self._db = db
        self._schema = schema
        self._sizes = sizes
        self._loaded = False

    async def send(self, want: Want, sink: BlockSink, renew: RenewLease) -> int:
        """Send the pods as ARROW lines with their blocks to `sink`; returns how many there were.

        At most two pieces are in memory: the piece that is being sent, and the next. `renew` is called before each
        statement. Blocks may have been sent before an exception.

        Raises:
            EncodingUnavailable: numpy or pyarrow is not installed, or a pod is too large for a block.
            LeaseLost: the term does not cover the partition (any more).
            TubeRefused: a pod was not written by replicad's functions and cannot be decoded.
        """
        if not self._loaded:
            await trio.to_thread.run_sync(columns.load)  # takes a few tenths of a second
            self._loaded = True
        pods = 0

        async def take(piece: Columns) -> None:
            nonlocal pods
            await sink(*await self._render(want, piece))
            pods += piece.pods

        await read_ahead(lambda pass_on: self._fetch(want, pass_on, renew), take)
        return pods

    async def _fetch(self, want: Want, pass_on: Pass[Columns], renew: RenewLease) -> None:
        for backfill, begin, upto in want.halves():
            query: str = await call_value(
                self._db,
                self._schema,
                "tube_columns_sql",
                want.tube,
                want.part.partitions,
                want.part.partition,
                want.term,
                backfill,
                begin,
                upto,
                want.payload,
            )
            after, limit = begin, self._sizes.first_pods
            while after < upto:
                await renew()
                bounds = (after, limit, self._sizes.row_bytes) if want.payload else (after, limit)
                rows = await self._db.fetch(query, *bounds)
                if not rows:
                    break
                piece = Columns.of(rows)
                after = piece.last
                limit = max(1, min(MAX_PODS, limit * _GROWTH, self._sizes.row_bytes * piece.pods // piece.size))
                await pass_on(piece)

    @staticmethod
    async def _render(want: Want, piece: Columns) -> list[bytes | memoryview]:
        if piece.size > _LONG:
            return await trio.to_thread.run_sync(columns.render, want.tube, want.part, piece)
        return columns.render(want.tube, want.part, piece)
