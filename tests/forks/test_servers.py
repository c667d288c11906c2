"""Another server at the same address: restarted, promoted although it lagged, put back from a cold copy.

Every stream method, tokens of one writer and of several, and every kind of client take part in each test.
"""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from tests import redis_servers

from .bystanders import CacheWorker, OnlineUsers
from .ledger import Order
from .tables import EVERYDAY, LONE, MANY, TABLES
from .world import World, blocking, long, open_world


async def write_for(world: World, seconds: float) -> None:
    world.writing.go()
    await trio.sleep(seconds)


async def no_one_begins_again(world: World) -> None:
    """What a client has up to the fork is never taken from it."""
    for holder in world.holders:
        assert not [what for what in holder.counts() if what.startswith("begins again")], holder.name


@pytest.mark.parametrize("suspended", [False, long(True)], ids=["alive", "one_suspended"])
@pytest.mark.parametrize("lives_on", [False, long(True)], ids=["primary_ends", "primary_lives_on"])
async def test_a_lagging_standby_is_promoted_under_writers_and_no_client_misses_or_keeps_a_row(
    postgres_folder: Path, fork_template: Path, suspended: bool, lives_on: bool
) -> None:
    async with open_world(postgres_folder, fork_template, daemons=2 if suspended else 1) as world:
        world.hold_all_kinds()
        world.writing.go()
        standby = await blocking(world.cluster.make_standby)
        await blocking(world.cluster.cut, standby)
        before = await blocking(world.position_of, MANY)
        await world.wait_for(lambda: world.position_of(MANY) > before + 50, "the standby lags")
        if suspended:
            world.hold_all_kinds(1)
            await world.settle("before the promotion")
            world.servers[1].suspend()
            world.writing.go()
        old = await blocking(world.cluster.promote, standby, primary_lives_on=lives_on)
        for _ in range(4):
            await trio.sleep(0.25)
            if lives_on:
                await blocking(world.cluster.move_some, old)
        await blocking(world.cluster.end, old)
        if suspended:
            world.servers[1].resume()
            await trio.sleep(0.5)
        await world.settle("after the promotion")
        await no_one_begins_again(world)
        for holder in world.holders:
            assert holder.counts().get("moved back"), "it had rows that the standby never got"


async def test_rows_that_take_the_ids_of_lost_ones_within_one_poll_of_a_promotion_reach_everybody(
    postgres_folder: Path, fork_template: Path
) -> None:
    """50 rows are lost, and 80 are there before the daemon can look."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        standby = await blocking(world.cluster.make_standby)
        await world.settle("before")
        await blocking(world.cluster.cut, standby)
        for table in TABLES:
            await blocking(world.write_rows, table, 50)
        await world.settle("before the promotion", say=False)
        world.servers[0].suspend()
        await blocking(world.cluster.promote, standby)
        for table in TABLES:
            await blocking(world.write_rows, table, 80)
        world.servers[0].resume()
        await world.settle("after the promotion")
        await no_one_begins_again(world)


async def test_a_switchover_and_back_gives_no_id_out_that_readers_have_passed(
    postgres_folder: Path, fork_template: Path
) -> None:
    """The promoted standby shows values that its primary had logged ahead, and the primary never hears of them."""
    async with open_world(postgres_folder, fork_template) as world:
        [server] = world.servers
        world.hold_all_kinds()
        standby = await blocking(world.cluster.make_standby)
        for table in TABLES:
            await blocking(world.write_rows, table, 40)
        await world.settle("before", say=False)
        given_out = {table: world.position_of(table) for table in TABLES}
        await server.end(signal.SIGTERM)
        first = await blocking(world.cluster.switch_over, standby)
        ahead = [table for table in TABLES if world.position_of(table) > given_out[table]]
        assert ahead, "Postgres logs a sequence ahead of its values"
        server.start()
        await server.wait_ready()
        await world.settle("at the promoted standby", say=False)
        await server.end(signal.SIGTERM)  # it notes what it has published
        noted = "SELECT p.position FROM replicad.stream_position p JOIN replicad.stream s ON s.number = p.stream"
        for table in TABLES:
            position = int(world.sql(f"{noted} WHERE s.name = '{table.name}' AND p.writer = 0"))
            assert position <= given_out[table], "a value that was not given out is no position"
        await blocking(world.cluster.follow, first)
        await blocking(world.cluster.switch_over, first)
        assert {table: world.position_of(table) for table in TABLES} == given_out, "these ids come again"
        for table in TABLES:
            await blocking(world.write_rows, table, 60)
        server.start()
        await server.wait_ready()
        await world.settle("after the switch back")
        await no_one_begins_again(world)


@pytest.mark.long
async def test_connections_that_still_lead_to_the_old_primary_are_not_read_from(
    postgres_folder: Path, fork_template: Path
) -> None:
    """It lives on: the daemon finds the new primary with some of its connections, and has the others still."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        standby = await blocking(world.cluster.make_standby)
        await world.settle("before")
        await blocking(world.cluster.cut, standby)
        for table in TABLES:
            await blocking(world.write_rows, table, 50)
        await world.settle("before the promotion", say=False)
        old = await blocking(world.cluster.promote, standby, primary_lives_on=True)
        for table in TABLES:
            await blocking(world.write_rows, table, 80)
        left = await blocking(world.cluster.move_some, old, but_readers=True)
        assert left > 0, "those that read rows are left"
        await world.settle("while the old primary lives on")
        await blocking(world.cluster.end, old)
        await world.settle("after its end")


