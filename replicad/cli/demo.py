"""`replicad demo`: runs replicad.demo."""

from __future__ import annotations

from pathlib import Path

import click

from replicad.terminal.command import ReplicadCommand, option


@click.command("demo", cls=ReplicadCommand, log_level="warning", short_help="Run a demonstration on real data.")
@option(
    "--folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    default=".replicad/demo",
    show_default=True,
    help="Folder for the Postgres, the logs and the copy.",
)
def command(folder: Path) -> None:
    """Run a demonstration on real data, in about a minute.

    Loads cities of the world into an embedded Postgres, attaches them to a tube, serves it, and lets Spark keep a copy
    in Parquet. At the end it compares the copy with the tables row by row. The exit status is 1 if they differ. Needs
    Java 17 and the extra `demo`. You may end it with Ctrl-C at any time, and run it again.
    """
    import trio

    from replicad.demo.run import Demo

    if not trio.run(Demo(folder).run):
        raise SystemExit(1)
