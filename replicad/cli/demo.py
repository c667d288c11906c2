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
    help="Folder for the Postgres, the logs and the copy. Default: .replicad/demo, with --lite .replicad/demo-lite.",
)
@option("--lite", is_flag=True, help="The small one: a stream, and a tube with a worker. No Java, no Spark.")
def command(folder: Path | None, lite: bool) -> None:
    """Run a demonstration on real data, in about a minute.

    Loads cities of the world into an embedded Postgres, attaches them to a tube, serves it, and lets Spark keep a copy
    in Parquet. At the end it compares the copy with the tables row by row. The exit status is 1 if they differ. Needs
    Java 17 and the extra `demo`. You may end it with Ctrl-C at any time, and run it again.

    With --lite it takes some seconds and needs the extra `embedded` only: a client follows a stream, and a worker keeps
    a copy of a table.
    """
    import trio

    from replicad.demo.lite import LiteDemo
    from replicad.demo.run import Demo

    base = Path(".replicad")
    demo = LiteDemo(folder or base / "demo-lite") if lite else Demo(folder or base / "demo")
    if not trio.run(demo.run):
        raise SystemExit(1)
