"""Redis as a second way out: what is published and heard, by whom, and what happens when something is away.

Every test runs against the model of tests/redis_servers.py, and against the real server where the machine has one.
"""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import Disconnected, RowBatch
from replicad.config.settings import Address
from replicad.errors import (
    ConnectionLost,
    DatabaseUnavailable,
    RedisRefused,
    RedisUnavailable,
    RowUnreadable,
    UsageError,
)
from replicad.postgres.bridge import Database
from replicad.presence.repository import PresenceRepository
from replicad.redis import following
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.messages import BOTH, Step, key_of
from replicad.redis.publisher import RedisOutlet
from replicad.redis.service import RedisFigures, RedisIntervals
from replicad.streams.daemons import DaemonReports
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.redis_servers import PROGRAM, WHY_NOT, ModelRedis, RealRedis, free_port, real_redis

from .clients.both import InThread
from .conftest import netcat_to

SERVER = "example.org"
SECRET = "a-secret-of-enough-characters"
QUICK = RedisIntervals(
    ttl=1.2, look=0.05, renew=0.1, sync=0.2, snapshot=0.05, give_up=0.5, retry=0.02, longest_retry=0.1, answer=0.5,
    silence=1.0,
)  # fmt: skip

# What somebody says on the channel of a stream, each of which must only send the follower back to the daemon.
NONSENSE: tuple[str | bytes, ...] = (
    "RDATA events w1 x {}", "POSITION events w1 9 9", "what\nis this", "", "RDATA events w1 9_9 {}",
    "RDATA other w1 99 {}", "RDATA events w1 99 {}\nERROR not_authorised: go", b"RDATA events w1 99 \xff",
    "RDATA events w1 99 \0",
    f"RDATA events w1 {'9' * 30} {{}}", f"POSITION events w1 {'9' * 5000} 1",
)  # fmt: skip
# What somebody writes into the hash in Redis as the address of a daemon.
ADDRESSES: tuple[str | bytes, ...] = (
    b"\xff\xfe", "db1:99999", "a..b:9009", f"{'x' * 70}.example:9009", "[::1", "[::1%\0]:9009", ":9009", "a b:1",
    "\0:1", "x" * 5000, "http://db1:9009/", "127.0.0.1:1", "-x:1", "db1:\u0663", "127.0.0.1:0",
)  # fmt: skip

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def paces(paces: Paces) -> Paces:
    return replace(paces, redis=QUICK)


@pytest.fixture(
    params=[  # where there is a real one, the suite takes that one, and the long form both
        pytest.param("model", marks=[] if PROGRAM is None else [pytest.mark.long]),
        pytest.param("real", marks=pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)),
    ]
)
async def redis(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RealRedis | ModelRedis]:
    if request.param == "real":
        with real_redis(tmp_path) as server:
            yield server
        return
    async with trio.open_nursery() as nursery:
        model = ModelRedis(nursery)
        await model.start()
        yield model
        nursery.cancel_scope.cancel()


class Listener:
    """A process that has subscribed to channels, and one connection on which it publishes."""

    def __init__(self, link: RedisLink, out: RedisLink) -> None:
        self._link = link
        self._out = out
        self._waiting: dict[str, deque[str]] = defaultdict(deque)

    async def say(self, line: str | bytes, channel: str = SERVER) -> None:
        await self._out.call("PUBLISH", channel, line)

    async def line(self, channel: str = SERVER) -> str:
        """The next line of the channel."""
        with trio.fail_after(PATIENCE):
            while not self._waiting[channel]:
                for found, line in await self._link.messages():
                    self._waiting[found.decode()].append(line.decode())
        return self._waiting[channel].popleft()

    async def until(self, pattern: str, channel: str = SERVER) -> list[str]:
        """The lines of the channel up to one that matches."""
        lines = []
        while not lines or not re.fullmatch(pattern, lines[-1]):
            lines.append(await self.line(channel))
        return lines


@asynccontextmanager
async def listening(url: str, *channels: str) -> AsyncIterator[Listener]:
    link, out = [await open_redis(parse_redis(url), name=name) for name in ("listener", "speaker")]
    try:
        await link.subscribe(channels or (SERVER,))
        yield Listener(link, out)
    finally:
        await link.aclose()
        await out.aclose()


