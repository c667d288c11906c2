"""The downstreams: what a batch that comes again, a crash between two steps and two writers at once leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import psql
from hypothesis import given, settings
from hypothesis import strategies as st
from index_server import IndexServer

from replicad.errors import DownstreamError, DownstreamUnavailable, ReplicadError, RowRefused, UsageError
from replicad.spark.database import connection, forget, with_time_outs
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks import delta, parquet
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from tests.conftest import PATIENCE

SHAPE = Shape(
    pa.schema([("id", pa.int64()), ("name", pa.string()), ("_shard", pa.int32()), ("_seq", pa.int64())]), "id"
)
KEYS = pa.schema([("_shard", pa.int32()), ("id", pa.int64()), ("_seq", pa.int64())])


def changes(
    writes: dict[tuple[int, int], str],
    deletes: list[tuple[int, int]] = [],  # noqa: B006
    seq: int = 1,
) -> list[EnrichedRows]:
    rows = [{"id": i, "name": name, "_shard": shard, "_seq": seq} for (shard, i), name in writes.items()]
    gone = [{"_shard": shard, "id": i, "_seq": seq} for shard, i in deletes]
    return [EnrichedRows(pa.Table.from_pylist(rows, SHAPE.schema), pa.Table.from_pylist(gone, KEYS))]


def held(rows: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    found = {(row["_shard"], row["id"]): row["name"] for row in rows}
    assert len(found) == len(rows), "an id is there twice"
    return found


# --- Parquet ---


def parquet_rows(folder: Path) -> dict[tuple[int, int], str]:
    return held(parquet.table(folder).to_pylist())


def put(sink: ParquetSink, number: int, *tasks: list[EnrichedRows], step: int = 0) -> None:
    batch = BatchId("q", number, step)
    sink.commit(batch, [sink.apply(SHAPE, batch, task, found) for task, found in enumerate(tasks)])


steps = st.lists(
    st.tuples(
        st.dictionaries(st.tuples(st.integers(0, 1), st.integers(-20, 20)), st.text("abc", max_size=2), max_size=15),
        st.lists(st.tuples(st.integers(0, 1), st.integers(-20, 20)), max_size=10),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(steps)
def test_a_parquet_folder_equals_a_dictionary_after_any_batches(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[dict[tuple[int, int], str], list[tuple[int, int]]]]
) -> None:
    sink, model = ParquetSink(tmp_path_factory.mktemp("p"), rows_per_file=4), dict[tuple[int, int], str]()
    sink.prepare(SHAPE)
    for number, (writes, deletes) in enumerate(found):
        gone = [key for key in dict.fromkeys(deletes) if key not in writes]
        tasks = []
        for shard in (0, 1):  # a task gets its ids in chunks, in their order
            parts = [[(shard, one) for one in range(low, low + 7)] for low in range(-20, 21, 7)]
            of_part = [({k: writes[k] for k in part if k in writes}, [k for k in part if k in gone]) for part in parts]
            tasks.append([one for w, d in of_part if w or d for one in changes(w, d, number)])
        put(sink, number, *tasks)
        model = {key: name for key, name in {**model, **writes}.items() if key not in gone}
        assert parquet_rows(sink.folder) == model
    for leaves in parquet.latest(sink.folder).shards.values():  # type: ignore[union-attr]
        lows = [leaf.low for leaf in leaves]
        assert lows == sorted(set(lows))
        assert all(leaf.rows < 2 * 4 for leaf in leaves)


def test_a_batch_that_was_not_committed_is_not_seen_and_comes_again(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.prepare(SHAPE)
    put(sink, 0, changes({(1, 1): "old"}))
    sink.apply(SHAPE, BatchId("q", 1), 0, changes({(1, 1): "half"}))  # and the driver dies
    assert parquet_rows(tmp_path) == {(1, 1): "old"}
    ParquetSink(tmp_path).prepare(SHAPE)
    put(ParquetSink(tmp_path), 1, changes({(1, 1): "new"}))
    assert parquet_rows(tmp_path) == {(1, 1): "new"}


def test_a_committed_batch_that_comes_again_is_not_applied_again(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.prepare(SHAPE)
    put(sink, 4, changes({(1, 1): "first"}))
    again = sink.apply(SHAPE, BatchId("q", 4), 0, changes({(1, 1): "second"}))
    assert again.repeated
    sink.commit(BatchId("q", 4), [again])
    with pytest.raises(DownstreamError, match="batch 3 comes, and the downstream has a later batch 4"):
        put(sink, 3, changes({(1, 1): "late"}))
    assert parquet_rows(tmp_path) == {(1, 1): "first"}
    put(sink, 4, changes({(1, 1): "garbage step"}), step=1)
    assert parquet_rows(tmp_path) == {(1, 1): "garbage step"}


def test_of_two_writers_one_is_refused_and_nothing_is_mixed(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.prepare(SHAPE)
    mine = sink.apply(SHAPE, BatchId("mine", 0), 0, changes({(1, 1): "mine"}))
    put(sink, 0, changes({(1, 2): "theirs"}))
    with pytest.raises(DownstreamError, match="another pipeline writes"):
        sink.commit(BatchId("mine", 0), [mine])
    assert parquet_rows(tmp_path) == {(1, 2): "theirs"}


def test_stale_ids_are_those_that_a_backfill_did_not_touch(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, rows_per_file=2)
    sink.prepare(SHAPE)
    put(sink, 0, changes({(1, number): "old" for number in range(6)}, seq=5))
    put(sink, 1, changes({(1, 2): "new", (1, 3): "new"}, seq=9))
    assert sink.stale_ids(SHAPE, 1, 9, 100).to_pylist() == [0, 1, 4, 5]
    assert len(sink.stale_ids(SHAPE, 1, 9, 3)) == 3
    assert sink.stale_ids(SHAPE, 2, 9, 100).to_pylist() == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_data").mkdir()
    (tmp_path / "_data" / "mine.csv").write_text("1")
    with pytest.raises(UsageError, match="not empty"):
        ParquetSink(tmp_path).prepare(SHAPE)
    sink = ParquetSink(tmp_path / "other")
    sink.prepare(SHAPE)
    with pytest.raises(UsageError, match="other columns"):
        sink.prepare(Shape(pa.schema([*SHAPE.schema, ("more", pa.string())]), "id"))
    with pytest.raises(UsageError, match="has no table"):
        parquet.current(tmp_path / "nowhere")


# --- Postgres ---


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    yield database_url
    forget(database_url)


def postgres_rows(url: str) -> dict[tuple[int, int], str]:
    lines = psql(url, 'SELECT _shard, id, name FROM dw."Cit ies" ORDER BY 1, 2').splitlines()
    return {(int(s), int(i)): name for s, i, name in (line.split("|") for line in lines)}


def test_a_postgres_table_takes_a_batch_once(url: str) -> None:
    sink = PostgresSink(url, 'dw."Cit ies"')
    sink.prepare(SHAPE)
    sink.prepare(SHAPE)
    done = sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a", (1, 2): "b"}))
    assert (done.written, done.deleted, done.repeated) == (2, 0, False)
    assert sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "again"})).repeated
    assert not sink.apply(SHAPE, BatchId("q", 0), 1, changes({(2, 1): "other task"})).repeated
    done = sink.apply(SHAPE, BatchId("q", 1), 0, changes({(1, 2): "B"}, [(1, 1), (1, 99)]))
    assert (done.written, done.deleted) == (1, 1)
    with pytest.raises(DownstreamError, match="batch 0 comes, and the downstream has a later batch 1"):
        sink.apply(SHAPE, BatchId("q", 0, 5), 0, changes({(1, 2): "zombie"}))
    assert postgres_rows(url) == {(1, 2): "B", (2, 1): "other task"}
    assert sink.stale_ids(SHAPE, 1, 2, 10).to_pylist() == [2]
    assert psql(url, "SELECT batch, written, deleted FROM dw.replicad_batches WHERE task = 0") == "1|1|1"


def test_the_tasks_of_a_small_batch_in_postgres_are_written_as_apply_and_commit_write_them(url: str) -> None:
    """A job has written one task before; the table downstream is altered meanwhile, as by a migration."""
    sink = PostgresSink(url, "dw.small")
    sink.prepare(SHAPE)
    few = {task: changes({(task, 1): "a"}, [(task, 2)]) for task in (1, 2)}
    sink.apply(SHAPE, BatchId("q", 0), 1, few[1])
    assert sink.write_small(SHAPE, BatchId("q", 0), few) == ({1: Applied(repeated=True), 2: Applied(1, 0)}, None)
    assert sink.last_batch("q") == LastBatch(0, 0)
    assert sink.write_small(SHAPE, BatchId("q", 0), few)[0] == dict.fromkeys((1, 2), Applied(repeated=True))

    psql(url, "ALTER TABLE dw.small ADD note text DEFAULT 'n'")
    again = {task: changes({(task, 2): "b"}, [(task, 1)], seq=2) for task in (1, 2)}
    done, _ = sink.write_small(SHAPE, BatchId("q", 1), {**again, 3: []})
    assert done == {1: Applied(1, 1), 2: Applied(1, 1), 3: Applied()}
    counts = psql(url, "SELECT task, batch, written, deleted FROM dw.replicad_batches ORDER BY task")
    assert counts.splitlines() == ["-1|1|0|0", "1|1|1|1", "2|1|1|1", "3|1|0|0"]
    rows = "SELECT string_agg(concat_ws(' ', _shard, id, name, note, _seq), ',' ORDER BY _shard) FROM dw.small"
    assert psql(url, rows) == "1 2 b n 2,2 2 b n 2"

    sink.write_small(SHAPE, BatchId("q", 2), {})
    assert sink.last_batch("q") == LastBatch(2, 2), "a batch without rows counts too"
    with pytest.raises(DownstreamError, match="a later batch 2"):
        sink.write_small(SHAPE, BatchId("q", 1), again)
    psql(url, "UPDATE dw.replicad_batches SET batch = 4 WHERE task = 2")
    with pytest.raises(DownstreamError, match="a later batch 4"):
        sink.write_small(SHAPE, BatchId("q", 3), again)
    assert psql(url, rows) == "1 2 b n 2,2 2 b n 2"


def test_a_task_that_fails_in_the_middle_leaves_nothing(url: str) -> None:
    sink = PostgresSink(url, 'dw."Cit ies"')
    sink.prepare(SHAPE)

    def half() -> Iterator[EnrichedRows]:
        yield from changes({(1, 1): "half"})
        raise RuntimeError("the executor dies")

    with pytest.raises(RuntimeError):
        sink.apply(SHAPE, BatchId("q", 0), 0, half())
    assert postgres_rows(url) == {}
    assert not sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "whole"})).repeated
    assert postgres_rows(url) == {(1, 1): "whole"}


@contextmanager
def paused(sink: PostgresSink, what: Callable[[], Iterable[EnrichedRows]]) -> Iterator[dict[str, Any]]:
    """A task of a zombie in a thread of its own; `what` says how it is paused. Its outcome is there afterwards."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["applied"] = sink.apply(SHAPE, BatchId("q", 0), 0, what())
        except ReplicadError as error:
            outcome["error"] = error
        finally:
            forget(sink.url)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_task_that_is_paused_while_it_loads_rows_delays_nobody_and_overwrites_nothing(url: str) -> None:
    sink = PostgresSink(url, 'dw."Cit ies"')
    sink.prepare(SHAPE)
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[EnrichedRows]:
        yield from changes({(1, 1): "old"})
        inside.set()
        assert go_on.wait(PATIENCE)

    with paused(sink, slow) as outcome:
        assert inside.wait(PATIENCE)
        assert not sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "new"})).repeated
        go_on.set()
    assert outcome["applied"].repeated
    assert postgres_rows(url) == {(1, 1): "new"}


