"""Checks as conversations in files: the lines of a check, in the notation of protocol.md.

A line of a script is a direction, a blank and a text:

    C> REPLICATE events NOW           the client sends this line
    S> POSITION {stream} {word} {at=int} {at}  the server sends this line: the next one that is not a PING
    S>> CURSOR {...}                  the same, after any other lines
    S~ PING {int}                     the next line, PINGs included
    S| ERROR bad_line: {...}          the line, and then the end of the connection
    C: AUTH\\x00\\n                     the client sends these bytes
    S.                                the server closes; nothing but PINGs and ERRORs is sent before
    S- 0.2                            for that many seconds the server sends nothing but PINGs
    P> ROW master 54 ["a"]            the client prints this row (see `against_client`)
    ! write_row                       an action: write_row, write_pod, sleep SECONDS, less A B, at_most A B

`C2>` and `S2>` are the second connection. `C*>`: on the first connection, or on a new one, which is then the first.
`P>>`: the same as `P>`, after any resets. In a pattern `{int}` is a whole number, `{word}` a word, `{...}` any text,
`{end}` the end or a colon or blank and any text; `{name=int}` also keeps it, and `{name}` is the kept text, or one of
the names that the caller gives. `{300*x}` is 300 times x. A line without a direction is refused. A line that begins
with # is a remark.

Which direction is checked and which is sent depends on the role that the program plays. As the server it has the
action `reset` (an end without a FIN) beside.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from replicad.errors import UsageError

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


_STEP = re.compile(r"(?:(?P<side>[CSP])(?P<number>[2-9*])?(?P<mark>>>|[>~|:.\-])|(?P<action>!))(?: (?P<text>.*))?")
_HOLE = re.compile(r"\{(?:(?P<name>[a-z_]+)=)?(?P<kind>[a-z_0-9.]+)\}|\{(?P<times>\d+)\*(?P<unit>[^{}]+)\}")
_KINDS = {"int": r"-?\d+", "word": r"\S+", "...": r".*", "seconds": r"\d+(?:\.\d+)?", "end": r"(?:[: ].*)?"}


ANY = 0  # the number of a connection: the first one, or a new one that takes its place


class ScriptError(UsageError):
    """A script that cannot be read: a defect of the check."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a script. `side` is `C`, `S`, `P`, or `!` for an action; `connection` counts from 1."""

    side: str
    mark: str
    text: str
    connection: int = 1

    @property
    def seconds(self) -> float:
        """How long the step takes by itself."""
        waits = self.mark == "-" or (self.side == "!" and self.text.startswith("sleep "))
        return float(self.text.rpartition(" ")[2]) if waits else 0.0

    def __str__(self) -> str:
        if self.side == "!":
            return f"! {self.text}"
        number = {1: "", ANY: "*"}.get(self.connection, str(self.connection))
        return f"{self.side}{number}{self.mark} {self.text}".rstrip()


def read_script(script: str) -> tuple[Step, ...]:
    """The steps of a script.

    Raises:
        ScriptError: a line has no direction.
    """
    steps = []
    for line in script.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        found = _STEP.fullmatch(stripped)
        if found is None:
            raise ScriptError(f"the line {stripped!r} of a script has no direction such as `C>` or `S>`")
        side = found["side"] or "!"
        number = ANY if found["number"] == "*" else int(found["number"] or 1)
        steps.append(Step(side, found["mark"] or "", found["text"] or "", number))
    return tuple(steps)


def fill(text: str, known: Mapping[str, str]) -> str:
    """The text to send: kept names replaced.

    Raises:
        ScriptError: a name has no value.
    """

    def value(hole: re.Match[str]) -> str:
        if hole["times"]:
            return hole["unit"] * int(hole["times"])
        if hole["kind"] not in known:
            raise ScriptError(f"{hole.group()} in {text!r} has no value")
        return known[hole["kind"]]

    return _HOLE.sub(value, text)


def as_bytes(text: str, known: Mapping[str, str]) -> bytes:
    """The bytes of a text with escapes such as \\n and \\x00."""
    return fill(text, known).encode().decode("unicode_escape").encode("latin-1")


def match(pattern: str, line: str, known: Mapping[str, str]) -> dict[str, str] | None:
    """The texts that the line gives to the names of the pattern; None if it does not match in full."""
    parts: list[str] = []
    end = 0
    named: set[str] = set()
    for hole in _HOLE.finditer(pattern):
        parts.append(re.escape(pattern[end : hole.start()]))
        end = hole.end()
        if hole["times"]:
            parts.append(f"(?:{re.escape(hole['unit'])}){{{hole['times']}}}")
        elif hole["name"]:
            parts.append(f"(?P<{hole['name']}>{_KINDS[hole['kind']]})")
            named.add(hole["name"])
        elif hole["kind"] in named:
            parts.append(f"(?P={hole['kind']})")
        elif hole["kind"] in known:
            parts.append(re.escape(known[hole["kind"]]))
        elif hole["kind"] in _KINDS:
            parts.append(_KINDS[hole["kind"]])
        else:
            raise ScriptError(f"{hole.group()} in {pattern!r} has no value")
    parts.append(re.escape(pattern[end:]))
    found = re.fullmatch("".join(parts), line, re.DOTALL)
    return None if found is None else found.groupdict()
