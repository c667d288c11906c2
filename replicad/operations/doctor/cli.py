"""`replicad doctor`: runs the checks and prints a line for each finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from replicad.config.settings import DatabaseSettings, colour_allowed, read_settings
from replicad.errors import ReplicadError, UsageError
from replicad.operations.clients import ask, http_options
from replicad.terminal.command import ReplicadCommand, database_options, json_option, option
from replicad.terminal.database import database_url, run_async
from replicad.terminal.output import as_json_line, echo

if TYPE_CHECKING:
    from replicad.operations.doctor.checks import Check, Finding

_COLOURS = {0: None, 1: "yellow", 2: "red"}
_NAGIOS = {0: "OK", 1: "WARNING", 2: "CRITICAL"}


@click.command(
    "doctor",
    cls=ReplicadCommand,
    short_help="Check an installation, and print problems with their remedies.",
    epilog="""\b
Examples:
  replicad doctor --database postgresql://replicad@db1/app
  replicad doctor --http 127.0.0.1:9010 --nagios""",
)
@json_option
@option("--nagios", is_flag=True, help="Print a plugin's answer for Nagios and its like: one line, then the problems.")
@database_options
@http_options
def command(as_json: bool, nagios: bool, http: str | None, **options: Any) -> int:
    """Check the database, streams, tubes, leases, daemons and more; print a line for each, with the remedy.

    Changes nothing. The exit status is 0 if all is fine, 1 with warnings, 2 if something is failing. Run it as the
    daemon's user of the database, so that it sees what the daemon may do. docs/doctor.md lists the checks.
    """
    if as_json and nagios:
        raise UsageError("--json and --nagios are both given; give one of them")
    found = run_async(partial(_examine, options, http, None if nagios else _print_json if as_json else _print_line))
    worst = max((finding.level for _, finding in found), default=0)
    if nagios:
        _print_nagios(found)
    elif not as_json:
        problems = sum(finding.level > 0 for _, finding in found)
        echo(f"\n{problems} problem{'s' * (problems != 1)}" if problems else "\nall is fine")
    return int(worst)


async def _examine(options: Mapping[str, Any], http: str | None, show: Any) -> Sequence[tuple[Check, Finding]]:
    from replicad.operations.doctor.checks import examine
    from replicad.operations.doctor.seen import Evidence
    from replicad.postgres.bridge import open_database

    settings = read_settings(DatabaseSettings, options)
    folder = None if settings.database is not None else settings.data_folder
    daemon = None if http is None else lambda: ask(http, options, "/clients")
    found = []

    async def all_checks(seen: Evidence) -> None:
        async for check, finding in examine(seen):
            found.append((check, finding))
            if show is not None:
                show(check, finding)

    with ExitStack() as stack:
        try:
            url = stack.enter_context(database_url(settings))
            async with open_database(url, size=2, application_name="replicad doctor", connect_timeout=5) as db:
                await all_checks(Evidence(db, settings, folder=folder, daemon=daemon))
        except UsageError:
            raise
        except ReplicadError as error:
            if found:
                raise
            await all_checks(Evidence(error, settings, folder=folder, daemon=daemon))
    return found


def _print_line(check: Check, finding: Finding) -> None:
    remedy = f"  -> {_remedy(finding)}" if finding.remedy else ""
    line = f"{finding.level.word:<8} {check.name:<10} {' '.join((finding.text + remedy).split())}"
    echo(line, fg=_COLOURS[finding.level] if colour_allowed() else None)


def _remedy(finding: Finding) -> str:
    return f"{finding.remedy}, as {finding.by}" if finding.by else finding.remedy


def _print_json(check: Check, finding: Finding) -> None:
    level = finding.level.name.lower()
    remedy, by = finding.remedy or None, finding.by or None
    echo(as_json_line({"check": check.name, "level": level, "text": finding.text, "remedy": remedy, "by": by}))


def _print_nagios(found: Sequence[tuple[Check, Finding]]) -> None:
    """One line with the state and figures, then a line for each problem; `|` separates the figures."""
    problems = sorted((one for one in found if one[1].level > 0), key=lambda one: -one[1].level)
    worst = problems[0][1].level if problems else 0
    warnings = sum(finding.level == 1 for _, finding in problems)
    first = f"{problems[0][0].name}: {problems[0][1].text}" if problems else "all is fine"
    figures = f"warnings={warnings} failing={len(problems) - warnings}"
    echo(f"REPLICAD {_NAGIOS[worst]} - {_plain(first)} | {figures}")
    for check, finding in problems:
        echo(_plain(f"{finding.level.word} {check.name}: {finding.text} -> {_remedy(finding)}"))


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
