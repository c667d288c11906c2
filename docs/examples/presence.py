"""Presence, a complete example: a Postgres, two daemons, two workers that report the same user, and a reader.

    pip install 'replicad[embedded]'
    python presence.py

Prints who comes online and goes offline while one worker is killed and the other leaves, a relay from one daemon to the
other, and from which address the user was seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path

import trio

from replicad import AsyncClient, Connected, RowBatch, embedded_postgres, open_client
from replicad.presence import ClearUserSync, UserIp, UserSync
from replicad.protocol.commands import RemoteServerUp

ANN = "@ann:example.org"


async def watch(client: AsyncClient, task_status: trio.TaskStatus[None]) -> None:
    """Print the changes of the stream, and relays, until Ann is offline and the relay has come."""
    expected = {"online", "offline", "relay"}
    async with client.follow({"presence": None}, also=(Connected, RemoteServerUp)) as events:
        async for event in events:
            match event:
                case Connected():
                    task_status.started()
                case RowBatch(rows=rows):
                    for user, state, *_ in map(json.loads, rows):
                        print(f"{user} is {state}")
                        expected.discard(state)
                case RemoteServerUp(server_name=name):
                    print(f"{name} is up again, as the other daemon reports")
                    expected.discard("relay")
            if not expected:
                return


async def play(first: str, second: str) -> None:
    """Two workers, each at a daemon of its own, and a reader at the first."""
    now = int(time.time() * 1000)
    async with connect(first, "reader") as reader, connect(second, "w2") as w2, trio.open_nursery() as nursery:
        await nursery.start(watch, reader)
        async with connect(first, "w1") as w1:
            await w1.send(UserSync("w1", ANN, "PHONE", True, now))
            await w2.send(UserSync("w2", ANN, "LAPTOP", True, now))
            await w2.send(UserIp(ANN, json.dumps(["a secret token", "203.0.113.7", "Browser/1.0", "LAPTOP", now])))
            await trio.sleep(0.5)
        print("w1 lost its connection: w2 still reports Ann")
        await trio.sleep(2)  # longer than --lost-grace
        await w2.send(RemoteServerUp("remote.example.org"))
        print("w2 sends CLEAR_USER_SYNC")
        await w2.send(ClearUserSync("w2"))


def connect(server: str, name: str) -> AbstractAsyncContextManager[AsyncClient]:
    host, _, port = server.rpartition(":")
    return open_client(host, int(port), name=name)


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        run("presence", "enable", "--grace", "5s", "--lost-grace", "1s", "--database", url)
        servers = [serve(stack, url, folder / f"ready{number}") for number in (1, 2)]
        trio.run(play, *servers)
        run("presence", "list", "--all", "--database", url)
        run("presence", "ips", ANN, "--database", url)


def serve(stack: ExitStack, url: str, ready: Path) -> str:
    """A daemon that ends with the example; returns where it listens."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "replicad", "serve", "--database", url, "--listen", "127.0.0.1:0"),
            *("--ready-file", str(ready), "--log-level", "error"),
        ]
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while not ready.exists():
        time.sleep(0.05)
    return ready.read_text().strip()


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "replicad", *words], check=True)


if __name__ == "__main__":
    main()
