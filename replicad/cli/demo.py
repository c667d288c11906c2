"""`replicad demo`: the whole of replicad on real data; see replicad.demo."""

from __future__ import annotations

from pathlib import Path

import click

from replicad.terminal.command import ReplicadCommand, option


@click.command("demo", cls=ReplicadCommand, log_level="warning", short_help="See the whole of it at work on real data.")
@option(
    "--folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    default=".replicad/demo",
    show_default=True,
    help="Where its Postgres, its logs and the copy are kept.",
)
def command(folder: Path) -> None:
    """See the whole of it at work on real data, in about a minute.

    Loads cities of the world into an embedded Postgres, attaches them to a tube, serves it, and has Spark keep a copy
    in Parquet, which is compared with the tables row by row. Exit status 1 where they are not equal. Needs Java 17
    and the extra `demo`; may be run again, and be ended by Ctrl-C at any time.
    """
    import trio

    from replicad.demo.run import Demo

    if not trio.run(Demo(folder).run):
        raise SystemExit(1)
