"""When the daemon has Postgres move a low-water mark, and that a failure to do so fails no ack."""

from __future__ import annotations

from typing import Any, cast

import trio
import trio.testing

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database
from replicad.tubes.commands import Part
from replicad.tubes.pods import MARK_EVERY, MARK_PAUSE, LowMarks


class Calls:
    """A database that notes the arguments of its calls, and refuses the first."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    async def fetch_value(self, _query: str, *args: object) -> Any:
        self.seen.append(args)
        if len(self.seen) == 1:
            raise DatabaseError("gone")


async def test_a_mark_moves_once_in_thousands_of_acks_up_to_the_position_of_the_last_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    db = Calls()
    marks = LowMarks(cast("Database", db), "tube")
    half = MARK_EVERY // 2
    await marks.note_acks("a", Part(0, 2), MARK_EVERY)  # nothing was read here: the position is unknown
    assert db.seen == []
    marks.note_position("a", Part(0, 2), 70, "g")
    marks.note_position("a", Part(1, 2), 80, "g")
    await marks.note_acks("a", Part(0, 2), 1)  # refused, and logged only
    await trio.sleep(MARK_PAUSE)
    await marks.note_acks("a", Part(0, 2), half)
    await marks.note_acks("a", Part(1, 2), half)
    assert db.seen == [("a", 2, 0, 70, "g")]
    marks.note_position("a", Part(0, 2), 90, "g")
    await trio.sleep(MARK_PAUSE)
    await marks.note_acks("a", Part(0, 2), half)
    assert db.seen == [("a", 2, 0, 70, "g"), ("a", 2, 0, 90, "g")]
    marks.keep_only(["b"])
    await marks.note_acks("a", Part(1, 2), MARK_EVERY)
    assert len(db.seen) == 2


async def test_a_partition_that_is_emptied_fast_moves_its_mark_a_few_times_a_second(
    autojump_clock: trio.testing.MockClock,
) -> None:
    db = Calls()
    marks = LowMarks(cast("Database", db), "tube")
    for acked in range(1, 101):
        marks.note_position("a", Part(0, 2), acked * MARK_EVERY, "g")
        await marks.note_acks("a", Part(0, 2), MARK_EVERY)
        await trio.sleep(MARK_PAUSE / 10)
    assert len(db.seen) == 10
    assert 8 <= len(db.seen) <= 11  # 2.5 seconds
