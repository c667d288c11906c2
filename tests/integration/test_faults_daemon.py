"""Faults around the daemon, each caused for real: killed processes, dead readers, floods, resets, standbys."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from replicad.config.settings import parse_address
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from replicad.streams.registry import Registry
from tests.daemons import Daemon
from tests.roles import as_daemon

from .conftest import PATIENCE, Connect, Netcat, netcat_to

HELLO = ("SERVER .*",)


class ServeProcess:
    """`replicad serve` as a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.ready = folder / "ready"
        self.ready.unlink(missing_ok=True)
        self.log = (folder / "serve.log").open("a")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0"),
                *("--ready-file", str(self.ready), *map(as_daemon, options)),
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def wait_ready(self) -> tuple[str, int]:
        with trio.fail_after(PATIENCE):
            while not self.ready.exists():
                assert self.process.poll() is None, f"it ended; see {self.log.name}"
                await trio.sleep(0.02)
        address = parse_address(self.ready.read_text().strip())
        return address.host, address.port

    def end(self, number: int) -> int:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[ServeProcess]:
    process = ServeProcess(folder, *options)
    try:
        yield process
    finally:
        process.end(signal.SIGKILL)
        process.log.close()


@asynccontextmanager
async def connect(address: tuple[str, int]) -> AsyncIterator[Netcat]:
    async with await trio.open_tcp_stream(*address) as stream:
        nc = Netcat(stream)
        await nc.expect(*HELLO)
        yield nc


async def add_events(database: Database) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")


async def follow(nc: Netcat, token: int, upto: int) -> list[int]:
    """The tokens of all rows behind `token` up to `upto`."""
    await nc.send(f"REPLICATE events {token}")
    lines = await nc.until(f"RDATA events master {upto} .*")
    return [int(line.split()[3]) for line in lines if line.startswith("RDATA")]


async def test_a_killed_daemon_is_started_again_and_its_clients_resume_without_a_gap(
    database_url: str, tmp_path: Path
) -> None:
    async with open_database(database_url, size=2, application_name="test") as database:
        await add_events(database)
        seen: list[int] = []
        with serving(tmp_path, "--database", database_url) as first:
            address = await first.wait_ready()
            await Registry(database).add("events", "public.events", "id", row="body")
            await database.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, 1000)")
            async with connect(address) as nc:
                seen += await follow(nc, 0, 1000)
                first.end(signal.SIGKILL)
                with pytest.raises((EOFError, trio.BrokenResourceError)):
                    await nc.line()
        await database.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, 1000)")
        with serving(tmp_path, "--database", database_url) as second:
            address = await second.wait_ready()
            async with connect(address) as nc:
                seen += await follow(nc, seen[-1], 2000)
            assert second.end(signal.SIGTERM) == 0
        assert seen == list(range(1, 2001))


async def test_a_killed_postmaster_is_survived_by_daemon_and_clients(tmp_path: Path, postgres_folder: Path) -> None:
    """The embedded server is started again by the daemon; clients stay connected and miss nothing."""
    with serving(tmp_path, "--data-folder", str(postgres_folder)) as daemon:
        address = await daemon.wait_ready()
        with EmbeddedPostgres(postgres_folder) as server:
            async with open_database(server.url, size=1, application_name="test") as database:
                await add_events(database)
                await Registry(database).add("events", "public.events", "id", row="body")
                await database.execute("INSERT INTO events (body) VALUES ('1')")
            async with connect(address) as nc:
                await nc.send("REPLICATE events EARLIEST")
                await nc.until("RDATA events master 1 1")
                pid = server.pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                token = 0
                with trio.fail_after(PATIENCE):
                    while token == 0:
                        with suppress(Exception):
                            async with open_database(server.url, size=1, application_name="test") as database:
                                token = await database.fetch_value(
                                    "INSERT INTO events (body) VALUES ('2') RETURNING id"
                                )
                        await trio.sleep(0.1)
                assert token > 1  # an id that was published is never issued again
                with trio.fail_after(PATIENCE):
                    await nc.stream.send_all(b"")
                    line = ""
                    while not line.startswith(f"RDATA events master {token} "):
                        with suppress(trio.TooSlowError):
                            line = await nc.line()
                        assert not line.startswith("ERROR"), line
        assert daemon.end(signal.SIGTERM) == 0


