"""The table of keys of a file for `replicad apply` in docs/operating.md, made from the declarations:

python -m tests.desired_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicad import features
from replicad.terminal.desired.section import SectionKey
from replicad.terminal.desired.toml import value_of

PAGE = Path(__file__).parents[1] / "docs/operating.md"
SECTION = re.compile(r"(<!-- keys of the file -->\n).*?(<!-- end of keys -->)", re.DOTALL)
ODD = object()  # what no key accepts


def render(page: str) -> str:
    """The page with the table as it is declared; what is around it stays."""
    return SECTION.sub(lambda found: found[1] + table() + found[2], page)


def table() -> str:
    """A row for each key, with blank lines around them."""
    rows = []
    for section in features.sections():
        name = f"{section.name}.NAME" if section.named else section.name
        rows += [
            f"| `[{name}{inside}]` | `{key.name}` | {value(key)} | {default(key)} |"
            for inside, key in every(section.keys)
        ]
    return "\n".join(["", "| table | key | value | default |", "|---|---|---|---|", *rows, "", ""])


def every(keys: Sequence[SectionKey], inside: str = "") -> Iterator[tuple[str, SectionKey]]:
    """The keys that have a value, those of inner tables too, with the place of the table."""
    for key in keys:
        if key.inner:
            yield from every(key.inner, f"{inside}.{key.name}.TABLE")
        else:
            yield inside, key


def value(key: SectionKey) -> str:
    """What the key accepts, as its refusal says it."""
    try:
        key.read(ODD)
    except ValueError as error:
        return str(error).replace("|", "\\|") + ("; cannot be changed later" if key.fixed else "")
    raise AssertionError(f"{key.name} accepts anything")


def default(key: SectionKey) -> str:
    """The default, as the file would say it."""
    if key.required:
        return "must be given"
    return "" if key.default in (None, ()) else f"`{value_of(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
