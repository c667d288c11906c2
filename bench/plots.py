"""Plots as SVG text: horizontal bars by group, and ratios with their spread. Readable on white and on black."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.report import Bar, Figure

WIDTH, LEFT, RIGHT = 760, 250, 90
LINE, TOP = 22, 40
TEXT, GRID = "#808080", "#80808055"
OURS, PEERS = "#1f9e89", ("#e07b39", "#7a6fb0", "#c0476d", "#5b8db8", "#9a8c3c")
WIDE = 30  # times between the smallest and the largest value, from which the axis is logarithmic


def bars(title: str, shown: Sequence[Bar]) -> str:
    """A bar for each value, by group, ours in a colour of its own."""
    groups = list(dict.fromkeys(bar.group for bar in shown))
    values = [bar.value for bar in shown if bar.value > 0]
    highest, lowest = max(values, default=1.0), min(values, default=1.0)
    logarithmic = highest / lowest > WIDE
    low = lowest / 3 if logarithmic else 0.0

    def length(value: float) -> float:
        if value <= 0:
            return 0.0
        share = math.log(value / low) / math.log(highest / low) if logarithmic else value / highest
        return share * (WIDTH - LEFT - RIGHT)

    lines, y = [], TOP
    others = [name for name in dict.fromkeys(bar.name for bar in shown) if not is_ours(name)]
    for group in groups:
        if group:
            lines.append(_text(10, y + 14, group, bold=True))
            y += LINE
        for bar in (bar for bar in shown if bar.group == group):
            colour = OURS if is_ours(bar.name) else PEERS[others.index(bar.name) % len(PEERS)]
            lines.append(_text(LEFT - 8, y + 14, bar.name, anchor="end"))
            lines.append(f'<rect x="{LEFT}" y="{y + 3}" width="{length(bar.value):.1f}" height="14" fill="{colour}"/>')
            lines.append(_text(LEFT + length(bar.value) + 6, y + 14, number(bar.value)))
            y += LINE
        y += 6
    note = f"{title}{' (logarithmic)' if logarithmic else ''}"
    return _svg(note, lines, y)


def ratios(title: str, figures: Sequence[Figure]) -> str:
    """A point for each ratio, with a line from its lowest to its highest value; 1 is marked."""
    shown = [(figure.what.strip(), figure.ratio) for figure in figures if figure.ratio is not None]
    positive = [max(end, 1e-3) for _, ratio in shown for end in (ratio.low, ratio.high, 1.0)]
    low, high = min(positive) / 1.3, max(positive) * 1.3

    def at(value: float) -> float:
        return LEFT + math.log(max(value, 1e-3) / low) / math.log(high / low) * (WIDTH - LEFT - RIGHT)

    bottom = TOP + LINE * len(shown)
    lines = [f'<line x1="{at(1):.1f}" y1="{TOP}" x2="{at(1):.1f}" y2="{bottom}" stroke="{GRID}" stroke-width="2"/>']
    for row, (what, ratio) in enumerate(shown):
        y = TOP + LINE * row + 10
        lines.append(_text(LEFT - 8, y + 4, what if len(what) < 38 else f"{what[:36]}...", anchor="end"))
        ends = f'x1="{at(ratio.low):.1f}" y1="{y}" x2="{at(ratio.high):.1f}" y2="{y}"'
        lines.append(f'<line {ends} stroke="{OURS}" stroke-width="3"/>')
        lines.append(f'<circle cx="{at(ratio.middle):.1f}" cy="{y}" r="5" fill="{OURS}"/>')
        lines.append(_text(WIDTH - RIGHT + 30, y + 4, f"{ratio.middle:.2f}"))
    return _svg(f"{title}; the line is 1", lines, bottom + 6)


def is_ours(name: str) -> bool:
    """Whether a bar is replicad's."""
    return name.startswith(("replicad", "lock-watch"))


def number(value: float) -> str:
    """Three digits that say something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _svg(title: str, lines: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12" fill="{TEXT}" role="img">'
    )
    name = f"<title>{escape(title)}</title>"
    return "\n".join([head, name, _text(10, 20, title, bold=True), *lines, "</svg>", ""])
