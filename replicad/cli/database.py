"""Commands that work on Postgres itself: which database, and one trio run with a small pool on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from replicad.cli.failures import say
from replicad.config import DatabaseSettings, read_settings

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

T = TypeVar("T")

_POOL = 2  # one statement at a time, and one to look on meanwhile


@contextmanager
def database_url(settings: DatabaseSettings) -> Iterator[str]:
    """The named database's URL, or that of the embedded one, which runs for the length of the block at least."""
    if settings.database is not None:
        yield settings.database
        return
    from replicad.postgres.embedded import embedded_postgres

    with embedded_postgres(settings.data_folder) as url:
        yield url


def on_database(
    options: Mapping[str, str | None],
    work: Callable[[Database, DatabaseSettings], Awaitable[T]],
    *,
    part: Literal["stream", "tube"],
    statement_timeout: float | None = 60,
) -> T:
    """Run `work` on the database that the options (those of DatabaseSettings) name, and return its result.

    `part` of our schema is installed first where it is missing, as the daemon does it. `statement_timeout`: seconds.
    """
    import trio

    from replicad.postgres import schema
    from replicad.postgres.bridge import open_database

    settings = read_settings(DatabaseSettings, options)

    async def run(url: str) -> T:
        async with open_database(
            url, size=_POOL, application_name="replicad command", statement_timeout=statement_timeout
        ) as db:
            name = settings.tube_schema if part == "tube" else settings.stream_schema
            outcome = await schema.install(db, part, name)
            if outcome is not schema.Outcome.UNCHANGED:
                say(f"replicad: schema {name} ({part}) {outcome.value}")
            return await work(db, settings)

    with database_url(settings) as url:
        return trio.run(run, url)
