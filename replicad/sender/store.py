"""The state of a sender in Postgres: the delivered, the outstanding and the current items of each destination.

After a crash this state counts. All writes go through one connection, which also holds the lock of the sender's name.
If the connection is lost, nothing more can be written, and the next holder of the lock reads the stored state. No HTTP
and no decisions here. The SQL is in sender/sql.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from replicad.errors import SenderRefused
from replicad.postgres.bridge import Connection, Database, Row, load_sql
from replicad.postgres.statements import call_row, call_rows, call_value, statement
from replicad.protocol.tokens import Vector
from replicad.sender.items import (
    START,
    Aside,
    DestinationState,
    Edu,
    Order,
    OutstandingPage,
    Pdu,
    Transaction,
    WantedItems,
)

PATIENCE = 10.0  # seconds to wait for the connection of an earlier process: Postgres may notice late that it was killed
LOOK = 0.25  # seconds between two tries meanwhile, and between two tries of a sender that stands by
_STANDINGS = 2000  # destinations read at once when a sender starts
SWEEP = 5000  # facts that one statement looks at: others wait for it for some hundredths of a second
SWEPT = 50_000  # facts that one `sweep` finds still wanted
_COLLAPSE = 200  # destinations whose facts are collapsed by one statement


class Restart(Exception):
    """A stream was reset: begin again with the state in Postgres."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of a destination; replaces the one before. `done_edus`: stored updates that it has accepted. `parked`:
    what it refuses; `success` lies above that.
    """

    name: str
    success: Order
    serial: int
    transaction: Transaction | None = None
    failures: int = 0
    retry_in: float | None = None
    catching_up: bool = False
    error: str | None = None
    done_edus: tuple[int, ...] = ()
    parked: tuple[Aside, ...] = ()

    def columns(self) -> dict[str, Any]:
        """The entry as arguments of federation_source_write()."""
        columns: dict[str, Any] = {
            "name": self.name,
            "token": self.success.token,
            "part": self.success.part,
            "serial": self.serial,
            "failures": self.failures,
            "retry_in": self.retry_in,
            "catching_up": self.catching_up,
            "last_error": self.error,
            "done_edus": self.done_edus,
            "parked": _aside_columns(self.parked),
        }
        made = self.transaction
        if made is not None:
            columns.update(
                txn_id=made.id,
                txn_ts=made.ts,
                txn_token=made.upto.token,
                txn_part=made.upto.part,
                txn_edus=made.edus,
                txn_edu_ids=made.edu_numbers,
                txn_pdus=made.pdus if made.substituted or made.aside else None,
            )
            if made.aside:
                columns["txn_aside"] = {
                    "aside": _aside_columns(made.aside),
                    "refused": asdict(made.refused) if made.refused is not None else None,
                }
        return columns


@dataclass(slots=True)
class FactBatch:
    """Facts with their destinations, to be recorded together. `newcomers`: destinations that may have no row yet."""

    pdus: list[Pdu] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=list)

    def add(self, pdu: Pdu, destinations: Sequence[str]) -> None:
        """Add a fact."""
        self.pdus.append(pdu)
        self.numbers.extend([len(self.pdus)] * len(destinations))
        self.names.extend(destinations)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Up to where a stream was recorded; None: not at all. `epoch`: the generation of the token, if it is known.

    `everywhere`: up to where all senders of the same name, whatever their source, have recorded it.
    """

    token: int | None
    epoch: str | None = None
    everywhere: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """The token to follow the stream with."""
        if self.token is None:
            raise ValueError("nothing was recorded")
        return str(Vector(self.token, epoch=self.epoch))


