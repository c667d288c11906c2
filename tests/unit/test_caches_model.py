"""A worker's caches against a model of the world, over random schedules: nothing older than what was told is served."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from replicad.caches.cache import MISSING, Cache, Ticket
from replicad.caches.following import InvalidationFollower
from replicad.caches.registry import Caches
from replicad.client.events import (
    Connected,
    Disconnected,
    GenerationBegan,
    PositionMoved,
    Reset,
    RowBatch,
    TakenUpto,
)
from replicad.errors import ConnectionLost
from tests.lengths import examples

KEYS = st.integers(0, 2)


class World(RuleBasedStateMachine):
    """A table of versions whose changes are rows of a stream, a follower that may be anywhere behind, and loads.

    A row is `(key or None, version)`; its token is its place. The follower keeps its token over a lost connection
    unless the rule says that nothing resumes.
    """

    loads = Bundle("loads")

    def __init__(self) -> None:
        super().__init__()
        self.version = {0: 0, 1: 0, 2: 0}  # committed
        self.rows: list[tuple[int | None, dict[int, int]]] = []
        self.told = {0: 0, 1: 0, 2: 0}  # by rows that were carried out, or that a live connection must have had
        self.at = 0  # the follower's position
        self.open = False
        self.asked: int | None = None  # TAKEN, on its way
        self.before = 0  # rows that were committed when the connection was made
        self.resumable = False
        self.caches = Caches(now=lambda: 0.0)
        self.cache: Cache = self.caches.cache("f", max_entries=2)
        self.following = InvalidationFollower(self.caches, "caches")

    # --- what the follower of a client says of itself ---

    def token(self, stream: str) -> str | None:
        return f"epoch!{self.at}" if self.resumable else "NOW"

    def positions(self, stream: str) -> dict[str, int]:
        return {"master": self.at} if self.resumable else {}

    def take(self, *events: Any) -> None:
        self.following.take(events, self)

    # --- the world ---

    @rule(key=KEYS)
    def change_and_invalidate(self, key: int) -> None:
        self.version[key] += 1
        self.rows.append((key, {key: self.version[key]}))

    @rule()
    def change_all_and_empty(self) -> None:
        self.version = {key: version + 1 for key, version in self.version.items()}
        self.rows.append((None, dict(self.version)))

    # --- the connection ---

    @precondition(lambda self: not self.open)
    @rule()
    def connect(self) -> None:
        self.open = True
        if not self.resumable:
            self.at = len(self.rows)  # NOW
        self.take(Connected("example.com"))
        self.asked = self.before = len(self.rows)

    @precondition(lambda self: self.open and self.asked is not None)
    @rule()
    def say_what_was_taken(self) -> None:
        self.take(TakenUpto("caches", self.asked, 0.0))
        self.asked = None

    @precondition(lambda self: self.open and self.asked is None)
    @rule()
    def tell_the_position(self) -> None:
        self.resumable = True
        self.take(PositionMoved("caches", "master", self.at))

    @precondition(lambda self: self.open and self.at < len(self.rows))
    @rule()
    def deliver(self) -> None:
        self.take(self.next_row())

    @precondition(lambda self: self.open and self.at < len(self.rows))
    @rule(count=st.integers(1, 4), where=st.integers(0, 4), moved=st.booleans())
    def deliver_several_at_once(self, count: int, where: int, moved: bool) -> None:
        """With the answer to TAKEN, and a position, among them."""
        events: list[Any] = []
        while self.at < len(self.rows) and len(events) < count:
            events.append(self.next_row())
        if moved:
            events.insert(where, PositionMoved("caches", "master", self.at))
        if self.asked is not None:
            events.insert(where, TakenUpto("caches", self.asked, 0.0))
            self.asked = None
        self.take(*events)

    def next_row(self) -> RowBatch:
        key, versions = self.rows[self.at]
        self.at += 1
        self.resumable = True
        keys = "null" if key is None else f"[{key}]"
        self.told = {k: max(v, versions.get(k, 0)) for k, v in self.told.items()}
        return RowBatch("caches", "master", self.at, [f'["f",{keys},0]'])

    @rule()
    def lose_the_connection(self) -> None:
        self.open, self.asked = False, None
        self.take(Disconnected(ConnectionLost("cut"), 0.0))

    @rule(while_open=st.booleans())
    def reset(self, while_open: bool) -> None:
        """The server no longer takes the token; or says in mid-connection that ids went back."""
        if while_open != self.open:
            return
        self.resumable = False
        self.at = len(self.rows)
        self.take(Reset("caches", None, None, "token_expired"))

    # --- the program ---

    @rule(target=loads, key=KEYS)
    def begin_to_load(self, key: int) -> tuple[Ticket, int, int]:
        ticket = self.cache.begin((key,))
        return ticket, key, self.version[key]  # read at once, stored whenever

    @rule(load=consumes(loads))
    def store(self, load: tuple[Ticket, int, int]) -> None:
        ticket, _, version = load
        self.cache.store(ticket, version)

    @rule(load=consumes(loads))
    def abandon(self, load: tuple[Ticket, int, int]) -> None:
        self.cache.abandon(load[0])

    @rule(key=KEYS)
    def read_through(self, key: int) -> None:
        if self.cache.get((key,)) is MISSING:
            ticket = self.cache.begin((key,))
            self.cache.store(ticket, self.version[key])

    # --- what must hold ---

    @invariant()
    def nothing_served_is_older_than_what_was_told(self) -> None:
        for key in self.version:
            value = self.cache.get((key,))
            if value is MISSING:
                continue
            assert self.open, "a value is served while nobody would be told that it is old"
            missed = [versions.get(key, 0) for _, versions in self.rows[: self.at]]
            assert value >= max([self.told[key], *missed]), (
                "an invalidation that was carried out, or missed, was ignored"
            )

    @invariant()
    def what_is_live_has_all_that_was_committed_before_it_connected(self) -> None:
        for key in self.version:
            value = self.cache.get((key,))
            if value is not MISSING:
                assert value >= max([0, *(versions.get(key, 0) for _, versions in self.rows[: self.before])])


World.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestWorld = World.TestCase


class Client:
    """What a follower says of itself."""

    def __init__(self, token: str | None, **positions: int) -> None:
        self._token, self._positions = token, positions

    def token(self, stream: str) -> str | None:
        return self._token

    def positions(self, stream: str) -> dict[str, int]:
        return self._positions


LOST = Disconnected(ConnectionLost("cut"), 0.0)


def connected() -> tuple[Caches, Cache, InvalidationFollower]:
    """Live caches, one of which holds a value."""
    caches = Caches()
    cache = caches.cache("f")
    following = InvalidationFollower(caches, "caches")
    following.take([Connected("here")], Client("NOW"))
    cache.store(cache.begin((1,)), "kept")
    assert cache.get((1,)) == "kept"
    return caches, cache, following


@pytest.mark.parametrize("token", [None, "NOW", "EARLIEST"])
def test_a_connection_lost_before_its_first_position_empties_everything(token: str | None) -> None:
    caches, cache, following = connected()
    following.take([LOST], Client(token))
    following.take([Connected("here")], Client(token))
    assert caches.live
    assert cache.get((1,)) is MISSING


def test_caches_are_live_again_when_every_writer_has_got_where_ids_had_been_given_out() -> None:
    caches, cache, following = connected()
    following.take([LOST], Client("5"))
    assert cache.get((1,)) is MISSING
    following.take([PositionMoved("caches", "w1", 7)], Client("6", w1=7, w2=6))
    following.take([Connected("here")], Client("6", w1=7, w2=6))
    assert not caches.live
    following.take([TakenUpto("caches", 7, 0.0)], Client("6", w1=7, w2=6))
    assert "still missing" in str(caches.problem)
    following.take([PositionMoved("caches", "w2", 7)], Client("7", w1=7, w2=7))
    assert cache.get((1,)) == "kept"


def test_a_load_under_way_when_the_connection_is_lost_is_not_kept() -> None:
    _, cache, following = connected()
    before = cache.begin((2,))
    following.take([LOST], Client("5"))
    while_lost = cache.begin((3,))
    assert not cache.store(before, "old")
    following.take([Connected("here")], Client("5", w=5))
    following.take([TakenUpto("caches", 5, 0.0)], Client("5", w=5))
    assert not cache.store(while_lost, "old")
    assert cache.get((1,)) == "kept"


def test_who_tolerates_some_staleness_is_answered_for_so_long_and_no_longer() -> None:
    now = [100.0]
    caches = Caches(tolerate=5.0, now=lambda: now[0])
    cache = caches.cache("f")
    following = InvalidationFollower(caches, "caches")
    following.take([Connected("here")], Client("NOW"))
    cache.store(cache.begin((1,)), "kept")
    following.take([LOST], Client("5"))
    assert cache.get((1,)) == "kept"
    now[0] += 4.9
    following.take([LOST], Client("5"))
    assert cache.get((1,)) == "kept"
    assert not cache.store(cache.begin((2,)), "new"), "nothing is added meanwhile"
    now[0] += 0.2
    assert cache.get((1,)) is MISSING


def test_an_entry_is_not_given_out_longer_than_it_is_proven_to_be_good() -> None:
    """A daemon that is deaf says nothing wrong, and neither do positions that somebody holds back."""
    now = [100.0]
    caches = Caches(max_staleness=10.0, now=lambda: now[0])
    cache = caches.cache("f")
    following = InvalidationFollower(caches, "caches")
    following.take([Connected("here")], Client("NOW"))
    cache.store(cache.begin((1,)), "kept")
    now[0] = 110.0
    assert cache.get((1,)) == "kept"
    assert caches.statistics().live
    now[0] = 110.1
    assert cache.get((1,)) is MISSING
    assert "for 10 s nothing has proven" in str(caches.statistics().problem)
    assert not caches.statistics().live
    following.take([TakenUpto("caches", 7, 1.0)], Client("5", w=6))
    following.take([TakenUpto("caches", 9, 0.0)], Client("5", w=6))
    assert cache.get((1,)) is MISSING
    following.take([PositionMoved("caches", "w", 7)], Client("7", w=7))
    assert cache.get((1,)) == "kept", "as of 109.1, when it was asked"
    now[0] = 119.0
    assert cache.get((1,)) == "kept"
    now[0] = 119.2
    assert cache.get((1,)) is MISSING
    following.take([TakenUpto("caches", 9, 0.0)], Client("9", w=9))
    assert cache.get((1,)) == "kept"


def test_an_answer_of_before_the_ids_went_back_does_not_keep_caches_from_being_proven() -> None:
    now = [100.0]
    caches = Caches(max_staleness=10.0, now=lambda: now[0])
    cache = caches.cache("f")
    following = InvalidationFollower(caches, "caches")
    following.take([Connected("here")], Client("NOW"))
    following.take([Reset("caches", "w", 3, "moved_back")], Client("3", w=3))
    following.take([TakenUpto("caches", 900, 0.0)], Client("3", w=3))
    cache.store(cache.begin((1,)), "kept")
    now[0] = 120.0
    assert cache.get((1,)) is MISSING
    following.take([TakenUpto("caches", 4, 0.0)], Client("4", w=4))
    assert cache.get((1,)) == "kept"


@pytest.mark.parametrize(
    "event",
    [Reset("caches", "w", 3, "moved_back"), Reset("caches", None, 3, "forked"), GenerationBegan("caches", "f0")],
)
def test_values_of_another_generation_are_not_kept_and_loads_under_way_are_not_stored(
    event: Reset | GenerationBegan,
) -> None:
    caches, cache, following = connected()
    cache.store(cache.begin((1,)), "of a lost transaction")
    under_way = cache.begin((2,))
    following.take([event], Client("3", w=3))
    cache.store(under_way, "of a lost transaction")
    assert (cache.get((1,)), cache.get((2,))) == (MISSING, MISSING)
    assert caches.live, "nothing of before is in the caches"
    cache.store(cache.begin((1,)), "new")
    assert cache.get((1,)) == "new"


def test_nothing_is_trusted_that_nobody_follows_any_more() -> None:
    caches, cache, following = connected()
    following.stop("cancelled")
    assert (caches.live, caches.problem, cache.get((1,))) == (False, "cancelled", MISSING)


def test_rows_are_what_the_model_says_they_are() -> None:
    """The model writes rows itself; they are the stream's."""
    caches = Caches(max_staleness=math.inf)
    cache = caches.cache("f")
    caches.stand(live=True)
    cache.store(cache.begin((1,)), "old")
    caches.apply([json.dumps(["f", [1], 0])])
    assert cache.get((1,)) is MISSING
    assert caches.statistics().rows == 1
    assert caches.statistics().malformed == 0
