"""The figures of a daemon: lag from readings, the table in the docs, and the exporter's bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from replicad.daemon.figures import COUNTER, GAUGE, Family, FigureQuery, Figures, Sample
from replicad.daemon.troubles import Troubles
from replicad.operations.http import metrics
from replicad.positions.horizon import Holder, HolderKind, Reading
from replicad.streams.serving.counts import MARKS, Lag
from tests import figures_page as page

FAMILIES = [one for families in page.PARTS.values() for one in families]


def test_the_tables_in_the_docs_are_what_is_declared() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.render(text) == text, "run `python -m tests.figures_page`"
    sections = "".join(found[0] for found in page.SECTION.finditer(text))
    shown = re.findall(r"^\| `(replicad_\w+)` \|", sections, re.MULTILINE)
    assert sorted(shown) == sorted(one.name for one in FAMILIES), "does every part have a section on the page?"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_units_and_texts_follow_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"replicad_[a-z]+(_[a-z]+)*", family.name)
    assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|count|sum|bucket)(_|$)", family.name)
    assert family.help.endswith(".")
    assert "|" not in family.help, "it stands in a table"
    assert all(re.fullmatch(r"[a-z_]+", label) for label in family.labels)


# --- lag ---


def reading(position: int | None, last: int | None, *, held: bool = False) -> Reading:
    return Reading(position, last_value=last, held_by=Holder(HolderKind.TRANSACTION) if held else None)


def test_lag_begins_when_an_id_is_seen_and_ends_when_it_is_published() -> None:
    lag = Lag()
    lag.observe(reading(10, 10), 100.0, lambda: 10)
    assert lag.seconds(10, 105.0) == 0
    lag.observe(reading(10, 12), 110.0, lambda: 10)
    lag.observe(reading(10, 15), 120.0, lambda: 10)
    assert lag.seconds(10, 130.0) == 20
    assert lag.seconds(11, 130.0) == 20, "12 waits since 110"
    assert lag.seconds(12, 130.0) == 10, "15 waits since 120"
    assert lag.seconds(15, 130.0) == 0


def test_lag_counts_from_what_was_published_and_not_from_what_could_be() -> None:
    lag = Lag()
    for second in range(500):  # the horizon moves on, and the lane that copies hangs at 3
        lag.observe(reading(second, second), float(second), lambda: 3)
    assert lag.seconds(3, 500.0) == 496


def test_a_sequence_that_is_set_back_leaves_no_old_lag() -> None:
    lag = Lag()
    lag.observe(reading(1, 1000), 0.0, lambda: 1)
    lag.observe(reading(1, 5), 50.0, lambda: 1)
    assert lag.seconds(1, 60.0) == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=300))
def test_lag_is_never_too_short_and_its_memory_is_bounded(steps: list[tuple[int, int]]) -> None:
    """Against a list of all that was seen."""
    lag, seen, last, published, now = Lag(), [], 0, 0, 0.0
    for more, done in steps:
        now += 1
        last += more
        published = min(last, published + done)
        lag.observe(reading(published, last), now, lambda: published)  # noqa: B023
        seen.append((now, last))
        exact = next((now - at for at, value in seen if value > published), 0.0)
        assert lag.seconds(published, now) >= exact
        assert published < last or lag.seconds(published, now) == 0
        assert len(lag._marks) <= MARKS + 1


def test_held_back_counts_from_the_last_move_of_the_position() -> None:
    lag = Lag()
    lag.observe(reading(1, 5), 0.0, lambda: 1)
    assert lag.held_seconds(10.0) is None
    lag.observe(reading(1, 6, held=True), 10.0, lambda: 1)
    lag.observe(reading(1, 7, held=True), 20.0, lambda: 1)
    assert lag.held_seconds(30.0) == 20
    lag.observe(reading(2, 7, held=True), 30.0, lambda: 2)
    assert lag.held_seconds(31.0) == 1
    lag.observe(reading(7, 7), 40.0, lambda: 7)
    assert lag.held_seconds(41.0) is None


# --- the exporter ---

SIZE = Family("replicad_some_bytes", GAUGE, "Bytes.", ("stream",))
EVENTS = Family("replicad_events_total", COUNTER, "Events.")


async def test_a_figure_has_a_bounded_number_of_series_and_says_how_many_are_missing() -> None:
    page = metrics.Exposition([SIZE, EVENTS])

    def many() -> Iterator[Sample]:
        yield from (SIZE(number, f"s{number}") for number in range(metrics.MAX_SERIES + 7))
        yield EVENTS(3)

    text, _ = await page.page("", "", many, lambda _: True)
    assert text.count(b"\nreplicad_some_bytes{") == metrics.MAX_SERIES
    assert b'replicad_series_left_out{figure="replicad_some_bytes"} 7.0\n' in text
    assert b"\nreplicad_events_total 3.0\n" in text


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_a_family_of_many_slices_has_one_head_and_the_page_one_end(accept: str) -> None:
    page = metrics.Exposition([SIZE, EVENTS])
    number = 3 * metrics.SLICE + 1
    samples = [SIZE(1, f"# s{one}") for one in range(number)]
    text, _ = await page.page("", accept, lambda: [*samples, EVENTS(2)], lambda _: True)
    lines = text.decode().splitlines()
    assert sum(line.startswith("replicad_some_bytes{") for line in lines) == number
    assert sum(line == "# TYPE replicad_some_bytes gauge" for line in lines) == 1
    assert "replicad_events_total 2.0" in lines
    assert lines.count("# EOF") == bool(accept)
    assert (lines[-1] == "# EOF") == bool(accept)


async def test_labels_with_any_characters_stay_on_their_line() -> None:
    page = metrics.Exposition([SIZE])
    text, _ = await page.page("", "", lambda: [SIZE(1, 'a"b\\c\nreplicad_ready 1')], lambda _: True)
    assert b'replicad_some_bytes{stream="a\\"b\\\\c\\nreplicad_ready 1"} 1.0\n' in text


async def test_other_tasks_run_while_samples_are_gathered() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await metrics.gather([EVENTS], (EVENTS(1) for _ in range(10 * metrics.SLICE)), lambda _: True)
        nursery.cancel_scope.cancel()
    assert turns >= 5


async def test_one_client_is_never_given_the_page_of_another() -> None:
    page = metrics.Exposition([SIZE])
    samples = [SIZE(1, "mine"), SIZE(1, "secret")]
    whole, _ = await page.page("", "", lambda: samples, lambda _: True)
    part, _ = await page.page("billing", "", lambda: samples, lambda one: one.labels == ("mine",))
    assert b"secret" in whole
    assert b"secret" not in part


class Source:
    """A source whose look takes `takes` seconds."""

    families = (SIZE,)

    def __init__(self) -> None:
        self.takes = 0.0
        self.begun = 0
        self.forgotten = 0

    def looks(self) -> list[FigureQuery]:
        return [FigureQuery("some", self._look, self._forget)]

    async def _look(self) -> None:
        self.begun += 1
        await trio.sleep(self.takes)

    def _forget(self) -> None:
        self.forgotten += 1


async def test_a_look_is_bounded_shared_counted_and_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    figures, source, troubles = Figures(), Source(), Troubles()
    figures.add(source)  # type: ignore[arg-type]
    pace = metrics.LookIntervals()
    some = metrics.Looks(figures, troubles, pace)

    def shown() -> dict[str, float]:
        return {one.family.name: one.value for one in some.samples()}

    async with trio.open_nursery() as nursery:
        nursery.start_soon(some.run)
        async with trio.open_nursery() as scrapes:
            for _ in range(10):
                scrapes.start_soon(some.refresh)
        assert source.begun == 1
        assert shown() == {"replicad_look_age_seconds": 0, "replicad_look_failures_total": 0}
        await trio.sleep(pace.fresh + 1)
        source.takes = 1000
        began = trio.current_time()
        await some.refresh()
        assert trio.current_time() - began == pytest.approx(pace.wait)
        await trio.sleep(pace.limit)
        assert shown()["replicad_look_failures_total"] == 1
        assert shown()["replicad_look_age_seconds"] > pace.fresh
        assert troubles.current() == [], "it is counted and logged, and no state"
        assert source.forgotten == 0
        await trio.sleep(pace.stale)
        await some.refresh()
        assert source.forgotten == 1
        assert "replicad_look_age_seconds" not in shown()
        nursery.cancel_scope.cancel()
