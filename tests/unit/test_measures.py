"""The counts of what the clients of a stream were sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from replicad.daemon.journal import Channel
from replicad.streams.serving.counts import MINUTE, SentCounts


def copied(sent: SentCounts, *, size: int, readers: int) -> None:
    before = Channel("events", {}).statistics()
    sent.add_copy(before, replace(before, appended_lines=1, appended_bytes=size, readers=readers))


async def test_bytes_count_once_for_each_client_until_a_minute_has_passed(autojump_clock: MockClock) -> None:
    sent = SentCounts()
    copied(sent, size=10, readers=3)
    assert (sent.bytes_last_minute, sent.rows) == (30, 3)
    await trio.sleep(MINUTE / 2)
    copied(sent, size=5, readers=1)
    assert sent.bytes_last_minute == 35
    await trio.sleep(MINUTE / 2)
    assert sent.bytes_last_minute == 5
    await trio.sleep(MINUTE / 2)
    assert (sent.bytes_last_minute, sent.rows) == (0, 4)


@pytest.mark.parametrize("pause", [0.01, 1.0, 7.3])
async def test_the_memory_for_a_minute_is_bounded(autojump_clock: MockClock, pause: float) -> None:
    sent = SentCounts()
    for _ in range(1000):
        copied(sent, size=1, readers=1)
        await trio.sleep(pause)
    assert 0 < len(sent._bytes) <= MINUTE
    assert sent.bytes_last_minute == pytest.approx(min(1000, MINUTE / pause), abs=max(1, 1 / pause))


async def test_without_readers_nothing_is_sent() -> None:
    sent = SentCounts()
    copied(sent, size=10, readers=0)
    assert (sent.bytes_last_minute, sent.rows) == (0, 0)
