"""The data files of a Delta table: which there are, and how changes replace some of them in one commit.

Each file that we write has rows of one shard, in the order of their ids, and the log has its lowest and highest key. So
changes touch only the files whose range has their ids. Files that others wrote (OPTIMIZE of Spark, a merge) may have
ranges that overlap; they are read together, and what is written in their place is in order again.

Nothing here commits by itself: `Replaced` has the actions for one commit of `DeltaTable.create_write_transaction`.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from replicad.errors import EnvironmentRefused
from replicad.spark.enrich import conform
from replicad.spark.sinks.base import ordered, repeating

GONE = "_replicad_gone"  # column of changes: the row was deleted
FILE_BYTES = 64 << 20  # of rows in memory: of a file that we write, and of changes that are merged at once
_FIRST: tuple[Any, ...] = (-(1 << 40),)  # below every key
_LAST: tuple[Any, ...] = (1 << 40,)
_LONGEST_TEXT = 64  # characters of a bound in the log; a longer one is cut
_PLAIN_BOUNDS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_date32)


def deltalake() -> Any:
    """The package. Raises EnvironmentRefused if it is not installed."""
    try:
        import deltalake as found  # noqa: PLC0415 - an extra
        import deltalake.exceptions  # noqa: PLC0415
        import deltalake.transaction  # noqa: PLC0415
    except ImportError as error:
        raise EnvironmentRefused(
            "the package deltalake is not installed; pip install 'replicad[delta]', on the executors too"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of the table. `low`, `high`: its range of keys (shard, id); a key of fewer parts is a bound of shards.

    `oldest`, `newest`: the lowest and the highest number of a change in it, 0 for none. `made`: seconds since the
    epoch.
    """

    path: str  # as in the log
    size: int
    rows: int
    layer: str | None
    low: tuple[Any, ...]
    high: tuple[Any, ...]
    oldest: int
    newest: int
    made: float

    def remove(self, now: float, *, change: bool) -> Any:
        """The action that takes it out of the table."""
        return deltalake().transaction.RemoveAction(
            self.path, change, int(now * 1000), self.size, partition_of(self.layer)
        )


def partition_of(layer: str | None) -> dict[str, str | None]:
    """The values of the partition."""
    return {} if layer is None else {"_layer": layer}


def files_of(table: Any, id_: str) -> list[DataFile]:
    """The files of a version of the table."""
    found = pa.table(table.get_add_actions(flatten=True))
    count = found.num_rows

    def column(name: str) -> list[Any]:
        return found.column(name).to_pylist() if name in found.column_names else [None] * count

    made = [at.timestamp() if hasattr(at, "timestamp") else (at or 0) / 1000 for at in column("modification_time")]
    files = []
    for path, size, rows, layer, shard, last_shard, low, high, oldest, newest, at in zip(
        column("path"), column("size_bytes"), column("num_records"), column("partition._layer"),
        column("min._shard"), column("max._shard"), column(f"min.{id_}"), column(f"max.{id_}"),
        column("min._change"), column("max._change"), made, strict=True,
    ):  # fmt: skip
        begin, end = _FIRST, _LAST
        if shard is not None and last_shard is not None:
            begin, end = (shard,), (last_shard + 1,)
            if shard == last_shard and low is not None and high is not None:
                begin, end = (shard, low), (shard, high)
        files.append(DataFile(path, size, rows or 0, layer, begin, end, oldest or 0, newest or 0, at))
    return files


@dataclass(slots=True)
class FileGroup:
    """Files whose ranges overlap."""

    files: list[DataFile]
    low: tuple[Any, ...]
    high: tuple[Any, ...]

    @property
    def shard(self) -> int | None:
        """The shard of its rows; None: of several."""
        return self.low[0] if len(self.low) == 2 and len(self.high) == 2 and self.low[0] == self.high[0] else None


def groups_of(files: Iterable[DataFile]) -> list[FileGroup]:
    """The files in groups, in the order of their keys."""
    groups: list[FileGroup] = []
    for one in sorted(files, key=lambda file: file.low):
        if groups and one.low <= groups[-1].high:
            groups[-1].files.append(one)
            groups[-1].high = max(groups[-1].high, one.high)
        else:
            groups.append(FileGroup([one], one.low, one.high))
    return groups


