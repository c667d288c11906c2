"""Who is online, over real TCP: any device anywhere counts, graces, deaths of workers and of daemons, and resets."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio
from structlog.testing import capture_logs

from replicad.config.settings import ServerSettings
from replicad.errors import NotAuthorised
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.presence.reporter import open_presence
from replicad.presence.repository import PresenceRepository
from replicad.presence.service import PresenceIntervals
from replicad.protocol.connection import CloseReason
from replicad.streams.registry import Registry
from tests.conftest import psql
from tests.daemons import Daemon, Paces, open_daemon
from tests.roles import ROLES, as_daemon

from .conftest import PATIENCE, Netcat, netcat_to
from .test_faults_daemon import connect, serving

HELLO = ("SERVER .*",)
SOON = {"grace": 0.4, "lost_grace": 0.8, "ttl": 0.6}  # seconds
NEVER = {"grace": 3600.0, "lost_grace": 3600.0, "ttl": 0.6}

Start = Callable[..., Any]


@pytest.fixture
def paces() -> Paces:
    """The daemon in this process looks ten times as often; those that are processes of their own do not."""
    return Paces(presence=PresenceIntervals(look=0.1))


async def enable(database: Database, *daemons: Daemon, **seconds: float) -> PresenceRepository:
    book = PresenceRepository(database, "replicad")
    await book.enable(**seconds)
    with trio.fail_after(PATIENCE):
        while any(daemon.presence.statistics().roster is None for daemon in daemons):
            await trio.sleep(0.01)
    return book


async def told(nc: Netcat, user: str, state: str) -> list[Any]:
    """The next row of the stream, which is about this user; POSITIONs are passed over."""
    line = await nc.line()
    while not line.startswith("RDATA presence"):
        assert line.startswith(("PING", "POSITION", "WRITERS")), line
        line = await nc.line()
    row: list[Any] = json.loads(line.split(" ", 4)[4])
    assert row[:2] == [user, state], line
    return row


async def quiet(nc: Netcat, seconds: float) -> None:
    """No row comes for so long."""
    with trio.move_on_after(seconds):
        while True:
            line = await nc.line()
            assert not line.startswith("RDATA"), line


@asynccontextmanager
async def following(daemon: Daemon, token: str = "EARLIEST") -> AsyncIterator[Netcat]:
    async with netcat_to(daemon) as nc:
        await daemon.publisher.find("presence")
        await nc.send(f"REPLICATE presence {token}")
        await nc.until("POSITION presence master .*")
        yield nc


async def test_a_user_is_online_while_any_device_syncs_at_any_worker_of_any_daemon(
    database: Database, daemon: Daemon, start_daemon: Start
) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(start_daemon())
        book = await enable(database, daemon, other, **SOON)
        reader = await stack.enter_async_context(following(daemon))
        w1, w2 = [await stack.enter_async_context(netcat_to(server)) for server in (daemon, other)]
        await w1.send("USER_SYNC w1 @a:b PHONE start 5000")
        row = await told(reader, "@a:b", "online")
        assert row[2::2] == [5000, 5000, True]
        assert row[5] is None
        await w1.send("USER_SYNC w1 @a:b LAPTOP start 6000", "USER_SYNC w1 @a:b PHONE end 6500")
        await w2.send("USER_SYNC w2 @a:b start 7000")
        with trio.fail_after(PATIENCE):
            while (await book.users(10))[0]["daemons"] != 2:
                await trio.sleep(0.01)
        await w1.send("USER_SYNC w1 @a:b LAPTOP end 7000")
        await quiet(reader, 0.8)
        await w2.send("USER_SYNC w2 @a:b end 8000")
        began = trio.current_time()
        row = await told(reader, "@a:b", "offline")
        assert trio.current_time() - began >= SOON["grace"] - 0.05
        assert row[2::2] == [8000, 8000, False]
        assert [user["state"] for user in await book.users(10, offline=True)] == ["offline"]
        assert await book.users(10) == []


async def test_clear_is_at_once_and_a_lost_connection_is_not(
    database: Database, daemon: Daemon, start_daemon: Start
) -> None:
    async with start_daemon() as other:
        await enable(database, daemon, other, **NEVER)
        async with following(daemon) as reader, netcat_to(daemon) as w1, netcat_to(daemon) as w2:
            await w1.send("USER_SYNC w1 @both:b P start 1")
            await told(reader, "@both:b", "online")
            await w2.send("USER_SYNC w2 @both:b P start 1", "USER_SYNC w2 @one:b P start 1")
            await told(reader, "@one:b", "online")
            await w2.send("USER_SYNC w2 @left:b P start 1")
            await told(reader, "@left:b", "online")
            await w2.send("USER_SYNC w2 @left:b P end 1", "CLEAR_USER_SYNC w2")
            assert {row[0] for row in [json.loads((await reader.expect("RDATA.*offline.*"))[0].split(" ", 4)[4])]} == {
                "@left:b"
            }
            await told(reader, "@one:b", "offline")
            await w1.stream.aclose()
            await quiet(reader, 0.3)
            async with netcat_to(other) as again:  # the worker comes back to another daemon, and goes in an orderly way
                await again.send("CLEAR_USER_SYNC w1")
                await told(reader, "@both:b", "offline")


async def test_a_worker_that_dies_and_comes_back_within_the_grace_does_not_flap(
    database: Database, daemon: Daemon
) -> None:
    await enable(database, daemon, **SOON)
    async with following(daemon) as reader, AsyncExitStack() as stack:
        worker = await stack.enter_async_context(netcat_to(daemon))
        await worker.send("USER_SYNC w1 @a:b P start 1", "USER_SYNC w1 @b:b P start 1")
        await told(reader, "@a:b", "online")
        await told(reader, "@b:b", "online")
        for _ in range(3):
            await worker.stream.aclose()
            await trio.sleep(SOON["lost_grace"] / 2)
            worker = await stack.enter_async_context(netcat_to(daemon))
            await worker.send("USER_SYNC w1 @a:b P start 2")
        await told(reader, "@b:b", "offline")
        await quiet(reader, SOON["lost_grace"])


async def test_a_killed_daemon_is_replaced_without_flapping_and_its_lost_users_go_offline(
    database: Database, database_url: str, tmp_path: Path, daemon: Daemon
) -> None:
    await enable(database, daemon, **{**SOON, "ttl": 6.0})  # a daemon starts in less, on a busy machine too
    (tmp_path / "x").mkdir()
    async with following(daemon) as reader:
        with serving(tmp_path / "x", "--database", database_url) as first:
            async with connect(await first.wait_ready()) as worker:
                await worker.send("USER_SYNC w1 @back:b P start 1")
                await told(reader, "@back:b", "online")
                await worker.send("USER_SYNC w1 @gone:b P start 1")
                await told(reader, "@gone:b", "online")
                killed = trio.current_time()
                first.end(signal.SIGKILL)
        with serving(tmp_path / "x", "--database", database_url) as second:
            async with connect(await second.wait_ready()) as worker:
                await worker.send("USER_SYNC w1 @back:b P start 1")
                await told(reader, "@gone:b", "offline")
                assert trio.current_time() - killed >= 6.0 + SOON["lost_grace"] - 1.1
                await quiet(reader, 0.5)
        assert await database.fetch_value("SELECT count(*) FROM replicad.presence_daemon") <= 1


@pytest.mark.long
async def test_a_daemon_that_was_only_frozen_tells_of_its_users_again(
    database: Database, database_url: str, tmp_path: Path, daemon: Daemon
) -> None:
    await enable(database, daemon, grace=0.4, lost_grace=1.0, ttl=1.0)
    async with following(daemon) as reader:
        with serving(tmp_path, "--database", database_url) as frozen:
            async with connect(await frozen.wait_ready()) as worker:
                await worker.send("USER_SYNC w1 @a:b P start 1")
                await told(reader, "@a:b", "online")
                frozen.process.send_signal(signal.SIGSTOP)
                await told(reader, "@a:b", "offline")
                frozen.process.send_signal(signal.SIGCONT)
                await told(reader, "@a:b", "online")
                await quiet(reader, 0.5)


async def test_a_restart_with_the_data_intact_goes_on_where_the_stream_was(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon() as first:
        await enable(database, first, **NEVER)
        async with following(first) as reader, netcat_to(first) as worker:
            await worker.send("USER_SYNC w1 @a:b P start 1")
            await told(reader, "@a:b", "online")
        position = await published(database)
    async with start_daemon() as second, following(second, "EARLIEST") as reader, netcat_to(second) as worker:
        await told(reader, "@a:b", "online")
        await worker.send("USER_SYNC w1 @a:b P start 1", "USER_SYNC w1 @b:b P start 1")
        await told(reader, "@b:b", "online")
        async with netcat_to(second) as nc:
            await nc.expect(*HELLO)
            await nc.send(f"REPLICATE presence {position}")
            await told(nc, "@b:b", "online")


async def published(database: Database) -> int:
    with trio.fail_after(PATIENCE):
        while not (at := (await Registry(database).published()).get("presence")) or not at.position:
            await trio.sleep(0.05)
    return at.position


@pytest.mark.parametrize(
    "disaster",
    [
        "TRUNCATE replicad.presence_stream RESTART IDENTITY",
        "TRUNCATE replicad.presence_stream, replicad.presence_user, replicad.presence_seen, replicad.presence_daemon"
        " RESTART IDENTITY",
    ],
    ids=["rows", "everything"],
)
async def test_a_table_that_is_set_back_is_a_reset_and_all_who_are_online_are_told_anew(
    database: Database, start_daemon: Start, disaster: str
) -> None:
    # Positions are polled often and beats are rare, so that the ids are seen to go back before new ones are as high.
    async with start_daemon(poll_max=0.005) as daemon:
        await enable(database, daemon, **{**NEVER, "ttl": 9.0})
        await set_back(database, daemon, disaster)


async def set_back(database: Database, daemon: Daemon, disaster: str) -> None:
    async with following(daemon) as reader, netcat_to(daemon) as worker, netcat_to(daemon) as plain:
        for user in ("@a:b", "@b:b", "@c:b"):
            await worker.send(f"USER_SYNC w1 {user} P start 1")
            await told(reader, user, "online")
        await worker.send("USER_SYNC w1 @c:b P end 1", "CLEAR_USER_SYNC nobody")
        await plain.send("REPLICATE")
        await plain.until("POSITION presence master 3 3")
        await database.execute(disaster)
        await reader.until("POSITION presence master 3 0")
        seen = {json.loads((await reader.until("RDATA presence .*"))[-1].split(" ", 4)[4])[0] for _ in range(3)}
        assert seen == {"@a:b", "@b:b", "@c:b"}
        await plain.until("POSITION presence master 3 0")
        for _ in range(3):
            await plain.until("RDATA presence master \\d .*online.*")
        await quiet(reader, 1.0)


async def test_trimming_keeps_those_who_are_online_in_the_stream(
    database: Database, database_url: str, daemon: Daemon
) -> None:
    from replicad.streams.registry import Registry

    await enable(database, daemon, **NEVER)
    async with netcat_to(daemon) as worker, following(daemon) as reader:
        await worker.send("USER_SYNC w1 @stays:b P start 1")
        await told(reader, "@stays:b", "online")
        await worker.send("USER_SYNC w2 @goes:b P start 1")
        await told(reader, "@goes:b", "online")
        await worker.send("CLEAR_USER_SYNC w2")
        await told(reader, "@goes:b", "offline")
        with trio.fail_after(PATIENCE):
            while await published(database) < 3:
                await trio.sleep(0.05)
        async with open_database(as_daemon(database_url), size=1, application_name="owner") as owner:
            assert (await Registry(owner).trim("presence", before=3)).rows == 3
        await told(reader, "@stays:b", "online")
        async with following(daemon) as late:
            await told(late, "@stays:b", "online")
            await quiet(late, 0.2)


async def test_while_postgres_is_away_nothing_is_lost_and_it_is_told_when_it_is_back(
    postgres_url: str, database: Database, daemon: Daemon, start_daemon: Start
) -> None:
    """Nor does any daemon take another for dead, whose signs of life could not be seen."""
    name = await database.fetch_value("SELECT current_database()")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(start_daemon())
        await enable(database, daemon, other, grace=0.2, lost_grace=0.5, ttl=2.0)
        reader = await stack.enter_async_context(following(daemon))
        worker, w2 = [await stack.enter_async_context(netcat_to(server)) for server in (daemon, other)]
        await worker.send("USER_SYNC w1 @early:b P start 1")
        await told(reader, "@early:b", "online")
        await w2.send("USER_SYNC w2 @elsewhere:b P start 1")
        await told(reader, "@elsewhere:b", "online")
        psql(postgres_url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        psql(postgres_url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        await worker.send("USER_SYNC w1 @early:b P end 2", "USER_SYNC w1 @late:b P start 2")
        await worker.send("USER_SYNC w1 @brief:b P start 2", "USER_SYNC w1 @brief:b P end 2")
        await trio.sleep(5.0)  # twice as long as a daemon may be silent
        assert daemon.presence.statistics().roster is not None
        psql(postgres_url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        rows = {tuple(json.loads((await reader.until("RDATA .*"))[-1].split(" ", 4)[4])[:2]) for _ in range(2)}
        assert rows == {("@early:b", "offline"), ("@late:b", "online")}
        await quiet(reader, 3.0)


@pytest.mark.long
async def test_a_user_whom_postgres_cannot_write_holds_up_nobody(
    postgres_url: str, settings: ServerSettings, database_url: str
) -> None:
    name = f"{urlsplit(database_url).path[1:]}_latin"
    psql(postgres_url, f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = urlunsplit(urlsplit(database_url)._replace(path=f"/{name}"))
    psql(url, ROLES)
    try:
        async with open_database(url, size=2, application_name="replicad test") as database:
            async with open_daemon(settings, url) as daemon:
                await enable(database, daemon, **NEVER)
                async with following(daemon) as reader, netcat_to(daemon) as worker:
                    users = [f"@{letter}:b" for letter in ("a", "€", "b", "\N{SNOWMAN}", "é")]
                    await worker.send(*(f"USER_SYNC w1 {user} P start 1" for user in users))
                    for user in (users[0], users[2], users[4]):
                        await told(reader, user, "online")
                    await worker.send("CLEAR_USER_SYNC w1", "USER_SYNC w1 @later:b P start 1")
                    await reader.until('RDATA presence .*"@later:b", "online".*')
    finally:
        psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


async def test_bounds_are_refused_by_name_and_the_connection_stays(database: Database, start_daemon: Start) -> None:
    async with start_daemon(presence_devices=2) as daemon, netcat_to(daemon) as nc:
        await nc.expect(*HELLO)
        await nc.send("USER_SYNC w1 @a:b P start 1")  # not enabled yet: taken, and nothing is made of it
        await enable(database, daemon, **NEVER)
        await nc.send(*(f"USER_SYNC w1 @{user}:b P start 1" for user in "aba"), "USER_SYNC w1 @c:b P start 1")
        await nc.expect("ERROR presence_refused: 2 devices are all .*--presence-devices.* @c:b .*")
        await nc.send(f"USER_SYNC w1 {'é' * 128} P start 1")
        await nc.expect("ERROR presence_refused: a name of more than 255 bytes .*")
        await nc.send("CLEAR_USER_SYNC w1", "USER_SYNC w1 @c:b P start 1", "STREAMS")
        await nc.expect("STREAMS.*")


async def test_enabling_and_disabling_is_noticed_by_a_running_daemon_and_leaves_nothing(
    database: Database, daemon: Daemon
) -> None:
    assert await schema.install(database, "presence", "replicad") is schema.Outcome.INSTALLED  # alone it does nothing
    for _ in range(2):
        book = await enable(database, daemon, **NEVER)
        assert not await book.enable(grace=1.0)
        async with netcat_to(daemon) as worker, following(daemon) as reader:
            await worker.send("USER_SYNC w1 @a:b P start 1")
            await told(reader, "@a:b", "online")
            assert await book.disable()
            await reader.until("ERROR stream_refused: .*")
            with trio.fail_after(PATIENCE):
                while daemon.presence.statistics().roster is not None:
                    await trio.sleep(0.01)
        assert await database.fetch_value("SELECT count(*) FROM pg_class WHERE relname LIKE 'presence%'") == 0
        assert not await book.disable()


async def test_user_ip_is_kept_with_no_token_in_clear_anywhere(database: Database, daemon: Daemon) -> None:
    with capture_logs() as logs:
        book = await enable(database, daemon, **NEVER)
        async with netcat_to(daemon) as nc:
            await nc.expect(*HELLO)
            for seen in (7, 9, 8):
                await nc.send(f'USER_IP @a:b ["t0ps3cret","203.0.113.7","Browser","DEV",{seen}]')
            await nc.send('USER_IP @a:b ["t0ps3cret",null,"Browser","DEV",9]')
            await nc.expect("ERROR presence_refused: USER_IP is not kept: ip is not a string .*")
            with trio.fail_after(PATIENCE):
                while not (found := await book.ips("@a:b", 10)):
                    await trio.sleep(0.02)
    (place,) = found
    assert (place["ip"], place["device"], place["last_seen"].timestamp()) == ("203.0.113.7", "DEV", 0.009)
    stored = await database.fetch_row("SELECT i::text AS text, i.token_sha256 FROM replicad.presence_user_ip i")
    assert stored is not None
    assert stored["token_sha256"] == hashlib.sha256(b"t0ps3cret").digest()
    assert "t0ps3cret" not in stored["text"] + str(logs)


async def test_a_reporter_says_everything_again_after_a_loss_and_goodbye_at_its_end(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon(presence_devices=3) as daemon:
        await enable(database, daemon, **NEVER)
        address = daemon.addresses[0]
        async with following(daemon) as reader:
            async with open_presence(address.host, address.port, instance="w1") as worker:
                worker.start("@a:b", "P")
                await told(reader, "@a:b", "online")
                worker.start("@a:b", "L")
                worker.start("@b:b")
                await told(reader, "@b:b", "online")
                worker.start("@refused:b")
                with trio.fail_after(PATIENCE):
                    while not worker.statistics().refused:
                        await trio.sleep(0.01)
                worker.end("@refused:b")
                for session in list(daemon.hub):
                    if getattr(session, "name", None) == "w1":
                        session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
                worker.end("@a:b", "P")
                worker.end("@a:b", "L")
                worker.start("@a:b", "TAB")
                with trio.fail_after(PATIENCE):
                    while worker.statistics().connections < 2:
                        await trio.sleep(0.01)
                seen = worker.statistics()
                assert (seen.syncing, seen.refused) == (2, 1)
                assert "@refused:b" in (seen.last_refusal or "")
                await quiet(reader, 0.3)
            for user in ("@a:b", "@b:b"):
                await told(reader, user, "offline")


async def test_a_reporter_gives_up_where_no_further_try_helps(start_daemon: Start) -> None:
    async with start_daemon(token="right") as daemon:
        address = daemon.addresses[0]
        with pytest.raises(NotAuthorised):
            async with open_presence(address.host, address.port, instance="w1", token="wrong"):
                await trio.sleep(PATIENCE)
