"""Pods of a partition: plan a read, copy it as finished lines, ack it. Each is one statement that checks the lease.

The caller passes the tube's position (docs/positions.md), and nothing above it is read: above it a transaction that
commits late can still add a pod with a lower seq, which would be skipped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from replicad.postgres.bridge import Database, Sink, quote_ident
from replicad.postgres.statements import call_row, call_value, statement
from replicad.protocol.tokens import Cursor
from replicad.tubes.ahead import Pass, read_ahead
from replicad.tubes.commands import CursorAt, Part
from replicad.tubes.low import LowMarks

PIECE_PODS = 256  # of an answer that are read at a time: with 1,000 ids each, some 2 MB
PIECE_BYTES = 4 << 20  # of a piece; beyond it the COPY is cancelled, and the next piece begins there

RenewLease = Callable[[], Awaitable[None]]  # renews the lease when it is time


@dataclass(frozen=True, slots=True)
class TubeInfo:
    """A tube: its number of partitions, and the oids of its table and of the sequence that numbers its pods.

    `fault` says why it cannot be served, and what to do. The oids may then be None. `made`: when it was made, in
    microseconds since 1970.
    """

    name: str
    partitions: int
    table_oid: int | None
    sequence_oid: int | None
    fault: str | None = None
    made: int | None = None


async def load_tubes(db: Database, schema: str) -> list[TubeInfo]:
    """All tubes of a schema, by name."""
    rows = await db.fetch(statement("tube_load", schema), schema)
    return [TubeInfo(**dict(row)) for row in rows]


class PodBook:
    """Reads and acks pods of the tubes of one schema.

    `db` is the pool for plans, `bulk_db` for copies. `ack_db` is for acks and parking, which never add a pod; so the
    lock-watch ignores the locks of its connections on the tables of tubes.
    """

    def __init__(self, db: Database, ack_db: Database, bulk_db: Database, schema: str) -> None:
        self._db = db
        self._ack_db = ack_db
        self._bulk_db = bulk_db
        self._schema = schema
        self._low = LowMarks(ack_db, schema)

    async def tubes(self) -> list[TubeInfo]:
        """All tubes, by name. A fault of one does not hide the others."""
        found = await load_tubes(self._db, self._schema)
        self._low.keep_only({tube.name for tube in found})
        return found

    async def shards_between(self, tube: str, after: int, upto: int) -> list[int]:
        """The shards that have pods in (after, upto]."""
        table = f"{quote_ident(self._schema)}.{quote_ident(tube)}"
        rows = await self._db.fetch(f"SELECT DISTINCT shard FROM {table} WHERE seq > $1 AND seq <= $2", after, upto)
        return [row["shard"] for row in rows]

    async def plan(
        self,
        tube: str,
        part: Part,
        term: int,
        after: Cursor,
        position: int,
        *,
        limit: int,
        ids: int | None,
        backfill: int | None,
    ) -> CursorAt:
        """How far to read behind `after`: at most `limit` pods, about `ids` ids, `backfill` backfill pods.

        Nothing above `position` is counted.

        Raises:
            LeaseLost: the term does not cover the partition.
        """
        row = await call_row(
            self._db,
            self._schema,
            "tube_plan",
            *_fence(tube, part, term),
            after.regular,
            after.backfill,
            position,
            limit,
            ids,
            backfill,
        )
        self._low.note_position(tube, part, position)
        return CursorAt(tube, part, Cursor(row["regular"], row["backfill"]), row["pods"])

    async def lines(self, tube: str, part: Part, term: int, span: Span, *, sink: Sink, renew: RenewLease) -> int:
        """Send the pods of a span as RDATA lines to `sink`, in chunks cut at line ends; returns how many.

        They are read in pieces, so a slow reader keeps neither a connection nor a snapshot. `renew` is called before
        each piece. No pod can appear in the span meanwhile (docs/positions.md).

        Raises:
            LeaseLost: the term does not cover the partition (any more).
        """
        pods = 0

        async def fetch(pass_on: Pass[_Lines]) -> None:
            for half in span.halves():
                left: Span | None = half
                while left is not None:
                    await renew()
                    query: str = await call_value(
                        self._db, self._schema, "tube_lines_sql", *_fence(tube, part, term), *left.bounds()
                    )
                    piece = await self._piece(query)
                    left = None if piece.last is None else left.behind(piece.last)
                    await pass_on(piece)

        async def take(piece: _Lines) -> None:
            nonlocal pods
            pods += piece.pods
            if piece.data:
                await sink(piece.data)

        await read_ahead(fetch, take)
        return pods

    async def _piece(self, query: str) -> _Lines:
        """The first pods of a query, within the bounds of a piece; one pod at least, however large it is."""
        parts: list[bytes] = []
        size = pods = 0

        async def keep(data: bytes) -> None:
            nonlocal size, pods
            parts.append(data)
            size += len(data)
            pods += data.count(b"\n")
            if size > PIECE_BYTES and pods:
                raise _Enough

        limited = f"SELECT line FROM ({query}) AS pods LIMIT {PIECE_PODS}"
        try:
            whole = await self._bulk_db.copy_out(limited, sink=keep) < PIECE_PODS
        except _Enough:
            whole = False
        data = b"".join(parts)
        data = data[: data.rfind(b"\n") + 1]
        last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :]
        return _Lines(data, pods, None if whole else int(last.split(b" ", 4)[3]))

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        """Remove these pods; returns how many there were.

        Raises:
            LeaseLost: the term does not cover the partition; nothing was removed.
        """
        pods: int = await call_value(self._ack_db, self._schema, "tube_ack", *_fence(tube, part, term), list(seqs))
        await self._low.note_acks(tube, part, pods)
        return pods

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        """Remove the pods of (after, upto]; returns how many there were. Raises as `ack`."""
        pods: int = await call_value(
            self._ack_db, self._schema, "tube_ack_upto", *_fence(tube, part, term), *Span(after, upto).bounds()
        )
        await self._low.note_acks(tube, part, pods)
        return pods

    async def park(
        self, tube: str, part: Part, term: int, *, seq: int, ids: Sequence[int], tries: int, error: str
    ) -> int:
        """Park ids of a pod (all if `ids` is empty) with the error; returns how many. Raises as `ack`."""
        parked: int = await call_value(
            self._ack_db, self._schema, "tube_park", *_fence(tube, part, term), seq, list(ids), tries, error
        )
        return parked

    async def report(self, tube: str, reporter: str, counts: str) -> None:
        """Store the counts of a reader, a JSON object. Raises UnknownTube."""
        await call_value(self._db, self._schema, "tube_report_put", tube, reporter, counts)


def _fence(tube: str, part: Part, term: int) -> tuple[str, int, int, int]:
    """The first arguments of every function: it raises LeaseLost if the term does not cover the partition."""
    return tube, part.partitions, part.partition, term


@dataclass(frozen=True, slots=True)
class Span:
    """The pods of (after, upto]."""

    after: Cursor
    upto: Cursor

    def bounds(self) -> tuple[int, int, int, int]:
        """The arguments of the functions in SQL."""
        return self.after.regular, self.after.backfill, self.upto.regular, self.upto.backfill

    def halves(self) -> list[Span]:
        """The regular pods, and the backfill pods; at least one span, since each statement checks the lease."""
        regular = Span(self.after, Cursor(self.upto.regular, self.after.backfill))
        backfill = Span(Cursor(self.upto.regular, self.after.backfill), self.upto)
        found = [regular] if self.after.regular < self.upto.regular else []
        return [*found, *([backfill] if self.after.backfill < self.upto.backfill else [])] or [self]

    def behind(self, seq: int) -> Span | None:
        """A half without the pods up to `seq`; None if none are left."""
        if self.after.regular < self.upto.regular:
            left = Span(Cursor(seq, self.after.backfill), self.upto)
            return left if seq < self.upto.regular else None
        left = Span(Cursor(self.after.regular, seq), self.upto)
        return left if seq < self.upto.backfill else None


@dataclass(frozen=True, slots=True)
class _Lines:
    """A piece of an answer. `last`: the seq of its last pod, if more may follow."""

    data: bytes
    pods: int
    last: int | None


class _Enough(Exception):
    """The piece is large enough: the COPY is cancelled."""
