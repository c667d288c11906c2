"""A model of Postgres in memory: transactions, snapshots, locks, sequences, WAL, a standby, crash and promotion.

It has what the argument for positions rests on (docs/positions.md), and no more:

- A transaction is visible to others from one moment on. Its locks are released after that moment.
- A sequence is no part of a transaction. Postgres logs it 32 values ahead. So a server that recovers from a crash, and
  a standby that is promoted, show a value that nobody has got, and ids between are never given out.
- What was written to the WAL and not flushed is lost in a crash. What was not replicated is lost in a promotion.
- A lock that conflicts is waited for in a queue, for at most `lock_timeout`.

Every step is atomic; time passes between two steps. `tests/simulation/test_model.py` compares it with a real server.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import trio

LOGGED_AHEAD = 32  # values of a sequence, in one WAL record (SEQ_LOG_VALS in the sources of Postgres)

LOCKED, NO_TABLE, SHUTDOWN, NOT_YET = "55P03", "42P01", "57P01", "57P03"


class Failed(Exception):
    """An error of Postgres. With the severity FATAL the connection is lost."""

    def __init__(self, sqlstate: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.severity_en = "FATAL" if fatal else "ERROR"


class State(Enum):
    """Of a transaction. One that is `COMMITTING` has written its commit record, and nobody sees its rows yet."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Mode(Enum):
    """Of a lock on a table or sequence."""

    ACCESS_SHARE = 1
    ROW_EXCLUSIVE = 2
    ACCESS_EXCLUSIVE = 3

    def conflicts(self, other: Mode) -> bool:
        """Whether two transactions cannot hold these two."""
        return Mode.ACCESS_EXCLUSIVE in (self, other)


@dataclass(eq=False)
class Transaction:
    """`number` orders transactions by their first write, as transaction ids do. `pid` is None once it is prepared."""

    holder: str
    pid: int | None
    application_name: str
    began: float
    state: State = State.OPEN
    number: int = 0
    gid: str | None = None
    locks: list[tuple[int, Mode]] = field(default_factory=list)
    at_commit: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)  # do, and undo


@dataclass(eq=False)
class Row:
    """One version of a row. `gone`: the transaction that has deleted it."""

    id: int
    writer: str
    body: str
    made: Transaction
    gone: Transaction | None = None

    @property
    def visible(self) -> bool:
        """Whether a snapshot that is taken now has it."""
        return self.made.state is State.COMMITTED and (self.gone is None or self.gone.state is not State.COMMITTED)

    def __lt__(self, other: Row) -> bool:
        return self.id < other.id


@dataclass(frozen=True)
class Value:
    """A sequence as it is in its file. `logged`: so many values above are in the WAL already."""

    last: int
    called: bool
    logged: int = 0


@dataclass(eq=False)
class Sequence:
    """`disk`: for each server what its recovery would find. `record`: the LSN of its last WAL record."""

    oid: int
    file: int
    value: Value
    disk: dict[str, Value]
    record: int = 0
    version: int = 0


@dataclass(eq=False)
class Table:
    """Rows by id. `file` changes when all rows are written anew."""

    oid: int
    name: str
    sequence: Sequence
    file: int
    rows: list[Row] = field(default_factory=list)
    version: int = 0

    def between(self, after: int, upto: int) -> Iterator[Row]:
        """The visible rows of (after, upto], in the order of their ids."""
        for row in self.rows[bisect_right(self.rows, after, key=_id) :]:
            if row.id > upto:
                return
            if row.visible:
                yield row


def _id(row: Row) -> int:
    return row.id


@dataclass(eq=False)
class _Wait:
    transaction: Transaction
    mode: Mode
    granted: trio.Event = field(default_factory=trio.Event)


