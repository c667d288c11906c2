"""History forks within one server: a dump is restored, a table truncated, a sequence set back."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from .ledger import Order
from .tables import LONE, MANY, TABLED, TABLES, Table
from .world import World, blocking, long, open_world

SLOW = Table("slow", slow=True)
STATES = ["alive", "down", "suspended"]


@asynccontextmanager
async def daemons(world: World, state: str) -> AsyncIterator[None]:
    """The daemons are in that state within, and serve afterwards."""
    for server in world.servers:
        if state == "down":
            await server.end(signal.SIGTERM)
        elif state == "suspended":
            server.suspend()
    yield
    for server in world.servers:
        if state == "down":
            server.start()
            await server.wait_ready()
        elif state == "suspended":
            server.resume()


@pytest.mark.parametrize(
    ("state", "custom", "one_transaction"),
    [
        long("alive", False, True),
        ("down", False, False),
        long("alive", False, False),
        long("alive", True, True),
        long("alive", True, False),
        long("down", True, True),
        long("suspended", False, True),
        long("suspended", True, False),
    ],
)
async def test_a_dump_is_restored_and_clients_have_what_the_tables_have(
    postgres_folder: Path, fork_template: Path, state: str, custom: bool, one_transaction: bool
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        await world.settle("before the dump")
        for table in TABLES:
            await blocking(world.write_rows, table, 30)
        await world.settle("before the dump", say=False)
        dump = await blocking(world.cluster.dump, custom=custom)
        for table in TABLES:
            await blocking(world.write_rows, table, 10)
        await world.settle("after the dump", say=False)
        async with daemons(world, state):
            await blocking(world.cluster.restore, dump, one_transaction=one_transaction)
            for table in TABLES:
                await blocking(world.write_rows, table, 20)
        await world.settle("after the restore")


@pytest.mark.parametrize("state", ["down", "suspended"])
async def test_a_table_that_is_restored_emptied_and_filled_again_before_anybody_looks_is_sent_in_full(
    postgres_folder: Path, fork_template: Path, state: str
) -> None:
    """The restored notes say what was shared with the table of the dump, not with its rows of now."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        for table in TABLES:
            await blocking(world.write_rows, table, 20)
        await world.settle("before the dump", say=False)
        await world.wait_noted()
        dump = await blocking(world.cluster.dump)
        async with daemons(world, state):
            await blocking(world.cluster.restore, dump, one_transaction=True)
            for table in TABLES:
                world.sql(table.truncate())
                await blocking(world.write_rows, table, 50)
        await world.settle("after the restore")


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
async def test_a_dump_is_restored_into_another_server_at_the_same_address(
    postgres_folder: Path, fork_template: Path, state: str
) -> None:
    """The new server has another system identifier, and ids and oids of its own."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        await world.settle("before the dump")
        for table in TABLES:
            await blocking(world.write_rows, table, 30)
        await world.settle("before the dump", say=False)
        dump = await blocking(world.cluster.dump)
        for table in TABLES:
            await blocking(world.write_rows, table, 10)
        await world.settle("after the dump", say=False)
        async with daemons(world, state):
            await blocking(world.cluster.move, dump)
            for table in TABLES:
                await blocking(world.write_rows, table, 20)
        await world.settle("at the new server")


@pytest.mark.long
@pytest.mark.parametrize("table_too", [False, True], ids=["same_table", "another_table"])
@pytest.mark.parametrize("state", STATES)
async def test_a_stream_that_is_removed_and_added_again_is_another_one(
    postgres_folder: Path, fork_template: Path, state: str, table_too: bool
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.tables = (MANY,)
        world.hold_all_kinds()
        await world.settle("before")
        await blocking(world.write_rows, MANY, 30)
        await world.settle("before it is removed", say=False)
        async with daemons(world, state):
            if table_too:
                world.sql(f"SELECT replicad.stream_remove('many'); DROP TABLE many; {MANY.create()}")
                await blocking(world.write_rows, MANY, 50)
            else:
                world.sql(f"SELECT replicad.stream_remove('many'); {MANY.register()}")
        await world.settle("after it was added again")


@pytest.mark.parametrize(
    ("state", "fewer"),
    [
        ("alive", (1, 0, -5)),
        long("down", (-5,)),
        long("suspended", (0,)),
        long("down", (1, 0)),
        long("suspended", (1, -5)),
    ],
)
async def test_a_table_that_begins_its_ids_again_and_climbs_on_in_one_transaction_is_sent_in_full(
    postgres_folder: Path, fork_template: Path, state: str, fewer: tuple[int, ...]
) -> None:
    """Some rows fewer than before, as many, and more."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        await world.settle("before")
        for rows in fewer:
            for table in TABLES:
                await blocking(world.write_rows, table, 5)
            await world.settle("before the next", say=False)
            async with daemons(world, state):
                for table in TABLES:
                    again = world.position_of(table) - rows
                    world.sql(f"SET application_name = 'w1'; {table.truncate()}; {table.insert(again)}")
            await world.settle(f"begun again with {rows} rows fewer")


