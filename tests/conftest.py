"""What tests of several floors share: one Postgres for each process that runs tests, and an empty database per test.

`make test` runs several processes (pytest-xdist), twice as many as there are cores, because tests wait more than they
calculate. So a test takes free ports, looks at its own database only, and relies on no other test.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import structlog
from hypothesis import settings

from replicad.config.logs import FromLibraries
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from replicad.postgres.schema import PARTS, Part, script
from tests.collector import uncollected
from tests.lengths import LONG, examples
from tests.process_state import differences, state
from tests.roles import DAEMON, ROLES, as_daemon

PATIENCE = 60.0  # seconds for what should take milliseconds: a limit is for what hangs, never for what is slow

# For every JVM that a test starts: a test is too short for what the second compiler and a parallel collector give back.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# The processes that run tests and those that tests start keep what they compile, wherever they were told otherwise:
# there are hundreds of them, and to compile replicad anew takes half of the start of a daemon.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A crash of the machine may eat the test data, a crash of Postgres may not: the pages are in the system's cache.
FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum_naptime": "1d", "max_wal_size": "128MB"}

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux: to make and drop a database there takes a sixth
MEMORY_FREE = 4 << 30  # bytes that have to be free there: several servers of some 200 MB each
SERVERS = "replicad-test-"  # what the names of servers' folders begin with; the id of the process follows

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup SIGHUP: the programs that they start
# would ignore them too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_numbers = itertools.count(1)


# A logger that was used by a command in this process must still be one whose events a later test can capture.
def _configure_uncached(configure: Any = structlog.configure, **named: Any) -> None:
    configure(**{**named, "cache_logger_on_first_use": False})


structlog.configure = _configure_uncached


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """A test that leaves the process changed fails: the next ones would not prove what they say."""
    before = state()
    yield
    changed = differences(before, state())
    assert not changed, f"the test leaves its process changed: {'; '.join(changed)}"


HANDLED = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by commands, and by what Spark starts


@pytest.fixture(autouse=True)
def as_before_any_command(process_as_it_was: None) -> Iterator[None]:
    """A command sets logs, handlers of signals, imports and the collector for its process: here for other tests."""
    _configure_logs()
    handlers = [(number, signal.getsignal(number)) for number in HANDLED]
    path, thresholds = list(sys.path), gc.get_threshold()
    yield
    _configure_logs()
    gc.set_threshold(*thresholds)
    sys.path[:] = path
    for number, handler in handlers:
        signal.signal(number, handler)


def _configure_logs() -> None:
    structlog.reset_defaults()
    structlog.configure(processors=PROCESSORS)
    logging.getLogger("replicad").setLevel(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, FromLibraries)]


# structlog's own but for its way to print tracebacks, which takes longer than many a test.
PROCESSORS = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
    structlog.dev.set_exc_info,
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]
_configure_logs()


# How long an example takes says nothing about the code on a busy machine.
settings.register_profile("suite", deadline=None, max_examples=examples(100))
settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)  # tests run without pytest-xdist too
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` means: tests of the unit calculate, the others wait more than that."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    units = config.args and all("tests/unit" in argument for argument in config.args)
    return min(16, cores if units else 2 * cores)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give one process all tests of the shared Spark: each process would start a JVM of its own, and warm it up."""
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.xdist_group("spark"))
    if item.get_closest_marker("long"):
        item.add_marker(pytest.mark.stress)
        item.add_marker(pytest.mark.skipif(not LONG, reason="long; make long runs it"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes long begin first: the rest fills the gaps."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("spark", "stress", "xdist_group")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end."""
    with uncollected():
        return (yield)


@contextmanager
def server_folder() -> Iterator[Path]:
    """A fresh folder for an EmbeddedPostgres, in memory where there is enough of it.

    Not one of pytest's: every new run of pytest closes those to other accounts, and root's servers run as another one.
    """
    prefix = f"{SERVERS}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_memory(), ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # replicad changes the rights of no folder that it did not make
        yield Path(folder)


def _memory() -> Path | None:
    """Where files are in memory. None: there is no such place, or the long tests would fill it."""
    usable = not LONG and MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    return MEMORY if usable and shutil.disk_usage(MEMORY).free > MEMORY_FREE else None


def pytest_sessionstart() -> None:
    """Remove the folders in memory of processes that were killed."""
    for folder in MEMORY.glob(f"{SERVERS}*") if MEMORY.is_dir() else ():
        owner = folder.name.removeprefix(SERVERS).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)  # a server that still runs there ends when it sees that


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a Postgres where we are superuser: a fresh embedded one, or the one that REPLICAD_TEST_POSTGRES names."""
    named = os.environ.get("REPLICAD_TEST_POSTGRES")
    if named:
        psql(named, ROLES)
        yield named
    else:
        with server_folder() as folder, EmbeddedPostgres(folder, FAST) as server:
            psql(server.url, ROLES)
            yield server.url


@pytest.fixture
def postgres_folder() -> Iterator[Path]:
    """`server_folder` as a fixture."""
    with server_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def served_template(postgres_url: str) -> Iterator[str]:
    """Name of a database that looks as after the first start of `replicad serve`: a copy costs a fifth of a start."""
    name = f"test_{os.getpid()}_served"
    psql(postgres_url, f"CREATE DATABASE {name}")
    psql(_named(postgres_url, name), ROLES)
    install(as_daemon(_named(postgres_url, name)), "stream", "tube", "federation")
    yield name
    psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def maintain(postgres_url: str) -> Iterator[Callable[..., None]]:
    """Runs SQL commands in the database of `postgres_url`, over one connection: a psql for each would cost more."""
    import psycopg

    connection: psycopg.Connection | None = None

    def connected() -> psycopg.Connection:
        nonlocal connection
        try:
            if connection is not None:
                connection.execute("SELECT")
        except psycopg.OperationalError:  # a test has ended it
            connection = None
        if connection is None:
            connection = psycopg.connect(postgres_url, autocommit=True, application_name="tests")
        return connection

    def run(*sql: str) -> None:
        for command in sql:
            connected().execute(command.encode())

    yield run
    if connection is not None:
        connection.close()


@pytest.fixture
def database_url(request: pytest.FixtureRequest, postgres_url: str, maintain: Callable[..., None]) -> Iterator[str]:
    """URL of a fresh database with our schema and nothing else, dropped after the test whoever is still connected.

    Our schema belongs to the role of the daemon (tests/roles.py); the URL is a superuser's. With the marker
    `bare_database`: an empty one, as a new user's is.
    """
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    bare = request.node.get_closest_marker("bare_database")
    template = "template1" if bare else request.getfixturevalue("served_template")
    maintain(
        f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY",
        f"GRANT CREATE ON DATABASE {name} TO {DAEMON}",  # the template has given all else
    )
    url = _named(postgres_url, name)
    if bare:
        psql(url, ROLES)
    yield url
    try:
        maintain(f"DROP DATABASE {name} WITH (FORCE)")
    except psycopg.errors.ObjectInUse:  # it holds prepared transactions
        for gid in psql(url, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").splitlines():
            with suppress(AssertionError):  # whoever prepared it may be ending it just now
                psql(url, f"ROLLBACK PREPARED '{gid}'")
        maintain(f"DROP DATABASE {name} WITH (FORCE)")


def _named(url: str, database: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A pool of 8 connections to `database_url`."""
    async with open_database(database_url, size=8, application_name="replicad test") as opened:
        yield opened


def install(url: str, *parts: Part) -> None:
    """Install parts of our schema (default: streams and tubes), as `replicad sql up` through psql does it."""
    command = [find_programs() / "psql", "--no-psqlrc", "-qX", "-v", "ON_ERROR_STOP=1", "-d", url]
    text = "".join(script(part, PARTS[part].schema, "up") for part in parts or ("stream", "tube"))
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def psql(url: str, *sql: str) -> str:
    """Run SQL commands by psql, as a user would; returns what it prints, without headers."""
    commands = [word for command in sql for word in ("-c", command)]
    command = [find_programs() / "psql", "--no-psqlrc", "-qtAX", "-v", "ON_ERROR_STOP=1", "-d", url, *commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The spans of a program that has set up an SDK of OpenTelemetry."""
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    found, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield found
    provider.shutdown()
