"""A folder of Parquet files as the downstream: a table with upserts and deletes, in which batches appear as a whole.

Each file of a shard has a range of ids. A task writes new files for those whose ids were touched and keeps the old
ones. When all tasks are done, the driver publishes a manifest with the new files, and lets the link `current` be them
(`manifest`). Files that a crash leaves are in no manifest. The driver and all executors need the same folder: on one
machine, or on a shared file system with links.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replicad.errors import DownstreamError, EnvironmentRefused, UsageError
from replicad.spark.enrich import Changes, conform
from replicad.spark.places import local_path
from replicad.spark.sinks import manifest
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink, written
from replicad.spark.sinks.leaves import Files, ShardWriter
from replicad.spark.sinks.manifest import Leaf, Manifest
from replicad.spark.widening import grows, remedy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_FILE = 50_000  # a changed row rewrites one file, which takes some tens of milliseconds at this size
KEEP = 600.0  # seconds; a replaced file of 50,000 rows takes about 1 MB meanwhile
_ORPHAN_AGE = 3600.0  # seconds after which a file without manifest must be from a crash, not from a slow task


@dataclass(frozen=True, slots=True)
class ParquetSink(Sink):
    """Keeps the Parquet table in `folder` in step. Creates it if it is missing. Read it as `folder/current`.

    Files that were replaced are kept for `keep` seconds, for readers that have begun.
    """

    folder: Path
    rows_per_file: int = ROWS_PER_FILE
    keep: float = KEEP

    def __post_init__(self) -> None:
        local = local_path(str(self.folder))
        if local is None:
            raise UsageError(
                f"downstream folder {self.folder}: give a path of a file system that the driver and all executors "
                "share; for an object store use the downstream `delta`"
            )
        object.__setattr__(self, "folder", local.absolute())
        if not 0 <= self.keep <= 30 * 86400:
            raise UsageError(f"keep={self.keep}: give seconds from 0 to 30 days")
        if self.rows_per_file < 1:
            raise UsageError(f"rows_per_file={self.rows_per_file}: give a number from 1")

    def prepare(self, shape: Shape) -> None:
        """Create the folder, refuse one with another table, and remove old files that a crash left."""
        try:
            for name in (manifest.DATA, manifest.MANIFESTS, manifest.SNAPSHOTS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentRefused(f"downstream folder {self.folder} cannot be made: {error.strerror}") from error
        shown = self.folder / manifest.CURRENT
        if shown.exists() and not shown.is_symlink():
            raise UsageError(f"{shown} is not a link of a pipeline; use another folder")
        found = manifest.latest(self.folder)
        if found is None:
            if any((self.folder / manifest.DATA).iterdir()):
                raise UsageError(f"{self.folder / manifest.DATA} is not empty and has no manifest; use another folder")
            manifest.publish(self.folder, Manifest(0, shape))
        elif found.shape.id == shape.id and grows(
            found.shape.schema, shape.schema, added=shape.added, widened=shape.widened
        ):
            self._write_anew(found, shape)
        elif found.shape != shape:
            old = found.shape.schema
            kept = [remedy(old.field(one.name).type, one.type) for one in shape.schema if one.name in old.names]
            raise UsageError(
                f"downstream folder {self.folder} has a table with other columns ({_named(found.shape)}, now it "
                f"would be {_named(shape)}); {max(kept, default='')}use another folder, with a new checkpoint and a "
                "backfill"
            )
        if not self._identity.exists():
            self._identity.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        for path in manifest.orphans(self.folder, time.time() - _ORPHAN_AGE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        manifest.show(self.folder)  # a crash may have come between the two

    @property
    def _identity(self) -> Path:
        return self.folder / "_identity"  # readers of Parquet leave out names that begin with _

    def identity(self) -> str:
        """Of the folder: the number that it got when it was made."""
        return self._identity.read_text(encoding="ascii").strip()

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[Changes]) -> Applied:  # noqa: ARG002
        """Write new files for the changed ids. `commit` makes them part of the table."""
        with written(f"downstream folder {self.folder}"):
            return self._apply(shape, batch, changes)

    def _apply(self, shape: Shape, batch: BatchId, changes: Iterable[Changes]) -> Applied:
        base = self._latest()
        if base.holds(batch):
            return Applied(repeated=True)
        files = Files(self.folder, base.shape.schema, base.shape.id, self.rows_per_file, batch.number)
        done: dict[int, list[Leaf]] = {}
        written = deleted = 0
        writer: ShardWriter | None = None
        for shard, writes, deletes in _by_shard(changes, shape.id):
            if writer is None or writer.shard != shard:
                deleted += _finish(writer, done)
                assert shard not in done, "the changes of a shard come one after the other"
                writer = ShardWriter(files, shard, base.shards.get(shard, ()))
            writer.add(writes, deletes)
            written += len(writes)
        deleted += _finish(writer, done)
        note = {str(shard): [[x.low, x.file, x.rows, x.min_seq] for x in leaves] for shard, leaves in done.items()}
        return Applied(written, deleted, note=json.dumps({"base": base.version, "shards": note}))

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> None:
        """Publish the next version of the table, unless the batch is already in it."""
        with written(f"downstream folder {self.folder}"):
            self._commit(batch, applied)
            manifest.show(self.folder)
            manifest.drop_old_versions(self.folder, time.time() - self.keep)

    def _commit(self, batch: BatchId, applied: Sequence[Applied]) -> None:
        base = self._latest()
        if base.holds(batch):
            return
        notes = [json.loads(done.note) for done in applied if done.note]
        if any(note["base"] != base.version for note in notes):
            raise self._taken()
        changed = {
            int(shard): [Leaf(*leaf) for leaf in leaves] for note in notes for shard, leaves in note["shards"].items()
        }
        if not manifest.publish(self.folder, base.with_batch(batch, changed)):
            raise self._taken()

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`."""
        found: list[pa.Array] = []
        for leaf in self._latest().shards.get(shard, ()):
            if leaf.min_seq < before and sum(map(len, found)) < limit:
                table = pq.read_table(self.folder / manifest.DATA / leaf.file, columns=[shape.id, "_seq"])
                found.append(table.filter(pc.less(table.column("_seq"), before)).column(shape.id).combine_chunks())
        return pa.concat_arrays([pa.array([], pa.int64()), *found])[:limit]

    def _latest(self) -> Manifest:
        found = manifest.latest(self.folder)
        if found is None:
            raise DownstreamError(f"{self.folder} has no manifest; was it removed while the pipeline was running?")
        return found

    def _taken(self) -> DownstreamError:
        return DownstreamError(
            f"another pipeline writes to {self.folder} at the same time; stop one of them, and start the other again"
        )

    def _write_anew(self, found: Manifest, shape: Shape) -> None:
        """Write all files anew: readers of Parquet take the columns of one file for those of all."""
        files = Files(self.folder, shape.schema, shape.id, self.rows_per_file, found.version)
        shards = {}
        for shard, leaves in found.shards.items():
            made: list[Leaf] = []
            for leaf in leaves:
                rows = pq.read_table(self.folder / manifest.DATA / leaf.file, schema=found.shape.schema)
                made.extend(files.write(shard, conform(rows, shape.schema)))
            shards[shard] = tuple(made)
        if not manifest.publish(self.folder, Manifest(found.version + 1, shape, shards, found.applied)):
            raise self._taken()


