"""A folder of Parquet files as the downstream: a table with upserts and deletes, in which batches appear as a whole.

Each file of a shard has a range of ids. A task writes new files for those whose ids were touched and keeps the old
ones. When all tasks are done, the driver publishes a manifest with the new files, and lets the link `current` be them
(`manifest`). Files that a crash leaves are in no manifest. The driver and all executors need the same folder: on one
machine, or on a shared file system with links.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replicad.errors import DownstreamError, EnvironmentRefused, UsageError
from replicad.spark.checkpoint import local_path
from replicad.spark.columns import grows, remedy
from replicad.spark.enrich import EnrichedRows, conform
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape, Sink, chosen_rows, ordered, repeating, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = 1
CURRENT, DATA, MANIFESTS, SNAPSHOTS = "current", "_data", "_manifest", "_snapshots"
MOST_VERSIONS = 10_000  # whatever their age; a file system allows 65,000 hard links to a file, and more is of no use
KEPT_QUERIES = 16  # queries whose last batch is stored; every new checkpoint adds one
_NAME = re.compile(r"([0-9]{20})\.json")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One file: the ids of a shard from `low` on, the number of its rows, and their lowest `_seq`."""

    low: Any  # an int, or a str
    file: str
    rows: int
    min_seq: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of the table. `shards` maps a shard to its leaves by `low`, `applied` a query to its last (batch,
    step, mark).
    """

    version: int
    shape: Shape
    shards: Mapping[int, tuple[Leaf, ...]] = field(default_factory=dict)
    applied: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files of this version, relative to the folder's `data`."""
        return [leaf.file for leaves in self.shards.values() for leaf in leaves]

    @property
    def rows(self) -> int:
        """Rows in this version."""
        return sum(leaf.rows for leaves in self.shards.values() for leaf in leaves)

    def holds(self, batch: BatchId) -> bool:
        """Whether the batch is in the table. Raises DownstreamError as `BatchId.is_repeated`."""
        return batch.is_repeated(self.applied.get(batch.query))

    def with_batch(self, batch: BatchId, changed: Mapping[int, Sequence[Leaf]]) -> Manifest:
        """The next version, with the batch and the new leaves of the shards in `changed`."""
        shards = {**self.shards, **{shard: tuple(leaves) for shard, leaves in changed.items()}}
        applied = {query: at for query, at in self.applied.items() if query != batch.query}
        applied[batch.query] = (batch.number, batch.step, batch.mark)
        kept = dict(list(applied.items())[-KEPT_QUERIES:])
        return Manifest(
            self.version + 1, self.shape, {shard: leaves for shard, leaves in shards.items() if leaves}, kept
        )

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "id": self.shape.id,
                "schema": base64.b64encode(self.shape.schema.serialize()).decode(),
                "applied": {query: list(at) for query, at in self.applied.items()},
                "shards": {
                    str(shard): [[leaf.low, leaf.file, leaf.rows, leaf.min_seq] for leaf in leaves]
                    for shard, leaves in sorted(self.shards.items())
                },
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote. Raises ValueError, KeyError or TypeError for other text."""
        found: dict[str, Any] = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
        shards = {int(shard): tuple(Leaf(*leaf) for leaf in leaves) for shard, leaves in found["shards"].items()}
        applied = {query: (at[0], at[1], at[2]) for query, at in found["applied"].items()}
        return cls(found["version"], Shape(schema, found["id"]), shards, applied)


def path_of(folder: Path, version: int) -> Path:
    """The file of a version."""
    return folder / MANIFESTS / f"{version:020d}.json"


def versions(folder: Path) -> list[int]:
    """The existing versions in ascending order."""
    try:
        names = os.listdir(folder / MANIFESTS)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def latest(folder: Path) -> Manifest | None:
    """The current version; None if there is none. Raises DownstreamError if it cannot be read."""
    found = versions(folder)
    return load(folder, found[-1]) if found else None


def load(folder: Path, version: int) -> Manifest:
    """One version. Raises DownstreamError if it cannot be read."""
    path = path_of(folder, version)
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DownstreamError(f"{path} cannot be read as a manifest of a replicad folder: {error}") from error


def publish(folder: Path, manifest: Manifest) -> bool:
    """Make a version the current one. False, without any change, if another process has made that version."""
    path = path_of(folder, manifest.version)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with draft.open("x", encoding="utf-8") as out:
            out.write(manifest.to_json())
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that its names survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def show(folder: Path) -> None:
    """Let `current` be the files of the last version. Safe to repeat, and for several processes at once."""
    shown = None
    while (found := latest(folder)) is not None and found.version != shown:
        name = f"{found.version:020d}"
        if not (folder / SNAPSHOTS / name).exists():
            _link_files(folder, found, folder / SNAPSHOTS / name)
        link = folder / f".{CURRENT}.{os.getpid()}.{os.urandom(4).hex()}"
        link.symlink_to(Path(SNAPSHOTS) / name)
        os.replace(link, folder / CURRENT)
        shown = found.version  # another process may have published and shown a later one in between


def _link_files(folder: Path, found: Manifest, tree: Path) -> None:
    draft = tree.with_name(f".{tree.name}.{os.getpid()}.{os.urandom(4).hex()}")
    draft.mkdir(parents=True)
    try:
        for file in found.files:
            os.link(folder / DATA / file, draft / file.replace("/", "-"))
        if not found.files:  # a table without rows is no error for who reads it
            pq.write_table(found.shape.schema.empty_table(), draft / "empty.parquet")
        with contextlib.suppress(FileExistsError):  # another process was first
            draft.rename(tree)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def drop_old_versions(folder: Path, older_than: float) -> None:
    """Delete the versions that were replaced before `older_than` (seconds since the epoch), and files of theirs alone.

    The last version stays. At most `MOST_VERSIONS` are kept.
    """
    known = versions(folder)
    for number, version in enumerate(known[:-1]):
        with contextlib.suppress(DownstreamError, FileNotFoundError):  # another process has deleted the version
            replaced = path_of(folder, known[number + 1]).stat().st_mtime
            if replaced >= older_than and len(known) - number <= MOST_VERSIONS:
                return
            next_files = set(load(folder, version + 1).files)
            for file in load(folder, version).files:
                if file not in next_files:
                    (folder / DATA / file).unlink(missing_ok=True)
        shutil.rmtree(folder / SNAPSHOTS / f"{version:020d}", ignore_errors=True)
        path_of(folder, version).unlink(missing_ok=True)


def orphans(folder: Path, older_than: float) -> Iterator[Path]:
    """What a crash has left, last changed before `older_than`: files in no version, and folders of links half made."""
    used = {file for version in versions(folder) for file in load(folder, version).files}
    for path in (folder / DATA).glob("*/*.parquet"):
        if f"{path.parent.name}/{path.name}" not in used and path.stat().st_mtime < older_than:
            yield path
    for path in [*(folder / SNAPSHOTS).glob(".*"), *folder.glob(f".{CURRENT}.*")]:
        if path.lstat().st_mtime < older_than:
            yield path


@dataclass(frozen=True, slots=True)
class Files:
    """Writes files of the table in `folder`, of about `rows_per_file` rows, or `FILE_BYTES` in memory if their rows are
    long; `number` is in their names.
    """

    folder: Path
    schema: pa.Schema
    id: str
    rows_per_file: int
    number: int

    def rows_of_file(self, rows: int, size: int) -> int:
        """How many rows a file should have, of rows that have this size in bytes."""
        return min(self.rows_per_file, max(1, FILE_BYTES * rows // max(1, size)))

    def read(self, leaf: Leaf) -> pa.Table:
        """The rows of a file."""
        return pq.read_table(self.folder / DATA / leaf.file, schema=self.schema)

    def write(self, shard: int, rows: pa.Table) -> list[Leaf]:
        """Write rows sorted by id into as few files as their number allows; none for no rows."""
        if not len(rows):
            return []
        wanted = self.rows_of_file(len(rows), rows.nbytes)
        pieces = len(rows) // wanted if len(rows) >= 2 * wanted else 1
        cuts = [len(rows) * piece // pieces for piece in range(pieces + 1)]
        folder = self.folder / DATA / f"shard-{shard}"
        folder.mkdir(exist_ok=True)
        made = []
        for start, end in itertools.pairwise(cuts):
            piece = rows.slice(start, end - start)
            name = f"{self.number:012d}-{os.urandom(8).hex()}.parquet"
            with (folder / name).open("xb") as out:
                pq.write_table(piece, out, compression="zstd", compression_level=1, use_dictionary=repeating(piece))
                out.flush()
                os.fsync(out.fileno())
            lowest = pc.min(piece.column("_seq")).as_py()
            made.append(Leaf(piece.column(self.id)[0].as_py(), f"shard-{shard}/{name}", len(piece), lowest))
        sync_folder(folder)
        return made


@dataclass(slots=True)
class ShardWriter:
    """Changes the files of one shard: `add` with ascending ids, then `finish`. `deleted` counts rows."""

    files: Files
    shard: int
    leaves: Sequence[Leaf]
    deleted: int = 0
    _at: int = 0  # the leaf whose range the next ids belong to
    _old: pa.Table | None = None  # rows of that leaf that are neither changed nor written; None: not read
    _new: list[pa.Table] = field(default_factory=list)
    _made: list[Leaf] = field(default_factory=list)

    def add(self, writes: pa.Table, deletes: pa.Table) -> None:
        """Add changes whose ids are above all earlier ids."""
        while self._at + 1 < len(self.leaves):
            low = self.leaves[self._at + 1].low
            self._take(*(self._below(table, low) for table in (writes, deletes)))
            writes, deletes = (self._from(table, low) for table in (writes, deletes))
            if not len(writes) and not len(deletes):
                return
            self._close()
        self._take(writes, deletes)

    def finish(self) -> list[Leaf]:
        """The files of the shard now."""
        while self._at < max(1, len(self.leaves)):
            self._close()
        return self._made

    def _take(self, writes: pa.Table, deletes: pa.Table) -> None:
        if not len(writes) and not len(deletes):
            return
        id_ = self.files.id
        if self._old is None:
            self._old = self.files.read(self.leaves[self._at]) if self.leaves else self.files.schema.empty_table()
        ids = pa.concat_arrays([*writes.column(id_).chunks, *deletes.column(id_).chunks])
        there = self._old.column(id_)
        self.deleted += pc.sum(pc.is_in(there, value_set=deletes.column(id_).combine_chunks())).as_py() or 0
        self._old = self._old.filter(pc.invert(pc.is_in(there, value_set=ids)))
        self._new.append(writes)
        held = [self._old, *self._new]
        rows = sum(map(len, held))
        wanted = self.files.rows_of_file(rows, sum(table.nbytes for table in held))
        if rows >= 4 * wanted:
            self._write_below(pc.max(ids).as_py(), wanted)

    def _write_below(self, last: int, wanted: int) -> None:
        """Write the rows up to the id `last`, but for `wanted` rows: the next file must not become a small one."""
        rows = self._sorted()
        done = pc.sum(pc.less_equal(rows.column(self.files.id), last)).as_py() - wanted
        if done >= wanted:
            self._made += self.files.write(self.shard, rows.slice(0, done))
            rows = _copy(rows.slice(done))
        self._old, self._new = rows, []

    def _sorted(self) -> pa.Table:
        assert self._old is not None
        return ordered(pa.concat_tables([self._old, *self._new]), self.files.id)

    def _close(self) -> None:
        if self._old is not None:
            self._made += self.files.write(self.shard, self._sorted())
        elif self.leaves:
            self._made.append(self.leaves[self._at])
        self._old, self._new = None, []
        self._at += 1

    def _below(self, table: pa.Table, low: Any) -> pa.Table:
        return table.filter(pc.less(table.column(self.files.id), low))

    def _from(self, table: pa.Table, low: Any) -> pa.Table:
        return table.filter(pc.greater_equal(table.column(self.files.id), low))


def _copy(rows: pa.Table) -> pa.Table:
    """The rows in memory of their own: a slice keeps all of the table that it is of."""
    return rows.take(pa.array(range(len(rows)), pa.int64()))


FILE_BYTES = 32 << 20  # of rows in memory: four files are held at once, and a piece of changes beside them
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
            for name in (DATA, MANIFESTS, SNAPSHOTS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentRefused(f"downstream folder {self.folder} cannot be made: {error.strerror}") from error
        shown = self.folder / CURRENT
        if shown.exists() and not shown.is_symlink():
            raise UsageError(f"{shown} is not a link of a pipeline; use another folder")
        found = latest(self.folder)
        if found is None:
            if any((self.folder / DATA).iterdir()):
                raise UsageError(f"{self.folder / DATA} is not empty and has no manifest; use another folder")
            publish(self.folder, Manifest(0, shape))
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
        for path in orphans(self.folder, time.time() - _ORPHAN_AGE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        show(self.folder)  # a crash may have come between the two

    @property
    def _identity(self) -> Path:
        return self.folder / "_identity"  # readers of Parquet leave out names that begin with _

    def identity(self) -> str:
        """Of the folder: the number that it got when it was made."""
        return self._identity.read_text(encoding="ascii").strip()

    def last_batch(self, query: str) -> LastBatch:
        """From the last manifest. A folder that was put back has an older one."""
        number = self._latest().applied.get(query, (-1,))[0]
        return LastBatch(number, number)

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:  # noqa: ARG002
        """Write new files for the changed ids. `commit` makes them part of the table."""
        with written(f"downstream folder {self.folder}"):
            return self._apply(shape, batch, changes)

    def _apply(self, shape: Shape, batch: BatchId, changes: Iterable[EnrichedRows]) -> Applied:
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
            show(self.folder)
            drop_old_versions(self.folder, time.time() - self.keep)

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
        if not publish(self.folder, base.with_batch(batch, changed)):
            raise self._taken()

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`."""
        found: list[pa.Array] = []
        for leaf in self._latest().shards.get(shard, ()):
            if leaf.min_seq < before and sum(map(len, found)) < limit:
                table = pq.read_table(self.folder / DATA / leaf.file, columns=[shape.id, "_seq"])
                found.append(table.filter(pc.less(table.column("_seq"), before)).column(shape.id).combine_chunks())
        return pa.concat_arrays([pa.array([], shape.ids), *found])[:limit]

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
    ) -> pa.Table:
        """See Sink."""
        found = self._latest()
        names = [name for name in found.shape.schema.names if name not in ("_shard", "_seq")]
        kept = [found.shape.schema.empty_table().select(names)]
        for leaves in found.shards.values() if shard is None else [found.shards.get(shard, ())]:
            of_shard = 0
            for at, leaf in enumerate(leaves):
                if after is not None and at + 1 < len(leaves) and leaves[at + 1].low <= after:
                    continue
                if limit is not None and of_shard >= limit:
                    break
                table = pq.read_table(self.folder / DATA / leaf.file, schema=found.shape.schema).select(names)
                kept.append(chosen_rows(table, found.shape.id, after, ids))
                of_shard += kept[-1].num_rows
        return pa.concat_tables(kept).sort_by(shape.id).slice(0, limit)

    def stored_counts(self) -> dict[int | None, int]:
        """See Sink."""
        found = latest(self.folder)
        return {} if found is None else {shard: sum(leaf.rows for leaf in of) for shard, of in found.shards.items()}

    def _latest(self) -> Manifest:
        found = latest(self.folder)
        if found is None:
            raise DownstreamError(f"{self.folder} has no manifest; was it removed while the pipeline was running?")
        return found

    def _taken(self) -> DownstreamError:
        return DownstreamError(
            f"another pipeline writes to {self.folder} at the same time; stop one of them, and start the other again"
        )

    def _write_anew(self, found: Manifest, shape: Shape) -> None:
        """Write all files anew: readers of Parquet assume that all files have the columns of the first."""
        files = Files(self.folder, shape.schema, shape.id, self.rows_per_file, found.version)
        shards = {}
        for shard, leaves in found.shards.items():
            made: list[Leaf] = []
            for leaf in leaves:
                rows = pq.read_table(self.folder / DATA / leaf.file, schema=found.shape.schema)
                made.extend(files.write(shard, conform(rows, shape.schema)))
            shards[shard] = tuple(made)
        if not publish(self.folder, Manifest(found.version + 1, shape, shards, found.applied)):
            raise self._taken()


