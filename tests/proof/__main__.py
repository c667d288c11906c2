"""Run the commands of docs/faults.md and write the page: `make proof`, or `python -m tests.proof --help`.

The tests run side by side, then the schedules of random faults one after another. Each result is kept when its command
ends, so that a run that was broken off goes on with --resume. It ends with status 1 if a command failed, selected no
test, was skipped, or was not reached in time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replicad.postgres.programs import find_programs
from tests.proof import defects, page
from tests.proof.catalogue import (
    LONG_SECONDS,
    ROOT,
    Command,
    command_of,
    every_command,
    everyday,
    faults,
    keep,
    results,
)

SECONDS = 3600  # of a whole run
FRESH = 24 * 3600  # seconds in which --resume takes a result for one of this run
LOOK = 0.5  # seconds between two looks at a run
END = 30  # seconds for programs to end


class Run:
    """One run: what is still to be done, and until when."""

    def __init__(self, commands: Sequence[Command], seconds: float, workers: str, *, root: Path = ROOT) -> None:
        """`root`: where the commands run."""
        self.root = root
        self.commands = list(commands)
        self.deadline = time.monotonic() + seconds
        self.workers = workers
        self.found = results()
        self.commit = commit()
        self.found["about"] = about(self.commit)
        self.ended: set[str] = set()

    def play(self) -> None:
        """Run everything in the time that there is."""
        tests = [command for command in self.commands if command.node is not None]
        for long in (False, True):
            self._tests([command for command in tests if command.long == long], long=long)
        for command in self.commands:
            if command.node is None and self.left() > 0:
                self._program(command)

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def _tests(self, commands: Sequence[Command], *, long: bool) -> None:
        wanted = {command.node: command for command in commands if command.node is not None}
        if not wanted or self.left() <= 0:
            return
        with tempfile.TemporaryDirectory() as folder:
            record, log = Path(folder, "record"), Path(folder, "log")
            record.touch()
            words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.proof.recorder", "--no-header", *wanted]
            words += ["-n", self.workers, "--dist", "loadgroup"]
            environment = {**os.environ, "REPLICAD_PROOF_RECORD": str(record)}
            if long:
                environment["REPLICAD_STRESS_SECONDS"] = str(LONG_SECONDS)
            print(f"{len(wanted)} tests{', long forms' if long else ''} ...", flush=True)
            status = self._wait(words, environment, log)
            cases: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
            for line in record.read_text(encoding="utf-8").splitlines():
                one = json.loads(line)
                if (command := command_of(one["node"], wanted)) is not None:
                    cases[command.text].append(one)
            for command in commands:
                self._judge(command, cases[command.text], status)
            if status not in (0, 1, None):
                print(log.read_text(encoding="utf-8", errors="replace")[-3000:])
            self._keep()

    def _judge(self, command: Command, cases: Sequence[Mapping[str, Any]], status: int | None) -> None:
        failed = [one for one in cases if one["outcome"] == "failed"]
        passed = [one for one in cases if one["outcome"] == "passed"]
        seconds = sum(one["seconds"] for one in cases)
        if failed:
            self._note(command, "failed", seconds, failed[0]["why"])
        elif passed:
            self._note(command, "passed", seconds)
        elif cases:
            self._note(command, "skipped", seconds, cases[0]["why"])
        elif status is not None:  # of what was not reached in time, an earlier result stays
            self._note(command, "failed", 0.0, f"the command selected no test (pytest ended with {status})")

    def _program(self, command: Command) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            status = self._wait([sys.executable, "-m", *command.words], dict(os.environ), log)
            text = log.read_text(encoding="utf-8", errors="replace")
        seconds = time.monotonic() - began
        if status == 0:
            self._note(command, "passed", seconds)
        elif status is not None:
            lines = [line for line in text.splitlines() if line.strip()]
            self._note(command, "failed", seconds, (lines or [f"status {status}"])[-1][:300])
            print(text[-4000:])
        self._keep()

    def _wait(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int | None:
        """The exit status; None if the time was over."""
        # of a pytest that runs this: its workers would be taken for ours
        environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=self.root,
                env={**environment, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(max(0.0, self.left()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    end(process)

    def _note(self, command: Command, outcome: str, seconds: float, why: str = "") -> None:
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        one = {"outcome": outcome, "seconds": round(seconds, 1), "date": date, "commit": self.commit}
        self.found["runs"][command.text] = one | ({"why": why} if why else {})
        self.ended.add(command.text)
        print(f"{outcome:7} {seconds:6.1f} s  {command.line}{': ' + why if why else ''}", flush=True)

    def _keep(self) -> None:
        keep(self.found)
        page.PAGE.write_text(page.render(self.found), encoding="utf-8")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END)
            return


def commit() -> str:
    """The commit of the source, `-changed` if files differ from it that no run writes."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!docs/faults.md", ":!tests/proof/results.json")
    return f"{head or 'unknown'}{'-changed' if changed else ''}"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def about(source: str) -> dict[str, str]:
    """The machine and the versions, for the page."""
    cpu = "unknown processor"
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        cpu = found[1].strip() if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    postgres = subprocess.run([find_programs() / "postgres", "--version"], capture_output=True, text=True, check=False)
    return {
        "machine": f"{os.cpu_count()} x {cpu}, {memory:.0f} GB, {platform.system()} {platform.release()}",
        "Postgres": postgres.stdout.strip().rpartition(") ")[2],
        "Python": platform.python_version(),
        "commit": source,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def chosen(options: argparse.Namespace) -> list[Command]:
    """The commands that the options pick."""
    names = {str(name) for name in options.fault}
    every = (*faults(), *everyday())
    if unknown := names - {fault.name for fault in every}:
        raise SystemExit(f"there is no fault {', '.join(sorted(unknown))}")
    commands: Iterable[Command] = every_command()
    if names:
        commands = dict.fromkeys(command for fault in every if fault.name in names for command in fault.commands)
    commands = [command for command in commands if not options.only or any(t in command.line for t in options.only)]
    if options.failed or options.resume:
        runs = results()["runs"]
        commands = [command for command in commands if not _done(runs.get(command.text), failed=options.failed)]
    return list(commands)


def _done(one: Mapping[str, Any] | None, *, failed: bool) -> bool:
    if one is None or one["outcome"] != "passed":
        return False
    at = datetime.strptime(one["date"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    return failed or (datetime.now(UTC) - at).total_seconds() < FRESH


def put_back(names: Sequence[str], seconds: float) -> int:
    """Put back the defects of these names, or all, until the time is over; 1 if one was not found."""
    deadline, found, missed = time.monotonic() + seconds, results(), []
    for defect in defects.chosen(names):
        if time.monotonic() > deadline:
            missed.append(defect.name)
            continue
        one = defects.find(defect)
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        found["defects"][defect.name] = one | {"date": date, "commit": commit()}
        print(
            f"{one['outcome']:9} {one['seconds']:6.1f} s  {defect.name}: {one.get('by', '')} {one.get('why', '')}",
            flush=True,
        )
        keep(found)
        page.PAGE.write_text(page.render(found), encoding="utf-8")
        if one["outcome"] != "found":
            missed.append(defect.name)
    print(f"{len(missed)} not found or not reached in time: {', '.join(missed)}" if missed else "all were found")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--fault", action="append", default=[], help="a number or an everyday event; several times")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="commands with this text")
    parser.add_argument("--resume", action="store_true", help="not what has passed in the last day")
    parser.add_argument("--failed", action="store_true", help="only what has not passed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything (default {SECONDS})")
    parser.add_argument("--workers", default="auto", help="tests side by side (default auto)")
    text = "put back each defect of tests/proof/defects, or those that are named, and see that it is found"
    parser.add_argument("--defects", nargs="*", default=None, metavar="NAME", help=text)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    options = parser.parse_args()
    if options.defects is not None:
        return put_back(options.defects, options.seconds)
    commands = chosen(options)
    if options.list:
        print("\n".join(command.line for command in commands))
        return 0
    run = Run(commands, options.seconds, options.workers)
    run.play()
    bad = [command for command in commands if page.outcome(run.found["runs"], command) != "passed"]
    missed = [command for command in commands if command.text not in run.ended]
    print(f"{len(commands)} commands: {len(run.ended)} ended, {len(bad)} not passed, {len(missed)} not reached in time")
    for command in bad:
        print(f"  {page.outcome(run.found['runs'], command)}: {command.line}")
    return 1 if bad or missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing outlives a run that is broken off
    sys.exit(main())