def test_a_task_that_is_paused_while_it_holds_locks_is_ended_by_postgres(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.spark.sinks.postgres._IDLE_LOCKED", 1)
    sink = PostgresSink(url, 'dw."Cit ies"')
    sink.prepare(SHAPE)
    inside, go_on, plain = threading.Event(), threading.Event(), PostgresSink._write

    def pause(self: PostgresSink, cursor: Any, shape: Shape, loaded: Any) -> Any:
        monkeypatch.setattr(PostgresSink, "_write", plain)
        inside.set()
        assert go_on.wait(PATIENCE)
        return plain(self, cursor, shape, loaded)

    monkeypatch.setattr(PostgresSink, "_write", pause)
    with paused(sink, lambda: changes({(1, 1): "old"})) as outcome:
        assert inside.wait(PATIENCE)
        assert not sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "new"})).repeated
        go_on.set()
    assert outcome.get("applied", Applied(repeated=True)).repeated
    assert postgres_rows(url) == {(1, 1): "new"}


@pytest.mark.parametrize("locked", ["dw.replicad_batches", 'dw."Cit ies"'])
def test_a_row_that_another_session_has_locked_is_waited_for_so_long_and_the_session_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch, locked: str
) -> None:
    monkeypatch.setattr("replicad.spark.sinks.postgres.LOCKED_WAIT", 1)
    sink = PostgresSink(url, 'dw."Cit ies"')
    sink.prepare(SHAPE)
    sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a"}))
    other = f"{url}&application_name=warehouse"
    with connection(other, transactional=True).cursor() as cursor:
        cursor.execute("SET application_name = 'a report'")
        cursor.execute(f"UPDATE {locked} SET {'at = now()' if 'batches' in locked else '_seq = 0'}")
    with pytest.raises(
        DownstreamUnavailable,
        match=r"has a locked row, for more than 1 s: session \d+ \(a report, from this host\) has been idle in trans",
    ):
        sink.apply(SHAPE, BatchId("q", 1), 0, changes({(1, 1): "b"}))
    forget(other)
    assert sink.apply(SHAPE, BatchId("q", 1), 0, changes({(1, 1): "b"})).written == 1


