"""The command `replicad` and its sub-commands."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from replicad.config.declaring import nearest
from replicad.features import command_modules
from replicad.terminal.command import CommandRun, ReplicadGroup
from replicad.terminal.failures import report

COMMANDS = {
    "serve": "replicad.cli.serve",
    **command_modules(),
    "apply": "replicad.cli.apply:apply",
    "plan": "replicad.cli.apply:plan",
    "export": "replicad.cli.apply:export",
    "contexts": "replicad.cli.installation:contexts",
    "sql": "replicad.cli.sql",
    "access": "replicad.cli.access",
    "completion": "replicad.cli.installation:completion",
    "demo": "replicad.cli.demo",
    "version": "replicad.cli.installation:version",
}
"""Every sub-command, in the order of the help text, and the module that has it as `command`, or `module:name`."""

EPILOG = """\b
Start here:
  replicad serve                  serve an embedded Postgres on 127.0.0.1:9009
  replicad serve --database URL   serve your own Postgres
  nc 127.0.0.1 9009               connect by hand, then type REPLICATE
"""


class LazyGroup(ReplicadGroup):
    """A group that imports the file of a sub-command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The sub-command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), name or "command")
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The sub-command of the first word. Names the nearest one where there is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            hint = "" if near is None else f" Did you mean '{near}'?"
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the traceback if a command fails.")
@click.option("--context", metavar="NAME", help="Work on the database and the daemon of this context.")
@click.version_option(package_name="replicad", message="%(prog)s %(version)s")
@click.pass_obj
def root(session: CommandRun, debug: bool, context: str | None) -> None:
    """Report changes in Postgres to the processes that need them: streams and tubes over a TCP line protocol."""
    session.debug = session.debug or debug
    session.context = context


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. A failure becomes a line on stderr."""
    session = CommandRun()
    try:
        result = root.main(list(arguments), prog_name="replicad", standalone_mode=False, obj=session)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, `report` prints it
        return report(error, debug=session.debug)
    return result if isinstance(result, int) else 0
