"""The manifest of a Parquet folder: the files that are the table now, and the batches that are in it.

    current             a link to the files of the last version, for whoever reads Parquet
    _snapshots/<version>/*.parquet    hard links to the files of a version
    _manifest/<version>.json
    _data/shard-<n>/*.parquet         the files of all versions that are kept

A manifest is first written under another name and then linked, which fails if the version exists. So a version is
always complete, and two writers cannot both make it. The files of a shard divide its ids into ranges: a file has the
ids from its `low` up to that of the next file. Readers of Parquet leave out names that begin with `_`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from replicad.errors import DownstreamError
from replicad.spark.sinks.base import BatchId, Shape

FORMAT = 1
CURRENT, DATA, MANIFESTS, SNAPSHOTS = "current", "_data", "_manifest", "_snapshots"
MOST_VERSIONS = 10_000  # whatever their age; a file system allows 65,000 hard links to a file, and more is of no use
KEPT_QUERIES = 16  # queries whose last batch is stored; every new checkpoint adds one
_NAME = re.compile(r"([0-9]{20})\.json")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One file: the ids of a shard from `low` on, the number of its rows, and their lowest `_seq`."""

    low: int
    file: str
    rows: int
    min_seq: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of the table. `shards` maps a shard to its leaves by `low`, `applied` a query to its last (batch,
    step).
    """

    version: int
    shape: Shape
    shards: Mapping[int, tuple[Leaf, ...]] = field(default_factory=dict)
    applied: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files of this version, relative to the folder's `data`."""
        return [leaf.file for leaves in self.shards.values() for leaf in leaves]

    @property
    def rows(self) -> int:
        """Rows in this version."""
        return sum(leaf.rows for leaves in self.shards.values() for leaf in leaves)

    def holds(self, batch: BatchId) -> bool:
        """Whether the batch, or a later one of its query, is in the table."""
        return self.applied.get(batch.query, (-1, 0)) >= (batch.number, batch.step)

    def with_batch(self, batch: BatchId, changed: Mapping[int, Sequence[Leaf]]) -> Manifest:
        """The next version, with the batch and the new leaves of the shards in `changed`."""
        shards = {**self.shards, **{shard: tuple(leaves) for shard, leaves in changed.items()}}
        applied = {query: at for query, at in self.applied.items() if query != batch.query}
        applied[batch.query] = (batch.number, batch.step)
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
        applied = {query: (at[0], at[1]) for query, at in found["applied"].items()}
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
