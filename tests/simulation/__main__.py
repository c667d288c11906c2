"""Simulated hours: `make simulate SIMULATE_ARGS="--seed 1 --hours 100"`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, one after another (1)")
    parser.add_argument("--hours", type=float, default=10.0, help="simulated hours of each seed (10)")
    parser.add_argument("--only", default="", help="faults that may happen, with commas (all)")
    parser.add_argument("--calm", type=float, default=900.0, help="seconds between two bursts of writes, at most (900)")
    parser.add_argument("--burst", type=float, default=6.0, help="seconds of writes and faults, at most (6)")
    parser.add_argument("--log", type=Path, help="write all that happens into this file")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of words depends on it
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    from .clients import Violation
    from .world import Plan, simulate

    failed = 0
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        only = {"faults": tuple(chosen.only.split(","))} if chosen.only else {}
        plan = Plan(seed=seed, hours=chosen.hours, calm=chosen.calm, burst=chosen.burst, **only)
        began = time.monotonic()
        file = chosen.log.open("w", encoding="utf-8") if chosen.log else None
        try:
            result = simulate(plan, None if file is None else partial(print, file=file))
        except Violation as violation:
            failed += 1
            print(f"seed {seed} FAILED after {time.monotonic() - began:.1f} s: {violation}", flush=True)
            continue
        finally:
            if file is not None:
                file.close()
        seconds = time.monotonic() - began
        faults = ", ".join(f"{count} {word}" for word, count in sorted(result.faults.items()))
        print(
            f"seed {seed}: {result.hours:.1f} h in {seconds:.1f} s, {result.commits:,} commits ({result.lost:,} lost), "
            f"{result.lines:,} lines, {result.voided:,} rows void, {result.quiet} times equal; {faults}; {result.hash}",
            flush=True,
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
