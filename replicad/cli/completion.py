"""`replicad completion`: what a shell needs to complete replicad's commands and options; made by click."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from replicad.config.declaring import one_of
from replicad.errors import EnvironmentRefused
from replicad.terminal.command import ReplicadCommand, ValueType, option
from replicad.terminal.output import echo

VARIABLE = "_REPLICAD_COMPLETE"  # the variable by which the shell asks click for completions
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
def command(shell: str, install: bool) -> None:
    """Print the script with which a shell completes the commands and options of replicad; --install writes it.

    A shell that is started afterwards has it. For zsh the folder must be in fpath; --install says how.
    """
    from replicad.cli.app import root

    kind = get_completion_class(shell)
    assert kind is not None, shell
    script = kind(root, {}, "replicad", VARIABLE).source()
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
