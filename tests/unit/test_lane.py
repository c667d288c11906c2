"""A lane goes on whatever a copy raises: the failure is reported, and what readers got in part is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from replicad.daemon.journal import JournalLimits
from replicad.daemon.troubles import Troubles
from replicad.errors import (
    DatabaseError,
    DatabaseUnavailable,
    ReplicadError,
    RowUnreadable,
    SlowReader,
    TableReplaced,
    TokenExpired,
    UnknownStream,
)
from replicad.streams.chunks import Chunk
from replicad.streams.serving.lane import Lane


class FakeCopier:
    """Sends one row for each id, and raises what it is given, once."""

    linear = False
    one_writer = True

    def __init__(self, *failures: BaseException, sends_before: int = 0, batch: bool = False) -> None:
        self.failures = list(failures)
        self.sends_before = sends_before
        self.batch = batch

    async def copy(self, after: Any, upto: Any, send: Any) -> int:
        for number in range(after["master"] + 1, upto["master"] + 1):
            if self.failures and number == after["master"] + 1 + self.sends_before:
                raise self.failures.pop(0)
            token = None if self.batch and self.failures else number
            await send(Chunk(b"RDATA s master %d []\n" % number, "master", token))
        return int(upto["master"] - after["master"])

    async def blame(self, after: Any, upto: Any, error: Exception) -> RowUnreadable | None:
        return None


def lane_of(copier: FakeCopier, *writers: str, limits: JournalLimits | None = None) -> tuple[Lane, Troubles]:
    troubles = Troubles()
    made: Any = copier
    positions = dict.fromkeys(writers or ("master",), 0)
    lane = Lane(
        "s",
        made,
        positions,
        limits=limits or JournalLimits(),
        troubles=troubles,
        writers_of=lambda _, __: b"",
        epoch="g",
    )
    return lane, troubles


FAILURES = [
    OSError("disk"),
    MemoryError(),
    ValueError("defect"),
    AssertionError(),
    DatabaseError("no", sqlstate="42703"),
    DatabaseUnavailable("away"),
    TableReplaced("another"),
    UnknownStream("gone"),
    ExceptionGroup("several", [ValueError("one"), OSError("two")]),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("sends_before", [0, 2])
async def test_whatever_a_copy_raises_is_reported_and_tried_again_and_no_row_is_sent_twice(
    failure: Exception, sends_before: int, autojump_clock: trio.abc.Clock
) -> None:
    lane, troubles = lane_of(FakeCopier(failure, sends_before=sends_before))
    reader = lane.channel.subscribe(0, lambda: None, extended=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"master": 5})
        await trio.sleep(0.01)
        waits_quietly = isinstance(failure, DatabaseUnavailable | UnknownStream)
        assert bool(troubles.of("stream", "s")) != waits_quietly
        await trio.sleep(10)
        assert not troubles.current()
        lane.set_target({"master": 7})
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    got = [int(line.split()[3]) for line in b"".join(reader.take_nowait()).splitlines()]
    assert got == [1, 2, 3, 4, 5, 6, 7]


async def test_readers_that_got_half_a_batch_are_cut_and_others_get_it_whole(autojump_clock: trio.abc.Clock) -> None:
    lane, _ = lane_of(FakeCopier(ValueError("defect"), sends_before=2, batch=True))
    torn = lane.channel.subscribe(0, lambda: None, extended=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"master": 3})
        await trio.sleep(0.01)
        assert lane.channel.boundary.positions == {"master": 0}
        with pytest.raises(ReplicadError, match="reconnect and resume"):
            torn.take_nowait()
        whole = lane.channel.subscribe(lane.channel.boundary.index, lambda: None, extended=False)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert len(b"".join(whole.take_nowait()).splitlines()) == 3


async def test_a_client_may_come_back_within_a_copy_that_a_slow_reader_holds_up(autojump_clock: trio.abc.Clock) -> None:
    row = len(b"RDATA s master 1 []\n")
    lane, _ = lane_of(FakeCopier(), limits=JournalLimits(max_bytes=5 * row))
    slow = lane.channel.subscribe(0, lambda: None, extended=False)
    quick = lane.channel.subscribe(0, lambda: None, extended=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"master": 9})
        await trio.sleep(0.01)
        assert quick.take_nowait(), "and now the slow one keeps the window full"
        await trio.sleep(0.01)
        assert lane.channel.boundary.positions == {"master": 5}, "all that could be taken"
        quick.close()
        back = lane.channel.subscribe(lane.channel.boundary.index, lambda: None, extended=False)
        slow.take_nowait()
        await trio.sleep(0.01)
        assert [int(line.split()[3]) for line in b"".join(back.take_nowait()).splitlines()] == [6, 7, 8, 9]
        nursery.cancel_scope.cancel()


async def test_a_long_copy_has_boundaries_only_at_the_ends_of_batches(autojump_clock: trio.abc.Clock) -> None:
    class Slow(FakeCopier):
        async def copy(self, after: Any, upto: Any, send: Any) -> int:
            for number in range(1, 10):
                await send(Chunk(b"RDATA s master %d []\n" % number, "master", None if number % 3 else number))
                await trio.sleep(1)
            return 9

    lane, _ = lane_of(Slow())
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"master": 9})
        for _ in range(9):
            await trio.sleep(1)
            boundary = lane.channel.boundary
            assert boundary.index == boundary.positions["master"]
            seen.append(boundary.index)
        nursery.cancel_scope.cancel()
    assert set(seen) >= {3, 6}
    assert set(seen) <= {0, 3, 6, 9}


class RowsOfOneWriter(FakeCopier):
    """Sends rows of writer w only; the other one is idle."""

    one_writer = False

    async def copy(self, after: Any, upto: Any, send: Any) -> int:
        for number in range(after["w"] + 1, upto["w"] + 1):
            if self.failures and number > self.sends_before:
                raise self.failures.pop(0)
            await send(Chunk(b"RDATA s w %d []\n" % number, "w", number))
        return int(upto["w"] - after["w"])


@pytest.mark.parametrize("sends_before", [0, 3])
async def test_each_position_goes_on_from_the_one_before_also_where_a_copy_fails_halfway(
    sends_before: int, autojump_clock: trio.abc.Clock
) -> None:
    lane, _ = lane_of(RowsOfOneWriter(DatabaseError("broke off"), sends_before=sends_before), "w", "idle")
    reader = lane.channel.subscribe(0, lambda: None, extended=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"w": 5, "idle": 5})
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    told = {"w": 0, "idle": 0}
    for line in b"".join(reader.take_nowait()).decode().splitlines():
        word, _, writer, *tokens = line.split()
        if word == "POSITION":
            assert int(tokens[0]) == told[writer], line  # else the reader takes it for a gap
        told[writer] = int(tokens[1] if word == "POSITION" else tokens[0])
    assert told == {"w": 5, "idle": 5}


async def test_whoever_waits_for_writers_to_be_listed_goes_on_when_they_are(autojump_clock: trio.abc.Clock) -> None:
    lane, _ = lane_of(FakeCopier())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        with trio.fail_after(60):
            await lane.change_writers({"a"}, set()).wait()
            await lane.change_writers({"a"}, set()).wait()  # listed already
            await lane.change_writers(set(), set()).wait()
            first = lane.change_writers({"b"}, set())
            await trio.lowlevel.checkpoint()  # its announcement has begun
            for later in (lane.change_writers({"b"}, set()), lane.change_writers(set(), set()), first):
                await later.wait()
            assert lane.channel.boundary.positions.keys() == {"master", "a", "b"}
            waiting = lane.change_writers({"c"}, set())
            nursery.cancel_scope.cancel()
    with trio.fail_after(60):
        await waiting.wait()  # its stream has ended, and so has its subscription
        await lane.change_writers({"d"}, set()).wait()


async def test_after_rows_were_trimmed_unread_readers_are_cut_once_and_the_next_rows_are_sent(
    autojump_clock: trio.abc.Clock,
) -> None:
    """The copy of before the cut has no rows any more: the next one begins at the target, and is not refused again."""

    class Trimmed(FakeCopier):
        async def copy(self, after: Any, upto: Any, send: Any) -> int:
            if after["master"] < 5:
                raise TokenExpired("rows up to 5 were removed")
            return await super().copy(after, upto, send)

    lane, _ = lane_of(Trimmed())
    boundary = lane.channel.boundary
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.run)
        lane.set_target({"master": 7})
        await trio.sleep(1)
        assert lane.channel.boundary.positions == {"master": 7}
        with pytest.raises(SlowReader):  # a client that has caught up to 0 would miss the rows up to 7
            lane.channel.subscribe(boundary.index, lambda: None, extended=True)
        reader = lane.channel.subscribe(lane.channel.boundary.index, lambda: None, extended=True)
        lane.set_target({"master": 9})
        await trio.sleep(1)
        assert b"".join(reader.take_nowait()) == b"RDATA s master 8 []\nRDATA s master 9 []\n"
        nursery.cancel_scope.cancel()
