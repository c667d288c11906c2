"""docs/benchmarks.md and its plots, made from the last results that were kept (`make bench BENCH_ARGS="--keep NAME"`).

python -m bench.page
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.plots import bars, ratios
from bench.report import Bar, Figure, Spread

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
IMAGES = ROOT / "docs/images"
RESULTS = ROOT / "bench/results.json"
HEAD = """\
# Benchmarks

What replicad does beside its peers, on one machine in one run. `make bench BENCH_ARGS="--keep NAME"` measures a
benchmark again and writes its part of this page; `make bench BENCH_ARGS=--help` lists them all. A ratio is ours to the
peer's, round by round: the median, the lowest and the highest. A goal that was not met says **no**.

One machine, with the writers, the database, the daemon and the consumers on the same processors, measures how things
compare. It does not measure what a machine of yours will do, nor networks, disks that are slow to flush, or days of
operation.
"""


def results() -> dict[str, Any]:
    """By the name of the benchmark: when, where and how it was run, and its figures."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def keep(name: str, title: str, figures: Sequence[Figure], *, command: str, seconds: float) -> None:
    """Keep the figures of a run, and make the page and the plots anew."""
    found = results()
    found[name] = {
        "title": title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "command": command,
        "seconds": round(seconds),
        "figures": [_plain(figure) for figure in figures],
    }
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    write(results())  # in the order of the file


def write(found: Mapping[str, Any]) -> None:
    """Write the page and the plots."""
    PAGE.write_text(render(found), encoding="utf-8")
    for name, text in plots(found).items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def machine() -> str:
    """The processors and the memory."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model[1] if model else 'unknown processor'}, {memory:.0f} GB"


def render(found: Mapping[str, Any]) -> str:
    """The page."""
    parts = [HEAD]
    for name, one in found.items():
        figures = [_figure(plain) for plain in one["figures"]]
        title, _, beside = one["title"].partition(": ")
        parts += [f"## {title}\n", f"{beside[:1].upper()}{beside[1:]}.\n" if beside else "", _description(name)]
        parts += [f"![{escape(plot)}](images/{file})\n" for file, plot in _files(name, figures).items()]
        parts += ["| | replicad | beside it | ratio: median (min to max) | goal | met |", "|---|---|---|---|---|---|"]
        for one_figure in figures:
            ratio = str(one_figure.ratio or "")
            met = {"yes": "yes", "NO": "**no**"}.get(one_figure.verdict, "")
            cells = (one_figure.what.strip(), one_figure.ours, one_figure.beside, ratio, one_figure.goal, met)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append(f"\n{one['date']}, {one['machine']}, load {one['load']}, {one['seconds']} s: `{one['command']}`\n")
    return "\n".join(parts)


def plots(found: Mapping[str, Any]) -> dict[str, str]:
    """The plots, by the names of their files."""
    made = {}
    for name, one in found.items():
        figures = [_figure(plain) for plain in one["figures"]]
        for file, title in _files(name, figures).items():
            shown = [bar for figure in figures for bar in figure.bars if bar.plot == title]
            made[file] = bars(title, shown) if shown else ratios(title, figures)
    return made


def _files(name: str, figures: Sequence[Figure]) -> dict[str, str]:
    """The plots of a benchmark: their files, and their titles."""
    titles = list(dict.fromkeys(bar.plot for figure in figures for bar in figure.bars))
    if not titles and any(figure.ratio is not None for figure in figures):
        titles = ["Ratio to the peer, or to the goal"]
    return {f"bench-{name}{f'-{number}' if number else ''}.svg": title for number, title in enumerate(titles)}


def _description(name: str) -> str:
    """What the module says of itself, below its first line."""
    spec = find_spec(f"bench.{name}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8").split('"""')[1]
    return text.partition("\n\n")[2].strip() + "\n"


def _plain(figure: Figure) -> dict[str, Any]:
    ratio = None if figure.ratio is None else [figure.ratio.middle, figure.ratio.low, figure.ratio.high]
    return {
        "what": figure.what,
        "ours": figure.ours,
        "beside": figure.beside,
        "ratio": ratio,
        "at_least": figure.at_least,
        "at_most": figure.at_most,
        "bars": [[bar.plot, bar.group, bar.name, bar.value] for bar in figure.bars],
    }


def _figure(plain: Mapping[str, Any]) -> Figure:
    ratio = None if plain["ratio"] is None else Spread(*plain["ratio"])
    shown = tuple(Bar(*bar) for bar in plain["bars"])
    return Figure(plain["what"], plain["ours"], plain["beside"], ratio, plain["at_least"], plain["at_most"], shown)


if __name__ == "__main__":
    write(results())
