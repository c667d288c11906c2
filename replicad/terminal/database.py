"""Runs one async function of a command on the chosen database, to its end or to Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from replicad.config.settings import DatabaseSettings, read_settings
from replicad.terminal.failures import say

if TYPE_CHECKING:
    from types import FrameType

    import trio

    from replicad.postgres.bridge import Database
    from replicad.postgres.schema import Installed, Part

T = TypeVar("T")


def run_async(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` in trio and return its result. Ctrl-C cancels it, so that its clean-up runs; a second one kills.

    By default Python raises KeyboardInterrupt wherever the program is at that moment. Inside a callback of the driver
    it leaves a connection whose answer never comes while a task waits for it, or ends the interpreter.

    Raises:
        KeyboardInterrupt: it was cancelled, whatever the clean-up raised.
    """
    import trio

    scope = trio.CancelScope()
    token: trio.lowlevel.TrioToken | None = None
    interrupted = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(number, signal.SIG_DFL)
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(scope.cancel)

    async def cancellable() -> T:
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        if interrupted:
            scope.cancel()
        with scope:
            return await work()
        raise KeyboardInterrupt

    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the program has its own way
    if handled:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return trio.run(cancellable)
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)


_POOL = 2  # connections: one for the work, one for a second query meanwhile


@contextmanager
def database_url(settings: DatabaseSettings) -> Iterator[str]:
    """The URL of the named database, or of the embedded database of a running daemon, valid at least until the end of
    the block.

    Starts nothing. If no database was named, a line on stderr shows the database that is used.

    Raises:
        EnvironmentRefused: no database is named, and none runs.
    """
    if settings.database is not None:
        yield settings.database
        return
    from replicad.postgres.embedded import running_postgres

    with running_postgres(settings.data_folder) as url:
        say(f"replicad: working on the {settings.shown}")
        yield url


def on_database(
    options: Mapping[str, str | None],
    work: Callable[[Database, DatabaseSettings], Awaitable[T]],
    *,
    part: Part,
    install: bool = False,
    statement_timeout: float | None = 60,
) -> T:
    """Run `work` on the database of the options (the settings of DatabaseSettings), and return its result.

    `part` is the SQL part that the work needs. With `install` (the commands `enable`) it is installed or upgraded
    first. `statement_timeout` is in seconds.

    Raises:
        SchemaMissing: the part is not installed, or its version is older than this program's.
        SchemaTooNew: its version is newer and does not serve this program.
    """
    from replicad.postgres import schema
    from replicad.postgres.bridge import open_database

    settings = read_settings(DatabaseSettings, options)

    async def run(url: str) -> T:
        async with open_database(
            url, size=_POOL, application_name="replicad command", statement_timeout=statement_timeout
        ) as db:
            name = settings.tube_schema if part == "tube" else settings.stream_schema
            if install:
                await install_part(db, part, name)
            else:
                _print_remark(await schema.require(db, part, name), part, name)
            return await work(db, settings)

    with database_url(settings) as url:
        return run_async(partial(run, url))


def on_streams(
    options: Mapping[str, str | None], work: Callable[[Database, str], Awaitable[T]], *, install: bool = False
) -> T:
    """As `on_database`, for work that needs only the schema of the streams."""
    return on_database(options, lambda db, found: work(db, found.stream_schema), part="stream", install=install)


async def install_part(db: Database, part: Part, name: str) -> None:
    """Install or upgrade the part in the schema of that name; print a line if anything was done."""
    from replicad.postgres import schema

    outcome = await schema.install(db, part, name)
    if outcome in (schema.Outcome.INSTALLED, schema.Outcome.UPGRADED):
        say(f"replicad: schema {name} ({part}) {outcome.value}")
    elif outcome is not schema.Outcome.UNCHANGED:
        _print_remark(await schema.read_installed(db, part, name), part, name)


def _print_remark(present: Installed | None, part: Part, name: str) -> None:
    from replicad.postgres import schema

    remark = schema.remark(present, part, name)
    if remark is not None:
        say(f"replicad: {remark}")
