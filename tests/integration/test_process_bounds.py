"""`replicad serve` as a process: signals that must not end it, and what happens when file descriptors run out."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trio

from replicad.config.settings import parse_address
from replicad.postgres.bridge import Database, open_database
from replicad.streams.registry import Registry
from tests.roles import as_daemon

from .conftest import Netcat

HANG = 60.0  # seconds after which a wait is a failure
FILES = 160  # open files that the small daemon may have


class Served:
    """A daemon's process; its log goes to a file, or where `stderr` says."""

    def __init__(
        self, folder: Path, url: str, *options: str, files: int | None = None, stderr: int | None = None
    ) -> None:
        self.ready = folder / "ready"
        self.log = folder / "serve.log"

        def limit_files() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))

        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "replicad",
                        "serve",
                        "--listen",
                        "127.0.0.1:0",
                        "--database",
                        as_daemon(url),
                    ),
                    *("--ready-file", str(self.ready), "--log-format", "json", *options),
                ],
                stdout=output,
                stderr=output if stderr is None else stderr,
                start_new_session=True,
                preexec_fn=limit_files,  # noqa: PLW1509 - it calls the system once and takes no lock
            )

    async def wait_ready(self) -> None:
        with trio.fail_after(HANG):
            while not self.ready.exists():
                assert self.process.poll() is None, self.log.read_text()
                await trio.sleep(0.02)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Netcat]:
        address = parse_address(self.ready.read_text().strip())
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            yield Netcat(stream)

    def events(self, name: str) -> list[dict[str, object]]:
        lines = self.log.read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == name]

    async def wait_event(self, name: str, count: int = 1) -> list[dict[str, object]]:
        with trio.fail_after(HANG):
            while len(found := self.events(name)) < count:
                await trio.sleep(0.05)
        return found

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await trio.to_thread.run_sync(self.process.wait, HANG)


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    try:
        yield served
    finally:
        with suppress(ProcessLookupError):
            served.process.kill()
        served.process.wait()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager, as systemd has one for a unit of Type=notify."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield manager


async def test_signals_that_ask_for_nothing_are_logged_and_do_no_harm(
    database_url: str, tmp_path: Path, manager: socket.socket
) -> None:
    harmless = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF]
    with serving(Served(tmp_path, database_url)) as served:
        await served.wait_ready()
        async with served.connect() as nc:
            await nc.expect("SERVER .*")
            for number in [*harmless, signal.SIGPIPE]:
                served.process.send_signal(number)
                await nc.send("STREAMS")
                await nc.expect("STREAMS.*")
            found = await served.wait_event("signal_ignored", len(harmless))
            assert [entry["signal"] for entry in found] == [number.name for number in harmless]
            assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serves at 127.0.0.1:")
            with pytest.raises(BlockingIOError):
                manager.recv(1000)
            assert await served.end(signal.SIGTERM) == 0
            assert (await nc.until("ERROR .*"))[-1] == "ERROR server stopping"
            assert manager.recv(1000) == b"STOPPING=1"


