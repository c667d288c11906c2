"""What only the blocking client has: bulk pods, answers that are read piece by piece, threads, plain endpoints."""

from __future__ import annotations

import asyncio
import gc
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from replicad.client.blocking_client import BlockingClient, Endpoint
from replicad.client.events import Connected
from replicad.client.requests import parse_pods
from replicad.errors import ConnectionLost, LeaseLost, LocalProtocolError, UsageError
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from tests import vocabulary as c
from tests.conftest import PATIENCE
from tests.loops import run_on

from .conftest import wait_until
from .fake import FakeDaemon, FakeSession
from .world import World

HALF = Part(0, 2)


@pytest.fixture
def client(fake: FakeDaemon) -> Iterator[BlockingClient]:
    with BlockingClient("127.0.0.1", fake.port, name="a test", answer_timeout=5.0) as made:
        yield made


@pytest.fixture
def term(client: BlockingClient, world: World) -> int:
    """The term of a lease on a partition of 3,000 pods."""
    for number in range(3000):
        world.touch("cities", *range(number, number + 20))
    return client.claim("cities", HALF).term


def test_bulk_comes_as_whole_lines_whatever_is_said_in_between(
    client: BlockingClient, fake: FakeDaemon, term: int
) -> None:
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            fake.say("REMOTE_SERVER_UP a.org")
            fake.say("PING 5")

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        answer = client.pod_chunks("cities", HALF, term, limit=2500)
        chunks = list(answer)
    finally:
        stop.set()
        thread.join()
    assert len(chunks) > 1
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    pods = [pod for chunk in chunks for pod in parse_pods(chunk)]
    assert [pod.seq for pod in pods] == list(range(1, 2501))
    assert pods[7].ids == list(range(7, 27))
    assert answer.end == c.CursorAt("cities", HALF, Cursor(2500, 0), 2500)
    assert list(answer) == []
    assert answer.end.pods == 2500


def test_the_next_request_waits_for_the_end_of_an_answer_and_says_so_where_that_would_be_for_ever(
    client: BlockingClient, fake: FakeDaemon, term: int
) -> None:
    answer = client.pods("cities", HALF, term)
    assert next(answer).seq == 1
    with pytest.raises(LocalProtocolError, match="read on, or close"):
        client.tube("cities")
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(client.tube("cities")))
    thread.start()
    assert sum(1 for _ in answer) == 2999
    thread.join(PATIENCE)
    assert others == [2]
    assert fake.connections == 1


def test_an_answer_that_is_not_read_to_its_end_costs_the_connection_and_nothing_else(
    client: BlockingClient, fake: FakeDaemon, term: int
) -> None:
    with_close = client.pods("cities", HALF, term)
    next(with_close)
    with_close.close()
    assert client.tube("cities") == 2
    forgotten = client.pods("cities", HALF, term)
    next(forgotten)
    del forgotten
    gc.collect()
    assert client.tube("cities") == 2
    assert fake.connections == 3


def test_a_lease_that_is_lost_amid_the_pods_is_told_after_those_that_came(
    client: BlockingClient, fake: FakeDaemon, term: int
) -> None:
    row = '{"seq":1,"op":"U","shard":0,"ids":[1],"ts":"2026-01-01T00:00:00+00:00"}'
    lines = f"RDATA tube:cities 0/2 1 {row}\nERROR lease_lost: another has it\n".encode()
    fake.hook = lambda _, command: lines if isinstance(command, c.Pods) else None
    answer = client.pods("cities", HALF, term)
    assert next(answer).seq == 1
    with pytest.raises(LeaseLost):
        next(answer)
    assert client.tube("cities") == 2
    assert fake.connections == 1, "a refusal is a whole answer"


def test_a_slow_consumer_of_a_long_answer_keeps_its_connection_alive(world: World) -> None:
    timing = Timing(ping_interval=0.05, peer_timeout=2.0, line_timeout=30)
    daemon = FakeDaemon(world, timing=timing)
    daemon.start()
    for number in range(3000):
        world.touch("cities", *range(number, number + 200))  # more than sockets hold
    try:
        with BlockingClient("127.0.0.1", daemon.port, name="slow", timing=timing) as client:
            term = client.claim("cities", HALF).term
            answer = client.pods("cities", HALF, term)
            next(answer)
            before = len(daemon.received)
            wait_until(lambda: len(daemon.received) > before + 50, "PINGs were sent")
            assert sum(1 for _ in answer) == 2999
            assert daemon.connections == 1
    finally:
        daemon.kill()


def test_closing_ends_a_long_poll_of_another_thread_at_once(
    client: BlockingClient, fake: FakeDaemon, world: World
) -> None:
    term = client.claim("cities", HALF).term
    errors: list[Exception] = []

    def poll() -> None:
        try:
            client.plan("cities", HALF, term, wait=600.0)
        except ConnectionLost as error:
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    wait_until(lambda: any(isinstance(command, c.Pods) for command in fake.received), "it polls")
    client.close()
    client.close()
    thread.join(PATIENCE)
    assert [str(error) for error in errors] == [f"the connection to 127.0.0.1:{fake.port} was closed"]
    with pytest.raises(ConnectionLost, match="this client was closed"):
        client.tube("cities")


