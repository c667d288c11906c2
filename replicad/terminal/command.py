"""Shared by all commands: options made from settings, help in sections, logs, `--debug`.

A command's file declares `command` with `@click.command(cls=ReplicadCommand)`. Modules that are slow to import are
imported inside its function.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from replicad.config.declaring import FLAG, Key, ValueKind, nearest, plain, settings_of
from replicad.config.limits import Limits
from replicad.config.settings import (
    CONTEXT_KEYS,
    CONTEXT_VARIABLE,
    CONTEXTS_VARIABLE,
    ClientSettings,
    CommandContext,
    DatabaseSettings,
    LogSettings,
    ServerSettings,
    colour_allowed,
    contexts_file,
    find_context,
    read_settings,
)
from replicad.errors import UsageError
from replicad.masking import mask_secrets
from replicad.terminal.failures import say

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS, COMMON = "Options", "Common options"
ALIKE = 0.9  # how alike a variable and a setting are, 0 to 1, for one to be a misspelling of the other


@dataclass
class CommandRun:
    """The state of one run of the command line; click's `obj`."""

    debug: bool = False
    context: str | None = None


class SectionOption(click.Option):
    """An option with a section heading in the help text. `key`: the key that it was made from."""

    def __init__(self, *args: Any, section: str = OPTIONS, key: Key | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.key = key

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option and its help, with the range of its values."""
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, ValueType) or not self.type.key.range:
            return record
        return record[0], f"{record[1]} [{self.type.key.range}]"


option = functools.partial(click.option, cls=SectionOption)
"""`click.option` for our commands. Options made without it (click's `--help`) are listed as common options."""


class _OwnHelp(click.Command):
    """Has `-h`, too, if its settings do not say otherwise."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Those of the command: click keeps the help option of its first context, whatever that context was for."""
        ctx.help_option_names = self.context_settings.get("help_option_names", ["-h", "--help"])
        return super().get_help_option_names(ctx)


class ReplicadCommand(_OwnHelp):
    """A command with `--debug` and a help text in sections.

    `log_level` is the default level of its logs (`info` for commands that run for a long time). None: no logs.
    """

    def __init__(self, *args: Any, log_level: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_level = log_level
        if log_level is not None:
            for made in settings_of(LogSettings):
                default = log_level if made.name == "log_level" else made.default
                self.params.append(SectionOption([made.option], **_option_of(made, default)))
        elif any(param.name in CONTEXT_KEYS for param in self.params):
            self.params.append(_context_option())
        self.params.append(_debug_option())

    def invoke(self, ctx: click.Context) -> Any:
        """Configure the logs, if the command has any, then run it."""
        _warn_of_secrets(ctx)
        _warn_of_variables(ctx)
        session = ctx.find_object(CommandRun)
        context = session.context if session is not None else None
        if self.log_level is None:
            apply_context(ctx, context)
            return super().invoke(ctx)
        if context is not None:
            raise UsageError(f"--context is for commands that administer; {ctx.command_path} has options and a file")
        chosen = {name: ctx.params.pop(name) for name in ("log_level", "log_format")}
        logs = read_settings(LogSettings, chosen, defaults={"log_level": self.log_level})
        from replicad.config.logs import configure_logs

        configure_logs(logs, colour=colour_allowed())
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                section = param.section if isinstance(param, SectionOption) else COMMON
                sections.setdefault(section, []).append(record)
        for section in sorted(sections, key=lambda name: name == COMMON):
            with formatter.section(section):
                formatter.write_dl(sections[section])


def _warn_of_secrets(ctx: click.Context) -> None:
    """Secrets on a command line can be read in the list of processes."""
    for param in ctx.command.get_params(ctx):
        found = ctx.params.get(param.name or "")
        values = found if isinstance(found, tuple) else (found,)
        if any(isinstance(value, str) and mask_secrets(value) != value for value in values):
            say(
                f"replicad: warning: {param.opts[0]} contains a password, and every account of this machine can read "
                "it in the list of processes; put it into ~/.pgpass (PGPASSFILE), or give the option by its variable "
                "or in a file"
            )


def _warn_of_variables(ctx: click.Context) -> None:
    """A variable whose name is nearly that of a setting of this command would be ignored without a word."""
    kinds = (ServerSettings, DatabaseSettings, Limits, ClientSettings, LogSettings)
    known = {made.variable for kind in kinds for made in settings_of(kind)}
    of_command = {f"REPLICAD_{param.name.upper()}" for param in ctx.command.params if param.name}
    of_command |= (
        {CONTEXT_VARIABLE, CONTEXTS_VARIABLE}
        if any(param.name in CONTEXT_KEYS for param in ctx.command.params)
        else set()
    )
    of_command |= {"REPLICAD_TOKEN"} if {"REPLICAD_TOKEN_FILE"} & of_command else set()
    for name in sorted(os.environ.keys() - known - of_command):
        if name.startswith("REPLICAD_"):
            near = nearest(name, of_command, ALIKE)
            if near is not None:
                say(f"replicad: warning: the variable {name} is not known; did you mean {near}?")


class ReplicadGroup(_OwnHelp, click.Group):
    """A group whose commands are `ReplicadCommand`s."""

    command_class = ReplicadCommand

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names in the order in which they were declared."""
        return list(self.commands)


def _option_of(made: Key, default: object) -> dict[str, Any]:
    """The arguments of click for a setting. Values stay text; `read_settings` parses them."""
    common = {"section": made.group or OPTIONS, "key": made}
    if made.kind is FLAG:
        return {**common, "help": made.help, "is_flag": True, "flag_value": "true", "default": None}
    text = made.help if default in (None, "", ()) else f"{made.help} [default: {_shown(default, made.kind.unit)}]"
    return {**common, "metavar": made.placeholder or made.kind.placeholder, "help": text}


def _shown(default: object, unit: str) -> str:
    if isinstance(default, int) and unit == "bytes" and default % 1024 == 0:
        return f"{default >> 20}MiB" if default % (1 << 20) == 0 else f"{default >> 10}KiB"
    return plain(default) if isinstance(default, float) else str(default)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    session = ctx.find_object(CommandRun)
    if value and session is not None:
        session.debug = True


def _set_context(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    session = ctx.find_object(CommandRun)
    if value is not None and session is not None:
        session.context = value


def _context_option() -> click.Option:
    return SectionOption(
        ["--context"],
        metavar="NAME",
        expose_value=False,
        callback=_set_context,
        help="Work on the database and the daemon of this context; `replicad contexts` lists them.",
        section=COMMON,
    )


def _debug_option() -> click.Option:
    return SectionOption(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show the traceback if the command fails.",
        section=COMMON,
    )


def settings_options(kind: type, *, several: str | None = None, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a command an option for every setting of `kind`, without the settings of dataclasses inside it. `--help`
    lists it under its group.

    Settings named in `without` get none.

    The option named `several` may be given more than once; its value is a tuple.
    """

    def decorate(function: F) -> F:
        for made in reversed([made for made in settings_of(kind, nested=False) if not made.secret]):
            if made.name in without:
                continue
            kept = _option_of(made, made.default)
            if made.name == several:
                kept |= {"multiple": True, "help": f"{kept['help']} Several times: the command runs on each."}
            function = option(made.option, made.name, **kept)(function)
        return function

    return decorate


database_options = settings_options(DatabaseSettings)
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object per line instead of a table.")


class ValueType(click.ParamType):  # type: ignore[type-arg] # generic in newer versions of click only
    """The type of an option or argument that is no setting: a kind of value, and perhaps a range."""

    def __init__(self, kind: ValueKind, low: float | None = None, high: float | None = None) -> None:
        self.name = kind.name
        self.key = Key("", kind, minimum=low, maximum=high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Parse and check a text; a default is a value already. Raises UsageError with the name of the option."""
        if not isinstance(value, str):
            return value
        if param is None:
            return self.key.read(value, self.name)
        return self.key.read(value, param.opts[0] if isinstance(param, click.Option) else param.human_readable_name)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002
        """The word for the value of an option, or the words of an argument that has few; else its own name."""
        kind = self.key.kind
        return kind.placeholder if isinstance(param, click.Option) or kind.words else ""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """The words that begin so, if there are few."""
        return [CompletionItem(word) for word in self.key.kind.words if word.startswith(incomplete)]


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
        if param.name in CONTEXT_KEYS and ctx.get_parameter_source(param.name) is not ParameterSource.COMMANDLINE
    }
    chosen = named or os.environ.get(CONTEXT_VARIABLE) or None
    if chosen is None:
        _report_variable(keys)
        return
    if not keys:
        return
    context = find_context(chosen, contexts_file())
    for key, param in keys.items():
        value = context.values.get(key or "")
        _refuse_variable(context, CONTEXT_KEYS[key or ""].variable, has=value is not None, explicit=named is not None)
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


def _refuse_variable(context: CommandContext, variable: str, *, has: bool, explicit: bool) -> None:
    """A variable that counts beside a context would have the command work on two places at once."""
    if os.environ.get(variable) and not (has and explicit):
        raise UsageError(f"{variable} is set, and so is the context {context.name}; unset one of them")


def _report_variable(keys: dict[Any, click.Parameter]) -> None:
    value = os.environ.get(CONTEXT_KEYS["database"].variable)
    if "database" in keys and value and sys.stderr.isatty():
        say(f"replicad: {CONTEXT_KEYS['database'].variable}: {mask_secrets(value)}")
