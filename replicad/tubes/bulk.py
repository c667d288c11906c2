"""Pods of a range in blocks: Postgres packs columns while the block before is made and sent.

A statement a piece, not one COPY: a reader that is slow keeps neither a connection nor a snapshot, and a lease that is
lost on the way is noticed with the next piece, because every statement carries its fence. Positions see to it that
nothing appears in the range meanwhile, so many snapshots show the same pods as one.
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

ROWS = 16  # of the statement at most: see tube_columns_sql
MAX_PODS = 128  # in a row, so that no piece has more than 25 MB even when pods of a page each follow small ones
_GROWTH = 4  # how many times more pods there may be in the rows of the next piece
_LONG = 4 << 20  # bytes that take more than a few milliseconds to turn round: done beside the daemon's own thread

BlockSink = Callable[..., Awaitable[None]]  # takes the pieces of a block, in order, to be sent as one
Keep = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a row of the statement is."""

    row_bytes: int = 60 << 10  # that we aim at: beyond 64 kB Postgres is slower; a block then has some 640 kB
    first_pods: int = 16  # in a row of unknown size: at most a page of 8 kB each, payloads aside


@dataclass(frozen=True, slots=True)
class Want:
    """What to read: exactly the pods of (after, upto], with or without their payloads, under a term."""

    tube: str
    part: Part
    term: int
    after: Cursor
    upto: Cursor
    payload: bool = False

    def halves(self) -> list[tuple[bool, int, int]]:
        """(backfill, after, upto) of each half in which there may be something."""
        both = [
            (False, self.after.regular, self.upto.regular),
            (True, self.after.backfill, self.upto.backfill),
        ]
        return [half for half in both if half[1] < half[2]]


class BulkBook:
    """Reads pods of the tubes of one schema as blocks. `db` is for statements that take as long as there is to read."""

    def __init__(self, db: Database, schema: str, sizes: Sizes = Sizes()) -> None:
        self._db = db
        self._schema = schema
        self._sizes = sizes
        self._loaded = False

    async def send(self, want: Want, sink: BlockSink, keep: Keep) -> int:
        """Send the pods as ARROW lines with their blocks to `sink`; returns how many there were.

        At most two pieces are in memory: one that is being sent, and the next. `keep` is called before every statement
        and renews the lease when it is time.

        Raises:
            EncodingUnavailable: numpy or pyarrow is not installed, or a pod is too large for a block; then blocks with
            the pods before it may have been sent.
            LeaseLost: the term does not cover the partition, or does so no longer. Blocks may have been sent.
            TubeRefused: a pod is none of ours.
        """
        if not self._loaded:
            await trio.to_thread.run_sync(columns.load)  # takes some tenths of a second
            self._loaded = True
        pods = 0
        failure: Exception | None = None
        ahead, pieces = trio.open_memory_channel[Columns](0)

        async def fetch() -> None:
            nonlocal failure
            async with ahead:
                try:
                    await self._fetch(want, ahead, keep)
                except Exception as error:  # noqa: BLE001 - raised again below, not in an exception group
                    failure = error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            try:
                async for piece in pieces:
                    await sink(*await self._render(want, piece))
                    pods += piece.pods
            except Exception as error:  # noqa: BLE001 - the same
                failure = failure or error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return pods

    async def _fetch(self, want: Want, ahead: trio.MemorySendChannel[Columns], keep: Keep) -> None:
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
                await keep()
                bounds = (after, limit, self._sizes.row_bytes) if want.payload else (after, limit)
                rows = await self._db.fetch(query, *bounds)
                if not rows:
                    break
                piece = Columns.of(rows)
                after = piece.last
                limit = max(1, min(MAX_PODS, limit * _GROWTH, self._sizes.row_bytes * piece.pods // piece.size))
                await ahead.send(piece)

    @staticmethod
    async def _render(want: Want, piece: Columns) -> list[bytes | memoryview]:
        if piece.size > _LONG:
            return await trio.to_thread.run_sync(columns.render, want.tube, want.part, piece)
        return columns.render(want.tube, want.part, piece)
