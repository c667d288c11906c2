"""`replicad conform`: does a server, or a client, keep to protocol.md?"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import SECONDS
from replicad.config.settings import ClientSettings, read_settings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, ValueType, option, settings_options
from replicad.terminal.database import run_async
from replicad.terminal.output import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicad.conform.transcript import ConformanceCheck, Result


NEEDED = {
    "stream": "--stream",
    "tube": "--tube",
    "write_row": "--write-row",
    "write_pod": "--write-pod",
    "token": "a server with a secret, and --token-file",
    "no_token": "a server without a secret",
    "client": "--client",
    "worker": "--worker",
}
"""What to give for the checks that need something."""


@click.command(
    "conform",
    cls=ReplicadCommand,
    short_help="Check a server or a client against protocol.md.",
    epilog="""\b
Examples:
  replicad conform 127.0.0.1:9009
  replicad conform 127.0.0.1:9009 --stream events --tube cities
  replicad conform --client 'node follow.mjs {server} {stream} {token}'""",
)
@click.argument("address", required=False, metavar="[HOST[:PORT]]")
@option("--stream", metavar="NAME", help="A stream of the server, for the checks of streams.")
@option("--tube", metavar="NAME", help="A tube of the server that nobody reads, for the checks of tubes.")
@option("--write-row", metavar="COMMAND", help="Command that writes one row of the stream.")
@option("--write-pod", metavar="COMMAND", help="Command that writes one pod of the tube.")
@option("--client", metavar="COMMAND", help="Check this client, a follower of a stream, in place of a server.")
@option("--worker", metavar="COMMAND", help="Check this client, a worker of a tube, in place of a server.")
@option("--patience", type=ValueType(SECONDS), default="15", show_default=True, help="Time of a client for each step.")
@option("--shared", is_flag=True, help="Only the checks that a server without the additions of replicad passes too.")
@option("--quick", is_flag=True, help="Leave out the checks that take seconds, such as time-outs.")
@option("--only", metavar="TEXT", help="Only the checks with this text in their names.")
@option("--list", "as_list", is_flag=True, help="List the checks and their sentences; run none.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
@settings_options(ClientSettings)
def command(
    *,
    address: str | None,
    stream: str | None,
    tube: str | None,
    write_row: str | None,
    write_pod: str | None,
    client: str | None,
    worker: str | None,
    patience: float,
    shared: bool,
    quick: bool,
    only: str | None,
    as_list: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run black-box checks of protocol.md against a server, or play a faulty server to a client.

    Each check names the sentence of protocol.md that it checks. A check that needs a stream, a tube or a command to
    write with does not run without it, and is counted as not run. The exit status is 1 if one has failed, or none has
    passed.

    A client is a command with {server}, {stream} and {token} in it ({server} and {tube}: a worker). It prints a JSON
    object for each row as `replicad tail --json` does. docs/conformance.md describes both.
    """
    from replicad.conform.transcript import client_checks, server_checks

    if client is not None or worker is not None:
        if address is not None or options["server"] is not None:
            raise UsageError("--client and --worker check a client against a server of ours; leave out HOST:PORT")
        checks = [check for check in client_checks() if (client if "client" in check.needs else worker) is not None]
    else:
        checks = list(server_checks())
    checks = [check for check in checks if (only or "") in check.name and not (shared and not check.shared)]
    left_out = [check for check in checks if quick and check.seconds]
    checks = [check for check in checks if check not in left_out]
    if not checks:
        raise UsageError("no check is chosen; `replicad conform --list` lists them")
    if as_list:
        for check in checks:
            echo(
                json.dumps({"name": check.name, "sentence": check.sentence})
                if as_json
                else f"{check.name}\n    {check.sentence}"
            )
        return
    results: list[Result] = []
    report = _reporter(as_json=as_json)

    def keep(result: Result) -> None:
        results.append(result)
        report(result)

    if client is not None or worker is not None:
        _check_client(client, worker, patience, checks, keep)
    else:
        given = {"stream": stream, "tube": tube, "write_row": write_row, "write_pod": write_pod, "shared": shared}
        _check_server(address, options, given, checks, keep)
    counted = Counter(result.outcome for result in results)
    if not as_json:
        rest = "".join(f", {counted[outcome]} {outcome}" for outcome in ("failed", "not run") if counted[outcome])
        unseen = f", {len(left_out)} left out by --quick" if left_out else ""
        echo(f"{counted['passed']} passed{rest}{unseen}")
    if counted["failed"] or not counted["passed"]:
        raise SystemExit(1)


def _reporter(*, as_json: bool) -> Callable[[Result], None]:
    def report(result: Result) -> None:
        if as_json:
            found = {"name": result.check.name, "outcome": result.outcome, "sentence": result.check.sentence}
            echo(json.dumps({**found, "problem": result.problem, "lacks": list(result.lacks)}))
        elif result.outcome == "failed":
            problem = (result.problem or "").replace("\n", "\n         ")
            echo(f"FAILED   {result.check.name}\n         {problem}\n         protocol.md: {result.check.sentence}")
        elif result.outcome == "not run":
            echo(f"not run  {result.check.name} (needs {', '.join(NEEDED[need] for need in result.lacks)})")

    return report


def _check_client(
    client: str | None,
    worker: str | None,
    patience: float,
    checks: Sequence[ConformanceCheck],
    report: Callable[[Result], None],
) -> None:
    from replicad.conform.against_client import ClientUnderTest, run_checks

    run_async(partial(run_checks, ClientUnderTest(client, worker, patience), checks, report))


def _check_server(
    address: str | None,
    options: dict[str, Any],
    given: dict[str, Any],
    checks: Sequence[ConformanceCheck],
    report: Callable[[Result], None],
) -> None:
    from replicad.conform.against_server import ServerUnderTest, run_checks

    if address is not None:
        if options["server"] is not None:
            raise UsageError("HOST:PORT and --server are both given; give one of them")
        options["server"] = address
    settings = read_settings(ClientSettings, options)
    if settings.server.others:
        raise UsageError(f"{settings.server} names several daemons; check one of them")
    server = ServerUnderTest(
        settings.server.host, settings.server.port, settings.ssl_context(), settings.token, **given
    )
    run_async(partial(run_checks, server, checks, report))
