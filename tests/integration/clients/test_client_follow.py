"""Following streams on a real socket, through cuts, restarts, resets and silence; every claim is for both clients."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from replicad.client.events import Connected, Disconnected, PositionMoved, Reset, RowBatch, StreamsChanged
from replicad.errors import (
    BadToken,
    ConnectionLost,
    LocalProtocolError,
    NotAuthorised,
    RemoteProtocolError,
    UnknownStream,
    WrongServer,
)
from replicad.protocol.connection import Timing
from replicad.retry import Backoff
from replicad.tubes.commands import Part
from tests import vocabulary as c

from .conftest import MakeClient, wait_until
from .fake import FakeDaemon
from .proxy import FaultProxy
from .world import FakeStream, World

QUICK = Timing(ping_interval=0.05, peer_timeout=0.8, line_timeout=30)
STEADY = Timing(ping_interval=0.1, peer_timeout=3.0, line_timeout=30)  # for who must not be taken for lost
LONGER = 35  # PINGs of STEADY: they take longer than its time-out


LAST = '["the last"]'


def take(follower: Iterator[Any], count: int) -> list[Any]:
    return [next(follower) for _ in range(count)]


def write_facts(world: World, chance: random.Random, facts: int, pause: float = 0.0) -> None:
    """Facts of one to three rows by up to four writers in two streams, and some rollbacks."""
    for number in range(facts):
        rows = [json.dumps([number, row, "é" * chance.randint(0, 30)]) for row in range(chance.choice([0, 1, 1, 1, 3]))]
        world.commit(chance.choice(["events", "caches"]), f"w{chance.randint(1, 4)}", *rows, skip=chance.randint(1, 3))
        if pause:
            time.sleep(pause)
    for stream in world.streams:
        world.commit(stream, "w1", LAST)


def check(world: World, taken: list[RowBatch], *, linear: bool = False) -> None:
    """Every fact once, whole, and in the order of its writer (of the stream, in a linear subscription)."""
    by_stream: dict[str, list[RowBatch]] = defaultdict(list)
    for batch in taken:
        by_stream[batch.stream].append(batch)
    for name, stream in world.streams.items():
        had = [(batch.token, batch.instance, batch.rows) for batch in by_stream[name]]
        if linear:
            assert had == stream.facts
            continue
        assert sorted(had) == stream.facts
        for writer in stream.numbers:
            assert [fact for fact in had if fact[1] == writer] == [fact for fact in stream.facts if fact[1] == writer]


def wanted(world: World, token: str = "EARLIEST") -> dict[str, str | None]:
    return dict.fromkeys(world.streams, token)


@pytest.mark.parametrize("linear", [False, True], ids=["per writer", "linear"])
@pytest.mark.parametrize("seed", range(3))
def test_each_row_arrives_once_and_in_order_wherever_the_connection_is_cut(
    fake: FakeDaemon, world: World, make_client: MakeClient, seed: int, linear: bool
) -> None:
    chance = random.Random(seed)
    write_facts(world, chance, 200)
    budgets = [chance.choice([chance.randint(1, 300), chance.randint(1, 8000)]) for _ in range(12)]
    with FaultProxy(fake.port, budgets, seed) as proxy:
        writer = threading.Thread(target=write_facts, args=(world, chance, 200, 0.002))
        follow = make_client(proxy.port).follow
        with follow(wanted(world), linear, also=(Disconnected,), backoff=Backoff(0.001, 0.01)) as follower:
            writer.start()
            taken: list[RowBatch] = []
            losses = ends = 0
            while ends < 2 * len(world.streams):
                event = next(follower)
                assert not isinstance(event, Reset)
                if isinstance(event, Disconnected):
                    losses += 1
                else:
                    taken.append(event)
                    ends += event.rows == [LAST]
        assert losses >= 3, "or nothing was tested"
    check(world, taken, linear=linear)


def test_restarts_of_the_daemon_cost_no_row(fake: FakeDaemon, world: World, make_client: MakeClient) -> None:
    follower = make_client(fake.port).follow(wanted(world, "NOW"), also=(Connected, Disconnected))
    assert next(follower) == Connected("fake")
    taken: list[RowBatch] = []
    for end in (fake.stop, fake.kill, fake.stop):
        write_facts(world, random.Random(1), 5)
        end()
        write_facts(world, random.Random(2), 5)
        fake.start()
        facts = sum(len(stream.facts) for stream in world.streams.values())
        while len(taken) < facts:
            event = next(follower)
            if isinstance(event, RowBatch):
                taken.append(event)
    check(world, taken)
    follower.close()


def test_a_program_that_keeps_its_tokens_goes_on_where_it_was(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    write_facts(world, random.Random(5), 60)
    facts = sum(len(stream.facts) for stream in world.streams.values())
    client = make_client(fake.port)
    tokens = wanted(world)
    taken: list[RowBatch] = []
    while len(taken) < facts:
        with client.follow(tokens) as follower:
            taken += take(follower, min(7, facts - len(taken)))
            tokens = follower.tokens()
            assert tokens == {stream: follower.token(stream) for stream in world.streams}
    check(world, taken)


def test_a_slow_reader_keeps_its_connection_alive(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, timing=STEADY)  # it hangs up on who is silent for 3 s
    daemon.start()
    try:
        client = make_client(daemon.port, timing=STEADY)
        with client.follow({"events": "EARLIEST"}, also=(Disconnected,)) as follower:
            world.commit("events", "w1", "[1]")
            next(follower)
            before = sum(isinstance(command, c.Ping) for command in daemon.received)
            wait_until(
                lambda: sum(isinstance(command, c.Ping) for command in daemon.received) > before + LONGER,
                "PINGs come",
            )
            world.commit("events", "w1", "[2]")
            assert next(follower) == RowBatch("events", "w1", 2, ["[2]"])
            assert daemon.connections == 1
    finally:
        daemon.kill()


def test_a_half_open_connection_is_noticed_and_replaced(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, timing=QUICK)
    daemon.start()
    try:
        with FaultProxy(daemon.port) as proxy:
            client = make_client(proxy.port, timing=QUICK)
            with client.follow({"events": "EARLIEST"}, also=(Connected, Disconnected)) as follower:
                next(follower)
                proxy.frozen = True
                event = next(follower)
                assert isinstance(event, Disconnected)
                assert "has been silent for 0.8 s" in str(event.error)
                proxy.frozen = False
                world.commit("events", "w1", "[1]")
                while not isinstance(event, RowBatch):
                    event = next(follower)
    finally:
        daemon.kill()


def test_a_restore_is_told_as_a_reset_and_then_everything_there_is_comes(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    world.commit("events", "w1", "[1]", skip=9)
    with make_client(fake.port).follow({"events": "EARLIEST"}) as follower:
        assert next(follower) == RowBatch("events", "w1", 9, ["[1]"])
        fake.kill()
        world.reset("events", "ffffffff")
        world.commit("events", "w1", "[2]")
        fake.start()
        assert next(follower) == Reset("events", None, None, "bad_token")
        assert next(follower) == RowBatch("events", "w1", 1, ["[2]"])
        assert follower.token("events") == "ffffffff!1"


@pytest.mark.parametrize("linear", [False, True])
def test_after_a_promotion_that_lost_rows_reading_goes_on_from_the_fork(
    fake: FakeDaemon, world: World, make_client: MakeClient, linear: bool
) -> None:
    for row in range(1, 5):
        world.commit("events", "w1", f"[{row}]")
    with make_client(fake.port).follow({"events": "EARLIEST"}, linear) as follower:
        take(follower, 4)
        fake.kill()
        world.fork("events", "ffffffff", 2)
        world.commit("events", "w1", "[5]")
        fake.start()
        assert next(follower) == Reset("events", "*" if linear else None, 2, "forked")
        assert next(follower) == RowBatch("events", "w1", 3, ["[5]"])
        assert follower.token("events") == "ffffffff!3"


def test_a_kept_token_that_lies_above_a_fork_goes_on_from_the_fork(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    for writer in ("w1", "w2", "w1"):
        world.commit("events", writer, "[1]")
    client = make_client(fake.port)
    with client.follow({"events": "EARLIEST"}) as follower:
        take(follower, 3)
        kept = follower.token("events")
    world.fork("events", "ffffffff", 1)
    world.commit("events", "w2", "[5]")
    with client.follow({"events": kept}) as follower:
        assert take(follower, 2) == [Reset("events", None, 1, "forked"), RowBatch("events", "w2", 2, ["[5]"])]


def test_a_fork_while_connected_takes_back_what_lies_above_it(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    for writer in ("w1", "w2", "w1"):
        world.commit("events", writer, "[1]")
    with make_client(fake.port).follow({"events": "EARLIEST"}) as follower:
        take(follower, 3)
        world.fork("events", "ffffffff", 1)
        world.commit("events", "w2", "[5]")
        events = take(follower, 4)
        assert sorted(event.instance or "" for event in events[:3]) == ["", "w1", "w2"]
        assert {event.token for event in events[:3]} == {1}
        assert events[3] == RowBatch("events", "w2", 2, ["[5]"])
        assert follower.token("events") == "ffffffff!1~2.2"


def test_a_reset_while_connected_is_told_too(fake: FakeDaemon, world: World, make_client: MakeClient) -> None:
    world.commit("events", "w1", "[1]", skip=9)
    with make_client(fake.port).follow({"events": "EARLIEST"}) as follower:
        next(follower)
        fake.say("POSITION events w1 9 2")
        assert next(follower) == Reset("events", "w1", 2, "moved_back")


def test_what_else_is_asked_for_is_handed_over_too(fake: FakeDaemon, world: World, make_client: MakeClient) -> None:
    client = make_client(fake.port)
    also = (Connected, PositionMoved, c.RemoteServerUp)
    with client.follow({"events": "NOW"}, also=also) as follower:
        assert next(follower) == Connected("fake")
        world.commit("events", "w1")
        assert take(follower, 2) == [PositionMoved("events", "w1", 0), PositionMoved("events", "w1", 1)]
        client.send(c.RemoteServerUp("a.org"))
        assert next(follower) == c.RemoteServerUp("a.org")


def test_every_stream_is_followed_where_none_is_named(
    fake: FakeDaemon, world: World, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.follow_loop.LOOK_INTERVAL", 0.0)
    write_facts(world, random.Random(3), 20)
    facts = sum(len(stream.facts) for stream in world.streams.values())
    with make_client(fake.port).follow(None, begin="EARLIEST", also=(StreamsChanged,)) as follower:
        check(world, take(follower, facts))
        world.streams["later"] = FakeStream()
        fake.say("PING 1")
        assert next(follower) == StreamsChanged(("later",), ())
        world.commit("later", "w1", "[1]")
        assert next(follower) == RowBatch("later", "w1", 1, ["[1]"])


# --- what is raised ---


@pytest.mark.parametrize(
    ("follow", "options", "error"),
    [
        ({"nowhere": None}, {}, UnknownStream),
        ({"events": "ffffffff!5"}, {}, BadToken),
        ({"events": None}, {"server_name": "another"}, WrongServer),
        ({"events": None}, {"token": "two words"}, LocalProtocolError),
    ],
)
def test_a_mistake_of_the_callers_is_raised(
    fake: FakeDaemon,
    make_client: MakeClient,
    follow: dict[str, str | None],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    with make_client(fake.port, **options).follow(follow) as follower, pytest.raises(error):
        next(follower)


def test_a_wrong_secret_is_not_tried_again(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, token="s3cret")
    daemon.start()
    try:
        with make_client(daemon.port, token="guess").follow({"events": None}) as follower:
            with pytest.raises(NotAuthorised):
                next(follower)
        assert daemon.connections == 1
    finally:
        daemon.kill()


def test_a_server_that_speaks_another_language_is_not_tried_again(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    world.commit("events", "w1", "[1]")
    with make_client(fake.port).follow({"events": "EARLIEST"}) as follower:
        next(follower)
        fake.say("HELLO WORLD")
        with pytest.raises(RemoteProtocolError):
            next(follower)
        with pytest.raises(StopIteration):
            next(follower)


def test_nobody_there_is_given_up_after_the_first_patience(fake: FakeDaemon, make_client: MakeClient) -> None:
    client = make_client(fake.port)
    fake.kill()
    with client.follow({"events": None}, first_patience=0.0) as follower:
        with pytest.raises(ConnectionLost, match="Connection refused"):
            next(follower)


def test_closing_ends_the_iteration_wherever_it_is(fake: FakeDaemon, make_client: MakeClient) -> None:
    follower = make_client(fake.port).follow({"events": None}, also=(Connected,))
    next(follower)
    follower.close()
    assert list(follower) == []
    follower.close()


def test_requests_and_rows_do_not_get_in_each_others_way(
    fake: FakeDaemon, world: World, make_client: MakeClient
) -> None:
    client = make_client(fake.port)
    with client.follow({"events": "EARLIEST"}) as follower:
        term = client.claim("cities", Part(0, 2)).term
        for number in range(20):
            world.commit("events", "w1", f"[{number}]")
            assert client.plan("cities", Part(0, 2), term).pods == 0
        assert [batch.rows for batch in take(follower, 20)] == [[f"[{number}]"] for number in range(20)]
