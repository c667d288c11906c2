"""`replicad contexts`: lists the named contexts."""

from __future__ import annotations

import os

import click

from replicad.config.contexts import VARIABLE, contexts_file, read_contexts
from replicad.masking import mask_secrets
from replicad.terminal.command import ReplicadCommand, json_option
from replicad.terminal.output import print_rows


@click.command(
    "contexts",
    cls=ReplicadCommand,
    short_help="List the named contexts: databases and daemons to work on.",
    epilog="""\b
Examples:
  replicad contexts
  replicad streams list --context production
  REPLICAD_CONTEXT=staging replicad doctor""",
)
@json_option
def command(as_json: bool) -> None:
    """List the contexts of ~/.config/replicad/contexts.toml, or of the file that REPLICAD_CONTEXTS names.

    A context is a name for a database and a daemon. Commands that work on one take --context NAME. REPLICAD_CONTEXT is
    the context of commands without --context. A context that a command line names goes before the environment.

    \b
      [production]
      database = "postgresql://ops@db1/app"
      server = "db1:9009"
    """
    file = contexts_file()
    chosen = os.environ.get(VARIABLE)
    rows = [
        {"context": one.name, "chosen": one.name == chosen}
        | {key: mask_secrets(value) for key, value in one.values.items()}
        for one in read_contexts(file).values()
    ]
    columns = ["context", "chosen", "database", "server", "http"]
    shown = [name for name in columns if name in ("context", "chosen") or any(row.get(name) for row in rows)]
    print_rows(shown, rows, as_json=as_json, nothing=f"there are no contexts in {file}")
