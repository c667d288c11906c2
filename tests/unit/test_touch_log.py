"""The log of touches that the downstreams of a local pipeline share: each has its own place."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from replicad.protocol.tokens import Cursor
from replicad.spark import touches
from replicad.spark.local.touchlog import BATCH_IDS, ID_BYTES, READ_BYTES, TouchChunk, TouchLog, ids_to_read
from replicad.spark.touches import deduplicate, touch_schema
from replicad.tubes.columns import schema


def chunk(number: int, ids: int = 2) -> TouchChunk:
    row = {"seq": number, "op": "U", "shard": 1, "ids": list(range(ids)), "payload": None, "ts": datetime.now(UTC)}
    return TouchChunk.of(number, [pa.RecordBatch.from_pylist([row], schema=schema(payload=True))], Cursor(number, 0))


def texts(number: int, ids: int, length: int) -> TouchChunk:
    keys = [f"{one:0{length}}" for one in range(ids)]
    row = {"seq": number, "op": "U", "shard": 1, "ids": keys, "payload": None, "ts": datetime.now(UTC)}
    pods = pa.RecordBatch.from_pylist([row], schema=schema(payload=True, keys="text"))
    return TouchChunk.of(number, [pods], Cursor(number, 0))


def log_of(*numbers: int, ids: int = 2) -> TouchLog:
    made = TouchLog({"a": 1, "b": 1})
    for number in numbers:
        made.add(chunk(number, ids))
    return made


def numbers(chunks: list[TouchChunk]) -> list[int]:
    return [one.number for one in chunks]


def test_each_downstream_takes_all_that_it_does_not_have() -> None:
    log = log_of(1, 2, 3)
    assert numbers(log.take("a", 0)) == [1, 2, 3]
    log.done("a", 2)
    assert numbers(log.take("a", 0)) == [3]
    assert numbers(log.take("b", 0)) == [1, 2, 3]


def test_a_chunk_is_finished_when_every_downstream_has_it() -> None:
    log = log_of(1, 2, 3)
    log.done("a", 3)
    assert log.take_finished() is None
    log.done("b", 2)
    finished = log.take_finished()
    assert finished is not None
    assert finished.end == Cursor(2, 0)
    assert log.weight == 2
    assert not log.is_empty
    log.done("b", 3)
    log.take_finished()
    assert log.is_empty


def test_a_downstream_never_goes_back() -> None:
    log = log_of(1, 2, 3)
    log.done("a", 3)  # the main thread has put all of it into the backlog
    log.done("a", 1)  # and the thread ends the batch that it had in hand
    assert log.take("a", 0) == []
    assert log.behind("a") == 0


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def waits(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


def ends(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_a_downstream_gathers_until_there_is_enough() -> None:
    log = log_of(1, ids=2)
    gathering = started(lambda: log.gather("a", 5, 60))
    assert waits(gathering)
    log.add(chunk(2, ids=2))
    assert waits(gathering)
    log.add(chunk(3, ids=2))
    assert ends(gathering)
    log.done("b", 3)
    for end in (log.stir, log.end):
        gathering = started(lambda: log.gather("b", 5, 60))
        assert waits(gathering)
        end()
        assert ends(gathering)
    assert ends(started(lambda: log.gather("b", 5, 60))), "nothing more comes"


def test_a_batch_is_bounded_and_has_one_chunk_at_least() -> None:
    log = log_of(1, 2, ids=BATCH_IDS)
    assert numbers(log.take("a", 0)) == [1]


def test_the_log_and_a_batch_are_bounded_in_bytes() -> None:
    """Ids of 2 kB, as the index of a primary key takes them."""
    log, length = TouchLog({"a": 1}), 2_000
    for number in (1, 2, 3):
        log.add(texts(number, 5_000, length))
    assert log.weight * ID_BYTES >= 3 * 5_000 * length
    taken = log.take("a", 0)
    assert numbers(taken) == [1], "two have more than BATCH_IDS times ID_BYTES"
    log.done("a", 2)
    log.take_finished()
    assert 5_000 * length <= log.weight * ID_BYTES < 3 * 5_000 * length
    log.done("a", 3)
    log.take_finished()
    assert log.weight == 0


def test_the_next_read_is_bounded_by_the_length_of_the_last_ids() -> None:
    assert ids_to_read(None, 100_000) <= 10_000, "nothing is known of their length"
    assert ids_to_read(chunk(1, 50_000), 100_000) == 100_000
    assert ids_to_read(texts(1, 100, 36), 100_000) == 100_000
    assert 2_000 * ids_to_read(texts(1, 100, 2_000), 100_000) <= READ_BYTES
    assert ids_to_read(texts(1, 1, 20_000_000), 100_000) == 1
    control = {"seq": 1, "op": "B", "shard": 1, "ids": [], "payload": "{}", "ts": datetime.now(UTC)}
    pods = pa.RecordBatch.from_pylist([control], schema=schema(payload=True))
    assert ids_to_read(TouchChunk.of(1, [pods], Cursor(1, 0)), 100_000) == 100_000


@pytest.mark.parametrize("text", [False, True])
def test_touches_are_merged_alike_whatever_their_number_and_order(text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    for count in (0, 1, 5, 40):
        rows = [(chance.choice((1, 2)), chance.randrange(30), seq) for seq in range(count)]
        made = [{"shard": shard, "id": f"ü{id_}" if text else id_, "seq": seq} for shard, id_, seq in rows]
        table = pa.Table.from_pylist(made, touch_schema(pa.string() if text else pa.int64()))
        newest = {(row["shard"], row["id"]): row["seq"] for row in made}
        expected = [{"shard": shard, "id": id_, "seq": newest[shard, id_]} for shard, id_ in sorted(newest)]
        for few in (1, 1000):
            monkeypatch.setattr(touches, "_FEW", few)
            found = deduplicate(table)
            assert (found.to_pylist(), found.schema) == (expected, table.schema)
            assert deduplicate(found).equals(found)


def test_what_a_downstream_wrote_and_may_lose_is_not_taken_twice_and_not_finished() -> None:
    log = log_of(1, 2, 3)
    log.wrote("a", 2)
    assert numbers(log.take("a", 0)) == [3]
    assert numbers(log.lacking("a")) == [1, 2, 3]
    assert log.behind("a") == 6
    log.done("b", 3)
    assert log.take_finished() is None
    log.done("a", 2)
    finished = log.take_finished()
    assert finished is not None
    assert finished.number == 2
    log.done("a", 3)  # the main thread has put the rest into the backlog
    assert log.take("a", 0) == []
