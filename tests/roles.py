"""The role that daemons under test have: the least one, made by what `replicad sql roles` prints.

Tests themselves are a superuser. So the tables that they make belong to a superuser, and such tables are read with the
daemon's own rights: it is granted SELECT on what tests will create. `tests/integration/test_table_owners.py` and
`test_managed.py` have tables of other owners.
"""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from replicad.postgres.schema_text import Roles, script

DAEMON = "replicad_daemon"
READS_TABLES = f"""
    ALTER DEFAULT PRIVILEGES GRANT USAGE ON SCHEMAS TO {DAEMON};
    ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {DAEMON};
    ALTER DEFAULT PRIVILEGES GRANT SELECT ON SEQUENCES TO {DAEMON};
"""
ROLES = script(Roles(DAEMON)) + READS_TABLES
"""What a database needs before a daemon is started."""


def as_role(url: str, role: str) -> str:
    """The same database for another role."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))


def as_daemon(url: str) -> str:
    """The same database for the daemon, if the URL is a superuser's of the tests."""
    return as_role(url, DAEMON) if urlsplit(url).username == "postgres" else url
