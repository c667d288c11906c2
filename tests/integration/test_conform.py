"""`replicad conform` against our own daemon, and against servers with a fault: what it must find."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio

from replicad.conform.against_server import Result, ServerUnderTest, run_checks
from replicad.conform.transcript import ConformanceCheck, server_checks
from replicad.postgres.bridge import Database
from replicad.postgres.programs import find_programs
from tests.conftest import PATIENCE
from tests.daemons import Daemon

TOKEN = "a-secret-of-the-test"


def chosen(only: str) -> list[ConformanceCheck]:
    """The quick checks with that text in their names: of several cases of one script the first two."""
    seen: Counter[str] = Counter()
    kept = []
    for check in server_checks():
        if only in check.name and not check.seconds:
            script = check.name.partition(": ")[0]
            seen[script] += 1
            kept += [check] if only or seen[script] <= 2 else []
    return kept


async def results_of(server: ServerUnderTest, checks: Sequence[ConformanceCheck]) -> dict[str, Result]:
    results: list[Result] = []
    with trio.fail_after(3 * PATIENCE):
        await run_checks(server, checks, results.append)
    assert len(results) == len(checks)
    return {result.check.name: result for result in results}


def problems(results: dict[str, Result]) -> dict[str, str]:
    return {name: result.problem for name, result in results.items() if result.problem is not None}


def under_test(daemon: Daemon, url: str, *, token: str | None = None) -> ServerUnderTest:
    psql = shlex.join([str(find_programs() / "psql"), "--no-psqlrc", "-qX", "-v", "ON_ERROR_STOP=1", "-d", url, "-c"])
    address = daemon.addresses[0]
    return ServerUnderTest(
        address.host,
        address.port,
        token=token,
        stream="events",
        tube="queue",
        write_row=f"{psql} \"INSERT INTO events (body) VALUES ('[1]')\"",
        write_pod=f"{psql} \"SELECT tube.queue_touch(0, ARRAY[1], 'U')\"",
    )


async def test_our_daemon_passes_the_quick_checks(
    daemon: Daemon, events: Database, queue: Database, database_url: str
) -> None:
    results = await results_of(under_test(daemon, database_url), chosen(""))
    assert problems(results) == {}
    assert {tuple(result.lacks) for result in results.values() if result.lacks} == {("token",)}
    assert len(results) >= 100


@pytest.mark.long
async def test_our_daemon_passes_every_check(
    daemon: Daemon, events: Database, queue: Database, database_url: str
) -> None:
    assert problems(await results_of(under_test(daemon, database_url), server_checks())) == {}


async def test_a_daemon_with_a_secret_passes_the_checks_of_it(
    start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]], database: Database, database_url: str
) -> None:
    async with start_daemon(token=TOKEN) as running:
        address = running.addresses[0]
        server = ServerUnderTest(address.host, address.port, token=TOKEN)
        checks = [check for check in server_checks() if "token" in check.needs or "HELP" in check.name]
        results = await results_of(server, checks)
        assert problems(results) == {}
        assert {result.outcome for result in results.values()} == {"passed"}


@asynccontextmanager
async def faulty(daemon: Daemon, change: Callable[[bytes], bytes]) -> AsyncIterator[tuple[str, int]]:
    """A server that passes everything on to the daemon, and changes what the daemon sends."""
    address = daemon.addresses[0]

    async def serve(client: trio.SocketStream) -> None:
        async with client, await trio.open_tcp_stream(address.host, address.port) as server:
            async with trio.open_nursery() as both:
                both.start_soon(_copy, client, server, bytes)
                await _copy(server, client, change)
                both.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        listeners: Sequence[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, serve, 0, host="127.0.0.1")
        )
        yield "127.0.0.1", listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _copy(source: trio.SocketStream, sink: trio.SocketStream, change: Callable[[bytes], bytes]) -> None:
    try:
        async for data in source:
            await sink.send_all(change(data))
        await sink.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


FAULTS = {
    "the first line is SERVER": (b"SERVER ", b"WELCOME "),
    "the second line is a PING with the time in ms": (b"\nPING ", b"\nPONG "),
    "HELP of a command is that command alone: CLAIM": (b"HELP CLAIM", b"HELP CLAIMS"),
    "a control character ends the connection: a\\tb": (b"ERROR bad_line", b"ERROR"),
    "an unknown tube is refused and the connection stays: TUBE no-such-tube": (b"unknown_tube", b"unknown"),
    "STREAMS has the names of the streams": (b"STREAMS events", b"STREAMS"),
    "WRITERS comes before POSITION": (b"WRITERS", b"NOTICE"),
    "TAKEN names the last id": (b"TAKEN events ", b"TAKEN event "),
    "a claim is answered by a lease of the asked time": (b" 20\n", b" 30\n"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_faulty_server_fails_the_check(
    name: str, daemon: Daemon, events: Database, queue: Database, database_url: str
) -> None:
    async with faulty(daemon, lambda data: data.replace(*FAULTS[name])) as (host, port):
        server = ServerUnderTest(host, port, stream="events", tube="queue")
        results = await results_of(server, chosen(name))
        assert results[name].outcome == "failed", results[name]


async def test_a_port_that_nobody_listens_on_fails_every_check(daemon: Daemon) -> None:
    with trio.socket.socket() as unused:
        await unused.bind(("127.0.0.1", 0))
        results = await results_of(ServerUnderTest("127.0.0.1", unused.getsockname()[1]), chosen("blank lines"))
    assert [result.outcome for result in results.values()] == ["failed"]
