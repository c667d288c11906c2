"""`replicad demo`: runs replicad.demo."""

from __future__ import annotations

from pathlib import Path

import click

from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, option


@click.command("demo", cls=ReplicadCommand, log_level="warning", short_help="Run a demonstration on real data.")
@option(
    "--folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for the Postgres, the logs and the copy. Default: .replicad/demo, demo-lite or demo-web.",
)
@option("--lite", is_flag=True, help="The small one: a stream, and a tube with a worker. No Java, no Spark.")
@option("--web", is_flag=True, help="Pages in browsers: each follows the orders of its customer. No Java, no Spark.")
def command(folder: Path | None, lite: bool, web: bool) -> None:
    """Run a demonstration on real data, in about a minute.

    Loads cities of the world into an embedded Postgres, attaches them to a tube, serves it, and lets Spark keep a copy
    in Parquet. At the end it compares the copy with the tables row by row. The exit status is 1 if they differ. Needs
    Java 17 and the extra `demo`. You may end it with Ctrl-C at any time, and run it again.

    With --lite it takes some seconds and needs the extra `embedded` only: a client follows a stream, and a worker keeps
    a copy of a table.

    With --web it serves two pages until you end it: orders change, the daemon is restarted now and then, and each page
    shows the orders of its customer alone. It needs the extras `embedded` and `http`.
    """
    import trio

    from replicad.demo.lite import LiteDemo
    from replicad.demo.run import Demo
    from replicad.demo.web import WebDemo

    if lite and web:
        raise UsageError("give --lite or --web, not both")
    kind, name = (LiteDemo, "demo-lite") if lite else (WebDemo, "demo-web") if web else (Demo, "demo")
    demo: Demo = kind(folder or Path(".replicad") / name)
    if not trio.run(demo.run):
        raise SystemExit(1)
