"""The folder of Parquet files as others see it: whoever reads `current` reads the table, at any time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from test_sinks import SHAPE, changes, held, parquet_rows, put

from replicad.errors import DownstreamUnavailable, UsageError
from replicad.spark.sinks import parquet
from replicad.spark.sinks.base import BatchId
from replicad.spark.sinks.parquet import ParquetSink, ShardWriter


def made(folder: Path, keep: float = 0.0) -> ParquetSink:
    sink = ParquetSink(folder, keep=keep)
    sink.prepare(SHAPE)
    return sink


def all_files(folder: Path) -> int:
    return len(list((folder / parquet.DATA).glob("*/*.parquet")))


def test_the_natural_way_of_reading_gives_each_row_once_as_it_is_now(tmp_path: Path) -> None:
    sink = made(tmp_path, keep=600)
    assert len(pd.read_parquet(tmp_path / "current")) == 0
    for number in range(8):
        put(sink, number, changes({(1, 1): f"v{number}", (2, number): "x"}, [(2, number - 1)], seq=number + 1))
    rows = {(1, 1): "v7", (2, 7): "x"}
    assert held(pd.read_parquet(tmp_path / "current").to_dict("records")) == rows
    assert held(ds.dataset(tmp_path / "current").to_table().to_pylist()) == rows
    assert held(ds.dataset(tmp_path).to_table().to_pylist()) == rows, "what begins with _ is left out"
    assert held([row for path in (tmp_path / "current").iterdir() for row in pq.read_table(path).to_pylist()]) == rows
    assert parquet_rows(tmp_path) == rows
    put(sink, 8, changes({}, list(rows), seq=9))
    assert len(pd.read_parquet(tmp_path / "current")) == 0


def test_files_are_kept_by_time_and_not_by_the_number_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = made(tmp_path, keep=600)
    put(sink, 0, changes({(1, 1): "old"}))
    begun = os.path.realpath(tmp_path / "current")  # a reader that began now
    files = parquet.current(tmp_path)
    for number in range(1, 21):
        put(sink, number, changes({(1, 1): f"v{number}"}))
    assert held(pd.read_parquet(begun).to_dict("records")) == {(1, 1): "old"}
    assert all(path.exists() for path in files)
    assert all_files(tmp_path) == 21
    made(tmp_path, keep=0)
    put(ParquetSink(tmp_path, keep=0), 21, changes({(1, 1): "v21"}))
    assert (all_files(tmp_path), len(parquet.versions(tmp_path))) == (1, 1)
    assert len(list((tmp_path / parquet.SNAPSHOTS).iterdir())) == 1
    monkeypatch.setattr(parquet, "MOST_VERSIONS", 3)
    for number in range(22, 30):
        put(sink, number, changes({(1, 1): f"v{number}"}))
    assert (all_files(tmp_path), len(parquet.versions(tmp_path))) == (3, 3)
    assert parquet_rows(tmp_path) == {(1, 1): "v29"}


def test_a_crash_before_the_link_is_made_good_by_the_next_start_and_by_the_batch_that_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = made(tmp_path)

    def crash(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "show", crash)
        with pytest.raises(KeyboardInterrupt):
            put(sink, 0, changes({(1, 1): "a"}))
    assert len(pd.read_parquet(tmp_path / "current")) == 0
    made(tmp_path)
    assert len(pd.read_parquet(tmp_path / "current")) == 1
    (tmp_path / "current").unlink()
    put(sink, 0, changes({(1, 1): "again"}))
    assert held(pd.read_parquet(tmp_path / "current").to_dict("records")) == {(1, 1): "a"}


def test_a_folder_with_a_current_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(UsageError, match="current is not a link of a pipeline"):
        made(tmp_path)


@pytest.mark.parametrize("step", ["apply", "commit"])
def test_a_full_disk_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    sink, batch = made(tmp_path), BatchId("q", 0)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    applied = [] if step == "apply" else [sink.apply(SHAPE, batch, 0, changes({(1, 1): "a"}))]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownstreamUnavailable, match="cannot be written: No space left on device"):
        sink.apply(SHAPE, batch, 0, changes({(1, 1): "a"})) if step == "apply" else sink.commit(batch, applied)
    monkeypatch.undo()
    put(sink, 0, changes({(1, 1): "a"}))
    assert parquet_rows(tmp_path) == {(1, 1): "a"}


def test_a_folder_may_be_a_file_uri_and_no_other(tmp_path: Path) -> None:
    assert ParquetSink(f"file://{tmp_path}/a%20b").folder == tmp_path / "a b"  # type: ignore[arg-type]
    for uri in ("s3://bucket/x", "hdfs://name/x"):
        with pytest.raises(UsageError, match="for an object store use the downstream `delta`"):
            ParquetSink(uri)  # type: ignore[arg-type]


def test_files_and_the_rows_that_a_task_holds_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 rows of a file may have any length, and a column of texts in Arrow ends at 2 GiB."""
    monkeypatch.setattr("replicad.spark.sinks.parquet.FILE_BYTES", 100_000)
    sink = ParquetSink(tmp_path)
    sink.prepare(SHAPE)
    sizes: list[int] = []
    plain = ShardWriter._sorted

    def measured(self: ShardWriter) -> pa.Table:
        assert self._old is not None
        sizes.append(sum(rows.nbytes for rows in (self._old, *self._new)))
        return plain(self)

    monkeypatch.setattr(ShardWriter, "_sorted", measured)
    for number in range(2):  # new, and then over files that are there
        batch, names = BatchId("q", number), {(1, n): f"{number}" * 5_000 for n in range(200)}
        pieces = [changes(dict(list(names.items())[at : at + 10]))[0] for at in range(0, 200, 10)]
        sink.commit(batch, [sink.apply(SHAPE, batch, 0, pieces)])
        leaves = parquet.latest(tmp_path).shards[1]  # type: ignore[union-attr]
        assert sum(leaf.rows for leaf in leaves) == 200
        assert max(leaf.rows for leaf in leaves) < 2 * 100_000 / 5_000
        assert len(leaves) <= 2 * 200 * 5_000 / 100_000
    assert max(sizes) <= 6 * 100_000
    assert {row["name"][0] for row in parquet.table(tmp_path).to_pylist()} == {"1"}
