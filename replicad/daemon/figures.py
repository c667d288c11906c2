"""The report of a running daemon about itself: figures, obstacles to serving, and details. Knows no HTTP.

Each part of the daemon with figures is a `Source`. It declares its figures once (`Family`), so that the table of
docs/operating.md and the exported figures cannot differ. A source answers from memory and never waits. Figures that
only Postgres knows come from its `look`, which the exporter calls with a limit of time, and only while somebody asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from replicad.daemon.clients import Following

GAUGE: Literal["gauge"] = "gauge"
COUNTER: Literal["counter"] = "counter"


@dataclass(frozen=True, slots=True)
class Family:
    """One figure: its name, its labels, and what it means. Names and units follow Prometheus' conventions: seconds,
    bytes, `_total` for what only grows.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith("replicad_")
        assert (self.kind == COUNTER) == self.name.endswith("_total"), self.name

    def __call__(self, value: float, *labels: str) -> Sample:
        """A value, with a text for each label."""
        assert len(labels) == len(self.labels)
        return Sample(self, labels, value)


class Sample(NamedTuple):
    """One value of a family."""

    family: Family
    labels: tuple[str, ...]
    value: float


class Obstacle(NamedTuple):
    """Something that is not served: a `kind` (stream, tube, database, service), its name, and why, as a sentence."""

    kind: str
    name: str
    why: str


class Detail(NamedTuple):
    """One stream, tube or other thing with all that is known of it, for JSON."""

    kind: str
    name: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FigureQuery:
    """A look at Postgres for figures that are not in memory. `run` keeps what it has seen in its source."""

    name: str
    run: Callable[[], Awaitable[None]]
    forget: Callable[[], None]  # called when the last look is too old to be shown


class Source(Protocol):
    """A part of the daemon that tells about itself. Only `looks` wait for anything."""

    @property
    def families(self) -> Sequence[Family]:
        """All figures that `samples` may have."""

    def samples(self) -> Iterable[Sample]:
        """The present values."""

    def obstacles(self) -> Iterable[Obstacle]:
        """Registered streams and tubes that are not served now."""

    def details(self) -> Iterable[Detail]:
        """What the JSON has beside the figures."""

    def looks(self) -> Sequence[FigureQuery]:
        """Its looks at Postgres."""


class Figures:
    """The sources of one daemon. Services add theirs when they are made.

    `catching_up`: what clients, by the number of their connections, are sent beside what they read from journals.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.catching_up: Callable[[], Mapping[int, Sequence[Following]]] = dict

    def add(self, source: Source) -> None:
        """Add a source."""
        self.sources.append(source)
