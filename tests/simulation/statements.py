"""What the model of Postgres answers to the statements of the daemon: the seam of the simulation.

The daemon's own pools and connections run (`postgres/bridge.py`, `postgres/connection.py`); a `Backend` stands in for
the connected driver. It is given the same SQL text as Postgres, and knows each text by the name of its query
(`postgres/statements.py`) or function. `tests/simulation/test_model.py` sends the same text to both.

What is PL/pgSQL or SQL in the product (stream_note, stream_fork, ...) is written here a second time, in Python. So a
defect of that SQL is none that the simulation can find.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from zlib import crc32

import trio

from replicad.errors import DatabaseUnavailable
from replicad.positions.horizon import _BARRIER
from replicad.postgres.bridge import _SERVER, _VERIFY, Database, Fence
from replicad.postgres.connection import Connection, Settings, Sink
from replicad.postgres.failures import Target
from replicad.postgres.statements import load_sql, rows_call, statement, value_call
from replicad.streams.chunks import MAX_ROW

from .postgres import NOT_YET, SHUTDOWN, Cluster, Failed, Mode, Table, Transaction

SCHEMA = "replicad"
PIECE = 4096  # bytes of a COPY that the server sends at a time
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SHARES_NOTHING = ("sequence_restarted", "ids_went_back")

Answer = list[dict[str, Any]]


@dataclass
class Generation:
    """A row of stream_generation."""

    number: int
    id: str
    began_at: int
    writers: list[int]
    positions: list[int]
    reason: str
    incarnation: str
    file: int
    table_file: int


@dataclass
class Noted:
    """A row of stream_position. `number`: of the transaction that wrote it."""

    position: int
    number: int


@dataclass
class Acked:
    """A row of stream_ack."""

    token: int
    generation: str


@dataclass
class Entry:
    """All rows of our tables about one stream. `version` changes with each row of `stream`, `stream_writer`."""

    number: int
    name: str
    table: Table
    by_writer: bool
    version: int
    generations: list[Generation] = field(default_factory=list)
    noted: dict[int, Noted] = field(default_factory=dict)  # by the number of the writer; 0: of all
    writers: dict[str, int] = field(default_factory=dict)
    acks: dict[str, Acked] = field(default_factory=dict)
    trimmed_upto: int | None = None

    @property
    def present(self) -> Generation:
        """`stream_generation_now`."""
        return self.generations[-1]


class Registry:
    """The part `streams` of our schema, in the model. A function is one transaction, whose commit is on disk."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.entries: dict[str, Entry] = {}
        self.forks = 0
        self.on_ack: Callable[[str, str, int], None] = lambda *_: None

    def add(self, table: Table, *, by_writer: bool) -> Entry:
        """`stream_add`."""
        number = len(self.entries) + 1
        entry = Entry(number, table.name, table, by_writer, self.cluster.next_version())
        self.entries[table.name] = entry
        self._begin(entry, 0, {}, "added")
        entry.writers = {"master": 1}
        return entry

    def continues(self, entry: Entry) -> bool:
        """`stream_continues`."""
        g = entry.present
        return g.incarnation == self.cluster.incarnation and g.file == entry.table.sequence.file

    def write(self, entry: Entry, change: Callable[[Transaction], None], *, marked: bool = True) -> None:
        """Change the rows of a stream in a transaction of its own. A crash or a promotion may undo it as a whole.

        `marked`: looks at the registry notice it.
        """
        before = (
            list(entry.generations),
            {key: Noted(one.position, one.number) for key, one in entry.noted.items()},
            dict(entry.writers),
            {key: Acked(one.token, one.generation) for key, one in entry.acks.items()},
            entry.trimmed_upto,
            entry.version,
        )

        def undo() -> None:
            entry.generations, entry.noted, entry.writers, entry.acks, entry.trimmed_upto, entry.version = before

        transaction = self.cluster.begin("replicad")
        self.cluster.number(transaction)
        change(transaction)
        if marked:
            entry.version = self.cluster.next_version()
        transaction.at_commit.append((lambda: None, undo))
        self.cluster.commit_now(transaction)

    def _begin(self, entry: Entry, began_at: int, ahead: dict[int, int], reason: str) -> None:
        self.forks += 1
        id = f"{crc32(f'{entry.number} {self.forks}'.encode()):08x}{self.forks:08x}"
        number = entry.present.number + 1 if entry.generations else 1
        table = entry.table
        entry.generations = [
            *entry.generations,
            Generation(
                number,
                id,
                began_at,
                list(ahead),
                list(ahead.values()),
                reason,
                self.cluster.incarnation,
                table.sequence.file,
                table.file,
            ),
        ]
        self.cluster.trace("generation", entry.name, number, began_at, reason)

    def note(self, number: int, generation: str, position: int, writers: Sequence[int], at: Sequence[int]) -> bool:
        """`stream_note`."""
        entry = self._numbered(number)
        if entry.present.id != generation or not self.continues(entry):
            return False

        def change(transaction: Transaction) -> None:
            entry.present.table_file = entry.table.file
            for writer, new in {0: position, **dict(zip(writers, at, strict=True))}.items():
                if writer not in entry.noted or entry.noted[writer].position < new:
                    entry.noted[writer] = Noted(new, transaction.number)

        self.write(entry, change, marked=False)
        return True

    def fork(self, number: int, seen: str, reason: str) -> str:
        """`stream_fork`."""
        entry = self._numbered(number)
        g = entry.present
        if g.id != seen:
            return g.id
        changed = g.file != entry.table.sequence.file
        if reason == "sequence_changed" and not changed:
            return g.id
        shared: int | None = None
        ahead: dict[int, int] = {}
        if changed or reason == "ids_went_back":
            shared = self._kept_upto(entry, went_back=reason == "ids_went_back")
            if reason != "ids_went_back":
                reason = "sequence_restarted" if shared is None else "sequence_changed"
        elif reason != "sequence_restarted":
            shared = entry.noted[0].position if 0 in entry.noted else None
            ahead = {
                writer: one.position
                for writer, one in sorted(entry.noted.items())
                if writer and one.position > (shared or 0)
            }
        upto = shared or 0

        def change(transaction: Transaction) -> None:
            self._begin(entry, upto, ahead, reason)
            if entry.trimmed_upto is not None and entry.trimmed_upto > upto:
                entry.trimmed_upto = upto
            for writer, one in entry.noted.items():
                one.position, one.number = ahead.get(writer, min(one.position, upto)), transaction.number
            for ack in entry.acks.values():
                if ack.generation == g.id:
                    ack.generation, ack.token = entry.present.id, min(ack.token, upto)

        self.write(entry, change)
        return entry.present.id

    def _kept_upto(self, entry: Entry, *, went_back: bool) -> int | None:
        """`stream_kept_upto`."""
        table, last = entry.table, self.cluster.last_value(entry.table.sequence)
        noted = entry.noted.get(0)
        if last is None or noted is None or entry.present.table_file != table.file:
            return None
        if went_back and self.cluster.holders(table.oid):
            return None
        newer = [row.id for row in table.between(-1, noted.position) if row.made.number > noted.number]
        return min([noted.position, last, *(id - 1 for id in newer)])

    def continue_streams(self) -> int:
        """`stream_continue`."""
        begun = 0
        present = self.cluster.incarnation.split("/")
        for entry in self.entries.values():
            if self.continues(entry):
                continue
            old = entry.present.incarnation.split("/")
            reason = "sequence_changed"
            if old[1] != present[1]:
                reason = "promoted"
            elif old[3:] != present[3:]:
                reason = "restarted"
            self.fork(entry.number, entry.present.id, reason)
            begun += 1
        return begun

    def ensure_writers(self, number: int, names: Sequence[str]) -> Answer:
        """`stream_writers_ensure`."""
        entry = self._numbered(number)
        if missing := sorted(set(names) - entry.writers.keys()):

            def change(_: Transaction) -> None:
                for name in missing:
                    entry.writers = {**entry.writers, name: max(entry.writers.values(), default=0) + 1}

            self.write(entry, change)
        return [{"writer": name, "writer_number": entry.writers[name]} for name in sorted(set(names))]

    def note_acks(self, names: list[str], generations: list[str], instances: list[str], tokens: list[int]) -> None:
        """`stream_ack_note`."""
        for name, generation, instance, token in zip(names, generations, instances, tokens, strict=True):
            entry = self.entries[name]
            if entry.present.id == generation:
                take = partial(_take_ack, entry, instance, token, generation)
                self.write(entry, lambda _, take=take: take(), marked=False)
                self.on_ack(name, instance, token)

    def acked(self, entry: Entry) -> int | None:
        """`stream_acked`."""
        tokens = [one.token if one.generation == entry.present.id else None for one in entry.acks.values()]
        if not tokens or None in tokens or 0 not in entry.noted:
            return None
        return min(*filter(None.__ne__, tokens), entry.noted[0].position)  # type: ignore[type-var]

    def trim(self, entry: Entry, upto: int) -> int:
        """`stream_trim` of all rows up to there."""
        found = list(entry.table.between(-1, upto))

        def change(transaction: Transaction) -> None:
            entry.trimmed_upto = max(entry.trimmed_upto or 0, upto)
            for row in found:
                row.gone = transaction

        self.write(entry, change)
        return len(found)

    def _numbered(self, number: int) -> Entry:
        return next(one for one in self.entries.values() if one.number == number)


