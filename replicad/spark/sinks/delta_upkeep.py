"""Keeps a Delta table small, beside the pipeline that writes it: in steps that are bounded, each one commit.

- Files that were replaced are removed after `keep` seconds, and files that a crash left after a day.
- Small files of one range of keys become one file.
- Changes (`mode = "changes"`) are merged with changes of about their number, 16 files into one, and folded into the
  base when they are a quarter of its rows. A fold writes one part of the base after the other.

What a reader sees is right at every moment, also if it reads the two layers at two moments that are less than `SETTLED`
apart. A change stays in its layer until the whole base has it, and `SETTLED` longer; only changes are folded that were
in the table for as long. So the base that a reader sees never has a change that its layer of changes lacks.

A step is prepared while the pipeline writes, and then committed under the lock of the table, if all files that it
replaces are still there. So the pipeline never waits for long, and its commits never fail because of a step. Two
processes never do steps of one table of this machine at once (a lock in the folder); elsewhere Delta itself refuses the
second of two commits that replace the same file.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from replicad.errors import DownstreamError, ReplicadError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import local_path
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.sinks.delta import (
    BASE_LAYER,
    CHANGE,
    CHANGES,
    CHANGES_LAYER,
    STAGING,
    DeltaSink,
    garbage_of,
    lock_of,
)
from replicad.spark.sinks.delta_files import (
    FILE_BYTES,
    GONE,
    DataFile,
    FiledChanges,
    FileGroup,
    Replaced,
    files_of,
    groups_of,
    newest_of,
    sorted_rows,
)

SETTLED = 60.0  # seconds that a reader may take between the two layers
MERGED = 16  # files of changes that become one: each change is written once more for each power of 16
FOLD_SHARE = 0.25  # of the rows of the base: more changes are folded; a fold writes the base once
GARBAGE_SHARE = 0.5  # of the bytes of the base: while replaced files have more, a fold waits
ORPHANS_EVERY = 3600.0  # seconds between two looks at all files
ORPHAN_AGE = 86400.0  # seconds after which a file of no version is of a crash, not of a batch under way
LOOK = 1.0  # seconds between two looks of the thread
PAUSE = 60.0  # seconds after a step that failed

log = get_logger("replicad.spark")


@dataclass(slots=True)
class _Fold:
    """Changes up to the number `upto` go into the base. `files` has them; `parts` are the parts of the base."""

    upto: int
    files: list[DataFile]
    parts: Iterator[Replaced]
    ended: float | None = None


@dataclass(slots=True)
class TableUpkeep:
    """The upkeep of one table. `step` does one thing."""

    sink: DeltaSink
    shape: Shape
    settled: float = SETTLED
    _fold: _Fold | None = None
    _orphans_at: float = 0.0
    _joined: set[str] = field(default_factory=set)  # files of the last joining: long keys may have equal bounds

    def step(self, *, all_of_it: bool = False) -> str | None:
        """Do the next thing that is due, or that may be done (`all_of_it`); returns what it was.

        None: nothing is due, or another process is at it.
        """
        with self._alone() as alone:
            if not alone:
                return None
            if self._remove_garbage(all_of_it=all_of_it):
                return "removed"
            with lock_of(self.sink.uri):
                files = files_of(self.sink.current(), self.shape.id)
            for work in (self._merge_changes, self._fold_step, self._join_small):
                done = work(files, all_of_it)
                if done is not None:
                    return done
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether a fold has begun and not ended."""
        return self._fold is not None

    # --- garbage ---

    def _remove_garbage(self, *, all_of_it: bool) -> bool:
        garbage = garbage_of(self.sink.uri)
        old = self.sink.now() - self.sink.keep
        removed = 0
        while garbage and garbage[0][0] <= old:
            self.sink.drop(unquote(garbage.pop(0)[1].path))
            removed += 1
        if self.sink.now() >= self._orphans_at or (all_of_it and not self._orphans_at):
            self._orphans_at = self.sink.now() + ORPHANS_EVERY
            removed += self._remove_orphans(old)
        return removed > 0

    def _remove_orphans(self, old: float) -> int:
        """Files that no version has: of commits that took them out before `old`, and of crashes."""
        store, root = self.sink.place()
        with lock_of(self.sink.uri):
            files = files_of(self.sink.current(), self.shape.id)
        taken_out = _taken_out(store, root)
        known = {unquote(one.path) for one in files}
        removed = 0
        for info in store.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True)):
            path = info.path[len(root) + 1 :]
            if not info.is_file or path.startswith(("_delta_log/", STAGING)) or path in known:
                continue
            since = taken_out.get(path)
            if since <= old if since is not None else info.mtime.timestamp() < self.sink.now() - ORPHAN_AGE:
                store.delete_file(info.path)
                removed += 1
            elif since is not None and all(path != unquote(one.path) for _, one in garbage_of(self.sink.uri)):
                lost = DataFile(path, info.size, 0, None, (), (), 0, 0, 0.0)
                garbage_of(self.sink.uri).append((since, lost))
        garbage_of(self.sink.uri).sort(key=lambda one: one[0])
        return removed

    # --- changes ---

    def _merge_changes(self, files: list[DataFile], all_of_it: bool) -> str | None:
        if self.sink.mode != CHANGES:
            return None
        changed = sorted((one for one in files if one.layer == CHANGES_LAYER), key=lambda one: one.newest)
        if self._fold is not None:  # its files stay as they are
            changed = [one for one in changed if one.oldest > self._fold.upto]
        tiers: dict[int, list[DataFile]] = {}
        for one in changed:
            tiers.setdefault(int(math.log(max(one.rows, 1), MERGED)), []).append(one)
        for _, mine in sorted(tiers.items()):
            chosen, size = [], 0
            for one in mine:
                if size + one.size > FILE_BYTES // 2:
                    break
                chosen.append(one)
                size += one.size
            if len(chosen) >= MERGED or (all_of_it and self._fold is None and len(chosen) > 1):
                rows = newest_of(self._changes(chosen).to_table(), self.shape.id)
                out = self.sink.files(self.shape.schema, self.shape.id, CHANGES_LAYER)
                made = out.write_one(rows, change=False)
                made.modification_time = int(max(one.made for one in chosen) * 1000)  # since when it has its changes
                return self._put(Replaced([made], chosen), "merged")
        return None

    def _changes(self, files: Sequence[DataFile]) -> Any:
        schema = pa.schema([*self.shape.schema, (CHANGE, pa.int64()), (GONE, pa.bool_())])
        return self.sink.files(self.shape.schema, self.shape.id).dataset(files, schema)

    def _fold_step(self, files: list[DataFile], all_of_it: bool) -> str | None:
        if self.sink.mode != CHANGES:
            return None
        base = [one for one in files if one.layer == BASE_LAYER]
        if self._fold is None:
            self._fold = self._begin_fold(files, base, all_of_it)
        fold = self._fold
        if fold is None:
            return None
        if fold.ended is None:
            garbage = sum(one.size for _, one in garbage_of(self.sink.uri) if one.layer == BASE_LAYER)
            if garbage > GARBAGE_SHARE * sum(one.size for one in base) and not all_of_it:
                return None
            part = next(fold.parts, None)
            if part is not None:
                done = self._put(part, "folded")
                if done is None:
                    self._fold = None  # somebody else has changed the base: from the beginning
                return done or "begun again"
            fold.ended = self.sink.now()
        return self._end_fold(fold, fold.ended, files)

    def _begin_fold(self, files: list[DataFile], base: list[DataFile], all_of_it: bool) -> _Fold | None:
        changed = [one for one in files if one.layer == CHANGES_LAYER]
        enough = 1 if all_of_it else max(1, FOLD_SHARE * sum(one.rows for one in base))
        if sum(one.rows for one in changed) < enough:
            return None
        upto, chosen = self._settled(changed)
        if not chosen:
            return None
        source = FiledChanges(self._changes(chosen), self.shape.id, upto)
        out = self.sink.files(self.shape.schema, self.shape.id, BASE_LAYER)
        log.info("fold_begins", table=self.sink.uri, changes=source.keys.num_rows)
        return _Fold(upto, chosen, out.merging(base, source, fold=True))

    def _end_fold(self, fold: _Fold, ended: float, files: list[DataFile]) -> str | None:
        if self.sink.now() < ended + self.settled:
            return None
        self._fold = None
        left = [one for one in files if one.layer == CHANGES_LAYER and one not in fold.files]
        if any(one.oldest <= fold.upto for one in left):
            return "begun again"  # somebody else has merged changes
        log.info("fold_ends", table=self.sink.uri, files=len(fold.files))
        return self._put(Replaced([], fold.files), "emptied") or "begun again"

    def _settled(self, changed: list[DataFile]) -> tuple[int, list[DataFile]]:
        """The number up to which changes may be folded, and the files that have these and no others."""
        old = self.sink.now() - self.settled
        young = [one for one in changed if one.made > old]
        settled = [one for one in changed if one.made <= old]
        while True:
            upto = min((one.oldest for one in young), default=1 << 62) - 1
            mixed = [one for one in settled if one.newest > upto]
            if not mixed:
                return max((one.newest for one in settled), default=0), settled
            young += mixed
            settled = [one for one in settled if one not in mixed]

    # --- small files ---

    def _join_small(self, files: list[DataFile], all_of_it: bool) -> str | None:
        """Join files beside each other that are small, and files whose ranges overlap."""
        if self._fold is not None:
            return None
        layer = BASE_LAYER if self.sink.mode == CHANGES else None
        limit = self.sink.rows_per_file or 1
        run: list[FileGroup] = []
        for group in [*groups_of(one for one in files if one.layer == layer), None]:
            if (
                group is not None
                and len(group.files) > 1
                and group.shard is not None
                and sum(one.size for one in group.files) <= FILE_BYTES
                and not self._joined.issuperset(one.path for one in group.files)
            ):
                return self._rewrite(group.files, layer)
            fits = (
                group is not None
                and group.shard is not None
                and (not run or group.shard == run[0].shard)
                and sum(one.rows for each in [*run, group] for one in each.files) <= limit
                and sum(one.size for each in [*run, group] for one in each.files) <= FILE_BYTES // 2
            )
            if fits and group is not None:
                run.append(group)
                continue
            if len(run) >= (2 if all_of_it else max(2, MERGED // 2)):
                return self._rewrite([one for each in run for one in each.files], layer)
            run = [group] if group is not None else []
        return None

    def _rewrite(self, files: list[DataFile], layer: str | None) -> str | None:
        out = self.sink.files(self.shape.schema, self.shape.id, layer)
        rows = sorted_rows(out.read(files), self.shape.id)
        made = []
        for shard in rows.column("_shard").unique().to_pylist():
            made += out.write(rows.filter(pc.equal(rows.column("_shard"), shard)), change=False)
        self._joined = {one.path for one in made}
        return self._put(Replaced(made, files), "joined")

    # --- how ---

    def _put(self, done: Replaced, what: str) -> str | None:
        """Commit it, if what it replaces is still there."""
        with lock_of(self.sink.uri):
            table = self.sink.current()
            there = {one.path for one in files_of(table, self.shape.id)}
            try:
                if all(one.path in there for one in done.removed):
                    self.sink.put(table, done, {})
                    return what
            except DownstreamError as error:
                log.debug("upkeep_was_late", table=self.sink.uri, error=str(error))
        for one in done.added:
            self.sink.drop(one.path)
        return None

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process of this machine is at it."""
        local = local_path(self.sink.uri)
        if local is None:
            yield True
            return
        import fcntl  # noqa: PLC0415 - of Unix only

        folder = Path(local) / STAGING
        folder.mkdir(exist_ok=True)
        with (folder / "upkeep.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def compact(sink: DeltaSink) -> dict[str, int]:
    """Do all the upkeep that may be done now; returns how often each kind of step was done.

    The columns are those of the table, also those that a transform adds. Changes that were appended in the last minute
    stay. It waits for the end of a fold: a minute after its last part.
    """
    upkeep, done = TableUpkeep(sink, sink.stored_shape()), dict[str, int]()
    while True:
        step = upkeep.step(all_of_it=True)
        if step is not None:
            done[step] = done.get(step, 0) + 1
        elif not upkeep.is_waiting:
            return done
        else:
            time.sleep(LOOK)


def _taken_out(store: pafs.FileSystem, root: str) -> dict[str, float]:
    """When files were taken out of the table, as far as the log knows it."""
    found: dict[str, float] = {}
    for info in store.get_file_info(pafs.FileSelector(f"{root}/_delta_log", allow_not_found=True)):
        if not info.path.endswith(".json") or not info.is_file:
            continue
        with store.open_input_stream(info.path) as file:
            for line in file.read().splitlines():
                if line.startswith(b'{"remove"'):
                    action = json.loads(line)["remove"]
                    found[unquote(action["path"])] = action.get("deletionTimestamp", 0) / 1000
    return found


class UpkeepThread:
    """Does the upkeep of tables in the background. `tables`: those that there are now."""

    def __init__(self, tables: Callable[[], Sequence[tuple[Sink, Shape]]]) -> None:
        self._tables = tables
        self._upkeep: dict[str, TableUpkeep] = {}
        self._pause: dict[str, float] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicad-upkeep", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in hand, and wait for it."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._ending.wait(LOOK):
            for sink, shape in self._tables():
                if isinstance(sink, DeltaSink) and time.monotonic() >= self._pause.get(sink.uri, 0):
                    self._steps(sink, shape)

    def _steps(self, sink: DeltaSink, shape: Shape) -> None:
        upkeep = self._upkeep.get(sink.uri)
        if upkeep is None or upkeep.shape is not shape:
            upkeep = self._upkeep[sink.uri] = TableUpkeep(sink, shape)
        try:
            while not self._ending.is_set() and (done := upkeep.step()) is not None:
                log.debug("upkeep", table=sink.uri, what=done)
        except (ReplicadError, OSError, pa.ArrowException) as error:
            self._pause[sink.uri] = time.monotonic() + PAUSE
            self._upkeep.pop(sink.uri, None)
            log.warning("upkeep_failed", table=sink.uri, error=str(error))
