"""The cluster that all others are copies of: made once, stopped, and with the streams of these tests in it."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import install, psql
from tests.roles import ROLES, as_daemon

from .bystanders import prepare
from .cluster import SMALL, NamedPostgres
from .tables import create_all


def made_template(folder: Path) -> Path:
    """Make it below `folder`, and return the folder."""
    with NamedPostgres(folder, SMALL) as server:
        psql(server.url, ROLES)
        install(as_daemon(server.url), "stream", "tube", "federation", "cache", "presence")
        psql(server.url, create_all())
        prepare(server.url)
    return folder
