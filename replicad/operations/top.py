"""`replicad top`: streams, every partition of every tube, and daemons, live; problems are marked."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import click

from replicad.config.declaring import SECONDS
from replicad.config.settings import DatabaseSettings, colour_allowed, read_settings
from replicad.errors import ReplicadError
from replicad.operations.island import Island, Picture
from replicad.operations.screen import Line, render
from replicad.terminal.command import ReplicadCommand, ValueType, json_option, option
from replicad.terminal.database import database_url, run_async
from replicad.terminal.failures import DONE, exit_of
from replicad.terminal.output import as_json_line, echo
from replicad.tubes.cli.islands import island_options

WIDE = 1000  # columns of an output that is no terminal: nothing is cut


@click.command("top", cls=ReplicadCommand, short_help="Watch streams, tubes and daemons live, with their problems.")
@option("--once", is_flag=True, help="Print once and end. This is the default if the output is not a terminal.")
@option(
    "--interval",
    type=ValueType(SECONDS, 0.2, 3600),
    default="2",
    show_default=True,
    help="Time between two looks.",
)
@option(
    "--warn",
    type=ValueType(SECONDS),
    default="60",
    show_default=True,
    help="Mark rows and pods that have waited for longer than this.",
)
@json_option
@island_options
def command(once: bool, interval: float, warn: float, as_json: bool, **options: Any) -> int:
    """Watch the streams, every partition of every tube, and the daemons.

    lag_s is the age of the oldest regular pod, or how long rows of a stream may have been waiting. in_s and out_s are
    the pods of the whole tube per second since the last look. A partition is marked if its worker is silent for longer
    than its lease, as a daemon or this command has seen it; if pods, or pods of a backfill, wait and no worker has the
    lease; if its lag is above --warn; if a transaction that is open for longer than --warn holds its tube back; if ids
    are parked; and if its tube cannot be served or a daemon reports a trouble of it. A stream is marked if it cannot be
    served, or waits. An island that cannot be reached is shown as such and tried again; with --once, and if none can,
    the exit status says why. Below the tables are the daemons, their own troubles, and the last counts that a reader of
    each tube has reported, such as the last micro-batch of a pipeline. Columns for which the terminal is too narrow are
    left out.
    """
    once = once or as_json or not sys.stdout.isatty()
    with ExitStack() as stack:
        islands = []
        for url in options.get("database") or (None,):
            settings = read_settings(DatabaseSettings, {**options, "database": url})
            island = Island(settings, warn, longest_gap=interval + 5)
            island.url = stack.enter_context(database_url(settings))
            islands.append(island)
        error = run_async(partial(_watch, islands, once, interval, as_json))
    return DONE.status if error is None else exit_of(type(error)).status


async def _watch(islands: Sequence[Island], once: bool, interval: float, as_json: bool) -> ReplicadError | None:
    """Watch until Ctrl-C. With `once`: look once, and return why the first island cannot be shown, if none can."""
    import trio

    with trio.open_signal_receiver(signal.SIGWINCH) as resized:
        while True:
            pictures = [await island.look() for island in islands]
            error = pictures[0].unusable
            if error is not None and all(one.unusable for one in pictures):
                raise error
            if as_json:
                _print_json(pictures)
            else:
                show(pictures, live=not once)
            if once:
                return pictures[0].error if all(one.error for one in pictures) else None
            with trio.move_on_after(interval):
                async for _ in resized:
                    show(pictures, live=True)


def _print_json(pictures: Sequence[Picture]) -> None:
    """A row for each partition, stream and daemon; with several islands each names its own."""
    for one in pictures:
        for row in (*one.tubes, *one.streams, *one.daemons):
            island: Mapping[str, Any] = {"island": one.name} if len(pictures) > 1 else {}
            echo(as_json_line({**island, **row}))


def show(pictures: Sequence[Picture], *, live: bool, heading: Sequence[str] = ()) -> None:
    """Print the pictures. `live`: on the whole of the terminal, as it is now."""
    size = shutil.get_terminal_size()
    lines = render(pictures, size.columns if sys.stdout.isatty() else WIDE)
    if live:
        title = time.strftime("replicad top  %H:%M:%S   (Ctrl-C ends it)")
        lines = [Line(title[: size.columns]), Line(""), *lines]
        if not is_dumb():
            if len(lines) >= size.lines:
                more = len(lines) - size.lines + 2
                lines = [*lines[: max(0, size.lines - 2)], Line(f"and {more} lines more")]
            click.clear()
    colour = colour_allowed() and not is_dumb()
    for line in (*map(Line, heading), *lines):
        echo(line.text, fg="red" if line.wrong and colour else None)


def is_dumb() -> bool:
    """Whether the terminal knows no colours and cannot be cleared: pictures then follow one another."""
    return os.environ.get("TERM", "") in ("dumb", "")
