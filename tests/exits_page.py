"""The table of exit statuses in docs/command-line.md, made from the declaration; make it anew after a change:

python -m tests.exits_page
"""

from __future__ import annotations

import re
from pathlib import Path

from replicad.errors import ReplicadError, by_code
from replicad.terminal.failures import EXITS, Exit, exit_of

PAGE = Path(__file__).parents[1] / "docs/command-line.md"
SECTION = re.compile(r"(<!-- exits -->\n).*?(<!-- end of exits -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with the table as it is declared; what is around it stays."""
    return SECTION.sub(lambda found: found[1] + table() + found[2], page)


def table() -> str:
    """A row for each status, with blank lines around them."""
    rows = [f"| {one.status} | {one.meaning} | {codes(one)} |" for one in EXITS]
    return "\n".join(["", "| status | meaning | errors |", "|---|---|---|", *rows, "", ""])


def codes(found: Exit) -> str:
    """The codes of the errors that end a command with this status."""
    here = {code: kind for code, kind in by_code().items() if kind.__module__ == ReplicadError.__module__}
    known = sorted(code for code, kind in here.items() if exit_of(kind) is found and kind is not ReplicadError)
    return ", ".join(f"`{code}`" for code in known)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
