"""Who holds a position back, in words, and the statement that ends it. For every place that shows it to an operator."""

from __future__ import annotations

from collections.abc import Mapping

from replicad.positions.horizon import Holder
from replicad.postgres.bridge import quote_literal
from replicad.remedies import Remedy, word

MOST_QUERY = 80  # characters of a statement that are shown in a sentence
LONGEST_QUERY = 60  # characters of a statement in a table


def remedy_for(holder: Holder, stream: str | None = None) -> Remedy:
    """The statement or command that ends what holds the position of a stream, or of a tube, back."""
    if holder.gid is not None:
        return Remedy.make("roll_back_prepared", holder.gid, gid=quote_literal(holder.gid))
    if holder.pid is not None:
        return Remedy.make("terminate", holder.pid, pid=holder.pid)
    if holder.application_name and stream is not None:
        return Remedy.make("retire_writer", stream=word(stream), writer=word(holder.application_name))
    return Remedy.make("locks")


def how_to_end(holder: Holder, stream: str | None = None) -> str:
    """What to do about the holder, and who can."""
    remedy = remedy_for(holder, stream)
    if remedy.form == "roll_back_prepared":
        return f"{remedy.with_role} (or COMMIT PREPARED, if it was meant)"
    if remedy.form == "retire_writer":
        return f"start the writer {holder.application_name}, or, if it will not come back: {remedy}"
    return remedy.with_role


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


def held_back(holder: Holder | None, seconds: float | None, stream: str | None = None) -> Mapping[str, object] | None:
    """What `/status` says of a holder. Not its statement: that may have values of a user in it.

    `stream`: the one that it holds back, if that is no tube. `seconds`: how long the position has not moved. None if
    nothing holds it back.
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
        "end": how_to_end(holder, stream),
        "sql": None if (remedy := remedy_for(holder, stream)).form == "retire_writer" else str(remedy),
    }
