"""Figures and how they are printed. Knows nothing of how they are measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing: the median, and between what it lay."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Of at least one value."""
        found = sorted(values)
        return cls(median(found), found[0], found[-1])

    @classmethod
    def of_ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> Self:
        """Round by round, so that what disturbed a whole round does not count."""
        return cls.of(mine / other for mine, other in zip(ours, theirs, strict=True))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a plot: its title with the unit, the group in it, whose bar it is, and the value."""

    plot: str
    group: str
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `ratio` is ours to the peer's, `goal` what its median should be at least (or at most).
    `bars`: what docs/benchmarks.md shows of it.
    """

    what: str
    ours: str
    beside: str = ""
    ratio: Spread | None = None
    at_least: float | None = None
    at_most: float | None = None
    bars: tuple[Bar, ...] = ()

    @property
    def goal(self) -> str:
        """As text; empty where there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def verdict(self) -> str:
        """`yes`, `NO`, or empty where there is no goal or nothing to compare with."""
        if self.ratio is None or not self.goal:
            return ""
        met = self.ratio.middle >= self.at_least if self.at_least is not None else self.ratio.middle <= self.at_most
        return "yes" if met else "NO"


def amount(value: float, unit: str) -> str:
    """A number with three digits that say something: `1.67 M rows/s`."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{' ' if unit[0] != ' ' else ''}{unit}"
    return f"{value:.3g} {unit}"


def rates(values: Sequence[float], unit: str) -> str:
    """The median of several, as `amount` writes it."""
    return amount(median(values), unit)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))]


def latency(seconds: Sequence[float]) -> str:
    """p50 and p99 in milliseconds, and of how many."""
    p50, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.99))
    return f"{p50:.2f} / {p99:.2f} ms (n={len(seconds)})"


def table(title: str, figures: Sequence[Figure]) -> str:
    """The figures of one benchmark as text."""
    head = ("", "replicad", "beside it", "ratio: median (min to max)", "goal", "met")
    rows = [(f.what, f.ours, f.beside, "" if f.ratio is None else str(f.ratio), f.goal, f.verdict) for f in figures]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])
