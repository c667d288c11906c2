"""A program whose wall clock a test steps: `python -m tests.clock FILE MODULE WORDS...`.

FILE has the seconds by which `time.time` and `time.time_ns` differ from the real clock, now. The monotonic clock is the
real one, as when an administrator or NTP sets the clock of a machine.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

_now, _now_ns = time.time, time.time_ns


def step(file: Path, seconds: float) -> None:
    """Set the difference; at once for a program that runs."""
    made = file.with_suffix(".new")
    made.write_text(str(seconds), encoding="ascii")
    made.replace(file)


def wrap(file: Path) -> None:
    """From now on this process has the clock of the file."""

    def difference() -> float:
        return float(file.read_text(encoding="ascii"))

    time.time = lambda: _now() + difference()
    time.time_ns = lambda: _now_ns() + int(difference() * 1_000_000_000)


if __name__ == "__main__":
    wrap(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    name = sys.argv[0]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
