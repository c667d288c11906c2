"""Named contexts: databases and daemons that commands work on, in a TOML file of the user's.

    [production]
    database = "postgresql://ops@db1/app"
    server = "db1:9009"
    token_file = "~/.config/replicad/production.token"

The keys are the settings of commands that name a database or a daemon. `serve` has a file of its own (--config).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicad.config.declaring import Key, meant, read_table, read_toml, refuse, settings_of
from replicad.config.secrets import refuse_readable_by_others
from replicad.config.settings import ADDRESS, ClientSettings, DatabaseSettings
from replicad.errors import UsageError
from replicad.masking import mask_secrets

FILE_VARIABLE = "REPLICAD_CONTEXTS"  # where the file is
VARIABLE = "REPLICAD_CONTEXT"  # the context of commands that are not given --context
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HTTP = Key("http", ADDRESS, help="Address of `serve --http`.")

KEYS: Mapping[str, Key] = {
    made.name: made for made in (*settings_of(DatabaseSettings), *settings_of(ClientSettings), _HTTP) if not made.secret
}
"""The settings that a context may have, by name."""


@dataclass(frozen=True, slots=True)
class CommandContext:
    """A context: its values as text, by the name of the setting. All of them are valid."""

    name: str
    values: Mapping[str, str]


def contexts_file(environ: Mapping[str, str] | None = None) -> Path:
    """The file of contexts: REPLICAD_CONTEXTS, or replicad/contexts.toml in the user's folder of settings."""
    environ = os.environ if environ is None else environ
    named = environ.get(FILE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "replicad/contexts.toml"


def read_contexts(file: Path) -> dict[str, CommandContext]:
    """The contexts of the file by name; none if there is no file.

    Raises:
        UsageError: it cannot be read, or something in it is wrong; others can read it, and it has a password.
    """
    if not file.exists():
        return {}
    found = {name: _context(name, values, file) for name, values in read_toml(file).items()}
    if any(mask_secrets(value) != value for one in found.values() for value in one.values.values()):
        refuse_readable_by_others(file, "it has a password")
    return found


def _context(name: str, values: object, file: Path) -> CommandContext:
    if not isinstance(values, dict):
        raise UsageError(f"{file}: {name} stands outside of a context; write [NAME] before it")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{file}: {name[:80]!r} is no name of a context; take letters, digits, . _ and -")
    read_table(values, tuple(KEYS.values()), lambda key: f"{file}: {key} of context {name}", refuse)
    return CommandContext(name, dict(values))  # as texts: they take the way of options


def find_context(name: str, file: Path) -> CommandContext:
    """The context of that name. Raises UsageError: there is none, or the file is wrong."""
    known = read_contexts(file)
    if name not in known:
        raise UsageError(f"there is no context {name!r} in {file}; {meant(name, known)}")
    return known[name]