class SenderStore:
    """The tables of one sender, as far as they concern its source: the stream of its facts, or without one the first of
    its streams of updates. Made by `open_store`; its methods raise DatabaseError and its subclasses.
    """

    def __init__(self, db: Database, keeper: Connection, schema: str, source: str, sender: str) -> None:
        self._db = db
        self._keeper = keeper
        self._writing = trio.Lock()
        self._rewound = False
        self._swept = START  # facts up to here were looked at by the last `sweep`
        self._schema = schema
        self._source = source
        self._sender = sender

    async def recorded(self) -> dict[str, Recorded]:
        """Up to where each stream was recorded."""
        rows = await self._db.fetch(statement("federation_recorded", self._schema), self._source, self._sender)
        return {row["stream"]: Recorded(row["token"], row["epoch"], row["everywhere"]) for row in rows}

    async def standings(self, mine: Callable[[str], bool]) -> AsyncIterator[tuple[str, DestinationState]]:
        """Every destination that was ever written to and is `mine`, by name."""
        after: str | None = None
        while True:
            rows = await call_rows(
                self._db, self._schema, "federation_source_standing", self._source, after, _STANDINGS
            )
            for row in rows:
                if mine(row["name"]):
                    yield row["name"], _standing(row)
            if len(rows) < _STANDINGS:
                return
            after = rows[-1]["name"]

    async def shorten(self, names: Sequence[str], seconds: float) -> None:
        """Have the pauses of these destinations end in so many seconds."""
        async with self._writing:
            await self._keeper.execute(
                statement("federation_shorten", self._schema), self._source, list(names), seconds
            )

    async def begin(self, stream: str, token: int) -> None:
        """Store the first position of all senders in a stream without recorded rows."""
        await self._write("federation_source_begin", stream, token)

    async def follow(self, stream: str, epoch: str) -> None:
        """All recorded rows of a stream belong to this generation too; for the source, the rows of all its senders.

        Raises:
            Restart: something of it was void, and was forgotten.
        """
        if stream != self._source:
            await self._write("federation_source_follow", self._sender, stream, epoch)
        elif await self._write("federation_source_enter", self._sender, epoch):
            self._rewound = True
            raise Restart

    async def record(self, stream: str, upto: int, recording: FactBatch) -> int:
        """Record facts for their destinations, and the stream's token, in one transaction.

        Returns up to where all senders of this name, whatever their source, have recorded the stream.
        """
        pdus = recording.pdus
        everywhere: int = await self._write(
            "federation_source_record",
            self._sender,
            stream,
            upto,
            [pdu.order.token for pdu in pdus],
            [pdu.order.part for pdu in pdus],
            [pdu.room for pdu in pdus],
            [pdu.body for pdu in pdus],
            recording.numbers,
            recording.names,
            recording.newcomers,
        )
        return everywhere

    async def record_edus(self, stream: str, upto: int, edus: Sequence[tuple[str, Edu]]) -> int:
        """Record updates that may not be dropped, each for a destination, and the stream's token, in one
        transaction. Returns what `record` returns.
        """
        everywhere: int = await self._write(
            "federation_source_record_edus",
            self._sender,
            stream,
            upto,
            [name for name, _ in edus],
            [edu.key for _, edu in edus],
            [edu.body for _, edu in edus],
        )
        return everywhere

    async def write(self, entries: Sequence[Entry]) -> None:
        """Store the state of destinations, and remove what they have accepted, in one transaction."""
        await self._write("federation_source_write", json.dumps([entry.columns() for entry in entries]))

    async def collapse(self, names: Sequence[str]) -> int:
        """Keep only the latest fact of each room for these destinations; returns how many were removed."""
        collapsed = 0
        for start in range(0, len(names), _COLLAPSE):
            collapsed += await self._write("federation_source_collapse", list(names[start : start + _COLLAPSE]))
        return collapsed

    async def sweep(self, stream: str) -> int:
        """Remove facts that are outstanding for no destination; returns how many. The facts that stay cost time at
        every look. So where they are many, the next call goes on with the next of them.
        """
        removed = kept = 0
        while kept < SWEPT:
            found = await self._write("federation_source_sweep", stream, *self._swept, SWEEP, get=call_row)
            self._swept = START if found["token"] is None else Order(found["token"], found["part"])
            removed, kept = removed + found["removed"], kept + found["kept"]
            if self._swept == START:
                break
        return removed

    async def park(self, parked: Sequence[tuple[str, Pdu | Edu, str]]) -> None:
        """Keep facts and updates for names to which nothing can be sent, each with the reason."""
        items = [item for _, item, _ in parked]
        orders = [item.order if isinstance(item, Pdu) else None for item in items]
        await self._write(
            "federation_source_park",
            [name for name, _, _ in parked],
            [order and order.token for order in orders],
            [order and order.part for order in orders],
            [item.room if isinstance(item, Pdu) else item.key for item in items],
            [item.body for item in items],
            [reason for _, _, reason in parked],
        )

    async def wanted(self) -> list[str]:
        """The destinations for which something that is parked is to be sent again."""
        rows = await self._db.fetch(statement("federation_wanted", self._schema), self._source)
        return [row["destination"] for row in rows]

    async def replay(self, names: Sequence[str]) -> None:
        """Make the parked items of these destinations whose replay is wanted outstanding again."""
        await self._write("federation_source_replay", list(names))

    async def rewind(self, stream: str, token: int, names: Sequence[str]) -> int:
        """Go on behind `token` for these destinations; returns how many outstanding facts were forgotten.

        It is the last write of this store. A result of a request that was under way would tell that a destination has
        facts above `token`.
        """
        return await self._last_write("federation_source_rewind", stream, token, list(names))

    async def fork(self, stream: str, token: int) -> int:
        """The history of a stream above `token` is void: its ids are given out again for other rows. All senders of the
        source forget it, and their sessions end. Returns how many outstanding facts were forgotten.

        It is the last write of this store.
        """
        if stream != self._source:
            return await self.rewind(stream, token, ())
        return await self._last_write("federation_source_fork", token)

    async def _last_write(self, function: str, *args: object) -> int:
        async with self._writing:
            self._rewound = True
            forgotten: int = await call_value(self._keeper, self._schema, function, self._source, self._sender, *args)
        return forgotten

    async def page(self, name: str, wanted: WantedItems, *, pdus: int, pdu_bytes: int, edus: int) -> OutstandingPage:
        """The outstanding items: a transaction to repeat, or the oldest facts and updates, a bounded number."""
        if wanted.collapse:
            await self.collapse([name])
        if wanted.transaction:
            row = await call_row(self._db, self._schema, "federation_source_transaction", self._source, name)
            if row is not None:
                return OutstandingPage(transaction=_transaction(row))
        facts: list[Row] = []
        updates: list[Row] = []
        if wanted.pdus:
            facts = await call_rows(
                self._db, self._schema, "federation_source_facts", self._source, name, pdus, pdu_bytes, *wanted.after
            )
        if wanted.edus:
            updates = await call_rows(self._db, self._schema, "federation_source_edus", self._source, name, edus)
        return OutstandingPage(
            pdus=tuple(Pdu(Order(row["token"], row["part"]), row["room"], row["body"]) for row in facts),
            edus=tuple(Edu(row["body"], number=row["id"]) for row in updates[:edus]),
            more_pdus=bool(facts) and facts[-1]["more"],
            more_edus=len(updates) > edus,
        )

    async def _write(self, function: str, *args: object, get: Callable[..., Awaitable[Any]] = call_value) -> Any:
        async with self._writing:
            if self._rewound:
                raise Restart
            return await get(self._keeper, self._schema, function, self._source, *args)


