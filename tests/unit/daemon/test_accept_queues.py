"""Connections that wait to be accepted, on real sockets of the loopback."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, closing

import pytest
import trio

from replicad.config.settings import Address
from replicad.daemon.admission import QUEUES, listen
from replicad.errors import EnvironmentRefused

CROWD = 200


def accepted_in_a_round(waiting: list[socket.socket]) -> list[str]:
    """The addresses of one client of each queue."""
    found = []
    for queue in waiting:
        client, address = queue.accept()
        client.close()
        found.append(address[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="a filter that chooses the queue is a feature of Linux")
@pytest.mark.parametrize("crowds", [1, QUEUES - 2])
async def test_a_client_does_not_wait_to_be_accepted_behind_crowds_of_other_addresses(crowds: int) -> None:
    with closing(await listen(Address("127.0.0.1", 0))) as queues, ExitStack() as stack:
        (address,) = queues.addresses
        at = (address.host, address.port)
        for number in range(CROWD):
            source = f"127.0.0.{2 + number % crowds}"
            stack.enter_context(socket.create_connection(at, source_address=(source, 0)))
        stack.enter_context(socket.create_connection(at, source_address=("127.0.0.1", 0)))
        await queues.wait()
        found = accepted_in_a_round(queues.waiting())
    assert len(found) == crowds + 1
    assert "127.0.0.1" in found


async def test_connections_of_ipv6_are_accepted_too() -> None:
    try:
        opened = await listen(Address("::1", 0))
    except EnvironmentRefused:
        pytest.skip("this machine has no IPv6")
    with closing(opened) as queues:
        (address,) = queues.addresses
        with socket.create_connection((address.host, address.port)), trio.fail_after(10):
            await queues.wait()
            assert accepted_in_a_round(queues.waiting()) == ["::1"]


async def test_a_port_that_another_daemon_of_the_same_user_listens_on_is_refused() -> None:
    with closing(await listen(Address("127.0.0.1", 0))) as queues:
        with pytest.raises(EnvironmentRefused, match="the port is in use; choose another with --http"):
            await listen(queues.addresses[0], "--http")
    with closing(await listen(queues.addresses[0])) as again:
        assert again.addresses == queues.addresses, "closed, it is free for the next"


async def test_the_queue_that_comes_first_is_another_one_each_time() -> None:
    with closing(await listen(Address("127.0.0.1", 0))) as queues, ExitStack() as stack:
        (address,) = queues.addresses
        for number in (1, 2):
            source = (f"127.0.0.{number}", 0)
            stack.enter_context(socket.create_connection((address.host, address.port), source_address=source))
        await queues.wait()
        if len(queues.waiting()) == 1:
            pytest.skip("this system has no filter that chooses the queue")
        assert queues.waiting()[0] is not queues.waiting()[0]
