"""The report of a running daemon about itself: figures, obstacles to serving, and details. Knows no HTTP.

Each part of the daemon with figures is a `Source`. It declares its figures once (`Family`), so that the table of
docs/metrics.md and the exported figures cannot differ. A source answers from memory and never waits. Figures that
only Postgres knows come from its `look`, which the exporter calls with a limit of time, and only while somebody asks.

The facts of a stream, a tube, a partition or a daemon are columns (`StateColumn`), which all views show.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from replicad.daemon.cuts import Following

GAUGE: Literal["gauge"] = "gauge"
COUNTER: Literal["counter"] = "counter"
HISTOGRAM: Literal["histogram"] = "histogram"

# The upper bounds of the ranges in which delays are counted, in seconds: from what one poll takes to an hour.
# Prometheus estimates a quantile within a range, so ranges are narrow where alerts have their limits.
DELAYS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class Delays:
    """How often which delay was seen: counts for each range of DELAYS and above, and the sum of all in seconds."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(DELAYS) + 1)
        self.seconds = 0.0

    def observe(self, delay: float, number: int) -> None:
        """Count a delay so many times."""
        self.counts[bisect_left(DELAYS, delay)] += number
        self.seconds += delay * number

    def add(self, counts: Sequence[int], seconds: float) -> None:
        """Add counts of the same ranges."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.seconds += seconds

    @property
    def number(self) -> int:
        """How many delays were counted."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Family:
    """One figure: its name, its labels, and what it means. Names and units follow Prometheus' conventions: seconds,
    bytes, `_total` for what only grows.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith("replicad_")
        assert (self.kind == COUNTER) == self.name.endswith("_total"), self.name

    def __call__(self, value: float | Delays, *labels: str) -> Sample:
        """A value, with a text for each label. A histogram has `Delays`, and no other figure has."""
        assert isinstance(value, Delays) == (self.kind == HISTOGRAM), self.name
        assert len(labels) == len(self.labels)
        return Sample(self, labels, value)


class Sample(NamedTuple):
    """One value of a family."""

    family: Family
    labels: tuple[str, ...]
    value: float | Delays


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


# The facts of a stream, tube or daemon, each declared once for all its views.
#
# Views are the lists and details of commands, `top`, `/status`, the figures and the console.
#
# A view asks for its columns and knows none of them. So a new column is an entry in a table of columns, and the code
# that knows its value.

Shown = TypeVar("Shown")


class StateView(enum.Flag):
    """The places that show columns. Figures are a view, too: a column with a `figure` is exported."""

    NONE = 0
    LIST = enum.auto()  # the table of `replicad ... list`
    SHOW = enum.auto()  # `replicad ... show`, and --json of both
    TOP = enum.auto()  # the tables of `replicad top` and `replicad status`
    TOP_JSON = enum.auto()  # the same with --json
    STATUS = enum.auto()  # /status
    CONSOLE = enum.auto()  # the table of the console, which is made of /status


class ConsoleForm(enum.StrEnum):
    """How the console writes a value of `/status`; `console.js` has a function for each."""

    PLAIN = "plain"
    SECONDS = "seconds"
    STATE = "state"
    HOLDER = "holder"
    PROBLEM = "problem"
    LABEL = "label"  # a number that counts nothing
    SOME = "some"  # a number; nothing for 0
    FAILED = "failed"  # the same, marked
    READER = "reader"
    LEASE = "lease"
    OWN_NAME = "own_name"
    ALIVE = "alive"
    LIST = "list"
    HOST = "host"
    TIME = "time"
    AGO = "ago"


def _nothing(_: object) -> None:
    """The value of a column that only has figures."""


@dataclass(frozen=True, slots=True)
class StateColumn(Generic[Shown]):
    """One fact.

    `name`: its key in JSON and its heading in tables of commands; `label`: its heading in the console. `of`: its value
    in JSON. `text`: its value in a table for people, where that differs. `rare`: a table leaves it out where no row has
    a value. `spare`: `top` leaves it out where the terminal is too narrow, 1 first; 0: never.
    `figure`: the exported figure. Its labels name the thing and its value is `of`, or it is missing if that is None.
    Figures with more labels have `samples`.
    """

    name: str
    views: StateView = StateView.NONE
    of: Callable[[Shown], object] = _nothing
    text: Callable[[Shown], object] | None = None
    label: str = ""
    form: ConsoleForm = ConsoleForm.PLAIN
    rare: bool = False
    spare: int = 0
    figure: Family | None = None
    samples: Callable[[Shown], Iterable[Sample]] | None = None


class StateColumns(Generic[Shown]):
    """The columns of one kind of things, in the order of all views. `labels_of`: the labels of its figures."""

    def __init__(self, labels_of: Callable[[Shown], tuple[str, ...]], columns: Sequence[StateColumn[Shown]]) -> None:
        self._labels_of = labels_of
        self._columns = tuple(columns)
        self.families = tuple(one.figure for one in columns if one.figure is not None)

    def of(self, view: StateView) -> list[StateColumn[Shown]]:
        """The columns of a view."""
        return [one for one in self._columns if view in one.views]

    def names(self, view: StateView) -> list[str]:
        """The names of the columns of a view."""
        return [one.name for one in self.of(view)]

    def fields(self, view: StateView, shown: Shown) -> dict[str, object]:
        """The values of a view, for JSON."""
        return {one.name: one.of(shown) for one in self.of(view)}

    def texts(self, view: StateView, shown: Shown) -> dict[str, object]:
        """The values of a view, for a table."""
        return {one.name: (one.text or one.of)(shown) for one in self.of(view)}

    def headings(self, view: StateView, rows: Sequence[Mapping[str, object]]) -> list[str]:
        """The names of the columns of a view that a table with these rows has."""
        return [one.name for one in self.of(view) if not one.rare or any(row.get(one.name) for row in rows)]

    def spare(self, view: StateView) -> list[str]:
        """The names of the columns that a view may leave out, in this order."""
        return [one.name for one in sorted(self.of(view), key=lambda one: one.spare) if one.spare]

    def samples(self, shown: Shown) -> Iterable[Sample]:
        """The values of all figures."""
        for one in self._columns:
            if one.samples is not None:
                yield from one.samples(shown)
            elif one.figure is not None:
                value = one.of(shown)
                if value is not None:
                    assert isinstance(value, int | float | Delays), one.name
                    yield one.figure(value, *self._labels_of(shown))