def _by_shard(changes: Iterable[Changes], id_: str) -> Iterator[tuple[int, pa.Table, pa.Table]]:
    """The writes and deletes of one shard each, sorted by id. What comes of a shard has ascending ids."""
    for change in changes:
        shards = pa.concat_arrays([*change.writes.column("_shard").chunks, *change.deletes.column("_shard").chunks])
        for shard in sorted(pc.unique(shards).to_pylist()):
            writes, deletes = (
                table.filter(pc.equal(table.column("_shard"), shard)) for table in (change.writes, change.deletes)
            )
            yield shard, writes.sort_by(id_), deletes


def _finish(writer: ShardWriter | None, done: dict[int, list[Leaf]]) -> int:
    """Note the files of a shard. Returns how many of its rows were deleted."""
    if writer is None:
        return 0
    done[writer.shard] = writer.finish()
    return writer.deleted


def _named(shape: Shape) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in shape.schema)


def current(folder: Path | str) -> list[Path]:
    """The files of the table now, for any tool that reads Parquet. They exist for at least `ParquetSink.keep` seconds.

    Raises:
        UsageError: the folder has no table of a pipeline.
    """
    found = _current(folder)
    return [Path(folder) / manifest.DATA / file for file in found.files]


def table(folder: Path | str) -> pa.Table:
    """The table as it is now, in memory."""
    found = _current(folder)
    pieces = [pq.read_table(Path(folder) / manifest.DATA / file, schema=found.shape.schema) for file in found.files]
    return pa.concat_tables([found.shape.schema.empty_table(), *pieces])


def read(spark: SparkSession, folder: Path | str) -> DataFrame:
    """The table as it is now, as a DataFrame."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - only this needs Spark

    found = _current(folder)
    schema = from_arrow_schema(found.shape.schema)
    paths = [str(path) for path in current(folder)]
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)


def _current(folder: Path | str) -> Manifest:
    found = manifest.latest(Path(folder))
    if found is None:
        raise UsageError(f"{folder} has no table of a replicad pipeline")
    return found
