"""Remedies as commands. SQL functions name theirs in SQL, for users of psql; the command line names its own."""

from __future__ import annotations

import re
from functools import partial
from shlex import quote
from typing import Final

_NAME = r"'((?:[^']|'')*)'"

_COMMANDS: Final = tuple(
    (re.compile(found), command)
    for found, command in (
        (rf"SELECT \S+\.stream_remove\({_NAME}\)", "replicad streams remove {}"),
        (rf"`replicad writers enable .*?`, or: SELECT \S+\.writer_enable\({_NAME}\)", "`replicad writers enable {}`"),
        (r"give the shard as the third argument", "give it by --shard"),
    )
)


def as_commands(text: str) -> str:
    """The text with calls of replicad's SQL functions replaced by the commands that do the same, names for a shell."""
    for found, command in _COMMANDS:
        text = found.sub(partial(_filled, command), text)
    return text


def _filled(command: str, found: re.Match[str]) -> str:
    return command.format(*(quote(name.replace("''", "'")) for name in found.groups()))
