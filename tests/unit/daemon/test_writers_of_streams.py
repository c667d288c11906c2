"""The writers of a stream as readers are told of them: they join, are retired, and may be too many."""

from __future__ import annotations

from trio.testing import MockClock

from replicad.streams.serving.intervals import StreamIntervals

from .conftest import open_streams, settle


async def test_a_writer_is_listed_before_its_first_row_goes_out_and_leaves_when_it_is_retired(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True) as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        await streams.write("s", 1, writer="a")
        lines = await client.lines()
        assert lines.index("RDATA s a 1 1") > next(
            n for n, line in enumerate(lines) if line.startswith("WRITERS") and "a=" in line
        )
        assert "a" in streams.positions.writers["s"]
        await settle(1.5)
        known = dict(streams.store.streams["s"].writers)
        del known["a"]
        streams.store.change("s", writers=known)
        streams.store.tables["s"].retired.add("a")
        await streams.write("s", 2)
        await settle(2)
        assert any(line.startswith("WRITERS") and "a=" not in line for line in await client.lines())
        assert "a" not in streams.publisher.served["s"].numbers


async def test_a_writer_that_another_daemon_has_seen_first_is_known_by_the_number_in_a_token(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True, pace=StreamIntervals(ahead=2.0)) as streams:
        await streams.write("s", 1)
        number = (await streams.store.ensure_writers(streams.store.streams["s"], ["z"]))["z"]
        client = streams.connect()
        streams.store.insert("s", 5, writer="z")
        await client.say(f"REPLICATE s 1~{number}.5")
        streams.positions.tell("s", 1, z=5)
        await settle(2)
        assert not any("RDATA" in line or "ERROR" in line for line in await client.lines())
        await streams.write("s", 6, writer="z")
        assert "RDATA s z 6 1" in await client.lines()


async def test_too_many_writers_become_one_name_until_enough_are_retired(autojump_clock: MockClock) -> None:
    async with open_streams("s", by_writer=True, pace=StreamIntervals(max_listed=5)) as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        for id in range(1, 9):
            streams.store.insert("s", id, writer=f"w{id}")
        streams.positions.tell("s", 8)
        await settle(3)
        rows = [line.split()[3] for line in await client.lines() if "RDATA" in line]
        assert rows == [str(id) for id in range(1, 9)]
        assert "more than 5 writers" in streams.why("s")
        assert set(streams.publisher.served["s"].numbers) == {"+"}
        kept = dict(list(streams.store.streams["s"].writers.items())[:2])
        streams.store.change("s", writers=kept)
        await settle(2)
        await streams.write("s", 9, writer="w1")
        await settle(2)
        assert "RDATA s w1 9 1" in await client.lines()
        assert streams.why("s") == ""
        assert "+" not in streams.publisher.served["s"].numbers