async def test_a_reader_that_never_reads_is_cut_off_and_costs_neither_memory_nor_the_others(
    events: Database, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon(journal_bytes=1 << 20, stall_timeout=3, journal_seconds=3) as daemon:
        async with netcat_to(daemon) as stuck, netcat_to(daemon) as quick:
            for nc in (stuck, quick):
                await nc.expect(*HELLO)
                await nc.send("REPLICATE events")
                await nc.expect("WRITERS .*", "POSITION .*")
            feed = daemon.publisher.served["events"]
            for batch in range(1, 31):
                await events.execute(
                    "INSERT INTO events (body) SELECT to_jsonb(repeat('x', 10000)) FROM generate_series(1, 100)"
                )
                await quick.until(f"RDATA events master {batch * 100} .*")
                assert feed.channel.statistics().bytes <= 1 << 20
            with trio.fail_after(PATIENCE):
                while len(daemon.hub) > 1:
                    await trio.sleep(0.05)
        assert daemon.hub.statistics().closed["slow_reader"] == 1


async def test_eight_readers_that_never_read_do_not_stop_three_that_do(
    events: Database, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon(journal_bytes=1 << 20) as daemon, AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(netcat_to(daemon)) for _ in range(11)]
        for nc in readers:
            await nc.expect(*HELLO)
            await nc.send("REPLICATE events")
            await nc.expect("WRITERS .*", "POSITION .*")
        feed = daemon.publisher.served["events"]
        with trio.fail_after(PATIENCE):
            for batch in range(1, 31):  # about 1 MB each: the sockets of those that do not read hold some of them
                await events.execute(
                    "INSERT INTO events (body) SELECT to_jsonb(repeat('x', 10000)) FROM generate_series(1, 100)"
                )
                for nc in readers[8:]:
                    await nc.until(f"RDATA events master {batch * 100} .*")
            while len(daemon.hub) > 3:
                await trio.sleep(0.05)
        assert daemon.hub.statistics().closed == {"slow_reader": 8}
        assert feed.channel.statistics().waited_s < 20  # they may cost 1 s; a send that stalls ends after 60 s only


async def test_an_endless_line_is_cut_at_the_limit_in_constant_memory(netcat: Connect) -> None:
    async with netcat() as nc:
        await nc.expect(*HELLO)
        before = psutil.Process().memory_info().rss
        piece = b"x" * (1 << 20)
        sent = 0
        with suppress(trio.BrokenResourceError):
            while sent < 1 << 30:
                await nc.send_bytes(piece)
                sent += len(piece)
        assert sent < 64 << 20
        assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "garbage", [bytes(range(128, 256)) * 10 + b"\n", b"\0" * 100 + b"\n", b"\xff\xfe\n", b"A\0B\n"]
)
async def test_binary_garbage_gets_an_error_and_the_end(netcat: Connect, garbage: bytes) -> None:
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send_bytes(garbage)
        await nc.expect("ERROR bad_line: .*")
        await nc.expect_end()