async def add_events(database: Database, *names: str) -> None:
    for name in names or ("events",):
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, writer text, body text)")
        await Registry(database).add(name, f"public.{name}", "id", instance_column="writer", row="to_json(t.body)")


async def write(database: Database, first: int, last: int, writer: str = "w1", table: str = "events") -> None:
    await database.execute(
        f"INSERT INTO {table} (writer, body) SELECT '{writer}', 'row ' || n FROM generate_series({first}, {last}) n"
    )


async def announce(link: RedisLink, address: str | bytes) -> None:
    """Write the address of a daemon into Redis, as somebody else may do."""
    await link.call("HSET", key_of(SERVER), "address", address)


def ids(lines: list[str]) -> list[int]:
    return [int(line.split(" ")[3]) for line in lines if line.startswith("RDATA ") and " batch " not in line]


def redis_of(url: str) -> dict[str, Any]:
    return {"redis": url, "server_name": SERVER}


async def wait_publishing(daemon: Daemon) -> None:
    assert daemon.redis is not None
    with trio.fail_after(PATIENCE):
        while daemon.redis.turns.publisher is None or not daemon.redis.turns.publisher.connected:
            await trio.sleep(0.01)


async def test_rows_are_published_on_both_channels_and_replicate_is_answered_by_all_positions(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await add_events(database, "events", "other")
    async with start_daemon(**redis_of(redis.url)) as daemon, listening(redis.url, SERVER, f"{SERVER}/events") as one:
        await wait_publishing(daemon)
        await write(database, 1, 3)
        assert ids(await one.until("RDATA events w1 3 .*")) == [1, 2, 3]
        await one.say("REPLICATE ")
        lines = await one.until("POSITION other .*")
        assert "POSITION events w1 3 3" in lines
        await write(database, 4, 5)
        lines = await one.until("RDATA events w1 5 .*")
        assert ids(lines) == [4, 5]
        assert not [line for line in lines if line.startswith(("WRITERS", "ERROR", "PING"))]
        await write(database, 6, 6)
        own = await one.until("RDATA events w1 6 .*", f"{SERVER}/events")
        assert ids(own) == [1, 2, 3, 4, 5, 6]
        assert any(re.fullmatch(r"WRITERS events \w+ master=1 w1=2", line) for line in own)
        assert own[-2] == "POSITION events w1 5 5"


async def test_one_daemon_publishes_and_another_takes_over_without_a_missing_row(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await add_events(database)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(listening(redis.url))
        daemons = [await stack.enter_async_context(start_daemon(**redis_of(redis.url))) for _ in range(2)]
        lines: list[str] = []
        for number in range(2):
            with trio.fail_after(PATIENCE):
                while len(holders := [one for one in daemons if _publisher(one) is not None]) != 1:
                    await trio.sleep(0.01)
            await wait_publishing(holders[0])
            await write(database, 3 * number + 1, 3 * number + 2)
            lines += await one.until(f"RDATA events w1 {3 * number + 2} .*")
            if number < 1:
                _cut_off(holders[0], stack)  # it can neither renew nor give back: as after the loss of its network
                daemons.remove(holders[0])
                await write(database, 3 * number + 3, 3 * number + 3)
        found = ids(lines)
        assert set(found) == set(range(1, 6))
        assert list(dict.fromkeys(found)) == sorted(set(found))
        row = await database.fetch_row("SELECT term, holder FROM replicad.redis_publisher")
        assert row["term"] == holders[0].redis.turns.term


def _publisher(daemon: Daemon) -> Any:
    assert daemon.redis is not None
    return daemon.redis.turns.publisher


def _cut_off(daemon: Daemon, stack: AsyncExitStack) -> None:
    """Let a daemon reach the role in Postgres no more."""
    assert daemon.redis is not None
    patch = stack.enter_context(pytest.MonkeyPatch.context())

    async def fail(*_: object) -> Any:
        raise DatabaseUnavailable("cut off by the test")

    for name in ("look", "claim", "renew", "release"):
        patch.setattr(daemon.redis.turns._book, name, fail)


async def test_a_publisher_with_an_earlier_term_is_refused(redis: RealRedis | ModelRedis) -> None:
    async def outlet(term: int) -> RedisOutlet:
        return RedisOutlet(await open_redis(parse_redis(redis.url), name="test"), SERVER, term, "db1:9009")

    message: list[tuple[str, Step]] = [("events", [BOTH, "POSITION events w1 1 1"])]
    async with listening(redis.url) as one:
        earlier, later = await outlet(7), await outlet(8)
        assert await earlier.publish(message) == 1
        assert await later.publish(message) == 1
        with pytest.raises(RedisRefused, match=r"another daemon publishes example.org to redis://.*term 8"):
            await earlier.publish(message)
        assert await later.publish([("events", [BOTH, "RDATA events w1 2 {}"])]) == 1
        assert len(await one.until("RDATA events w1 2 .*")) == 3
        for each in (earlier, later):
            await each.aclose()


async def test_commands_of_other_processes_are_treated_as_on_tcp(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database, database_url: str
) -> None:
    await add_events(database, "federation")
    await PresenceRepository(database, "replicad").enable(grace=0.1)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(listening(redis.url))
        daemons = [await stack.enter_async_context(start_daemon(**redis_of(redis.url))) for _ in range(2)]
        clients = [await stack.enter_async_context(netcat_to(daemon)) for daemon in daemons]
        with trio.fail_after(PATIENCE):
            while sum(_publisher(daemon) is not None for daemon in daemons) != 1 or any(
                not daemon.redis.hearing.connected or not daemon.presence.statistics().roster for daemon in daemons
            ):
                await trio.sleep(0.01)
        await write(database, 1, 3, table="federation")
        await one.until("RDATA federation w1 3 .*")
        await one.say("NO_SUCH_COMMAND 1")
        await one.say("USER_SYNC half a line")
        await one.say("CLAIM cities 1/1")  # only what needs no answer is heard
        await one.say("USER_SYNC w9 @ann:example.org PHONE start 1490197670513")
        await one.say('USER_IP @ann:example.org ["t","1.2.3.4","agent","PHONE",1490197670513]', f"{SERVER}/USER_IP")
        await one.say("FEDERATION_ACK sender1 2")
        await one.say("REMOTE_SERVER_UP far.example.org")
        assert '"online"' in (await one.until("RDATA presence .*"))[-1]
        for client in clients:
            await client.until("REMOTE_SERVER_UP far.example.org")
        await clients[0].send("REMOTE_SERVER_UP near.example.org")
        await clients[1].until("REMOTE_SERVER_UP near.example.org")
        lines = await one.until("REMOTE_SERVER_UP near.example.org")
        await one.say("CLEAR_USER_SYNC w9")
        lines += await one.until('RDATA presence .*"offline".*')
        assert not [line for line in lines if "far.example.org" in line]  # it is not published again
        assert sum("near.example.org" in line for line in lines) == 1
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT count(*) FROM replicad.stream_ack WHERE token = 2") != 1:
                await trio.sleep(0.02)
            while await database.fetch_value("SELECT count(*) FROM replicad.presence_user_ip") != 1:
                await trio.sleep(0.02)
        assert all(daemon.redis.hearing.refused >= 2 for daemon in daemons)


async def test_clients_of_tcp_notice_nothing_of_a_redis_that_is_away_or_hangs(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await add_events(database)
    async with start_daemon(**redis_of(redis.url)) as daemon, netcat_to(daemon) as client:
        await wait_publishing(daemon)
        await client.send("REPLICATE")
        redis.stop()
        with trio.fail_after(PATIENCE):
            while {one.place.cause for one in daemon.troubles.of("service", "redis")} < {"hear", "publish"}:
                await trio.sleep(0.01)
        await write(database, 1, 3)
        await client.until("RDATA events w1 3 .*")
        with trio.fail_after(PATIENCE):  # first its connections end, then it finds no other
            while "no connection to redis://127.0.0.1" not in str(daemon.troubles.why("service", "redis")):
                await trio.sleep(0.01)
        figures = {one.family.name: one.value for one in RedisFigures(daemon.redis).samples()}
        assert figures["replicad_redis_connected"] == 0
        with trio.fail_after(
            PATIENCE
        ):  # the daemon writes its troubles to Postgres; `replicad doctor` reads them there
            while not any(one.name == "redis" for one in await DaemonReports(database).troubles()):
                await trio.sleep(0.02)
        with trio.fail_after(PATIENCE):
            while _publisher(daemon) is not None:  # another daemon might reach Redis
                await trio.sleep(0.01)
        started = redis.start()
        if started is not None:
            await started
        async with listening(redis.url) as one:
            await wait_publishing(daemon)
            await write(database, 4, 5)
            assert ids(await one.until("RDATA events w1 5 .*"))[-2:] == [4, 5]
        assert not daemon.troubles.of("service", "redis")


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_a_redis_that_takes_nothing_keeps_a_bounded_number_of_rows_and_gets_them_later(
    tmp_path: Path, start_daemon: Start, database: Database
) -> None:
    await add_events(database)
    paces = Paces(redis=replace(QUICK, waiting_bytes=20_000, give_up=60, ttl=60))
    with real_redis(tmp_path) as redis:
        async with start_daemon(paces=paces, **redis_of(redis.url)) as daemon, netcat_to(daemon) as client:
            await wait_publishing(daemon)
            await client.send("REPLICATE")
            async with listening(redis.url) as one:
                os.kill(redis.pid, signal.SIGSTOP)
                try:
                    await write(database, 1, 3_000)
                    await client.until("RDATA events w1 3000 .*")
                    with trio.fail_after(PATIENCE):
                        while not daemon.redis.turns.overflows:
                            await trio.sleep(0.01)
                    await write(database, 3_001, 3_002)
                    await client.until("RDATA events w1 3002 .*")
                    assert _publisher(daemon).intake.bytes < 1_000_000
                finally:
                    os.kill(redis.pid, signal.SIGCONT)
                found = ids(await one.until("RDATA events w1 3002 .*"))
            assert list(dict.fromkeys(found)) == list(range(1, 3_003))


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_a_wrong_password_and_a_full_redis(tmp_path: Path, start_daemon: Start, database: Database) -> None:
    await add_events(database)
    with real_redis(tmp_path, "--requirepass", "open sesame", "--maxmemory", "100kb") as redis:
        async with start_daemon(**redis_of(redis.url), redis_password="wrong") as daemon:
            with trio.fail_after(PATIENCE):
                while "REPLICAD_REDIS_PASSWORD" not in str(daemon.troubles.why("service", "redis")):
                    await trio.sleep(0.01)
            assert "wrong" not in str(daemon.troubles.why("service", "redis")).replace("WRONGPASS", "")
        url = redis.url.replace("//", "//:open%20sesame@")
        async with start_daemon(**redis_of(redis.url), redis_password="open sesame") as daemon:
            async with listening(url) as one:
                await wait_publishing(daemon)
                link = await open_redis(parse_redis(url), name="test")
                with pytest.raises(RedisRefused, match="OOM"):
                    await link.call("SET", "much", "x")
                await link.aclose()
                await write(database, 1, 2)
                assert ids(await one.until("RDATA events w1 2 .*")) == [1, 2]


@asynccontextmanager
async def collecting(follower: Any, lost: list[Disconnected] | None = None) -> AsyncIterator[list[int]]:
    """The ids of the rows that a follower yields, as they come; `lost` gets the losses of connections."""
    found: list[int] = []

    async def collect() -> None:
        async for event in follower:
            if isinstance(event, Disconnected) and lost is not None:
                lost.append(event)
                continue
            assert isinstance(event, RowBatch)
            assert event.rows == [f'"row {event.token}"']
            found.append(event.token)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect)
        yield found
        nursery.cancel_scope.cancel()


async def wait_until(holds: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE):
        while not holds():
            await trio.sleep(0.01)


def follows_by_tcp(daemon: Daemon, name: str) -> bool:
    return any(session.name == name and session.outbox.readers for session in daemon.hub)


@pytest.fixture
def quick_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SILENCE", 1.0)


@pytest.mark.usefixtures("quick_followers")
async def test_a_client_over_redis_gets_every_row_once_through_restarts_of_redis_and_of_daemons(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await add_events(database)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(start_daemon(**redis_of(redis.url))) for _ in range(2)]
        await wait_until(lambda: any(map(_publisher, daemons)))
        holder = next(daemon for daemon in daemons if _publisher(daemon))
        other = next(daemon for daemon in daemons if daemon is not holder)
        await write(database, 1, 5)
        client = await stack.enter_async_context(
            open_client(redis.url, name="f", server_name=SERVER, daemon=str(other.addresses[0]))
        )
        host, port = other.addresses[0].host, other.addresses[0].port
        plain = await stack.enter_async_context(open_client(host, port, name="plain"))
        follower = await stack.enter_async_context(client.follow({"events": "EARLIEST"}, patience=None))
        assert await client.streams() == ("events",)  # requests go by TCP
        found = await stack.enter_async_context(collecting(follower))

        async def come(first: int, last: int, *, by_redis: bool | None = None) -> None:
            if by_redis:
                await wait_until(lambda: not follows_by_tcp(other, "f"))
            await write(database, first, last)
            await wait_until(lambda: found[-1:] == [last])

        await come(6, 8)
        await come(9, 10, by_redis=True)
        redis.stop()
        await come(11, 12)
        started = redis.start()
        if started is not None:
            await started
        await come(13, 14, by_redis=True)
        _cut_off(holder, stack)
        await come(15, 16)
        await wait_until(lambda: _publisher(other))
        await come(17, 18, by_redis=True)
        assert found == list(range(1, 19))
        async with plain.follow({"events": "EARLIEST"}) as beside, collecting(beside) as again:
            await wait_until(lambda: again[-1:] == [18])
            await wait_until(lambda: follower.token("events") == beside.token("events"))


@pytest.mark.usefixtures("quick_followers")
async def test_a_client_on_asyncio_follows_over_redis_and_resumes_by_tcp_while_it_is_away(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await add_events(database)
    found: list[int] = []

    def collect(client: InThread) -> None:
        for batch in client.follow({"events": "EARLIEST"}, patience=None):
            found.append(batch.token)

    async with start_daemon(**redis_of(redis.url)) as daemon:
        await wait_publishing(daemon)
        server = str(daemon.addresses[0])
        make = partial(InThread, "asyncio", redis.url, None, name="f", server_name=SERVER, daemon=server)
        client = await trio.to_thread.run_sync(make)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, collect, client)
                await write(database, 1, 2)
                await wait_until(lambda: found[-1:] == [2])
                await wait_until(lambda: not follows_by_tcp(daemon, "f"))
                await write(database, 3, 4)
                await wait_until(lambda: found[-1:] == [4])
                redis.stop()
                await write(database, 5, 6)
                await wait_until(lambda: found[-1:] == [6])
                await trio.to_thread.run_sync(client.close)
        finally:
            await trio.to_thread.run_sync(client.close)
        assert found == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("quick_followers")
async def test_a_client_finds_the_daemon_and_goes_back_to_it_whenever_redis_says_nonsense_or_nothing(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_events(database)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(redis.url, name="f", server_name=SERVER))
        with pytest.raises(ConnectionLost, match=r"no daemon announces its address for example.org in redis://"):
            await client.streams()
        listen = Address("127.0.0.1", free_port())
        daemon = await stack.enter_async_context(start_daemon(listen=listen, **redis_of(redis.url)))
        one = await stack.enter_async_context(listening(redis.url))
        await wait_publishing(daemon)
        follower = await stack.enter_async_context(
            client.follow(None, begin="EARLIEST", patience=None, also=(Disconnected,))
        )
        lost: list[Disconnected] = []
        found = await stack.enter_async_context(collecting(follower, lost))
        await write(database, 1, 2)
        await wait_until(lambda: found == [1, 2])
        for number, nonsense in enumerate(NONSENSE):
            await wait_until(lambda: not follows_by_tcp(daemon, "f"))
            await one.say(nonsense, f"{SERVER}/events")
            await wait_until(lambda number=number: len(lost) > number)
            await write(database, number + 3, number + 3)
            await wait_until(lambda number=number: found[-1] == number + 3)
        await wait_until(lambda: not follows_by_tcp(daemon, "f"))
        last = len(NONSENSE) + 3

        async def publish_nothing(*_: object) -> None:
            await trio.lowlevel.checkpoint()

        with monkeypatch.context() as patch:
            patch.setattr(RedisOutlet, "_publish", publish_nothing)
            await write(database, last, last)
            await wait_until(lambda: found[-1] == last)
        await wait_until(lambda: not follows_by_tcp(daemon, "f"))
        assert found == list(range(1, last + 1))


async def test_an_address_that_redis_names_ends_no_program_and_gets_no_secret(
    redis: RealRedis | ModelRedis, start_daemon: Start
) -> None:
    with pytest.raises(UsageError, match="name the daemons that may have it"):
        async with open_client(redis.url, name="f", server_name=SERVER, token=SECRET):
            pass
    reached: list[bytes] = []

    async def listen(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            reached.append(bytes(await stream.receive_some()))

    async with AsyncExitStack() as stack:
        writer = await open_redis(parse_redis(redis.url), name="w")
        stack.push_async_callback(writer.aclose)
        daemon = await stack.enter_async_context(start_daemon(token=SECRET, server_name=SERVER))
        right = str(daemon.addresses[0])
        nursery = await stack.enter_async_context(trio.open_nursery())
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, listen, listeners)
        wrong = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        plain = await stack.enter_async_context(open_client(redis.url, name="f", server_name=SERVER))
        for address in (*ADDRESSES, wrong):
            await announce(writer, address)
            with pytest.raises((ConnectionLost, RedisUnavailable)):
                await plain.streams()
        reached.clear()
        known = [right, "127.0.0.1:1"]
        client = await stack.enter_async_context(
            open_client(redis.url, name="f", server_name=SERVER, token=SECRET, daemon=known)
        )
        for address in (wrong, *ADDRESSES[:3], right):
            await announce(writer, address)
            assert await client.streams() == ()
        assert reached == []
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("quick_followers")
async def test_a_client_is_told_of_a_row_that_cannot_be_sent_as_on_tcp(
    redis: RealRedis | ModelRedis, start_daemon: Start, database: Database
) -> None:
    await database.execute("CREATE TABLE numbers (id bigserial PRIMARY KEY, n int)")
    await Registry(database).add("numbers", "public.numbers", "id", row="to_json('row ' || t.id || left('', 1 / t.n))")
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(start_daemon(**redis_of(redis.url)))
        address = str(daemon.addresses[0])
        client = await stack.enter_async_context(open_client(redis.url, name="f", server_name=SERVER, daemon=address))
        await wait_publishing(daemon)
        follower = await stack.enter_async_context(
            client.follow({"numbers": "EARLIEST"}, patience=None, also=(Disconnected,))
        )
        lost: list[Disconnected] = []
        found = await stack.enter_async_context(collecting(follower, lost))
        await database.execute("INSERT INTO numbers (n) VALUES (1), (1)")
        await wait_until(lambda: found == [1, 2])
        await wait_until(lambda: not follows_by_tcp(daemon, "f"))
        await database.execute("INSERT INTO numbers (n) VALUES (1), (0), (1)")
        await wait_until(lambda: any(isinstance(one.error, RowUnreadable) for one in lost))
        assert found == [1, 2, 3]
        await database.execute("UPDATE numbers SET n = 1")
        await wait_until(lambda: found == [1, 2, 3, 4, 5])


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_a_redis_with_tls_is_used_only_with_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost")
    files = ("-keyout", key, "-out", cert, "-addext", "subjectAltName=DNS:localhost")
    await trio.run_process(["openssl", "req", *made, *files], capture_stderr=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    with real_redis(tmp_path, *options, "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"):
        link = await open_redis(parse_redis(f"rediss://localhost:{port}/1", ca=cert), name="test")
        assert await link.call("PING") == b"PONG"
        await link.aclose()
        with pytest.raises(RedisUnavailable, match=r"no connection to rediss://localhost:.* certificate"):
            await open_redis(parse_redis(f"rediss://localhost:{port}/1"), name="test")
