"""Pods of a partition: plan a read, copy it as finished lines, ack it. Each is one statement that carries its fence.

Reading is bounded by the tube's position, which the caller brings (docs/positions.md): a pod that commits late has a
lower seq than what was read already and must not be passed over.
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

    `fault` says why it cannot be served, and what to do; then the oids may be missing.
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

    `db` serves plans, `bulk_db` the copies, which last as long as their reader takes. `ack_db` serves acks and
    parking, which delete pods or take ids out of them and never add a pod: the lock-watch leaves its connections out on
    the tables of tubes.
    """

    def __init__(self, db: Database, ack_db: Database, bulk_db: Database, schema: str) -> None:
        self._db = db
        self._ack_db = ack_db
        self._bulk_db = bulk_db
        self._schema = schema

    async def tubes(self) -> list[TubeInfo]:
        """All tubes, by name; what is wrong with one does not keep it from seeing the others."""
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

        Nothing above `position` is counted in.

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
        """Put ids of a pod (all where `ids` is empty) aside with the error; returns how many. Raises as `ack`."""
        parked: int = await call_value(
            self._ack_db, self._schema, "tube_park", *_fence(tube, part, term), seq, list(ids), tries, error
        )
        return parked

    async def report(self, tube: str, reporter: str, counts: str) -> None:
        """Keep what a reader has counted, a JSON object. Raises UnknownTube."""
        await call_value(self._db, self._schema, "tube_report_put", tube, reporter, counts)


def _fence(tube: str, part: Part, term: int) -> tuple[str, int, int, int]:
    """The arguments that every function begins with: it raises LeaseLost where the term does not cover that."""
    return tube, part.partitions, part.partition, term


def _range(after: Cursor, upto: Cursor) -> tuple[int, int, int, int]:
    """The arguments for the pods of (after, upto]."""
    return after.regular, after.backfill, upto.regular, upto.backfill
