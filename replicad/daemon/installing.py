"""What a daemon installs and upgrades when it starts, and what it says of it."""

from __future__ import annotations

import structlog

from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.schema import Outcome, Part

# What others use beside the daemon: the sender, caches, writers that share keys. The daemon serves without them.
_OPTIONAL: tuple[Part, ...] = ("federation", "cache", "ownership", "presence")
_ALWAYS: tuple[Part, ...] = ("federation",)  # of these; the others only where an `enable` command has installed them

log = structlog.get_logger()


async def install_all(db: Database, *, stream_schema: str, tube_schema: str) -> None:
    """Install or upgrade streams, tubes and what senders need; upgrade the other parts where they are installed.

    Raises:
        DatabaseError: streams or tubes cannot be made usable. Where another part cannot be, that is logged; commands
            and clients that need it get the reason.
    """
    await _install(db, "stream", stream_schema)
    await _install(db, "tube", tube_schema)
    for part in _OPTIONAL:
        try:
            if part in _ALWAYS or await schema.read_installed(db, part, stream_schema) is not None:
                await _install(db, part, stream_schema)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            log.warning("schema_unusable", part=part, schema=stream_schema, code=error.code, reason=str(error))


async def _install(db: Database, part: Part, name: str) -> None:
    outcome = await schema.install(db, part, name)
    if outcome in (Outcome.INSTALLED, Outcome.UPGRADED):
        log.info(f"schema_{outcome.value}", part=part, schema=name, version=schema.PARTS[part].version)
    elif outcome is not Outcome.UNCHANGED:
        present = await schema.read_installed(db, part, name)
        log.warning(f"schema_{outcome.value}", part=part, schema=name, reason=schema.remark(present, part, name))
