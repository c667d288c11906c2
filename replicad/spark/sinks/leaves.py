"""Writes the changed files of one shard of a Parquet folder, with memory for a few files' rows and no more.

The changes come in the order of their ids. A file is read when the first id of its range comes, and written when its
range is over, or when it has become two files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replicad.spark.sinks.manifest import DATA, Leaf, sync_folder


@dataclass(frozen=True, slots=True)
class Files:
    """Writes files of the table in `folder`, of about `rows_per_file` rows; `number` is in their names."""

    folder: Path
    schema: pa.Schema
    id: str
    rows_per_file: int
    number: int

    def read(self, leaf: Leaf) -> pa.Table:
        """The rows of a file."""
        return pq.read_table(self.folder / DATA / leaf.file, schema=self.schema)

    def write(self, shard: int, rows: pa.Table) -> list[Leaf]:
        """Write rows sorted by id into as few files as their number allows; none for no rows."""
        if not len(rows):
            return []
        pieces = max(1, len(rows) // self.rows_per_file) if len(rows) >= 2 * self.rows_per_file else 1
        cuts = [len(rows) * piece // pieces for piece in range(pieces + 1)]
        folder = self.folder / DATA / f"shard-{shard}"
        folder.mkdir(exist_ok=True)
        made = []
        for start, end in itertools.pairwise(cuts):
            piece = rows.slice(start, end - start)
            name = f"{self.number:012d}-{os.urandom(8).hex()}.parquet"
            with (folder / name).open("xb") as out:
                pq.write_table(piece, out, compression="zstd", compression_level=1)
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
        """Take changes whose ids are above those of all earlier ones."""
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
        if len(self._old) + sum(map(len, self._new)) >= 4 * self.files.rows_per_file:
            self._write_below(pc.max(ids).as_py())

    def _write_below(self, last: int) -> None:
        """Write the rows up to the id `last`, but for so many that the next file does not become a small one."""
        rows = self._sorted()
        done = pc.sum(pc.less_equal(rows.column(self.files.id), last)).as_py() - self.files.rows_per_file
        if done >= self.files.rows_per_file:
            self._made += self.files.write(self.shard, rows.slice(0, done))
            rows = _copy(rows.slice(done))
        self._old, self._new = rows, []

    def _sorted(self) -> pa.Table:
        assert self._old is not None
        return pa.concat_tables([self._old, *self._new]).sort_by(self.files.id)

    def _close(self) -> None:
        if self._old is not None:
            self._made += self.files.write(self.shard, self._sorted())
        elif self.leaves:
            self._made.append(self.leaves[self._at])
        self._old, self._new = None, []
        self._at += 1

    def _below(self, table: pa.Table, low: int) -> pa.Table:
        return table.filter(pc.less(table.column(self.files.id), low))

    def _from(self, table: pa.Table, low: int) -> pa.Table:
        return table.filter(pc.greater_equal(table.column(self.files.id), low))


def _copy(rows: pa.Table) -> pa.Table:
    """The rows in memory of their own: a slice keeps all of the table that it is of."""
    return rows.take(pa.array(range(len(rows)), pa.int64()))