def _take_ack(entry: Entry, instance: str, token: int, generation: str) -> None:
    known = entry.acks.get(instance)
    if known is not None and known.generation == generation:
        token = max(known.token, token)
    entry.acks[instance] = Acked(token, generation)


_RANGE = re.compile(r't\."id" > (\S+) AND t\."id" <= (\S+) AND ')
_STEP = re.compile(r"generate_series\((-?\d+)::bigint, (-?\d+)::bigint - 1, (\d+)::bigint\)")
_FILE = re.compile(r"pg_relation_filenode\(\d+::oid\) = (\d+)::oid")
_LIMIT = re.compile(r'ORDER BY t\."id" LIMIT (\d+)')
_WRITER = re.compile(r"WHEN '(\w+)' THEN t\.\"id\" > (-?\d+) AND t\.\"id\" <= (-?\d+)")
_REST = re.compile(r"ELSE (false|t\.\"id\" > (-?\d+) AND t\.\"id\" <= (-?\d+)) END(?: END)? AND \(SELECT")
_FROM = re.compile(r'FROM "?public"?\."?(\w+)"? AS t\b')


class Backend:
    """One connection to the model, in place of a connected driver. It dies with the run of the server."""

    def __init__(self, cluster: Cluster, registry: Registry, name: str) -> None:
        self._cluster = cluster
        self._registry = registry
        self._run = cluster.run
        self._closed = False
        self._in_transaction = False
        self._lock_timeout = self._local_timeout = float("inf")
        self._session = cluster.begin(name)  # its locks; of statements that only read
        cluster.transactions.pop(self._session)
        self._pid = self._session.pid or 0

    # --- what a driver has ---

    def is_closed(self) -> bool:
        return self._closed or self._run != self._cluster.run

    def terminate(self) -> None:
        self._closed = True
        self._cluster.locks.release(self._session)

    async def close(self, timeout: float) -> None:
        self.terminate()

    def is_in_transaction(self) -> bool:
        return self._in_transaction

    def get_server_pid(self) -> int:
        return self._pid

    async def reset(self) -> None:
        self._in_transaction, self._lock_timeout, self._local_timeout = False, float("inf"), float("inf")

    async def fetch(self, sql: str, *args: Any) -> Answer:
        self._check()
        await self._cluster.step()
        self._check()
        self._cluster.trace("sql", self._session.application_name, sql[:60], *args)
        try:
            found = await self._answer(sql, *args)
        finally:
            self._cluster.locks.release(self._session)
        await self._cluster.step(self._cluster.pace.step / 4)
        self._check()
        return found

    async def fetchrow(self, sql: str, *args: Any) -> dict[str, Any] | None:
        found = await self.fetch(sql, *args)
        return found[0] if found else None

    async def fetchval(self, sql: str, *args: Any) -> Any:
        found = await self.fetch(sql, *args)
        return next(iter(found[0].values())) if found else None

    async def execute(self, sql: str) -> str:
        self._check()
        await self._cluster.step(self._cluster.pace.step / 4)
        self._check()
        if sql.startswith("BEGIN"):
            self._in_transaction = True
            if "LOCAL lock_timeout = '250ms'" in sql:
                self._local_timeout = 0.25
        elif sql in ("COMMIT", "ROLLBACK"):
            self._in_transaction, self._local_timeout = False, float("inf")
        elif "lock_timeout = '15ms'" in sql:
            self._lock_timeout = 0.015
        elif not sql.startswith("SELECT 1 WHERE"):
            raise AssertionError(f"the model knows no {sql}")
        return sql.partition(";")[0] if not sql.startswith("SELECT") else "SELECT 1"

    def _check(self) -> None:
        if self.is_closed():
            self._closed = True
            raise Failed(SHUTDOWN, "terminating connection due to administrator command", fatal=True)

    async def pause(self) -> None:
        """The next bytes of a COPY take a moment."""
        await self._cluster.step(self._cluster.pace.step / 4)
        self._check()

    async def copy(self, query: str) -> list[str]:
        """The values of a query of one column. All tables are locked before the snapshot is taken."""
        self._check()
        await self._cluster.step()
        self._check()
        self._cluster.trace("copy", self._session.application_name, query[-200:])
        try:
            table = self._from(query)
            await self._lock(table.oid)
            self._check()
            step = _STEP.search(query)
            if step is None:
                return self._lines(table, query)
            return self._blocks(table, query, *map(int, step.groups()))
        finally:
            self._cluster.locks.release(self._session)

    # --- statements ---

    async def _lock(self, *relations: int) -> None:
        for relation in relations:
            timeout = min(self._lock_timeout, self._local_timeout, 60.0)
            await self._cluster.locks.acquire(relation, self._session, Mode.ACCESS_SHARE, timeout)

    async def _answer(self, sql: str, *args: Any) -> Answer:
        known = _KNOWN.get(sql)
        if known is not None:
            return await known(self, *args)
        for beginning, answer in _BEGINNINGS:
            if sql.startswith(beginning):
                return await answer(self, sql, *args)
        raise AssertionError(f"the model knows no {sql}")

    async def _verify(self) -> Answer:
        return [{"pid": self._pid, "transaction_timeout": None}]

    async def _server(self) -> Answer:
        return [{"server": self._cluster.server}]

    async def _session_of(self) -> Answer:
        return [{"standby": False, "version": 150000}]

    async def _confirm(self) -> Answer:
        return [{"pid": self._pid}]

    async def _inspect(self, tables: list[int], sequences: list[int]) -> Answer:
        found: Answer = []
        usual = {
            "persistence": "p",
            "readable": True,
            "reachable": True,
            "schema": "public",
            "role": "r",
            "owner": None,
        }
        for oid in (*tables, *sequences):
            table = self._cluster.table_of(oid)
            if table is None:
                continue
            if table.oid == oid:
                of_sequence = {"increment": None, "cache": None, "cycle": None, "feeds": None}
                found.append({"oid": oid, "name": f"public.{table.name}", **usual, **of_sequence})
            else:
                of_sequence = {"increment": 1, "cache": 1, "cycle": False, "feeds": 0}
                found.append({"oid": oid, "name": f"public.{table.name}_id_seq", **usual, **of_sequence})
        return found

    async def _last_values(self, sequences: list[int]) -> Answer:
        tables = [table for table in self._cluster.tables.values() if table.sequence.oid in sequences]
        await self._lock(*(table.sequence.oid for table in tables))
        return [
            {
                "sequence": table.sequence.oid,
                "last_value": self._cluster.last_value(table.sequence),
                "inserted": self._cluster.lsn,
                "flushed": self._cluster.flushed,
                "readable": True,
                "file": table.sequence.file,
            }
            for table in tables
        ]

    async def _unused(self, sql: str) -> Answer:
        table = next(one for one in self._cluster.tables.values() if f"public.{one.name}_id_seq" in sql)
        await self._lock(table.sequence.oid)
        value = table.sequence.value
        return [{"last_value": value.last, "is_called": value.called, "found": table.sequence.oid}]

    async def _last_row(self, sql: str, last_value: int, _: int) -> Answer:
        table = self._from(sql)
        await self._lock(table.oid)
        found = [row.id for row in table.between(-1, last_value)]
        return [{"last_row": found[-1] if found else 0, "found": table.oid}]

    async def _holders(self, sql: str, tables: list[int], sequences: list[int], *args: Any) -> Answer:
        taken = dict(zip(args[4], args[5], strict=True)) if len(args) > 5 else {}
        holds: dict[tuple[Transaction, int], None] = {}
        for relation, watched in [*((oid, oid) for oid in tables), *taken.items()]:
            for one in self._cluster.holders(relation):
                if watched != relation and (relation, Mode.ROW_EXCLUSIVE) not in one.locks:
                    continue
                holds[one, watched] = None
        common = {"flushed": self._cluster.flushed, "unfit": []}
        nobody = dict.fromkeys(
            ("holder", "watched", "number", "bound", "pid", "application_name", "query", "gid", "age")
        )
        if not holds:
            return [{**common, **nobody}]
        now = trio.current_time()
        return [
            {
                **common,
                **nobody,
                "holder": one.holder,
                "watched": watched,
                "pid": one.pid,
                "application_name": None if one.pid is None else one.application_name,
                "gid": one.gid,
                "age": now - one.began,
            }
            for one, watched in holds
        ]

    async def _blockers(self, sequences: list[int], tables: list[int]) -> Answer:
        found: Answer = []
        for relation in (*sequences, *tables):
            waiting = [
                w.transaction for w in self._cluster.locks.queues.get(relation, ()) if w.mode is Mode.ACCESS_EXCLUSIVE
            ]
            for one in dict.fromkeys([*self._cluster.holders(relation, Mode.ACCESS_EXCLUSIVE), *waiting]):
                of = {"application_name": one.application_name, "query": None, "gid": one.gid, "age": 0.0}
                found.append({"relation": relation, "holder": one.holder, "pid": one.pid, **of})
        return found

    async def _flush(self) -> Answer:
        run = self._cluster.run
        await self._cluster.flush(self._cluster.log(lambda: None))
        if self._cluster.run != run:
            self._check()
        return [{"lsn": self._cluster.lsn}]

    async def _bell(
        self, sequences: list[int], values: list[int | None], times: int, each: float, others: bool
    ) -> Answer:
        """A look finds the first sequence that differs. It does not need the real number of looks to do so."""
        known = dict(zip(sequences, values, strict=True))
        deadline = trio.current_time() + times * each
        while True:
            self._check()
            for table in self._cluster.tables.values():
                oid = table.sequence.oid
                if oid in known and self._cluster.last_value(table.sequence) != known[oid]:
                    return [{"sequence": oid}]
            moved, left = self._cluster.moved, deadline - trio.current_time()
            with trio.move_on_after(max(0.0, left)) as scope:
                await moved.wait()
            if scope.cancelled_caught or left <= 0:
                return []
            await trio.sleep(self._cluster.chance.uniform(0, each))

    # --- the registry ---

    async def _load(self, names: list[str] | None) -> Answer:
        found = [self._stream(one) for one in self._registry.entries.values() if names is None or one.name in names]
        return sorted(found, key=lambda row: row["name"])

    def _stream(self, entry: Entry) -> dict[str, Any]:
        table = entry.table
        nothing = dict.fromkeys(
            (
                *(
                    "positions_table",
                    "positions_oid",
                    "reader",
                    "sequence_reader",
                    "positions_reader",
                    "fault",
                    "denied",
                ),
                *("proof_key", "keep_for", "keep_rows", "source", "unrecorded", "filters", "home", "relation_named"),
                *("sequence_named", "positions_named"),
            )
        )
        return {
            **nothing,
            "number": entry.number,
            "name": entry.name,
            "table": f"public.{table.name}",
            "table_oid": table.oid,
            "id_column": "id",
            "instance_column": "writer" if entry.by_writer else None,
            "row": "t.body",
            "row_type": "json",
            "method": "lock_watch",
            "sequence": f"public.{table.name}_id_seq",
            "sequence_oid": table.sequence.oid,
            "fed": True,
            "shares_sequence": False,
            "unique_ids": True,
            "plain": True,
            "epoch": entry.present.id,
            "continues": self._registry.continues(entry),
            "sequence_file": entry.present.file,
            "noted": entry.noted[0].position if 0 in entry.noted else None,
            "trimmed_upto": entry.trimmed_upto,
            "max_row": MAX_ROW,
            "skipped": [],
            "created_at": BEGAN,
            "writer_names": list(entry.writers),
            "writer_numbers": list(entry.writers.values()),
        }

    async def _marks(
        self,
        names: list[str],
        own: list[int | None],
        catalogs: list[int | None],
        noted: list[int | None],
        some: list[str] | None,
        whole: int | None,
    ) -> Answer:
        entries, incarnation = self._registry.entries, self._cluster.incarnation
        known = {name: row for name, *row in zip(names, own, catalogs, noted, strict=True)}
        now = crc32(repr((incarnation, [(one.version, one.noted.get(0)) for one in entries.values()])).encode())
        written = sum(one.table.version + one.table.sequence.version for one in entries.values())
        found: Answer = [{"name": None, "own": now, "catalogs": written, "noted": None}]
        for name, one in entries.items():
            looked_at = some is None or name in some
            if not looked_at and now == whole:
                continue
            versions = (one.table.version, one.table.sequence.version)
            row = {
                "name": name,
                "own": crc32(repr((incarnation, one.version, one.present.number)).encode()),
                "catalogs": crc32(repr(versions).encode()) if looked_at else None,
                "noted": one.noted[0].position if 0 in one.noted else None,
            }
            before = known.get(name, [None, None, None])
            if row["own"] != before[0] or row["noted"] != before[2] or row["catalogs"] not in (None, before[1]):
                found.append(row)
        return found

    async def _published(self) -> Answer:
        found: Answer = []
        for entry in self._registry.entries.values():
            if not entry.noted:
                continue
            names = {number: name for name, number in entry.writers.items()}
            by_writer = {names[number]: one.position for number, one in sorted(entry.noted.items()) if number in names}
            position = entry.noted[0].position
            at = {"writers": list(by_writer), "positions": list(by_writer.values())}
            found.append({"name": entry.name, "position": position, "published_at": BEGAN, **at})
        return found

    async def _lineage(self, name: str | None) -> Answer:
        return [
            {
                "name": entry.name,
                "number": one.number,
                "id": one.id,
                "began_at": one.began_at,
                "writers": one.writers,
                "positions": one.positions,
                "reason": one.reason,
                "created_at": BEGAN,
            }
            for entry in self._registry.entries.values()
            if name in (None, entry.name)
            for one in entry.generations
        ]

    async def _numbered(self, number: int, numbers: list[int]) -> Answer:
        entry = self._registry._numbered(number)
        return [
            {"number": at, "name": name, "position": None, "created_at": BEGAN, "retired_at": None}
            for name, at in entry.writers.items()
            if at in numbers
        ]

    async def _taken(self, sequence: int) -> Answer:
        table = next(one for one in self._cluster.tables.values() if one.sequence.oid == sequence)
        await self._lock(sequence)
        last = self._cluster.last_value(table.sequence)
        return [{"upto": 0 if last is None else last, "file": table.sequence.file}]

    async def _note(self, *args: Any) -> Answer:
        return [{"stream_note": self._registry.note(*args)}]

    async def _fork(self, *args: Any) -> Answer:
        return [{"stream_fork": self._registry.fork(*args)}]

    async def _continue(self) -> Answer:
        return [{"stream_continue": self._registry.continue_streams()}]

    async def _ensure(self, *args: Any) -> Answer:
        return self._registry.ensure_writers(*args)

    async def _acks(self, *args: Any) -> Answer:
        self._registry.note_acks(*args)
        return [{"stream_ack_note": ""}]

    async def _nothing(self, *_: Any) -> Answer:
        return [{"nothing": ""}]

    # --- rows ---

    def _from(self, sql: str) -> Table:
        found = _FROM.search(sql)
        assert found is not None, sql
        return self._cluster.tables[found[1]]

    async def _few(self, sql: str, after: int, upto: int) -> Answer:
        table = self._from(sql)
        await self._lock(table.oid)
        lines = self._lines(table, sql.replace("$1::bigint", str(after)).replace("$2::bigint", str(upto)))
        data = "".join(f"{line}\n" for line in lines).encode()
        return [{"data": data or None, "more": False}]

    def _lines(self, table: Table, sql: str) -> list[str]:
        entry = self._registry.entries[table.name]
        span = _RANGE.search(sql)
        assert span is not None, sql
        after, upto = int(span[1]), int(span[2])
        self._same(table, sql)
        if entry.trimmed_upto is not None and after < entry.trimmed_upto:
            raise Failed("RS004", f"rows up to {entry.trimmed_upto} were removed")
        by_writer = {name: (int(low), int(high)) for name, low, high in _WRITER.findall(sql)}
        others: tuple[int, int] | None = (after, upto)
        if by_writer:
            rest = _REST.search(sql)
            assert rest is not None, sql
            others = None if rest[1] == "false" else (int(rest[2]), int(rest[3]))
            low = min([one[0] for one in by_writer.values()] + ([others[0]] if others else []))
            assert after <= low, sql
            after, upto = low, max([one[1] for one in by_writer.values()] + ([others[1]] if others else []))
        limit = _LIMIT.search(sql)
        lines: list[str] = []
        for row in table.between(after, upto):
            wanted = by_writer.get(row.writer, others)
            if wanted is not None and wanted[0] < row.id <= wanted[1]:
                lines.append(self._line(entry, row.writer, row.id, row.body))
                if limit is not None and len(lines) == int(limit[1]):
                    break
        return lines

    @staticmethod
    def _line(entry: Entry, writer: str, id: int, body: str) -> str:
        return f"RDATA {entry.name} {writer if entry.by_writer else 'master'} {id} {body}"

    def _blocks(self, table: Table, sql: str, after: int, upto: int, step: int) -> list[str]:
        entry = self._registry.entries[table.name]
        self._same(table, sql)
        if entry.trimmed_upto is not None and after < entry.trimmed_upto:
            raise Failed("RS004", f"rows up to {entry.trimmed_upto} were removed")
        found: list[str] = []
        for low in range(after, upto, step):
            lines = [
                self._line(entry, row.writer, row.id, row.body) for row in table.between(low, min(upto, low + step))
            ]
            if lines:
                found.append(f"{len(lines)}\n" + "".join(f"{line}\x01" for line in lines))
        return found

    def _same(self, table: Table, sql: str) -> None:
        file = _FILE.search(sql)
        if file is not None and int(file[1]) != table.sequence.file:
            raise Failed("RS005", f"the ids of stream {table.name} begin anew: its sequence was restarted")

    async def _last_token(self, sql: str, after: int, upto: int) -> Answer:
        table = self._from(sql)
        await self._lock(table.oid)
        self._same(table, sql)
        found: dict[str, int] = {}
        for row in table.between(after, upto):
            found[row.writer] = row.id
        if "AS token" in sql:
            return [{"writer": writer, "token": id} for writer, id in found.items()]
        return [{"max": max(found.values(), default=None)}]

    async def _earliest(self, sql: str, _: int) -> Answer:
        table = self._from(sql)
        await self._lock(table.oid)
        self._same(table, sql)
        trimmed = self._registry.entries[table.name].trimmed_upto
        first = next((row.id for row in table.between(-1, 1 << 60)), None)
        return [{"earliest": trimmed if trimmed is not None else min(0, (first or 1) - 1)}]

    async def _ends(self, sql: str, after: int, upto: int) -> Answer:
        table = self._from(sql)
        await self._lock(table.oid)
        self._same(table, sql)
        found = [row.id for row in table.between(after, upto)]
        return [{"first": found[0] if found else None, "last": found[-1] if found else None}]