class ChangeSource(Protocol):
    """Changes in the order of (_shard, id), each key once. `keys` has these two columns, and `_replicad_gone`."""

    keys: pa.Table

    def rows(self, start: int, stop: int) -> pa.Table:
        """The changes from one place to another, with the column `_replicad_gone`."""


class HeldChanges:
    """Changes in memory."""

    def __init__(self, table: pa.Table, id_: str) -> None:
        self._table = sorted_rows(table, id_).combine_chunks()
        self.keys = self._table.select(["_shard", id_, GONE])

    def rows(self, start: int, stop: int) -> pa.Table:
        """See ChangeSource."""
        return self._table.slice(start, stop - start)


class FiledChanges:
    """Changes in files. `upto`: those of a higher number are left out, and of one key the newest counts."""

    def __init__(self, files: ds.Dataset, id_: str, upto: int | None = None) -> None:
        self._files = files
        self._id = id_
        self._upto = None if upto is None else pc.field("_change") <= upto
        names = ["_shard", id_, GONE] + (["_change"] if upto is not None else [])
        self.keys = self._in_order(files.to_table(columns=names, filter=self._upto)).select(names[:3]).combine_chunks()

    def _in_order(self, found: pa.Table) -> pa.Table:
        return sorted_rows(found, self._id) if self._upto is None else newest_of(found, self._id)

    def rows(self, start: int, stop: int) -> pa.Table:
        """See ChangeSource."""
        if start >= stop:
            return self._files.schema.empty_table()
        shards, ids = self.keys.column("_shard"), self.keys.column(self._id)
        shard, id_ = pc.field("_shard"), pc.field(self._id)
        first, last = shards[start], shards[stop - 1]
        above = (shard > first) | ((shard == first) & (id_ >= ids[start]))
        chosen = above & ((shard < last) | ((shard == last) & (id_ <= ids[stop - 1])))
        return self._in_order(self._files.to_table(filter=chosen if self._upto is None else chosen & self._upto))


def sorted_rows(rows: pa.Table, id_: str) -> pa.Table:
    """The rows in the order of (_shard, id)."""
    shards = rows.column("_shard")
    if not len(rows) or pc.all(pc.equal(shards, shards[0])).as_py():
        return ordered(rows, id_)
    return rows.sort_by([("_shard", "ascending"), (id_, "ascending")])


def newest_of(rows: pa.Table, id_: str) -> pa.Table:
    """Of each key the row with the highest `_change`, in the order of the keys."""
    rows = rows.sort_by([("_shard", "ascending"), (id_, "ascending"), ("_change", "ascending")]).combine_chunks()
    if rows.num_rows < 2:
        return rows
    columns = (rows.column("_shard"), rows.column(id_))
    last = pc.or_(*(pc.not_equal(column.slice(1), column.slice(0, len(rows) - 1)) for column in columns))
    mask = pa.concat_arrays([*pa.chunked_array(last).chunks, pa.array([True])])
    return rows.filter(mask)


def without(rows: pa.Table, keys: pa.Table, id_: str) -> pa.Table:
    """The rows whose key is not among `keys`."""
    for shard in pc.unique(keys.column("_shard")).to_pylist():
        ids = keys.filter(pc.equal(keys.column("_shard"), shard)).column(id_).combine_chunks()
        found = pc.and_(pc.equal(rows.column("_shard"), shard), pc.is_in(rows.column(id_), value_set=ids))
        rows = rows.filter(pc.invert(found))
    return rows


@dataclass(slots=True)
class Replaced:
    """Files that one commit adds and removes. `deleted`: rows that are gone."""

    added: list[Any] = field(default_factory=list)
    removed: list[DataFile] = field(default_factory=list)
    deleted: int = 0

    @property
    def size(self) -> int:
        """Bytes of what is added."""
        return sum(one.size for one in self.added)