def _by_shard(changes: Iterable[EnrichedRows], id_: str) -> Iterator[tuple[int, pa.Table, pa.Table]]:
    """The writes and deletes of one shard each, sorted by id. What comes of a shard has ascending ids."""
    for change in changes:
        shards = pa.concat_arrays([*change.writes.column("_shard").chunks, *change.deletes.column("_shard").chunks])
        found = sorted(pc.unique(shards).to_pylist())
        for shard in found:
            writes, deletes = (
                table if len(found) == 1 else table.filter(pc.equal(table.column("_shard"), shard))
                for table in (change.writes, change.deletes)
            )
            yield shard, ordered(writes, id_), deletes


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
    return [Path(folder) / DATA / file for file in found.files]


def table(folder: Path | str) -> pa.Table:
    """The table as it is now, in memory."""
    found = _current(folder)
    pieces = [pq.read_table(Path(folder) / DATA / file, schema=found.shape.schema) for file in found.files]
    return pa.concat_tables([found.shape.schema.empty_table(), *pieces])


def read(spark: SparkSession, folder: Path | str) -> DataFrame:
    """The table as it is now, as a DataFrame."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - only this needs Spark

    found = _current(folder)
    schema = from_arrow_schema(found.shape.schema)
    paths = [str(path) for path in current(folder)]
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)


def _current(folder: Path | str) -> Manifest:
    found = latest(Path(folder))
    if found is None:
        raise UsageError(f"{folder} has no table of a replicad pipeline")
    return found
