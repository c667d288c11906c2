"""The journal: what a reader gets, and what a laggard may cost."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from replicad.daemon import journal
from replicad.daemon.journal import KEPT, Channel, JournalLimits, Reader
from replicad.errors import SlowReader
from tests.lengths import examples


def silent() -> None:
    pass


def drain(reader: Reader) -> bytes:
    taken = []
    while data := reader.take_nowait():
        taken += data
    return b"".join(taken)


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=9), st.integers(0, 3), st.floats(0, 2 * KEPT)), max_size=60),
)
def test_every_reader_gets_every_chunk_once_and_in_order(steps: list[bytes | int | float]) -> None:
    """Steps are appends (bytes), takes (the number of a reader), and time that passes (seconds)."""

    async def scenario() -> None:
        channel = Channel("s", {"master": 0})
        readers = [channel.subscribe(0, silent, extended=True) for _ in range(4)]
        seen = [b""] * 4
        written = b""
        for step in steps:
            if isinstance(step, bytes):
                await channel.append(step)
                written += step
            elif isinstance(step, float):
                clock.jump(step)
                channel.tidy(trio.current_time())
                assert channel.statistics().bytes <= len(written)
            else:
                seen[step] += b"".join(readers[step].take_nowait())
        for number, reader in enumerate(readers):
            assert seen[number] + drain(reader) == written

    clock = MockClock()
    trio.run(scenario, clock=clock)


async def test_rows_that_all_readers_have_are_freed_after_some_seconds_and_those_of_a_laggard_stay() -> None:
    channel = Channel("s", {"master": 0})
    quick, slow = (channel.subscribe(0, silent, extended=False) for _ in range(2))
    for number in range(100):
        await channel.append(b"%d\n" % number)
    channel.seal({"master": 100})
    now = trio.current_time()
    assert len(drain(quick)) == channel.statistics().bytes
    channel.tidy(now + KEPT + 1)
    assert channel.statistics().chunks == 100, "a reader has yet to take them"
    drain(slow)
    channel.tidy(now + KEPT / 2)
    assert channel.statistics().chunks == 100, "a client that catches up may need them"
    channel.tidy(now + KEPT + 1)
    assert (channel.statistics().chunks, channel.statistics().bytes) == (0, 0)
    with pytest.raises(SlowReader):
        channel.subscribe(99, silent, extended=False)
    assert channel.subscribe(channel.boundary.index, silent, extended=False).take_nowait() == []


async def test_rows_behind_the_last_boundary_stay_for_who_joins_there() -> None:
    channel = Channel("s", {"master": 0})
    await channel.append(b"1\n")
    channel.seal({"master": 1})
    await channel.append(b"2\n")  # the copy is not complete
    channel.tidy(trio.current_time() + KEPT + 1)
    assert drain(channel.subscribe(channel.boundary.index, silent, extended=False)) == b"2\n"


async def test_rows_leave_memory_while_more_come_and_nobody_calls(autojump_clock: object) -> None:
    channel = Channel("s", {})
    for number in range(100):
        await channel.append(b"%d\n" % number)
        channel.seal({"master": number})
        await trio.sleep(1)
    assert channel.statistics().chunks <= KEPT + 2


async def test_a_boundary_is_where_a_late_subscriber_joins_without_gap_or_repeat() -> None:
    channel = Channel("s", {"master": 0})
    await channel.append(b"1\n")
    channel.seal({"master": 1})
    await channel.append(b"2\n")  # in the journal, but not sealed yet
    boundary = channel.boundary
    assert boundary.positions == {"master": 1}
    await channel.append(b"3\n")
    channel.seal({"master": 3})
    assert drain(channel.subscribe(boundary.index, silent, extended=False)) == b"2\n3\n"


async def test_lines_for_subscribers_by_name_pass_others_by() -> None:
    channel = Channel("s", {})
    plain, extended = (channel.subscribe(0, silent, extended=flag) for flag in (False, True))
    await channel.append(b"WRITERS s a b=1\n", extended=True)
    assert plain.take_nowait() == []
    await channel.append(b"x\n")
    assert drain(plain) == b"x\n"
    assert drain(extended) == b"WRITERS s a b=1\nx\n"


async def test_a_reader_that_took_nothing_while_the_journal_filled_costs_the_others_nothing(
    autojump_clock: object,
) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=1.0))
    stuck, *quick = [channel.subscribe(0, silent, extended=False) for _ in range(4)]
    await trio.sleep(1000)  # being at the head for long is no offence
    await channel.append(b"x" * 10)
    assert stuck.take_nowait()
    for _ in range(100):
        await trio.sleep(0.5)
        before = trio.current_time()
        await channel.append(b"x" * 10)
        assert trio.current_time() == before
        for reader in quick:
            drain(reader)
    assert [reader.fallen is not None for reader in (stuck, *quick)] == [True, False, False, False]


async def test_a_reader_that_never_reads_falls_and_costs_the_others_its_patience_once(autojump_clock: object) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=1.0))
    stuck = channel.subscribe(0, silent, extended=False)
    quick = [channel.subscribe(0, silent, extended=False) for _ in range(3)]
    began = trio.current_time()
    for _ in range(1000):
        await channel.append(b"x" * 10)
        for reader in quick:
            drain(reader)
        assert channel.statistics().bytes <= 100
    assert 1.0 <= trio.current_time() - began <= 1.2
    assert stuck.fallen
    with pytest.raises(SlowReader, match="you took nothing for 1 s \\(journal_patience\\)"):
        stuck.take_nowait()
    assert not any(reader.fallen for reader in quick)
    assert channel.statistics().fallen == 1


async def test_when_all_are_late_the_writer_waits_for_them_and_nobody_falls(autojump_clock: object) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=0.5))
    readers = [channel.subscribe(0, silent, extended=False) for _ in range(4)]
    got = [0] * 4

    async def read_slowly(number: int) -> None:
        while got[number] < 2000:
            await trio.sleep(0.3)
            got[number] += len(b"".join(readers[number].take_nowait()))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(read_slowly, number)
        for _ in range(200):
            await channel.append(b"x" * 10)
    assert got == [2000] * 4
    assert channel.statistics().fallen == 0


async def test_even_a_lone_reader_falls_when_its_next_chunk_is_too_old(autojump_clock: object) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100, max_age=30))
    stuck = channel.subscribe(0, silent, extended=False)
    began = trio.current_time()
    for _ in range(11):
        await channel.append(b"x" * 10)
    assert stuck.fallen
    assert 30 <= trio.current_time() - began < 31


async def test_a_closed_reader_frees_the_writer_at_once(autojump_clock: object) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100))
    reader = channel.subscribe(0, silent, extended=False)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            await channel.append(b"x" * 10)
        nursery.start_soon(channel.append, b"y")
        await trio.testing.wait_all_tasks_blocked()
        reader.close()
    assert channel.head == 11


async def test_the_number_of_chunks_is_bounded_like_their_bytes() -> None:
    channel = Channel("s", {}, JournalLimits(max_chunks=5))
    for _ in range(20):
        await channel.append(b"x")
    assert channel.statistics().chunks == 5


# --- readers with peers of their own ---

PACE = 100.0  # bytes per second


class Peer:
    """A reader whose peer takes `rate` bytes per second, from the time `stops` on nothing."""

    def __init__(self, channel: Channel, rate: float, stops: float = float("inf")) -> None:
        self._rate = rate
        self._stops = stops
        self._awake = trio.Event()
        self._began: float | None = None  # when the send began that is under way
        self._size = 0  # of that send
        self.taken = 0
        self.reader = channel.subscribe(0, self._wake, extended=False, progress=self.progress)

    def _wake(self) -> None:
        self._awake.set()

    def progress(self) -> int | None:
        """As of an outlet."""
        if self._began is None:
            return None
        seconds = max(0.0, min(trio.current_time(), self._stops) - self._began)
        return self.taken + min(self._size, int(seconds * self._rate))

    async def run(self) -> None:
        """Take until dropped."""
        with suppress(SlowReader):
            while True:
                self._awake = trio.Event()
                taken = self.reader.take_nowait()
                if not taken:
                    await self._awake.wait()
                for data in taken:
                    await self._send(data)

    async def _send(self, data: bytes) -> None:
        self._began, self._size = trio.current_time(), len(data)
        end = self._began + self._size / self._rate
        await trio.sleep_until(end if end <= self._stops else float("inf"))
        self._began = None
        self.taken += self._size


async def seconds_of_a_burst(
    channel: Channel, peers: list[Peer], chunks: int, every: list[Peer] | None = None
) -> float:
    """How long it takes to append a burst and to send it to all of `every`."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(_take_little)
        for peer in peers:
            nursery.start_soon(peer.run)
        for _ in range(chunks):
            await channel.append(b"x" * 10)
        while any(peer.taken < chunks * 10 and peer.reader.fallen is None for peer in every or peers):
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    return trio.current_time() - began


