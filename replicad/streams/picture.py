"""The picture of a stream at one moment, and the columns that all views of it show.

Two modules make it: `status.py` from Postgres, for any command, and `serving/service.py` from the memory of the daemon
that serves the stream. Facts that only the daemon has (readers, journals, counts) are in `served`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from replicad.daemon.figures import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    ConsoleForm,
    Family,
    Sample,
    StateColumn,
    StateColumns,
    StateView,
)
from replicad.positions.horizon import Holder
from replicad.streams.queries import MOST
from replicad.streams.registry import Stream
from replicad.streams.rows import COUNT_LIMIT
from replicad.terminal import holders

if TYPE_CHECKING:
    from replicad.daemon.journal import ChannelStatistics
    from replicad.streams.serving.served_stream import ServedStream

OK, TROUBLED, WAITING, STARTING, REFUSED = STATES = (
    "ok",
    "troubled",
    "waiting",
    "starting",
    "refused",
)  # in one daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPicture:
    """One stream at one moment.

    `position` is the linear position that was published last; None where nothing was published yet. `horizon` is how
    far it could be published by now, `last_value` the last id handed out. `lag_rows` counts the committed rows behind
    `position`; None where they cannot be counted now. `lag_seconds` is how long they may have been waiting, 0 where
    none waits; None where this role cannot see that. `problem` is the sentence to `state`, with the remedy. `held_by`
    is who holds the horizon back, or has the table locked.

    From Postgres, `state` is ok or a short code, `lag_rows` is at most COUNT_LIMIT, `per_writer` has each writer's own
    position, and `published_at` is when `position` moved last. From a daemon, `state` is one of STATES, `lag_rows` is
    at most MOST, `held_seconds` is how long the position has not moved because of `held_by`, and `served` is
    the stream in it (None while it is not served).
    """

    stream: Stream
    state: str
    problem: str | None
    position: int | None
    horizon: int | None
    last_value: int | None
    lag_rows: int | None
    lag_seconds: float | None
    held_by: Holder | None
    per_writer: Mapping[str, int] = field(default_factory=dict)
    published_at: datetime | None = None
    held_seconds: float | None = None
    served: ServedStream | None = None

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self.stream.name

    @property
    def lag_is_capped(self) -> bool:
        """Whether more rows wait than were counted."""
        return self.lag_rows is not None and self.lag_rows >= COUNT_LIMIT


def state_samples(name: str, present: str) -> Iterable[Sample]:
    """The figure of the state of a stream in one daemon."""
    return (_STATE(float(state == present), name, state) for state in STATES)


def _held_samples(one: StreamPicture) -> Iterable[Sample]:
    if one.held_seconds is not None and one.held_by is not None:
        yield _HELD(one.held_seconds, one.name, one.held_by.kind.value)


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _registered(name: str) -> StateColumn[StreamPicture]:
    """A column of the registry, which `show` has."""
    return StateColumn(name, StateView.SHOW, lambda one: getattr(one.stream, name))


def _served(of: Callable[[ServedStream], float]) -> Callable[[StreamPicture], float | None]:
    """A value that only a daemon that serves the stream has."""
    return lambda one: None if one.served is None else of(one.served)


def _figure(name: str, text: str, of: Callable[[ServedStream], float]) -> StateColumn[StreamPicture]:
    """A count that is only exported."""
    kind = COUNTER if name.endswith("_total") else GAUGE
    return StateColumn(name, of=_served(of), figure=Family(name, kind, text, _OF))


def _journal(name: str, text: str, of: Callable[[ChannelStatistics], float]) -> StateColumn[StreamPicture]:
    """A figure of each journal of the stream."""
    family = Family(name, COUNTER if name.endswith("_total") else GAUGE, text, ("stream", "order"))

    def samples(one: StreamPicture) -> Iterable[Sample]:
        for order, lane in () if one.served is None else one.served.lanes.items():
            yield family(of(lane.channel.statistics()), one.name, order)

    return StateColumn(name, figure=family, samples=samples)


def _delay_samples(one: StreamPicture) -> Iterable[Sample]:
    for order, lane in () if one.served is None else one.served.lanes.items():
        yield _DELAY(lane.channel.delays, one.name, order)


_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def kept_words(age: timedelta | None, rows: int | None) -> str | None:
    """The rules by which daemons remove old rows, in words; None: all rows stay."""
    rules = [] if age is None else [_period(age.total_seconds())]
    rules += [] if rows is None else [f"{rows:,} rows"]
    return " and ".join(rules) or None


def _period(seconds: float) -> str:
    return next((f"{seconds / size:g}{unit}" for unit, size in _UNITS if seconds % size == 0), f"{seconds:g}s")


def _lag(one: StreamPicture) -> float | None:
    return None if one.lag_seconds is None else round(one.lag_seconds, 3)


_OF = ("stream",)
_STATE = Family(
    "replicad_stream_state",
    GAUGE,
    "1 for the state that the stream is in, else 0: ok; troubled (served, with a present trouble); waiting (its "
    "readers stay connected, it does not advance); "
    "starting (no first position yet); refused (it cannot be served).",
    ("stream", "state"),
)
_DELAY = Family(
    "replicad_stream_delay_seconds",
    HISTOGRAM,
    "From the first sight of a new row's id until the row is given to the connection of a client that follows the "
    "journal; a count for each row and client. The id is seen when it is given out, mostly before the commit; if both "
    "lie between two polls, up to a pause between polls is not counted.",
    ("stream", "order"),
)
_HELD = Family(
    "replicad_stream_held_back_seconds",
    GAUGE,
    "How long the position has not moved because something holds it back, by its kind; missing if nothing does.",
    ("stream", "kind"),
)
_LIST, _SHOW, _STATUS, _CONSOLE = StateView.LIST, StateView.SHOW, StateView.STATUS, StateView.CONSOLE
_TOP = StateView.TOP | StateView.TOP_JSON

COLUMNS: StateColumns[StreamPicture] = StateColumns(
    lambda one: (one.name,),
    (
        StateColumn("name", _LIST | _SHOW | _CONSOLE, lambda one: one.name, label="Stream"),
        StateColumn("stream", _TOP, lambda one: one.name),
        StateColumn("table", StateView.SHOW | _STATUS | _CONSOLE, lambda one: one.stream.table, label="Table"),
        *map(_registered, ("source", "id_column", "instance_column", "row")),
        StateColumn("method", _SHOW, lambda one: str(one.stream.method)),
        *map(_registered, ("sequence", "positions_table", "epoch")),
        StateColumn("created_at", _SHOW, lambda one: _moment(one.stream.created_at)),
        StateColumn(
            "state", _LIST | _SHOW | _STATUS | _CONSOLE, lambda one: one.state,
            label="State", form=ConsoleForm.STATE, figure=_STATE,
            samples=lambda one: state_samples(one.name, one.state),
        ),
        StateColumn(
            "position", _LIST | _SHOW | _TOP | _STATUS | _CONSOLE, lambda one: one.position,
            label="Position", spare=1,
            figure=Family("replicad_stream_position", GAUGE, "All rows up to this id were published.", _OF),
        ),
        StateColumn("published_at", _SHOW, lambda one: _moment(one.published_at)),
        StateColumn("horizon", _SHOW, lambda one: one.horizon),
        StateColumn(
            "last_value", _SHOW | _STATUS | _CONSOLE, lambda one: one.last_value,
            label="Last id",
            figure=Family(
                "replicad_stream_last_value", GAUGE, "The last id that the stream's sequence gave out.", _OF
            ),
        ),
        StateColumn(
            "lag_rows", _LIST | _SHOW | _TOP | _STATUS | _CONSOLE, lambda one: one.lag_rows,
            text=lambda one: f"over {one.lag_rows:,}" if one.lag_is_capped else one.lag_rows,
            label="Rows waiting",
            figure=Family(
                "replicad_stream_lag_rows",
                GAUGE,
                f"Committed rows above the position, counted up to {MOST:,}; missing while they cannot be counted.",
                _OF,
            ),
        ),
        StateColumn("lag_s", _LIST | _SHOW | _TOP, _lag),
        StateColumn(
            "lag_seconds", _STATUS | _CONSOLE, _lag,
            label="Lag", form=ConsoleForm.SECONDS,
            figure=Family(
                "replicad_stream_lag_seconds",
                GAUGE,
                "Time since the first id above the position was seen; 0 if there is none.",
                _OF,
            ),
        ),
        StateColumn(
            "keep", _LIST | _SHOW | _CONSOLE | _STATUS,
            lambda one: kept_words(one.stream.keep_for, one.stream.keep_rows),
            label="Keeps",
        ),
        *map(_registered, ("trimmed_upto", "max_row")),
        StateColumn("skipped", _SHOW, lambda one: list(one.stream.skipped)),
        StateColumn(
            "writers", _LIST | _SHOW, lambda one: dict(one.stream.writers), text=lambda one: len(one.stream.writers)
        ),
        _figure("replicad_stream_writers", "Writers with a position of their own.", lambda served: len(served.numbers)),
        StateColumn("per_writer", _SHOW, lambda one: dict(one.per_writer)),
        StateColumn(
            "readers", _STATUS | _CONSOLE,
            lambda one: 0 if one.served is None else sum(lane.channel.readers for lane in one.served.lanes.values()),
            label="Readers",
        ),
        _journal("replicad_stream_readers", "Clients that follow the journal.", lambda found: found.readers),
        StateColumn("replicad_stream_delay_seconds", figure=_DELAY, samples=_delay_samples),
        _figure(
            "replicad_stream_sent_rows_total",
            "Rows given to clients, once for each client: new ones from the journal, and old ones while they catch up.",
            lambda served: served.sent.rows,
        ),
        StateColumn(
            "sent_bytes_last_minute", _STATUS | _CONSOLE, _served(lambda served: served.sent.bytes_last_minute),
            label="Bytes sent in the last minute",
            figure=Family(
                "replicad_stream_sent_bytes_last_minute",
                GAUGE,
                "Bytes of rows given to clients in the last 60 seconds, once for each client.",
                _OF,
            ),
        ),
        StateColumn(
            "late_rows", _STATUS, _served(lambda served: served.late_rows),
            figure=Family(
                "replicad_stream_late_rows",
                GAUGE,
                "Rows found at or below a published position: readers missed them.",
                _OF,
            ),
        ),
        _figure(
            "replicad_stream_skipped_rows_total",
            "Rows that the audit found at or below a published position and that had not been sent.",
            lambda served: served.tally.skipped,
        ),
        _figure(
            "replicad_stream_passed_rows_total",
            "Rows that went into a journal, in each order once, and old rows that were counted on their way to "
            "clients.",
            lambda served: served.tally.rows,
        ),
        _figure(
            "replicad_stream_audited_rows_total",
            "Passed rows that the audit has compared with the table.",
            lambda served: served.tally.audited_rows,
        ),
        _figure(
            "replicad_stream_reading_seconds_total", "Time that reading rows took.", lambda served: served.tally.reading
        ),
        _figure(
            "replicad_stream_audit_seconds_total", "Time that the audit took.", lambda served: served.tally.auditing
        ),
        _figure(
            "replicad_stream_rewinds_total",
            "How often readers were sent back to a lower position.",
            lambda served: served.rewinds,
        ),
        StateColumn(
            "held_back", _STATUS | _CONSOLE, lambda one: holders.held_back(one.held_by, one.held_seconds, one.name),
            label="Held back", form=ConsoleForm.HOLDER, figure=_HELD, samples=_held_samples,
        ),
        StateColumn("held_back_by", _LIST | _SHOW, lambda one: holders.in_one_line(one.held_by)),
        StateColumn(
            "problem", _LIST | _SHOW | _STATUS | _CONSOLE, lambda one: one.problem,
            label="Problem", form=ConsoleForm.PROBLEM, rare=True,
        ),
        _journal("replicad_journal_bytes", "Bytes of rows in the journal.", lambda found: found.bytes),
        _journal("replicad_journal_chunks", "Chunks in the journal.", lambda found: found.chunks),
        _journal(
            "replicad_journal_fill_ratio",
            "How full the journal is, 0 to 1: of its bytes or chunks, the larger.",
            lambda found: found.fill,
        ),
        _journal(
            "replicad_journal_written_bytes_total", "Bytes put into the journal.", lambda found: found.appended_bytes
        ),
        _journal(
            "replicad_journal_dropped_readers_total",
            "Readers that were dropped because they were too slow.",
            lambda found: found.fallen,
        ),
        _journal(
            "replicad_journal_waited_seconds_total",
            "Time that the journal waited for its slowest readers.",
            lambda found: found.waited_s,
        ),
    ),
)  # fmt: skip
