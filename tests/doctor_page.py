"""The table of checks in docs/doctor.md, made from the declarations; make it anew after a change:

python -m tests.doctor_page
"""

from __future__ import annotations

import re
from pathlib import Path

from replicad.operations.doctor.checks import CHECKS

PAGE = Path(__file__).parents[1] / "docs/doctor.md"
SECTION = re.compile(r"(<!-- checks -->\n).*?(<!-- end of checks -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with the table as it is declared; what is around it stays."""
    return SECTION.sub(lambda found: found[1] + table() + found[2], page)


def table() -> str:
    """A row for each check, with blank lines around them."""
    rows = [
        f"| `{one.name}` | {one.looks_at} | {one.warns or ''} | {one.fails or ''} | {one.remedy} |" for one in CHECKS
    ]
    head = ["| check | looks at | warning: | failing: | remedy |", "|---|---|---|---|---|"]
    return "\n".join(["", *head, *rows, "", ""])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