@pytest.fixture
def bounded_files() -> Iterator[None]:
    """A daemon raises the limit of its process; where that is endless, a flood would take all there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 8192), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("bounded_files")
async def test_a_flood_of_connections_leaves_existing_sessions_and_the_health_check_alive(
    start_daemon: Callable[..., Any], events: Database
) -> None:
    async with start_daemon(max_connections=50) as daemon, netcat_to(daemon) as old:
        await old.expect(*HELLO)
        await old.send("REPLICATE events")
        await old.expect("WRITERS .*", "POSITION .*")

        answered_at_all = 0
        all_answered = trio.Event()

        async def knock() -> None:
            nonlocal answered_at_all
            async with netcat_to(daemon) as nc:
                await nc.line()
                answered_at_all += 1
                if answered_at_all == 1000:
                    all_answered.set()
                await all_answered.wait()  # those who were let in keep their places until everybody has an answer

        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(knock)
            await events.execute("INSERT INTO events (body) VALUES ('1')")
            await old.expect_exactly("RDATA events master 1 1")
            address = daemon.addresses[0]
            ping = [sys.executable, "-m", "replicad", "ping", "--timeout", str(PATIENCE), str(address)]
            answered = await trio.run_process(ping, capture_stdout=True, check=False)
            assert answered.returncode == 0
        turned_away = daemon.hub.statistics()  # refused, or admitted and cut for a newer one: it depends on their pace
        assert turned_away.refused + turned_away.newcomers_cut >= 900


async def test_ids_that_go_back_begin_a_generation_and_never_pass_in_silence(events: Database, netcat: Connect) -> None:
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE events")
        [writers, _] = await nc.expect("WRITERS events .* master=1", "POSITION .*")
        epoch = writers.split()[2]
        await events.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, 100)")
        await nc.until("RDATA events master 100 1")
        await events.execute("DELETE FROM events; ALTER SEQUENCE events_id_seq RESTART WITH 10")
        await nc.until("POSITION events master 100 0")
        [again, _] = await nc.expect("WRITERS events .* master=1", "POSITION events master 0 0")
        assert again.split()[2] != epoch
        await events.execute("INSERT INTO events (body) VALUES ('2')")
        await nc.until("RDATA events master 10 2")
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send(f"REPLICATE events {epoch}!50")
        await nc.expect(f"ERROR bad_token: .* resume from {again.split()[2]}!0")


async def test_rows_under_ids_that_were_given_out_again_are_sent_whether_or_not_a_poll_saw_the_sequence_between(
    events: Database, netcat: Connect
) -> None:
    """The poll that finds the sequence set back can find it later, when it has given out ids again."""
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE events")
        for turn in range(5):
            await events.execute("INSERT INTO events (body) SELECT '0' FROM generate_series(1, 20)")
            last = await events.fetch_value("SELECT last_value FROM events_id_seq")
            await nc.until(f"RDATA events master {last} .*")
            await events.execute(
                f"DELETE FROM events WHERE id > 5; SELECT setval('events_id_seq', 5);"
                f"INSERT INTO events (body) VALUES ('{turn + 1}'), ('{turn + 1}')"
            )
            await nc.until(f"RDATA events master 6 {turn + 1}")
            await nc.expect(f"RDATA events master 7 {turn + 1}")


async def test_a_standby_is_refused_with_the_reason(tmp_path: Path, postgres_folder: Path, postgres_url: str) -> None:
    primary = postgres_folder / "primary"
    with EmbeddedPostgres(primary) as server:
        copy = postgres_folder / "standby"
        copy.mkdir()
        await trio.run_process(
            [str(find_programs() / "pg_basebackup"), "-D", str(copy / "data"), "-d", server.url, "-R", "-c", "fast"]
        )
        for lock in (copy / "data").glob(".s.PGSQL*"):
            lock.unlink()
        if os.getuid() == 0:
            owner = primary.joinpath("data").stat()
            for path in [copy, *copy.rglob("*")]:
                os.chown(path, owner.st_uid, owner.st_gid)
        try:
            with EmbeddedPostgres(copy) as standby, serving(tmp_path, "--database", standby.url) as daemon:
                assert await trio.to_thread.run_sync(daemon.process.wait, 30) == 5
                said = (tmp_path / "serve.log").read_text()
                assert "standby" in said
                assert "Traceback" not in said
        finally:
            shutil.rmtree(copy, ignore_errors=True)


async def test_a_slow_stream_does_not_hold_back_another(events: Database, daemon: Daemon) -> None:
    """A transaction that stays open on one stream; the other goes on, and the culprit is named."""
    await events.execute("CREATE TABLE others (id bigserial PRIMARY KEY, n int)")
    await Registry(events).add("others", "public.others", "id")
    async with netcat_to(daemon) as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE events", "REPLICATE others")
        await nc.until("POSITION others master 0 0")
        async with events.connection() as connection, connection.transaction():
            await connection.execute("INSERT INTO events (body) VALUES ('1')")
            await events.execute("INSERT INTO events (body) VALUES ('2')")
            await events.execute("INSERT INTO others (n) VALUES (1)")
            await nc.until('RDATA others master 1 {"id":1,"n":1}')
            with trio.fail_after(PATIENCE):
                while (holder := daemon.publisher.served["events"].followed.held_by) is None:
                    await trio.sleep(0.01)
            assert holder.application_name == "replicad test"
            assert "INSERT INTO events" in (holder.query or "")
        await nc.until("RDATA events master 2 2")
