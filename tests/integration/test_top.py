"""`replicad top` and `status` on a real database and in a real terminal: they tell the truth, and fit."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.operations.top import Island
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import Connect


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=Address("127.0.0.1", 0), server_name="example.com")


async def look(url: str, *words: str) -> list[dict[str, Any]]:
    """The rows of `top --json`."""
    done = await replicad_async("top", "--json", "--database", url, *words)
    return [json.loads(line) for line in done.stdout.splitlines()]


async def look_until(url: str, partition: int, state: str) -> dict[str, Any]:
    """Look until the state of a partition matches."""
    row: dict[str, Any] = {}
    with trio.move_on_after(PATIENCE):
        while True:
            [row] = [one for one in await look(url) if one["tube"] and one["partition"] == partition]
            if re.search(state, row["state"]):
                return row
    raise AssertionError(f"the state is still {row['state']!r}")


async def test_a_worker_that_is_gone_is_silent_and_not_ok(
    database: Database, daemon: Daemon, netcat: Connect, database_url: str
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('orders', partitions => 2)")
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("CLAIM orders 0/2 holder=w1!some-key ttl=2", "CLAIM orders 1/2 holder=w3!third-key ttl=600")
        await nc.expect("LEASE .*")
        await nc.expect("LEASE .*")
        row = await look_until(database_url, 0, r"^silent for \d+ s$")
        assert row["holder"] == "w1"
        row_of_another = await look_until(database_url, 1, "^ok$")
        assert row_of_another["holder"] == "w3"
        assert row["silent_s"] >= 2
        assert row["wrong"]
        pod = "INSERT INTO tube.orders (op, shard, ids, payload) VALUES ('B', 0, '{1}', '{}')"
        await database.execute(pod)
        await look_until(database_url, 0, r"^silent for \d+ s, no reader for the backfill$")
        await nc.send("CLAIM orders 0/2 holder=w2!other-key ttl=60")
        await nc.expect("LEASE .*")
        row = await look_until(database_url, 0, "^ok$")
        assert row["holder"] == "w2"


async def test_without_a_daemon_the_command_sees_a_dead_worker_by_itself(database: Database, database_url: str) -> None:
    """All daemons were killed, and the worker: nobody has written anything down."""
    await database.execute("SELECT tube.tube_ensure_exists('orders', partitions => 1)")
    await database.execute("SELECT tube.tube_lease_claim('orders', 1, 0, 'w1', '1 s', '{}')")
    from replicad.config.settings import DatabaseSettings

    island = Island(DatabaseSettings(database=database_url), 60.0, url=database_url)
    with trio.fail_after(PATIENCE):
        while (state := (await island.look()).tubes[0]["state"]) == "ok":
            await trio.sleep(0.2)
    assert re.fullmatch(r"silent for \d+ s", state)


async def test_a_backfill_without_a_reader_is_marked(database: Database, database_url: str) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('orders', partitions => 1)")
    await database.execute("INSERT INTO tube.orders (op, shard, ids, payload) VALUES ('B', 0, '{1}', '{}')")
    [row] = await look(database_url)
    assert row["state"] == "no reader for the backfill"


async def test_streams_and_daemons_are_in_it(events: Database, daemon: Daemon, database_url: str) -> None:
    await events.execute("INSERT INTO events (body) VALUES ('{}')")
    with trio.fail_after(PATIENCE):
        while (rows := await look(database_url))[0]["position"] != 1:
            pass
    assert [(row["kind"], row.get("stream"), row["state"]) for row in rows] == [
        ("stream", "events", "ok"), ("daemon", None, "alive")
    ]  # fmt: skip
    shown = (await replicad_async("status", "--database", database_url)).stdout
    assert shown.startswith("database: ")
    assert "(PostgreSQL " in shown
    assert re.search(r"^events +1 +0 +0\.0 +ok$", shown, re.MULTILINE), shown
    assert "daemons: 1 connected" in shown
    address = daemon.addresses[0]
    line = rf"^\S+ +{os.getpid()} +{address} +\S+ +20..-..-.. ..:.. +\d\.\d  alive$"
    assert re.search(line, shown, re.MULTILINE), shown
    await events.execute("ALTER TABLE events RENAME COLUMN id TO other")
    row, _ = await look(database_url)
    assert row["wrong"]
    assert "has no column id any more" in row["state"]


async def test_status_is_one_object_as_json(database: Database, database_url: str) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY)")
    await Registry(database).add("events", "public.events", "id")
    found = json.loads((await replicad_async("status", "--json", "--database", database_url)).stdout)
    assert (found["connected"], found["daemons"]) == (0, [])
    assert [row["stream"] for row in found["streams"]] == ["events"]


class Terminal:
    """`replicad top` in a terminal of a size that changes."""

    def __init__(self, url: str, columns: int, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        self._size(columns)
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "replicad", "top", "--interval", "3600", "--database", url],
            stdin=theirs, stdout=theirs, stderr=theirs, env=inherited | environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def _size(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def resize(self, columns: int) -> None:
        self._size(columns)
        self.process.send_signal(signal.SIGWINCH)

    def read_picture(self) -> str:
        """What is printed until the line of the daemons, which is the last."""
        shown, deadline = "", time.monotonic() + PATIENCE
        while not re.search(r"daemons: .*connected", shown):
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], shown
            shown += os.read(self._ours, 65536).decode()
        return shown.replace("\r\n", "\n")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 130
        os.close(self._ours)


@pytest.fixture
def wrong_url(database_url: str) -> str:
    """A database with a long name of a tube, and pods without a reader."""
    from tests.conftest import psql

    tube = "a_tube_with_a_name_that_is_as_long_as_a_name_can_be_in_postgres"
    psql(database_url, f"SELECT tube.tube_ensure_exists('{tube[:50]}', partitions => 2)")
    psql(database_url, f"INSERT INTO tube.{tube[:50]} (op, shard, ids, payload) VALUES ('U', 0, '{{1}}', '{{}}')")
    return database_url


ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def test_it_fits_80_columns_in_colour_and_follows_a_resize(wrong_url: str) -> None:
    terminal = Terminal(wrong_url, 80, TERM="xterm")
    shown = terminal.read_picture()
    assert "\x1b[31m" in shown, "red"
    assert "\x1b[2J" in shown, "cleared"
    assert "no reader" in shown
    assert max(map(len, ESCAPES.sub("", shown).splitlines())) <= 80
    terminal.resize(50)
    shown = terminal.read_picture()
    assert max(map(len, ESCAPES.sub("", shown).splitlines())) <= 50
    terminal.close()


@pytest.mark.parametrize(
    ("environment", "cleared"), [({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, True)]
)
def test_without_colour_or_on_a_dumb_terminal(wrong_url: str, environment: dict[str, str], cleared: bool) -> None:
    terminal = Terminal(wrong_url, 80, **environment)
    shown = terminal.read_picture()
    assert "\x1b[31m" not in shown
    assert ("\x1b[2J" in shown) is cleared
    assert cleared or "\x1b" not in shown
    terminal.close()
