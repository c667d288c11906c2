"""Two daemons of one database, of which one does not see what happens; clients go from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from .ledger import Order
from .tables import LONE, MANY, RESERVED, TABLES
from .world import World, blocking, long, open_world


async def fork_by(world: World, how: str) -> None:
    """All streams fork while the second daemon is suspended; the first one has seen it in the end."""
    for table in TABLES:
        at = world.position_of(table)
        if how == "begun_again":
            world.sql(f"SET application_name = 'w2'; {table.truncate()}; {table.insert(at + 5)}")
        else:
            await world.set_back(table, 10, world.holders[0])
            await blocking(world.write_rows, table, 20, "w2")


@pytest.mark.parametrize("how", ["set_back", long("begun_again")])
async def test_a_suspended_daemon_learns_of_a_fork_that_another_one_saw_and_takes_its_tokens(
    postgres_folder: Path, fork_template: Path, how: str
) -> None:
    async with open_world(postgres_folder, fork_template, daemons=2) as world:
        for place in (0, 1):
            world.hold_all_kinds(place)
        await world.settle("before")
        for table in TABLES:
            await blocking(world.write_rows, table, 30)
        await world.settle("before the fork", say=False)
        world.servers[1].suspend()
        await fork_by(world, how)
        there = [holder for holder in world.holders if holder.place == 0]
        everybody, world.holders = world.holders, there
        await world.settle("at the daemon that saw it")
        world.servers[1].resume()
        world.holders = everybody
        await world.settle("at both")
        for holder in world.holders:
            if holder.order is not Order.PLAIN:
                holder.hop(1 - holder.place)
        await world.settle("after each client has gone to the other daemon")
        for holder in world.holders:
            assert not [what for what in holder.counts() if what.startswith("begins again")], holder.name
        epochs = {holder.ledgers["lone"].epoch for holder in world.holders if holder.order is not Order.PLAIN}
        assert len(epochs) == 1, "both daemons tell the same epoch"


@pytest.mark.long
async def test_clients_that_stay_away_over_several_forks_resume_from_the_oldest_token(
    postgres_folder: Path, fork_template: Path
) -> None:
    """Each fork is at another place, and the lowest one counts; the client goes to a daemon that was down meanwhile."""
    async with open_world(postgres_folder, fork_template, daemons=2) as world:
        away = [world.hold(f"{order.value} away", order) for order in (Order.NAMED, Order.LINEAR)]
        there, *_ = world.hold_all_kinds(1)
        await world.settle("before")
        for table in TABLES:
            await blocking(world.write_rows, table, 40)
        await world.settle("before they leave", say=False)
        for holder in away:
            holder.leave()
        await world.servers[0].end()
        for back in (20, 35, 10):
            everybody, world.holders = world.holders, [one for one in world.holders if one not in away]
            for table in (LONE, MANY, RESERVED):
                await world.set_back(table, back, there)
                await blocking(world.write_rows, table, back + 10, "w3")
            await world.settle(f"back by {back}", say=False)
            world.holders = everybody
        world.servers[0].start()
        await world.servers[0].wait_ready()
        for holder in away:
            holder.come_back(0)
        await world.settle("after they came back")
        for holder in away:
            assert holder.counts().get("rewound by name"), holder.name
            assert not [what for what in holder.counts() if what.startswith("begins again")], holder.name


@pytest.mark.long
async def test_a_token_of_one_daemon_is_good_at_the_other_in_the_middle_of_writing(
    postgres_folder: Path, fork_template: Path
) -> None:
    async with open_world(postgres_folder, fork_template, daemons=2) as world:
        for place in (0, 1):
            world.hold_all_kinds(place)
        world.writing.go()
        for _ in range(30):
            await trio.sleep(0.1)
            for holder in world.holders:
                if holder.order is not Order.PLAIN:
                    holder.hop(1 - holder.place)
        await world.settle("after many moves")
        for holder in world.holders:
            assert not [what for what in holder.counts() if what.startswith("begins again")], holder.name