def test_connections_have_the_time_outs_of_tcp_that_their_url_does_not_set(url: str) -> None:
    assert with_time_outs("postgresql:///x").startswith("postgresql:///x?connect_timeout=10&keepalives_idle=20&")
    assert with_time_outs(f"{url}&connect_timeout=3").count("connect_timeout") == 1
    again = with_time_outs("postgresql://u@h/x")
    assert with_time_outs(again) == again


def test_a_table_that_lacks_a_column_is_refused(url: str) -> None:
    psql(url, "CREATE TABLE public.mine (id bigint, _shard integer, _seq bigint, PRIMARY KEY (_shard, id))")
    with pytest.raises(UsageError, match="has no column 'name'; add it"):
        PostgresSink(url, "mine").prepare(SHAPE)
    with pytest.raises(UsageError, match="Postgres has no type"):
        PostgresSink(url, "other").prepare(
            Shape(pa.schema([*SHAPE.schema, ("s", pa.struct([("a", pa.int64())]))]), "id")
        )
    with pytest.raises(UsageError, match="is not a name of a table"):
        PostgresSink(url, "a; DROP TABLE b")
    assert "secret" not in repr(PostgresSink("postgresql://u:secret@h/d", "t"))


# --- one's own class ---


class Mine:
    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], str] = {}

    def write(self, rows: pa.Table) -> None:
        self.rows.update(held(rows.to_pylist()))

    def delete(self, shard: int, ids: list[int]) -> None:
        for one in ids:
            self.rows.pop((shard, one), None)

    def stale_ids(self, shard: int, before: int) -> list[int]:
        return [one for at, one in self.rows if at == shard]


