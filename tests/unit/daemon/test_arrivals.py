"""Which accepted connection gets a session next, on real sockets and a clock that the test moves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from replicad.daemon.admission import FEW, LIVE, QUIET, REST, Arrivals, Door

CROWD = 40
HELLO = b"\x16\x03\x01\x00\x05hello"


class Crowd:
    """Arrivals whose sessions are only noted, and the clients' ends."""

    def __init__(self, door: Door) -> None:
        self.begun: list[socket.socket] = []
        self.turns = 0
        self.ready = True
        self.ready_from: set[str] | None = None  # None: all addresses
        self.arrivals = Arrivals(door, self.begun.append, self._give_way, self._is_ready)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=CROWD)
        self._open: list[socket.socket] = [self._listening]

    def _is_ready(self, address: str) -> bool:
        return self.ready and (self.ready_from is None or address in self.ready_from)

    async def _give_way(self) -> None:
        self.turns += 1
        await trio.lowlevel.checkpoint()

    def arrive(self, said: bytes = b"", source: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
        """The client's end and ours, after `put`. `source`: the client's address."""
        client = socket.create_connection(self._listening.getsockname(), source_address=(source, 0))
        client.sendall(said)
        ours, _ = self._listening.accept()
        ours.setblocking(False)
        self._open += [client, ours]
        self.arrivals.put(ours, source)
        return client, ours

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def crowd() -> Iterator[Callable[[Door], Crowd]]:
    made: list[Crowd] = []

    def make(door: Door) -> Crowd:
        made.append(Crowd(door))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_of_a_crowd_that_sends_too_long_lines_only_a_few_get_a_session(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=False, first_line=100, too_long=b"ERROR too long\n"))
    clients = [at.arrive()[0] for _ in range(CROWD)]
    nursery.start_soon(at.arrivals.run)
    await wait_all_tasks_blocked()
    assert len(at.begun) == FEW
    for client in clients:
        client.sendall(b"x" * 200)
    mock_clock.jump(REST)
    await wait_all_tasks_blocked()
    assert (len(at.begun), len(at.arrivals), at.arrivals.hopeless) == (FEW, 0, CROWD - FEW)


async def test_one_that_has_sent_its_line_comes_before_a_crowd_that_has_not(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=False))
    for _ in range(CROWD):
        at.arrive()
    nursery.start_soon(at.arrivals.run)
    await wait_all_tasks_blocked()
    _, polite = at.arrive(b"NAME polite\n")
    late, ours = at.arrive()
    late.sendall(b"NAME late\n")
    mock_clock.jump(REST)
    await wait_all_tasks_blocked()
    assert at.begun[FEW:] == [polite, ours]
    mock_clock.jump(QUIET)
    await wait_all_tasks_blocked()
    assert len(at.begun) == CROWD + 2, "those that say nothing get their sessions too, after some time"


async def test_sessions_of_many_that_have_sent_their_lines_begin_a_few_in_each_turn(
    crowd: Callable[[Door], Crowd], nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=False))
    waiting = [at.arrive(b"NAME x\n")[1] for _ in range(CROWD)]
    at.arrivals.begin_one()
    assert at.begun == waiting[:1]
    await at.arrivals.run()
    assert set(at.begun) == set(waiting)
    assert at.turns == -(-(CROWD - 1) // LIVE)
    assert waiting[-1] in at.begun[: LIVE + 1], "the newest does not wait for all others"


async def test_a_crowd_from_one_address_delays_another_by_one_session_and_gives_way_first(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=False))
    flood = [at.arrive(b"PING x\n", "127.0.0.2")[1] for _ in range(CROWD)]
    polite = at.arrive(b"PING x\n")[1]
    flood += [at.arrive(b"PING x\n", "127.0.0.2")[1] for _ in range(CROWD)]
    assert at.arrivals.take_out() is flood[0]
    await at.arrivals.run()
    assert at.begun.index(polite) <= 1
    assert set(at.begun) == {polite, *flood[1:]}


async def test_with_tls_a_whole_hello_comes_first_and_waits_until_the_server_is_ready(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=True))
    at.ready = False
    _, half = at.arrive(HELLO[:6])
    _, whole = at.arrive(HELLO)
    at.arrivals.begin_one()
    assert at.begun == []
    assert at.arrivals.take_out() is half
    at.ready = True
    await at.arrivals.run()
    assert at.begun == [whole]


async def test_one_that_may_begin_does_not_wait_behind_addresses_that_may_not(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock
) -> None:
    at = crowd(Door(tls=True))
    at.ready_from = {"127.0.0.3"}
    for _ in range(CROWD):
        at.arrive(HELLO, "127.0.0.2")
    _, polite = at.arrive(HELLO, "127.0.0.3")
    at.arrivals.begin_one()
    at.arrivals.begin_one()
    assert at.begun == [polite]


async def test_those_that_have_ended_get_no_session_and_no_refusal(crowd: Callable[[Door], Crowd]) -> None:
    at = crowd(Door(tls=False, too_long=b"ERROR too long\n"))
    client, ours = at.arrive()
    client.shutdown(socket.SHUT_WR)
    at.arrivals.put(at.arrivals.take_out(), "127.0.0.1")
    assert (len(at.arrivals), at.arrivals.hopeless) == (0, 1)
    assert ours.fileno() < 0
    assert client.recv(100) == b""


async def test_the_half_of_a_request_of_http_does_not_count_as_a_whole_first_line(
    crowd: Callable[[Door], Crowd], mock_clock: MockClock, nursery: trio.Nursery
) -> None:
    at = crowd(Door(tls=False, line_end=b"\r\n\r\n"))
    for _ in range(CROWD):
        at.arrive(b"GET / HTTP/1.1\r\nHost: a\r\nX: y", source="127.0.0.2")
    _, polite = at.arrive(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    at.arrivals.begin_one()
    assert at.begun == [polite]
