"""Presence in SQL: one state for each user whatever daemons say at the same time, and nothing from the dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from uuid import UUID

import pytest
import trio

from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.presence.repository import Beat, PresenceRepository
from replicad.presence.roster import OnlineChange


@pytest.fixture
async def fresh(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url, size=8, application_name="replicad test") as opened:
        yield opened


@pytest.fixture
async def book(fresh: Database) -> PresenceRepository:
    book = PresenceRepository(fresh, "replicad")
    assert await book.enable(ttl=0.3)
    return book


async def rows(db: Database) -> list[tuple[str, str]]:
    found = await db.fetch("SELECT user_id, state FROM replicad.presence_stream ORDER BY id")
    return [(row["user_id"], row["state"]) for row in found]


def change(user: str, online: bool, sync: int = 0) -> OnlineChange:
    return OnlineChange(user, online, sync)


async def test_daemons_that_write_at_the_same_time_tell_every_transition_once_and_none_that_is_none(
    fresh: Database, book: PresenceRepository
) -> None:
    users = [f"@{number}" for number in range(12)]
    daemons = [await book.enlist(f"d{number}") for number in range(4)]
    alive = dict.fromkeys(daemons, True)
    half_way = trio.Event()

    async def write(daemon: UUID, seed: int) -> None:
        chance = Random(seed)
        written = 0
        while written < 60 or (daemon == daemons[0] and alive[daemon]):  # the first goes on until it is buried
            written += 1
            some = chance.sample(users, chance.randrange(1, 8))
            alive[daemon] = await book.apply(daemon, [change(user, chance.random() < 0.4) for user in some])
            if written == 30:
                half_way.set()

    async def clear_expired(daemon: UUID) -> None:
        await half_way.wait()
        beat = await fresh.fetch_value("SELECT beat FROM replicad.presence_daemon WHERE id = $1", daemon)
        while await book.clear_expired(Beat(daemon, beat, 9.0)):
            pass

    async def write_again() -> None:
        for _ in range(20):
            await book.write_again()
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for number, daemon in enumerate(daemons):
            nursery.start_soon(write, daemon, number)
        for _ in range(2):
            nursery.start_soon(clear_expired, daemons[0])
        nursery.start_soon(write_again)

    state = dict.fromkeys(users, "offline")
    for user, told in await rows(fresh):
        assert state[user] != told, f"{user} was {told} already"
        state[user] = told
    seen = {row["user_id"] for row in await fresh.fetch("SELECT user_id FROM replicad.presence_seen")}
    assert {user for user in users if state[user] == "online"} == seen
    kept = {row["user_id"] for row in await fresh.fetch("SELECT user_id FROM replicad.presence_user")}
    assert kept == seen, "nothing is kept of who is offline"
    assert [alive[daemon] for daemon in daemons] == [False, True, True, True]


async def test_a_daemon_that_lives_is_not_buried_and_one_that_is_buried_writes_no_more(
    fresh: Database, book: PresenceRepository
) -> None:
    one, two = await book.enlist("one"), await book.enlist("two")
    assert await book.apply(one, [change("@a", True, 7), change("@b", True)])
    assert await book.apply(one, [change("@a", True, 9)]), "to say it again changes nothing"
    assert await book.apply(two, [change("@b", True)])
    assert await book.beat(one, 1) == 2
    assert await book.beat(one, 1) == 3, "an answer that was lost"
    assert await book.beat(one, 1) is None, "an older state of the database, or another daemon's"
    assert await book.clear_expired(Beat(one, 2, 99.0)) is None, "that was not its last sign of life"
    assert await rows(fresh) == [("@a", "online"), ("@b", "online")]
    assert await book.clear_expired(Beat(one, 3, 99.0)) == 2
    assert await rows(fresh) == [("@a", "online"), ("@b", "online"), ("@a", "offline")]
    assert await book.beat(one, 3) is None
    assert not await book.apply(one, [change("@c", True)])
    assert await book.clear_expired(Beat(one, 3, 99.0)) == 0
    assert await book.clear_expired(Beat(one, 3, 99.0)) is None
    (last,) = await fresh.fetch("SELECT * FROM replicad.presence_stream WHERE state = 'offline'")
    assert (last["last_user_sync_ts"], last["currently_active"]) == (9, False)


async def test_to_tell_anew_looks_at_every_page_and_repeats_nothing_that_is_there(
    fresh: Database, book: PresenceRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.presence.repository.BATCH", 7)
    daemon = await book.enlist("one")
    users = [f"@{number:03}" for number in range(50)]
    assert await book.apply(daemon, [change(user, True) for user in users])
    look = await book.look()
    await book.write_again()
    assert len(await rows(fresh)) == 50
    await fresh.execute("DELETE FROM replicad.presence_stream WHERE id % 2 = 0")
    await book.write_again()
    assert sorted(await rows(fresh)) == [(user, "online") for user in users]
    assert await book.look() == look
    await fresh.execute("DELETE FROM replicad.presence_stream")
    assert await book.look() != look
    await book.write_again()
    assert await book.look() == look
    assert len(await book.users(100)) == 50


async def test_addresses_keep_the_latest_of_a_place_and_go_when_they_are_old(
    fresh: Database, book: PresenceRepository
) -> None:
    from replicad.presence.commands import UserIp
    from replicad.presence.repository import read

    places = [read(UserIp("@a", f'["secret","10.0.0.{n}","agent",null,{ms}]')) for n, ms in ((1, 5), (2, 6))]
    older = read(UserIp("@a", '["old","10.0.0.1","agent",null,4]'))
    await book.write_ips(places)
    await book.write_ips([older])
    assert [(row["ip"], row["last_seen"].timestamp()) for row in await book.ips("@a", 10)] == [
        ("10.0.0.2", 0.006),
        ("10.0.0.1", 0.005),
    ]
    assert await book.ips("@b", 10) == []
    assert (
        b"secret"
        not in (await fresh.fetch_value("SELECT string_agg(t::text, ' ') FROM replicad.presence_user_ip t")).encode()
    )
    assert await book.sweep_ips() == 0
    await fresh.execute(
        "UPDATE replicad.presence_user_ip SET stored_at = stored_at - '29 days'::interval WHERE ip = '10.0.0.1'"
    )
    assert await book.sweep_ips() == 1
    assert len(await book.ips(None, 10)) == 1


async def test_the_part_goes_with_its_stream_and_may_come_again(fresh: Database, book: PresenceRepository) -> None:
    from replicad.errors import StreamRefused

    await fresh.execute(schema.script("presence", "replicad", "up"))
    assert not await book.enable(grace=5.0)
    look = await book.look()
    assert look is not None
    assert (look.grace, look.lost_grace, look.ttl) == (5.0, 30.0, 0.3)
    await fresh.execute(schema.script("presence", "replicad", "down"))
    await fresh.execute(schema.script("presence", "replicad", "down"))
    assert await book.look() is None
    assert await fresh.fetch_value("SELECT count(*) FROM replicad.stream") == 0
    assert await fresh.fetch_value("SELECT count(*) FROM pg_class WHERE relname LIKE 'presence%'") == 0
    await fresh.execute("CREATE TABLE mine (id bigserial PRIMARY KEY)")
    await fresh.execute("SELECT replicad.stream_add('presence', 'mine', 'id')")
    with pytest.raises(StreamRefused, match=r"there is a stream presence already, of table .*mine"):
        await book.enable()