def test_closing_ends_a_follower_that_another_thread_waits_in(client: BlockingClient) -> None:
    follower = client.follow({"events": None}, also=(Connected,))
    next(follower)
    rest: list[object] = []
    thread = threading.Thread(target=lambda: rest.extend(follower))
    thread.start()
    follower.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert rest == []


def test_a_client_that_is_forgotten_leaves_no_thread_behind(fake: FakeDaemon) -> None:
    before = set(threading.enumerate())
    forgotten = [BlockingClient("127.0.0.1", fake.port, name="forgotten", timing=Timing(ping_interval=0.05))]
    forgotten[0].tube("cities")
    [thread] = set(threading.enumerate()) - before
    assert thread.name == "replicad-keepalive"
    with pytest.warns(ResourceWarning, match="unclosed"):
        forgotten.clear()
    wait_until(lambda: not thread.is_alive(), "the thread has ended")


def test_a_very_long_ack_goes_out_in_pieces(client: BlockingClient, fake: FakeDaemon) -> None:
    term = client.claim("cities", HALF).term
    assert client.ack("cities", HALF, term, range(50_000)) == 0
    acks = [command for command in fake.received if isinstance(command, c.Ack)]
    assert [len(ack.seqs) for ack in acks] == [20_000, 20_000, 10_000]


def test_a_request_that_the_peer_does_not_take_is_given_up(fake: FakeDaemon) -> None:
    def stall(session: FakeSession, command: Command) -> bytes | None:
        if isinstance(command, c.Doorbell):
            session.stalled = True
        return None

    fake.hook = stall
    with BlockingClient("127.0.0.1", fake.port, name="a test", answer_timeout=0.3) as client:
        client.send(c.Doorbell())
        with pytest.raises(ConnectionLost, match="does not read any more"):
            client.send(*[c.Ping("y" * 100_000)] * 200)


# --- endpoints ---


def test_an_endpoint_travels_to_other_processes_and_keeps_its_secret_out_of_sight(fake: FakeDaemon) -> None:
    endpoint = Endpoint("127.0.0.1", fake.port, token="s3cret", server_name="fake", connect_timeout=1.0)
    again = pickle.loads(pickle.dumps(endpoint))
    assert again == endpoint
    assert "s3cret" not in repr(again)
    with Endpoint("127.0.0.1", fake.port).connect("a worker") as client:
        assert client.tube("cities") == 2
    assert c.Name("a worker") in fake.received


def test_an_authority_that_cannot_be_read_is_a_usage_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("tls") / "empty.pem"
    empty.write_text("")
    for path in (str(empty), "/nowhere/ca.pem"):
        with pytest.raises(UsageError, match="cannot be used as a certificate authority"):
            Endpoint("127.0.0.1", 1, tls_ca=path).connect("a worker")


def test_workers_need_neither_trio_nor_anything_else_that_is_installed() -> None:
    """Spark's Python workers import this and nothing more."""
    code = (
        "import sys; before = set(sys.modules); import replicad.client.blocking_client; "
        "print([n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names | {'replicad'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "[]"


def test_closing_the_client_ends_the_followers_that_wait_in_other_threads(fake: FakeDaemon) -> None:
    """As where an asyncio program has called `to_thread(follower.together)`: its end waits for the thread."""

    async def cancel() -> None:
        with BlockingClient("127.0.0.1", fake.port, name="a test") as client:
            waiting = [
                asyncio.create_task(asyncio.to_thread(client.follow({stream: None}).together))
                for stream in ("events", "caches")
            ]
            while len(fake.sessions) < 2:
                await asyncio.sleep(0.005)
            waiting[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
        assert await waiting[1] == []
        assert client.follow({"events": None}).together() == []

    thread = threading.Thread(target=run_on, args=["asyncio", cancel], daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a follower waits, though its client was closed"


def test_closing_ends_a_request_that_waits_to_send() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = BlockingClient("127.0.0.1", deaf.getsockname()[1], name="a test", answer_timeout=600.0)
        failures: list[str] = []

        def send() -> None:
            try:
                client.send(*[c.RemoteServerUp("x" * 1000)] * 20_000)
            except ConnectionLost as error:
                failures.append(str(error))

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        peer, _ = deaf.accept()
        with peer:
            peer.sendall(b"SERVER example.com\nPING 1\n")
            wait_until(
                lambda: client._link and all(client._link._lock.locked() for _ in range(1000)), "it waits to send"
            )
            client.close()
            thread.join(PATIENCE)
    assert not thread.is_alive()
    assert failures
    assert failures[0].endswith("was closed")
