"""The writer library in all its forms: positions wait for what is in flight, and writers come, go and die."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import asyncpg
import pytest
import trio
from adbc_driver_postgresql import dbapi

from replicad.errors import StreamRefused, UnknownStream
from replicad.positions.horizon import HolderKind
from replicad.streams import blocking_writer as blocking
from replicad.streams import writer as writers
from replicad.streams.registry import Registry
from replicad.streams.writer import open_writer

from .conftest import KILL_ONE, Facts, until

SYNAPSE_EXAMPLE = [
    ("reserve", 2, 1), ("reserve", 3, 1), ("complete", 3, 1), ("complete", 2, 3), ("reserve", 4, 3), ("reserve", 5, 3),
    ("reserve", 6, 3), ("complete", 5, 3), ("complete", 4, 5), ("complete", 6, 6),
]  # fmt: skip


# --- positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"]])
async def test_positions_follow_the_example_of_the_definition(facts: Facts, names: list[str]) -> None:
    await facts.db.execute("SELECT setval('facts_id_seq', 1)")
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_writer(facts.db, "facts", name)) for name in names]
        blocks: dict[int, AsyncExitStack] = {}
        for action, number, expected in SYNAPSE_EXAMPLE:
            writer = opened[number % len(opened)]
            if action == "reserve":
                blocks[number] = AsyncExitStack()
                assert await blocks[number].enter_async_context(writer.get_next()) == number
                await facts.insert(number, instance=writer.instance)
            else:
                await blocks.pop(number).aclose()
            assert (await facts.poll()).position == expected, (action, number)
            if len(opened) == 1:
                assert writer.get_current_token() == expected
            seen = await writer.positions()
            assert (seen.minimum, seen.maximum) == (expected, max(seen.per_writer.values()))
    assert facts.rows == {2, 3, 4, 5, 6}
    assert await facts.locks() == 0


async def test_a_writer_holds_back_its_own_position_and_a_stranger_that_of_all(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as one, open_writer(facts.db, "facts", "two") as two:
        async with one.get_next_mult(3) as ids:
            async with two.get_next() as mine:
                await facts.insert(mine, instance="two")
            assert (two.get_current_token(), one.get_current_token()) == (4, 0)
            assert one.get_minimum_and_maximum() == (0, ids[-1])
            reading = await facts.poll()
            assert (reading.position, reading.maximum) == (0, 4)
            assert reading.per_writer == {"one": 0, "two": 4, "three": 4}
            assert reading.held_by is not None
            assert (reading.held_by.kind, reading.held_by.application_name) == (HolderKind.RESERVATION, "one")
            assert await two.positions() == writers.Positions({"master": 4, "one": 0, "two": 4, "three": 4}, 0, 4)
            async with facts.transaction("somebody else") as stranger:
                await stranger.execute("INSERT INTO facts VALUES (replicad.stream_next('facts'))")
                await facts.spend(1)
                assert (await two.positions()).per_writer == {"master": 4, "one": 0, "two": 4, "three": 4}
                assert (await facts.poll()).per_writer == {"one": 0, "two": 4, "three": 4}
        assert (await facts.poll()).per_writer == {"one": 6, "two": 6, "three": 6}


async def test_ids_are_complete_after_failure_and_cancellation_too(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        with pytest.raises(ZeroDivisionError):
            async with writer.get_next():
                raise ZeroDivisionError
        with trio.move_on_after(0.05) as scope:
            async with writer.get_next_mult(2):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert writer.get_current_token() == 3
        assert (await facts.poll()).position == 3
        assert await facts.locks() == 0


async def test_many_tasks_share_a_writer_with_one_lock_and_a_bound_on_what_is_in_flight(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one", max_in_flight=10) as writer:
        most = 0

        async def write() -> None:
            nonlocal most
            async with writer.get_next() as number:
                most = max(most, writer.statistics().in_flight)
                await facts.insert(number)
                # a proof; a lock and its certificate, twice while they are handed over; however many ids are in flight
                assert 3 <= await facts.locks(of="one") <= 5

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(write)
            for _ in range(10):
                await facts.poll()
        assert 2 <= most <= 10
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=1, lost=0)
    assert (await facts.poll()).position == 60
    assert len(facts.rows) == 60


# --- forms in the caller's transaction, and without async --------------------------------------------------


async def test_an_id_is_reserved_inside_the_callers_own_asyncpg_transaction(facts: Facts) -> None:
    async def program(step: Callable[[str], None]) -> None:
        connection = await asyncpg.connect(facts.url)
        with pytest.raises(StreamRefused, match="begin it"):
            await writers.next_id(connection, "facts")
        transaction = connection.transaction()
        await transaction.start()
        number = await writers.next_id(connection, "facts")
        more = await writers.next_ids(connection, "facts", 3)
        assert (number, more) == (1, (2, 3, 4))
        await connection.executemany("INSERT INTO facts VALUES ($1)", [(i,) for i in (4, 1, 3)])
        await asyncio.to_thread(step, "written")
        await transaction.commit()
        await asyncio.to_thread(step, "committed")
        with pytest.raises(asyncpg.PostgresError, match="not reserved"):
            await connection.execute("INSERT INTO facts VALUES (2)")
        await connection.close()

    positions: dict[str, int | None] = {}
    token = trio.lowlevel.current_trio_token()

    def step(name: str) -> None:
        positions[name] = trio.from_thread.run(facts.poll, trio_token=token).position

    # An asyncio of its own, in a thread that inherits nothing of the bridge's.
    await trio.to_thread.run_sync(lambda: contextvars.Context().run(asyncio.run, program(step)))
    assert positions == {"written": 0, "committed": 4}
    assert facts.rows == {1, 3, 4}


async def test_an_id_is_reserved_inside_a_transaction_of_our_own_connections_too(facts: Facts) -> None:
    async with facts.transaction() as connection:
        number = await writers.next_id(connection, "facts")
        ids = await writers.next_ids(connection, "facts", 2)
        await facts.insert(number, *ids, via=connection)
        assert (await facts.poll()).position == 0
        await connection.execute("COMMIT")
    assert (await facts.poll()).position == 3
    assert facts.rows == {1, 2, 3}


async def test_programs_without_async_follow_the_same_example(facts: Facts) -> None:
    await facts.db.execute("SELECT setval('facts_id_seq', 1)")

    def program(poll: Callable[[], Any]) -> None:
        writer = blocking.BlockingWriter(dbapi.connect(facts.url), "facts", "one")
        with writer:
            blocks: dict[int, ExitStack] = {}
            for action, number, expected in SYNAPSE_EXAMPLE:
                if action == "reserve":
                    blocks[number] = ExitStack()
                    assert blocks[number].enter_context(writer.get_next()) == number
                else:
                    blocks.pop(number).close()
                assert poll().position == expected, (action, number)
                assert writer.get_current_token() == writer.positions().minimum == expected
        with dbapi.connect(facts.url) as connection:
            number = blocking.next_id(connection, "facts")
            assert blocking.next_ids(connection, "facts", 2) == (number + 1, number + 2)
            with connection.cursor() as cursor:
                cursor.execute(f"INSERT INTO facts VALUES ({number})")
            assert poll().position == 6
            connection.commit()
            assert poll().position == number + 2

    await trio.to_thread.run_sync(lambda: program(lambda: trio.from_thread.run(facts.poll)))
    assert facts.rows == {7}
    assert await facts.locks() == 0


async def test_threads_share_a_blocking_writer(facts: Facts) -> None:
    def program() -> None:
        with blocking.BlockingWriter(dbapi.connect(facts.url), "facts", "one") as writer:
            found: list[int] = []

            def write() -> None:
                for n in range(1, 6):
                    with writer.get_next_mult(n) as ids:
                        found.extend(ids)

            threads = [threading.Thread(target=write) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == list(range(1, 91))
            assert writer.get_current_token() == 90

    await trio.to_thread.run_sync(program)
    assert (await facts.poll()).position == 90


# --- writers that die --------------------------------------------------------------------------------------


async def test_a_writer_that_dies_lets_go_and_goes_on_with_a_new_connection(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        async with writer.get_next() as lost, facts.transaction() as open_before:
            async with writer.get_next() as saved:
                await facts.insert(saved, via=open_before)
                await until(facts.db, KILL_ONE)
                with pytest.raises(StreamRefused, match="not reserved"):
                    await facts.insert(lost)
                await facts.spend(10)
                assert (await facts.poll()).position == lost, "what was inserted before is covered by its transaction"
                await open_before.execute("COMMIT")
                assert (await facts.poll()).position == 12
                async with writer.get_next() as fresh:
                    await facts.insert(fresh)
                    assert (await facts.poll()).position == 12
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=2, lost=2)
        assert (await facts.poll()).position == fresh
        assert facts.rows == {saved, fresh}
        assert writer.get_current_token() == fresh


async def test_a_connection_that_does_not_answer_is_cut_and_the_writer_goes_on(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "COMPLETE_TIMEOUT", 0.1)
    async with open_writer(facts.db, "facts", "one") as writer, facts.transaction() as blocker:
        key = "SELECT pg_advisory_xact_lock(replicad.stream_lock_key($1, 1))"
        async with AsyncExitStack() as first:
            await first.enter_async_context(writer.get_next())
            async with writer.get_next():
                await blocker.execute(key, facts.stream.number)
                await first.aclose()  # cannot take the next bound
                async with writer.get_next() as number:
                    await facts.insert(number)
                    assert (await facts.poll()).position == number - 1
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=2, lost=1)
        assert writer.get_current_token() == number
        assert (await facts.poll()).position == number


async def test_what_cannot_be_reserved_is_refused_with_the_remedy(facts: Facts) -> None:
    await facts.db.execute("CREATE TABLE plain (id bigserial PRIMARY KEY)")
    await Registry(facts.db).add("plain", "plain", "id")
    with pytest.raises(StreamRefused, match=r"plain are not reserved.*lock_watch.*method reservation"):
        async with open_writer(facts.db, "plain"):
            pass
    with pytest.raises(UnknownStream, match=r"'nothing'.*streams: facts, plain"):
        async with open_writer(facts.db, "nothing"):
            pass
    async with open_writer(facts.db, "facts", "one") as writer:
        for n in (0, -1, 10_001):
            with pytest.raises(StreamRefused, match="ask for 1 to 10000"):
                async with writer.get_next_mult(n):
                    pass
        async with writer.get_next_mult(10_000) as ids:
            assert len(ids) == 10_000
        await facts.db.execute("ALTER SEQUENCE facts_id_seq CACHE 10")
        for _ in range(2):  # the first of a session's cache is above its bound, the next is not
            with pytest.raises(StreamRefused, match="CACHE 1"):
                async with writer.get_next(), writer.get_next():
                    pass
        await facts.db.execute("ALTER SEQUENCE facts_id_seq CACHE 1")
    await facts.db.execute(f"SELECT setval('facts_id_seq', {1 << 48})")
    with pytest.raises(StreamRefused, match="281474976710655"):
        await facts.db.execute("SELECT replicad.stream_next('facts')")