def test_an_own_class_is_told_what_to_write_and_delete() -> None:
    sink = CustomSink(Mine())
    done = sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a", (2, 1): "b"}, [(2, 7)]))
    assert (done.written, done.deleted, sink.target.rows) == (2, 1, {(1, 1): "a", (2, 1): "b"})  # type: ignore[attr-defined]
    sink.apply(SHAPE, BatchId("q", 1), 0, changes({}, [(1, 1)]))
    assert sink.stale_ids(SHAPE, 2, 9, 10).to_pylist() == [1]


def test_an_own_class_can_refuse_the_late_writes_of_a_paused_node() -> None:
    class Fenced(Mine):
        last = (0, 0)

        def begin(self, term: int, batch: int) -> None:
            if (term, batch) < self.last:
                raise ValueError(f"{(term, batch)} is behind {self.last}")
            self.last = (term, batch)

    sink = CustomSink(Fenced())
    assert sink.fenced
    assert not CustomSink(Mine()).fenced

    def paused() -> Iterator[EnrichedRows]:
        yield from changes({(1, 1): "a"})
        sink.apply(SHAPE, BatchId("q", 3, term=8), 0, changes({(1, 1): "new"}))

    sink.apply(SHAPE, BatchId("q", 3, term=7), 0, paused())
    for late in (BatchId("q", 3, term=7), BatchId("q", 2, term=8)):
        with pytest.raises(DownstreamError, match=r"ValueError: \(\d, \d\) is behind \(8, 3\)"):
            sink.apply(SHAPE, late, 0, changes({(1, 1): "old"}))
    assert sink.target.rows == {(1, 1): "new"}  # type: ignore[attr-defined]
    sink.try_out(SHAPE, changes({(1, 1): "new"})[0])


