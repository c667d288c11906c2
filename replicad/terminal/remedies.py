"""Remedies as commands. SQL functions name theirs in SQL, for users of psql; the command line names its own."""

from __future__ import annotations

import re
from typing import Final

_NAME = r"'((?:[^']|'')*)'"

_COMMANDS: Final = tuple(
    (re.compile(found), command)
    for found, command in (
        (rf"SELECT \S+\.stream_remove\({_NAME}\)", r"replicad streams remove \1"),
        (rf", or: SELECT \S+\.writer_enable\({_NAME}\)", ""),
        (r"give the shard as the third argument", "give it by --shard"),
    )
)


def as_commands(text: str) -> str:
    """The text with calls of replicad's SQL functions replaced by the commands that do the same."""
    for found, command in _COMMANDS:
        text = found.sub(command, text)
    return text
