"""The public functions of each part, as docs/sql.md lists them; make the page anew after a change:

    python -m tests.schema.page

A function is public where it has a COMMENT ON, which gives its sentence. Its arguments come from the comment above it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from replicad.postgres import schema, schema_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/sql.md"

_HEADER = re.compile(r"^-- ((\w+)\([^()]*\)):", re.MULTILINE)
COMMENT = re.compile(r"^COMMENT ON FUNCTION\s+(\w+)\([^;]*\)\s+IS '((?:[^']|'')*)';", re.MULTILINE)

_HEAD = """\
<!-- `python -m tests.schema.page` makes this page from the SQL of the features: functions with a COMMENT ON. -->

# SQL functions for users

You may call these functions from any client of Postgres. A new version of replicad keeps their names, their arguments
and the columns of their results. All other functions are internal: they can change with any version.

Write the schema before a function's name, as in `SELECT replicad.stream_next('events')`. The comment above a function
says what its arguments mean, which errors it raises, and which tables it writes.
"""


class Function(NamedTuple):
    """A function as it is called, and what it does."""

    call: str
    sentence: str


def public(part: schema.Part) -> dict[str, Function]:
    """The public functions of a part by name, in the order in which they are installed."""
    found: dict[str, Function] = {}
    for _, text in schema_text.files(part):
        calls = {name: call for call, name in _HEADER.findall(text)}
        described = COMMENT.findall(text)
        found |= {name: Function(calls[name], sentence.replace("''", "'")) for name, sentence in described}
    return found


def render() -> str:
    """The page."""
    return "\n".join([_HEAD, *map(_section, schema.PARTS)])


def _section(part: schema.Part) -> str:
    declared = schema.PARTS[part]
    head = [
        f"## The part {part}",
        "",
        f"`{declared.installer}` installs it in the schema `{declared.schema}`, or in the schema that "
        f"`{declared.schema_option}` names.",
    ]
    lines = [f"| `{one.call}` | {one.sentence} |" for one in public(part).values()]
    if not lines:
        return "\n".join([*head, "None of its functions is public.", ""])
    files = f"The files are in `{declared.folder.relative_to(ROOT)}`."
    return "\n".join([*head, files, "", "| Function | What it does |", "|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
