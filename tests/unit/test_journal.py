"""The journal: what a reader gets, and what a laggard may cost."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from replicad.daemon.journal import Channel, JournalLimits, Reader
from replicad.errors import SlowReader


def silent() -> None:
    pass


def drain(reader: Reader) -> bytes:
    taken = []
    while data := reader.take_nowait():
        taken += data
    return b"".join(taken)


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=9), st.integers(0, 3)), max_size=60),
)
def test_every_reader_gets_every_chunk_once_and_in_order(steps: list[bytes | int]) -> None:
    """Steps are appends (bytes) and takes (the number of a reader)."""

    async def scenario() -> None:
        channel = Channel("s", {"master": 0})
        readers = [channel.subscribe(0, silent, extended=True) for _ in range(4)]
        seen = [b""] * 4
        written = b""
        for step in steps:
            if isinstance(step, bytes):
                await channel.append(step)
                written += step
            else:
                seen[step] += b"".join(readers[step].take_nowait())
        for number, reader in enumerate(readers):
            assert seen[number] + drain(reader) == written

    trio.run(scenario)


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
    assert [reader.fallen for reader in (stuck, *quick)] == [True, False, False, False]


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
    with pytest.raises(SlowReader):
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
