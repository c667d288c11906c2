"""Pods of a partition: plan a read, copy it as finished lines, ack it. Each is one statement that checks the lease.

The caller passes the tube's position (docs/positions.md), and nothing above it is read: above it a transaction that
commits late can still add a pod with a lower seq, which would be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicad.postgres.bridge import Database, Sink, quote_ident
from replicad.postgres.statements import call_row, call_value, statement
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import CursorAt, Part


@dataclass(frozen=True, slots=True)
class TubeInfo:
    """A tube: its number of partitions, and the oids of its table and of the sequence that numbers its pods.

    `fault` says why it cannot be served, and what to do. The oids may then be None.
    """

    name: str
    partitions: int
    table_oid: int | None
    sequence_oid: int | None
    fault: str | None = None


async def load_tubes(db: Database, schema: str) -> list[TubeInfo]:
    """All tubes of a schema, by name."""
    rows = await db.fetch(statement("tube_load", schema), schema)
    return [TubeInfo(**dict(row)) for row in rows]


class PodBook:
    """Reads and acks pods of the tubes of one schema.

    `db` is the pool for plans, `bulk_db` for copies, which last as long as their reader takes. `ack_db` is for acks and
    parking. They never add a pod, so the lock-watch ignores the locks of its connections on the tables of tubes.
    """

    def __init__(self, db: Database, ack_db: Database, bulk_db: Database, schema: str) -> None:
        self._db = db
        self._ack_db = ack_db
        self._bulk_db = bulk_db
        self._schema = schema

    async def tubes(self) -> list[TubeInfo]:
        """All tubes, by name. A fault of one does not hide the others."""
        return await load_tubes(self._db, self._schema)

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
        return CursorAt(tube, part, Cursor(row["regular"], row["backfill"]), row["pods"])

    async def lines(self, tube: str, part: Part, term: int, *, after: Cursor, upto: Cursor, sink: Sink) -> int:
        """Send the pods of (after, upto] as RDATA lines to `sink`, in chunks cut at line ends; returns how many.

        Raises:
            LeaseLost: the term does not cover the partition.
        """
        query: str = await call_value(
            self._db, self._schema, "tube_lines_sql", *_fence(tube, part, term), *_range(after, upto)
        )
        return await self._bulk_db.copy_out(query, sink=sink)

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        """Remove these pods; returns how many there were.

        Raises:
            LeaseLost: the term does not cover the partition; nothing was removed.
        """
        pods: int = await call_value(self._ack_db, self._schema, "tube_ack", *_fence(tube, part, term), list(seqs))
        return pods

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        """Remove the pods of (after, upto]; returns how many there were. Raises as `ack`."""
        pods: int = await call_value(
            self._ack_db, self._schema, "tube_ack_upto", *_fence(tube, part, term), *_range(after, upto)
        )
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


def _range(after: Cursor, upto: Cursor) -> tuple[int, int, int, int]:
    """The arguments for the pods of (after, upto]."""
    return after.regular, after.backfill, upto.regular, upto.backfill