def _beginning(name: str) -> str:
    """The text of a query up to the first place that is filled in, without its comments' braces."""
    return load_sql(name)[:60]


_KNOWN: dict[str, Callable[..., Awaitable[Answer]]] = {
    _VERIFY: Backend._verify,
    _SERVER: Backend._server,
    _BARRIER: Backend._flush,
    "SELECT pg_backend_pid() AS pid": Backend._confirm,
    load_sql("horizon_session"): Backend._session_of,
    load_sql("horizon_inspect"): Backend._inspect,
    load_sql("horizon_last_values"): Backend._last_values,
    load_sql("horizon_blockers"): Backend._blockers,
    load_sql("bell"): Backend._bell,
    statement("stream_load", SCHEMA): Backend._load,
    statement("stream_marks", SCHEMA): Backend._marks,
    statement("stream_published", SCHEMA): Backend._published,
    statement("stream_lineage", SCHEMA): Backend._lineage,
    statement("stream_writers_numbered", SCHEMA): Backend._numbered,
    statement("stream_taken", SCHEMA): Backend._taken,
    value_call(SCHEMA, "stream_note", 5): Backend._note,
    value_call(SCHEMA, "stream_fork", 3): Backend._fork,
    value_call(SCHEMA, "stream_continue", 0): Backend._continue,
    rows_call(SCHEMA, "stream_writers_ensure", 2): Backend._ensure,
    value_call(SCHEMA, "stream_ack_note", 4): Backend._acks,
    value_call(SCHEMA, "stream_trouble_write", 7): Backend._nothing,
}

