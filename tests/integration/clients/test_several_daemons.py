"""An address of several daemons of one database: clients prefer the first, and go on at another one within a second."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from replicad.client.blocking_client import BlockingClient
from replicad.client.link import find_daemons
from replicad.config.settings import Address, parse_servers
from replicad.errors import ConnectionLost, NotAuthorised, UsageError
from replicad.tubes.commands import Part
from tests.loops import LOOPS

from .both import InThread
from .conftest import MakeClient
from .fake import FakeDaemon
from .world import World

SECOND = 1.0  # seconds for a change of daemons, which the docs promise


@pytest.fixture
def pair(world: World) -> Iterator[tuple[FakeDaemon, FakeDaemon]]:
    """Two daemons of one database."""
    daemons = FakeDaemon(world, name="first"), FakeDaemon(world, name="second")
    for daemon in daemons:
        daemon.start()
    yield daemons
    for daemon in daemons:
        daemon.kill()


def address_of(*daemons: FakeDaemon) -> str:
    return ",".join(f"127.0.0.1:{daemon.port}" for daemon in daemons)


@pytest.fixture(params=["blocking", *LOOPS])
def make(request: pytest.FixtureRequest) -> MakeClient:
    """Makes clients of an address."""
    made: MakeClient = BlockingClient if request.param == "blocking" else partial(InThread, request.param)
    return lambda address, **options: closing(made(address, None, **{"name": "a test", **options}))


def test_a_follower_goes_on_at_the_other_daemon_within_a_second(
    make: MakeClient, world: World, pair: tuple[FakeDaemon, FakeDaemon]
) -> None:
    first, second = pair
    world.commit("events", "w1", '["a"]')
    with make(address_of(first, second)) as client:
        with client.follow({"events": "EARLIEST"}) as follower:
            assert next(follower).rows == ['["a"]']
            assert (first.connections, second.connections) == (1, 0)
            first.kill()
            began = time.monotonic()
            world.commit("events", "w1", '["b"]')
            assert next(follower).rows == ['["b"]']
            assert time.monotonic() - began < SECOND
            assert second.connections == 1


def test_each_new_connection_begins_with_the_preferred_daemon(
    make: MakeClient, world: World, pair: tuple[FakeDaemon, FakeDaemon]
) -> None:
    first, second = pair
    first.kill()
    with make(address_of(first, second)) as client:
        assert client.tube("cities") == 2
        assert second.connections == 1
        first.start()
        second.stop()
        assert client.tube("cities") == 2
        assert (first.connections, second.connections) == (1, 1)


def test_a_daemon_that_accepts_and_says_nothing_costs_less_than_a_second(
    make: MakeClient, pair: tuple[FakeDaemon, FakeDaemon]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]},{address_of(pair[1])}"
        began = time.monotonic()
        with make(address) as client:
            assert client.claim("cities", Part(0, 2)).term
        assert time.monotonic() - began < 2 * SECOND  # with the time of the request itself


def test_the_error_names_every_daemon_if_none_answers(make: MakeClient, pair: tuple[FakeDaemon, FakeDaemon]) -> None:
    for daemon in pair:
        daemon.kill()
    with make(address_of(*pair)) as client, pytest.raises(ConnectionLost) as failed:
        client.tube("cities")
    assert all(f"127.0.0.1:{daemon.port}" in str(failed.value) for daemon in pair)


def test_a_daemon_that_refuses_the_client_is_not_passed_over(make: MakeClient, world: World) -> None:
    guarded, other = FakeDaemon(world, token="a secret"), FakeDaemon(world)
    for daemon in (guarded, other):
        daemon.start()
    try:
        with make(address_of(guarded, other), token="wrong") as client, pytest.raises(NotAuthorised):
            client.tube("cities")
        assert other.connections == 0
    finally:
        for daemon in (guarded, other):
            daemon.kill()


@pytest.mark.parametrize(
    ("host", "port", "found"),
    [
        ("db1", 9009, Address("db1", 9009)),
        ("::1", 9009, Address("::1", 9009)),
        ("db1:1", None, Address("db1", 1)),
        ("db1:1,db2:2", None, Address("db1", 1, (Address("db2", 2),))),
        ("db1, db2:2,[::1]:3", 9009, Address("db1", 9009, (Address("db2", 2), Address("::1", 3)))),
    ],
)
def test_an_address_names_one_daemon_or_several(host: str, port: int | None, found: Address) -> None:
    assert find_daemons(host, port) == found


@pytest.mark.parametrize("host", ["db1", "db1:1,db2", "db1:1,", ",", "db1:1,db 2:2"])
def test_an_address_without_a_port_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="give HOST:PORT"):
        find_daemons(host, None)


def test_the_command_line_takes_several_daemons_too() -> None:
    found: Any = parse_servers("db1,db2:1")
    assert str(found) == "db1:9009,db2:1"
    assert find_daemons(str(found), None) == found
