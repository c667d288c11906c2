"""A Delta table as the downstream (the package `deltalake`, no JVM): each batch is one commit of the table.

Tasks stage their changes as Parquet files in a folder below the table that Delta ignores. The driver merges them in one
commit that also has the batch's number as an application transaction. So a batch is in the table as a whole or not at
all, and a repeated batch is recognised: the effect is exactly once. Files of older versions stay until VACUUM.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from replicad.errors import DownstreamError, EnvironmentRefused, UsageError
from replicad.spark.checkpoint import local_path
from replicad.spark.columns import remedy, widens
from replicad.spark.enrich import EnrichedRows, conform
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape, Sink, chosen_rows, written

STAGING = "_replicad"  # Delta and its VACUUM ignore folders that begin with _
_GONE = "_replicad_gone"
_ORPHAN_AGE = 86400.0  # seconds after which a staged file must be from a crash, not from a slow task
_STEPS = 20  # low bits of a transaction's version: the step of the batch
_MARK = " mark"  # after the query's id: the transaction whose version is the mark of the last batch
_OURS = "replicad"  # key in the information of a commit: the query that made it
_MOST_COMMITS = 1000  # of others that are looked at for a RESTORE after our last commit


@dataclass(frozen=True, slots=True)
class DeltaSink(Sink):
    """Keeps the Delta table at `uri` (a path, or s3://, gs://, ...) in step. Creates it if it is missing.

    `storage` are deltalake's storage options. Staging uses pyarrow, which takes its settings from the environment.
    """

    uri: str
    storage: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        local = local_path(self.uri)
        uri = re.sub("^s3a:", "s3:", self.uri) if local is None else str(local.absolute())
        object.__setattr__(self, "uri", uri)

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

    def prepare(self, shape: Shape) -> None:
        """Create the table, or refuse one with other columns; remove old staged files that a crash left."""
        self.check_columns(shape.schema.names)
        store, root = _store(self.uri)
        made = _deltalake().DeltaTable.create(
            self.uri, shape.schema, mode="ignore", storage_options=self.storage or None
        )
        self._fit(made, shape)
        for info in store.get_file_info(pafs.FileSelector(f"{root}/{STAGING}", allow_not_found=True, recursive=True)):
            if info.is_file and info.mtime.timestamp() < time.time() - _ORPHAN_AGE:
                store.delete_file(info.path)

    def _fit(self, table: Any, shape: Shape) -> None:
        """Let the table have the columns of the shape, or refuse it. For a wider type all files are written anew."""
        delta = _deltalake()
        there, wanted = table.schema(), delta.Schema.from_arrow(shape.schema)
        types = {one.name: one.type for one in there.fields}
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
            rows = table.to_pyarrow_dataset().scanner().to_reader()
            anew = pa.RecordBatchReader.from_batches(
                shape.schema,
                (piece for batch in rows for piece in conform(pa.table(batch), shape.schema).to_batches()),
            )
            delta.write_deltalake(table, anew, mode="overwrite", schema_mode="overwrite")
        elif missing:
            table.alter.add_columns(missing)

    def identity(self) -> str:
        """The number that Delta gave to the table."""
        return str(_deltalake().DeltaTable(self.uri, storage_options=self.storage or None).metadata().id)

    def last_batch(self, query: str) -> LastBatch:
        """From the log. RESTORE keeps the numbers of transactions, so it is looked for behind our last commit."""
        table = self._table()
        last = table.transaction_version(query)
        if last is None:
            return LastBatch()
        restored = False
        if table.history(1)[0].get(_OURS) != query:
            others = itertools.takewhile(lambda commit: commit.get(_OURS) != query, table.history(_MOST_COMMITS))
            restored = any(commit["operation"] == "RESTORE" for commit in others)
        return LastBatch(last >> _STEPS, last >> _STEPS, restored)

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        """Stage the changes in a new file."""
        with written(f"the Delta table {self.uri}"):
            return self._stage(shape, batch, task, changes)

    def _stage(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        if self._holds(batch):
            return Applied(repeated=True)
        store, root = _store(self.uri)
        folder = f"{root}/{STAGING}/{batch.query}"
        store.create_dir(folder, recursive=True)
        path = f"{folder}/{batch.number:012d}-{batch.step}-{task}-{os.urandom(8).hex()}.parquet"
        schema = _staged(shape)
        written = deleted = 0
        with pq.ParquetWriter(path, schema, filesystem=store) as out:
            for change in changes:
                out.write_table(_with_flag(change.writes, schema, gone=False))
                out.write_table(_with_flag(change.deletes, schema, gone=True))
                written += change.writes.num_rows
                deleted += change.deletes.num_rows
        return Applied(written, deleted, note=json.dumps(path))

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> int | None:
        """Merge the staged files in one commit, unless the batch is already in the table."""
        with written(f"the Delta table {self.uri}"):
            return self._commit(batch, applied)

    def _commit(self, batch: BatchId, applied: Sequence[Applied]) -> int:
        store, _ = _store(self.uri)
        files = [json.loads(done.note) for done in applied if done.note]
        deleted = 0
        if not self._holds(batch):
            delta = _deltalake()
            numbers = {batch.query: batch.number << _STEPS | batch.step, f"{batch.query}{_MARK}": batch.mark}
            properties = delta.CommitProperties(
                app_transactions=[delta.Transaction(*one) for one in numbers.items()],
                custom_metadata={_OURS: batch.query},
            )
            if files:
                deleted = self._merge(self._table(), ds.dataset(files, filesystem=store), properties)
            else:  # the number alone
                table = self._table()
                nothing = pa.schema(table.schema().to_arrow()).empty_table()
                delta.write_deltalake(table, nothing, mode="append", commit_properties=properties)
        for path in files:
            store.delete_file(path)
        return deleted

    def _merge(self, table: Any, staged: ds.Dataset, properties: Any) -> int:
        id_ = next(name for name in staged.schema.names if name not in ("_shard", "_seq", _GONE))
        key = " AND ".join(f't."{name}" = s."{name}"' for name in ("_shard", id_))
        try:
            done = (
                table.merge(
                    staged.scanner().to_reader(), key, source_alias="s", target_alias="t", commit_properties=properties
                )
                .when_matched_delete(f"s.{_GONE}")
                .when_matched_update_all(f"NOT s.{_GONE}", except_cols=[_GONE])
                .when_not_matched_insert_all(f"NOT s.{_GONE}", except_cols=[_GONE])
                .execute()
            )
        except _deltalake().exceptions.DeltaError as error:
            raise DownstreamError(f"the Delta table {self.uri} refused a batch: {error}") from error
        return int(done["num_target_rows_deleted"])

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`."""
        stale = (pc.field("_shard") == shard) & (pc.field("_seq") < before)
        found = self._table().to_pyarrow_dataset().scanner(columns=[shape.id], filter=stale).head(limit)
        return found.column(shape.id).combine_chunks()

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
    ) -> pa.Table:
        """See Sink. Ids are read first, and then the rows of a page alone."""
        table = self._table().to_pyarrow_dataset()
        id_, chosen = pc.field(shape.id), pc.scalar(True)
        if shard is not None:
            chosen = chosen & (pc.field("_shard") == shard)
        if after is not None and pa.types.is_integer(shape.ids):  # bounds of texts in the log have a type of their own
            chosen = chosen & (id_ > after)
        if ids is None:
            known = chosen_rows(table.to_table(columns=[shape.id], filter=chosen), shape.id, after, None)
            ids = known.column(shape.id).combine_chunks()
            if limit is not None:
                ids = ids.take(pc.sort_indices(ids)[:limit])
        names = [name for name in shape.schema.names if name not in ("_shard", "_seq")]
        batches = table.scanner(columns=names, filter=chosen).to_batches()
        kept = [chosen_rows(pa.table(batch), shape.id, None, ids) for batch in batches]
        return pa.concat_tables([shape.schema.empty_table().select(names), *kept]).sort_by(shape.id)

    def _table(self) -> Any:
        return _deltalake().DeltaTable(self.uri, storage_options=self.storage or None)

    def _holds(self, batch: BatchId) -> bool:
        """Whether the batch is in the table. Raises DownstreamError as `BatchId.is_repeated`."""
        table = self._table()
        last: int | None = table.transaction_version(batch.query)
        if last is None:
            return False
        mark = table.transaction_version(f"{batch.query}{_MARK}")
        return batch.is_repeated((last >> _STEPS, last & ((1 << _STEPS) - 1), mark))


def _deltalake() -> Any:
    try:
        import deltalake  # noqa: PLC0415 - an extra
        import deltalake.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise EnvironmentRefused(
            "the package deltalake is not installed; pip install 'replicad[delta]', on the executors too"
        ) from error
    return deltalake


def _store(uri: str) -> tuple[pafs.FileSystem, str]:
    try:
        store, path = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, NotImplementedError) as error:
        raise UsageError(
            f"the Delta table {uri}: {str(error).partition(chr(10))[0]}; give a path, s3://, gs:// or abfs://"
        ) from error
    return store, path


def _staged(shape: Shape) -> pa.Schema:
    """The schema of staged files: the id column first, which is how `commit` finds it."""
    return pa.schema(
        [shape.schema.field(shape.id), *(f for f in shape.schema if f.name != shape.id), (_GONE, pa.bool_())]
    )


def _with_flag(table: pa.Table, schema: pa.Schema, *, gone: bool) -> pa.Table:
    return conform(table.append_column(_GONE, pa.repeat(pa.scalar(gone), table.num_rows)), schema)
