"""The tables of keys in the docs, made from the declarations; make them anew after a change:

    python -m tests.keys_page

A table stands between `<!-- keys of NAME -->` and `<!-- end of keys -->`: in docs/pipeline-file.md one for each section
of a pipeline, in docs/command-line.md the one of the file for `replicad apply`. The options of commands are keys too:
`tests.commands_page` makes their page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from replicad import features
from replicad.config.declaring import Key
from replicad.spark.local.file import OF_LOCAL, OF_TABLE, OF_TABLES
from replicad.spark.pipeline_config import ENRICH, RUN
from replicad.spark.pipeline_file import DOWNSTREAMS, SOURCE
from replicad.terminal.desired import SectionKey, value_of

DOCS = Path(__file__).parents[1] / "docs"
PIPELINE, DESIRED = DOCS / "pipeline-file.md", DOCS / "command-line.md"
PAGES = (PIPELINE, DESIRED)
TABLE = re.compile(r"(<!-- keys of ([a-z ]+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
PIPELINES: Mapping[str, Sequence[Key]] = {
    "source": SOURCE,
    "enrich": ENRICH,
    "run": RUN,
    "tables": OF_TABLES,
    "table": OF_TABLE,
    "run of local": OF_LOCAL,
    **{f"downstream {kind}": keys for kind, keys in DOWNSTREAMS.items()},
}


def render(page: str) -> str:
    """The page with all tables as they are declared; what is around them stays."""
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, with blank lines around it."""
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines, "", ""])


def default(key: Key) -> str:
    """The default, as a file would have it."""
    if key.required:
        return "required"
    if isinstance(key.default, bool):
        return f"`{str(key.default).lower()}`"
    return "" if key.default in (None, (), {}) else f"`{value_of(key.default)}`"


def of_pipeline(keys: Sequence[Key]) -> str:
    """The keys of one section of a pipeline."""
    rows = [(f"`{key.name}`", key.kind.name, default(key), key.help) for key in keys]
    return table(("key", "type", "default", "meaning"), rows)


def of_sections() -> str:
    """The keys of a file for `replicad apply`, those of inner tables too."""
    rows = []
    for section in features.sections():
        name = f"{section.name}.NAME" if section.named else section.name
        for inside, key in every(section.keys):
            values = key.values + ("; cannot be changed later" if key.fixed else "")
            rows.append((f"`[{name}{inside}]`", f"`{key.name}`", values, default(key)))
    return table(("table", "key", "value", "default"), rows)


def every(keys: Sequence[SectionKey], inside: str = "") -> Iterator[tuple[str, SectionKey]]:
    """The keys that have a value, those of inner tables too, with the place of the table."""
    for key in keys:
        if key.inner:
            yield from every(key.inner, f"{inside}.{key.name}.TABLE")
        else:
            yield inside, key


TABLES: Mapping[str, Callable[[], str]] = {
    "the file": of_sections,
    **{name: lambda keys=keys: of_pipeline(keys) for name, keys in PIPELINES.items()},  # type: ignore[misc]
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
