"""The faults of each tube, from the catalogs, the rights of this session, and the reports of running daemons."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from replicad.errors import DatabaseError, DatabaseUnavailable

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database


async def tube_states(
    db: Database, tube_schema: str, stream_schema: str, *, without: Container[str] = ()
) -> dict[str, str]:
    """The reasons by tube. Tubes that are ok are left out, and reports whose codes are in `without`.

    If the reports of daemons cannot be read (no right, no such table), they are left out too.
    """
    from replicad.streams import troubles
    from replicad.tubes.pods import load_tubes
    from replicad.tubes.untouched import load_untouched

    reasons: dict[str, list[str]] = {}
    read_only = await _read_only(db)
    for tube in await load_tubes(db, tube_schema):
        reasons[tube.name] = list(read_only)
        if tube.fault is not None:
            reasons[tube.name].append(tube.fault)
    for name, reason in (await load_untouched(db, tube_schema)).items():
        reasons.setdefault(name, []).append(reason)
    try:
        reported = await troubles.load(db, schema=stream_schema)
    except DatabaseUnavailable:
        raise
    except DatabaseError:
        reported = []
    for one in reported:
        wanted = one.kind == "tube" and one.code not in without
        known = reasons.setdefault(one.name, []) if wanted else None
        if known is not None and one.reason not in known:  # several daemons may report the same
            known.append(one.reason)
    return {name: " Also: ".join(found) for name, found in reasons.items() if found}


async def _read_only(db: Database) -> list[str]:
    """One sentence if this session may not write. A daemon of the same user then may not write either."""
    if await db.fetch_value("SELECT current_setting('transaction_read_only')") == "off":
        return []
    return [
        f'user "{db.target.user}" may only read here (a standby, or default_transaction_read_only is on for this user, '
        "database or server): a daemon that connects like this refuses every request about tubes and cannot report "
        "its troubles here"
    ]