@pytest.mark.parametrize(
    "how", [signal.SIGQUIT, long(signal.SIGINT), long(signal.SIGKILL)], ids=["immediate", "fast", "killed"]
)
async def test_postgres_restarts_under_writers_and_no_client_misses_or_keeps_a_row(
    postgres_folder: Path, fork_template: Path, how: signal.Signals
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        for _ in range(2):
            await write_for(world, 0.7)
            await blocking(world.cluster.restart, how)
        world.writing.go()
        for holder in world.holders:
            if holder.order is not Order.PLAIN:
                holder.hop()
        await trio.sleep(0.3)
        await world.settle("after two restarts")
        await no_one_begins_again(world)


@pytest.mark.long
@pytest.mark.parametrize("daemon", ["down", "alive", "suspended"])
async def test_a_cold_copy_is_put_back_and_clients_that_resume_have_what_the_tables_have(
    postgres_folder: Path, fork_template: Path, daemon: str
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        [server] = world.servers
        world.hold_all_kinds()
        await write_for(world, 0.5)
        await world.settle("before the copy")
        await blocking(world.cluster.stop, signal.SIGINT)
        copy = await blocking(world.cluster.copy)
        await blocking(world.cluster.start)
        for table in TABLES:
            await blocking(world.write_rows, table, 10)
        await world.settle("after the copy", say=False)
        if daemon == "down":
            await server.end()
        elif daemon == "suspended":
            server.suspend()
        await blocking(world.cluster.stop)
        await blocking(world.cluster.put_back, copy)
        await blocking(world.cluster.start)
        for table in TABLES:
            await blocking(world.write_rows, table, 20)
        if daemon == "down":
            server.start()
            await server.wait_ready()
        elif daemon == "suspended":
            server.resume()
        await world.settle("after it was put back")


@pytest.mark.long
async def test_a_crash_loses_what_was_not_flushed_and_no_client_keeps_it(
    postgres_folder: Path, fork_template: Path
) -> None:
    """Rows of writers that do not wait for the disk, and a crash after each few of them."""
    async with open_world(postgres_folder, fork_template) as world:
        world.hold_all_kinds()
        for _ in range(5):
            for _ in range(4):
                for table in TABLES:
                    world.sql(f"SET synchronous_commit = off; SET application_name = 'w2'; {table.insert(7)}")
            await blocking(world.cluster.restart, signal.SIGQUIT)
        await world.settle("after five crashes")
        await no_one_begins_again(world)


async def test_a_crash_of_a_backend_takes_readers_back_from_rows_that_were_sent_and_are_gone(
    postgres_folder: Path, fork_template: Path
) -> None:
    """Writers that do not wait for the disk. Postgres goes on under the same postmaster. Readers of every transport are
    there, a sender, a cache and a worker that reports who is online: none keeps or serves what is gone.
    """
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_servers.real_redis(postgres_folder)).url if redis_servers.PROGRAM else None
        more = () if redis is None else ("--redis", redis)
        opened = open_world(postgres_folder, fork_template, tables=(*TABLES, *EVERYDAY), more=more)
        world = await stack.enter_async_context(opened)
        await blocking(world.sql, "ALTER SYSTEM SET wal_writer_delay = '10s'")
        await blocking(world.sql, "SELECT pg_reload_conf()")
        world.hold_all_kinds()
        world.read_all_ways(postgres_folder, redis)
        world.writing.go()
        await world.settle("before")
        started = world.sql("SELECT pg_postmaster_start_time()")
        lost = 0
        for _ in range(6):
            for one in world.bystanders:
                if isinstance(one, CacheWorker):
                    await one.write(world.rng)
                elif isinstance(one, OnlineUsers):
                    one.toggle(world.rng)
            inserts = "; ".join(table.insert(3) for table in TABLES if table.method == "lock_watch")
            begun = f"SET application_name = 'w2'; BEGIN; SET LOCAL synchronous_commit = off; {inserts}"
            await blocking(world.sql, f"{begun}; SELECT pg_sleep(0.1); COMMIT")  # the ids are on disk meanwhile
            last = world.position_of(LONE)
            await world.wait_for(lambda: max(world.holders[0].ledgers["lone"].at.values()) >= last, "it was sent")  # noqa: B023
            await blocking(world.cluster.kill_a_backend)
            lost += int(world.sql("SELECT coalesce(max(id), 0) FROM lone")) < last
            await world.settle("after the crash")
            if lost:
                break
        assert lost, "rows that were sent are gone"
        assert world.sql("SELECT pg_postmaster_start_time()") == started
        await no_one_begins_again(world)


@pytest.mark.parametrize("daemon", ["ends_first", long("stays")])
async def test_a_planned_restart_of_postgres_takes_nobody_back(
    postgres_folder: Path, fork_template: Path, daemon: str
) -> None:
    """A daemon notes what it has published each second, and when it ends."""
    async with open_world(postgres_folder, fork_template) as world:
        [server] = world.servers
        for order in (Order.NAMED, Order.LINEAR):
            world.hold(order.value, order)
        await write_for(world, 0.5)
        await world.settle("before the restart")
        [named, _] = world.holders
        for table in TABLES:
            last = world.position_of(table)
            ledger = named.ledgers[table.name]
            await world.wait_for(lambda: min(ledger.at.values()) == last, "all positions are told")  # noqa: B023
        if daemon == "ends_first":
            await server.end(signal.SIGTERM)
            await blocking(world.cluster.restart, signal.SIGINT)
            server.start()
            await server.wait_ready()
        else:
            await world.wait_noted()
            await blocking(world.cluster.restart, signal.SIGINT)
        await world.settle("after the restart")
        for holder in world.holders:
            lines = "\n".join(f"{at:.3f} {line}" for at, line in holder.lines)
            assert not holder.counts(), f"{holder.name} was taken back: {holder.counts()}\n{lines}"
