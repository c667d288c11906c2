"""A Delta table as the downstream (the package `deltalake`, no JVM): each batch is one commit of the table.

With `mode = "rows"` the table has the rows. Each file has a range of keys (delta_files.py), and a batch writes those
files anew that have its ids. With `mode = "changes"` a batch is appended as it is, into a layer of changes, which
readers lay over the base (lake.py); delta_upkeep.py folds it into the base when it has become large. That writes far
less, and freshness does not depend on the size of the table.

The commit also has the batch's number as an application transaction. So a batch is in the table as a whole or not at
all, and a repeated batch is recognised: the effect is exactly once. Tasks of Spark stage what they found as Parquet
files in a folder below the table that Delta ignores.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from replicad.errors import DownstreamError, DownstreamUnavailable, UsageError
from replicad.spark.checkpoint import local_path
from replicad.spark.columns import remedy, widens
from replicad.spark.enrich import EnrichedRows, conform
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape, Sink, chosen_rows, written
from replicad.spark.sinks.delta_files import (
    FILE_BYTES,
    GONE,
    DataFile,
    FiledChanges,
    HeldChanges,
    Replaced,
    TableFiles,
    deltalake,
    files_of,
    newest_of,
    partition_of,
    sorted_rows,
    without,
)

ROWS, CHANGES = "rows", "changes"
MODES = {
    ROWS: "the table has the rows; a batch writes the files anew that have its ids",
    CHANGES: "batches are appended, and readers lay them over the rows: a view or replicad.spark.Lake",
}
BASE_LAYER, CHANGES_LAYER = "base", "changes"  # values of the column _layer, the partition of a table of changes
LAYER, CHANGE = "_layer", "_change"
ROWS_PER_FILE = 50_000  # a changed row writes one file anew
BASE_ROWS_PER_FILE = 500_000  # with changes, whose base is written seldom
KEEP = 600.0  # seconds that replaced files stay, for readers that have begun
STAGING = "_replicad"  # Delta and its VACUUM ignore folders that begin with _
_ORPHAN_AGE = 86400.0  # seconds after which a staged file must be from a crash, not from a slow task
_STEPS = 20  # low bits of a transaction's version: the step of the batch
_MARK = " mark"  # after the query's id: the transaction whose version is the mark of the last batch
_NUMBER = "replicad changes"  # the transaction whose version is the number of the last change
_OURS = "replicad"  # key in the information of a commit: the query that made it
_MOST_COMMITS = 1000  # of others that are looked at for a RESTORE after our last commit
_HELD = 8 << 20  # bytes of changes that are passed to the commit in memory
_TRIES = 5  # of a commit that another one was quicker than
_DIRECT = 5_000  # rows of a batch from which on it may go into the base at once, as in a backfill
_LOG = {  # how long the log knows old versions; readers of them need their files too
    "delta.checkpointInterval": "100",
    "delta.logRetentionDuration": "interval 1 hours",
}
_RETENTION = "delta.deletedFileRetentionDuration"
DESCRIPTION = "kept by replicad; its key is _shard and "  # of the table; lake.py finds the key by it
_FOREIGN = {"deletionVectors", "columnMapping"}  # features by which the rows of a file are not those of the table


@dataclass(frozen=True, slots=True)
class DeltaSink(Sink):
    """Keeps the Delta table at `uri` (a path, or s3://, gs://, ...) in step. Creates it if it is missing.

    `storage` are deltalake's storage options. Files are written by pyarrow, which takes its settings from the
    environment. Files that were replaced stay for `keep` seconds.
    """

    uri: str
    storage: dict[str, str] = field(default_factory=dict, repr=False)
    mode: str = ROWS
    rows_per_file: int | None = None
    keep: float = KEEP
    now: Callable[[], float] = field(default=time.time, repr=False, compare=False)

    def __post_init__(self) -> None:
        local = local_path(self.uri)
        uri = re.sub("^s3a:", "s3:", self.uri) if local is None else str(local.absolute())
        object.__setattr__(self, "uri", uri)
        if self.mode not in MODES:
            raise UsageError(f"downstream mode: {self.mode!r} is not valid; give one of {', '.join(MODES)}")
        if self.rows_per_file is None:
            object.__setattr__(self, "rows_per_file", ROWS_PER_FILE if self.mode == ROWS else BASE_ROWS_PER_FILE)
        if self.rows_per_file < 1:  # type: ignore[operator]
            raise UsageError(f"rows_per_file={self.rows_per_file}: give a number from 1")
        if not 0 <= self.keep <= 30 * 86400:
            raise UsageError(f"keep={self.keep}: give seconds from 0 to 30 days")

    def check_columns(self, names: Sequence[str]) -> None:
        """The names of columns in Delta are the same if they differ in case only."""
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(name.lower(), name)
            if other != name:
                raise UsageError(
                    f'columns "{other}" and "{name}" differ in case only, and Delta cannot have both; list the '
                    "`columns` that you need, or rename one in a view"
                )
        ours = {LAYER, CHANGE, GONE}.intersection(seen) if self.mode == CHANGES else set()
        if ours:
            raise UsageError(f'column "{min(ours)}": with mode = "{CHANGES}" the table has such a column of its own')

    def prepare(self, shape: Shape) -> None:
        """Create the table, or refuse one with other columns; remove old staged files that a crash left."""
        self.check_columns(shape.schema.names)
        store, root = self.place()
        made = deltalake().DeltaTable.create(
            self.uri,
            self._schema(shape),
            mode="ignore",
            partition_by=[LAYER] if self.mode == CHANGES else None,
            description=f"{DESCRIPTION}{shape.id}",
            configuration={**_LOG, _RETENTION: f"interval {max(1, round(self.keep))} seconds"},
            storage_options=self.storage or None,
        )
        self._fit(made, shape)
        _opened.pop(self.uri, None)
        for info in store.get_file_info(pafs.FileSelector(f"{root}/{STAGING}", allow_not_found=True, recursive=True)):
            if info.is_file and info.mtime.timestamp() < self.now() - _ORPHAN_AGE:
                store.delete_file(info.path)

    def _schema(self, shape: Shape) -> pa.Schema:
        ours = [(CHANGE, pa.int64()), (GONE, pa.bool_()), (LAYER, pa.string())] if self.mode == CHANGES else []
        return pa.schema([*shape.schema, *ours])

    def _fit(self, table: Any, shape: Shape) -> None:
        """Let the table have the columns of the shape, or refuse it. For a wider type all files are written anew."""
        delta = deltalake()
        features = set(table.protocol().reader_features or ()) & _FOREIGN
        if features:
            raise UsageError(f"the Delta table {self.uri} has the feature {min(features)}, which is not supported")
        there, wanted = table.schema(), delta.Schema.from_arrow(self._schema(shape))
        types = {one.name: one.type for one in there.fields}
        if (LAYER in types) != (self.mode == CHANGES):
            raise UsageError(
                f"the Delta table {self.uri} was made with another `mode`; use another table, with a new checkpoint "
                "and a backfill"
            )
        other = [one for one in wanted.fields if types.get(one.name, one.type) != one.type]
        missing = [one for one in wanted.fields if one.name not in types]
        names = types.keys() ^ {one.name for one in wanted.fields}
        if names != {one.name for one in missing} or not {one.name for one in missing} <= shape.added:
            raise UsageError(
                f"the Delta table {self.uri} has other columns ({', '.join(sorted(names))} are only on one "
                "side); use another table, with a new checkpoint and a backfill"
            )
        before = pa.schema(there.to_arrow())
        for one in other:
            old, new = before.field(one.name).type, shape.schema.field(one.name).type
            if one.name not in shape.widened or not widens(old, new):
                raise UsageError(
                    f"column {one.name} of the Delta table {self.uri} is {old}, and would be {new}; "
                    f"{remedy(old, new)}use another table, with a new checkpoint and a backfill"
                )
        if other:
            schema = self._schema(shape)
            rows = table.to_pyarrow_dataset().scanner().to_reader()
            anew = pa.RecordBatchReader.from_batches(
                schema,
                (piece for batch in rows for piece in conform(pa.table(batch), schema).to_batches()),
            )
            delta.write_deltalake(table, anew, mode="overwrite", schema_mode="overwrite")
        elif missing:
            table.alter.add_columns(missing)

    def columns(self) -> dict[str, pa.DataType]:
        """The columns of the table without those of its mode; nothing if there is no table."""
        if not deltalake().DeltaTable.is_deltatable(self.uri, storage_options=self.storage or None):
            return {}
        fields = pa.schema(self._anew().schema().to_arrow())
        return {one.name: plain_type(one.type) for one in fields if one.name not in (LAYER, CHANGE, GONE)}

    def identity(self) -> str:
        """The number that Delta gave to the table."""
        return str(self._anew().metadata().id)

    def last_batch(self, query: str) -> LastBatch:
        """From the log. RESTORE keeps the numbers of transactions, so it is looked for behind our last commit."""
        table = self._anew()
        last = table.transaction_version(query)
        if last is None:
            return LastBatch()
        restored = False
        if table.history(1)[0].get(_OURS) != query:
            others = itertools.takewhile(lambda commit: commit.get(_OURS) != query, table.history(_MOST_COMMITS))
            restored = any(commit["operation"] == "RESTORE" for commit in others)
        return LastBatch(last >> _STEPS, last >> _STEPS, restored)

    # --- batches ---

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        """Keep the changes in memory, in a staged file, or in a file of the table that `commit` makes part of it."""
        with written(f"the Delta table {self.uri}"), self._locked():
            table = self.current()
            if self._holds(table, batch):
                return Applied(repeated=True)
            number = (table.transaction_version(_NUMBER) or 0) + 1
        with written(f"the Delta table {self.uri}"):
            if self.mode == CHANGES:
                return self._append(shape, number, changes)
            return self._stage(shape, batch, task, changes)

    def _stage(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        done = deleted = size = 0
        held: list[pa.Table] = []
        pieces = iter(changes)
        schema = pa.schema([*shape.schema, (GONE, pa.bool_())])
        alone = not _in_task()
        for change in pieces if alone else ():
            held += [_with_gone(change.writes, schema, gone=False), _with_gone(change.deletes, schema, gone=True)]
            done += change.writes.num_rows
            deleted += change.deletes.num_rows
            size += change.writes.nbytes
            if size > _HELD:
                break
        else:
            if alone:
                token = f"{self.uri} {batch.query} {task}"  # in place of a batch that was never committed
                _held[token] = pa.concat_tables([schema.empty_table(), *held])
                return Applied(done, deleted, note=json.dumps({"held": token, "id": shape.id}))
        store, root = self.place()
        folder = f"{root}/{STAGING}/{batch.query}"
        store.create_dir(folder, recursive=True)
        path = f"{folder}/{batch.number:012d}-{batch.step}-{task}-{os.urandom(8).hex()}.parquet"
        with pq.ParquetWriter(path, schema, filesystem=store) as out:
            for table in held:
                out.write_table(table)
            held.clear()
            for change in pieces:
                out.write_table(_with_gone(change.writes, schema, gone=False))
                out.write_table(_with_gone(change.deletes, schema, gone=True))
                done += change.writes.num_rows
                deleted += change.deletes.num_rows
        return Applied(done, deleted, note=json.dumps({"path": path, "id": shape.id}))

    def _append(self, shape: Shape, number: int, changes: Iterable[EnrichedRows]) -> Applied:
        """Write the changes into files of the table, each of bounded size."""
        schema = pa.schema([*shape.schema, (CHANGE, pa.int64()), (GONE, pa.bool_())])
        files = self.files(schema.remove(len(schema) - 1).remove(len(schema) - 2), shape.id, CHANGES_LAYER)
        done, deleted, size = 0, 0, 0
        made: list[dict[str, Any]] = []
        held: list[pa.Table] = []

        def flush() -> None:
            nonlocal size
            rows = sorted_rows(pa.concat_tables(held), shape.id) if held else schema.empty_table()
            held.clear()
            size = 0
            if len(rows):
                action = files.write_one(rows, change=True, small=len(rows) < _DIRECT)
                gone = pc.sum(rows.column(GONE)).as_py() or 0
                made.append({"path": action.path, "size": action.size, "stats": action.stats, "gone": gone})

        for change in changes:
            for rows, gone in ((change.writes, False), (change.deletes, True)):
                one = _with_gone(rows, schema.remove(schema.get_field_index(CHANGE)), gone=gone)
                one = one.add_column(len(one.column_names) - 1, CHANGE, pa.repeat(pa.scalar(number), len(one)))
                held.append(one.cast(schema))
                size += one.nbytes
            done += change.writes.num_rows
            deleted += change.deletes.num_rows
            if size > FILE_BYTES:
                flush()
        flush()
        return Applied(done, deleted, note=json.dumps({"number": number, "files": made, "id": shape.id}))

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> int | None:
        """Commit what `apply` left, unless the batch is already in the table."""
        notes = [json.loads(done.note) for done in applied if done.note]
        try:
            with written(f"the Delta table {self.uri}"), self._locked():
                deleted = self._commit(batch, notes)
        finally:
            for note in notes:
                _held.pop(note.get("held", ""), None)
        if self.mode == CHANGES:
            return sum(done.deleted for done in applied)
        store, _ = self.place()
        for note in notes:
            if "path" in note:
                store.delete_file(note["path"])
        return deleted

    def _commit(self, batch: BatchId, notes: list[dict[str, Any]]) -> int:
        numbers = {batch.query: batch.number << _STEPS | batch.step, f"{batch.query}{_MARK}": batch.mark}
        for number in range(_TRIES):
            table = self.current()
            if self._holds(table, batch):
                return 0
            if self.mode == CHANGES:
                done, transactions = Replaced(), dict(numbers)
                files = [file for note in notes for file in note["files"]]
                if files:
                    last = table.transaction_version(_NUMBER) or 0
                    if {note["number"] for note in notes} != {last + 1}:
                        raise DownstreamError(
                            f"batch {batch.number} comes, and the Delta table {self.uri} has changes that this query "
                            "did not read: another pipeline writes to it. It was not written"
                        )
                    transactions[_NUMBER] = last + 1
                    done.added = self._layered(table, notes)
            else:
                done, transactions = self._merged(table, notes), numbers
            if self.put(table, done, transactions, query=batch.query, last=number == _TRIES - 1):
                return done.deleted
        raise AssertionError

    def _merged(self, table: Any, notes: list[dict[str, Any]]) -> Replaced:
        done = Replaced()
        if not notes:
            return done
        id_ = notes[0]["id"]
        schema = pa.schema(table.schema().to_arrow())
        schema = pa.schema([one.with_type(plain_type(one.type)) for one in schema])
        staged = [note["path"] for note in notes if "path" in note]
        held = [_held[note["held"]] for note in notes if "held" in note]
        store, _ = self.place()
        if staged:
            source: FiledChanges | HeldChanges = FiledChanges(ds.dataset(staged, filesystem=store), id_)
        else:
            source = HeldChanges(pa.concat_tables(held), id_)
        for one in self.files(schema, id_).merging(files_of(table, id_), source):
            done.added += one.added
            done.removed += one.removed
            done.deleted += one.deleted
        return done

    def _layered(self, table: Any, notes: list[dict[str, Any]]) -> list[Any]:
        """The files of a batch of changes. A file whose keys are all new goes into the base."""
        id_ = notes[0]["id"]
        there = None
        added = []
        for file in (file for note in notes for file in note["files"]):
            stats = json.loads(file["stats"])
            layer = CHANGES_LAYER
            if stats["numRecords"] >= _DIRECT and not file["gone"] and id_ in stats["minValues"]:
                if there is None:
                    there = files_of(table, id_)
                low, high = ((stats[end]["_shard"], stats[end][id_]) for end in ("minValues", "maxValues"))
                if low[0] == high[0] and self._are_new(there, id_, low, high):
                    layer = BASE_LAYER
                    there.append(DataFile(file["path"], file["size"], stats["numRecords"], layer, low, high, 0, 0, 0.0))
            added.append(
                deltalake().transaction.AddAction(
                    file["path"], file["size"], partition_of(layer), int(self.now() * 1000), True, file["stats"]
                )
            )
        return added

    def _are_new(self, there: list[DataFile], id_: str, low: tuple[Any, ...], high: tuple[Any, ...]) -> bool:
        """Whether a range of keys has no file of the base, and no key of a change."""
        near = [one for one in there if one.low <= high and low <= one.high]
        if any(one.layer == BASE_LAYER for one in near):
            return False
        if not near:
            return True
        keys = pa.schema([("_shard", pa.int32()), (id_, pa.string() if isinstance(low[1], str) else pa.int64())])
        rows = self.files(keys, id_).dataset(near, keys)
        inside = (pc.field("_shard") == low[0]) & (pc.field(id_) >= low[1]) & (pc.field(id_) <= high[1])
        return int(rows.count_rows(filter=inside)) == 0

    def put(
        self, table: Any, done: Replaced, transactions: Mapping[str, int], *, query: str = "", last: bool = True
    ) -> bool:
        """Commit, and note what is to be removed later. False: another commit was quicker, and this is not the `last`
        try.
        """
        delta = deltalake()
        properties = delta.CommitProperties(
            app_transactions=[delta.Transaction(*one) for one in transactions.items()],
            custom_metadata={_OURS: query} if query else None,
            max_commit_retries=0,
        )
        change = bool(query)
        try:
            table.create_write_transaction(
                [*done.added, *(one.remove(self.now(), change=change) for one in done.removed)],
                "append",
                table.schema(),
                [LAYER] if self.mode == CHANGES else None,
                commit_properties=properties,
            )
        except delta.exceptions.DeltaError as error:
            _opened.pop(self.uri, None)
            for one in done.added if self.mode == ROWS else ():
                self.drop(one.path)
            if last:
                raise DownstreamUnavailable(f"the Delta table {self.uri} did not take a commit: {error}") from error
            return False
        table.update_incremental()
        _opened[self.uri] = _Opened(table, self._mark_of(table))
        garbage_of(self.uri).extend((self.now(), one) for one in done.removed)
        return True

    # --- reading ---

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`."""
        stale = (pc.field("_shard") == shard) & (pc.field("_seq") < before)
        with self._locked():
            found = files_of(self.current(), shape.id)
        if self.mode == ROWS:
            rows = self.files(shape.schema, shape.id).dataset(found).scanner(columns=[shape.id], filter=stale)
            return rows.head(limit).column(shape.id).combine_chunks()
        ids: list[pa.Array] = [pa.array([], shape.ids)]
        for rows in self._now(found, shape, [shape.id], pc.field("_shard") == shard, stale):
            ids.append(rows.column(shape.id).combine_chunks())
            if sum(map(len, ids)) >= limit:
                break
        return pa.concat_arrays(ids)[:limit]

    def _now(
        self, found: list[DataFile], shape: Shape, names: list[str], chosen: pc.Expression, wanted: pc.Expression
    ) -> Iterator[pa.Table]:
        """The present rows that are `chosen`, a condition on keys, and `wanted`, of a table of changes."""
        base = [one for one in found if one.layer == BASE_LAYER]
        changed = [one for one in found if one.layer == CHANGES_LAYER]
        schema = pa.schema([*shape.schema, (CHANGE, pa.int64()), (GONE, pa.bool_())])
        files = self.files(shape.schema, shape.id)
        newest = schema.empty_table()
        if changed:
            columns = list(dict.fromkeys([*names, "_seq", "_shard", shape.id, CHANGE, GONE]))
            newest = newest_of(files.dataset(changed, schema).to_table(columns=columns, filter=chosen), shape.id)
            yield newest.filter(wanted & ~pc.field(GONE)).select(names)
        columns = list(dict.fromkeys([*names, "_shard", shape.id]))
        for batch in files.dataset(base).scanner(columns=columns, filter=chosen & wanted).to_batches() if base else ():
            yield without(pa.table(batch), newest, shape.id).select(names)

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
        most_bytes: int | None = None,
    ) -> pa.Table | None:
        """See Sink. Ids are read first, and then the rows of a page alone. None: several rows that have more than
        `most_bytes`.
        """
        with self._locked():
            found = files_of(self.current(), shape.id)
        id_, chosen = pc.field(shape.id), pc.scalar(True)
        if shard is not None:
            chosen = chosen & (pc.field("_shard") == shard)
        if after is not None:
            chosen = chosen & (id_ > pa.scalar(after, shape.ids))

        def read(names: list[str], chosen: pc.Expression) -> Iterator[pa.Table]:
            if self.mode == CHANGES:
                return self._now(found, shape, names, chosen, pc.scalar(True))
            rows = self.files(shape.schema, shape.id).dataset(found).scanner(columns=names, filter=chosen)
            return map(pa.table, rows.to_batches())

        if ids is None:
            known = pa.concat_tables([shape.schema.empty_table().select([shape.id]), *read([shape.id], chosen)])
            ids = known.column(shape.id).combine_chunks()
            if limit is not None:
                ids = ids.take(pc.sort_indices(ids)[:limit])
        names = [name for name in shape.schema.names if name not in ("_shard", "_seq")]
        kept, size = [shape.schema.empty_table().select(names)], 0
        if len(ids):
            ends = pc.min_max(ids)  # files without such ids are not read
            chosen = chosen & (id_ >= ends["min"]) & (id_ <= ends["max"])
        for rows in read(names, chosen):
            kept.append(chosen_rows(rows, shape.id, None, ids))
            size += kept[-1].nbytes
            if most_bytes is not None and size > most_bytes and len(ids) > 1:
                return None
        return pa.concat_tables(kept).sort_by(shape.id)

    def stored_counts(self) -> dict[int | None, int]:
        """See Sink."""
        if not self.columns():
            return {}
        shape, chosen = self.stored_shape(), pc.scalar(True)
        found = files_of(self._anew(), shape.id)
        if self.mode == CHANGES:
            parts = self._now(found, shape, ["_shard"], chosen, chosen)
        else:
            files = self.files(shape.schema, shape.id).dataset(found)
            parts = map(pa.table, files.scanner(columns=["_shard"]).to_batches()) if found else iter(())
        counts: dict[int | None, int] = {}
        for part in parts:
            for one in pc.value_counts(part.column("_shard")).to_pylist():
                counts[one["values"]] = counts.get(one["values"], 0) + one["counts"]
        return counts

    # --- for delta_upkeep.py too ---

    def stored_shape(self) -> Shape:
        """The shape of the rows that the table has. Raises UsageError: it was not made by a pipeline."""
        table = self._anew()
        id_ = (table.metadata().description or "").removeprefix(DESCRIPTION)
        fields = [one.with_type(plain_type(one.type)) for one in pa.schema(table.schema().to_arrow())]
        if id_ not in {one.name for one in fields}:
            raise UsageError(
                f"the Delta table {self.uri} was not made by a pipeline: its description does not name a key"
            )
        return Shape(pa.schema([one for one in fields if one.name not in (LAYER, CHANGE, GONE)]), id_)

    def place(self) -> tuple[pafs.FileSystem, str]:
        """The file system, and the folder of the table in it."""
        return _store(self.uri)

    def files(self, schema: pa.Schema, id_: str, layer: str | None = None) -> TableFiles:
        """What reads and writes files of the table."""
        store, root = self.place()
        assert self.rows_per_file is not None
        return TableFiles(store, root, schema, id_, self.rows_per_file, layer, self.now)

    def drop(self, path: str) -> None:
        """Remove a file of the table that no version has any more."""
        store, root = self.place()
        with suppress(FileNotFoundError):
            store.delete_file(f"{root}/{path}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One commit of this process at a time."""
        with lock_of(self.uri):
            yield

    def current(self) -> Any:
        """The table as it is now; its lock is held. It is not read anew if its last commit is still there."""
        opened = _opened.get(self.uri)
        if opened is not None and self._mark_of(opened.table) == opened.mark:
            opened.table.update_incremental()
            table = opened.table
        else:
            table = self._anew()
        _opened[self.uri] = _Opened(table, self._mark_of(table))
        return table

    def _anew(self) -> Any:
        delta = deltalake()
        try:
            return delta.DeltaTable(self.uri, storage_options=self.storage or None)
        except delta.exceptions.TableNotFoundError as error:
            raise DownstreamError(
                f"there is no Delta table {self.uri}; the pipeline makes it when it starts"
            ) from error

    def _mark_of(self, table: Any) -> tuple[Any, ...]:
        """What distinguishes the last commit of the table from one of the same number in another table."""
        store, root = self.place()
        info = store.get_file_info(f"{root}/_delta_log/{table.version():020d}.json")
        return table.version(), info.size, info.mtime_ns

    def _holds(self, table: Any, batch: BatchId) -> bool:
        """Whether the batch is in the table. Raises DownstreamError as `BatchId.is_repeated`."""
        last: int | None = table.transaction_version(batch.query)
        if last is None:
            return False
        mark = table.transaction_version(f"{batch.query}{_MARK}")
        return batch.is_repeated((last >> _STEPS, last & ((1 << _STEPS) - 1), mark))


@dataclass(frozen=True, slots=True)
class _Opened:
    table: Any
    mark: tuple[Any, ...]


_opened: dict[str, _Opened] = {}
_held: dict[str, pa.Table] = {}  # changes between `apply` and `commit` of this process
_locks: dict[str, threading.RLock] = {}
_garbage: dict[str, list[tuple[float, DataFile]]] = {}


def lock_of(uri: str) -> threading.RLock:
    """The lock of a table in this process."""
    return _locks.setdefault(uri, threading.RLock())


def garbage_of(uri: str) -> list[tuple[float, DataFile]]:
    """Files that this process has taken out of the table and not removed yet, and since when."""
    return _garbage.setdefault(uri, [])


def _in_task() -> bool:
    """Whether this is a task of Spark, whose commit is in another process."""
    pyspark = sys.modules.get("pyspark")
    return pyspark is not None and pyspark.TaskContext.get() is not None


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Of texts and bytes of which Delta's schema has the large form, or views."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) else kind


def _store(uri: str) -> tuple[pafs.FileSystem, str]:
    try:
        store, path = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, NotImplementedError) as error:
        raise UsageError(
            f"the Delta table {uri}: {str(error).partition(chr(10))[0]}; give a path, s3://, gs:// or abfs://"
        ) from error
    return store, path


def _with_gone(table: pa.Table, schema: pa.Schema, *, gone: bool) -> pa.Table:
    return conform(table.append_column(GONE, pa.repeat(pa.scalar(gone), table.num_rows)), schema)
