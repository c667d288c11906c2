"""Figures for `/metrics`: looks at Postgres, and the formats of Prometheus, OpenMetrics and OTLP.

Postgres is asked only while somebody asks for figures: together, seldom, and never for long.

A scrape never waits for Postgres longer than `LookIntervals.wait`. A look's figures are shown with their age until they
are `LookIntervals.stale` old. Then they are left out, because a figure that does not change would look like good news.

Pages are rendered in slices between which other tasks run, and not in a thread: it would hold the interpreter for 5 ms
at each system call of the event loop.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import structlog
import trio
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from replicad.daemon.figures import COUNTER, DELAYS, GAUGE, HISTOGRAM, Delays, Family, FigureQuery, Figures, Sample
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint
    from opentelemetry.sdk.metrics.export import Metric as OtlpMetric

AGE = Family("replicad_look_age_seconds", GAUGE, "Age of the figures that were read from Postgres.", ("look",))
FAILURES = Family(
    "replicad_look_failures_total", COUNTER, "Looks at Postgres for figures that failed or took too long.", ("look",)
)

MAX_SERIES = 5000  # of one family: a thousand streams with five states
SLICE = 100  # samples, about a millisecond, before other tasks run
SHARED_FOR = 1.0  # seconds for which a rendered page is given again: many scrapers cost as much as one
SHARED = 8  # pages that are kept, by client and format
EOF = b"# EOF\n"  # the end of a page of OpenMetrics

Encode = Callable[[Collector], bytes]

LEFT_OUT = Family(
    "replicad_series_left_out",
    GAUGE,
    f"Series that are not exported: a figure has at most {MAX_SERIES:,}.",
    ("figure",),
)

EVERY = (
    60.0  # seconds between the figures that a collector is sent, as OpenTelemetry has it; OTEL_METRIC_EXPORT_INTERVAL
)
OFTEN = 1.0  # seconds, the shortest of such intervals
TAKES = 10.0  # seconds that a collector has for them

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LookIntervals:
    """Times in seconds."""

    fresh: float = 5.0  # so old may figures be before they are read again: several scrapers share a look
    wait: float = 1.5  # that a scrape waits for them
    limit: float = 5.0  # that a look may take
    stale: float = 60.0  # after which figures are left out


class Looks:
    """The looks of all sources. `run` must be running."""

    def __init__(self, figures: Figures, troubles: Troubles, pace: LookIntervals = LookIntervals()) -> None:
        self._figures = figures
        self._troubles = troubles
        self._pace = pace
        self._at: dict[str, float] = {}  # when each look that succeeded last began
        self._tried: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._wanted = trio.Event()
        self._done = trio.Event()

    async def run(self) -> None:
        """Look whenever `refresh` asks for it, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            async with trio.open_nursery() as nursery:
                for look in self._due():
                    nursery.start_soon(self._look, look)
            self._done.set()
            self._done = trio.Event()

    async def refresh(self) -> None:
        """Have figures that are too old read again, and wait a bounded time for them."""
        if self._due():
            with trio.move_on_after(self._pace.wait):
                done = self._done
                self._wanted.set()
                await done.wait()
        now = trio.current_time()
        for look in self._all():
            if now - self._at.get(look.name, now) > self._pace.stale:
                look.forget()
                del self._at[look.name]

    def samples(self) -> Iterable[Sample]:
        """How old the figures are, and how many looks have failed."""
        now = trio.current_time()
        for name, at in self._at.items():
            yield AGE(now - at, name)
        for look in self._all():
            yield FAILURES(self._failures[look.name], look.name)

    def _all(self) -> list[FigureQuery]:
        return [look for source in self._figures.sources for look in source.looks()]

    def _due(self) -> list[FigureQuery]:
        latest = trio.current_time() - self._pace.fresh
        return [look for look in self._all() if self._tried.get(look.name, float("-inf")) <= latest]

    async def _look(self, look: FigureQuery) -> None:
        began = trio.current_time()
        with self._troubles.contain_and_record("service", "figures", look.name):
            try:
                with trio.fail_after(self._pace.limit):
                    await look.run()
            except trio.TooSlowError as error:
                self._failures[look.name] += 1
                raise DatabaseError(f"the figures of {look.name} took longer than {self._pace.limit:g} s") from error
            except Exception:
                self._failures[look.name] += 1
                raise
            else:
                self._at[look.name] = began
            finally:
                self._tried[look.name] = trio.current_time()


