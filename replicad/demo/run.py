"""The demonstration from end to end: rows, a tube, the daemon, Spark, and a copy that is kept in step.

It runs the commands that it prints. All figures are counted, and both sides are compared row by row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import trio

from replicad.config.settings import Address
from replicad.demo import data
from replicad.demo.check import Comparison, compare, read_downstream
from replicad.demo.follow import TUBE, RunningPipeline, running_pipeline, write_config
from replicad.demo.processes import clean_environment, running_daemon, until_interrupted
from replicad.demo.show import Show, program
from replicad.demo.words import QUERY, next_steps
from replicad.errors import EnvironmentRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import embedded_postgres, reachable
from replicad.postgres.programs import SHARED
from replicad.spark.java import find_java

PARTITIONS = 4  # of the tube: as many tasks as Spark runs at once on a usual machine

_LOOK = 0.2  # seconds between two checks of the pipeline's progress
_PATIENCE = 300.0  # seconds without progress of the pipeline after which the demonstration fails


@dataclass
class Demo:
    """One run in `folder`."""

    folder: Path
    show: Show = field(default_factory=Show)
    url: str = ""
    loaded: int = 0
    changes: data.Changes = field(default_factory=data.Changes)

    async def run(self) -> bool:
        """Run the demonstration. True if both sides were equal in both comparisons.

        Raises:
            EnvironmentRefused: something is missing or did not start.
            KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, after all processes have ended.
        """
        started = time.monotonic()
        find_java(os.environ)
        shards = data.load_shards()
        self.folder.mkdir(parents=True, exist_ok=True)
        async with until_interrupted(), AsyncExitStack() as stack:
            db = await self._database(stack)
            await self._load(db, shards)
            server = await self._serve(stack)
            await self._make_tube()
            pipeline = await self._pipeline(stack, server)
            first = await self._follow(db, pipeline, shards, "the backfill")
            await self._change(db, shards, server)
            second = await self._follow(db, pipeline, shards, "the changes")
            self._query()
            equal = self._summary(pipeline, first, second, time.monotonic() - started)
            self.show.step("Ending the pipeline, the daemon and Postgres")
        self.show.line(next_steps(self.folder, self.url))
        return equal

    async def _database(self, stack: AsyncExitStack) -> Database:
        folder = self.folder / "postgres"
        if not reachable(folder):  # in the closed home of root
            folder = SHARED / f"demo-{sha256(os.fsencode(folder.absolute())).hexdigest()[:12]}"
        self.show.step(f"Starting an embedded Postgres in {folder}")
        self.url = stack.enter_context(embedded_postgres(folder))
        db = await stack.enter_async_context(open_database(self.url, size=3, application_name="replicad demo"))
        self.show.line(str(await db.fetch_value("SELECT version()")).partition(" on ")[0])
        return db

    async def _load(self, db: Database, shards: Sequence[data.Shard]) -> None:
        self.show.step("Loading cities of the world, one schema per continent")
        self.loaded = 0
        for part in reversed(schema.PARTS):  # remove what an earlier run has left
            await schema.uninstall(db, part)
        for name in ("downstream", "checkpoint"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for shard in shards:
            self.loaded += await data.fill_shard(db, shard)
            self.show.progress(f"{self.loaded:,} rows, {shard.table} is loaded")
        await data.make_census(db)
        self.show.line(f"{self.loaded:,} rows in {len(shards)} tables")

    async def _serve(self, stack: AsyncExitStack) -> Address:
        self.show.step("Starting the daemon")
        server = await stack.enter_async_context(running_daemon(self.url, self.folder))
        self.show.command("serve", "--listen", str(server))
        await self._command("ping", str(server))
        await self._command("streams", "add", "census", "--table", "public.census", "--id", "id")
        return server

    async def _make_tube(self) -> None:
        self.show.step("Creating a tube, and attaching the tables to it")
        await self._command("tubes", "create", TUBE, "--partitions", str(PARTITIONS))
        await self._command("tubes", "attach", TUBE, data.TABLE, "--shards", "all")

    async def _pipeline(self, stack: AsyncExitStack, server: Address) -> RunningPipeline:
        self.show.step("Scheduling a backfill, and starting Spark as a client of the daemon")
        await self._command("tubes", "backfill", TUBE, "--shards", "all")
        config = write_config(self.folder, server, self.url)
        self.show.command("pipeline", "run", str(config))
        return await stack.enter_async_context(running_pipeline(self.folder, config, self.url))

    async def _follow(
        self, db: Database, pipeline: RunningPipeline, shards: Sequence[data.Shard], what: str
    ) -> Comparison:
        """Wait until the tube is empty, and compare."""
        began = time.monotonic()
        moved, ids = began, -1
        while True:
            pipeline.update()
            if pipeline.counts["ids"] != ids:
                moved, ids = time.monotonic(), pipeline.counts["ids"]
            elif time.monotonic() - moved > _PATIENCE:
                raise EnvironmentRefused(f"no progress for {_PATIENCE:g} s; see the logs in {self.folder}")
            waiting = await db.fetch_value(
                "SELECT sum(inc_count + backfill_count) FROM tube.tube_stats() WHERE tube = $1", TUBE
            )
            if not waiting:
                break
            doing = f"{ids:,} ids read" if ids else "Spark is starting"
            self.show.progress(f"{doing}, {int(waiting):,} pods wait, {time.monotonic() - began:.0f} s")
            await trio.sleep(_LOOK)
        pipeline.update()
        found = compare(await data.read_rows(db, shards), read_downstream(self.folder / "downstream"))
        seconds = time.monotonic() - began
        self.show.line(
            f"Caught up with {what} in {seconds:.1f} s: {found.right:,} rows downstream, {found.equal:,} equal"
        )
        if not found.is_equal:
            self.show.line(f"NOT EQUAL: {found.describe()}")
        return found

    async def _change(self, db: Database, shards: Sequence[data.Shard], server: Address) -> None:
        self.show.step("Changing, deleting and inserting rows, as an application would")
        self.changes = data.Changes()
        for shard in shards:
            done = await data.change_shard(db, shard)
            await data.note_census(db, shard, done)
            self.changes += done
        c = self.changes
        self.show.line(f"{c.updated:,} rows updated, {c.deleted:,} deleted, {c.inserted:,} inserted")
        await self._command(
            "tail", "census", "--server", str(server), "--from", "EARLIEST", "--count", str(len(shards))
        )

    def _query(self) -> None:
        self.show.step("Querying the copy")
        folder = self.folder / "downstream"
        text = QUERY.format(folder=folder)
        self.show.line(text)
        names: dict[str, object] = {}
        exec(text, names)  # noqa: S102 - the text above
        self.show.line(str(names["answer"]))

    def _summary(self, pipeline: RunningPipeline, first: Comparison, second: Comparison, seconds: float) -> bool:
        self.show.step(f"Summary, after {seconds:.0f} s")
        self.show.figures(
            [
                ("rows loaded", self.loaded),
                ("rows changed, deleted, inserted since", self.changes.total),
                ("pods read over TCP", pipeline.counts["pods"]),
                ("ids in them", pipeline.counts["ids"]),
                ("micro-batches", pipeline.counts["batches"]),
                ("rows written downstream", pipeline.counts["written"]),
                ("rows deleted downstream", pipeline.counts["deleted"]),
                ("rows in Postgres now", second.left),
                ("rows downstream now", second.right),
                ("rows that are equal in every column", second.equal),
            ]
        )
        equal = first.is_equal and second.is_equal and first.left == self.loaded
        self.show.line("Both sides are equal." if equal else "THE TWO SIDES ARE NOT EQUAL.")
        return equal

    async def _command(self, *words: str) -> None:
        """Run a command of replicad on the demonstration's database, and show it with its output.

        Raises:
            EnvironmentRefused: the command failed.
        """
        self.show.command(*words)
        done = await trio.run_process(
            [sys.executable, "-m", "replicad", *words],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
            env=clean_environment(REPLICAD_DATABASE=self.url),
            start_new_session=True,
        )
        self.show.line(done.stdout.decode("utf-8", "replace").rstrip())
        if done.returncode != 0:
            raise EnvironmentRefused(f"`{program()} {' '.join(words)}` failed with status {done.returncode}, see above")