async def _take_little(task_status: trio.TaskStatus[None]) -> None:
    """As in a real journal, a reader takes a small part of the window at a time."""
    with patch.object(journal, "TAKE_BYTES", 10):
        task_status.started()
        await trio.sleep_forever()


def a_channel() -> Channel:
    return Channel("s", {}, JournalLimits(max_bytes=100, max_age=1000, patience=1.0, pace=PACE))


@settings(max_examples=examples(40))
@given(
    steady=st.lists(st.sampled_from([150.0, 200.0, 1000.0, 1e6]), min_size=1, max_size=4),
    slow=st.lists(st.floats(1, PACE / 2), max_size=5),
    stopped=st.integers(0, 8),
    stops=st.sampled_from([0.0, 0.05, 0.5]),
)
@example(steady=[1e6, 1e6, 1e6], slow=[], stopped=8, stops=0.0)
@example(steady=[150.0], slow=[1.0, 50.0], stopped=8, stops=0.5)
def test_all_that_stop_or_are_too_slow_cost_the_others_their_patience_once_and_who_is_steady_stays(
    steady: list[float], slow: list[float], stopped: int, stops: float
) -> None:
    """A reader at half the pace owes a second every two seconds, so all that are too slow cost two at most. Those that
    stop may do so at the head, where it shows only when the slow ones have been dropped.
    """

    async def scenario() -> None:
        alone = a_channel()
        quiet = await seconds_of_a_burst(alone, [Peer(alone, rate) for rate in steady], 100)
        channel = a_channel()
        good = [Peer(channel, rate) for rate in steady]
        bad = [Peer(channel, rate) for rate in slow] + [Peer(channel, 1e6, stops) for _ in range(stopped)]
        took = await seconds_of_a_burst(channel, good + bad, 100, good)
        assert [peer.reader.fallen for peer in good] == [None] * len(good)
        assert took <= quiet + (2.2 if slow else 0) + (1.2 if stopped else 0) + 0.02

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_readers_that_stopped_long_ago_cost_nothing_wherever_they_stopped(autojump_clock: object) -> None:
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=1.0))
    quick = channel.subscribe(0, silent, extended=False)
    stopped = []
    for _ in range(30):  # each stops at a place of its own
        stopped.append(channel.subscribe(channel.head, silent, extended=False))
        await trio.sleep(0.5)
        before = trio.current_time()
        await channel.append(b"x" * 10)
        assert trio.current_time() == before
        drain(quick)
    assert [reader.fallen is not None for reader in stopped] == [True] * 20 + [False] * 10


