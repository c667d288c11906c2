"""Who holds a position back, in words, and the statement that ends it. For every place that shows it to an operator."""

from __future__ import annotations

from collections.abc import Mapping

from replicad.positions.horizon import Holder
from replicad.postgres.bridge import quote_literal

MOST_QUERY = 80  # characters of a statement that are shown in a sentence
LONGEST_QUERY = 60  # characters of a statement in a table


def statement_to_end(holder: Holder) -> str | None:
    """The SQL that ends what holds a position back; None where no statement does."""
    if holder.gid is not None:
        return f"ROLLBACK PREPARED {quote_literal(holder.gid)}"
    if holder.pid is not None:
        return f"SELECT pg_terminate_backend({holder.pid})"
    return None


def how_to_end(holder: Holder) -> str:
    """What to do about the holder, and who can: the statement, or a command."""
    statement = statement_to_end(holder)
    if statement is not None:
        if holder.gid is not None:
            return f"{statement}, as the role that prepared it or a superuser (or COMMIT PREPARED, if it was meant)"
        return f"{statement}, as that session's role, a superuser or a member of pg_signal_backend"
    if holder.application_name:
        return f"start the writer {holder.application_name}, or `replicad streams writers retire`"
    return "SELECT * FROM pg_locks WHERE NOT granted"


def who(holder: Holder) -> str:
    """The holder, for a sentence."""
    if holder.gid is not None:
        return f"prepared transaction {holder.gid}"
    if holder.pid is not None:
        name = f" ({holder.application_name})" if holder.application_name else ""
        query = " ".join((holder.query or "").split())[:MOST_QUERY]
        return f"pid {holder.pid}{name}" + (f", which ran last: {query}" if query else "")
    return f"writer {holder.application_name}" if holder.application_name else "another session"


def in_one_line(holder: Holder | None) -> str | None:
    """The holder for a table: `pid 4711 (app) for 12.0 s: UPDATE ...`. None if nothing holds the position back."""
    if holder is None:
        return None
    name = f"prepared transaction {holder.gid}" if holder.gid is not None else f"pid {holder.pid}"
    if holder.pid is None and holder.gid is None:
        name = f"writer {holder.application_name}" if holder.application_name else "a session that has locked the table"
    elif holder.application_name:
        name += f" ({holder.application_name})"
    age = "" if holder.age_s is None else f" for {holder.age_s:.1f} s"
    query = " ".join((holder.query or "").split())
    short = query if len(query) <= LONGEST_QUERY else query[: LONGEST_QUERY - 3] + "..."
    return f"{name}{age}" + (f": {short}" if short else "")


def held_back(holder: Holder | None, seconds: float | None) -> Mapping[str, object] | None:
    """What `/status` says of a holder. Not its statement: that may have values of a user in it.

    `seconds`: how long the position has not moved. None if nothing holds it back.
    """
    if holder is None or seconds is None:
        return None
    return {
        "seconds": round(seconds, 3),
        "kind": holder.kind.value,
        "pid": holder.pid,
        "application_name": holder.application_name,
        "transaction_seconds": holder.age_s,
        "prepared": holder.gid,
        "end": how_to_end(holder),
        "sql": statement_to_end(holder),
    }
