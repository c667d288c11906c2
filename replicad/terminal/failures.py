"""The end of a command that fails: one line on stderr and the exit status, without a traceback.

EXITS is the table of exit statuses. Remedies are shown as commands: SQL functions name theirs in SQL, for users of
psql, and the command line replaces these by commands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import Final

import click

from replicad import errors
from replicad.errors import ReplicadError
from replicad.groups import leaves
from replicad.masking import mask_secrets, shortened, visible


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


_NAME = r"'((?:[^']|'')*)'"

_COMMANDS: Final = tuple(
    (re.compile(found), command)
    for found, command in (
        (rf"SELECT \S+\.stream_remove\({_NAME}\)", "replicad streams remove {}"),
        (rf"`replicad sharding enable .*?`, or: SELECT \S+\.writer_enable\({_NAME}\)", "`replicad sharding enable {}`"),
    )
)


def as_commands(text: str) -> str:
    """The text with calls of replicad's SQL functions replaced by the commands that do the same, names for a shell."""
    for found, command in _COMMANDS:
        text = found.sub(partial(_filled, command), text)
    return text


def _filled(command: str, found: re.Match[str]) -> str:
    return command.format(*(quote(name.replace("''", "'")) for name in found.groups()))


def report(error: BaseException, *, debug: bool) -> int:
    """Print on stderr the error that ended the command, and return the exit status. `debug` adds the traceback."""
    found = leaves(error)
    if debug:
        say(mask_secrets("".join(traceback.format_exception(error))).rstrip())
    for leaf in found:
        if isinstance(leaf, (KeyboardInterrupt, click.Abort)):
            return INTERRUPTED.status
    for leaf in found:
        if isinstance(leaf, BrokenPipeError):
            abandon_stdout()
            return FAILED.status
    if isinstance(found[0], click.exceptions.NoArgsIsHelpError):
        say(found[0].format_message())
        return found[0].exit_code
    if isinstance(found[0], click.ClickException):
        say(f"replicad: {_usage_line(found[0])}")
        return found[0].exit_code
    return _report_failure(found, debug=debug)


def _report_failure(found: Sequence[BaseException], *, debug: bool) -> int:
    foreign = next((leaf for leaf in found if not isinstance(leaf, ReplicadError)), None)
    if foreign is None:
        say(f"replicad: {one_line(as_commands(str(found[0])))}")
        return exit_of(type(found[0])).status
    sentence = of_the_machine(foreign)
    if sentence is not None:
        say(f"replicad: {one_line(sentence)}")
        if getattr(foreign, "filename", None) is None:
            abandon_stdout()  # it may be what cannot be written
        return MACHINE.status
    what = one_line(f"{type(foreign).__name__}: {foreign}")
    hint = "" if debug else "; run it again with --debug for the traceback, and please report it"
    say(f"replicad: unexpected {what}{hint}")
    return FAILED.status


def _usage_line(error: click.ClickException) -> str:
    message = one_line(error.format_message())
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else None
    return f"{message} See `{command} --help`." if command else message


def one_line(text: str) -> str:
    """The text on one line, secrets masked, and of bounded length."""
    return shortened(mask_secrets(" ".join(text.split())))


def say(text: str) -> None:
    """Write a line to stderr. A closed stderr is not a failure."""
    with contextlib.suppress(OSError, ValueError):
        print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - a message, not a log event


def abandon_stdout() -> None:
    """The reader has closed stdout (`replicad tail | head`): discard what the interpreter would flush at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
