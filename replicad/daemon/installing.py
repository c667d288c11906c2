"""Installs and upgrades the SQL parts when a daemon starts."""

from __future__ import annotations

import structlog

from replicad.config.settings import DatabaseSettings
from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.schema import Outcome, Part
from replicad.postgres.schema_text import Declaration, declarations

log = structlog.get_logger()


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
