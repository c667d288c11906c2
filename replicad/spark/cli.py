"""`replicad pipeline`: send a tube's changes to downstreams, compare them, and keep the history of a table."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicad.config.settings import ClientSettings, DatabaseSettings, read_settings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, ReplicadGroup, option, settings_options
from replicad.terminal.output import as_json_line, echo
from replicad.tracing import exported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from replicad.spark.reports import PipelineResult


@click.group("pipeline", cls=ReplicadGroup, short_help="Keep a downstream in step with a tube, with Spark.")
def command() -> None:
    """Keep a downstream (Parquet files, a Postgres table, your own) in step with a tube, with Spark."""


@command.command(
    "run",
    cls=ReplicadCommand,
    log_level="info",
    epilog="""\b
Example of CONFIG:
  [source]
  tube = "cities"
  port = 9009
  [enrich]
  database = "postgresql://user@host/app"
  table = "shard_{shard:04d}.cities"
  [downstream]
  kind = "parquet"
  folder = "cities"
  [run]
  checkpoint = "checkpoint"
  trigger = "1s\"""",
)
@click.argument("config", type=click.Path(path_type=Path))
@option("--database", metavar="URL", help="Postgres that has the rows; overrides CONFIG. Also REPLICAD_DATABASE.")
@option(
    "--trigger", metavar="SECONDS", help="How often to look for changes, or available_now: end when there are none."
)
@option(
    "--spark-log", metavar="FILE", type=click.Path(path_type=Path), help="Where Spark itself logs. Default: stderr."
)
@option(
    "--rebuild",
    is_flag=True,
    help="If the downstream is another one than that of the checkpoint, schedule a backfill of all rows and go on.",
)
@option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def run(
    config: Path, database: str | None, trigger: str | None, spark_log: Path | None, *, rebuild: bool, as_json: bool
) -> None:
    """Read the pods of a tube, look up the rows, write them downstream, and ack the pods.

    CONFIG is a TOML file, checked before Spark starts. With trigger = "available_now" the command ends when everything
    that was in the tube has been written, and every backfill that was scheduled; otherwise on SIGTERM or Ctrl-C, after
    the current batch. Each batch is logged with its counts.
    """
    settings = read_settings(DatabaseSettings, {"database": database})

    from replicad.spark.local import LOCAL, check_packages, engine_of

    if engine_of(config) == LOCAL:
        check_packages()
        from replicad.spark.local.engine import run_local
        from replicad.spark.local.file import load_local

        local = load_local(config, database=settings.database, trigger=trigger)
        local = replace(local, rebuild=rebuild, tube_schema=settings.tube_schema)
        with exported("replicad-pipeline"), _stop_on_signals() as asked_to_stop:
            result = run_local(local, until=asked_to_stop)
        echo(as_json_line(asdict(result)) if as_json else summary(result))
        return
    from replicad.spark.session import build_session, check_pyspark, settings_of

    check_pyspark()  # pyarrow, which the next two need, comes with the same extra
    from replicad.spark import pipeline
    from replicad.spark.pipeline_config import AVAILABLE_NOW
    from replicad.spark.pipeline_file import load_config

    loaded = load_config(config, database=settings.database, trigger=trigger)
    loaded = replace(loaded, rebuild=rebuild, tube_schema=settings.tube_schema)
    with exported("replicad-pipeline"), _stop_on_signals() as asked_to_stop:

        def make_session() -> SparkSession:
            short = loaded.trigger == AVAILABLE_NOW
            settings = {**settings_of(loaded.checkpoint, short=short), **loaded.spark}
            return build_session(f"replicad {loaded.name}", log_file=spark_log, config=settings)

        result = pipeline.run(loaded, make_session, until=lambda _: asked_to_stop())
    echo(as_json_line(asdict(result)) if as_json else summary(result))


