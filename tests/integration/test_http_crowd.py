"""Crowds over HTTP: who sends nothing, a half of something, or reads nothing takes nothing from others."""

from __future__ import annotations

import gc
import json
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from replicad.config.settings import Address, ServerSettings
from replicad.daemon.admission import LIVE
from replicad.operations.http import wire
from replicad.operations.http.server import HttpPages
from replicad.postgres.bridge import Database, open_database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.http_crowd import KINDS, make_requests
from tests.lengths import LONG

from .test_http import ANY_PORT, ask, plain, read_all
from .test_process_bounds import Served, add_things, serving

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
ROOT = Path(__file__).parents[2]
CROWD = 100
OTHER = "127.0.0.2"  # where the crowd comes from
PATHS = ("/livez", "/readyz", "/status", "/streams/events/rows")

SILENT = {
    "silent": b"",
    "half a request": b"GET /status HTTP/1.1\r\nhost: localh",
    "requests whose bodies do not come": (
        b"POST /replay HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    ),
    "between two requests": b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


@contextmanager
def crowd(address: Address | None, count: int, sends: bytes, source: str = OTHER) -> Iterator[list[socket.socket]]:
    assert address is not None
    links: list[socket.socket] = []
    try:
        for _ in range(count):
            link = socket.create_connection((address.host, address.port), PATIENCE, (source, 0))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            links.append(link)
            link.sendall(sends)
        yield links
    finally:
        for link in links:
            link.close()


async def all_are_answered(daemon: Daemon, times: int = 3) -> None:
    for path in PATHS * times:
        assert (await ask(daemon.http, path)).status == 200, path


@pytest.mark.parametrize("kind", SILENT)
async def test_a_crowd_that_does_not_go_on_keeps_no_other_address_from_an_answer(
    kind: str, events: Database, start_daemon: Start
) -> None:
    async with start_daemon(http_connections=4, max_newcomers=20) as daemon:
        with crowd(daemon.http, CROWD, SILENT[kind]):
            await all_are_answered(daemon)
        assert daemon.hub.statistics().newcomers <= 20


async def test_the_oldest_of_the_crowd_gives_way_and_a_polite_connection_does_not(
    events: Database, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "IDLE", 10 * PATIENCE)  # so that giving way is the only reason for an end
    request = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with start_daemon(max_newcomers=10) as daemon:
        statistics = daemon.hub.statistics
        with plain(daemon) as polite, crowd(daemon.http, 1, b"") as (oldest,), trio.fail_after(PATIENCE):
            while statistics().newcomers < 2:  # those that come together begin in an order that is not theirs
                await trio.sleep(0.01)
            with crowd(daemon.http, CROWD, b""):
                assert b" 200 " not in await trio.to_thread.run_sync(read_all, oldest)
                while statistics().newcomers_cut + statistics().refused < CROWD + 2 - 10:  # until none waits to begin
                    await trio.sleep(0.01)
                with crowd(daemon.http, 1, b"") as (newest,):
                    for one in (polite, newest):
                        one.sendall(request)
                        assert (await trio.to_thread.run_sync(read_all, one)).startswith(b"HTTP/1.1 200 OK")


async def test_health_checks_have_places_of_their_own_and_an_address_leaves_some_to_others(
    events: Database, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, began = trio.Event(), 0
    clients = HttpPages.clients

    async def hang(self: HttpPages, *arguments: Any) -> Any:
        nonlocal began
        began += 1
        await go_on.wait()
        return await clients(self, *arguments)

    monkeypatch.setattr(HttpPages, "clients", hang)
    request = b"GET /clients HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with start_daemon(http_connections=4) as daemon:
        with crowd(daemon.http, 10, request) as links:
            with trio.fail_after(PATIENCE):
                while began < 3:
                    await trio.sleep(0.01)
            await all_are_answered(daemon, 1)
            assert began == 3, "the fourth place is not for this address"
            go_on.set()
            for link in links:
                assert (await trio.to_thread.run_sync(read_all, link)).startswith(b"HTTP/1.1 200 OK")
    async with start_daemon(http_connections=1, max_connections=2) as daemon:
        address = daemon.addresses[0]
        for _ in range(2):
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.send_all(b"NAME x\n")
            await stream.receive_some(100)
        with crowd(daemon.http, CROWD, b""):
            for path in ("/livez", "/readyz"):
                assert (await ask(daemon.http, path)).status == 200, "while clients have all connections"


async def test_a_crowd_that_reads_no_answer_keeps_no_other_address_from_one(
    events: Database, start_daemon: Start
) -> None:
    await events.execute("INSERT INTO events (body) SELECT to_jsonb(repeat('x', 100000)) FROM generate_series(1, 60)")
    request = b"GET /streams/events/rows HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20
    async with start_daemon(http_connections=4) as daemon:
        feed = await daemon.publisher.find("events")
        while feed.sent_upto < 60:
            await feed.channel.wait_sealed()
        with crowd(daemon.http, 20, request, "127.0.0.3"), crowd(daemon.http, 20, request):
            await all_are_answered(daemon)


async def test_requests_of_a_crowd_are_answered_one_in_a_turn_of_the_event_loop(
    events: Database, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn, most, answer = 0, 0, HttpPages.answer

    class Count(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            nonlocal in_turn, most
            in_turn, most = 0, max(most, in_turn)

    async def counted(self: HttpPages, request: Any) -> Any:
        nonlocal in_turn
        in_turn += 1
        return await answer(self, request)

    monkeypatch.setattr(HttpPages, "answer", counted)
    requests = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20 + b"GET / HTTP/1.0\r\n\r\n"
    async with start_daemon() as daemon:
        trio.lowlevel.add_instrument(count := Count())
        with crowd(daemon.http, 40, requests) as links:
            for link in links:
                await trio.to_thread.run_sync(read_all, link)
            trio.lowlevel.remove_instrument(count)
    assert most <= LIVE + 2, "of those that were just accepted, and of the others"


# --- memory ---

COUNT = 100_000 if LONG else 500
GROWTH = 1.2
PAUSE = 0.05  # seconds of a turn
REST = 10.0  # seconds


async def waits(address: Address, during: Callable[[], Awaitable[None]]) -> list[float]:
    """Seconds that a client of the protocol waits for each answer, meanwhile."""
    found: list[float] = []
    async with await trio.open_tcp_stream(address.host, address.port) as stream, trio.open_nursery() as nursery:

        async def look() -> None:
            while True:
                began = trio.current_time()
                await stream.send_all(b"STREAMS\n")
                answer = b""
                while b"STREAMS" not in answer:
                    answer += await stream.receive_some(4096)
                found.append(trio.current_time() - began)
                await trio.sleep(0.005)

        nursery.start_soon(look)
        await during()
        nursery.cancel_scope.cancel()
    return found


class Loop(trio.abc.Instrument):
    """The processor time of the longest turn of the event loop: what else the machine does is not in it."""

    longest = 0.0
    _began: float | None = None

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        if self._began is not None:
            self.longest = max(self.longest, time.thread_time() - self._began)


@pytest.mark.long
async def test_requests_of_strangers_leave_no_cycles_of_references_and_stop_nobody(
    events: Database, daemon: Daemon
) -> None:
    await events.execute("INSERT INTO events (body) SELECT to_jsonb(g) FROM generate_series(1, 10) AS g")
    http = daemon.http
    assert http is not None

    async def ask_all(count: int) -> None:
        await trio.to_thread.run_sync(make_requests, http.host, http.port, count)

    await ask_all(20 * len(KINDS))  # what the first ones load for all
    loop, count = Loop(), 50 * len(KINDS)
    gc.collect()
    gc.disable()
    trio.lowlevel.add_instrument(loop)
    try:
        await ask_all(count)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert gc.collect() < count / 2, "some are of the client"
    finally:
        trio.lowlevel.remove_instrument(loop)
        gc.enable()
    assert loop.longest < PAUSE


@pytest.mark.stress
@pytest.mark.timeout(900)
async def test_requests_of_strangers_leave_no_memory_behind_and_stop_nobody(database_url: str, tmp_path: Path) -> None:
    """Its long form takes some five minutes, and looks at the clock: it needs a quiet machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = Address("127.0.0.1", taken.getsockname()[1])
    async with open_database(database_url, size=1, application_name="test") as database:
        await add_things(database)

    async def ask_all(count: int) -> None:
        command = [sys.executable, "-m", "tests.http_crowd", http.host, str(http.port), str(count)]
        await trio.run_process(command, cwd=ROOT)

    with serving(Served(tmp_path, database_url, "--http", str(http))) as served:
        await served.wait_ready()
        process = psutil.Process(served.process.pid)
        host, port = re.findall(r"(.*):(\d+)", served.ready.read_text().strip())[0]
        await ask_all(20 * len(KINDS))  # what the first ones load for all
        await trio.sleep(1.0)
        before, began = process.memory_info().rss, trio.current_time()
        waited = sorted(await waits(Address(host, int(port)), lambda: ask_all(COUNT)))
        took, during = trio.current_time() - began, process.memory_info().rss
        with trio.move_on_after(REST):
            while process.memory_info().rss > GROWTH * before:
                await trio.sleep(0.1)
        after = process.memory_info().rss
        mebibytes = [round(one / (1 << 20), 1) for one in (before, during, after)]
        longest = [round(one * 1000, 1) for one in waited[-5:]]
        figures = {"connections": COUNT, "seconds": round(took), "before, during, after in MiB": mebibytes}
        print(json.dumps({**figures, "answers": len(waited), "longest waits in ms": longest}))
        assert after <= GROWTH * before, mebibytes
        assert not LONG or waited[-1] <= PAUSE, longest
        assert not served.events("failure")
