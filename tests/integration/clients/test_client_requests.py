"""Requests on a real socket: answers, refusals, time-outs, losses. Every claim holds for both clients."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from replicad.errors import (
    ConnectionLost,
    LeaseHeld,
    LeaseLost,
    LocalProtocolError,
    NotAuthorised,
    RemoteProtocolError,
    ReplicadError,
    UnknownTube,
    WrongServer,
)
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from tests import vocabulary as c

from .conftest import MakeClient, wait_until
from .fake import FakeDaemon, FakeSession
from .world import World

HALF = Part(0, 2)
QUICK = Timing(ping_interval=0.05, peer_timeout=0.8, line_timeout=30)
STEADY = Timing(ping_interval=0.1, peer_timeout=3.0, line_timeout=30)  # for who must not be taken for lost
LONGER = 35  # PINGs of STEADY: they take longer than its time-out


def test_a_worker_claims_reads_acks_and_releases(client: Any, world: World, fake: FakeDaemon) -> None:
    for number in range(5):
        world.touch("cities", number, number + 10, op="B" if number == 1 else "U", shard=number % 2 * 2)
    assert client.streams() == ("caches", "events")
    assert client.tube("cities") == 2
    lease = client.claim("cities", HALF, ttl=20.0, holder="me")
    assert (lease.part, lease.ttl) == (HALF, 20.0)
    term = lease.term
    assert client.claim("cities", HALF, holder="me").term == term, "the same holder keeps its term"
    assert client.renew("cities", HALF, term).term == term

    plan = client.plan("cities", HALF, term, limit=3)
    assert (plan.cursor, plan.pods) == (Cursor(4, 0), 3)
    answer = client.pods("cities", HALF, term, limit=10)
    pods = list(answer)
    assert [pod.seq for pod in pods] == [1, 3, 4, 5, 2], "regular pods come before backfill pods"
    assert (answer.end.cursor, answer.end.pods) == (Cursor(5, 2), 5)
    assert [pod.seq for pod in client.pods("cities", HALF, term, Cursor(1, 0), upto=Cursor(4, 0))] == [3, 4]

    assert client.ack("cities", HALF, term, [1, 3, 99]) == 2
    assert client.ack("cities", HALF, term, []) == 0
    assert client.park("cities", HALF, term, 4, [3], tries=5, error="no\nsuch\0 column") == 1
    assert world.tubes["cities"].parked[0].error == "no such column"
    assert client.ack_upto("cities", HALF, term, Cursor(0, 0), Cursor(5, 2)) == 3
    client.release("cities", HALF, term)
    with pytest.raises(LeaseLost, match="is over"):
        client.renew("cities", HALF, term)
    assert fake.connections == 1
    assert [command for command in fake.received if isinstance(command, c.Name)] == [c.Name("a test")]


def test_commands_that_are_not_answered_just_go_out(client: Any, fake: FakeDaemon) -> None:
    client.send(c.UserSync("w1", "@a:b", None, True, 5), c.Doorbell())
    wait_until(lambda: c.Doorbell() in fake.received, "both have arrived")
    assert c.UserSync("w1", "@a:b", None, True, 5) in fake.received


def test_a_refusal_leaves_the_connection_as_it_was(client: Any, fake: FakeDaemon, make_client: MakeClient) -> None:
    make_client(fake.port).claim("cities", HALF, holder="the-other")
    with pytest.raises(LeaseHeld, match="the-other has it"):
        client.claim("cities", HALF, holder="me")
    with pytest.raises(UnknownTube):
        client.tube("nowhere")
    with pytest.raises(LocalProtocolError):
        client.tube("two words")
    assert client.tube("cities") == 2
    assert fake.connections == 2


def test_a_long_poll_outlasts_the_answer_time_and_is_answered_at_once_when_pods_come(
    make_client: MakeClient, fake: FakeDaemon, world: World
) -> None:
    client = make_client(fake.port, answer_timeout=2.0)
    term = client.claim("cities", HALF).term
    began = time.monotonic()
    assert list(client.pods("cities", HALF, term, wait=2.5)) == []
    assert time.monotonic() - began >= 2.5
    timer = threading.Timer(0.3, world.touch, ("cities", 1))
    timer.start()
    assert client.plan("cities", HALF, term, wait=30.0).pods == 1


# --- who is who ---


def test_the_secret_lets_us_in_and_nothing_else_does(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, token="s3cret")
    daemon.start()
    try:
        assert make_client(daemon.port, token="s3cret").tube("cities") == 2
        assert isinstance(daemon.received[0], c.Auth), "the secret comes first"
        for wrong in ("guess", None):
            with pytest.raises(NotAuthorised) as caught:
                make_client(daemon.port, token=wrong).tube("cities")
            assert "guess" not in str(caught.value)
    finally:
        daemon.kill()


def test_another_server_than_the_expected_one_gets_nothing_from_us(fake: FakeDaemon, make_client: MakeClient) -> None:
    assert make_client(fake.port, server_name="fake").tube("cities") == 2
    fake.received.clear()
    with pytest.raises(WrongServer, match="'fake' where 'production' was expected"):
        make_client(fake.port, server_name="production", token="s3cret").tube("cities")
    assert not [command for command in fake.received if isinstance(command, c.Auth | c.Name)]


# --- losses ---


def test_nobody_there_is_one_clear_sentence(make_client: MakeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionLost, match=rf"^no connection to 127\.0\.0\.1:{port}: Connection refused$"):
        make_client(port).tube("cities")


def test_somebody_who_never_greets_is_given_up_in_time(make_client: MakeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ConnectionLost, match="in time"):
            make_client(listener.getsockname()[1], connect_timeout=0.2).tube("cities")


def test_a_restart_between_two_requests_goes_unnoticed(client: Any, fake: FakeDaemon) -> None:
    client.tube("cities")
    for end in (fake.stop, fake.kill):
        end()
        fake.start()
        assert client.tube("cities") == 2
    assert fake.connections == 3


@pytest.mark.parametrize("farewell", ["server stopping", None])
def test_a_restart_under_a_request_is_raised_once_and_the_next_one_connects_anew(
    client: Any, fake: FakeDaemon, farewell: str | None
) -> None:
    term = client.claim("cities", HALF).term
    stopper = threading.Thread(target=lambda: (_polling(fake), fake.stop(farewell)))
    stopper.start()
    with pytest.raises(ConnectionLost) as caught:
        client.plan("cities", HALF, term, wait=30.0)
    assert caught.value.code == ("server_stopping" if farewell else "connection_lost")
    stopper.join()
    fake.start()
    assert client.plan("cities", HALF, term).pods == 0, "the lease outlives the connection"


def _polling(fake: FakeDaemon) -> None:
    wait_until(lambda: any(isinstance(command, c.Pods) for command in fake.received), "it polls")


def test_a_late_answer_is_never_taken_for_the_next_ones(make_client: MakeClient, fake: FakeDaemon) -> None:
    client = make_client(fake.port, answer_timeout=0.5)
    held: list[FakeSession] = []

    def hold(session: FakeSession, command: Command) -> bytes | None:
        if isinstance(command, c.Tube):
            held.append(session)
            return b"TUBE cit"
        return None

    fake.hook = hold
    with pytest.raises(ConnectionLost, match="did not answer in time"):
        client.tube("cities")
    fake.hook = None
    assert client.streams() == ("caches", "events")
    assert fake.connections == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"nonsense\n", RemoteProtocolError),
        (b"\xff\xfe\n", RemoteProtocolError),
        (b"TUBE other 3\n", RemoteProtocolError),
        (b"LEASE cities 0/2 5 30\n", RemoteProtocolError),
        (b"ERROR bad_line: what?\n", RemoteProtocolError),
        (b"ERROR internal error; the server's log has it\n", ReplicadError),
    ],
)
def test_after_a_broken_answer_the_connection_is_not_used_again(
    client: Any, fake: FakeDaemon, answer: bytes, error: type[ReplicadError]
) -> None:
    fake.hook = lambda _, command: answer if isinstance(command, c.Tube) else None
    with pytest.raises(error):
        client.tube("cities")
    fake.hook = None
    assert client.tube("cities") == 2
    assert fake.connections == 2


# --- keep-alive ---


def test_an_idle_client_keeps_its_connection_alive_and_reads_what_comes(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, timing=STEADY)  # it hangs up on who is silent for 3 s
    daemon.start()
    try:
        client = make_client(daemon.port, timing=STEADY)
        client.tube("cities")
        pings = [0]
        wait_until(lambda: pings.append(_pings(daemon)) or pings[-1] >= LONGER, "PINGs were sent for longer than that")
        assert client.tube("cities") == 2
        assert daemon.connections == 1
    finally:
        daemon.kill()


def _pings(daemon: FakeDaemon) -> int:
    return sum(isinstance(command, c.Ping) for command in daemon.received)


def test_a_peer_that_falls_silent_is_noticed_while_idle(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, timing=QUICK)
    daemon.start()
    try:
        make_client(daemon.port, timing=QUICK).tube("cities")
        daemon.silent = True
        wait_until(lambda: not daemon.sessions, "the client has hung up")
    finally:
        daemon.kill()


def test_a_peer_that_falls_silent_amid_a_request_is_not_waited_for(world: World, make_client: MakeClient) -> None:
    daemon = FakeDaemon(world, timing=QUICK)
    daemon.start()
    try:
        client = make_client(daemon.port, timing=QUICK, answer_timeout=60.0)
        term = client.claim("cities", HALF).term
        daemon.silent = True
        with pytest.raises(ConnectionLost, match=r"has been silent for 0\.8 s"):
            client.plan("cities", HALF, term, wait=60.0)
    finally:
        daemon.kill()


def test_requests_of_many_threads_get_each_their_own_answer(client: Any, world: World) -> None:
    terms = {part: client.claim("cities", part).term for part in (Part(0, 2), Part(1, 2))}
    for number in range(200):
        world.touch("cities", number, shard=number % 2)
    wrong: list[object] = []

    def work(part: Part) -> None:
        try:
            for seq in range(part.partition + 1, 201, 2):
                if client.ack("cities", part, terms[part], [seq]) != 1 or client.tube("cities") != 2:
                    wrong.append(seq)
        except Exception as error:  # noqa: BLE001 - the main thread asserts that there was none
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in terms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert world.tubes["cities"].pods == {}


def test_blocks_come_as_they_were_sent_and_the_connection_stays_in_step(client: Any, fake: FakeDaemon) -> None:
    sent = [b"\nARROW cities 0/2 1 5\n" * 40_000, b"y", b"\0\xff\n", bytes(range(256)) * 4_000]
    lines = b"".join(b"PING 5\nARROW cities 0/2 2 %d\n%b\n" % (len(data), data) for data in sent)
    answer = lines + b"REMOTE_SERVER_UP a.org\nCURSOR cities 0/2 9.0 8\n"
    fake.hook = lambda _, command: answer if isinstance(command, c.Pods) else None
    for _ in range(3):
        found = client.pod_blocks("cities", HALF, 7)
        assert [(block.pods, bytes(block.data)) for block in found] == [(2, data) for data in sent]
        assert found.end == c.CursorAt("cities", HALF, Cursor(9, 0), 8)
        assert client.tube("cities") == 2
    assert fake.connections == 1
