"""A copy of a table in SQLite that follows each INSERT, UPDATE and DELETE, from nothing: Postgres, a daemon, a reader.

pip install 'replicad[embedded]'
python orders_copy.py
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import trio

from replicad import BlockingClient, RowBatch, apply_changes, embedded_postgres, open_database, read_changes
from replicad.client import TableCopy


def follow(copy: sqlite3.Connection, address: str) -> None:
    """Keep the copy equal to the table, until it has no new order."""
    host, _, port = address.rpartition(":")
    cursor = copy.cursor()
    orders = TableCopy(cursor, "orders", ("id",))
    (token,) = cursor.execute("SELECT token FROM position").fetchone()
    with BlockingClient(host, int(port), name="copy") as client, client.follow({"orders": token}) as events:
        for event in events:
            if isinstance(event, RowBatch):
                apply_changes(orders, read_changes(event))
                cursor.execute("UPDATE position SET token = ?", (str(event.token),))
                copy.commit()  # the rows and the token together: each change is applied once
                if cursor.execute("SELECT count(*), sum(state = 'new') FROM orders").fetchone() == (900, 0):
                    return


async def write(url: str, *statements: str) -> None:
    """The application: it knows nothing of the copy."""
    async with open_database(url, size=1, application_name="example") as db:
        for statement in statements:
            await db.execute(statement)


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        ready = folder / "ready"
        replicad = [sys.executable, "-m", "replicad"]
        serve = [*replicad, "serve", "--database", url, "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        daemon = subprocess.Popen([*serve, "--log-level", "warning"])
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        while not ready.exists():
            time.sleep(0.1)
        trio.run(
            write,
            url,
            "CREATE TABLE orders (id integer PRIMARY KEY, state text, total numeric)",
            "INSERT INTO orders SELECT i, 'new', i / 100.0 FROM generate_series(1, 1000) AS i",
        )
        add = [*replicad, "streams", "add", "orders", "--table", "public.orders", "--changes", "--snapshot"]
        subprocess.run([*add, "--database", url], check=True)
        trio.run(write, url, "UPDATE orders SET state = 'paid'", "DELETE FROM orders WHERE id <= 100")
        copy = stack.enter_context(sqlite3.connect(folder / "copy.db"))
        copy.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, total REAL)")
        copy.execute("CREATE TABLE position AS SELECT 'EARLIEST' AS token")
        follow(copy, ready.read_text().split()[0])
        print("paid orders:", *copy.execute("SELECT count(*), round(sum(total), 2) FROM orders").fetchone())


if __name__ == "__main__":
    main()