async def gather(
    families: Iterable[Family], samples: Iterable[Sample], admits: Callable[[Sample], bool]
) -> dict[Family, list[Sample]]:
    """The samples by family, without samples that the client may not see. Other tasks run in between."""
    found: dict[Family, list[Sample]] = {family: [] for family in families}
    left_out: dict[Family, int] = {}
    for number, sample in enumerate(samples, 1):
        if number % SLICE == 0:
            await trio.lowlevel.checkpoint()
        if not admits(sample):
            continue
        kept = found[sample.family]
        if len(kept) < MAX_SERIES:
            kept.append(sample)
        else:
            left_out[sample.family] = left_out.get(sample.family, 0) + 1
    found[LEFT_OUT] = [LEFT_OUT(number, family.name) for family, number in left_out.items()]
    return found


class Exposition:
    """Renders pages, one at a time."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = (*families, LEFT_OUT)
        self._turn = trio.CapacityLimiter(1)
        self._pages: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._process = ProcessCollector(registry=None)

    async def page(
        self, client: str, accept: str, samples: Callable[[], Iterable[Sample]], admits: Callable[[Sample], bool]
    ) -> tuple[bytes, str]:
        """A page and its content type. `client` names the rights that `admits` decides by."""
        encode, content_type = choose_encoder(accept)
        key = client, content_type
        async with self._turn:
            made_at, page = self._pages.get(key, (float("-inf"), b""))
            if trio.current_time() >= made_at + SHARED_FOR:
                found = await gather(self._families, samples(), admits)
                page = await self._render(found, encode)
                self._pages[key] = trio.current_time(), page
                self._pages.move_to_end(key)
                while len(self._pages) > SHARED:
                    self._pages.popitem(last=False)
        return page, content_type

    async def _render(self, found: dict[Family, list[Sample]], encode: Encode) -> bytes:
        """The families by name, then the figures of the process."""
        parts = []
        for family in sorted(found, key=lambda one: one.name):
            samples = found[family]
            for at in range(0, max(1, len(samples)), SLICE):
                parts.append(_without(encode(_Part(family, samples[at : at + SLICE])), headers=at > 0))
                await trio.lowlevel.checkpoint()
        parts.append(encode(self._process))  # has the end
        return b"".join(parts)


class _Part(Collector):
    """Some samples of a family, as prometheus-client wants them."""

    def __init__(self, family: Family, samples: Sequence[Sample]) -> None:
        self._family = family
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """One family."""
        name, text, labels = self._family.name, self._family.help, self._family.labels
        if self._family.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for sample in self._samples:
                assert isinstance(sample.value, Delays)
                upto = zip((*map(str, DELAYS), "+Inf"), accumulate(sample.value.counts), strict=True)
                histogram.add_metric(
                    list(sample.labels), [(bound, float(number)) for bound, number in upto], sample.value.seconds
                )
            yield histogram
            return
        metric = (CounterMetricFamily if self._family.kind == COUNTER else GaugeMetricFamily)(name, text, labels=labels)
        for sample in self._samples:
            assert isinstance(sample.value, int | float)
            metric.add_metric(list(sample.labels), sample.value)
        yield metric


def _without(page: bytes, *, headers: bool) -> bytes:
    """A part of a page without its end, and without the lines about the family. No other line begins with `#`."""
    kept = page.removesuffix(EOF)
    if headers:
        kept = b"".join(line for line in kept.splitlines(keepends=True) if not line.startswith(b"#"))
    return kept


class _LastMessage(logging.Handler):
    """The last message of a library that tells its failures by its log alone."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = " ".join(record.getMessage().split())[:500]


