"""The end of a command that fails: one line on stderr and the exit status, without a traceback.

The exit status is 0 for success, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import click

from replicad.errors import ReplicadError
from replicad.groups import leaves
from replicad.masking import mask_secrets, visible

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def report(error: BaseException, *, debug: bool) -> int:
    """Print on stderr the error that ended the command, and return the exit status. `debug` adds the traceback."""
    found = leaves(error)
    if debug:
        say(mask_secrets("".join(traceback.format_exception(error))).rstrip())
    for leaf in found:
        if isinstance(leaf, (KeyboardInterrupt, click.Abort)):
            return INTERRUPTED
    for leaf in found:
        if isinstance(leaf, BrokenPipeError):
            abandon_stdout()
            return 1
    if isinstance(found[0], click.exceptions.NoArgsIsHelpError):
        say(found[0].format_message())
        return found[0].exit_code
    if isinstance(found[0], click.ClickException):
        say(f"replicad: {_usage_line(found[0])}")
        return found[0].exit_code
    ours = [leaf for leaf in found if isinstance(leaf, ReplicadError)]
    if len(ours) == len(found):
        say(f"replicad: {one_line(str(ours[0]))}")
        return ours[0].exit_status
    foreign = next(leaf for leaf in found if not isinstance(leaf, ReplicadError))
    what = one_line(f"{type(foreign).__name__}: {foreign}")
    hint = "" if debug else "; run it again with --debug for the traceback, and please report it"
    say(f"replicad: unexpected {what}{hint}")
    return 1


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
