"""Defects that replicad had, put back one at a time: each must be found by the tests that its patch names.

tests/proof/defects/NAME.patch has the defect in a sentence, the commit that mended it, the commands that must fail with
it, and the change. `make proof PROOF_ARGS=--defects` applies each to a copy of the source and runs its commands. A
patch that does not apply any more is written anew for the code as it is now (tests/house/test_proof_defects.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.proof.catalogue import HERE, ROOT, Command

FOLDER = HERE / "defects"
SECONDS = 900.0  # for the commands of one defect: a tail of the machine's load, never of what they need


@dataclass(frozen=True)
class Defect:
    """A patch: `what` was wrong, the commit that mended it, and the commands that find it."""

    name: str
    what: str
    mended_by: str
    found_by: tuple[Command, ...]
    path: Path


@cache
def defects() -> tuple[Defect, ...]:
    """All patches, by name."""
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.patch")))


def _read(path: Path) -> Defect:
    head, _, _ = path.read_text(encoding="utf-8").partition("\ndiff --git ")
    what, _, rest = head.partition("\n\n")
    found = tuple(Command(text) for text in re.findall(r"^Found-by: (.*)$", rest, re.MULTILINE))
    [mended] = re.findall(r"^Mended-by: (.*)$", rest, re.MULTILINE)
    return Defect(path.stem, " ".join(what.split()), mended, found, path)


def apply(defect: Defect, folder: Path, *, check: bool = False) -> str:
    """Put the defect into the source below a folder, or only `check` that it can be; why not, or nothing."""
    words = ["git", "apply", *(["--check"] if check else []), str(defect.path)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr.strip() or ("" if done.returncode == 0 else f"git apply ended with {done.returncode}")


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the source, with changes that are not committed."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory(prefix="replicad-defect-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file in files:
            if (ROOT / file).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, folder / file)
        yield folder


def run(command: Command, folder: Path, seconds: float) -> tuple[int, str]:
    """Run a command on the source below a folder; its status (124: the time was over), and the end of its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if command.long:
        environment["REPLICAD_STRESS_SECONDS"] = "10"
    more = ["-q", "-x", "-p", "no:cacheprovider"] if command.node else []
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.words, *more],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
            os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")[-6000:]


def find(defect: Defect) -> dict[str, Any]:
    """Whether a command of the defect fails with it, and passes without it."""
    began = time.monotonic()
    with copied() as folder:
        where = "import replicad, sys; sys.exit(not replicad.__file__.startswith(sys.argv[1]))"
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run([sys.executable, "-c", where, str(folder)], cwd=folder, env=environment, check=True)
        sound = [command for command in defect.found_by if run(command, folder, SECONDS)[0] == 0]
        if why := apply(defect, folder):
            return _result("does not apply", began, why=why)
        for command in sound:
            status, text = run(command, folder, SECONDS)
            if status == 1:
                return _result("found", began, by=command.line, why=_why(text))
            if status != 0:
                return _result("not found", began, by=command.line, why=f"the command ended with {status}")
    text = "" if sound else "no command passes without the defect"
    return _result("not found", began, why=text)


def _result(outcome: str, began: float, *, by: str = "", why: str = "") -> dict[str, Any]:
    found = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    return found | ({"by": by} if by else {}) | ({"why": why[:200]} if why else {})


def _why(text: str) -> str:
    """The line that says what is wrong."""
    ended = r"^(?:\w+(?:Error|Disagreement)|seed \d+ FAILED.*): ?.*$"
    for pattern in (r"^E +(\S.*)$", r"^[ |]+(\w+Error: .*)$", ended):
        if found := re.search(pattern, text, re.MULTILINE):
            return (found[1] if found.groups() else found[0]).strip()
    return text.strip().rpartition("\n")[2]


def chosen(names: Sequence[str]) -> list[Defect]:
    """The defects of these names, or all."""
    known = {defect.name: defect for defect in defects()}
    if unknown := set(names) - known.keys():
        raise SystemExit(f"there is no defect {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())
