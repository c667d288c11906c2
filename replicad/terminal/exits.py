"""The exit statuses of the command line: one for each kind of failure, whatever the command is.

The table is the declaration. docs/operating.md has it too, made by `python -m tests.exits_page`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from replicad import errors
from replicad.errors import ReplicadError


@dataclass(frozen=True, slots=True)
class Exit:
    """An exit status, what it means, and the errors that end a command with it (their subclasses too)."""

    status: int
    meaning: str
    kinds: tuple[type[ReplicadError], ...] = ()


DONE: Final = Exit(0, "Done. Also where there was nothing to do.")
FAILED: Final = Exit(
    1,
    "Any other failure, or a defect of replicad. `doctor`: only warnings. `access test`: the client may not.",
    (ReplicadError,),
)
USAGE: Final = Exit(
    2,
    "Wrong usage: an option, an argument, a variable, a file of settings, or a value that Postgres cannot take. "
    "`doctor`: something is failing. `plan`: the database is not as the file says.",
    (errors.UsageError, errors.ValueRefused),
)
MACHINE: Final = Exit(
    3,
    "This machine lacks something: a folder that can be written, room on the disk, Java, an extra, a running "
    "embedded Postgres.",
    (errors.EnvironmentRefused, errors.SparkWorkerLost),
)
UNREACHABLE: Final = Exit(
    4,
    "The daemon or Postgres does not answer, or ended the connection. Trying again may help.",
    (errors.ConnectionLost, errors.DatabaseUnavailable),
)
NOT_ALLOWED: Final = Exit(
    5,
    "The daemon or Postgres answers and does not let us: a token, a password, a right, a standby.",
    (errors.NotAuthorised, errors.Forbidden, errors.DatabaseRefused, errors.StandbyRefused, errors.RedisRefused),
)
NOT_FOUND: Final = Exit(6, "There is no stream or tube of that name.", (errors.UnknownStream, errors.UnknownTube))
REFUSED: Final = Exit(
    7,
    "It cannot be done as things are: a table cannot be a stream, something else has the name, replicad's SQL is "
    "missing in the database or is of another version. The message names the remedy.",
    (
        errors.StreamError,
        errors.TubeError,
        errors.FederationError,
        errors.PresenceRefused,
        errors.SchemaMissing,
        errors.SchemaTooNew,
        errors.SchemaCollision,
        errors.DownstreamError,
    ),
)
INTERRUPTED: Final = Exit(130, "Ctrl-C.")

EXITS: Final = (DONE, FAILED, USAGE, MACHINE, UNREACHABLE, NOT_ALLOWED, NOT_FOUND, REFUSED, INTERRUPTED)
_BY_KIND: Final[dict[type, Exit]] = {kind: found for found in EXITS for kind in found.kinds}


def exit_of(kind: type[BaseException]) -> Exit:
    """The exit of an error: that of the nearest of its classes that the table names."""
    return next((_BY_KIND[one] for one in kind.__mro__ if one in _BY_KIND), FAILED)


_REMEDIES: Final = {
    errno.ENOSPC: "free some room on that disk, or name a folder on another one",
    errno.EDQUOT: "this account's quota is used up: free some room, or name a folder on another disk",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "run as an account that may, or name another file",
    errno.EPERM: "run as an account that may, or name another file",
    errno.ENOENT: "name a file or folder that exists",
    errno.ENOTDIR: "one of the folders in this path is a file: name another",
    errno.EISDIR: "this is a folder: name a file",
    errno.EEXIST: "name another one, or move it away",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ELOOP: "links point to each other: name another",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files: close some",
    errno.EFBIG: "the file may not grow: raise the limit (ulimit -f)",
    errno.EIO: "the disk fails: look at the system's log",
}


def of_the_machine(error: BaseException) -> str | None:
    """The sentence for an error of a file or disk, with the remedy. None: it is none of these."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {_REMEDIES[error.errno]}"