_BEGINNINGS: tuple[tuple[str, Callable[..., Awaitable[Answer]]], ...] = (
    (_beginning("horizon_holders"), Backend._holders),
    (_beginning("horizon_last_row"), Backend._last_row),
    (_beginning("horizon_unused_sequence"), Backend._unused),
    (_beginning("rows_few"), Backend._few),
    (_beginning("rows_last_token"), Backend._last_token),
    (_beginning("rows_last_tokens"), Backend._last_token),
    (_beginning("rows_earliest"), Backend._earliest),
    (_beginning("rows_ends"), Backend._ends),
)


class _Loop:
    """In place of the driver's asyncio loop: the model runs on trio."""

    @staticmethod
    async def run_aio_coroutine(coroutine: Awaitable[Any]) -> Any:
        return await coroutine


class ModelConnection(Connection):
    """A connection whose COPY does not cross to asyncio."""

    async def _copy(self, query: str, options: str, sink: Sink, timeout: float | None, lock: str | None) -> str:
        assert lock != "", "readers of other owners are no part of the model"
        values = await self._run(self._driver.copy, query)
        if "binary" in options:
            texts = [value.encode() for value in values]
            data = (
                b"PGCOPY\n\xff\r\n\0"
                + bytes(8)
                + b"".join(struct.pack("!hi", 1, len(t)) + t for t in texts)
                + b"\xff\xff"
            )
        else:
            data = "".join(f"{value}\n" for value in values).encode()
        for at in range(0, len(data), PIECE):
            await self._run(self._driver.pause)
            await sink(data[at : at + PIECE])
        return f"COPY {len(values)}"


class ModelDatabase(Database):
    """A pool of connections to the model."""

    def __init__(self, cluster: Cluster, registry: Registry, name: str, size: int, fence: Fence) -> None:
        settings = Settings(
            "", Target("model", "model", "model"), {}, 10.0, 60.0, (Failed,), type("Confused", (Exception,), {})
        )
        super().__init__(_Loop(), settings, size, 30.0, fence=fence)
        self._cluster = cluster
        self._registry = registry
        self._name = name

    async def _open(self) -> Connection:
        await self._cluster.step()
        if not self._cluster.up:
            raise DatabaseUnavailable("the server is down", sqlstate=NOT_YET)
        self._counters.connected += 1
        return ModelConnection(
            Backend(self._cluster, self._registry, self._name), self._loop, self._settings, self._counters
        )
