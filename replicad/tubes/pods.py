"""Pods of a partition: plan a read, copy it as finished lines, ack it. Each is one statement that checks the lease.

Few and small pods are read in one statement instead: a worker that waits gets nearly all of its pods so.

The caller passes the tube's position (docs/positions.md), and no cursor goes above it: above it a transaction that
commits late can still add a pod with a lower seq, which would be skipped. `early` reads pods above the position, for
readers that keep their seqs.

`LowMarks` tells Postgres, after so many acks of a partition, from where reads of it may begin. Acked pods stay in the
index until VACUUM removes them, and a transaction with an old snapshot can prevent that for hours. A read from the
start would pass all of them. The marks are in the table `tube_low`; every read uses them.

`read_ahead` reads what follows of an answer while a piece is being sent.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import trio

from replicad.daemon.figures import Delays
from replicad.errors import DatabaseError, LeaseLost
from replicad.eventlog import get_logger
from replicad.postgres.bridge import Database, Row, Sink, quote_ident
from replicad.postgres.statements import call_row, call_rows, call_value, statement
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import CursorAt, Part, PartitionShare
from replicad.tubes.keys import BIGINT, Key
from replicad.tubes.together import Together

MOST_BYTES = 4 << 20  # that wait for a reader, and a line; beyond it the COPY is cancelled, and continued later
NEXT_BYTES = 2 << 20  # read at a time, once that has happened, by the size of the pods before
COPY_SECONDS = 0.5  # of one COPY: it holds a snapshot
LOOK = 1.0  # seconds between two looks at the lease while the reader is waited for
FEW_PODS = 32  # that are read without a plan; more than that are soon worth a plan and a COPY
EARLY_PODS = 256  # above the position in one answer: up to a page of Postgres each
EARLY_SEEN = 2000  # pods above the position that are compared with the pods that readers have
AT_ONCE = 16  # short reads, or acks, that share one statement: it takes a few milliseconds at most
FEW_ACKED = 100  # pods of an ack that shares its statement
FEW_BYTES = 64 << 10  # of their ids and payloads as Postgres stores them

RenewLease = Callable[[], Awaitable[None]]  # renews the lease when it is time

MARK_EVERY = 2000  # acked pods of a partition between two moves; a read passes about as many: 0.2 ms
MARK_PAUSE = 0.25  # seconds between two moves at least: each takes 3 ms, which a worker that empties a partition waits

log = get_logger(__name__)

T = TypeVar("T")

Pass = Callable[[T], Awaitable[None]]  # passes one piece on


@dataclass(frozen=True, slots=True)
class TubeInfo:
    """A tube: its number of partitions, and the oids of its table and of the sequence that numbers its pods.

    `fault` says why it cannot be served, and what to do. The oids may then be None. `made`: when it was made, in
    microseconds since 1970. `keys`: the kind of its keys (keys.py). `paused`: since when and why no reader gets its
    pods, as words; `paused_at`: the same time, in seconds since 1970. None: it is not paused.
    """

    name: str
    partitions: int
    table_oid: int | None
    sequence_oid: int | None
    fault: str | None = None
    made: int | None = None
    keys: str = BIGINT
    paused: str | None = None
    paused_at: float | None = None


@dataclass(frozen=True, slots=True)
class PodReadBounds:
    """The bounds of a read: nothing above the tube's `position`; at most `limit` pods, `backfill` of them of backfills;
    about `ids` ids, but one pod at least. None: no bound. `generation`: the one in which the position was read.
    """

    position: int
    limit: int
    ids: int | None = None
    backfill: int | None = None
    generation: str | None = None


@dataclass(frozen=True, slots=True)
class _Listed:
    """An ack: the pods of one reader."""

    partition: int
    term: int
    seqs: Sequence[int]


async def load_tubes(db: Database, schema: str) -> list[TubeInfo]:
    """All tubes of a schema, by name. A right that this role lacks is a fault only of a role that could serve tubes."""
    found = []
    for row in await db.fetch(statement("tube_load", schema), schema):
        fields = dict(row)
        denied, looks = fields.pop("denied"), fields.pop("looks")
        found.append(TubeInfo(**fields | {"fault": fields["fault"] or (None if looks else denied)}))
    return found


class PodBook:
    """Reads and acks pods of the tubes of one schema.

    `db` is the pool for plans, `bulk_db` the one for pods: its sessions read by index only. `ack_db` is for acks and
    parking, which never add a pod; so the lock-watch ignores the locks of its connections on the tables of tubes.
    """

    def __init__(self, db: Database, ack_db: Database, bulk_db: Database, schema: str) -> None:
        self._db = db
        self._ack_db = ack_db
        self._bulk_db = bulk_db
        self._schema = schema
        self._low = LowMarks(ack_db, schema)
        # by tube, number of partitions, and generation
        self._short: dict[tuple[str, int, str | None], Together[tuple[int, ...], Sequence[Row]]] = {}
        self._early: dict[tuple[str, int], str] = {}  # statements by tube and number of partitions
        self._acks: dict[tuple[str, int], Together[_Listed, int]] = {}
        self.delays: dict[str, Delays] = {}  # tube: from the touch to the ack of its pods, without pods of backfills

    async def tubes(self) -> list[TubeInfo]:
        """All tubes, by name. A fault of one does not hide the others."""
        found = await load_tubes(self._db, self._schema)
        present = {tube.name: tube.partitions for tube in found}
        self._low.keep_only(present)
        for name in self.delays.keys() - present.keys():
            del self.delays[name]
        for key in [key for key in self._short if present.get(key[0]) != key[1]]:
            del self._short[key]
        for kept in (self._early, self._acks):
            for of in [of for of in kept if present.get(of[0]) != of[1]]:
                del kept[of]
        return found

    async def shards_between(self, tube: str, after: int, upto: int) -> dict[int, int]:
        """The shards that have pods in (after, upto], each with the seq of its last one."""
        rows = await self._db.fetch(
            f"SELECT shard, max(seq) AS seq FROM {self._table(tube)} WHERE seq > $1 AND seq <= $2 GROUP BY shard",
            after,
            upto,
        )
        return {row["shard"]: row["seq"] for row in rows}

    def _table(self, tube: str) -> str:
        return f"{quote_ident(self._schema)}.{quote_ident(tube)}"

    async def plan(self, tube: str, part: Part, term: int, after: Cursor, bounds: PodReadBounds) -> CursorAt:
        """How far to read behind `after`.

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
            bounds.position,
            bounds.limit,
            bounds.ids,
            bounds.backfill,
            bounds.generation,
        )
        self._low.note_position(tube, part, bounds.position, bounds.generation)
        return CursorAt(tube, part, Cursor(row["regular"], row["backfill"]), row["pods"])

    async def short(
        self, tube: str, part: Part, term: int, after: Cursor, bounds: PodReadBounds
    ) -> tuple[CursorAt, bytes] | None:
        """The results of `plan` and `lines` together, if these are few and small pods of a partition of the tube. None
        if they are not, if the bounds leave some out, or if the lease does not cover the partition: then `plan` shows
        which.
        """
        key = tube, part.partitions, bounds.generation
        if (reads := self._short.get(key)) is None:
            one = await call_value(self._db, self._schema, "tube_short_sql", tube, part.partitions)
            many = await call_value(self._db, self._schema, "tube_short_sql", tube, part.partitions, True)
            for old in [old for old in self._short if old[:2] == key[:2]]:
                del self._short[old]
            reads = self._short[key] = Together(partial(self._read_short, one, many, bounds.generation), AT_ONCE)
        most = min(bounds.limit, FEW_PODS)
        rows = await reads.ask((part.partition, term, after.regular, after.backfill, bounds.position, most))
        if not rows[0]["held"]:
            return None
        self._low.note_position(tube, part, bounds.position, bounds.generation)
        if rows[0]["seq"] is None:
            return CursorAt(tube, part, after, 0), b""
        last = {row["backfill"]: row["seq"] for row in rows}
        left_out = (
            rows[0]["line"] is None
            or (bounds.ids is not None and len(rows) > 1 and sum(row["ids"] for row in rows) > bounds.ids)
            or (bounds.backfill is not None and sum(row["backfill"] for row in rows) > bounds.backfill)
        )
        if left_out:
            return None
        cursor = Cursor(last.get(False, after.regular), last.get(True, after.backfill))
        return CursorAt(tube, part, cursor, len(rows)), "".join([f"{row['line']}\n" for row in rows]).encode()

    async def _read_short(
        self, one: str, many: str, generation: str | None, asked: Sequence[tuple[int, ...]]
    ) -> Sequence[Sequence[Row]]:
        """The rows of each short read, with one statement."""
        if len(asked) == 1:
            return [await self._bulk_db.fetch(one, *asked[0], FEW_BYTES, generation)]
        found: list[list[Row]] = [[] for _ in asked]
        for row in await self._bulk_db.fetch(many, *map(list, zip(*asked, strict=True)), FEW_BYTES, generation):
            found[row["n"] - 1].append(row)
        return found

    async def early(
        self, tube: str, part: Part, term: int, but: Sequence[int], bounds: PodReadBounds
    ) -> tuple[int, int, bytes]:
        """Pods above the position, but not these: how many, the highest seq, and their lines. None without a lease."""
        if (text := self._early.get((tube, part.partitions))) is None:
            text = await call_value(self._db, self._schema, "tube_early_sql", tube, part.partitions)
            self._early[tube, part.partitions] = text
        most, backfill = min(bounds.limit, EARLY_PODS), bounds.backfill != 0
        rows = await self._bulk_db.fetch(
            text, part.partition, term, bounds.position, list(but), most, backfill, bounds.generation
        )
        found = [row for row in rows if row["seq"] is not None]
        highest = max((row["seq"] for row in found), default=0)
        return len(found), highest, "".join([f"{row['line']}\n" for row in found]).encode()

    async def seqs_above(self, tube: str, position: int) -> list[tuple[int, int]]:
        """The seqs above the position and their shards, at most EARLY_SEEN of them, the newest first."""
        rows = await self._db.fetch(
            f"SELECT seq, shard FROM {self._table(tube)} WHERE seq > $1 ORDER BY seq DESC LIMIT {EARLY_SEEN}", position
        )
        return [(row["seq"], row["shard"]) for row in rows]

    async def lines(self, tube: str, part: Part, term: int, span: Span, *, sink: Sink, renew: RenewLease) -> int:
        """Send the pods of a span as RDATA lines to `sink`, in chunks cut at line ends; returns how many.

        Postgres sends at its pace, whatever the sink takes: what waits for the sink is bounded, and beyond it, or after
        COPY_SECONDS, the COPY is cancelled and another one goes on. So a slow reader keeps neither a connection nor a
        snapshot. `renew` is called before each COPY, and while the sink is waited for. No pod can appear in the span
        meanwhile (docs/positions.md).

        Raises:
            LeaseLost: the term does not cover the partition (any more).
        """
        pods = 0
        queue = _ReadBuffer()
        lock = f"LOCK TABLE {self._table(tube)} IN ACCESS SHARE MODE"

        async def fetch(pass_on: Pass[bytes]) -> None:
            nonlocal pods
            limit: int | None = None  # of pods, from the first COPY on that was cancelled: cancelling takes longer
            for half in span.halves():
                left: Span | None = half
                while left is not None:
                    await renew()
                    query: str = await call_value(
                        self._db, self._schema, "tube_lines_sql", *_fence(tube, part, term), *left.bounds()
                    )
                    read = await self._copy(query, lock, limit, queue, pass_on)
                    pods += read.pods
                    left = None if read.last is None else left.behind(read.last)
                    if read.last is not None:
                        limit = max(1, NEXT_BYTES * read.pods // read.size)
                    while not await queue.has_room():
                        await renew()

        async def take(chunk: bytes) -> None:
            await sink(chunk)
            queue.took(len(chunk))

        await read_ahead(fetch, take, waiting=math.inf)  # the queue bounds it
        return pods

    async def _copy(self, query: str, lock: str, limit: int | None, queue: _ReadBuffer, pass_on: Pass[bytes]) -> _Read:
        """Pass on the first pods of a query, as many as the limits allow; one pod at least, however large it is."""
        size = pods = 0
        last = b""
        rest: list[bytes] = []  # of a line whose end has not come
        until = trio.current_time() + COPY_SECONDS

        async def keep(data: bytes) -> None:
            nonlocal size, pods, last
            size += len(data)
            end = data.rfind(b"\n") + 1
            if end:
                last = b"".join([*rest, data[:end]])
                pods += last.count(b"\n")
                rest.clear()
                queue.size += len(last)
                await pass_on(last)
            rest.append(data[end:])
            if pods and (queue.size > MOST_BYTES or trio.current_time() > until):
                raise _Enough

        if limit is not None:
            query = f"SELECT line FROM ({query}) AS pods LIMIT {limit}"
        try:
            count = await self._bulk_db.copy_out(query, sink=keep, lock=lock)
            if count != pods:
                raise DatabaseError(f"a COPY of pods had {count} lines, and {pods} of them arrived")
            whole = count != limit
        except _Enough:
            whole = False
        line = last[last.rfind(b"\n", 0, len(last) - 1) + 1 :]
        return _Read(pods, size, None if whole else int(line.split(b" ", 4)[3]))

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        """Remove these pods; returns how many there were.

        Raises:
            LeaseLost: the term does not cover the partition; nothing was removed.
        """
        key = tube, part.partitions
        if (acks := self._acks.get(key)) is None:
            acks = self._acks[key] = Together(partial(self._ack_listed, *key), AT_ONCE)
        alone = len(seqs) > FEW_ACKED
        listed = _Listed(part.partition, term, seqs)
        pods = (await self._ack_listed(*key, [listed]))[0] if alone else await acks.ask(listed)
        await self._low.note_acks(tube, part, pods)
        return pods

    async def _ack_listed(self, tube: str, partitions: int, asked: Sequence[_Listed]) -> Sequence[int]:
        """Ack the pods of each reader, with one statement; returns how many there were of each."""
        if len(asked) == 1:
            [one] = asked
            fence = _fence(tube, Part(one.partition, partitions), one.term)
            row = await call_row(self._ack_db, self._schema, "tube_ack", *fence, list(one.seqs))
            self._note_delays(tube, row)
            return [row["pods"]]
        row = await call_row(
            self._ack_db,
            self._schema,
            "tube_ack_all",
            tube,
            partitions,
            [one.partition for one in asked],
            [one.term for one in asked],
            [seq for one in asked for seq in one.seqs],
            [number for number, one in enumerate(asked, 1) for _ in one.seqs],
        )
        self._note_delays(tube, row)
        removed: Sequence[int] = row["pods"]
        return removed

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        """Remove the pods of (after, upto]; returns how many there were. Raises as `ack`."""
        row = await call_row(
            self._ack_db, self._schema, "tube_ack_upto", *_fence(tube, part, term), *Span(after, upto).bounds()
        )
        self._note_delays(tube, row)
        pods: int = row["pods"]
        await self._low.note_acks(tube, part, pods)
        return pods

    def _note_delays(self, tube: str, row: Row) -> None:
        """Count the ages of acked pods, as Postgres has counted them."""
        if row["ages"] is not None:
            self.delays.setdefault(tube, Delays()).add(row["ages"], row["seconds"])

    async def park(
        self, tube: str, part: Part, term: int, *, seq: int, ids: Sequence[Key], tries: int, error: str
    ) -> int:
        """Park ids of a pod (all if `ids` is empty) with the error; returns how many. Raises as `ack`."""
        parked: int = await call_value(
            self._ack_db, self._schema, "tube_park", *_fence(tube, part, term), seq, list(map(str, ids)), tries, error
        )
        return parked

    async def attempt(self, tube: str, part: Part, term: int, note: str) -> str:
        """Store the note of a partition's reader (empty: leave it); returns the note before. Raises as `ack`."""
        before: str | None = await call_value(
            self._ack_db, self._schema, "tube_attempt_put", *_fence(tube, part, term), note or None
        )
        return before or ""

    async def tables_of(self, tube: str, shards: Sequence[int]) -> dict[str, dict[str, object]]:
        """The tables of these shards, by shard, as TABLES has them."""
        known = [shard for shard in shards if 0 <= shard < 1 << 31]
        rows = await call_rows(self._db, self._schema, "tube_tables_of", tube, known)
        return {
            str(row["shard"]): {"table": row["tbl"], "key": row["key"], "attached": row["attached"]} for row in rows
        }

    async def share(self, tube: str, worker: str, ttl: float, expired: Sequence[int]) -> PartitionShare:
        """Note that a worker is alive for `ttl` seconds; how many partitions it should hold. Raises UnknownTube,
        TubeRefused.

        `worker`: the stored holder of its leases. `expired`: the beats of the tube's expired leases.
        """
        found = await call_row(
            self._db, self._schema, "tube_worker_beat", tube, worker, timedelta(seconds=ttl), list(expired)
        )
        return PartitionShare(tube, **dict(found))

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
class _Read:
    """What one COPY gave. `size`: bytes. `last`: the seq of its last pod, if more may follow."""

    pods: int
    size: int
    last: int | None


class _ReadBuffer:
    """The bytes that were read and wait for the reader."""

    def __init__(self) -> None:
        self.size = 0
        self._taken = trio.Event()

    def took(self, size: int) -> None:
        """The reader has so many bytes."""
        self.size -= size
        self._taken.set()

    async def has_room(self) -> bool:
        """Whether NEXT_BYTES have room. Waits for it, LOOK seconds at most."""
        with trio.move_on_after(LOOK):
            while self.size > MOST_BYTES - NEXT_BYTES:
                self._taken = trio.Event()
                await self._taken.wait()
        return self.size <= MOST_BYTES - NEXT_BYTES


class _Enough(Exception):
    """The COPY is to be cancelled."""


class LowMarks:
    """Counts the acks of each partition. `db` is a pool for short statements."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self._positions: dict[tuple[str, Part], tuple[int, str | None]] = {}  # with the generation in which it was read
        self._acked: dict[tuple[str, Part], int] = {}
        self._moved: dict[tuple[str, Part], float] = {}

    def note_position(self, tube: str, part: Part, position: int, generation: str | None) -> None:
        """A read has used this position: in this generation, no pod can appear at or below it."""
        self._positions[tube, part] = position, generation

    def keep_only(self, tubes: Collection[str]) -> None:
        """Forget the other tubes."""
        for known in (self._positions, self._acked, self._moved):
            for key in [key for key in known if key[0] not in tubes]:
                del known[key]

    async def note_acks(self, tube: str, part: Part, pods: int) -> None:
        """So many pods were acked. If it is time, move the mark. A failure is logged; then reads only take longer."""
        key = tube, part
        acked = self._acked.get(key, 0) + pods
        self._acked[key] = acked
        now = trio.current_time()
        if acked < MARK_EVERY or key not in self._positions or now < self._moved.get(key, -MARK_PAUSE) + MARK_PAUSE:
            return
        self._acked[key], self._moved[key] = 0, now
        where = (tube, part.partitions, part.partition)
        try:
            await call_value(self._db, self._schema, "tube_low_raise", *where, *self._positions[key])
        except (DatabaseError, LeaseLost) as error:  # LeaseLost: history has forked since
            log.warning("low_mark_not_moved", tube=tube, part=str(part), error=str(error))


async def read_ahead(fetch: Callable[[Pass[T]], Awaitable[None]], take: Pass[T], *, waiting: float = 0) -> None:
    """Run `fetch`, which passes pieces on one after another, and `take` with each of them.

    So many pieces may wait to be taken: none, so that at most two are in memory, or any number (`math.inf`), if `fetch`
    bounds them itself.

    Raises their first exception, not in an exception group. Pieces may have been taken before.
    """
    failure: Exception | None = None
    ahead, pieces = trio.open_memory_channel[T](waiting)

    async def run() -> None:
        nonlocal failure
        async with ahead:
            try:
                await fetch(ahead.send)
            except Exception as error:  # noqa: BLE001 - raised again below
                failure = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            async for piece in pieces:
                await take(piece)
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = failure or error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
