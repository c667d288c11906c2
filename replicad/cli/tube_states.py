"""What is wrong with each tube: what its table shows, and what running daemons report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.errors import DatabaseError, DatabaseUnavailable

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database


async def tube_states(db: Database, tube_schema: str, stream_schema: str) -> dict[str, str]:
    """The reasons by tube; a tube with which nothing is wrong is left out.

    Where what daemons report cannot be read (no right, no such table), there is what the tubes' tables show.
    """
    from replicad.streams import troubles
    from replicad.tubes.pods import load_tubes

    reasons: dict[str, list[str]] = {}
    for tube in await load_tubes(db, tube_schema):
        if tube.fault is not None:
            reasons[tube.name] = [tube.fault]
    try:
        reported = await troubles.load(db, schema=stream_schema)
    except DatabaseUnavailable:
        raise
    except DatabaseError:
        reported = []
    for one in reported:
        known = reasons.setdefault(one.name, []) if one.kind == "tube" else None
        if known is not None and one.reason not in known:  # several daemons report the same
            known.append(one.reason)
    return {name: " Also: ".join(found) for name, found in reasons.items() if found}