async def test_signals_in_masses_beside_load_delay_no_answer_for_long_and_no_end(
    database_url: str, tmp_path: Path
) -> None:
    async def flood(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"STREAMS\n" * 500)

    async def swallow(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass

    harmless = {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
    with serving(Served(tmp_path, database_url)) as served:
        await served.wait_ready()
        address = parse_address(served.ready.read_text().strip())
        async with trio.open_nursery() as nursery, served.connect() as nc:
            for _ in range(8):
                stream = await trio.open_tcp_stream(address.host, address.port)
                nursery.start_soon(flood, stream)
                nursery.start_soon(swallow, stream)
            for _ in range(50):
                for number in (*harmless, signal.SIGPIPE, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH):
                    served.process.send_signal(number)
                await nc.send("STREAMS")
                await nc.until("STREAMS.*")
            assert {str(entry["signal"]) for entry in served.events("signal_ignored")} == {one.name for one in harmless}
            served.process.send_signal(signal.SIGSTOP)
            await nc.send("STREAMS")
            await trio.sleep(1.0)
            served.process.send_signal(signal.SIGCONT)
            await nc.until("STREAMS.*")
            served.process.send_signal(signal.SIGUSR1)
            assert await served.end(signal.SIGTERM) == 0
            assert (await nc.until("ERROR .*"))[-1] == "ERROR server stopping"
            nursery.cancel_scope.cancel()


async def test_a_service_manager_is_told_that_it_is_ready_when_clients_are_served_and_not_before(
    database_url: str, tmp_path: Path, manager: socket.socket
) -> None:
    [folder] = parse_qs(urlsplit(database_url).query)["host"]
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has 107 bytes at most
        link = Path(short) / "pg"
        url = urlsplit(database_url)._replace(query=f"host={link}&port=5432").geturl()
        with serving(Served(tmp_path, url, "--wait-for-database", str(HANG))) as served:
            await served.wait_event("waiting_for_database")
            with pytest.raises(BlockingIOError):
                manager.recv(1000)
            link.symlink_to(folder)  # Postgres is there now
            with trio.fail_after(HANG):
                await trio.lowlevel.wait_readable(manager)
            assert manager.recv(1000).startswith(b"READY=1\n")
            await served.wait_ready()
            async with served.connect() as nc:
                await nc.expect("SERVER .*")
            assert await served.end(signal.SIGTERM) == 0
            assert manager.recv(1000) == b"STOPPING=1"


async def test_signals_before_it_is_ready_do_no_harm_either(database_url: str, tmp_path: Path) -> None:
    with serving(Served(tmp_path, database_url)) as served:
        await trio.sleep(1)  # Python itself has to start: before that nobody can take a signal
        with trio.fail_after(HANG):
            while not served.ready.exists():
                if "schema_installed" in served.log.read_text():
                    served.process.send_signal(signal.SIGUSR1)
                await trio.sleep(0.005)
        assert served.process.poll() is None
        assert await served.end(signal.SIGTERM) == 0


async def test_a_terminal_that_is_closed_stops_it_with_a_word_to_clients(database_url: str, tmp_path: Path) -> None:
    ours, its = os.openpty()
    with serving(Served(tmp_path, database_url, stderr=its)) as served:
        os.close(its)
        await served.wait_ready()
        async with served.connect() as nc:
            await nc.expect("SERVER .*")
            os.close(ours)
            assert await served.end(signal.SIGHUP) == 0
            assert (await nc.until("ERROR .*"))[-1] == "ERROR server stopping"


async def add_things(database: Database) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")
    await Registry(database).add("events", "public.events", "id", row="body")
    await database.execute("INSERT INTO events (body) VALUES ('1')")


async def wait_served(nc: Netcat) -> None:
    """Until the daemon has seen the new stream and the new tube."""
    with trio.fail_after(HANG):
        for request, answer in {"STREAMS": "STREAMS events", "TUBE things": "TUBE things 1"}.items():
            found = ""
            while found != answer:
                await nc.send(request)
                [found] = await nc.expect("STREAMS.*|TUBE.*|ERROR unknown_tube.*")
                await trio.sleep(0.05)


REQUESTS = {  # TERM: that of the LEASE before
    "STREAMS": "STREAMS events",
    "TAKEN events": r"TAKEN events \d+",
    "FEDERATION_ACK w 1 events": None,
    "USER_SYNC w @a:b None start 1": None,
    'USER_IP @a:b ["t", "1.1.1.1", "agent", "d", 1]': None,
    "CLEAR_USER_SYNC w": None,
    "REMOTE_SERVER_UP x": None,
    'LOCK_RELEASED ["a", "b", "c"]': None,
    "DOORBELL": None,
    "TUBE things": "TUBE things 1",
    "CLAIM things 0/1 ttl=60": r"LEASE things 0/1 \d+ 60",
    "PODS things 0/1 TERM": "CURSOR things 0/1 0.0 0",
    "ACK things 0/1 TERM upto=0.0": "ACKED things 0/1 0",
    "ACK things 0/1 TERM 1": "ACKED things 0/1 0",
    "PARK things 0/1 TERM 1 * 1 why": "PARKED things 0/1 0",
    'REPORT things r {"a": 1}': "REPORT things r",
    "RENEW things 0/1 TERM": r"LEASE things 0/1 \d+ 60",
    "RELEASE things 0/1 TERM": r"RELEASE things 0/1 \d+",
    "REPLICATE events EARLIEST": "WRITERS events .*",
}


async def test_with_few_files_it_serves_who_is_there_refuses_others_clearly_and_recovers(
    database_url: str, tmp_path: Path
) -> None:
    async with open_database(database_url, size=1, application_name="test") as database, AsyncExitStack() as stack:
        served = stack.enter_context(serving(Served(tmp_path, database_url, files=FILES)))
        await served.wait_ready()
        await add_things(database)
        await database.execute("SELECT tube.tube_ensure_exists('things', 1)")
        limited = (await served.wait_event("connections_limited"))[0]
        assert limited["open_files"] == FILES
        possible = limited["possible"]
        assert isinstance(possible, int)
        assert 10 < possible < FILES
        inside = []
        for _ in range(possible):
            nc = await stack.enter_async_context(served.connect())
            await nc.expect("SERVER .*")
            await nc.send("NAME inside")  # a client that has sent nothing gives way to a new one
            inside.append(nc)
        await wait_served(inside[0])
        async with AsyncExitStack() as crowd:
            outside = [await crowd.enter_async_context(served.connect()) for _ in range(2 * FILES)]
            for nc in outside:
                await nc.expect("SERVER .*", f"ERROR too_many_connections: this server takes {possible} .*")
            term = "0"
            for request, answer in REQUESTS.items():
                await inside[0].send(request.replace("TERM", term))
                if answer is not None:
                    [line] = await inside[0].expect(answer)
                    term = line.split()[3] if line.startswith("LEASE") else term
            await inside[0].until("RDATA events master 1 1")
            for nc in inside[1:]:
                await nc.send("STREAMS")
                await nc.until("STREAMS events")
        for nc in inside[possible // 2 :]:
            await nc.stream.aclose()
        with trio.fail_after(HANG):
            while True:
                async with served.connect() as again:
                    await again.expect("SERVER .*")
                    await again.send("STREAMS")
                    if (await again.line()).startswith("PING") and await again.line() == "STREAMS events":
                        break
        await database.execute("INSERT INTO events (body) VALUES ('2')")
        await inside[0].until("RDATA events master 2 2")
        assert served.events("unexpected_failure") == []
        assert await served.end(signal.SIGTERM) == 0


async def test_with_too_few_files_for_a_single_client_it_does_not_start(database_url: str, tmp_path: Path) -> None:
    with serving(Served(tmp_path, database_url, files=64)) as served, trio.fail_after(HANG):
        assert await trio.to_thread.run_sync(served.process.wait, HANG) == 3
        assert "raise the hard limit (ulimit -Hn" in served.log.read_text()


async def test_nothing_is_opened_while_serving_where_no_file_can_be_opened(database_url: str, tmp_path: Path) -> None:
    """All descriptors are taken from the outside: what serves already goes on, and what cannot be done says so."""
    async with open_database(database_url, size=1, application_name="test") as database, AsyncExitStack() as stack:
        served = stack.enter_context(serving(Served(tmp_path, database_url)))
        await served.wait_ready()
        await add_things(database)
        nc = await stack.enter_async_context(served.connect())
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE events EARLIEST")
        await nc.until("RDATA events master 1 1")
        pid = served.process.pid
        taken = len(os.listdir(f"/proc/{pid}/fd"))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken // 2, hard))  # below what is open: nothing more can be
        waiting = [await stack.enter_async_context(served.connect()) for _ in range(5)]
        troubles = [e for e in await served.wait_event("trouble_began") if e["name"] == "listener"]
        assert [(trouble["kind"], trouble["code"]) for trouble in troubles] == [("service", "accept_failed")]
        await nc.send("FEDERATION_ACK w 1 events", 'USER_IP @a:b ["t", "1.1.1.1", "agent", "d", 1]', "STREAMS")
        await nc.until("STREAMS events")
        await database.execute("INSERT INTO events (body) VALUES ('2')")
        await nc.until("RDATA events master 2 2")
        with trio.fail_after(HANG):
            while not await database.fetch("SELECT FROM replicad.stream_ack"):
                await trio.sleep(0.1)
        await trio.sleep(1)
        assert len([e for e in served.events("trouble_began") if e["name"] == "listener"]) == 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for one in waiting:
            await one.expect("SERVER .*")
        over = [e for e in await served.wait_event("trouble_over") if e["name"] == "listener"]
        assert len(over) == 1
        assert await served.end(signal.SIGTERM) == 0
