"""The public functions of each part, as docs/sql.md lists them; make the page anew after a change:

    python -m tests.schema.page

A function is public where its file is in `sql/public/`. Its arguments come from the comment above it, its sentence from
its COMMENT ON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from replicad.postgres import schema

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/sql.md"

CREATED = re.compile(r"^CREATE OR REPLACE FUNCTION (\w+)", re.MULTILINE)
_HEADER = re.compile(r"^-- ((\w+)\([^()]*\)):", re.MULTILINE)
_COMMENT = re.compile(r"^COMMENT ON FUNCTION\s+(\w+)\([^;]*\)\s+IS '((?:[^']|'')*)';", re.MULTILINE)

_HEAD = """\
<!-- `python -m tests.schema.page` makes this page from the files in `sql/public/` of each feature. -->

# SQL functions for users

You may call these functions from any client of Postgres. A new version of replicad keeps their names, their arguments
and the columns of their results. All other functions are internal: they can change with any version.

Write the schema before a function's name, as in `SELECT replicad.stream_next('events')`. The comment at the head of
each file says what the arguments mean, which errors the function raises, and which tables it writes.
"""


class Function(NamedTuple):
    """A function as it is called, and what it does."""

    call: str
    sentence: str


def public(part: schema.Part) -> dict[str, Function]:
    """The public functions of a part by name, in the order in which they are installed."""
    found: dict[str, Function] = {}
    for file in sorted((schema.PARTS[part].folder / "public").glob("*.sql")):
        text = file.read_text(encoding="utf-8")
        calls = {name: call for call, name in _HEADER.findall(text)}
        sentences = {name: sentence.replace("''", "'") for name, sentence in _COMMENT.findall(text)}
        found |= {name: Function(calls[name], sentences[name]) for name in CREATED.findall(text)}
    return found


def render() -> str:
    """The page."""
    return "\n".join([_HEAD, *map(_section, schema.PARTS)])


def _section(part: schema.Part) -> str:
    declared = schema.PARTS[part]
    head = [
        f"## The part {part}",
        "",
        f"`{declared.installer}` installs it in the schema `{declared.schema}`, or in the one that "
        f"`{declared.schema_option}` names.",
    ]
    lines = [f"| `{one.call}` | {one.sentence} |" for one in public(part).values()]
    if not lines:
        return "\n".join([*head, "None of its functions is public.", ""])
    files = f"The files are in `{(declared.folder / 'public').relative_to(ROOT)}`."
    return "\n".join([*head, files, "", "| Function | What it does |", "|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