async def test_a_reader_whose_session_got_no_turn_is_waited_for(autojump_clock: object) -> None:
    """Its socket is not full, so it is not to blame; what is too slow is this machine."""
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=1.0, max_age=1000))
    quick = channel.subscribe(0, silent, extended=False)
    waiting = channel.subscribe(0, silent, extended=False, progress=lambda: None)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            await channel.append(b"x" * 10)
        drain(quick)
        nursery.start_soon(channel.append, b"x" * 10)
        await trio.sleep(10)
        assert waiting.fallen is None
        drain(waiting)
    assert channel.head == 11


async def test_a_reader_below_the_pace_is_told_so(autojump_clock: object) -> None:
    channel = a_channel()
    slow, quick = Peer(channel, PACE / 4), Peer(channel, 1e6)
    await seconds_of_a_burst(channel, [slow, quick], 100, [quick])
    with pytest.raises(SlowReader, match="you took less than 100 bytes/s \\(journal_pace\\)"):
        slow.reader.take_nowait()


async def test_readers_that_all_lag_delay_nobody_and_stay(autojump_clock: object) -> None:
    channel = a_channel()
    peers = [Peer(channel, PACE / 10) for _ in range(3)]
    await seconds_of_a_burst(channel, peers, 100)
    assert [peer.reader.fallen for peer in peers] == [None] * 3
