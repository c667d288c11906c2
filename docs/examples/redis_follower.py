"""Following over Redis, a complete example: a Postgres, a Redis, a daemon that publishes, and a reader.

    pip install 'replicad[embedded,redis]'
    apt-get install redis-server
    python redis_follower.py

Prints rows that came before the reader was there, by TCP, and rows that come over Redis while it follows.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import trio

from replicad import Database, RowBatch, embedded_postgres, open_client, open_database

SERVER = "example.com"


async def read(url: str, redis: str, daemon: str) -> None:
    """Write three rows, follow, and write two more."""
    async with open_database(url, size=1, application_name="example") as database:
        await write(database, 1, 3)
        async with open_client(redis, name="reader", server_name=SERVER, daemon=daemon) as client:
            async with client.follow({"events": "EARLIEST"}) as follower:
                async for event in follower:
                    assert isinstance(event, RowBatch)
                    print(f"row {event.token}: {event.rows[0]}")
                    if event.token == 3:
                        await trio.sleep(3)  # until the follower has gone over to Redis
                        await write(database, 4, 5)
                    if event.token == 5:
                        break


async def make_stream(url: str) -> None:
    """The table `events`, as a stream."""
    async with open_database(url, size=1, application_name="example") as database:
        await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body text)")
        await database.execute("SELECT replicad.stream_add('events', 'events', 'id', row_sql => 'to_json(t.body)')")


async def write(database: Database, first: int, last: int) -> None:
    """Some rows."""
    for number in range(first, last + 1):
        await database.execute("INSERT INTO events (body) VALUES ($1)", f"event {number}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def main() -> None:
    """Start everything, read, and stop everything."""
    if shutil.which("redis-server") is None:
        print("this example needs a Redis: apt-get install redis-server")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        port, ready = free_port(), folder / "ready"
        redis = f"redis://127.0.0.1:{port}/0"
        serve = [
            sys.executable,
            "-m",
            "replicad",
            "serve",
            "--database",
            url,
            "--server-name",
            SERVER,
        ]
        commands = [
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"],
            [*serve, "--listen", "127.0.0.1:0", "--ready-file", str(ready), "--redis", redis, "--log-level", "warning"],
        ]
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        while not ready.exists():
            time.sleep(0.05)
        trio.run(make_stream, url)
        trio.run(read, url, redis, ready.read_text().strip())


if __name__ == "__main__":
    main()
