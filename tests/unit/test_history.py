"""The points of the console's charts: a lag and a rate every 30 seconds, for an hour, of a bounded number of things."""

from __future__ import annotations

from replicad.daemon.figures import COUNTER, DELAYS, GAUGE, HISTOGRAM, Delays, Family, Sample
from replicad.operations.http import history
from replicad.operations.http.history import COUNTS, LAGS, MOST, POINTS, STEP, History

LAG = Family("replicad_stream_lag_seconds", GAUGE, "", ("stream",))
ROWS = Family("replicad_stream_passed_rows_total", COUNTER, "", ("stream",))
AGE = Family("replicad_tube_oldest_pod_age_seconds", GAUGE, "", ("tube", "partition"))
ACKED = Family("replicad_tube_ack_delay_seconds", HISTOGRAM, "", ("tube",))


async def points(*moments: list[Sample]) -> dict[str, dict[str, list[float | None]]]:
    """What is shown after notes at these moments, STEP apart; only the last points."""
    now: list[Sample] = []

    async def refresh() -> None:
        return

    made = History(lambda: now, refresh)
    for number, samples in enumerate(moments):
        now[:] = samples
        await made.note(1000 + number * STEP)
    shown = made.shown(lambda _, name: name != "secret")
    assert isinstance(shown["series"], list)
    return {one["name"]: {what: one[what][-len(moments) :] for what in ("lag", "rate")} for one in shown["series"]}


async def test_a_lag_is_that_of_the_partition_that_is_furthest_behind_and_a_rate_is_per_second() -> None:
    acked = Delays()
    acked.observe(0.2, 60)
    more = Delays()
    more.add(acked.counts, acked.seconds)
    more.observe(9.0, 30)
    found = await points(
        [LAG(2, "orders"), ROWS(100, "orders"), AGE(1, "cities", "0"), AGE(7, "cities", "1"), ACKED(acked, "cities")],
        [LAG(0, "orders"), ROWS(130, "orders"), AGE(3, "cities", "0"), ACKED(more, "cities")],
    )
    assert found == {
        "orders": {"lag": [2, 0], "rate": [None, 1]},
        "cities": {"lag": [7, 3], "rate": [None, 1]},
    }


async def test_a_counter_that_begins_again_is_no_negative_rate_and_what_is_unknown_stays_unknown() -> None:
    found = await points([LAG(1, "orders"), ROWS(100, "orders")], [ROWS(0, "orders")], [])
    assert found == {"orders": {"lag": [1, None, None], "rate": [None, 0, None]}}


async def test_names_that_the_client_may_not_know_are_left_out() -> None:
    assert await points([LAG(1, "secret"), LAG(1, "orders")]) == {"orders": {"lag": [1], "rate": [None]}}


async def test_the_memory_is_bounded_and_what_is_gone_for_an_hour_is_forgotten() -> None:
    many = [LAG(1, f"s{number}") for number in range(MOST + 10)]
    assert len(await points(many)) == MOST
    assert await points([LAG(1, "gone")], *[[] for _ in range(POINTS)]) == {}


def test_the_figures_of_the_charts_are_exported() -> None:
    from replicad.streams.serving.service import FAMILIES as STREAMS
    from replicad.tubes.serving.service import FAMILIES as TUBES

    assert LAGS.keys() | COUNTS.keys() <= {one.name for one in (*STREAMS, *TUBES)}
    assert history.POINTS * history.STEP == 3600


def test_a_delay_is_counted_in_the_range_below_its_bound() -> None:
    delays = Delays()
    for delay, number in ((0.001, 1), (DELAYS[0], 2), (DELAYS[-1], 3), (DELAYS[-1] + 1, 4)):
        delays.observe(delay, number)
    assert (delays.counts[0], delays.counts[-2], delays.counts[-1], delays.number) == (3, 3, 4, 10)
