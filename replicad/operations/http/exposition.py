"""Samples in the formats of Prometheus and OpenMetrics, rendered in slices between which other tasks run.

Not in a thread: it would hold the interpreter for 5 ms at each system call of the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import trio
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from replicad.daemon.figures import COUNTER, GAUGE, Family, Sample

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
        kind = CounterMetricFamily if self._family.kind == COUNTER else GaugeMetricFamily
        metric = kind(self._family.name, self._family.help, labels=self._family.labels)
        for sample in self._samples:
            metric.add_metric(list(sample.labels), sample.value)
        yield metric


def _without(page: bytes, *, headers: bool) -> bytes:
    """A part of a page without its end, and without the lines about the family. No other line begins with `#`."""
    kept = page.removesuffix(EOF)
    if headers:
        kept = b"".join(line for line in kept.splitlines(keepends=True) if not line.startswith(b"#"))
    return kept