@command.command(
    "init",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad pipeline init shop.toml --database postgresql://user@db1/shop \\
    --to postgresql://user@warehouse/dw
  replicad pipeline init shop.toml --to copy=postgresql://user@dw/dw \\
    --to lake=delta:s3://lake/shop --exclude 'public.audit_*'""",
)
@click.argument("config", type=click.Path(path_type=Path))
@option("--database", metavar="URL", help="Postgres that has the rows. Also REPLICAD_DATABASE.")
@option(
    "--to",
    "targets",
    metavar="[NAME=]TARGET",
    multiple=True,
    required=True,
    help="A downstream: postgresql://..., delta:FOLDER, delta:s3://..., parquet:FOLDER, or https://... of a search "
    "index. May be given several times.",
)
@option("--include", metavar="PATTERN", multiple=True, default=("public.*",), show_default=True, help="Which tables.")
@option("--exclude", metavar="PATTERN", multiple=True, help="Tables that are left out.")
@option("--tube", metavar="NAME", default="pipeline", show_default=True, help="Name of the tube.")
@option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Host of the daemon.")
@option("--port", metavar="PORT", type=int, default=9009, show_default=True, help="Port of the daemon.")
def init(
    *, config: Path, database: str | None, targets: tuple[str, ...], include: tuple[str, ...], exclude: tuple[str, ...],
    tube: str, host: str, port: int,
) -> None:  # fmt: skip
    """Write the file of a pipeline for the tables of a database, attach them to a tube, and backfill them.

    CONFIG is the new file, with engine = "local". Each table gets a shard of its own in the tube. A daemon must have
    been started once with the database, which installs what tubes need. Then start: replicad pipeline run CONFIG.
    """
    settings = read_settings(DatabaseSettings, {"database": database})

    from replicad.spark.local import check_packages

    check_packages()
    from replicad.spark.local.file import named_targets, render, write_new
    from replicad.spark.local.tables import attach_new

    if settings.database is None:
        raise UsageError("give the database that has the rows: --database URL, or REPLICAD_DATABASE")
    text = render(
        settings.database, named_targets(targets), tube=tube, host=host, port=port, include=include, exclude=exclude
    )
    with write_new(config, text) as loaded:
        attached = attach_new(replace(loaded, tube_schema=settings.tube_schema), create=True)
    echo(f"{config}: {len(attached)} tables are attached to tube {tube}, and their backfill is scheduled")
    echo(f"now: replicad pipeline run {config}")