async def send_to_collector(
    families: Iterable[Family],
    samples: Callable[[], Iterable[Sample]],
    refresh: Callable[[], Awaitable[None]],
    resource: Mapping[str, str],
) -> None:
    """Send the figures of `/metrics` by OTLP over HTTP, every minute (OTEL_METRIC_EXPORT_INTERVAL, in milliseconds),
    until cancelled. A collector that cannot be reached gets the next figures: sums are cumulative, so nothing is
    missing from them then. Returns at once where the packages are missing, after an event that says so.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    except ImportError as error:  # such variables are often set for all programs of a machine
        log.warning("metrics_not_exported", error=str(error), remedy="pip install 'replicad[otel]'")
        return
    named = Resource.create(
        {"service.name": "replicad", **resource} if not os.environ.get("OTEL_SERVICE_NAME") else resource
    )
    exporter = await trio.to_thread.run_sync(partial(OTLPMetricExporter, timeout=TAKES))
    said = _LastMessage()
    library = logging.getLogger("opentelemetry.exporter.otlp.proto.http")
    library.handlers[:] = [said]  # of one before, if this begins anew
    library.propagate = False  # the events below say it, once
    families, began, failing = (*families, LEFT_OUT), time.time_ns(), False
    while True:
        await refresh()
        found = await gather(families, samples(), lambda _: True)
        metrics, now = [], time.time_ns()
        for family in sorted(found, key=lambda one: one.name):
            points: list[HistogramDataPoint | NumberDataPoint] = []
            for at in range(0, len(found[family]), SLICE):
                points += [_otlp_point(sample, began, now) for sample in found[family][at : at + SLICE]]
                await trio.lowlevel.checkpoint()
            if points:
                metrics.append(_otlp_metric(family, points))
        scope = ScopeMetrics(InstrumentationScope("replicad"), metrics, "")
        data = MetricsData([ResourceMetrics(named, [scope], "")])
        sent = await trio.to_thread.run_sync(exporter.export, data, abandon_on_cancel=True)
        if failing != (sent is not MetricExportResult.SUCCESS):
            failing = not failing
            if failing:
                log.warning(
                    "metrics_not_exported",
                    error=said.text,
                    remedy="see that the collector of OTEL_EXPORTER_OTLP_ENDPOINT answers",
                )
            else:
                log.info("metrics_exported", collector="takes them again")
        await trio.sleep(_interval())


def _interval() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL in seconds; a text that is no number of milliseconds counts as not given."""
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return max(OFTEN, int(text) / 1000) if text.isdecimal() else EVERY


def _otlp_point(sample: Sample, began: int, now: int) -> HistogramDataPoint | NumberDataPoint:
    """A sample as the SDK wants it. Times in nanoseconds since 1970."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    labels, value = dict(zip(sample.family.labels, sample.labels, strict=True)), sample.value
    if not isinstance(value, Delays):
        return NumberDataPoint(labels, began, now, value)
    counts = tuple(value.counts)
    # OTLP needs neither the least nor the greatest, and nobody knows them.
    return HistogramDataPoint(labels, began, now, value.number, value.seconds, counts, DELAYS, None, None)


def _otlp_metric(family: Family, points: Sequence[HistogramDataPoint | NumberDataPoint]) -> OtlpMetric:
    """A family with its points. Units are those that its name ends with, as UCUM writes them."""
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, Sum

    unit = {"seconds": "s", "bytes": "By"}.get(family.name.removesuffix("_total").rpartition("_")[2], "")
    data: Histogram | Sum | Gauge
    if family.kind == HISTOGRAM:
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
    elif family.kind == COUNTER:
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(points)
    return Metric(family.name, family.help, unit, data)
