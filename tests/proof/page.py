"""docs/faults.md, made from the catalogue and the results of `make proof`; make it anew after a change:

python -m tests.proof.page
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.proof.catalogue import ROOT, Command, Fault, every_command, everyday, faults, results
from tests.proof.defects import defects

PAGE = ROOT / "docs/faults.md"
HEAD = """\
# What replicad survives

Each fault here has commands that cause it against a real Postgres, real sockets and real processes, and that fail if
the promise does not hold. `make proof` runs them for an hour at most and writes this page; what was not reached then,
`make proof PROOF_ARGS=--resume` runs, and `make proof PROOF_ARGS="--fault 19"` those of one fault. Type a command as
it is printed, at the top of a clone in which `make test` has made `.venv`. A row without a result has not been run
since its command was added or renamed.

**Parts.** *TCP*, *pages* (rows over HTTP), *events* (server-sent events) and *Redis* are the transports of streams;
*positions* is how far each table may be read, which all transports share; *changes* are streams of the changes of a
table; *writers* are the libraries for programs that write. The others are [tubes](tubes.md),
[pipelines](pipelines.md), the [sender](sender.md), [caches](caches.md) and [presence](presence.md).

**Schedules.** `tests.torture` starts a Postgres, two daemons, writers, and readers of each transport with a sender, a
cache and presence beside them. It causes faults in the order of its seed, and compares what each client has with the
tables by a checker that shares no code with replicad (`tests/forks/ledger.py`). `tests.tubes_torture` does the same
for workers, with a downstream on another server. On failure both shrink the schedule. A seed gives the order of the
faults; their exact moments depend on the machine. The seeds 1001 to 1200 were played on 26 and 27 November 2026, each
in full: 1001 to 1053 on 0.1.0, the others on the commit of the last run below. All passed; 1048 failed twice beside
other work, when its client over Redis got no connection for two minutes, and then passed three times on a machine that
did nothing else.

**What this page does not prove.** A run shows that a command passed once on one machine. It is no proof for other
versions of Postgres, other file systems, or faults that nobody has listed. The machine itself never loses power in
these runs: `fsync` is off in most of them.
"""


def render(found: dict[str, Any]) -> str:
    """The page."""
    runs = found["runs"]
    parts = [HEAD, _summary(found), "## Faults\n"]
    parts += [_section(fault, runs) for fault in faults()]
    parts += [_everyday(runs), _defects(found["defects"])]
    return "\n".join(parts)


def _summary(found: dict[str, Any]) -> str:
    commands, about = every_command(), found["about"]
    counted = Counter(outcome(found["runs"], command) for command in commands)
    failed = [command for command in commands if outcome(found["runs"], command) not in ("passed", "not run")]
    lines = ["## Last run\n", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items())]
    lines.append(f"| commands | {len(commands)}: {', '.join(f'{n} {what}' for what, n in sorted(counted.items()))} |")
    if failed:
        lines += ["", "Not passed:", ""]
        lines += [f"- `{command.line}`: {_result(found['runs'], command)}" for command in failed]
    return "\n".join([*lines, ""])


def _section(fault: Fault, runs: dict[str, Any]) -> str:
    lines = [f"### {fault.name}. {fault.fault}\n", f"{fault.promise} *Seen:* {fault.seen}.\n"]
    lines += ["| part | command | result |", "|---|---|---|"]
    for parts, commands in fault.runs:
        lines += [f"| {', '.join(parts)} | `{command.line}` | {_result(runs, command)} |" for command in commands]
    return "\n".join([*lines, ""])


def _everyday(runs: dict[str, Any]) -> str:
    lines = [
        "## Everyday events\n",
        "Each is caused in one database with one daemon. A role that only looks sees it, and it ends when the printed",
        "remedy was run word for word by the role that it names.",
        "[Operating](everyday.md) has the remedies.\n",
        "| event | part | command | result |",
        "|---|---|---|---|",
    ]
    for event in everyday():
        [(parts, [command])] = event.runs
        kind = "streams" if parts == ("TCP",) else "tubes"
        lines.append(f"| {event.fault} | {kind} | `{command.line}` | {_result(runs, command)} |")
    return "\n".join([*lines, ""])


def _defects(found: dict[str, Any]) -> str:
    lines = [
        "## Defects put back\n",
        "A test that cannot fail proves nothing. `make proof PROOF_ARGS=--defects` puts back defects that replicad",
        "had, one at a time, by the patches in `tests/proof/defects`. A defect counts as found if the command fails",
        "with it and passes without it.\n",
        "| defect | mended by | found by | result |",
        "|---|---|---|---|",
    ]
    for defect in defects():
        one = found.get(defect.name)
        by = (one or {}).get("by") or defect.found_by[0].line
        word = "not run" if one is None else f"{one['outcome']}, {one['date']}, {one['seconds']:.0f} s"
        why = f": {one['why']}".replace("|", "\\|").replace("`", "'") if one and one.get("why") else ""
        lines.append(f"| {defect.what} | {defect.mended_by} | `{by}` | {word}{why} |")
    return "\n".join([*lines, ""])


def outcome(runs: dict[str, Any], command: Command) -> str:
    """passed, failed, skipped, or not run."""
    return str(runs[command.text]["outcome"]) if command.text in runs else "not run"


def _result(runs: dict[str, Any], command: Command) -> str:
    if command.text not in runs:
        return "not run"
    one = runs[command.text]
    why = f": {one['why']}".replace("|", "\\|") if one.get("why") else ""
    word = one["outcome"] if one["outcome"] == "passed" else f"**{one['outcome']}**"
    return f"{word}, {one['date']}, {one['seconds']:.1f} s{why}"


if __name__ == "__main__":
    PAGE.write_text(render(results()), encoding="utf-8")
