"""What concerns all connections reaches those of every daemon, once; a killed daemon and a Postgres that is away cost
no more than what was said meanwhile.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from replicad.daemon.relay import MAX_LINE, Relay, RelayIntervals, RelayKey
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.statements import statement
from replicad.protocol.command import Command
from replicad.protocol.commands import RemoteServerUp
from tests.conftest import psql
from tests.daemons import RELAY_CHANNEL, Daemon, relay_key, relayed
from tests.vocabulary import EVERY

from .conftest import PATIENCE, Connect, Netcat, netcat_to
from .test_faults_daemon import connect, serving

HELLO = ("SERVER .*",)


def listening(database: Database, use: Callable[[Command], None]) -> Relay:
    """The relay of another daemon, which uses what it receives so."""
    relay = Relay(database, relay_key, EVERY, Troubles())
    relay.on(RemoteServerUp, use)
    return relay


async def heard_by(one: Netcat, others: list[Netcat], tag: str) -> None:
    """Wait until what `one` says is heard by the others: they listen to each other from then on."""
    for number in range(200):
        await one.send(f"REMOTE_SERVER_UP {tag}{number}")
        missing = False
        for nc in others:
            with trio.move_on_after(0.05) as scope:
                await nc.until(f"REMOTE_SERVER_UP {tag}{number}")
            missing = missing or scope.cancelled_caught
        if not missing:
            return
    raise AssertionError("never heard")


async def test_relays_cross_daemons_once_and_survive_the_death_of_one(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with serving(tmp_path / "a", "--database", database_url) as first:
        first_at = await first.wait_ready()
        async with connect(first_at) as one, connect(first_at) as two:
            with serving(tmp_path / "b", "--database", database_url) as second:
                async with connect(await second.wait_ready()) as three:
                    await heard_by(one, [two, three], "a")
                    await heard_by(three, [one, two], "b")
                    lines = [f'LOCK_RELEASED ["w","n","{number}"]' for number in range(3000)]
                    await one.send(*lines, *["REMOTE_SERVER_UP twice"] * 2, "STREAMS")
                    for nc in (two, three):
                        await nc.expect_exactly(*lines, *["REMOTE_SERVER_UP twice"] * 2)
                    await one.expect("STREAMS")  # nothing came back to who said it
                    assert second.end(signal.SIGKILL)
            await one.send("REMOTE_SERVER_UP nobody-else")
            await two.expect_exactly("REMOTE_SERVER_UP nobody-else")
            with serving(tmp_path / "b", "--database", database_url) as again:
                async with connect(await again.wait_ready()) as three:
                    await heard_by(one, [two, three], "c")
                    await heard_by(three, [one, two], "d")


async def test_without_postgres_the_daemon_relays_to_its_own_and_listens_again_later(
    postgres_url: str, database: Database, daemon: Daemon, start_daemon: Callable[..., Any]
) -> None:
    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            other = await stack.enter_async_context(start_daemon())
            one, two, three = [await stack.enter_async_context(netcat_to(server)) for server in (daemon, daemon, other)]
            for nc in (one, two, three):
                await nc.expect(*HELLO)
            await heard_by(one, [two, three], "a")
            name = await database.fetch_value("SELECT current_database()")
            ours = f"FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'replicad relay'"
            psql(postgres_url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            psql(postgres_url, f"SELECT pg_terminate_backend(pid) {ours}")
            await one.send("REMOTE_SERVER_UP alone")
            await two.expect_exactly("REMOTE_SERVER_UP alone")
            assert psql(postgres_url, f"SELECT count(*) {ours}") == "0"
            psql(postgres_url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            await heard_by(one, [two, three], "b")
            await heard_by(three, [one, two], "c")
    assert {"relay_deaf", "relay_listens_again"} <= {entry["event"] for entry in logs}


async def test_a_line_that_is_too_long_is_refused_and_goes_to_nobody(netcat: Connect) -> None:
    async with netcat() as one, netcat() as two:
        for nc in (one, two):
            await nc.expect(*HELLO)
        key = "k" * (MAX_LINE - len('LOCK_RELEASED ["","",""]'))
        await one.send("NAME one")  # the first command must be short
        await one.send(f'LOCK_RELEASED ["","","{key}x"]', f'LOCK_RELEASED ["","","{key}"]')
        await one.expect(f"ERROR relay_refused: LOCK_RELEASED .* {MAX_LINE} bytes, not {MAX_LINE + 1}")
        await two.expect_exactly(f'LOCK_RELEASED ["","","{key}"]')


async def test_a_message_that_comes_twice_counts_once_and_a_missing_one_is_told(database: Database) -> None:
    heard: list[Command] = []
    relay = listening(database, heard.append)

    async def say(*messages: str) -> None:
        for message in messages:
            await database.execute("SELECT pg_notify($1, $2)", RELAY_CHANNEL, message)

    async def expect(*names: str) -> None:
        with trio.fail_after(PATIENCE):
            while [getattr(command, "server_name", "") for command in heard] != list(names):
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        with trio.fail_after(PATIENCE):
            while not heard:
                await say(relayed("first", 1, "REMOTE_SERVER_UP a"))
        with capture_logs() as logs:
            await say(relayed("first", 1, "REMOTE_SERVER_UP a"), "no")
            await say(relayed("other", 9, "REMOTE_SERVER_UP b", "RDATA x", "REMOTE_SERVER_UP c"))
            await say(relayed("first", 4, "REMOTE_SERVER_UP d"))
            await expect("a", "b", "c", "d")
        assert [log["reason"].split(" were")[0] for log in logs if log.get("code") == "relay_gap"] == [
            "2 messages of daemon first"
        ]
        assert relay.statistics().missed == 2
        await say(f"first {10**17}\nREMOTE_SERVER_UP forged")
        await say(relayed("first", 5, "REMOTE_SERVER_UP e"))
        await expect("a", "b", "c", "d", "e")
        nursery.cancel_scope.cancel()


async def test_what_waits_for_postgres_is_bounded_and_the_oldest_goes(database: Database) -> None:
    relay = Relay(database, relay_key, EVERY, Troubles(), RelayIntervals(max_waiting=10_000))
    for number in range(1000):
        relay.broadcast(RemoteServerUp(f"server{number:06}"))
    size = len("REMOTE_SERVER_UP server000000")
    kept = 10_000 // size
    assert relay.statistics().dropped == 1000 - kept
    heard: list[Command] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listening(database, heard.append).run)
        # That a LISTEN was sent is no proof that it is in force: what is told before it commits is heard by nobody.
        with trio.fail_after(PATIENCE):
            while not heard:
                await database.execute(
                    "SELECT pg_notify($1, $2)", RELAY_CHANNEL, relayed("test", 1, "REMOTE_SERVER_UP on")
                )
                await trio.sleep(0.01)
        nursery.start_soon(relay.run)
        with trio.fail_after(PATIENCE):
            while len(heard) < 1 + kept:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert heard[1:] == [RemoteServerUp(f"server{number:06}") for number in range(1000 - kept, 1000)]


async def test_a_role_that_may_only_connect_hears_no_relay_and_sends_none(
    database: Database, daemon: Daemon, netcat: Connect, database_url: str
) -> None:
    await database.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
    async with (
        open_database(database_url.replace("postgres@", "stranger@", 1), size=2, application_name="x") as stranger,
        netcat() as nc,
    ):
        await nc.expect(*HELLO)
        for query in (
            "SELECT key FROM replicad.stream_relay_key", "SELECT replicad.stream_relay_channel()",
            "SELECT replicad.stream_relay_secret()",
        ):  # fmt: skip
            with pytest.raises(DatabaseError, match="permission denied"):
                await stranger.fetch_value(query)
        listens = "SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query ~ 'LISTEN'"
        assert await stranger.fetch(listens) == [], "what other roles listen to is not shown"
        await database.execute("SELECT pg_notify('replicad.relay', E'zz 1\nREMOTE_SERVER_UP forged')")
        await nc.send("PING", "REMOTE_SERVER_UP mine")
        await nc.send("STREAMS")
        await nc.expect("STREAMS")
    await database.execute("DROP ROLE stranger")


async def test_a_role_that_reads_the_statistics_finds_the_channel_and_can_say_nothing_on_it(
    database: Database, daemon: Daemon, start_daemon: Callable[..., Any], netcat: Connect, database_url: str
) -> None:
    await database.execute("DROP ROLE IF EXISTS looker; CREATE ROLE looker LOGIN; GRANT pg_read_all_stats TO looker")
    channel = await database.fetch_value("SELECT replicad.stream_relay_channel()")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(start_daemon())
        looker = await stack.enter_async_context(
            open_database(database_url.replace("postgres@", "looker@", 1), size=2, application_name="x")
        )
        one, two = [await stack.enter_async_context(netcat_to(server)) for server in (daemon, other)]
        for nc in (one, two):
            await nc.expect(*HELLO)
        await heard_by(one, [two], "a")
        shown = await looker.fetch("SELECT query FROM pg_stat_activity WHERE application_name = 'replicad relay'")
        assert any(channel in row["query"] for row in shown), "the name is no secret"
        assert not any("secret" in row["query"] and "$" in row["query"] for row in shown)
        with pytest.raises(DatabaseError, match="permission denied"):
            await looker.fetch_value("SELECT replicad.stream_relay_secret()")
        overheard: list[str] = []
        async with looker.listen(channel) as notices:
            await one.send("REMOTE_SERVER_UP real")
            await two.until("REMOTE_SERVER_UP real")
            with trio.fail_after(PATIENCE):
                while not any("real" in message for message in overheard):
                    overheard.append(await notices.next(10.0))
        before = other.relay.statistics()
        message = overheard[-1]
        sender, number, *rest = message.split("\n")[0].split(" ")
        later = f"{sender} {int(number) + 1} {rest[0]} {rest[1]}"
        for forged in (
            message, message.replace("real", "fake"), f"{later}\nREMOTE_SERVER_UP real",
            f"{message}\nREMOTE_SERVER_UP x", "zz 1\nREMOTE_SERVER_UP fake", 'zz 1\nLOCK_RELEASED ["a","b","c"]',
        ):  # fmt: skip
            await looker.fetch_value("SELECT pg_notify($1, $2)", channel, forged)
        with trio.fail_after(PATIENCE):
            while other.relay.statistics().refused < before.refused + 6:
                await trio.sleep(0.01)
        found = other.relay.statistics()
        assert found.reasons["forged"] - before.reasons["forged"] == 3
        assert found.reasons["repeated"] - before.reasons["repeated"] == 1
        assert found.reasons["unsigned"] - before.reasons["unsigned"] == 2
        await two.send("STREAMS")
        await two.expect("STREAMS")
        await heard_by(one, [two], "b")
    await database.execute("DROP ROLE looker")


async def test_daemons_hear_each_other_again_after_the_key_was_changed(database: Database, database_url: str) -> None:
    await schema.install(database, "stream", "replicad")
    heard: list[Command] = []

    async def key() -> RelayKey | None:
        row = await database.fetch_row(statement("relay_key", "replicad"))
        return None if row["secret"] is None else RelayKey(row["channel"], bytes.fromhex(row["secret"]), row["clock"])

    async def channel() -> str | None:
        found = await key()
        return None if found is None else found.channel

    troubles = Troubles()

    before = await channel()
    one = Relay(database, key, EVERY, Troubles(), RelayIntervals(channel=0.05))
    two = Relay(database, key, EVERY, troubles, RelayIntervals(channel=0.05))
    two.on(RemoteServerUp, heard.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        nursery.start_soon(two.run)
        for turn in range(2):
            with trio.fail_after(PATIENCE):
                while RemoteServerUp(f"turn{turn}") not in heard:
                    one.broadcast(RemoteServerUp(f"turn{turn}"))
                    await trio.sleep(0.05)
            if turn == 0:
                await database.execute("DELETE FROM replicad.stream_relay_key")
                with trio.fail_after(PATIENCE):
                    while (why := troubles.why("service", "relay")) is None:
                        await trio.sleep(0.01)
                assert "has no key: INSERT INTO stream_relay_key" in why
                await database.execute("INSERT INTO replicad.stream_relay_key DEFAULT VALUES")
                assert await channel() != before
        nursery.cancel_scope.cancel()
