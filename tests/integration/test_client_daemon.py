"""Both clients on a real daemon: the conversation about tubes, every stream at once, the blocking one through cuts."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from replicad.client.blocking_client import BlockingClient
from replicad.client.events import RowBatch, StreamsChanged
from replicad.client.requests import parse_pods
from replicad.errors import BadToken, CursorAhead, LeaseHeld, LeaseLost, PartitionsChanged, UnknownTube
from replicad.postgres.bridge import Database
from replicad.protocol.tokens import START, Cursor
from replicad.retry import Backoff
from replicad.streams.registry import Registry
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.loops import LOOPS

from .clients.both import InThread
from .clients.proxy import FaultProxy

PODS = 300
HALF, OTHER, WHOLE = Part(0, 2), Part(1, 2), Part(0, 1)


@pytest.fixture(params=[BlockingClient, *(partial(InThread, loop) for loop in LOOPS)], ids=["blocking", *LOOPS])
def make_client(request: pytest.FixtureRequest, daemon: Daemon) -> Callable[[], Any]:
    address = daemon.addresses[0]
    return partial(request.param, address.host, address.port, name="a test", server_name="example.com")


@pytest.fixture
async def tube(database: Database, daemon: Daemon) -> Database:
    """A tube `cities` of two partitions, with as many regular pods in either."""
    await database.execute("SELECT tube.tube_ensure_exists('cities', 2)")
    await database.execute(
        f"SELECT tube.cities_touch(n % 2, ARRAY[n, n + 1000], 'U') FROM generate_series(1, {PODS}) n"
    )
    await database.execute("SELECT tube.cities_touch(0, ARRAY[7], 'B')")
    return database


def wait_for_pods(client: Any, term: int, pods: int) -> None:
    """Until the daemon knows that as many may be read."""
    while client.plan("cities", WHOLE, term, wait=5.0).pods < pods:
        pass


async def test_the_whole_conversation_about_a_tube(tube: Database, make_client: Callable[[], Any]) -> None:
    def converse() -> None:
        with make_client() as client, make_client() as rival:
            assert client.tube("cities") == 2
            term = client.claim("cities", WHOLE, ttl=20.0, holder="me").term
            assert client.claim("cities", WHOLE, holder="me").term == term
            assert client.renew("cities", WHOLE, term).term == term
            with pytest.raises(LeaseHeld, match="me"):
                rival.claim("cities", HALF)
            wait_for_pods(client, term, PODS + 1)

            plan = client.plan("cities", HALF, term, limit=10)
            answer = client.pods("cities", HALF, term, upto=plan.cursor)
            pods = list(answer)
            assert answer.end.pods == plan.pods == len(pods) == 10
            assert all(pod.shard == 0 and pod.op == "U" and pod.ids[1] == pod.ids[0] + 1000 for pod in pods)
            assert [pod.seq for pod in pods] == sorted(pod.seq for pod in pods)
            everything = list(client.pods("cities", HALF, term))
            assert [pod.op for pod in everything] == ["U"] * (PODS // 2) + ["B"]
            if isinstance(client, BlockingClient):
                chunks = client.pod_chunks("cities", HALF, term)
                assert [pod for chunk in chunks for pod in parse_pods(chunk)] == everything

            assert client.ack("cities", HALF, term, [pod.seq for pod in pods]) == 10
            assert client.ack("cities", HALF, term, [pod.seq for pod in pods]) == 0
            last = everything[-1].seq
            assert client.park("cities", HALF, term, last, [], tries=3, error="poison\nin the well") == 1
            rest = client.plan("cities", HALF, term, plan.cursor)
            assert client.ack_upto("cities", HALF, term, START, rest.cursor) == PODS // 2 - 10
            assert list(client.pods("cities", HALF, term)) == []

            client.release("cities", WHOLE, term)
            with pytest.raises(LeaseLost):
                client.plan("cities", HALF, term)
            with pytest.raises(LeaseLost):
                client.ack_upto("cities", OTHER, term, START, rest.cursor)
            with pytest.raises(PartitionsChanged):
                client.claim("cities", Part(0, 3))
            with pytest.raises(UnknownTube):
                client.tube("nowhere")
            term = rival.claim("cities", OTHER, wait=5.0).term
            with pytest.raises(CursorAhead):
                rival.pods("cities", OTHER, term, Cursor(1 << 40, 0), limit=1).__iter__().__next__()
            assert len(list(rival.pods("cities", OTHER, term))) == PODS // 2

    await trio.to_thread.run_sync(converse)
    assert await tube.fetch_value("SELECT count(*) FROM tube.cities") == PODS // 2


async def test_a_long_poll_is_answered_when_a_pod_arrives_and_taken_over_when_a_lease_ends(
    tube: Database, make_client: Callable[[], Any]
) -> None:
    await tube.execute("DELETE FROM tube.cities")
    waiting = threading.Event()
    found: list[Any] = []

    def poll() -> None:
        with make_client() as client:
            term = client.claim("cities", HALF).term
            waiting.set()
            found.append(client.plan("cities", HALF, term, wait=30.0))
            client.release("cities", HALF, term)

    def take_over() -> None:
        waiting.wait(PATIENCE)
        with make_client() as client:
            found.append(client.claim("cities", HALF, wait=30.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, poll)
        nursery.start_soon(trio.to_thread.run_sync, take_over)
        await trio.to_thread.run_sync(waiting.wait)
        await tube.execute("SELECT tube.cities_touch(0, ARRAY[1], 'U')")
    assert found[0].pods == 1
    assert found[1].part == HALF


async def test_every_stream_is_followed_and_those_that_are_added_and_removed(
    events: Database, make_client: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.follow_loop.LOOK_INTERVAL", 0.0)

    async def add(name: str) -> None:
        await events.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, body jsonb)")
        await Registry(events).add(name, f"public.{name}", "id", row="body")

    client = await trio.to_thread.run_sync(make_client)
    follower = await trio.to_thread.run_sync(partial(client.follow, None, also=(StreamsChanged,)))
    step: Callable[[], Any] = partial(trio.to_thread.run_sync, next, follower, abandon_on_cancel=True)

    async with trio.open_nursery() as nursery:

        async def write_until_seen() -> None:
            n = 0
            while True:
                n += 1
                await events.execute("INSERT INTO events (body) VALUES ($1::jsonb)", str(n))
                await trio.sleep(0.05)

        nursery.start_soon(write_until_seen)
        assert (await step()).stream == "events"
        await add("later")
        event = await step()
        while isinstance(event, RowBatch):
            event = await step()
        assert event == StreamsChanged(("later",), ())
        await events.execute("INSERT INTO later (body) VALUES ('7')")
        while (event := await step()).stream != "later":
            pass
        assert event == RowBatch("later", "master", 1, ["7"])
        await Registry(events).remove("later")
        event = await step()
        while not isinstance(event, StreamsChanged):
            event = await step()
        assert event == StreamsChanged((), ("later",))
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(follower.close)
        await trio.to_thread.run_sync(client.close)


@pytest.mark.parametrize("linear", [False, True])
async def test_tokens_carry_the_epoch_so_that_a_restore_cannot_pass_unnoticed(
    events: Database, make_client: Callable[[], Any], linear: bool
) -> None:
    await events.execute("INSERT INTO events (body) VALUES ('1')")

    def read() -> None:
        with make_client() as client:
            with client.follow({"events": "EARLIEST"}, linear) as follower:
                next(follower)
                token = follower.token("events")
            assert re.fullmatch("[0-9a-f]{8,32}!1", token)
            with client.follow({"events": f"0123456789abcdef!{token[-1]}"}, linear) as follower:
                with pytest.raises(BadToken, match="is of generation 0123456789abcdef"):
                    next(follower)

    await trio.to_thread.run_sync(read)


@pytest.mark.parametrize("linear", [False, True])
async def test_the_blocking_client_gets_each_row_once_wherever_it_is_cut(
    events: Database, daemon: Daemon, linear: bool
) -> None:
    chance = random.Random(4)
    budgets = [chance.randint(1, 6000) for _ in range(15)]

    def read() -> list[int]:
        got: list[int] = []
        with FaultProxy(daemon.addresses[0].port, budgets) as proxy:
            with BlockingClient("127.0.0.1", proxy.port, name="reader") as client:
                with client.follow({"events": "EARLIEST"}, linear, backoff=Backoff(0.001, 0.02)) as follower:
                    for batch in follower:
                        got += map(int, batch.rows)
                        if len(got) >= 1000:
                            return got
        raise AssertionError("unreachable")

    async with trio.open_nursery() as nursery:

        async def write() -> None:
            for first in range(0, 1000, 20):
                rows = f"SELECT to_jsonb(n) FROM generate_series({first}, {first + 19}) n"
                await events.execute(f"INSERT INTO events (body) {rows}")
                await events.execute("SELECT nextval('events_id_seq')")

        nursery.start_soon(write)
        assert await trio.to_thread.run_sync(read) == list(range(1000))