def test_an_own_class_that_lacks_a_method_or_fails_is_named() -> None:
    with pytest.raises(UsageError, match="object has no method write"):
        CustomSink(object())  # type: ignore[arg-type]

    class Broken(Mine):
        def write(self, rows: pa.Table) -> None:
            raise OSError("disk full")

    with pytest.raises(DownstreamError, match="Broken did not take batch 3: OSError: disk full"):
        CustomSink(Broken()).apply(SHAPE, BatchId("q", 3), 0, changes({(1, 1): "a"}))


# --- a search index ---


@pytest.fixture
def index() -> Iterator[IndexServer]:
    server = IndexServer("Basic ZWxhc3RpYzpwQHNz")
    yield server
    server.close()


def bulk(index: IndexServer, **more: Any) -> BulkSink:
    return BulkSink(f"http://elastic:p%40ss@127.0.0.1:{index.port}", "cities", **more)


def index_rows(index: IndexServer) -> dict[tuple[int, int], str]:
    return {(found["replicad_shard"], found["id"]): found["name"] for found in index.documents.values()}


def test_an_index_follows_and_a_repeated_batch_is_harmless(index: IndexServer) -> None:
    sink = bulk(index)
    sink.prepare(SHAPE)
    for _ in range(2):
        done = sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a", (1, 2): "b"}, [(1, 9)]))
        assert (done.written, done.deleted) == (2, 0)
    done = sink.apply(SHAPE, BatchId("q", 1), 0, changes({(1, 1): "A"}, [(1, 2)], seq=5))
    assert (done.written, done.deleted) == (1, 1)
    assert index_rows(index) == {(1, 1): "A"}
    assert sink.stale_ids(SHAPE, 1, 6, 10).to_pylist() == [1]
    assert sink.stale_ids(SHAPE, 1, 5, 10).to_pylist() == []


def test_rows_of_a_node_that_was_paused_replace_no_newer_document(index: IndexServer) -> None:
    sink = bulk(index)
    batch = BatchId("q", 4, last_pod=9)

    def paused() -> Iterator[EnrichedRows]:  # its rows are loaded, and a successor writes the same batch and the next
        sink.apply(SHAPE, batch, 0, changes({(1, 1): "v8", (1, 3): "v8"}, seq=8))
        sink.apply(SHAPE, BatchId("q", 5, last_pod=12), 0, changes({(1, 1): "v12"}, [(1, 2), (1, 3)], seq=12))
        yield from changes({(1, 1): "old", (1, 2): "old"}, [(1, 3)], seq=8)

    with pytest.raises(DownstreamError, match=r"document 1:1 of pod 12, and the batch ends at pod 9: another driver"):
        sink.apply(SHAPE, batch, 0, paused())
    assert index_rows(index) == {(1, 1): "v12"}


def test_rows_of_a_backfill_behind_a_newer_touch_are_left_out_and_counted_so(index: IndexServer) -> None:
    sink = bulk(index)
    sink.apply(SHAPE, BatchId("q", 0, last_pod=20), 0, changes({(1, 1): "of pod 20"}, [(1, 2)], seq=20))
    done = sink.apply(
        SHAPE, BatchId("q", 1, last_pod=20), 0, changes({(1, 1): "of pod 7", (1, 5): "of pod 7"}, [(1, 2)], seq=7)
    )
    assert (done.written, done.deleted) == (1, 0)
    assert index_rows(index) == {(1, 1): "of pod 20", (1, 5): "of pod 7"}


