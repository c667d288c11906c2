"""The end of a command that fails: one line on stderr and the exit status, without a traceback.

exits.py says which status belongs to which failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from replicad.errors import ReplicadError
from replicad.groups import leaves
from replicad.masking import mask_secrets, visible
from replicad.terminal.exits import FAILED, INTERRUPTED, MACHINE, exit_of, of_the_machine
from replicad.terminal.remedies import as_commands


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
    """The text on one line, secrets masked."""
    return mask_secrets(" ".join(text.split()))


def say(text: str) -> None:
    """Write a line to stderr. A closed stderr is not a failure."""
    with contextlib.suppress(OSError, ValueError):
        print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - a message, not a log event


def abandon_stdout() -> None:
    """The reader has closed stdout (`replicad tail | head`): discard what the interpreter would flush at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
