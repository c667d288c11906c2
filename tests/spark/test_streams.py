"""The source for streams, call by call as Spark makes them, against a daemon in memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pyarrow as pa
import pytest
from fake_daemon import FakeDaemon
from harness import make_source, struct, through_json

from replicad.errors import DataLoss, UnknownStream
from tests.conftest import PATIENCE


def options(daemon: FakeDaemon, **more: str) -> dict[str, str]:
    return {"port": str(daemon.port), "stream": "events", "pollTimeout": "0", "retryInterval": "10ms", **more}


class Query:
    """A streaming query on a stream; `offsets` is its checkpoint."""

    def __init__(self, found: dict[str, str], offsets: list[dict[str, Any]] | None = None) -> None:
        self.source = make_source(found)
        self.reader: Any = self.source.streamReader(struct(self.source))
        self.offsets = offsets or [through_json(self.reader.initialOffset())]

    def trigger(self) -> list[tuple[str, int, str]]:
        """The rows of one micro-batch."""
        end = through_json(self.reader.latestOffset(self.offsets[-1], self.reader.getDefaultReadLimit()))
        if end == self.offsets[-1]:
            return []
        self.offsets.append(end)
        return self.read(-2, -1)

    def read(self, start: int, end: int) -> list[tuple[str, int, str]]:
        rows: list[dict[str, Any]] = []
        for one in self.reader.partitions(self.offsets[start], self.offsets[end]):
            batches = list(self.reader.read(one))
            rows.extend(pa.Table.from_batches(batches).to_pylist() if batches else [])
        return [(row["instance"], row["token"], row["row"]) for row in rows]


def fill(daemon: FakeDaemon, count: int = 6) -> list[tuple[str, int, str]]:
    return [("one", daemon.append("events", "one", number), str(number)) for number in range(count)]


def test_rows_come_once_in_order_and_again_for_a_replay(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon, maxOffsetsPerTrigger="4"))
    assert query.trigger() == rows[:4]
    assert query.trigger() == rows[4:]
    assert query.trigger() == []
    more = fill(daemon, 2)
    again = Query(options(daemon), query.offsets)
    assert again.read(0, 1) == rows[:4]
    assert again.trigger() == more


def test_a_query_begins_where_it_is_told_to(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    assert Query(options(daemon, startingOffsets="latest")).trigger() == []
    assert Query(options(daemon, startingOffsets=str(rows[2][1]))).trigger() == rows[3:]
    daemon.trimmed["events"] = rows[1][1]
    assert Query(options(daemon)).trigger() == rows[2:]


def test_a_position_that_moves_without_rows_ends_a_batch(daemon: FakeDaemon) -> None:
    rows = fill(daemon, 2)
    query = Query(options(daemon))
    daemon.tops["events"] = rows[-1][1] + 10  # rolled-back ids
    assert query.trigger() == rows
    assert query.trigger() == []


def test_a_gap_in_the_tokens_that_is_larger_than_a_batch_takes_one_batch(daemon: FakeDaemon) -> None:
    """A stream of changes has gaps of millions, where a partition of its table ends."""
    rows = fill(daemon, 2)
    far = [("one", 10**9, '"far"'), ("one", 10**9 + 1, '"farther"')]
    daemon.streams["events"] += [(token, instance, row) for instance, token, row in far]
    daemon.tops["events"] = 3 * 10**9
    query = Query(options(daemon, maxOffsetsPerTrigger="100"))
    assert query.trigger() == rows
    assert query.trigger() == far
    assert query.trigger() == []
    assert query.offsets[-1]["t"].endswith(str(3 * 10**9))


def test_a_trigger_waits_for_a_row_and_no_longer_than_it_may(daemon: FakeDaemon) -> None:
    fill(daemon, 1)
    query = Query(options(daemon, startingOffsets="latest", pollTimeout="300s"))
    timer = threading.Timer(0.2, daemon.append, ("events", "two", "late"))
    timer.start()
    started = time.monotonic()
    assert [row[2] for row in query.trigger()] == ['"late"']
    assert time.monotonic() - started < PATIENCE
    query = Query(options(daemon, startingOffsets="latest", pollTimeout="100ms"))
    started = time.monotonic()
    assert query.trigger() == []
    assert time.monotonic() - started < PATIENCE


def test_rows_that_were_trimmed_are_data_loss_or_a_warning(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    daemon.trimmed["events"] = rows[3][1]
    with pytest.raises(DataLoss, match=r"events after .* are lost.*failOnDataLoss=false"):
        query.trigger()
    daemon.streams["events"] = daemon.streams["events"][4:]
    assert Query(options(daemon, failOnDataLoss="false"), query.offsets[:1]).trigger() == rows[4:]


def test_a_stream_restored_to_a_time_before_the_checkpoint_is_read_from_its_first_row(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    assert query.trigger() == rows
    daemon.epoch = "ba9876543210"
    with pytest.raises(DataLoss, match=r"stream events cannot go on behind the checkpoint.*from its first row"):
        query.trigger()
    assert Query(options(daemon, failOnDataLoss="false"), query.offsets).trigger() == rows


def test_a_fork_above_the_checkpoint_is_not_noticed(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    assert query.trigger() == rows
    daemon.fork("events", "ba9876543210", rows[-1][1])
    more = fill(daemon, 2)
    assert query.trigger() == more
    assert query.trigger() == []
    assert Query(options(daemon), query.offsets).read(0, 1) == rows, "a replay of a batch of before"


def test_a_fork_below_the_checkpoint_is_data_loss_or_reading_goes_on_from_it(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    assert query.trigger() == rows
    fork = rows[3][1]
    daemon.fork("events", "ba9876543210", fork)
    more = fill(daemon, 5)
    message = rf"history of stream events forked after {fork}, .* at \S+!{rows[-1][1]}: .*from ba9876543210!{fork}"
    with pytest.raises(DataLoss, match=message):
        query.trigger()
    lenient = Query(options(daemon, failOnDataLoss="false"), query.offsets)
    assert lenient.trigger() == more
    assert lenient.trigger() == []


def test_a_batch_that_was_planned_before_a_fork_below_its_end_is_data_loss_or_is_read_as_it_is_now(
    daemon: FakeDaemon,
) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    assert query.trigger() == rows
    fork = rows[3][1]
    daemon.fork("events", "ba9876543210", fork)
    more = fill(daemon, 5)
    with pytest.raises(DataLoss, match=f"forked after {fork}"):
        Query(options(daemon), query.offsets).read(0, 1)
    lenient = Query(options(daemon, failOnDataLoss="false"), query.offsets)
    assert lenient.read(0, 1) == [*rows[:4], *more[:2]], "as far as the batch was planned"
    assert lenient.trigger() == more, "those above the fork again"


def test_starting_offsets_above_a_fork_is_refused_with_the_token_to_begin_with(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    old, fork = daemon.epoch, rows[3][1]
    daemon.fork("events", "ba9876543210", fork)
    with pytest.raises(DataLoss, match=f"Set startingOffsets to ba9876543210!{fork}"):
        Query(options(daemon, startingOffsets=f"{old}!{rows[-1][1]}"))


def test_an_unknown_stream_is_said_at_once(daemon: FakeDaemon) -> None:
    with pytest.raises(UnknownStream):
        Query(options(daemon))


def test_a_daemon_that_restarts_is_waited_for(daemon: FakeDaemon) -> None:
    rows = fill(daemon)
    query = Query(options(daemon))
    daemon.stop()
    threading.Timer(0.2, daemon.start).start()
    assert query.trigger() == rows
