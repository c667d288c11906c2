"""A cached function that is never stale, from nothing: Postgres, a daemon, a worker that reads, a writer that changes.

pip install 'replicad[embedded]'
python caches.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import trio

from replicad import CacheInvalidator, Database, embedded_postgres, open_client, open_database
from replicad.caches import invalidate

caches = CacheInvalidator()
db: Database


@caches.cached()
async def get_user(user_id: str) -> str:
    print(f"  Postgres is asked for {user_id}")
    return str(await db.fetch_value("SELECT name FROM users WHERE id = $1", user_id))


async def rename(user_id: str, name: str) -> None:
    """The writer: the change and its invalidation are one transaction."""
    async with db.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute("UPDATE users SET name = $1 WHERE id = $2", name, user_id)
        await invalidate(connection, "get_user", [user_id])
        await connection.execute("COMMIT")


async def work(url: str, host: str, port: int) -> None:
    global db
    async with (
        open_database(url, size=2, application_name="example") as db,
        open_client(host, port, name="example") as client,
        trio.open_nursery() as nursery,
    ):
        await db.execute("CREATE TABLE users (id text PRIMARY KEY, name text)")
        await db.execute("INSERT INTO users VALUES ('@bob:example.com', 'Bob')")
        await nursery.start(caches.run, client)  # returns when the caches are live
        for _ in range(3):
            print(await get_user("@bob:example.com"))
        await rename("@bob:example.com", "Robert")
        while await get_user("@bob:example.com") == "Bob":  # until the line has come, some milliseconds
            await trio.sleep(0.001)
        for _ in range(3):
            print(await get_user("@bob:example.com"))
        nursery.cancel_scope.cancel()


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        ready = folder / "ready"
        command = [sys.executable, "-m", "replicad", "serve", "--database", url, "--listen", "127.0.0.1:0"]
        daemon = subprocess.Popen([*command, "--ready-file", str(ready), "--log-level", "warning"])
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        subprocess.run([sys.executable, "-m", "replicad", "caches", "enable", "--database", url], check=True)
        while not ready.exists():
            time.sleep(0.05)
        host, _, port = ready.read_text().strip().rpartition(":")
        trio.run(work, url, host, int(port))


if __name__ == "__main__":
    main()
