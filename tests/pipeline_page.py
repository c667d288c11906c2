"""The tables of docs/pipeline-file.md, made from the declarations of the keys; make them anew after a change:

    python -m tests.pipeline_page

A table stands between `<!-- keys of SECTION -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from replicad.spark.pipeline_file import DOWNSTREAMS, ENRICH, RUN, SOURCE, PipelineKey

PAGE = Path(__file__).parents[1] / "docs/pipeline-file.md"
SECTION = re.compile(r"(<!-- keys of ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Sequence[PipelineKey]] = {
    "source": SOURCE,
    "enrich": ENRICH,
    "run": RUN,
    **{f"downstream {kind}": keys for kind, keys in DOWNSTREAMS.items()},
}


def render(page: str) -> str:
    """The page with all tables as they are declared; what is around them stays."""
    return SECTION.sub(lambda found: found[1] + table(TABLES[found[2]]) + found[3], page)


def table(keys: Sequence[PipelineKey]) -> str:
    """The rows of one section, with blank lines around them."""
    rows = [f"| `{key.name}` | {key.type} | {default(key)} | {key.help} |" for key in keys]
    return "\n".join(["", "| key | type | default | meaning |", "|---|---|---|---|", *rows, "", ""])


def default(key: PipelineKey) -> str:
    """How a default is shown."""
    if key.required:
        return "required"
    if key.default is None or key.default == {}:
        return ""
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
