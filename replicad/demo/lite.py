"""The small demonstration: a stream and a tube with a worker, without Java and Spark, in some seconds.

It runs the commands that it prints. A follower takes every row of a stream, and a worker keeps a copy of a table in
step; both are compared with Postgres.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import trio

from replicad.client.async_client import open_client
from replicad.client.events import RowBatch
from replicad.client.worker import Batch, Worker
from replicad.config.settings import Address
from replicad.demo.run import Demo, next_lines, program, running_daemon, until_interrupted
from replicad.errors import EnvironmentRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, load_sql

ROWS = 2_000  # orders, and events about them: what a second's work is
PATIENCE = 30.0  # seconds for what takes a second

NEXT = """\

Now try it yourself. Serve the data of this demonstration again, or your own Postgres:

  {program} serve --data-folder {folder}
  {program} serve --database postgresql://user@host/name

In another terminal, follow the stream, and look into the tube:

  {program} tail events
  {program} tubes list --data-folder {folder}

Write a row in a third one:

  {program} psql --data-folder {folder} -c "INSERT INTO events (body) VALUES ('[1]')"

`make demo` shows Spark as well; it needs Java 17. Read on in README.md."""


@dataclass
class LiteDemo(Demo):
    """One run in `folder`."""

    copy: dict[int, tuple[str, int]] = field(default_factory=dict)

    async def run(self) -> bool:
        """Run the demonstration. True if all rows were received, and the copy is equal.

        Raises:
            EnvironmentRefused: something is missing or did not start.
            KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, after all processes have ended.
        """
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        async with until_interrupted(), AsyncExitStack() as stack:
            db = await self._database(stack)
            await self._make_tables(db)
            self.show.step("Starting the daemon")
            server = await stack.enter_async_context(running_daemon(self.url, self.folder))
            self.show.command("serve", "--listen", str(server))
            await self._command("ping", str(server))
            received = await self._follow_stream(db, server)
            equal = await self._work_tube(db, server)
            self.show.step(f"Summary, after {time.monotonic() - started:.0f} s")
            self.show.line("Every row was received, once and in order." if received else "ROWS ARE MISSING.")
            self.show.line("Both sides are equal." if equal else "THE TWO SIDES ARE NOT EQUAL.")
        self.show.line(next_lines(NEXT, program=program(), folder=self.postgres))
        return received and equal

    async def _make_tables(self, db: Database) -> None:
        self.show.step("Making a table of orders, and a table of events about them")
        for part in reversed(schema.PARTS):  # remove what an earlier run has left
            await schema.uninstall(db, part)
        shutil.rmtree(self.folder / "downstream", ignore_errors=True)
        await db.execute(load_sql("demo_orders"))
        await db.execute(load_sql("demo_orders_fill"), ROWS)
        self.show.line(f"{ROWS:,} orders")

    async def _follow_stream(self, db: Database, server: Address) -> bool:
        """A stream: every row that is committed is received once, in order."""
        self.show.step("Following a stream, while rows are written")
        await self._command("streams", "add", "events", "--table", "public.events", "--id", "id", "--row", "body")
        tokens: list[int] = []
        async with open_client(server.host, server.port, name="demo") as client:
            async with client.follow({"events": "EARLIEST"}) as follower:
                await db.execute(load_sql("demo_events"), ROWS)
                began = time.monotonic()
                with trio.move_on_after(PATIENCE):
                    async for batch in follower:
                        assert isinstance(batch, RowBatch)
                        tokens += [batch.token] * len(batch.rows)
                        if len(tokens) >= ROWS:
                            break
        self.show.line(f"A Python client received {len(tokens):,} rows in {time.monotonic() - began:.2f} s")
        await self._command("tail", "events", "--server", str(server), "--from", "EARLIEST", "--count", "3")
        return tokens == await _ids(db)

    async def _work_tube(self, db: Database, server: Address) -> bool:
        """A tube: the keys of changed rows reach a worker, which loads the rows."""
        self.show.step("Keeping a copy of the orders in step, by a worker of a tube")
        await self._command("tubes", "create", "orders")
        await self._command("tubes", "attach", "orders", "public.orders")
        await self._command("tubes", "backfill", "orders")

        async def write(batch: Batch) -> None:
            ids = [int(touch.id) for touch in batch.touches]
            rows = await db.fetch(load_sql("demo_orders_load"), ids)
            for id in ids:
                self.copy.pop(id, None)
            self.copy.update({row["id"]: (row["item"], row["amount"]) for row in rows})

        def connect() -> object:
            return open_client(server.host, server.port, name="demo")

        worker = Worker(connect, "orders", write)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await self._wait_equal(db, "the backfill")
            await db.execute(load_sql("demo_orders_change"))
            equal = await self._wait_equal(db, "rows that were updated, deleted and inserted")
            nursery.cancel_scope.cancel()
        return equal

    async def _wait_equal(self, db: Database, what: str) -> bool:
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            rows = await db.fetch(load_sql("demo_orders_all"))
            if self.copy == {row["id"]: (row["item"], row["amount"]) for row in rows}:
                took = time.monotonic() - began
                self.show.line(f"The worker caught up with {what} in {took:.2f} s: {len(rows):,} orders are equal")
                return True
            await trio.sleep(0.05)
        raise EnvironmentRefused(f"the worker has not caught up in {PATIENCE:g} s; see the logs in {self.folder}")


async def _ids(db: Database) -> list[int]:
    found: list[int] = json.loads(await db.fetch_value(load_sql("demo_events_ids")))
    return found