@dataclass(frozen=True, slots=True)
class TableFiles:
    """Reads and writes files of the table at `root` in `store`. `schema`: of its rows. `layer`: of what is written."""

    store: pafs.FileSystem
    root: str
    schema: pa.Schema
    id: str
    rows_per_file: int
    layer: str | None = None
    now: Callable[[], float] = time.time

    def dataset(self, files: Sequence[DataFile], schema: pa.Schema | None = None) -> ds.Dataset:
        """The rows of files; columns that a file does not have are NULL."""
        paths = [f"{self.root}/{unquote(one.path)}" for one in files]
        return ds.dataset(paths, schema=schema or self.schema, format="parquet", filesystem=self.store)

    def read(self, files: Sequence[DataFile]) -> pa.Table:
        """All rows of files."""
        return self.dataset(files).to_table() if files else self.schema.empty_table()

    def merging(self, files: Iterable[DataFile], changes: ChangeSource, *, fold: bool = False) -> Iterator[Replaced]:
        """Let files have the changes, one group of files after the other: what is added and removed for each.

        `fold`: the changes are in the table already, in another layer.
        """
        for group, start, stop in _assigned(groups_of(files), changes.keys, self.id):
            done = self._merge(group, changes, start, stop, fold=fold)
            if done is not None:
                yield done

    def _merge(
        self, group: FileGroup | None, changes: ChangeSource, start: int, stop: int, *, fold: bool
    ) -> Replaced | None:
        """One group, with the changes from one place to another. None: nothing changes."""
        old = sorted_rows(self.read(group.files if group is not None else []), self.id)
        keys = changes.keys.slice(start, stop - start)
        shards = {shard for rows in (keys, old) for shard in pc.unique(rows.column("_shard")).to_pylist()}
        parts = {shard: old.filter(pc.equal(old.column("_shard"), shard)) for shard in sorted(shards)}
        done = Replaced(removed=[] if group is None else list(group.files))
        for shard, mine in parts.items():
            gone = keys.filter(pc.and_(keys.column(GONE), pc.equal(keys.column("_shard"), shard))).column(self.id)
            done.deleted += pc.sum(pc.is_in(mine.column(self.id), value_set=gone.combine_chunks())).as_py() or 0
        if not done.deleted and pc.all(keys.column(GONE)).as_py():
            return None
        for shard, mine in parts.items():
            count = pc.sum(pc.equal(keys.column("_shard"), shard)).as_py() or 0
            held = self.schema.empty_table()
            for old_rows, news in self._pieces(mine, changes, start, start + count):
                held = pa.concat_tables([held, self._applied(old_rows, news)])
                wanted = self._rows_of_file(held)
                if len(held) >= 4 * wanted:  # the last file must not become a small one
                    done.added += self.write(held.slice(0, len(held) - wanted), change=not fold)
                    held = held.slice(len(held) - wanted)
            done.added += self.write(held, change=not fold)
            start += count
        return done

    def _pieces(
        self, old: pa.Table, changes: ChangeSource, start: int, stop: int
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The rows of one shard with its changes, in pieces whose changes are bounded."""
        if start == stop:
            yield old, changes.rows(start, stop)
            return
        some = min(1000, stop - start)
        each = changes.rows(start, start + some).nbytes // some + 1
        step = max(1, min(2 * self.rows_per_file, FILE_BYTES // each))
        known, ids = old.column(self.id), changes.keys.column(self.id)
        at = 0
        for first in range(start, stop, step):
            last = min(stop, first + step)
            upto = len(known)
            if last < stop:
                upto = bisect.bisect_left(known, ids[last].as_py(), at, upto, key=lambda one: one.as_py())
            yield old.slice(at, upto - at), changes.rows(first, last)
            at = upto

    def _applied(self, old: pa.Table, changes: pa.Table) -> pa.Table:
        """Rows of one shard with changes of it, in the order of their ids."""
        if not len(changes):
            return old
        ids = changes.column(self.id).combine_chunks()
        writes = changes.filter(pc.invert(changes.column(GONE)))
        kept = old.filter(pc.invert(pc.is_in(old.column(self.id), value_set=ids)))
        return ordered(pa.concat_tables([kept, conform(writes, self.schema)]), self.id)

    def _rows_of_file(self, rows: pa.Table) -> int:
        fit: int = FILE_BYTES * len(rows) // max(1, rows.nbytes)
        return min(self.rows_per_file, max(1, fit))

    def write(self, rows: pa.Table, *, change: bool) -> list[Any]:
        """Write rows of one shard, in the order of their ids, into files; returns the actions that add them."""
        if not len(rows):
            return []
        pieces = max(1, len(rows) // self._rows_of_file(rows))
        cuts = [len(rows) * piece // pieces for piece in range(pieces + 1)]
        ends = itertools.pairwise(cuts)
        return [self.write_one(rows.slice(begin, end - begin), change=change) for begin, end in ends]

    def write_one(self, rows: pa.Table, *, change: bool, small: bool = False) -> Any:
        """Write one file. `small`: without what only helps who looks for a part of it."""
        name = f"{self.layer or 'part'}-{os.urandom(10).hex()}.parquet"
        with self.store.open_output_stream(f"{self.root}/{name}") as out:
            pq.write_table(
                rows.combine_chunks(),
                out,
                compression="zstd",
                store_schema=False,
                use_dictionary=False if small else repeating(rows),
                write_statistics=not small,
            )
            size = out.tell()
        return self._add_action(name, size, rows, change=change, small=small)

    def _add_action(self, path: str, size: int, rows: pa.Table, *, change: bool, small: bool) -> Any:
        names = ["_shard", self.id, "_seq"] if small else rows.column_names
        names += ["_change"] if small and "_change" in rows.column_names else []
        return deltalake().transaction.AddAction(
            path=path,
            size=size,
            partition_values=partition_of(self.layer),
            modification_time=int(self.now() * 1000),
            data_change=change,
            stats=json.dumps(_stats(rows, self.id, names), separators=(",", ":")),
        )


def _stats(rows: pa.Table, id_: str, names: Iterable[str]) -> dict[str, Any]:
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in names:
        column = rows.column(name)
        if name == id_ and pa.types.is_string(column.type):
            bounds = pc.min_max(column).as_py()
            bounds["min"] = bounds["min"][:_LONGEST_TEXT]
            if len(bounds["max"]) > _LONGEST_TEXT:
                bounds["max"] = bounds["max"][:_LONGEST_TEXT] + "\U0010ffff"  # above every text that begins so
        elif any(is_kind(column.type) for is_kind in _PLAIN_BOUNDS):
            if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
                continue
            bounds = pc.min_max(column).as_py()
        else:
            continue
        nulls[name] = column.null_count
        if bounds["min"] is not None:
            low[name], high[name] = (_json(bounds[end]) for end in ("min", "max"))
    return {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _json(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _assigned(groups: list[FileGroup], keys: pa.Table, id_: str) -> list[tuple[FileGroup | None, int, int]]:
    """Which changes go to which group. A key between two groups goes to the one before it, or else to the one after
    it, if that has rows of its shard alone; otherwise to new files.
    """
    found: list[tuple[FileGroup | None, int, int]] = []

    def assign(group: FileGroup | None, start: int, stop: int) -> None:
        if start == stop:
            return
        if found and group is not None and found[-1][0] is group:
            found[-1] = (group, found[-1][1], stop)
        else:
            found.append((group, start, stop))

    def between(before: FileGroup | None, after: FileGroup | None, start: int, stop: int) -> None:
        for counted in pc.value_counts(keys.column("_shard").slice(start, stop - start)).to_pylist():
            near = (one for one in (before, after) if one is not None and one.shard == counted["values"])
            assign(next(near, None), start, start + counted["counts"])
            start += counted["counts"]

    at, last = 0, None
    for group in groups:
        start = _place(keys, at, id_, group.low, after=False)
        stop = _place(keys, start, id_, group.high, after=True)
        between(last, group, at, start)
        assign(group, start, stop)
        at, last = stop, group
    between(last, None, at, keys.num_rows)
    return found


def _place(keys: pa.Table, start: int, id_: str, bound: tuple[Any, ...], *, after: bool) -> int:
    """The first place from `start` on whose key is not below `bound`, or is above it (`after`)."""
    shards, ids = keys.column("_shard"), keys.column(id_)
    end = keys.num_rows
    while start < end:
        middle = (start + end) // 2
        key = (shards[middle].as_py(), ids[middle].as_py())
        if key < bound or (after and key == bound):
            start = middle + 1
        else:
            end = middle
    return start
