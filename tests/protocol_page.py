"""The tables of commands in protocol.md, made from the declarations; make them anew after a change:

    python -m tests.protocol_page

A table stands between `<!-- commands of GROUP -->` and `<!-- end -->`. A group is a feature that the daemon serves, or
`every connection`. What is said of a command is the first sentence of its docstring.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from replicad import features
from replicad.protocol import commands
from replicad.protocol.command import Command
from replicad.protocol.commands import CORE
from replicad.protocol.words import Side

PAGE = Path(__file__).parents[1] / "protocol.md"
SECTION = re.compile(r"(<!-- commands of ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FROM = {Side.SERVER: "S", Side.CLIENT: "C", Side.BOTH: "S, C"}
_HEAD = ["| command | from | arguments | right | answer | meaning |", "|---|---|---|---|---|---|"]


def groups() -> dict[str, tuple[type[Command], ...]]:
    """The declared commands by group, in the order of the features."""
    return {"every connection": tuple(CORE)} | {one.name: one.commands for one in features.served()}


def render(page: str) -> str:
    """The page with all tables as they are declared; what is around them stays."""
    known = groups()
    return SECTION.sub(lambda found: found[1] + table(known[found[2]]) + found[3], page)


def table(commands: Iterable[type[Command]]) -> str:
    """The rows of one group, with blank lines around them, which HTML in Markdown needs."""
    return "\n".join(["", *_HEAD, *map(_row, commands), "", ""])


def _row(kind: type[Command]) -> str:
    usage = kind.USAGE.replace("|", "\\|")
    cells = [kind.NAME, _FROM[kind.SENDER], f"`{usage}`" if usage else "", right(kind), kind.ANSWER, meaning(kind)]
    return f"| {' | '.join(cells)} |"


def right(kind: type[Command]) -> str:
    """The right that a client needs: the verb, and what it is needed on."""
    return " ".join(filter(None, (kind.VERB, kind.OBJECT)))


def meaning(kind: type[Command]) -> str:
    """The first sentence of the docstring, which opens with the command's name."""
    said, ours = commands.meaning(kind)
    assert said, f"the docstring of {kind.__name__} opens with `{kind.NAME}: ` and has a sentence"
    assert (kind.__doc__ or "").startswith((f"{kind.NAME}: ", f"{kind.NAME} (ours): ")), kind.__name__
    said = said.replace("|", "\\|")
    return f"**Ours**: {said}" if ours else said[0].upper() + said[1:]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