@pytest.mark.long
@pytest.mark.parametrize("state", ["alive", "down"])
async def test_rows_removed_by_an_altered_sequence_are_gone_everywhere(
    postgres_folder: Path, fork_template: Path, state: str
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        await world.settle("before")
        for table in TABLES:
            await blocking(world.write_rows, table, 30)
        await world.settle("before the change", say=False)
        async with daemons(world, state):
            for table in TABLES:
                back = world.position_of(table) - 20
                world.sql(
                    f"SET application_name = 'w1'; {table.set_back(back)}; "
                    f"ALTER SEQUENCE {table.sequence} RESTART WITH {back + 1}; {table.insert(40)}"
                )
        await world.settle("after the change")


async def test_ids_set_back_while_the_stream_is_busy_are_told_at_the_place_where_it_happened(
    postgres_folder: Path, fork_template: Path
) -> None:
    """Ten rows take their time; meanwhile the sequence goes back, and climbs on beyond where it was."""
    async with open_world(postgres_folder, fork_template) as world:
        world.sql(SLOW.create())
        world.tables = (SLOW,)
        plain, *_ = world.hold_all_kinds()
        for _ in range(2):
            await world.settle("before")
            world.sql(
                "INSERT INTO slow (who, body) SELECT 'w1', 'slow ' || gen_random_uuid() FROM generate_series(1, 10)"
            )
            await world.wait_for(lambda: _is_reading(world), "the daemon reads the slow rows")
            await world.set_back(SLOW, 10, plain)
            await blocking(world.write_rows, SLOW, 20)
        await world.settle("after the ids went back")


async def test_ids_set_back_while_a_row_stops_the_stream_are_told_at_the_place_where_it_happened(
    postgres_folder: Path, fork_template: Path
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.sql(SLOW.create())
        world.tables = (SLOW,)
        plain = world.hold("plain", Order.PLAIN)
        world.hold("named", Order.NAMED)
        world.hold("linear", Order.LINEAR)
        await world.settle("before")
        for _ in range(2):
            await blocking(world.write_rows, SLOW, 10)
            world.sql("INSERT INTO slow (who, body) VALUES ('w2', 'poison ' || gen_random_uuid())")
            await world.wait_for(lambda: any("ERROR row_unreadable" in line for _, line in plain.lines), "it stops")
            plain.lines.clear()
            await world.set_back(SLOW, 6, plain)
            await blocking(world.write_rows, SLOW, 20)
            await world.settle("after the ids went back")


@pytest.mark.parametrize("times", [2, long(20)])
async def test_ids_set_back_at_a_poll_that_is_broken_off_are_not_forgotten(
    postgres_folder: Path, fork_template: Path, times: int
) -> None:
    """The daemon loses its connections a moment after the sequence went back, at ever other moments."""
    async with open_world(postgres_folder, fork_template) as world:
        world.tables = (LONE, MANY, TABLED)
        plain, *_ = world.hold_all_kinds()
        await world.settle("before")
        for number in range(times):
            for table in world.tables:
                await blocking(world.write_rows, table, 12)
            await world.settle("before the next", say=False)
            moment = number * 0.009 % 0.05
            to = {table: world.position_of(table) - 10 for table in world.tables}
            back = "; ".join(table.set_back(at) for table, at in to.items())
            kill = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'replicad%' AND backend_type = 'client backend'"
            )
            await blocking(world.sql, f"BEGIN; {back}; SELECT pg_sleep({moment}); {kill}; SELECT pg_sleep(0.3); COMMIT")
            await world.wait_told(TABLED, to[TABLED], plain)
            for table in world.tables:
                await blocking(world.write_rows, table, 25)
            await world.settle(f"broken off after {moment * 1000:.0f} ms")


async def test_what_a_daemon_knew_of_a_stream_ends_with_the_history_that_it_was_of(
    postgres_folder: Path, fork_template: Path
) -> None:
    """A writer called `*`, and ids that have several rows only since the fork."""
    async with open_world(postgres_folder, fork_template) as world:
        shift = Table("shift")
        world.sql(shift.create())
        world.tables = (shift,)
        named = world.hold("named", Order.NAMED)
        world.hold("plain", Order.PLAIN)
        world.hold("linear", Order.LINEAR)
        await blocking(world.write_rows, shift, 20, "*")
        await world.settle("before")
        epoch = named.ledgers["shift"].epoch
        batches = Table("shift", batches=True)
        world.sql(
            f"SET application_name = '*'; ALTER TABLE shift DROP CONSTRAINT shift_pkey; {shift.truncate()}; "
            + "; ".join([batches.insert_batch(3)] * 20)
        )
        await world.settle("after the fork")
        assert named.ledgers["shift"].epoch != epoch, "WRITERS tells the new epoch, whatever the writers are called"


@pytest.mark.long
async def test_rows_under_ids_that_were_given_out_again_are_no_late_rows(
    postgres_folder: Path, fork_template: Path
) -> None:
    """The daemon looks for late rows every 5 s: once before the fork, twice after it."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        await world.settle("before")
        for table in TABLES:
            await blocking(world.write_rows, table, 20)
        await trio.sleep(6)
        for table in TABLES:
            at = world.position_of(table)
            world.sql(f"SET application_name = 'w1'; {table.truncate()}; {table.insert(at + 5)}")
        await world.settle("after the fork")
        await trio.sleep(11)
        assert "rows_below_position" not in world.servers[0].said(1 << 20)


async def test_what_was_said_of_ids_of_before_does_not_hold_for_those_of_after(
    postgres_folder: Path, fork_template: Path
) -> None:
    """Rows were trimmed, an id was taken out of the stream, a sender has acknowledged."""
    async with open_world(postgres_folder, fork_template) as world:
        world.tables = (MANY,)
        world.hold_all_kinds()
        await blocking(world.write_rows, MANY, 30)
        await world.settle("before")
        world.sql("SELECT replicad.stream_skip_id('many', 12, 'in the way')")
        await world.wait_noted()
        world.sql("SELECT replicad.stream_trim('many', 25)")
        world.sql(f"SET application_name = 'w1'; {MANY.truncate()}; {MANY.insert(40)}")
        await world.settle("after the fork")
        late = world.hold("from the beginning", Order.NAMED)
        await world.settle("who begins at the beginning")
        assert late.ledgers["many"].at


@pytest.mark.long
async def test_rows_of_writers_that_are_too_many_to_list_are_taken_back_too(
    postgres_folder: Path, fork_template: Path
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.tables = (MANY,)
        for order in (Order.NAMED, Order.LINEAR):
            world.hold(order.value, order)
        crowd = "INSERT INTO many (who) SELECT 'c' || n FROM generate_series(1, 10050) n"
        world.sql(crowd)
        await world.settle("with many writers")
        world.sql(f"{MANY.truncate()}; {crowd}; {crowd}")
        await world.settle("after the ids began again")
        await world.wait_noted()
        to = world.position_of(MANY) - 300
        world.sql(f"{MANY.set_back(to)}; ALTER SEQUENCE many_id_seq RESTART WITH {to + 1}; {crowd}")
        await world.settle("after they went back")


@pytest.mark.long
@pytest.mark.parametrize("how", ["begun_again", "set_back"])
async def test_rows_of_a_writer_that_was_retired_are_taken_back_too(
    postgres_folder: Path, fork_template: Path, how: str
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.tables = (MANY,)
        plain, named, _ = world.hold_all_kinds()
        await world.settle("before")
        await blocking(world.write_rows, MANY, 20, "w3")
        await blocking(world.write_rows, MANY, 1, "w1")
        await world.settle("before it is retired", say=False)
        await world.wait_noted()
        world.sql("SELECT replicad.stream_writers_retire('many', ARRAY['w3'], 0, clock_timestamp() + interval '1 min')")
        await world.wait_for(lambda: "w3" not in named.ledgers["many"].at, "it is listed no more")
        if how == "begun_again":
            world.sql(f"SET application_name = 'w1'; {MANY.truncate()}; {MANY.insert(30)}")
        else:
            await world.set_back(MANY, 10, plain)
        await world.settle("after the fork, without a row of it", say=False)
        await blocking(world.write_rows, MANY, 5, "w3")
        await world.settle("after the fork")


def _is_reading(world: World) -> bool:
    """Whether a session of the daemon is at the rows of the slow table, in pg_sleep."""
    return world.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") != "0"
