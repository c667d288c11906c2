"""What a check is. The table of docs/operating.md and the tests come from the declarations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicad.operations.doctor.seen import Evidence


class Level(IntEnum):
    """How bad a finding is; the exit status of the command is that of the worst."""

    FINE = 0
    WARNING = 1
    FAILING = 2

    @property
    def word(self) -> str:
        """The word in the output."""
        return {Level.FINE: "ok", Level.WARNING: "WARNING", Level.FAILING: "FAILING"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, as one sentence, and what to do about it."""

    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check. `warns` and `fails` are the conditions; None: it never does. `needs`: the check that must not fail
    before it.

    `run` returns at least one finding: a problem, or that all is fine.
    """

    name: str
    looks_at: str
    warns: str | None
    fails: str | None
    remedy: str
    run: Callable[[Evidence], Awaitable[Iterable[Finding]]]
    needs: str | None = "database"

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that it may report."""
        given = {Level.WARNING: self.warns, Level.FAILING: self.fails}
        return (Level.FINE, *(level for level, when in given.items() if when is not None))


def fine(text: str) -> list[Finding]:
    """Nothing is wrong."""
    return [Finding(Level.FINE, text)]


def warning(text: str, remedy: str) -> Finding:
    """Something will need attention, or costs something; all that can be served is served."""
    return Finding(Level.WARNING, text, remedy)


def failing(text: str, remedy: str) -> Finding:
    """Something is not served, or will soon not be."""
    return Finding(Level.FAILING, text, remedy)


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 stream`, `2 streams`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