@command.command(
    "verify",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad pipeline verify shop.toml
  replicad pipeline verify shop.toml --sample 1%
  replicad pipeline verify shop.toml --repair""",
)
@click.argument("config", type=click.Path(path_type=Path))
@option("--database", metavar="URL", help="Postgres that has the rows; overrides CONFIG. Also REPLICAD_DATABASE.")
@option("--sample", metavar="SHARE", default="100%", show_default=True, help="Share of the rows, by pages of 50,000.")
@option("--wait", metavar="SECONDS", default="60s", show_default=True, help="How long a difference may be in flight.")
@option("--repair", is_flag=True, help="Touch the ids that differ, so that the pipeline writes them again.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object for each table.")
def verify(*, config: Path, database: str | None, sample: str, wait: str, repair: bool, as_json: bool) -> None:
    """Compare all rows of the source with the rows downstream, by key and column.

    CONFIG is the file of the pipeline, which may run meanwhile: rows that are on their way are looked at again.
    Nothing is written, unless --repair is given. The exit status is 0 if every row is equal, 7 if rows differ or are on
    their way, and 2 if a class of yours cannot be read back and all others are equal.
    """
    settings = read_settings(DatabaseSettings, {"database": database})

    from replicad.spark.local import LOCAL, check_packages, engine_of

    check_packages()
    from replicad.spark import verify as comparing
    from replicad.spark.local.file import load_local
    from replicad.spark.pipeline_file import load_config

    transform, session = None, None
    share, seconds = comparing.share(sample), comparing.wait_of(wait)
    if engine_of(config) == LOCAL:
        loaded = load_local(config, database=settings.database)
    else:
        of_spark = load_config(config, database=settings.database)
        loaded = comparing.as_local(of_spark)
        if of_spark.transform is not None:
            from replicad.spark.session import build_session

            session = build_session(f"replicad {of_spark.name} verify", config=of_spark.spark)
            transform = comparing.transform_of(of_spark, session)
    try:
        reports = comparing.verify(
            replace(loaded, tube_schema=settings.tube_schema),
            sample=share,
            wait=seconds,
            repair=repair,
            transform=transform,
        )
    finally:
        if session is not None:
            session.stop()
    for report in reports:
        echo(as_json_line(report.as_dict()) if as_json else comparing.summary(report))
    comparing.raise_if_different(reports)


@command.command(
    "compact",
    cls=ReplicadCommand,
    epilog="""\b
Example:
  replicad pipeline compact shop.toml""",
)
@click.argument("config", type=click.Path(path_type=Path))
@option("--database", metavar="URL", help="Postgres that has the rows; overrides CONFIG. Also REPLICAD_DATABASE.")
def compact(*, config: Path, database: str | None) -> None:
    """Compact the Delta tables of a pipeline, and remove old files.

    CONFIG is the file of the pipeline, which may run meanwhile: it does the same by itself, when it is due. Files that
    were replaced stay for `keep`. With mode = "changes" all changes but those of the last minute go into the base,
    which takes a minute and more.
    """
    settings = read_settings(DatabaseSettings, {"database": database})

    from replicad.spark.local import LOCAL, check_packages, engine_of

    check_packages()
    from replicad.spark import verify as comparing
    from replicad.spark.local.file import load_local
    from replicad.spark.pipeline_file import load_config
    from replicad.spark.sinks.delta import DeltaSink
    from replicad.spark.sinks.delta_upkeep import compact as compact_table

    if engine_of(config) == LOCAL:
        loaded = load_local(config, database=settings.database)
    else:
        loaded = comparing.as_local(load_config(config, database=settings.database))
    found = False
    for work in comparing.works_of(replace(loaded, tube_schema=settings.tube_schema)):
        if isinstance(work.sink, DeltaSink):
            found = True
            done = compact_table(work.sink)
            text = ", ".join(f"{what}: {number}" for what, number in done.items()) or "nothing to do"
            echo(f"{work.sink.uri}: {text}")
    if not found:
        raise UsageError(f"{config} has no downstream of kind delta")


@command.command(
    "history",
    cls=ReplicadCommand,
    log_level="info",
    short_help="Keep each version of the rows of a table, from its stream of changes.",
    epilog="""\b
Examples:
  replicad pipeline history orders --to postgresql://user@warehouse/dw \\
    --table history.orders
  replicad pipeline history orders --to delta:/srv/lake/orders_history""",
)
@click.argument("stream")
@option("--to", "target", metavar="TARGET", required=True, help="postgresql://... or delta:URI.")
@option("--table", metavar="NAME", help="The table in Postgres. Default: STREAM_history.")
@option("--once", is_flag=True, help="End when the history has all changes that there are now; a snapshot goes on.")
@option("--accept-gap", is_flag=True, help="Continue if changes were removed from the stream before they were read.")
@settings_options(ClientSettings)
def history(
    *, stream: str, target: str, table: str | None, once: bool, accept_gap: bool, **options: Any
) -> None:  # fmt: skip
    """Write each version of the rows of a table, with the times from which and up to which it was valid.

    STREAM is a stream of changes (replicad streams add STREAM --table TABLE --changes --snapshot). It is read from its
    beginning. The downstream has the token, in the transaction of its rows: start the command again at any time. Ctrl-C
    ends it.
    """
    settings = read_settings(ClientSettings, options)

    from replicad.spark.local import check_packages

    check_packages()
    from replicad.client.blocking_client import BlockingClient
    from replicad.spark.history import TableHistory, follow_history, sink_of_history

    written = TableHistory(sink_of_history(target, table or f"{stream}_history"), stream)
    with BlockingClient(
        str(settings.server), name="replicad history", token=settings.token, tls=settings.ssl_context(), keepalive=False
    ) as client:
        follow_history(client, written, stream, once=once, accept_gap=accept_gap)
    echo(f"{stream}: {written.written:,} batches; the history goes up to {written.token or 'the beginning'}")


def summary(result: PipelineResult) -> str:
    """The counts of a run, in one sentence."""
    text = (
        f"{result.batches:,} batches in {result.seconds:,.1f} s: {result.pods:,} pods with {result.ids:,} ids, "
        f"{result.rows_written:,} rows written, {result.rows_deleted:,} deleted"
    )
    return text + (f", {result.garbage:,} of them left over from before the backfill" if result.garbage else "")


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after SIGTERM or SIGINT. Before its first call a signal ends the program at
    once, and so does a second signal.
    """
    gently = wanted = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal wanted
        if wanted or not gently:
            raise KeyboardInterrupt
        wanted = True

    def asked_to_stop() -> bool:
        nonlocal gently
        gently = True
        return wanted

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked_to_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
