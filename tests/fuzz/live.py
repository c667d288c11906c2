"""Hostile lines, requests and replies against a running daemon: python -m tests.fuzz.live [--seconds N] [--seed S]

(`make fuzz`.) The daemon and its Postgres are started for it, and are gone afterwards; all is on the loopback. In each
round several connections send lines, others send requests over HTTP, and the Redis of the daemon lies. After it a
bystander must be sent a new row and a new pod, and be answered over HTTP; a follower over the Redis that lies must have
the row, too; and the daemon's memory must have stayed within a bound. Ends with status 1 and the seed, with which the
same lines and requests come again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

import psutil
import trio

from replicad.client.async_client import open_client
from replicad.client.events import RowBatch
from replicad.errors import ReplicadError
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from replicad.protocol.words import Side
from tests.fuzz import hostile, web
from tests.fuzz.lying_redis import LyingRedis
from tests.redis_servers import free_port
from tests.roles import ROLES, as_daemon
from tests.vocabulary import parse

SERVER = "fuzzed.example"
PATIENCE = 60.0  # seconds: for what hangs, never for what is slow
GROWTH = 192 << 20  # bytes by which the daemon may grow after the first round: its journals, caches and connections
CONNECTIONS = 8
LINES = 400  # of each connection in a round
ENDS = ("ERROR", "AUTH", "NAME")  # a line after which the daemon may close, by the protocol
TABLES = """
CREATE TABLE events (id bigserial PRIMARY KEY, body integer); CREATE TABLE cities (id bigserial PRIMARY KEY);
SELECT replicad.stream_add('events', 'events', 'id', row_sql => 'to_jsonb(t.body)');
SELECT tube.tube_ensure_exists('t', 1), tube.tube_ensure_exists('quiet', 1);
SELECT tube.tube_table_ensure_attached('quiet', 'cities', 0);
"""


class Finding(Exception):
    """What must not happen has happened."""


class Line:
    """A connection of lines."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._file = self._socket.makefile("rb")

    def send(self, *lines: str) -> None:
        self._socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def until(self, pattern: str) -> str:
        """The first line that matches from its begin on. Raises Finding."""
        deadline, last = time.monotonic() + PATIENCE, ""
        while time.monotonic() < deadline:
            try:
                line = self._file.readline()
            except OSError as error:
                raise Finding(f"a bystander waited for {pattern}: {error}") from error
            if not line:
                raise Finding(f"a bystander waited for {pattern}, and its connection was closed after {last[:300]!r}")
            last = line.decode()
            if re.match(pattern, last):
                return last
        raise Finding(f"a bystander waited for {pattern}")

    def answers(self) -> Iterator[str]:
        """All lines until the connection ends."""
        with suppress(OSError):
            for line in self._file:
                yield line.decode().removesuffix("\n")

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def shoot(port: int, seed: int, answered: Counter[str], findings: list[str]) -> None:
    """One connection after another, until all lines of the seed are sent."""
    chance = random.Random(seed)
    todo = list(islice(hostile.lines(seed, ["events", "t"]), LINES))
    while todo:
        piece, todo = todo[:40], todo[40:]
        with suppress(OSError):
            line = Line(port)
            reader = threading.Thread(target=_check, args=(line, answered, findings, seed), daemon=True)
            reader.start()
            for one in piece:
                line.send(one)
                if one.startswith(ENDS):
                    break
            time.sleep(chance.choice((0.0, 0.05, 0.3)))
            line.close()
            reader.join(PATIENCE)


def _check(line: Line, answered: Counter[str], findings: list[str], seed: int) -> None:
    for text in line.answers():
        try:
            command = parse(text, Side.SERVER)
        except ReplicadError as error:
            findings.append(f"seed {seed}: the daemon sent {text[:300]!r}, which is no line of the protocol: {error}")
            return
        answered[command.NAME] += 1
        if text.startswith("ERROR internal"):
            findings.append(f"seed {seed}: {text[:300]}")


