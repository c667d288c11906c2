"""Samples in the formats of Prometheus and OpenMetrics. Rendering runs in a thread, beside the replication."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import trio
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from replicad.daemon.figures import COUNTER, GAUGE, Family, Sample

MAX_SERIES = 5000  # of one family: a thousand streams with five states
SLICE = 500  # samples, about a millisecond, before other tasks run
SHARED_FOR = 1.0  # seconds for which a rendered page is given again: many scrapers cost as much as one
SHARED = 8  # pages that are kept, by client and format

LEFT_OUT = Family(
    "replicad_series_left_out",
    GAUGE,
    f"Series that are not exported: a figure has at most {MAX_SERIES:,}.",
    ("figure",),
)


async def gather(
    families: Iterable[Family], samples: Iterable[Sample], admits: Callable[[Sample], bool]
) -> dict[Family, list[Sample]]:
    """The samples by family, without those that the client may not see. Other tasks run in between."""
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
                page = await trio.to_thread.run_sync(encode, _Found(found, self._process))
                self._pages[key] = trio.current_time(), page
                self._pages.move_to_end(key)
                while len(self._pages) > SHARED:
                    self._pages.popitem(last=False)
        return page, content_type


class _Found(Collector):
    """What was gathered, and the figures of the process, as prometheus-client wants it."""

    def __init__(self, found: dict[Family, list[Sample]], process: Collector) -> None:
        self._found = found
        self._process = process

    def collect(self) -> Iterator[Metric]:
        """The families, by name."""
        for family in sorted(self._found, key=lambda one: one.name):
            kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for sample in self._found[family]:
                metric.add_metric(list(sample.labels), sample.value)
            yield metric
        yield from self._process.collect()
