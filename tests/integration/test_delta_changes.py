"""A Delta table in both modes, and its upkeep: readers see the rows after every batch, every step and every crash."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("deltalake")

from replicad.errors import DownstreamError, UsageError
from replicad.spark.enrich import EnrichedRows
from replicad.spark.lake import Lake
from replicad.spark.sinks import delta, delta_upkeep
from replicad.spark.sinks.base import BatchId, Shape
from replicad.spark.sinks.delta import CHANGES, ROWS, DeltaSink
from replicad.spark.sinks.delta_files import files_of
from replicad.spark.sinks.delta_upkeep import TableUpkeep
from tests.conftest import PATIENCE
from tests.lengths import LONG, first

SHAPE = Shape(
    pa.schema([("id", pa.int64()), ("name", pa.string()), ("_shard", pa.int32()), ("_seq", pa.int64())]), "id"
)
KEYS = pa.schema([("_shard", pa.int32()), ("id", pa.int64()), ("_seq", pa.int64())])
Rows = dict[tuple[int, int], str]


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_DIRECT", 5)
    monkeypatch.setattr(delta_upkeep, "MERGED", 3)


@dataclass
class Table:
    """A sink, its upkeep, a clock that jumps, and what the table should have."""

    folder: Path
    mode: str
    at: float = 1_000_000.0
    number: int = 0
    model: Rows = field(default_factory=dict)
    upkeep: TableUpkeep = field(init=False)
    seen: list[tuple[float, int, Rows]] = field(default_factory=list)  # time, version, rows

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process."""
        for known in (delta._opened, delta._garbage, delta._held):
            known.pop(str(self.folder), None)
        self.sink = DeltaSink(str(self.folder), mode=self.mode, rows_per_file=4, keep=3600, now=lambda: self.at)
        self.sink.prepare(SHAPE)
        self.upkeep = TableUpkeep(self.sink, SHAPE)

    def put(self, writes: Rows, deletes: list[tuple[int, int]] = []) -> None:  # noqa: B006
        batch = BatchId("q", self.number)
        rows = [{"id": i, "name": name, "_shard": s, "_seq": self.number} for (s, i), name in writes.items()]
        gone = [{"_shard": s, "id": i, "_seq": self.number} for s, i in deletes]
        change = EnrichedRows(pa.Table.from_pylist(rows, SHAPE.schema), pa.Table.from_pylist(gone, KEYS))
        self.sink.commit(batch, [self.sink.apply(SHAPE, batch, 0, [change])])
        self.number += 1
        self.model = {key: name for key, name in {**self.model, **writes}.items() if key not in deletes}

    def step(self, *, all_of_it: bool = False) -> str | None:
        return self.upkeep.step(all_of_it=all_of_it)

    def check(self) -> None:
        lake = Lake(str(self.folder))
        assert held(lake.arrow()) == self.model
        found = self.sink.rows(SHAPE, None)
        assert found.num_rows == len(self.model)
        self.seen.append((self.at, lake.version, dict(self.model)))


def held(rows: pa.Table) -> Rows:
    found = {(row["_shard"], row["id"]): row["name"] for row in rows.to_pylist()}
    assert len(found) == rows.num_rows, "an id is there twice"
    return found


