"""An outage of Postgres is one trouble: those who only lost their connection report nothing of their own."""

from __future__ import annotations

import pytest

from replicad.daemon.troubles import AWAY_GRACE, DATABASE, Place, Troubles
from replicad.errors import DatabaseUnavailable

OUTAGE = Place(DATABASE, DATABASE, "poll")
BEATS = Place("service", "beats", "write")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def troubles(clock: Clock) -> Troubles:
    return Troubles(clock)


def lose_connection(troubles: Troubles) -> None:
    troubles.fail(*BEATS, DatabaseUnavailable("the connection broke"))


def begin_outage(troubles: Troubles) -> None:
    troubles.begin(*OUTAGE, "Postgres is away", code=DatabaseUnavailable.code)


def places(troubles: Troubles) -> list[Place]:
    return [trouble.place for trouble in troubles.current()]


def test_an_outage_that_is_found_late_ends_the_troubles_that_it_explains(troubles: Troubles, clock: Clock) -> None:
    lose_connection(troubles)
    clock.now += AWAY_GRACE
    lose_connection(troubles)
    troubles.begin("stream", "a", "registry", "there is no table a", code="StreamRefused")
    assert BEATS in places(troubles)

    begin_outage(troubles)
    lose_connection(troubles)

    assert places(troubles) == [Place("stream", "a", "registry"), OUTAGE]


def test_a_connection_that_fails_once_more_after_the_outage_is_no_trouble_yet(troubles: Troubles, clock: Clock) -> None:
    lose_connection(troubles)
    begin_outage(troubles)
    clock.now += 60
    lose_connection(troubles)

    troubles.end(*OUTAGE)
    lose_connection(troubles)
    assert places(troubles) == []

    clock.now += AWAY_GRACE
    lose_connection(troubles)
    assert places(troubles) == [BEATS], "Postgres answers the poller, so this is a trouble of its own"
