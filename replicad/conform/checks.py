"""The checks, read from their files."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from replicad.conform.transcript import ScriptError, Step, read_script

KEYS = frozenset({"name", "sentence", "script", "needs", "shared", "seconds", "each", "last", "token"})
NEEDS = frozenset({"stream", "tube", "write_row", "write_pod", "token", "no_token", "client", "worker"})


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """One check: the sentence of protocol.md that it checks, and the conversation that shows it.

    `needs`: names of what the caller must give for it. `shared`: also a server of Synapse's protocol without our
    additions must pass. `seconds`: how long it takes at least. `last`: the server may
    refuse our address for some time after it. `token`: where the client under test has to begin.
    """

    name: str
    sentence: str
    steps: tuple[Step, ...]
    needs: frozenset[str] = frozenset()
    shared: bool = False
    seconds: float = 0.0
    last: bool = False
    token: str = "EARLIEST"  # noqa: S105 - a position


@dataclass(frozen=True, slots=True)
class Result:
    """How a check ended. `problem` None: it passed. `lacks`: it did not run, because these were not given."""

    check: ConformanceCheck
    problem: str | None = None
    lacks: Sequence[str] = ()

    @property
    def outcome(self) -> str:
        """`passed`, `failed` or `not run`."""
        return "not run" if self.lacks else "passed" if self.problem is None else "failed"


class CheckFailed(Exception):
    """The other side did something else than the check expects."""


@cache
def server_checks() -> tuple[ConformanceCheck, ...]:
    """The checks of servers, in the order of protocol.md."""
    return _read("server_checks.toml")


@cache
def client_checks() -> tuple[ConformanceCheck, ...]:
    """The checks of clients."""
    return _read("client_checks.toml")


def _read(file: str) -> tuple[ConformanceCheck, ...]:
    content = tomllib.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))
    found: dict[str, ConformanceCheck] = {}
    for entry in content["check"]:
        unknown = entry.keys() - KEYS
        if unknown:
            raise ScriptError(f"{file}: the check {entry['name']!r} has unknown keys: {', '.join(sorted(unknown))}")
        if not NEEDS.issuperset(entry.get("needs", ())):
            raise ScriptError(f"{file}: the check {entry['name']!r} needs something that nobody can give")
        for case in entry.get("each", [None]):
            name = entry["name"] if case is None else f"{entry['name']}: {_short(case)}"
            script = entry["script"] if case is None else entry["script"].replace("{each}", case)
            if name in found:
                raise ScriptError(f"{file}: there are two checks {name!r}")
            found[name] = ConformanceCheck(
                name,
                " ".join(entry["sentence"].split()),
                read_script(script),
                frozenset(entry.get("needs", ())),
                entry.get("shared", False),
                float(entry.get("seconds", 0)),
                entry.get("last", False),
                entry.get("token", "EARLIEST"),
            )
    return tuple(found.values())


def _short(case: str) -> str:
    return case if len(case) <= 60 else f"{case[:57]}..."