@contextmanager
def daemon(http: int, redis: str) -> Iterator[tuple[psutil.Process, int, str]]:
    """A daemon with its own Postgres: its process, its port, the URL of Postgres. `http`: the port for HTTP."""
    with tempfile.TemporaryDirectory(prefix="replicad-fuzz-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o711)
        ready, log = folder / "ready", folder / "log"
        server = stack.enter_context(EmbeddedPostgres(folder / "postgres"))
        listen = ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        sql(server.url, ROLES)
        also = ["--http", f"127.0.0.1:{http}", "--redis", redis, "--server-name", SERVER]
        words = ["serve", "--database", as_daemon(server.url), *listen, *also]
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-m", "replicad", *words], stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + PATIENCE
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Finding(f"the daemon did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.05)
            port = int(ready.read_text().split()[0].rpartition(":")[2])
            yield psutil.Process(process.pid), port, server.url
            said = log.read_text()
            if (at := said.find("Traceback")) >= 0:
                raise Finding(f"the log has a traceback:\n{said[max(0, at - 500) : at + 4000]}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def sql(url: str, text: str) -> None:
    command = [str(find_programs() / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-d", url, "-c", text]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise Finding(f"psql failed: {done.stderr}")


def run(seconds: float, seed: int) -> Counter[str]:
    """Rounds until the time is over; returns how often each command was answered. Raises Finding."""
    answered: Counter[str] = Counter()
    findings: list[str] = []
    http, place = free_port(), ["127.0.0.1:1"]
    with closing(LyingRedis(seed, lambda: place[0])) as redis, daemon(http, redis.url) as (process, port, url):
        place[0] = f"127.0.0.1:{port}"
        sql(url, TABLES)
        follower = Follower(redis.url)
        reader, worker = Line(port), Line(port)
        time.sleep(2)  # the daemon looks at the registry once a second
        reader.send("REPLICATE events NOW")
        reader.until("POSITION events ")
        worker.send("CLAIM quiet 0/1 ttl=3600")
        term = worker.until("LEASE quiet ").split()[3]
        deadline, number, first = time.monotonic() + seconds, 0, 0
        while number == 0 or time.monotonic() < deadline:
            seeds = [seed + number * CONNECTIONS + each for each in range(CONNECTIONS)]
            threads = [threading.Thread(target=shoot, args=(port, each, answered, findings)) for each in seeds]
            threads += [threading.Thread(target=web_shoot, args=(http, each, answered, findings)) for each in seeds[:3]]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for bystander in (reader, worker):  # the daemon ends a connection that says nothing for 15 s
                    bystander.send("PING 1")
                time.sleep(1.0)
            number += 1
            sql(url, f"INSERT INTO events (body) VALUES ({number}); INSERT INTO cities DEFAULT VALUES")
            reader.send("PING 1")
            reader.until(rf"RDATA events master \d+ {number}\b")
            worker.send(f"PODS quiet 0/1 {term} wait=30")
            worker.until("CURSOR quiet ")
            if (fault := web.look(http)) is not None:
                findings.append(f"a bystander over HTTP: {fault}")
            if (fault := follower.fault(number)) is not None:
                findings.append(f"a follower over Redis: {fault}")
            memory = process.memory_info().rss
            first = first or memory
            if memory > first + GROWTH:
                findings.append(f"the daemon has grown from {first >> 20} to {memory >> 20} MiB in {number} rounds")
            if findings:
                raise Finding("; ".join(findings[:5]) + f"; the round began with the seed {seeds[0]}")
        answered["lies of Redis"] = redis.lies
    return answered


def web_shoot(port: int, seed: int, answered: Counter[str], findings: list[str]) -> None:
    answered["HTTP"] += web.shoot(port, seed, findings)


class Follower:
    """A program that follows the stream over the Redis that lies, in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = 0
        self._ended: str | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            trio.run(self._follow)
        except BaseException as error:  # noqa: BLE001 - reported
            self._ended = "".join(traceback.format_exception(error))[-2000:]
        else:
            self._ended = "it has ended"

    async def _follow(self) -> None:
        async with open_client(self._url, name="follower", server_name=SERVER) as client:
            async with client.follow({"events": "EARLIEST"}, patience=None, first_patience=None) as follower:
                async for event in follower:
                    if isinstance(event, RowBatch):
                        self._last = max(self._last, *map(int, event.rows))

    def fault(self, number: int) -> str | None:
        """What is wrong; None: it has the row with that number."""
        deadline = time.monotonic() + PATIENCE
        while self._last < number and self._ended is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._ended or (None if self._last >= number else f"it waits for row {number} and has {self._last}")


def main() -> int:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    given = options.parse_args()
    print(f"seed {given.seed}, {given.seconds:g} seconds")
    try:
        answered = run(given.seconds, given.seed)
    except Finding as finding:
        print(f"FOUND: {finding}")
        return 1
    print("answered: " + ", ".join(f"{name} {count}" for name, count in sorted(answered.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