class Locks:
    """The locks on tables and sequences. Those that wait do so in a queue, and a later request waits behind them."""

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[Transaction, Mode]]] = {}
        self.queues: dict[int, list[_Wait]] = {}

    def conflicts(self, relation: int, transaction: Transaction, mode: Mode) -> bool:
        """Whether a request would have to wait."""
        if any(one is transaction and had.value >= mode.value for one, had in self.held.get(relation, ())):
            return False
        return self._meets_holder(relation, transaction, mode) or any(
            mode.conflicts(wait.mode) for wait in self.queues.get(relation, ()) if wait.transaction is not transaction
        )

    def _meets_holder(self, relation: int, transaction: Transaction, mode: Mode) -> bool:
        return any(one is not transaction and mode.conflicts(had) for one, had in self.held.get(relation, ()))

    async def acquire(self, relation: int, transaction: Transaction, mode: Mode, timeout: float = float("inf")) -> None:
        """Wait for a lock. Raises Failed after `timeout` seconds, and if the transaction has ended meanwhile."""
        if self.conflicts(relation, transaction, mode):
            wait = _Wait(transaction, mode)
            queue = self.queues.setdefault(relation, [])
            queue.append(wait)
            try:
                with trio.move_on_after(timeout):
                    await wait.granted.wait()
            finally:
                if wait in queue:
                    queue.remove(wait)
                    self._serve(relation)
            if not wait.granted.is_set():
                raise Failed(LOCKED, "canceling statement due to lock timeout")
            if transaction.state is not State.OPEN:
                raise Failed(SHUTDOWN, "terminating connection", fatal=True)
            return
        self.take(relation, transaction, mode)

    def take(self, relation: int, transaction: Transaction, mode: Mode) -> None:
        """Note a lock that is free."""
        if (relation, mode) not in transaction.locks:
            transaction.locks.append((relation, mode))
            self.held.setdefault(relation, []).append((transaction, mode))

    def release(self, transaction: Transaction, mode: Mode | None = None) -> None:
        """Release all locks of a transaction, or those of a mode."""
        dropped = [lock for lock in transaction.locks if mode in (None, lock[1])]
        for relation, held in dropped:
            transaction.locks.remove((relation, held))
            self.held[relation].remove((transaction, held))
        for relation in dict.fromkeys(relation for relation, _ in dropped):
            self._serve(relation)

    def _serve(self, relation: int) -> None:
        queue = self.queues.get(relation, [])
        while queue and not self._meets_holder(relation, queue[0].transaction, queue[0].mode):
            wait = queue.pop(0)
            self.take(relation, wait.transaction, wait.mode)
            wait.granted.set()


@dataclass(frozen=True)
class Pace:
    """Seconds, at most: for a step of a statement, for a flush of the WAL, between flushes that nobody asks for."""

    step: float = 0.004
    flush: float = 0.006
    background: float = 0.2


