"""The bell on a real Postgres: it rings for each id that is taken, holds nothing for long, and is only a hint."""

from __future__ import annotations

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.positions.bell import SECONDS, Bell
from replicad.positions.horizon import Horizon, LockSource
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE


async def made(db: Database) -> tuple[int, int]:
    await db.execute("CREATE TABLE t (id bigserial PRIMARY KEY)")
    row = await db.fetch_row("SELECT 't'::regclass::oid, 't_id_seq'::regclass::oid")
    assert row is not None
    return row[0], row[1]


@pytest.mark.parametrize("used", [False, True])
async def test_it_rings_for_the_next_id_and_waits_no_longer_than_it_says(database: Database, used: bool) -> None:
    _, sequence = await made(database)
    if used:
        await database.execute("INSERT INTO t DEFAULT VALUES")
    known: int | None = 1 if used else None
    with trio.fail_after(PATIENCE):
        async with Bell(database, 0.002).waiting() as wait:
            for number in range(2, 52):
                began = trio.current_time()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait, {sequence: known}, 0.0)
                    if number % 10 == 0:
                        await trio.sleep(0.1)  # it waits for nothing meanwhile
                    known = await database.fetch_value("INSERT INTO t DEFAULT VALUES RETURNING id")
                    committed_at = trio.current_time()
                assert trio.current_time() - began < SECONDS or trio.current_time() - committed_at < SECONDS
            began = trio.current_time()
            await wait({sequence: known}, 0.0)
            assert trio.current_time() - began >= SECONDS / 2


async def test_an_id_that_was_taken_before_the_wait_rings_at_once(database: Database) -> None:
    _, sequence = await made(database)
    async with Bell(database, 1.0).waiting() as wait:  # looks at the beginning, and a second later
        await database.execute("INSERT INTO t DEFAULT VALUES")
        with trio.fail_after(PATIENCE):
            began = trio.current_time()
            await wait({sequence: None}, 0.0)
            at_once = trio.current_time() - began
            began = trio.current_time()
            await wait({sequence: 1}, 0.0)
        assert at_once < trio.current_time() - began


async def test_a_locked_or_removed_sequence_fails_the_wait_and_holds_up_nothing(database: Database) -> None:
    _, sequence = await made(database)
    async with database.connection() as other:
        await other.execute("BEGIN; LOCK TABLE t; ALTER SEQUENCE t_id_seq INCREMENT 1")
        with pytest.raises(DatabaseError):
            async with Bell(database, 0.002).waiting() as wait:
                await wait({sequence: None}, 0.0)
        await other.execute("ROLLBACK")
    await database.execute("DROP TABLE t")
    with pytest.raises(DatabaseError):
        async with Bell(database, 0.002).waiting() as wait:
            await wait({sequence: None}, 0.0)


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
