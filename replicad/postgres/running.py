"""Finds an embedded Postgres that runs already. Commands work on it; only the daemon starts one."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from replicad.errors import EnvironmentRefused
from replicad.postgres.embedded import EmbeddedPostgres


@contextmanager
def running_postgres(folder: Path) -> Iterator[str]:
    """The URL of the embedded server below this folder. It is not stopped before the end of the block.

    Raises:
        EnvironmentRefused: none runs there; the message says how to name a database.
    """
    server = EmbeddedPostgres(folder)
    try:
        runs = (server.data / "PG_VERSION").exists() and server.pid() is not None
    except (OSError, ImportError):  # of another account; or without the package that starts it
        runs = False
    if not runs:
        raise EnvironmentRefused(
            f"no database is named, and no `replicad serve` runs one in {server.folder}: give --database URL (or "
            "REPLICAD_DATABASE), start `replicad serve`, or name the folder of the one that runs with --data-folder"
        )
    with ExitStack() as stack:
        with suppress(OSError):  # the folder may be of another account
            users = stack.enter_context((server.folder / "users").open("rb"))
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the last of its users stops it
        yield server.url