class Cluster:
    """A primary and its standby. One of the two servers `a` and `b` is the primary."""

    def __init__(
        self, chance: random.Random, trace: Callable[..., None] = lambda *_: None, pace: Pace = Pace()
    ) -> None:
        self.chance = chance
        self.trace = trace
        self.pace = pace
        self.primary, self.standby = "a", "b"
        self.up = True
        self.resumed: trio.Event | None = None  # while the server is suspended
        self.run = 1  # changes with each start: connections of an earlier one are lost
        self.timeline = 1
        self.started = self.counts_since = 1.0
        self.tables: dict[str, Table] = {}
        self.locks = Locks()
        self.lsn = 1000
        self.flushed = 1000
        self.replicated = 1000
        self.lags_until = 0.0  # the standby receives nothing before
        self.redo = 1000  # where the last checkpoint began
        self.transactions: dict[Transaction, None] = {}  # that are open or prepared
        self.moved = trio.Event()  # set at each change of a sequence; then another one
        self.commits = 0
        self.lost = 0  # committed transactions that a crash or promotion has undone
        self._wal: deque[tuple[int, Callable[[], None]]] = deque()  # records that may be lost, and how each is undone
        self._written = trio.Event()
        self._numbers = count(1)
        self._oids = count(16384)
        self._names = count(1)
        self._versions = count(1)

    # --- tables ---

    def create(self, name: str) -> Table:
        """A table whose ids come from a sequence of its own."""
        number, table = next(self._oids), next(self._oids)
        unused = Value(1, called=False)
        sequence = Sequence(number, number, unused, {"a": unused, "b": unused})
        made = self.tables[name] = Table(table, name, sequence, table)
        return made

    def next_version(self) -> int:
        """A number that stands for one state of a row of a catalog, and for no other."""
        return next(self._versions)

    def table_of(self, oid: int) -> Table | None:
        """The table, or the one whose sequence it is."""
        return next((one for one in self.tables.values() if oid in (one.oid, one.sequence.oid)), None)

    # --- time ---

    async def step(self, most: float | None = None) -> None:
        """A part of a statement."""
        while self.resumed is not None:
            await self.resumed.wait()
        await trio.sleep(self.chance.uniform(0.0001, most or self.pace.step))
        while self.resumed is not None:
            await self.resumed.wait()

    async def flush(self, upto: int) -> None:
        """Have the WAL on disk up to there."""
        run = self.run
        if self.flushed < upto:
            await self.step(self.pace.flush)
        if self.run == run:
            self._flush(upto)

    def _flush(self, upto: int) -> None:
        self.flushed = max(self.flushed, min(upto, self.lsn))
        self._forget_safe()

    async def write_in_background(self) -> None:
        """What the WAL writer and the standby do, and now and then a checkpoint. Runs until cancelled."""
        while True:
            if self.lsn == self.flushed == self.replicated:
                self._written = trio.Event()
                await self._written.wait()
            await trio.sleep(self.chance.uniform(self.pace.background / 2, self.pace.background * 1.5))
            if not self.up or self.resumed is not None:
                continue
            self._flush(self.lsn)
            if self.chance.random() < 0.8 and trio.current_time() >= self.lags_until:
                self.replicated = self.flushed
                self._forget_safe()

    def _forget_safe(self) -> None:
        safe = min(self.flushed, self.replicated)
        while self._wal and self._wal[0][0] <= safe:
            self._wal.popleft()

    def log(self, undo: Callable[[], None]) -> int:
        """A WAL record. Returns where it ends."""
        self.lsn += self.chance.randrange(60, 200)
        self._wal.append((self.lsn, undo))
        self._written.set()
        return self.lsn

    # --- transactions ---

    def begin(self, application_name: str = "", pid: int | None = None) -> Transaction:
        """A transaction of a session."""
        name = next(self._names)
        transaction = Transaction(f"{name % 90 + 3}/{name}", pid or 1000 + name, application_name, trio.current_time())
        self.transactions[transaction] = None
        return transaction

    def number(self, transaction: Transaction) -> int:
        """Its number, which it gets with its first write."""
        if not transaction.number:
            transaction.number = next(self._numbers)
        return transaction.number

    def insert(self, table: Table, transaction: Transaction, id: int, writer: str, body: str) -> Row:
        """Add a row. The transaction holds the lock of the table."""
        self.number(transaction)
        self.log(_nothing)
        row = Row(id, writer, body, transaction)
        insort(table.rows, row)
        return row

    async def commit(self, transaction: Transaction, *, durable: bool = True) -> None:
        """Commit. `durable`: it is acknowledged when it is on disk (synchronous_commit)."""
        before, locks = transaction.state, list(transaction.locks)
        transaction.state = State.COMMITTING

        def undo() -> None:
            self.lost += transaction.state is State.COMMITTED
            for _, undo_one in reversed(transaction.at_commit):
                undo_one()
            transaction.state = State.PREPARED if before is State.PREPARED else State.ABORTED
            if before is State.PREPARED:
                self.transactions[transaction] = None
                for relation, mode in locks:
                    self.locks.take(relation, transaction, mode)

        lsn = self.log(undo)
        if durable:
            await self.flush(lsn)
            if transaction.state is not State.COMMITTING:  # the server has crashed meanwhile
                raise Failed(SHUTDOWN, "server closed the connection unexpectedly", fatal=True)
        self._show(transaction)
        if self.chance.random() < 0.5:
            await self.step()  # it is visible, and holds its locks
        self.end(transaction)

    def commit_now(self, transaction: Transaction) -> None:
        """Commit, with the WAL on disk, in one step."""
        transaction.state = State.COMMITTING

        def undo() -> None:
            for _, undo_one in reversed(transaction.at_commit):
                undo_one()
            transaction.state = State.ABORTED

        self._flush(self.log(undo))
        self._show(transaction)
        self.end(transaction)

    def _show(self, transaction: Transaction) -> None:
        for do, _ in transaction.at_commit:
            do()
        transaction.state = State.COMMITTED
        self.commits += 1

    def abort(self, transaction: Transaction) -> None:
        """Roll back."""
        if transaction.state is State.PREPARED:
            self.log(_nothing)
        if transaction.state in (State.OPEN, State.PREPARED):
            transaction.state = State.ABORTED
        self.end(transaction)

    def end(self, transaction: Transaction) -> None:
        """Release its locks."""
        if transaction in self.transactions:
            self.locks.release(transaction)
            del self.transactions[transaction]

    async def prepare(self, transaction: Transaction, gid: str) -> None:
        """PREPARE TRANSACTION: from now on it belongs to no session, and survives a crash."""

        def undo() -> None:
            transaction.state = State.ABORTED

        lsn = self.log(undo)
        await self.flush(lsn)
        if transaction.state is not State.OPEN:
            raise Failed(SHUTDOWN, "server closed the connection unexpectedly", fatal=True)
        transaction.state, transaction.pid, transaction.gid = State.PREPARED, None, gid

    # --- sequences ---

    def nextval(self, sequence: Sequence, transaction: Transaction) -> int:
        """The next value. It is not given back when the transaction is rolled back."""
        value = sequence.value
        fresh = value.last if not value.called else value.last + 1
        if not value.called or value.logged < 1 or sequence.record <= self.redo:
            self.number(transaction)
            self._log_sequence(sequence, Value(fresh + LOGGED_AHEAD, called=True))
            sequence.value = Value(fresh, called=True, logged=LOGGED_AHEAD)
        else:
            sequence.value = Value(fresh, called=True, logged=value.logged - 1)
        self._ring()
        return fresh

    def setval(self, sequence: Sequence, last: int, *, called: bool = True) -> None:
        """Set it. No transaction undoes that."""
        sequence.value = Value(last, called)
        self._log_sequence(sequence, sequence.value)
        self._ring()

    def _log_sequence(self, sequence: Sequence, logged: Value) -> None:
        before, record, file = dict(sequence.disk), sequence.record, sequence.file

        def undo() -> None:
            if sequence.file == file:
                sequence.disk, sequence.record = before, record

        sequence.record = self.log(undo)
        sequence.disk = {self.primary: logged, self.standby: logged}

    def last_value(self, sequence: Sequence) -> int | None:
        """What pg_sequence_last_value() answers."""
        return sequence.value.last if sequence.value.called else None

    def _ring(self) -> None:
        self.moved.set()
        self.moved = trio.Event()

    def truncate(self, table: Table, transaction: Transaction) -> None:
        """TRUNCATE ... RESTART IDENTITY. The transaction holds both locks; to others it happens at its commit."""
        self.number(transaction)
        sequence = table.sequence
        before = (table.rows, table.file, table.version, sequence.file, sequence.value, sequence.disk, sequence.version)
        unused = Value(1, called=False)
        files = next(self._oids), next(self._oids)

        def do() -> None:
            table.rows, table.file, table.version = [], files[0], self.next_version()
            sequence.file, sequence.value, sequence.version = files[1], unused, self.next_version()
            sequence.disk = {self.primary: unused, self.standby: unused}
            self._ring()

        def undo() -> None:
            table.rows, table.file, table.version = before[:3]
            sequence.file, sequence.value, sequence.disk, sequence.version = before[3:]

        transaction.at_commit.append((do, undo))

    def rewrite(self, table: Table, transaction: Transaction) -> None:
        """Write all rows of a table anew, as an ALTER TABLE does. The transaction holds its lock."""
        self.number(transaction)
        before, file = (table.file, table.version), next(self._oids)

        def do() -> None:
            table.file, table.version = file, self.next_version()

        def undo() -> None:
            table.file, table.version = before

        transaction.at_commit.append((do, undo))

    # --- faults ---

    def checkpoint(self) -> None:
        """All that was written is in the files now. The next value of each sequence is logged again."""
        self._flush(self.lsn)
        self.redo = self.lsn
        for table in self.tables.values():
            table.sequence.disk = {**table.sequence.disk, self.primary: table.sequence.value}

    def crash(self, *, only_backends: bool = False) -> None:
        """The server ends without a shutdown and recovers. `only_backends`: the postmaster stays."""
        self._lose_above(self.flushed)
        self._recover()
        self._start(anew=not only_backends)

    def restart(self) -> None:
        """A shutdown in order, and a start."""
        for transaction in [one for one in self.transactions if one.state is State.OPEN]:
            self.abort(transaction)
        for transaction in [one for one in self.transactions if one.state is State.COMMITTING]:
            self._show(transaction)
            self.end(transaction)
        self.checkpoint()
        self._recover()
        self._start(anew=True)

    def promote(self, *, planned: bool) -> None:
        """The standby becomes the primary. `planned`: after a shutdown in order, so that nothing is lost."""
        if planned:
            self.restart()
            self.replicated = self.lsn
        else:
            self._lose_above(min(self.replicated, self.flushed))
        self.primary, self.standby = self.standby, self.primary
        self.timeline += 1
        if not planned:  # the other one is made anew from it
            for table in self.tables.values():
                table.sequence.disk = dict.fromkeys("ab", table.sequence.disk[self.primary])
        self._recover()
        self._start(anew=True)

    def _lose_above(self, kept: int) -> None:
        """Undo all records above it, the newest first."""
        while self._wal and self._wal[-1][0] > kept:
            self._wal.pop()[1]()
        self.lsn = self.flushed = kept
        self.replicated = min(self.replicated, kept)

    def _recover(self) -> None:
        for transaction in list(self.transactions):
            if transaction.state is State.COMMITTING:  # its record was on disk
                self._show(transaction)
            if transaction.state is State.OPEN:
                transaction.state = State.ABORTED
            if transaction.state is State.PREPARED:
                transaction.pid, transaction.holder = None, f"-1/{self.number(transaction)}"
            else:
                self.end(transaction)
        for table in self.tables.values():
            sequence = table.sequence
            sequence.value, sequence.record = sequence.disk[self.primary], 0
            table.rows = [row for row in table.rows if row.made.state is not State.ABORTED]
        self.redo = self.lsn

    def vacuum(self) -> None:
        """Drop the rows that no snapshot has, if nothing can bring them back any more."""
        if self._wal or self.transactions:
            return
        for table in self.tables.values():
            table.rows = [row for row in table.rows if row.visible]

    def _start(self, *, anew: bool) -> None:
        self.run += 1
        self.counts_since = trio.current_time() + self.run / 1e6
        if anew:
            self.started = self.counts_since
        self._ring()

    # --- what a session can ask ---

    @property
    def server(self) -> str:
        """Which run of which server it is; the timeline is no part of it."""
        return f"7000/{self.started:.6f}/{self.counts_since:.6f}"

    @property
    def incarnation(self) -> str:
        """`stream_incarnation()`."""
        return f"7000/{self.timeline:08X}/5/{self.started:.6f}/{self.counts_since:.6f}"

    def holders(self, relation: int, least: Mode = Mode.ROW_EXCLUSIVE) -> list[Transaction]:
        """The transactions that hold such a lock, or a stronger one."""
        found = [one for one, mode in self.locks.held.get(relation, ()) if mode.value >= least.value]
        return list(dict.fromkeys(found))


def _nothing() -> None:
    """The undoing of a record that has no effect of its own."""