key = st.tuples(st.integers(0, 1), st.integers(-20, 20))
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.dictionaries(key, st.text("abc", max_size=2), max_size=12),
            st.lists(key, max_size=6, unique=True),
        ),
        st.tuples(st.just("step"), st.booleans(), st.none()),
        st.tuples(st.just("time"), st.sampled_from([1, 61, 3700]), st.none()),
        st.tuples(st.just("crash"), st.none(), st.none()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("mode", [ROWS, CHANGES])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_readers_see_the_rows_after_any_batches_steps_and_crashes(
    tmp_path_factory: pytest.TempPathFactory, mode: str, found: list[Any]
) -> None:
    table = Table(tmp_path_factory.mktemp("d") / "t", mode)
    for what, earlier, second in found:
        if what == "put":
            table.put({k: v for k, v in earlier.items() if k not in second}, second)
        elif what == "step":
            table.step(all_of_it=earlier)
        elif what == "time":
            table.at += earlier
        else:
            table.start()
        table.check()
    for at, version, rows in table.seen:  # files stay for an hour
        if at > table.at - 3600:
            assert held(Lake(str(table.folder), version=version).arrow()) == rows


@pytest.mark.parametrize("seed", first(1, [1, 0]))
def test_a_reader_of_two_moments_within_a_minute_sees_each_row_of_one_of_them(tmp_path: Path, seed: int) -> None:
    """A view in SQL may read the base and the changes from two versions (docs/lakes.md)."""
    chance = random.Random(seed)
    table = Table(tmp_path / "t", CHANGES)
    table.put({(0, n): "first" for n in range(20)})
    for number in range(14):
        keys = [(0, chance.randrange(25)) for _ in range(4)]
        table.put(dict.fromkeys(keys[:3], f"v{number}"), [keys[3]] if keys[3] not in keys[:3] else [])
        table.at += chance.choice([1, 20, 61])
        while table.step(all_of_it=True) is not None:
            table.check()
        table.check()
    folds, lakes = 0, {version: Lake(str(table.folder), version=version) for _, version, _ in table.seen}
    for place, (at, version, _) in enumerate(table.seen):
        for other_at, other, _ in table.seen[max(0, place - 8) : place + 9]:
            base, changes = lakes[version], lakes[other]
            if abs(at - other_at) >= 60 or base._base == lakes[other]._base:
                continue
            folds += 1
            found = held(base.overlaid(changes.changes()))
            between = [one for when, _, one in table.seen if min(at, other_at) <= when <= max(at, other_at)]
            for key in {key for one in between for key in one} | found.keys():
                assert found.get(key) in {one.get(key) for one in between}, (key, version, other)
    assert folds, "the claim is about folds between the two"


def test_a_backfill_goes_into_the_base_at_once_and_changes_lie_over_it(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", CHANGES)
    table.put({(0, 7): "early"})
    table.put({(0, n): "b" for n in range(10, 16)})
    assert [one.layer for one in files_of(table.sink.current(), "id")].count("base") == 1
    table.put({(0, n): "b" for n in range(5, 10)})  # it has a key of the changes
    assert [one.layer for one in files_of(table.sink.current(), "id")].count("base") == 1
    table.check()


def test_changes_become_few_files_and_the_base_has_them_in_the_end(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", CHANGES)
    table.put({(0, n): "b" for n in range(12)})
    for number in range(12):
        table.put({(0, number % 7): f"v{number}"})
        while table.step() is not None:
            table.check()
        table.at += 1
    assert len(files_of(table.sink.current(), "id")) < 12
    for _ in range(4):
        table.at += 3700
        while table.step(all_of_it=True) is not None:
            table.check()
    files = files_of(table.sink.current(), "id")
    assert {one.layer for one in files} == {"base"}
    on_disk = {path.name for path in table.folder.glob("*.parquet")}
    assert on_disk == {one.path for one in files}, "replaced files are removed"


@pytest.mark.parametrize("mode", [ROWS, CHANGES])
def test_of_two_writers_one_is_refused(tmp_path: Path, mode: str) -> None:
    table = Table(tmp_path / "t", mode)
    table.put({(0, 1): "a"})
    change = [EnrichedRows(pa.Table.from_pylist([{"id": 1, "name": "z", "_shard": 0, "_seq": 1}], SHAPE.schema),
                           KEYS.empty_table())]  # fmt: skip
    late = table.sink.apply(SHAPE, BatchId("q", 1), 0, change)
    table.put({(0, 1): "b"})
    assert table.sink.commit(BatchId("q", 1), [late]) in (0, None)  # repeated: batch 1 is there
    other = table.sink.apply(SHAPE, BatchId("other", 0), 0, change)
    table.put({(0, 1): "c"})
    if mode == CHANGES:
        with pytest.raises(DownstreamError, match="another pipeline writes"):
            table.sink.commit(BatchId("other", 0), [other])
        table.check()


def test_a_table_of_another_mode_is_refused_and_so_is_a_column_of_ours(tmp_path: Path) -> None:
    Table(tmp_path / "t", ROWS)
    with pytest.raises(UsageError, match="was made with another `mode`"):
        DeltaSink(str(tmp_path / "t"), mode=CHANGES).prepare(SHAPE)
    with pytest.raises(UsageError, match='column "_replicad_gone"'):
        DeltaSink(str(tmp_path / "u"), mode=CHANGES).check_columns(["id", "_replicad_gone"])
    with pytest.raises(UsageError, match="give one of rows, changes"):
        DeltaSink(str(tmp_path / "u"), mode="both")


def test_only_one_process_of_a_machine_does_the_upkeep(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", CHANGES)
    for number in range(4):
        table.put({(0, number): "a"})
    with table.upkeep._alone() as first:
        assert first
        assert TableUpkeep(table.sink, SHAPE).step(all_of_it=True) is None
    assert table.step(all_of_it=True) is not None


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("library", ["duckdb", "polars"])
def test_other_engines_read_the_same_rows(
    tmp_path: Path, library: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RJEM_MALLOC_CONF", "dirty_decay_ms:500")  # Polars sets it, and would leave it behind
    module: Any = pytest.importorskip(library)
    table = Table(tmp_path / "t", CHANGES)
    for shard in range(shards):
        table.put({(shard, n): "b" for n in range(10)})
    table.put({(0, 3): "new", (0, 30): "more"}, [(0, 4)])
    lake = Lake(str(table.folder))
    assert lake._joined == (("id",) if shards == 1 else ("_shard", "id"))
    if library == "polars":
        assert held(lake.polars().collect().to_arrow()) == table.model
        return
    page = (Path(__file__).parents[2] / "docs/pipelines.md").read_text(encoding="utf-8")
    [view] = re.findall(r"CREATE VIEW film AS\n(.*?)```", page, re.DOTALL)
    view = view.replace("delta_scan('/srv/lake/public.film')", "whole").replace("_key", "id")
    with module.connect() as connection:
        assert held(lake.duckdb(connection).to_arrow_table()) == table.model
        connection.register("whole", table.sink.current().to_pyarrow_dataset())  # as the extension `delta` would
        assert held(connection.sql(view).to_arrow_table()) == table.model


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_delta_changes as tests
from replicad.spark.sinks import delta, delta_upkeep
delta._DIRECT, delta_upkeep.MERGED = 5, 3
table = tests.Table(Path({folder!r}), {mode!r})
table.number = table.sink.last_batch("q").newest + 1
print("ready", flush=True)
while True:
    table.at = 1_000_000.0 + 61 * table.number
    table.put({{(0, n): f"v{{table.number}}" for n in range(12)}})
    table.step()
"""


@pytest.mark.parametrize("mode", first(1, [CHANGES, ROWS]))
def test_a_reader_sees_whole_batches_beside_a_writer_that_is_killed(tmp_path: Path, mode: str) -> None:
    """Each batch gives all rows one name, so a reader that sees two names sees half a batch, or half a step."""
    folder = tmp_path / "t"
    source = WRITER.format(path=[str(Path(__file__).parent)], folder=str(folder), mode=mode)
    names: list[str] = []
    for _ in range(10 if LONG else 2):
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            enough, until = len(set(names)) + 3, time.monotonic() + PATIENCE
            while len(set(names)) < enough and time.monotonic() < until:
                names.append(one_name(folder))
            writer.kill()
        names.append(one_name(folder))
    assert len(set(names)) > 5
    assert sorted(names, key=lambda name: int(name[1:])) == names, "a later reader sees a later batch"


def one_name(folder: Path) -> str:
    rows = held(Lake(str(folder)).arrow())
    assert len(rows) in (0, 12)
    [name] = set(rows.values()) or {"v-1"}
    return name


def test_a_file_that_a_crash_left_is_removed_after_a_day(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", CHANGES)
    table.put({(0, 1): "a"})
    left = table.folder / "changes-left.parquet"
    left.write_bytes(b"half a fi")
    table.at = time.time() + 3600
    table.start()
    table.step()
    assert left.exists(), "it may be of a batch under way"
    table.at = time.time() + 90_000
    table.step()
    assert not left.exists()
    table.check()


@pytest.mark.parametrize("mode", [ROWS, CHANGES])
def test_a_batch_of_several_tasks_is_one_commit_and_a_repeated_task_counts_once(tmp_path: Path, mode: str) -> None:
    table = Table(tmp_path / "t", mode)

    def of_task(task: int, name: str) -> list[EnrichedRows]:
        rows = [{"id": n, "name": name, "_shard": task, "_seq": 1} for n in range(3)]
        return [EnrichedRows(pa.Table.from_pylist(rows, SHAPE.schema), KEYS.empty_table())]

    batch = BatchId("q", 0)
    table.sink.apply(SHAPE, batch, 0, of_task(0, "of a task that was lost"))
    done = [table.sink.apply(SHAPE, batch, task, of_task(task, f"task {task}")) for task in (0, 1)]
    before = Lake(str(table.folder)).version
    table.sink.commit(batch, done)
    lake = Lake(str(table.folder))
    assert lake.version == before + 1
    assert held(lake.arrow()) == {(task, n): f"task {task}" for task in (0, 1) for n in range(3)}
    nothing = EnrichedRows(SHAPE.schema.empty_table(), KEYS.empty_table())
    later = BatchId("q", 1)
    table.sink.commit(later, [table.sink.apply(SHAPE, later, 0, [nothing])])
    assert table.sink.last_batch("q").whole == 1
