"""Refuses to run as a superuser of a Postgres that is not replicad's own: what the daemon may do, its bugs may do."""

from __future__ import annotations

from pathlib import Path

from replicad.config.settings import ServerSettings
from replicad.errors import DatabaseRefused
from replicad.postgres.bridge import Database

# A role that may become a superuser counts as one. The folder of the data is shown to superusers only.
_QUERY = """
    SELECT quote_ident(current_user) AS role, quote_ident(current_database()) AS database,
        CASE WHEN current_setting('is_superuser')::boolean THEN current_setting('data_directory') END AS folder
    WHERE EXISTS (SELECT FROM pg_roles AS r WHERE r.rolsuper AND pg_has_role(current_user, r.oid, 'MEMBER'))
"""


async def refuse_superuser(db: Database, settings: ServerSettings) -> None:
    """Check the role of the daemon, unless --allow-superuser says that it is meant.

    Raises:
        DatabaseRefused: it is a superuser, and the server is not an embedded one.
    """
    if settings.database.database is None or settings.allow_superuser:
        return
    found = await db.fetch_row(_QUERY)
    if found is None:
        return
    if found["folder"] is not None and db.target.host.startswith("/") and is_embedded(Path(found["folder"])):
        return
    raise DatabaseRefused(
        f"role {found['role']} is a superuser of Postgres at {db.target.host}, which the daemon must not be: give it a "
        f"role of its own (CREATE ROLE replicad LOGIN; GRANT CREATE ON DATABASE {found['database']} TO replicad), or "
        "say --allow-superuser."
    )


def is_embedded(data: Path) -> bool:
    """Whether the folder is the data of an EmbeddedPostgres of this machine: its files of locks are beside it."""
    return all((data.parent / name).is_file() for name in ("lock", "users"))
