"""The figures of the streams of one daemon: positions, lag, journals, clients that catch up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from replicad.daemon.figures import COUNTER, GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.daemon.state_columns import StateView
from replicad.postgres.bridge import Database
from replicad.streams.picture import COLUMNS, REFUSED, SERVED, STARTING, WAITING, StreamPicture, state_samples
from replicad.streams.queries import Impatient
from replicad.streams.registry import row_source
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.publisher import REGISTRY, Publisher
from replicad.streams.serving.served_stream import KIND, Serving
from replicad.streams.waiting_rows import count_waiting

CATCHUPS = Family("replicad_catchups", GAUGE, "Subscriptions that are being sent old rows.")
CATCHUPS_WAITING = Family("replicad_catchups_waiting", GAUGE, "Reads of old rows that wait for a connection.")
CATCHUP_READS = Family("replicad_catchup_reads_total", COUNTER, "Pieces of old rows that were read from Postgres.")
CATCHUP_ROWS = Family("replicad_catchup_read_rows_total", COUNTER, "Old rows that were read from Postgres.")
CATCHUP_CACHE = Family("replicad_catchup_cache_bytes", GAUGE, "Memory for old rows that clients share.")
CATCHUP_CACHE_LIMIT = Family("replicad_catchup_cache_limit_bytes", GAUGE, "The most of it (--catchup-bytes).")
FAMILIES = (
    *COLUMNS.families,
    *(CATCHUPS, CATCHUPS_WAITING, CATCHUP_READS, CATCHUP_ROWS, CATCHUP_CACHE, CATCHUP_CACHE_LIMIT),
)


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
            yield from state_samples(name, REFUSED)
        for serving in list(self._publisher.servings.values()):
            yield from COLUMNS.samples(self.picture(serving))
        found = self._catchups.statistics()
        yield CATCHUPS(len(self._catchups.under_way))
        yield CATCHUPS_WAITING(found.waiting)
        yield CATCHUP_READS(found.reads)
        yield CATCHUP_ROWS(found.rows)
        yield CATCHUP_CACHE(found.bytes)
        yield CATCHUP_CACHE_LIMIT(self._catchups.limits.cache_bytes)

    def picture(self, serving: Serving) -> StreamPicture:
        """The picture of one stream, from memory."""
        now, reading, published = trio.current_time(), serving.reading, serving.published
        return StreamPicture(
            stream=serving.stream,
            state=self.state(serving),
            problem=self._publisher.why_not_served(serving),
            position=published,
            horizon=None if reading is None else reading.position,
            last_value=None if reading is None else reading.last_value,
            lag_rows=self._waiting_rows(serving),
            lag_seconds=serving.lag.seconds(published, now),
            held_by=None if reading is None else reading.held_by,
            held_seconds=serving.lag.held_seconds(now),
            feed=serving.feed,
        )

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
            yield Detail(KIND, name, COLUMNS.fields(StateView.STATUS, self.picture(serving)))

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
