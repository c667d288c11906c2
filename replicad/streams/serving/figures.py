"""The figures of the streams of one daemon: positions, lag, journals, clients that catch up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import trio

from replicad.daemon.figures import COUNTER, GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.postgres.bridge import Database
from replicad.streams.queries import Impatient
from replicad.streams.registry import row_source
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.publisher import REGISTRY, Publisher
from replicad.streams.serving.served_stream import KIND, Serving
from replicad.streams.waiting_rows import MOST, count_waiting
from replicad.terminal.holders import held_back

SERVED, WAITING, STARTING, REFUSED = STATES = ("served", "waiting", "starting", "refused")
_OF, _ORDER = ("stream",), ("stream", "order")

STATE = Family(
    "replicad_stream_state",
    GAUGE,
    "1 for the state that the stream is in, else 0: served; waiting (its readers stay connected, it does not advance); "
    "starting (no first position yet); refused (it cannot be served).",
    ("stream", "state"),
)
POSITION = Family("replicad_stream_position", GAUGE, "All rows up to this id were published.", _OF)
LAST_VALUE = Family("replicad_stream_last_value", GAUGE, "The last id that the stream's sequence gave out.", _OF)
LAG_SECONDS = Family(
    "replicad_stream_lag_seconds", GAUGE, "Time since the first id above the position was seen; 0 if there is none.",
    _OF,
)  # fmt: skip
LAG_ROWS = Family(
    "replicad_stream_lag_rows",
    GAUGE,
    f"Committed rows above the position, counted up to {MOST:,}; missing while they cannot be counted.",
    _OF,
)
HELD = Family(
    "replicad_stream_held_back_seconds",
    GAUGE,
    "How long the position has not moved because something holds it back, by its kind; missing if nothing does.",
    ("stream", "kind"),
)
LATE_ROWS = Family(
    "replicad_stream_late_rows",
    GAUGE,
    "Rows found at or below a published position: readers missed them.",
    _OF,
)
SKIPPED = Family(
    "replicad_stream_skipped_rows_total",
    COUNTER,
    "Rows that the audit found at or below a published position and that had not been sent.",
    _OF,
)
PASSED = Family(
    "replicad_stream_passed_rows_total",
    COUNTER,
    "Rows that went into a journal, in each order once, and old rows that were counted on their way to clients.",
    _OF,
)
AUDITED = Family(
    "replicad_stream_audited_rows_total",
    COUNTER,
    "Passed rows that the audit has compared with the table.",
    _OF,
)
READING_S = Family("replicad_stream_reading_seconds_total", COUNTER, "Time that reading rows took.", _OF)
AUDIT_S = Family("replicad_stream_audit_seconds_total", COUNTER, "Time that the audit took.", _OF)
REWINDS = Family("replicad_stream_rewinds_total", COUNTER, "How often readers were sent back to a lower position.", _OF)
WRITERS = Family("replicad_stream_writers", GAUGE, "Writers with a position of their own.", _OF)
READERS = Family("replicad_stream_readers", GAUGE, "Clients that follow the journal.", _ORDER)
ROWS_SENT = Family(
    "replicad_stream_sent_rows_total",
    COUNTER,
    "Rows given to clients, once for each client: new ones from the journal, and old ones while they catch up.",
    _OF,
)
JOURNAL_BYTES = Family("replicad_journal_bytes", GAUGE, "Bytes of rows in the journal.", _ORDER)
JOURNAL_CHUNKS = Family("replicad_journal_chunks", GAUGE, "Chunks in the journal.", _ORDER)
JOURNAL_FILL = Family(
    "replicad_journal_fill_ratio", GAUGE, "How full the journal is, 0 to 1: of its bytes or chunks, the larger.", _ORDER
)
JOURNAL_WRITTEN = Family("replicad_journal_written_bytes_total", COUNTER, "Bytes put into the journal.", _ORDER)
JOURNAL_DROPPED = Family(
    "replicad_journal_dropped_readers_total", COUNTER, "Readers that were dropped because they were too slow.", _ORDER
)
JOURNAL_WAITED = Family(
    "replicad_journal_waited_seconds_total",
    COUNTER,
    "Time that the journal waited for its slowest readers.",
    _ORDER,
)
CATCHUPS = Family("replicad_catchups", GAUGE, "Subscriptions that are being sent old rows.")
CATCHUPS_WAITING = Family("replicad_catchups_waiting", GAUGE, "Reads of old rows that wait for a connection.")
CATCHUP_READS = Family("replicad_catchup_reads_total", COUNTER, "Pieces of old rows that were read from Postgres.")
CATCHUP_ROWS = Family("replicad_catchup_read_rows_total", COUNTER, "Old rows that were read from Postgres.")
CATCHUP_CACHE = Family("replicad_catchup_cache_bytes", GAUGE, "Memory for old rows that clients share.")
CATCHUP_CACHE_LIMIT = Family("replicad_catchup_cache_limit_bytes", GAUGE, "The most of it (--catchup-bytes).")
FAMILIES = (
    STATE, POSITION, LAST_VALUE, LAG_SECONDS, LAG_ROWS, HELD, LATE_ROWS, SKIPPED, PASSED, AUDITED,
    READING_S, AUDIT_S, REWINDS, WRITERS, READERS, ROWS_SENT,
    JOURNAL_BYTES, JOURNAL_CHUNKS, JOURNAL_FILL, JOURNAL_WRITTEN, JOURNAL_DROPPED, JOURNAL_WAITED, CATCHUPS,
    CATCHUPS_WAITING, CATCHUP_READS, CATCHUP_ROWS, CATCHUP_CACHE, CATCHUP_CACHE_LIMIT,
)  # fmt: skip


class StreamFigures:
    """`Source` for streams. `db`: the pool on which waiting rows are counted."""

    def __init__(self, publisher: Publisher, catchups: Catchups, db: Database, schema: str) -> None:
        self._publisher = publisher
        self._catchups = catchups
        self._db = db
        self._schema = schema
        self._rows: dict[str, int | None] = {}  # what the last look has counted

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        for name in list(self._publisher.faulty):
            yield from _state(name, REFUSED)
        for serving in list(self._publisher.servings.values()):
            yield from self._of(serving)
        found = self._catchups.statistics()
        yield CATCHUPS(len(self._catchups.under_way))
        yield CATCHUPS_WAITING(found.waiting)
        yield CATCHUP_READS(found.reads)
        yield CATCHUP_ROWS(found.rows)
        yield CATCHUP_CACHE(found.bytes)
        yield CATCHUP_CACHE_LIMIT(self._catchups.limits.cache_bytes)

    def _of(self, serving: Serving) -> Iterable[Sample]:
        name, reading, published, now = serving.name, serving.reading, serving.published, trio.current_time()
        yield from _state(name, self.state(serving))
        yield LAG_SECONDS(serving.lag.seconds(published, now), name)
        if published is not None:
            yield POSITION(published, name)
        if reading is not None and reading.last_value is not None:
            yield LAST_VALUE(reading.last_value, name)
        rows = self._waiting_rows(serving)
        if rows is not None:
            yield LAG_ROWS(rows, name)
        held = serving.lag.held_seconds(now)
        if held is not None and reading is not None and reading.held_by is not None:
            yield HELD(held, name, reading.held_by.kind.value)
        feed = serving.feed
        if feed is None:
            return
        yield LATE_ROWS(feed.late_rows, name)
        tally = feed.tally
        yield SKIPPED(tally.skipped, name)
        yield PASSED(tally.rows, name)
        yield AUDITED(tally.audited_rows, name)
        yield READING_S(tally.reading, name)
        yield AUDIT_S(tally.auditing, name)
        yield REWINDS(feed.rewinds, name)
        yield WRITERS(len(feed.numbers), name)
        given = sum(lane.given_rows for lane in feed.lanes.values())
        yield ROWS_SENT(given + self._catchups.sent_rows[name], name)
        for order, lane in feed.lanes.items():
            journal, limits = lane.channel.statistics(), lane.channel.limits
            yield READERS(journal.readers, name, order)
            yield JOURNAL_BYTES(journal.bytes, name, order)
            yield JOURNAL_CHUNKS(journal.chunks, name, order)
            fill = max(journal.bytes / limits.max_bytes, journal.chunks / limits.max_chunks)
            yield JOURNAL_FILL(fill, name, order)
            yield JOURNAL_WRITTEN(journal.appended_bytes, name, order)
            yield JOURNAL_DROPPED(journal.fallen, name, order)
            yield JOURNAL_WAITED(journal.waited_s, name, order)

    def state(self, serving: Serving) -> str:
        """One of STATES."""
        if serving.feed is not None:
            return SERVED if self._publisher.why_not_served(serving) is None else WAITING
        return STARTING if serving.obstacle is None else REFUSED

    def _waiting_rows(self, serving: Serving) -> int | None:
        return 0 if _is_at_the_end(serving) else self._rows.get(serving.name)

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        if not self._publisher.running:
            yield Obstacle(
                "service", "publisher", "the streams are not served yet, or are started again after a failure"
            )
        if self._publisher.registry_fault is not None:
            yield Obstacle("service", REGISTRY, f"the registry of streams: {self._publisher.registry_fault}")
        for name, why in self._publisher.faulty.items():
            yield Obstacle(KIND, name, f"stream {name} cannot be served: {why}")
        for name, serving in self._publisher.servings.items():
            reason = self._publisher.why_not_served(serving)
            if reason is not None:
                yield Obstacle(KIND, name, f"stream {name} is {self.state(serving)}: {reason}")

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        for name, why in self._publisher.faulty.items():
            yield Detail(KIND, name, {"state": REFUSED, "problem": why})
        for name, serving in self._publisher.servings.items():
            yield Detail(KIND, name, self._detail(serving))

    def _detail(self, serving: Serving) -> Mapping[str, object]:
        now, reading, feed = trio.current_time(), serving.reading, serving.feed
        holder = None if reading is None else reading.held_by
        return {
            "state": self.state(serving),
            "problem": self._publisher.why_not_served(serving),
            "position": serving.published,
            "last_value": None if reading is None else reading.last_value,
            "lag_seconds": round(serving.lag.seconds(serving.published, now), 3),
            "lag_rows": self._waiting_rows(serving),
            "held_back": held_back(holder, serving.lag.held_seconds(now)),
            "readers": 0 if feed is None else sum(lane.channel.readers for lane in feed.lanes.values()),
            "late_rows": 0 if feed is None else feed.late_rows,
        }

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (FigureQuery("streams", self._count, self._rows.clear),)

    async def _count(self) -> None:
        """Count the rows that wait. Streams of which nothing can wait are not asked for."""
        sources = {
            name: (row_source(serving.stream, schema=self._schema), published)
            for name, serving in self._publisher.servings.items()
            if (published := serving.published) is not None
            and serving.stream.denied is None
            and not _is_at_the_end(serving)
        }
        for name in self._rows.keys() - sources.keys():
            del self._rows[name]
        if sources:
            await count_waiting(Impatient(self._db), sources, self._rows)


def _is_at_the_end(serving: Serving) -> bool:
    """Whether no id is known above the position."""
    reading, published = serving.reading, serving.published
    if reading is None or reading.last_value is None or published is None:
        return False
    return reading.last_value <= published


def _state(name: str, present: str) -> Iterable[Sample]:
    return (STATE(float(state == present), name, state) for state in STATES)
