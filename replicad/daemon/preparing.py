"""What a daemon does before it serves: it checks files, waits for Postgres, and installs and upgrades the SQL parts."""

from __future__ import annotations

import os
from pathlib import Path

import structlog
import trio

from replicad.config.access import Verbs, read_access
from replicad.config.secrets import trust
from replicad.config.settings import DatabaseSettings, ServerSettings
from replicad.errors import DatabaseError, DatabaseRefused, DatabaseUnavailable, EnvironmentRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema import Outcome, Part
from replicad.postgres.schema_text import Declaration, declarations
from replicad.retry import Backoff


def refuse_unusable_files(settings: ServerSettings, verbs: Verbs) -> None:
    """Read every file that the settings name, and look whether the others can be written. It is called before Postgres
    is started or connected to, so that a wrong name is reported at once.

    Raises:
        UsageError: a file cannot be used.
        EnvironmentRefused: the ready file could not be written.
    """
    settings.ssl_context()
    if settings.access_file is not None:
        read_access(settings.access_file, verbs)
    if settings.browser_keys is not None:
        settings.browser_keys()
    if settings.redis_ca is not None:
        trust(settings.redis_ca, "--redis-ca")
    file = settings.ready_file
    if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if file.parent.is_dir() else "is no folder"
        raise EnvironmentRefused(f"--ready-file {file} cannot be written: {file.parent} {why}")


# Refuses to run as a superuser of a Postgres that is not replicad's own: what the daemon may do, its bugs may do.


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


# Waits at the start for a Postgres that does not answer yet (`--wait-for-database`).


CONNECT = 5.0  # seconds for one try to connect
REPORT = 10.0  # seconds between two events while it waits
log = structlog.get_logger()


class Patience:
    """How long a start may still wait for Postgres: `seconds` from now on, for all of its tries together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = trio.current_time()
        self._reported = self._began - REPORT
        self._pauses = Backoff(first=0.2, cap=2.0)

    async def wait_for_database(self, url: str) -> None:
        """Return when Postgres accepts a connection; without any time to wait, at once.

        Raises:
            DatabaseUnavailable: it has not answered in that time.
            DatabaseRefused: it answers and does not let us in, which waiting would not mend.
        """
        while self._seconds > 0:
            try:
                async with open_database(url, size=1, application_name="replicad", connect_timeout=CONNECT):
                    return
            except DatabaseUnavailable as error:
                await self.pause(error)

    async def pause(self, error: DatabaseUnavailable) -> None:
        """Wait a little before the next try after this error. Raises the error when no time is left."""
        now, pause = trio.current_time(), self._pauses.next_delay()
        left = self._began + self._seconds - now
        if pause > left:
            if self._seconds <= 0:
                raise error
            raise DatabaseUnavailable(f"{error} (waited {self._seconds:g} s: --wait-for-database)") from error
        if now >= self._reported + REPORT:
            self._reported = now
            log.warning("waiting_for_database", error=str(error), left_s=round(left))
        await trio.sleep(pause)


async def install_all(db: Database, settings: DatabaseSettings) -> None:
    """Install or upgrade every part as its declaration says.

    Raises:
        DatabaseError: a part that the daemon needs cannot be installed or upgraded. For another part this is logged;
            commands and clients that need it get the reason.
    """
    for part in declarations().values():
        name = _schema_of(part, settings)
        if part.install == "always":
            await _install(db, part.name, name)
            continue
        try:
            if part.install == "offered" or await schema.read_installed(db, part.name, name) is not None:
                await _install(db, part.name, name)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            log.warning("schema_unusable", part=part.name, schema=name, code=error.code, reason=str(error))


def _schema_of(part: Declaration, settings: DatabaseSettings) -> str:
    name: str = getattr(settings, part.schema_option.removeprefix("--").replace("-", "_"))
    return name


async def _install(db: Database, part: Part, name: str) -> None:
    outcome = await schema.install(db, part, name)
    if outcome in (Outcome.INSTALLED, Outcome.UPGRADED):
        log.info(f"schema_{outcome.value}", part=part, schema=name, version=schema.PARTS[part].version)
    elif outcome is not Outcome.UNCHANGED:
        present = await schema.read_installed(db, part, name)
        log.warning(f"schema_{outcome.value}", part=part, schema=name, reason=schema.remark(present, part, name))