def test_rows_that_were_loaded_long_ago_are_loaded_again(index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index forgets the version of a deleted document, and a row from before would come back."""
    sink = bulk(index)
    clock = [1000.0]
    monkeypatch.setattr("replicad.spark.sinks.bulk._now", lambda: clock[0])

    def paused() -> Iterator[EnrichedRows]:
        clock[0] += 30
        yield from changes({(1, 2): "fresh"}, seq=5)
        clock[0] += 50
        sink.apply(SHAPE, BatchId("q", 0), 0, changes({}, [(1, 1)], seq=9))
        index.forget_deleted()
        yield from changes({(1, 1): "old"}, seq=5)

    with pytest.raises(
        DownstreamUnavailable, match="were loaded more than 45 s ago and not sent: this process was paus"
    ):
        sink.apply(SHAPE, BatchId("q", 0), 0, paused())
    assert index_rows(index) == {(1, 2): "fresh"}


def test_a_busy_index_is_asked_again_for_what_it_did_not_take(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.spark.sinks.bulk._FIRST_PAUSE", 0.01)
    index.busy, index.away = 3, 2
    bulk(index).apply(SHAPE, BatchId("q", 0), 0, changes({(1, number): "x" for number in range(5)}))
    assert len(index.documents) == 5
    index.busy = 10**6
    with pytest.raises(DownstreamError, match="too busy for 1 documents"):
        bulk(index, patience=0.05).apply(SHAPE, BatchId("q", 1), 0, changes({(1, 1): "y"}))


def test_requests_to_an_index_are_bounded(index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicad.spark.sinks.bulk.MAX_BYTES", 1000)
    bulk(index).apply(SHAPE, BatchId("q", 0), 0, changes({(1, number): "x" * 50 for number in range(100)}))
    assert len(index.documents) == 100
    assert index.requests.count("/_bulk") > 10


def test_what_an_index_refuses_is_said_and_secrets_are_not(index: IndexServer) -> None:
    index.refuse = "1:2"
    with pytest.raises(DownstreamError, match=r"refuses document 1:2: .*mapper_parsing"):
        bulk(index).apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a", (1, 2): "b"}))
    with pytest.raises(UsageError, match="refuses us with status 401"):
        BulkSink(f"http://elastic:wrong@127.0.0.1:{index.port}", "cities").prepare(SHAPE)
    with pytest.raises(DownstreamError, match="no answer from") as caught:
        BulkSink("http://elastic:p%40ss@127.0.0.1:1", "cities").prepare(SHAPE)
    assert "p%40ss" not in str(caught.value) + repr(bulk(index))
    with pytest.raises(UsageError, match="document_id"):
        bulk(index, document_id="{key}")
    with pytest.raises(UsageError, match="give one such as https"):
        BulkSink("search.example.org", "cities")


MORE: dict[str, pa.DataType] = {
    "at": pa.timestamp("us", tz="UTC"),
    "raw": pa.binary(),
    "tags": pa.list_(pa.string()),
    "price": pa.decimal128(8, 2),
    "count": pa.decimal128(30, 0),
    "few": pa.decimal128(18, 0),
    "area": pa.string(),
    "more": pa.string(),
}
TYPED = Shape(pa.schema([*SHAPE.schema, *MORE.items()]), "id", {"area": "numeric", "more": "jsonb", "name": "text"})


def documents(index: IndexServer, *rows: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    given = [{"id": number, "name": "x", "_shard": 1, "_seq": 1, **row} for number, row in enumerate(rows)]
    found = EnrichedRows(pa.Table.from_pylist(given, TYPED.schema), KEYS.empty_table())
    bulk(index, document_id="{id}", **more).apply(TYPED, BatchId("q", 0), 0, [found])
    return [index.documents[str(one["id"])] for one in given]


def test_documents_hold_every_type_as_json(index: IndexServer) -> None:
    first, second, third = documents(
        index,
        {"name": "Ågren\n", "at": 0, "raw": b"\x00", "tags": ["a", None], "count": Decimal(1)},
        {"price": Decimal("5.00"), "few": Decimal(7), "area": "5", "more": '{"a": [1, 2],\n "c": {"b": 0.10}}'},
        {"price": Decimal("0.05"), "count": Decimal(10**29), "area": "NaN", "more": None},
    )
    assert first["name"] == "Ågren\n"
    assert (first["at"], first["raw"], first["tags"]) == ("1970-01-01T00:00:00+00:00", "AA==", ["a", None])
    assert (second["price"], second["few"], second["area"]) == (5.0, 7, 5.0)
    assert second["more"] == {"a": [1, 2], "c": {"b": 0.1}}
    assert (third["price"], third["count"], third["area"], third["more"]) == (0.05, 1e29, None, None)
    assert {name: index.mapping[name] for name in (".area", ".price", ".count", ".few")} == {
        ".area": "float", ".price": "float", ".count": "float", ".few": "long",
    }  # fmt: skip
    assert index.cut == [], "the first number of a column must not make whole numbers of the others"
    with pytest.raises(RowRefused, match="object mapping"):
        documents(index, {"more": "[1]"})
    with pytest.raises(RowRefused, match="is not JSON"):
        documents(index, {"more": '{"a": NaN}'})
    index.mapping.clear()
    (as_text,) = documents(index, {"more": '{"a": 1}'}, json="text")
    assert as_text["more"] == '{"a": 1}'


# --- Delta ---


def delta_rows(uri: Path) -> dict[tuple[int, int], str]:
    import deltalake

    return held(pa.table(deltalake.DeltaTable(str(uri)).to_pyarrow_table()).to_pylist())


@pytest.fixture(params=[False, True], ids=["in the driver", "in tasks"])
def _staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes stay in memory, or are staged in a file for the driver, as tasks of Spark do."""
    monkeypatch.setattr(delta, "_in_task", lambda: request.param)


@pytest.mark.usefixtures("_staged")
def test_a_delta_table_takes_a_batch_once_and_whole(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "t"))
    sink.prepare(SHAPE)
    first = [sink.apply(SHAPE, BatchId("q", 0), task, changes({(task, 1): "a", (task, 2): "b"})) for task in (0, 1)]
    assert delta_rows(tmp_path / "t") == {}
    sink.commit(BatchId("q", 0), first)
    DeltaSink(str(tmp_path / "t")).prepare(SHAPE)
    assert len(delta_rows(tmp_path / "t")) == 4
    assert sink.apply(SHAPE, BatchId("q", 0), 0, changes({(0, 1): "again"})).repeated
    late = [sink.apply(SHAPE, BatchId("q", 1), 0, changes({(0, 1): "A"}, [(0, 2), (0, 9)], seq=7))]
    assert sink.commit(BatchId("q", 1), late) == 1
    assert sink.commit(BatchId("q", 1), late[:0]) == 0
    assert delta_rows(tmp_path / "t") == {(0, 1): "A", (1, 1): "a", (1, 2): "b"}
    assert sink.stale_ids(SHAPE, 1, 7, 10).to_pylist() == [1, 2]
    assert list((tmp_path / "t").glob("_replicad/q/*")) == []
    with pytest.raises(UsageError, match="other columns"):
        sink.prepare(Shape(pa.schema([*SHAPE.schema, ("more", pa.string())]), "id"))


def test_a_zombies_commit_of_a_delta_batch_changes_nothing(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "t"))
    sink.prepare(SHAPE)
    zombie = [sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "zombie"}))]
    successor = [sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "successor"}))]
    sink.commit(BatchId("q", 0), successor)
    sink.commit(BatchId("q", 0), zombie)
    assert delta_rows(tmp_path / "t") == {(1, 1): "successor"}


def test_a_delta_table_that_cannot_be_written_is_an_outage_and_one_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_in_task", lambda: True)
    assert DeltaSink(f"file://{tmp_path}/t").uri == str(tmp_path / "t")
    assert DeltaSink("s3a://bucket/t").uri == "s3://bucket/t"
    with pytest.raises(UsageError, match=r"nothing://x/y: .*; give a path, s3://"):
        DeltaSink("nothing://x/y").prepare(SHAPE)
    sink = DeltaSink(str(tmp_path / "t"))
    sink.prepare(SHAPE)
    (tmp_path / "t/_replicad").write_text("in the way")
    with pytest.raises(DownstreamUnavailable, match="cannot be written"):
        sink.apply(SHAPE, BatchId("q", 0), 0, changes({(1, 1): "a"}))
