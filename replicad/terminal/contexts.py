"""`--context NAME`: the database and the daemon of a command, from the file of contexts; says on what it works."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from replicad.config.contexts import KEYS, VARIABLE, Context, contexts_file, find_context
from replicad.errors import UsageError
from replicad.masking import mask_secrets
from replicad.terminal.failures import say

NEEDED = ("database", "server")  # a command that has this option cannot do without, so its context must name it


def apply_context(ctx: click.Context, named: str | None) -> None:
    """Set the options of the command that were not given on the command line to the values of the context.

    `named`: the value of --context. Without it REPLICAD_CONTEXT counts. On a terminal a line says what the command
    works on, where the command line does not show it.

    Raises:
        UsageError: there is no such context, or a variable contradicts it.
    """
    keys = {
        param.name: param
        for param in ctx.command.params
        if param.name in KEYS and ctx.get_parameter_source(param.name) is not ParameterSource.COMMANDLINE
    }
    chosen = named or os.environ.get(VARIABLE) or None
    if chosen is None:
        _report_variable(keys)
        return
    if not keys:
        return
    context = find_context(chosen, contexts_file())
    for key, param in keys.items():
        value = context.values.get(key or "")
        _refuse_variable(context, KEYS[key or ""].variable, has=value is not None, explicit=named is not None)
        if value is not None:
            ctx.params[key or ""] = (value,) if getattr(param, "multiple", False) else value
        elif key in NEEDED:
            raise UsageError(
                f"context {context.name} names no {key}, which this command works on; add `{key} = ...` to it in "
                f"{contexts_file()}, or give --{key}"
            )
    about = next((key for key in NEEDED if key in keys), None)
    if about is not None:
        say(f"replicad: context {context.name}: {mask_secrets(context.values[about])}")


def _refuse_variable(context: Context, variable: str, *, has: bool, explicit: bool) -> None:
    """A variable that counts beside a context would have the command work on two places at once."""
    if os.environ.get(variable) and not (has and explicit):
        raise UsageError(f"{variable} is set, and so is the context {context.name}; unset one of them")


def _report_variable(keys: dict[Any, click.Parameter]) -> None:
    value = os.environ.get(KEYS["database"].variable)
    if "database" in keys and value and sys.stderr.isatty():
        say(f"replicad: {KEYS['database'].variable}: {mask_secrets(value)}")