@asynccontextmanager
async def open_store(
    db: Database,
    schema: str,
    sender: str,
    senders: Sequence[str],
    streams: Sequence[str],
    *,
    standing_by: Callable[[str], None] = lambda _reason: None,
) -> AsyncIterator[SenderStore]:
    """The store of `sender`, a member of `senders`, for the length of the block. `streams[0]` is its source. No other
    process can use that name for that source meanwhile.

    While another one does, it waits, however long; it calls `standing_by` once, with the reason.

    Raises:
        SenderRefused: running senders have another list of senders.
    """
    async with db.connection() as keeper:
        await keeper.execute(load_sql("federation_keepalive"))
        reported, refused_since = False, None
        while True:
            row = await call_row(
                keeper, schema, "federation_source_enlist", streams[0], sender, sorted(senders), list(streams)
            )
            if row["refusal"] is None:
                break
            if row["until"] == "gone":
                refused_since = None
                if not reported:
                    standing_by(row["refusal"])
                    reported = True
            else:
                refused_since = refused_since or trio.current_time()
                if trio.current_time() - refused_since > PATIENCE:
                    raise SenderRefused(f"{row['refusal']}; stop it first, or give all the same --senders")
            await trio.sleep(LOOK)
        yield SenderStore(db, keeper, schema, streams[0], sender)


def _aside_columns(aside: Sequence[Aside]) -> list[dict[str, Any]]:
    return [
        {"token": one.upto.token, "part": one.upto.part, "numbers": one.numbers, "reason": one.reason} for one in aside
    ]


def _standing(row: Row) -> DestinationState:
    return DestinationState(
        success=Order(row["token"], row["part"]),
        serial=row["serial"],
        failures=row["failures"],
        retry_in=None if row["retry_in"] is None else max(0.0, row["retry_in"]),
        catching_up=row["catching_up"],
        outstanding=row["outstanding"],
    )


def _transaction(row: Mapping[str, Any]) -> Transaction:
    trial: dict[str, Any] = json.loads(row["aside"]) if row["aside"] is not None else {}
    return Transaction(
        id=row["id"],
        serial=row["serial"],
        ts=row["ts"],
        upto=Order(row["token"], row["part"]),
        pdus=tuple(row["pdus"]),
        edus=tuple(row["edus"]),
        edu_numbers=tuple(row["edu_ids"]),
        substituted=row["substituted"],
        aside=tuple(
            Aside(Order(one["token"], one["part"]), tuple(one["numbers"]), one["reason"])
            for one in trial.get("aside", ())
        ),
        refused=_refused(trial.get("refused")),
    )


def _refused(found: dict[str, Any] | None) -> Transaction | None:
    """The transaction that `Entry.columns` wrote down."""
    if found is None:
        return None
    lists = {name: tuple(found[name]) for name in ("pdus", "edus", "edu_numbers")}
    aside = tuple(Aside(Order(*upto), tuple(numbers), reason) for upto, numbers, reason in found["aside"])
    return Transaction(**{**found, **lists, "upto": Order(*found["upto"]), "aside": aside})
