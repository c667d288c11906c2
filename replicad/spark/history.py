"""The history of a table, out of its stream of changes: `replicad pipeline history` (docs/changes.md).

Each version of a row is a row of a downstream of kind `postgres` or `delta`: the values, `valid_from`, and `valid_to`,
which is NULL for the present version. A version is identified by `_from`, the token of the change that began it; `_to`
is the token of the change that ended it. So the history up to a token can be had again after a fork of the stream.

Each write is a batch of a sink. `_token`, which is in the rows of a batch, is the place where the stream goes on after
it: rows and token are committed together, and a process that was killed goes on from the last batch. Of two processes
with one downstream, the sink refuses the batches of one. In memory is the key of each present version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, TypeVar

import pyarrow as pa

from replicad.client.blocking_client import BlockingClient
from replicad.client.events import GenerationBegan, Reset, RowBatch, StreamStopped, TakenUpto
from replicad.errors import DownstreamError, UsageError
from replicad.eventlog import get_logger
from replicad.masking import mask_secrets
from replicad.protocol.tokens import Vector
from replicad.spark.changes import as_json, parse_change, typed_value
from replicad.spark.columns import ColumnForms, ColumnType
from replicad.spark.database import patiently
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks.base import BatchId, Shape
from replicad.spark.sinks.delta import CHANGES, DeltaSink
from replicad.spark.sinks.delta_upkeep import UpkeepThread
from replicad.spark.sinks.postgres import CREATED, PostgresSink, ask

T = TypeVar("T")

log = get_logger("replicad.history")

MOST_PRESENT = 5_000_000  # present versions, whose keys are in memory: some 200 bytes each
_PAGE = 10_000  # versions that are read or written at once
_PIECE = 2_000  # changes of a batch, at most: their old versions are in memory too
MOST_BYTES = 16 << 20  # of the lines of a batch, and of the old versions: values of Python take several times that

_TIME = pa.timestamp("us", tz="UTC")
FROM, TO, TOKEN, KEY, DIGEST = "_from", "_to", "_token", "_key", "_digest"
VALID_FROM, VALID_TO = "valid_from", "valid_to"
_OURS = (
    (FROM, pa.int64()), (TO, pa.int64()), (VALID_FROM, _TIME), (VALID_TO, _TIME),
    (KEY, pa.string()), (DIGEST, pa.int64()), (TOKEN, pa.string()),
)  # fmt: skip
_OTHERS = (("_shard", pa.int32()), ("_seq", pa.int64()))  # what every table of a pipeline has
_NAMES = frozenset(name for name, _ in (*_OURS, *_OTHERS))

Version = dict[str, Any]  # a row of the history: the value of each column but those of _OTHERS


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A change: a line of the stream, and its token."""

    op: str
    key: str
    row: dict[str, Any] | None
    at: datetime
    token: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The changes of a batch that is too large for memory: versions by their numbers, each `changed`; and numbers of
    versions that are deleted. A sink may go through it several times.
    """

    history: TableHistory
    changed: Sequence[int]
    change: Callable[[Version], None]
    gone: Sequence[int] = ()

    def __iter__(self) -> Iterator[EnrichedRows]:
        for _, versions in self.history.looked_up(self.changed, lambda number: number):
            for version in versions.values():
                self.change(version)
            yield self.history.as_rows(list(versions.values()))
        for place in range(0, len(self.gone), _PAGE):
            yield self.history.as_rows([], self.gone[place : place + _PAGE])


class TableHistory:
    """The history of one stream of changes in one downstream.

    `begin` reads how far the downstream has got; then `take` and `take_back` write, in the order of the stream.
    """

    def __init__(self, sink: PostgresSink | DeltaSink, stream: str) -> None:
        self.sink = sink
        self.shape = _shape({}, {})
        self.done = -1  # token of the last change that the downstream has
        self.token: str | None = None  # where the stream goes on; None: nothing was written yet
        self.written = 0  # batches
        self._stream = stream
        self._query = f"history {stream}"
        self._number: int | None = None  # of the next batch; None: the table is not known yet
        self._latest = datetime.min.replace(tzinfo=UTC)  # no version begins or ends before one that was written earlier
        self._present: dict[str, int] = {}  # number of the present version of each key
        self._columns: frozenset[str] | None = None  # of the changes; None: not described yet
        self._at_once = _PAGE  # versions that are looked up at once

    # --- reading ---

    def begin(self) -> None:
        """Read the columns, the token and the present versions of the downstream, if it has a table.

        Raises:
            UsageError: its table is no history.
        """
        kinds, types = self._there()
        self._present, self.done, self.token, self._number = {}, -1, None, None
        self._latest = datetime.min.replace(tzinfo=UTC)
        if not kinds:
            return
        lacking = [name for name, _ in _OURS if name not in kinds]
        if lacking:
            raise UsageError(f"{self._where} is no history: it has no column {lacking[0]}; give another table")
        own = {name: kind for name, kind in kinds.items() if name not in _NAMES}
        self.shape = _shape(own, {name: type for name, type in types.items() if name in own})
        self._prepare()
        for page in self._pages((KEY, TO, TOKEN, VALID_FROM, VALID_TO)):
            for version in page:
                number, ended = version[FROM], version[TO]
                if ended is None:
                    self._present[version[KEY]] = number
                if max(number, ended or 0) > self.done:
                    self.done, self.token = max(number, ended or 0), version[TOKEN]
                self._latest = max(self._latest, version[VALID_TO] or version[VALID_FROM])
        self._check_size()

    def _prepare(self) -> None:
        self.sink.prepare(self.shape)
        if self._number is None:
            self._number = self.sink.last_batch(self._query).newest + 1

    @property
    def _where(self) -> str:
        return f"table {self.sink.table}" if isinstance(self.sink, PostgresSink) else f"the Delta table {self.sink.uri}"

    def _there(self) -> tuple[dict[str, pa.DataType], dict[str, str]]:
        """The columns of the downstream's table, and their types in Postgres; nothing if there is no table."""
        if isinstance(self.sink, DeltaSink):
            return self.sink.columns(), {}
        sink, forms = self.sink, ColumnForms(exact=True)

        def work(driver: Any) -> dict[str, str]:
            with driver.cursor() as cursor:
                if ask(cursor, "SELECT pg_catalog.to_regclass($1) IS NULL", sink.table)[0][0]:
                    return {}
                return sink.columns(cursor)

        types = patiently(sink.url, work)
        return {name: forms.column(name, type).kind for name, type in types.items()}, types

    def _pages(self, names: Iterable[str]) -> Iterator[list[Version]]:
        """All versions, in the order of their numbers, with some of their columns."""
        chosen = [(name, kind) for name, kind in _OURS if name == FROM or name in names]
        shape = Shape(pa.schema([*chosen, *_OTHERS]), FROM, key=(FROM,))
        after: int | None = None
        while True:
            rows = self.sink.rows(shape, None, after=after, limit=_PAGE)
            assert rows is not None
            page = rows.to_pylist()
            yield page
            if len(page) < _PAGE:
                return
            after = page[-1][FROM]

    def looked_up(
        self, things: Sequence[T], number_of: Callable[[T], int | None]
    ) -> Iterator[tuple[Sequence[T], dict[int, Version]]]:
        """Go through `things`, in pieces, with the versions that they name: at most `_PAGE`, and about `MOST_BYTES`; a
        longer version is a piece of its own.
        """
        at = 0
        while at < len(things):
            piece = things[at : at + self._at_once]
            numbers = {number for thing in piece if (number := number_of(thing)) is not None}
            rows = self._versions(sorted(numbers))
            if rows is None:
                self._at_once = max(1, len(piece) // 4)
                continue
            yield piece, {version[FROM]: version for version in rows.to_pylist()}
            at += len(piece)
            if rows.nbytes < MOST_BYTES // 4:
                self._at_once = min(_PAGE, 2 * self._at_once)

    def _versions(self, numbers: Sequence[int]) -> pa.Table | None:
        """Versions by their numbers. None: they are several, and have more than `MOST_BYTES`."""
        if not numbers:
            return self.shape.schema.empty_table()
        rows = self.sink.rows(self.shape, None, ids=pa.array(numbers, pa.int64()), most_bytes=MOST_BYTES)
        if rows is not None and len(rows) < len(numbers):
            missing = min(set(numbers).difference(rows.column(FROM).to_pylist()))
            raise DownstreamError(f"{self._where} has no version {missing} any more: another program writes to it")
        return rows

    # --- writing ---

    def take(self, lines: Iterable[tuple[int, str]], epoch: str | None) -> None:
        """Write changes: lines of the stream with their tokens. Changes that the downstream has are left out.

        Raises:
            UsageError: the stream has no changes, or columns that the downstream cannot have.
            DownstreamError: the downstream cannot hold a value, or another process writes the same history.
        """
        held: list[_Recorded] = []
        size = 0  # of their lines
        for token, line in lines:
            found = parse_change(line, self._stream)
            if found["op"] == "s":
                self._write(held, epoch)
                held, size = [], 0
                self._describe(found["row"]["columns"])
                continue
            if token <= self.done:
                continue
            at = datetime.fromisoformat(found["at"]).astimezone(UTC)
            change = _Recorded(found["op"], as_json(found.get("key")), found.get("row"), at, token)
            if change.op == "t":
                self._write(held, epoch)
                held, size = [], 0
                self._end_all(change, epoch)
                continue
            held.append(change)
            size += len(line)
            if len(held) == _PIECE or size > MOST_BYTES:
                self._write(held, epoch)
                held, size = [], 0
        self._write(held, epoch)

    def _describe(self, columns: list[dict[str, str]]) -> None:
        """The changes that follow have these columns. Columns that the table does not have any more stay, as NULL."""
        forms = ColumnForms(exact=self.sink.casts)
        kinds = {field.name: field.type for field in self.shape.schema if field.name not in _NAMES}
        types = dict(self.shape.types)
        added, widened = set(), set()
        for name, type in ((column["name"], column["type"]) for column in columns):
            if name in _NAMES:
                raise UsageError(
                    f'column "{name}": the history has such a column of its own; record the others, with '
                    "replicad streams add --columns"
                )
            parsed = ColumnType.parse(type)
            kind = pa.string() if parsed.is_list or parsed.name == "money" else forms.column(name, type).kind
            made = type if parsed.name in CREATED and not parsed.is_list else "text" if kind == pa.string() else None
            if name not in kinds:
                added.add(name)
            elif kinds[name] != kind or types.get(name) != made:
                widened.add(name)
            kinds[name] = kind
            types.pop(name, None)
            if made is not None:
                types[name] = made
        self._columns = frozenset(column["name"] for column in columns)
        if added or widened:
            self.sink.check_columns(list(kinds))
            self.shape = replace(_shape(kinds, types), added=frozenset(added), widened=frozenset(widened))
            self._prepare()

    def _write(self, changes: list[_Recorded], epoch: str | None) -> None:
        """One batch, or several if the old versions are long."""
        for piece, there in self.looked_up(changes, lambda change: self._present.get(change.key)):
            self._write_piece(piece, there, epoch)

    def _write_piece(self, changes: Sequence[_Recorded], there: dict[int, Version], epoch: str | None) -> None:
        """One batch. `there` has the present versions of its keys."""
        known = {change.key: self._present[change.key] for change in changes if change.key in self._present}
        present = {key: there[number] for key, number in known.items()}
        written: dict[int, Version] = {}
        for change in changes:
            before = present.get(change.key)
            values = None if change.row is None else self._values(change, before)
            if values is None and change.row is not None:
                continue  # it lacks columns that were never seen: the snapshot that is due has them
            digest = None if values is None else _digest(values)
            if (before is None and values is None) or (before is not None and before[DIGEST] == digest):
                continue
            at = self._latest = max(self._latest, change.at)
            if before is not None:
                _end(before, change.token, at)
                written[before[FROM]] = before
                del present[change.key]
            if values is not None:
                version = present[change.key] = written[change.token] = {
                    FROM: change.token, TO: None, VALID_FROM: at, VALID_TO: None, KEY: change.key, DIGEST: digest,
                    **values,
                }  # fmt: skip
                assert version[FROM] > self.done
        last = changes[-1].token
        self.token = _token(last, epoch)
        if written:
            self._commit(last, [self.as_rows(list(written.values()))])
        for change in changes:
            if change.key in present:
                self._present[change.key] = present[change.key][FROM]
            else:
                self._present.pop(change.key, None)
        self.done = last
        self._check_size()

    def _values(self, change: _Recorded, before: Version | None) -> Version | None:
        """The columns of the table after a change. None: it leaves columns out, and they are not known."""
        row = change.row or {}
        values: Version = {}
        for field in self.shape.schema:
            name = field.name
            if name in _NAMES:
                continue
            if name in row:
                try:
                    is_json = self.shape.types.get(name) in ("json", "jsonb")
                    values[name] = typed_value(row[name], field.type, is_json=is_json)
                except (ValueError, ArithmeticError, TypeError) as error:
                    raise DownstreamError(
                        f"stream {self._stream}, change {change.token}: column {name} is {row[name]!r}, which "
                        f"{self._where} cannot hold as {field.type}; keep this history in Postgres, or leave the "
                        "column out (replicad streams add --columns)"
                    ) from error
            elif change.op == "u" and name in (self._columns or ()):
                if before is None:
                    return None
                values[name] = before[name]
            else:
                values[name] = None
        return values

    def _end_all(self, change: _Recorded, epoch: str | None) -> None:
        """The table was emptied: end all present versions."""
        at = self._latest = max(self._latest, change.at)
        self.token = _token(change.token, epoch)
        if self._present:
            ended = sorted(self._present.values())
            self._commit(change.token, _Pieces(self, ended, lambda version: _end(version, change.token, at)))
        self._present.clear()
        self.done = change.token

    def take_back(self, token: int, epoch: str | None) -> None:
        """The stream forked: remove the versions that began after `token`; those that ended after it are present."""
        gone: list[int] = []
        again: list[int] = []
        for page in self._pages((TO,)):
            gone += [version[FROM] for version in page if version[FROM] > token]
            again += [version[FROM] for version in page if version[FROM] <= token < (version[TO] or -1)]
        log.warning("history_forked", stream=self._stream, token=token, removed=len(gone), present_again=len(again))
        if gone or again:
            self.token = _token(token, epoch)
            self._commit(token, _Pieces(self, again, _reopen, gone))
        self.begin()

    def as_rows(self, versions: Sequence[Version], gone: Sequence[int] = ()) -> EnrichedRows:
        """What a sink writes."""
        writes = [
            {**version, TOKEN: self.token, "_shard": 0, "_seq": max(version[FROM], version[TO] or 0)}
            for version in versions
        ]
        deletes = [{"_shard": 0, FROM: number, "_seq": number} for number in gone]
        return EnrichedRows(
            pa.Table.from_pylist(writes, self.shape.schema), pa.Table.from_pylist(deletes, self.shape.keys)
        )

    def _commit(self, mark: int, pieces: Iterable[EnrichedRows]) -> None:
        assert self._number is not None
        batch = BatchId(self._query, self._number, mark=mark)
        self.sink.commit(batch, [self.sink.apply(self.shape, batch, 0, pieces)])
        self._number += 1
        self.written += 1

    def _check_size(self) -> None:
        if len(self._present) > MOST_PRESENT:
            raise UsageError(
                f"the history of {self._stream} has more than {MOST_PRESENT:,} present rows, whose keys are kept in "
                "memory; record a part of the table (replicad streams add --where)"
            )


def sink_of_history(target: str, table: str) -> PostgresSink | DeltaSink:
    """The downstream of a history: `postgresql://...` with a table, or `delta:URI`."""
    if target.startswith(("postgresql://", "postgres://")):
        return PostgresSink(target, table)
    if target.startswith("delta:"):
        return DeltaSink(target.removeprefix("delta:"), mode=CHANGES)
    raise UsageError(f"--to {mask_secrets(target)}: give postgresql://... or delta:URI")


def follow_history(
    client: BlockingClient, history: TableHistory, stream: str, *, once: bool = False, accept_gap: bool = False
) -> None:
    """Write the history of a stream from where the downstream is. `once`: until it has all that there is now.

    `accept_gap`: go on if changes that the downstream does not have were removed from the stream.

    Raises:
        UsageError: the stream is not that of the history, or changes were removed; see also TableHistory.take.
    """
    history.begin()
    upkeep = UpkeepThread(lambda: [(history.sink, history.shape)] if history.written else [])
    upkeep.start()
    epoch: str | None = None
    goal: int | None = None
    try:
        with client.follow(
            {stream: history.token or "EARLIEST"}, linear=True, taken=0.5, after_reset="EARLIEST",
            also=(GenerationBegan, StreamStopped, TakenUpto),
        ) as events:  # fmt: skip
            while found := events.together():
                epoch = epoch or events.epoch(stream)
                lines: list[tuple[int, str]] = []
                for event in found:
                    if isinstance(event, RowBatch):
                        lines += [(event.token, row) for row in event.rows]
                        continue
                    if isinstance(event, TakenUpto):
                        goal = event.token if goal is None else goal
                        continue
                    history.take(lines, epoch)
                    lines = []
                    if isinstance(event, Reset):
                        _reset(history, event, epoch, accept_gap=accept_gap)
                    elif isinstance(event, GenerationBegan):
                        epoch = event.epoch
                    elif isinstance(event, StreamStopped):
                        log.warning("stream_stopped", stream=stream, error=str(event.error))
                history.take(lines, epoch)
                if once and goal is not None and events.positions(stream).get("*", -1) >= goal:
                    return
    finally:
        upkeep.stop()


def _reset(history: TableHistory, event: Reset, epoch: str | None, *, accept_gap: bool) -> None:
    if event.token is not None:
        history.take_back(event.token, epoch)
    elif history.done >= 0 and event.reason != "token_expired":
        raise UsageError(
            f"stream {event.stream} is not the one of this history ({event.reason}): it was removed and added again, "
            "or it is of another database; give another table"
        )
    elif history.done >= 0 and not accept_gap:
        raise UsageError(
            f"changes of stream {event.stream} after token {history.token} were removed before this history had them; "
            "--accept-gap continues with the first one that is left. Then run: replicad streams snapshot "
            f"{event.stream}"
        )


def _shape(kinds: dict[str, pa.DataType], types: dict[str, str]) -> Shape:
    return Shape(pa.schema([*_OURS, *kinds.items(), *_OTHERS]), FROM, types=types, key=(FROM,))


def _token(position: int, epoch: str | None) -> str:
    return str(Vector(position, epoch=epoch))


def _end(version: Version, token: int, at: datetime) -> None:
    version[TO], version[VALID_TO] = token, at


def _reopen(version: Version) -> None:
    version[TO] = version[VALID_TO] = None


def _digest(values: Version) -> int:
    """A number by which equal rows are found. A column that is NULL counts as one that is not there."""
    text = repr(sorted((name, value) for name, value in values.items() if value is not None))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
