"""The tables of figures in docs/metrics.md, made from the declarations; make them anew after a change:

    python -m tests.figures_page

A table stands between `<!-- figures of PART -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from replicad.daemon import own_figures
from replicad.daemon.figures import Family
from replicad.operations.http import metrics, server
from replicad.redis import service as of_redis
from replicad.sender import serving as sender_serving
from replicad.streams.serving import service as of_streams
from replicad.tubes.serving import service as tube_service

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
SECTION = re.compile(r"(<!-- figures of ([A-Za-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PARTS: dict[str, Sequence[Family]] = {
    "the exporter": (*server.FAMILIES, metrics.LEFT_OUT),
    "the daemon": own_figures.FAMILIES,
    "streams": of_streams.FAMILIES,
    "tubes": tube_service.FAMILIES,
    "Redis": of_redis.FAMILIES,
    "senders": sender_serving.FAMILIES,
}


def render(page: str) -> str:
    """The page with all tables as they are declared; what is around them stays."""
    return SECTION.sub(lambda found: found[1] + table(PARTS[found[2]]) + found[3], page)


def table(families: Sequence[Family]) -> str:
    """The rows of one part, with blank lines around them."""
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.help} |" for one in families]
    return "\n".join(["", "| figure | kind | labels | meaning |", "|---|---|---|---|", *rows, "", ""])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
