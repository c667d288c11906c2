"""What the SQLSTATEs mean that replicad tells apart, each meaning by name.

A meaning is a tuple of SQLSTATEs (five characters) and of classes of them (the first two or three). The lists follow
appendix A of the PostgreSQL manual, "PostgreSQL Error Codes".
"""

from __future__ import annotations

from typing import Final

Meaning = tuple[str, ...]

# --- the request ---

MISSING: Final[Meaning] = ("42P01", "3F000", "42883", "42704")
"""A table, schema, function or other object does not exist."""

NO_TABLE: Final[Meaning] = ("42P01", "3F000")
"""A table or its schema does not exist."""

NOT_A_NAME: Final[Meaning] = ("42601", "42602", "0A000")
"""A text cannot be the name of a relation."""

WRONG_QUERY: Final[Meaning] = ("42",)
"""A statement is wrong, or its user may not run it; no row is to blame."""

BAD_DATA: Final[Meaning] = ("22",)
"""The data is wrong; neither the statement nor the server is to blame."""

TOO_LARGE: Final[Meaning] = ("54000",)
"""A value would have been larger than Postgres can hold."""

NEVER: Final[Meaning] = (*BAD_DATA, "54")
"""Trying again does not help: the data is wrong, or beyond a limit of Postgres."""

NOT_OF_A_ROW: Final[Meaning] = (
    "08", "25", "26", "28", "2D", "34", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "HV", "RS", "RT",
)  # fmt: skip
"""What one row holds cannot be the cause.

Connections, transactions that were rolled back, rights, names and syntax (a table or column that was renamed),
resources, locks and states of objects, an operator's intervention, the system below Postgres, its configuration, and
what replicad's own functions raise.
"""

# --- locks and time ---

CONSTRAINT_OF_OTHERS: Final[Meaning] = ("23503", "23505", "23P01")
"""A foreign key, a unique key or an exclusion: whether a row fits depends on other rows."""

MADE_MEANWHILE: Final[Meaning] = ("23505", "42P06", "42P07", "42710")
"""Of CREATE ... IF NOT EXISTS: another session has made the same thing at the same time."""

LOCKED: Final[Meaning] = ("55P03",)
"""Another transaction kept a lock for longer than lock_timeout."""

TIMED_OUT: Final[Meaning] = (*LOCKED, "57014")
"""lock_timeout or statement_timeout has passed, or somebody cancelled the statement."""

GONE_MEANWHILE: Final[Meaning] = ("XX000",)
"""A function was given the oid of a relation that does not exist any more: "could not open relation with OID"."""

# --- rights ---

NO_RIGHT: Final[Meaning] = ("42501",)
"""The role may not do that."""

READ_ONLY: Final[Meaning] = ("25006",)
"""The session may only read, for as long as it lasts."""

NO_LOGIN: Final[Meaning] = ("28",)
"""The server does not let the role in."""

WRONG_PASSWORD: Final[Meaning] = ("28P01",)
"""The password is wrong."""

NO_DATABASE: Final[Meaning] = ("3D000",)
"""There is no database of that name."""

REFUSED: Final[Meaning] = (*NO_LOGIN, *NO_DATABASE, *NO_RIGHT)
"""Somebody has to change rights, passwords or names first."""

NOT_OWNER: Final[Meaning] = ("RS010",)
"""The key belongs to another writer; `writer_owns` raises it."""

# --- the server ---

NO_CONNECTION_LEFT: Final[Meaning] = ("53300",)
"""max_connections is reached."""

NOT_READY: Final[Meaning] = ("57P03",)
"""The server starts or stops."""

UNAVAILABLE: Final[Meaning] = ("08", "53", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
"""Trying again later may help: the connection broke, resources are exhausted (a full disk too), the server restarts."""

TRANSIENT: Final[Meaning] = ("08", "53", "57P", "40")
"""Repeating the transaction may help: as UNAVAILABLE, or it was rolled back because of another transaction."""


def means(state: str | None, meaning: Meaning) -> bool:
    """Whether an SQLSTATE has that meaning; an error without an SQLSTATE has no meaning."""
    return state is not None and state.startswith(meaning)
