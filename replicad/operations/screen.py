"""Pictures of databases as lines for a terminal of any width. Knows no terminal and no database."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from replicad.daemon.state_columns import StateView
from replicad.operations.island import Picture
from replicad.terminal.output import table

TUBE_COLUMNS = (
    "island", "tube", "partition", "holder", "pods", "ids", "lag_s", "backfill", "parked", "in_s", "out_s", "state",
)  # fmt: skip
DAEMON_COLUMNS = ("island", "daemon", "pid", "address", "version", "since_utc", "beat_s", "state")
DROPPED = (
    "ids",
    "out_s",
    "in_s",
    "parked",
    "backfill",
    "version",
    "since_utc",
    "island",
)  # in this order, where a line is too long; of streams the spare columns, and `island`
EMPTY = ("backfill", "parked", "island")  # dropped where no row has any
STATE = 24  # characters that the state has at least
SHORT_STATE = 15  # of a daemon: `silent for 47 s`
NARROW = 20  # characters of a name, where lines are too long all the same
CUT = "..."

Row = Mapping[str, Any]


class Line(NamedTuple):
    """A line, and whether something is wrong."""

    text: str
    wrong: bool = False


def render(pictures: Sequence[Picture], width: int) -> list[Line]:
    """Everything, in lines of at most `width` characters. States that do not fit follow in full."""
    from replicad.streams.picture import COLUMNS

    stream_columns = ("island", *COLUMNS.names(StateView.TOP), "state")
    spare = tuple(one.name for one in COLUMNS.of(StateView.TOP) if one.spare)
    several = len(pictures) > 1
    lines: list[Line] = []
    for columns, room, rows in (
        (stream_columns, STATE, [(one, row) for one in pictures for row in one.streams]),
        (TUBE_COLUMNS, STATE, [(one, row) for one in pictures for row in one.tubes]),
        (DAEMON_COLUMNS, SHORT_STATE, [(one, row) for one in pictures for row in one.daemons]),
    ):
        shown = [
            {**row, **_about(row), "backfill": backfill(row), "island": one.name if several else None}
            for one, row in rows
        ]
        if shown:
            lines += [*_fitted(columns, spare, shown, width, room), Line("")]
        elif columns is TUBE_COLUMNS:
            lines += [*_wrapped("there are no tubes yet: make one with `replicad tubes create`", width), Line("")]
    for one in pictures:
        of = f" of {one.name}" if several else ""
        if one.connected is not None:
            lines += _wrapped(f"daemons{of}: {one.connected or 'none'} connected", width, wrong=not one.connected)
        for remark in one.remarks:
            lines += _wrapped(remark, width, wrong=True)
    reports = {(one.name, row["tube"]): row for one in pictures for row in one.tubes if row.get("report")}
    for row in reports.values():
        lines += _wrapped(_report(row), width)
    return lines


def _about(row: Row) -> Row:
    """Values that are shown otherwise than in JSON: of daemons the pid (it counts nothing), the start, and the age of
    the last beat. Numbers of pods and ids that are estimates are marked with ~.
    """
    if row.get("kind") == "daemon":
        since = str(row["started_at"])[:16].replace("T", " ")
        return {"pid": str(row["pid"]), "since_utc": since, "beat_s": row["silent_s"]}
    if not row.get("estimated"):
        return {}
    return {name: f"~{row[name]:,}" for name in ("pods", "ids")}


def _fitted(columns: Sequence[str], spare: Sequence[str], rows: Sequence[Row], width: int, room: int) -> Iterator[Line]:
    """The table, with the columns for which there is room beside `room` characters of the state. `spare`: columns that
    are left out first.
    """
    left = [one for one in columns if one not in EMPTY or any(row.get(one) for row in rows)]
    drop = [one for one in (*spare, *DROPPED) if one in left]
    lines = table(left, rows).split("\n")
    while lines[0].rindex("state") + room > width and drop:
        left.remove(drop.pop(0))
        lines = table(left, rows).split("\n")
    if lines[0].rindex("state") + room > width:
        rows = [
            {**row, **{one: _short(row.get(one)) for one in ("tube", "stream", "holder", "daemon", "address")}}
            for row in rows
        ]
        lines = table(left, rows).split("\n")
    yield Line(_cut(lines[0], width))
    for line, row in zip(lines[1:], rows, strict=True):
        yield Line(_cut(line, width), bool(row["wrong"]))
    full = dict.fromkeys(
        f"{_name(row)}: {row['state']}" for line, row in zip(lines[1:], rows, strict=True) if len(line) > width
    )
    for sentence in full:
        yield from _wrapped(sentence, width, wrong=True)


def _name(row: Row) -> str:
    if row.get("stream"):
        return f"stream {row['stream']}"
    if row.get("daemon"):
        return f"daemon {row['daemon']}"
    return f"tube {row['tube']}" if row.get("tube") else str(row.get("island") or "database")


def _short(value: object) -> object:
    return f"{value[: NARROW - len(CUT)]}{CUT}" if isinstance(value, str) and len(value) > NARROW else value


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - len(CUT))] + CUT


def _wrapped(text: str, width: int, *, wrong: bool = False) -> list[Line]:
    return [Line(one, wrong) for one in textwrap.wrap(" ".join(text.split()), max(width, 20), subsequent_indent="  ")]


def _report(row: Row) -> str:
    """The last REPORT of a reader of a tube, with all its counts."""
    counts = ", ".join(f"{name} {_count(value)}" for name, value in row["report"].items() if value is not None)
    return f"{row['tube']}: {row['reporter']} reported {max(row['report_s'], 0):.0f} s ago: {counts}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)


def backfill(row: Row) -> str | None:
    """The progress of a backfill: ids written of all ids, and pods that wait."""
    done, total, waiting = row.get("backfill_done"), row.get("backfill_of"), row.get("backfill_pods")
    if done is not None:
        share = f" of {total:,}" if total else ""
        return f"{done:,}{share} ids in, {waiting or 0:,} pods wait"
    return f"{waiting:,} pods wait" if waiting else None
