"""The bell on a real Postgres: it rings for each id that is taken, holds nothing for long, and is only a hint."""

from __future__ import annotations

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.positions.bell import SECONDS, Bell, LastValues, Waits
from replicad.positions.horizon import Horizon, LockSource
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE


async def made(db: Database) -> tuple[int, int]:
    await db.execute("CREATE TABLE t (id bigserial PRIMARY KEY)")
    row = await db.fetch_row("SELECT 't'::regclass::oid, 't_id_seq'::regclass::oid")
    assert row is not None
    return row[0], row[1]


async def rung(waits: Waits, values: LastValues, since: float = 0.0) -> int:
    """Arm the bell, and wait until it rings."""
    rings: list[int] = []
    event = trio.Event()

    def ring(moved: int) -> None:
        rings.append(moved)
        event.set()

    waits.arm(values, since, ring)
    await event.wait()
    assert len(rings) == 1
    return rings[0]


@pytest.mark.parametrize("used", [False, True])
async def test_it_rings_once_for_the_next_id_and_for_nothing_else(database: Database, used: bool) -> None:
    _, sequence = await made(database)
    if used:
        await database.execute("INSERT INTO t DEFAULT VALUES")
    known: int | None = 1 if used else None
    with trio.fail_after(PATIENCE):
        async with Bell(database, 0.002).waiting() as waits:
            for number in range(2, 52):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rung, waits, {sequence: known})
                    if number % 10 == 0:
                        await trio.sleep(0.1)  # it waits for nothing meanwhile
                    known = await database.fetch_value("INSERT INTO t DEFAULT VALUES RETURNING id")
                    committed_at = trio.current_time()
                assert trio.current_time() - committed_at < SECONDS
            with trio.move_on_after(1.5 * SECONDS) as silent:
                await rung(waits, {sequence: known})
            assert silent.cancelled_caught


async def test_it_does_not_ring_when_it_was_disarmed(database: Database) -> None:
    _, sequence = await made(database)
    with trio.fail_after(PATIENCE):
        async with Bell(database, 0.002).waiting() as waits:
            rings: list[int] = []
            waits.arm({sequence: None}, 0.0, rings.append)
            waits.disarm()
            await database.execute("INSERT INTO t DEFAULT VALUES")
            assert await rung(waits, {sequence: None}) == sequence
            assert not rings


async def test_an_id_that_was_taken_before_it_is_armed_rings_at_once(database: Database) -> None:
    _, sequence = await made(database)
    async with Bell(database, 3600.0).waiting() as waits:  # looks at the beginning, and an hour later
        await database.execute("INSERT INTO t DEFAULT VALUES")
        with trio.fail_after(PATIENCE):
            assert await rung(waits, {sequence: None}) == sequence


async def test_a_locked_or_removed_sequence_fails_the_wait_and_holds_up_nothing(database: Database) -> None:
    _, sequence = await made(database)
    async with database.connection() as other:
        await other.execute("BEGIN; LOCK TABLE t; ALTER SEQUENCE t_id_seq INCREMENT 1")
        with pytest.raises(DatabaseError):
            async with Bell(database, 0.002).waiting() as waits:
                await rung(waits, {sequence: None})
        await other.execute("ROLLBACK")
    await database.execute("DROP TABLE t")
    with pytest.raises(DatabaseError):
        async with Bell(database, 0.002).waiting() as waits:
            await rung(waits, {sequence: None})


async def test_a_horizon_is_at_rest_only_when_nothing_but_an_id_can_move_a_position(database: Database) -> None:
    table, sequence = await made(database)
    async with Horizon(database) as horizon:
        assert horizon.at_rest() is None
        horizon.watch("t", LockSource(table, sequence))
        assert horizon.at_rest() is None
        with trio.fail_after(PATIENCE):
            while horizon.at_rest() != {sequence: None}:
                await horizon.poll()
            async with database.connection() as writer:
                await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
                await horizon.poll()
                assert horizon.at_rest() is None, "its end can"
                await writer.execute("COMMIT")
            while horizon.at_rest() != {sequence: 1}:
                await horizon.poll()
            async with database.connection() as writer:
                await writer.execute(
                    "BEGIN; SET LOCAL synchronous_commit = off; INSERT INTO t DEFAULT VALUES; ROLLBACK"
                )
            reading = (await horizon.poll())["t"]
            assert (horizon.at_rest() is None) == (reading.position != 2), "a flush can"
            async with database.connection() as writer:
                await writer.execute("BEGIN; ALTER SEQUENCE t_id_seq INCREMENT 1")
                await horizon.poll()
                assert horizon.at_rest() is None, "the end of a lock can"
                await writer.execute("ROLLBACK")
