"""What `make proof` runs: the faults of faults.toml and the everyday events, each with the commands that repeat it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.everyday import EVENTS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"  # of the last runs; docs/faults.md is made from them
TRANSPORTS = ("TCP", "pages", "events", "Redis")
PARTS = (*TRANSPORTS, "positions", "changes", "tubes", "pipelines", "sender", "caches", "presence", "writers")
MODULES = {"torture": "tests.torture", "tubes": "tests.tubes_torture", "pipelines": "tests.local_torture"}
EVERYDAY = "integration/test_everyday_events.py::test_an_event_is_seen_and_its_printed_remedy_ends_it"
LONG_SECONDS = 10  # REPLICAD_STRESS_SECONDS for the long forms here
FAULTS = 45


@dataclass(frozen=True)
class Command:
    """A command of the catalogue. `text`: as it stands there; it is the command's name in the results."""

    text: str

    @property
    def long(self) -> bool:
        """Whether it is a test that only `make long` runs."""
        return self.text.startswith("long: ")

    @property
    def node(self) -> str | None:
        """The test as pytest names it; None: it is a program."""
        found = self.text.removeprefix("long: ")
        return f"tests/{found}" if "::" in found else None

    @property
    def words(self) -> list[str]:
        """The words after `python -m`."""
        if self.node is not None:
            return ["pytest", self.node]
        kind, *words = shlex.split(self.text)
        if kind == "torture" and "--schedules" not in words:
            words += ["--schedules", "1"]
        if kind == "tubes" and "--runs" not in words:
            words += ["--runs", "1"]
        return [MODULES[kind], *words]

    @property
    def line(self) -> str:
        """What a person types at the top of the repository."""
        before = f"REPLICAD_STRESS_SECONDS={LONG_SECONDS} " if self.long else ""
        return f"{before}.venv/bin/python -m {shlex.join(self.words)}"


@dataclass(frozen=True)
class Fault:
    """A fault: `runs` are the commands by the parts that they try."""

    name: str  # a number, or the name of an everyday event
    fault: str
    promise: str
    seen: str
    concerns: tuple[str, ...]
    runs: tuple[tuple[tuple[str, ...], tuple[Command, ...]], ...]

    @property
    def commands(self) -> Iterator[Command]:
        """All of them."""
        for _, commands in self.runs:
            yield from commands


@cache
def faults() -> tuple[Fault, ...]:
    """The numbered faults, in their order."""
    read = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
    return tuple(_fault(one, read["schedules"]) for one in read["fault"])


def _fault(one: dict[str, Any], schedules: dict[str, str]) -> Fault:
    runs = tuple(
        (tuple(parts.split(", ")), tuple(_command(text, schedules) for text in texts))
        for parts, texts in one["runs"].items()
    )
    concerns = [part for name in one["concerns"] for part in (TRANSPORTS if name == "streams" else (name,))]
    return Fault(str(one["number"]), one["fault"], one["promise"], one["seen"], tuple(concerns), runs)


def _command(text: str, schedules: dict[str, str]) -> Command:
    if text.startswith("schedule "):
        return Command(schedules[text.removeprefix("schedule ")])
    return Command(text)


@cache
def everyday() -> tuple[Fault, ...]:
    """The everyday events, as faults: each is one case of one test."""
    return tuple(
        Fault(
            event.name,
            event.title,
            "It is seen in the views that docs/everyday.md lists, and the printed remedy ends it.",
            "",
            ("TCP" if event.kind == "stream" else "tubes",),
            ((("TCP" if event.kind == "stream" else "tubes",), (Command(f"{EVERYDAY}[{event.name}]"),)),),
        )
        for event in EVENTS
    )


def every_command() -> list[Command]:
    """Each command once, in the order of the page."""
    return list(dict.fromkeys(command for fault in (*faults(), *everyday()) for command in fault.commands))


def results() -> dict[str, Any]:
    """What the last runs found: `about` (machine and versions), `runs` by the text of the command, and `defects`."""
    none: dict[str, Any] = {"about": {}, "runs": {}, "defects": {}}
    return none | (json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {})


def keep(found: dict[str, Any]) -> None:
    """Write the results, without those of commands that are no longer in the catalogue."""
    known = {command.text for command in every_command()}
    found["runs"] = {name: one for name, one in sorted(found["runs"].items()) if name in known}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command_of(nodeid: str, wanted: dict[str, Command]) -> Command | None:
    """The command in `wanted` (by node) that selected a test with this id; pytest-xdist adds `@group`."""
    found = re.match(r"(.*?::\w+)(\[.*\])?(?:@\w+)?$", nodeid)
    if found is None:
        return None
    return wanted.get(f"{found[1]}{found[2] or ''}") or wanted.get(found[1])
