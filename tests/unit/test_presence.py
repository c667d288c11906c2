"""Who is online here, against a model that keeps everything and thinks nothing; beats; and what USER_IP may say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicad.errors import PresenceRefused
from replicad.presence.commands import UserIp
from replicad.presence.repository import MAX_AGENT, Sightings, read
from replicad.presence.roster import Roster
from tests.lengths import examples

users = st.sampled_from(["@a", "@b", "@c"])
instances = st.sampled_from(["w1", "w2"])
devices = st.sampled_from([None, "P", "L"])
connections = st.integers(1, 3)


@dataclass
class Said:
    """One thing that makes a user online at an instance: a device on a connection, or a leaving until a time."""

    user: str
    instance: str
    device: str | None = None
    connection: int | None = None
    until: float = math.inf


class RosterAgainstAModel(RuleBasedStateMachine):
    """The model is a list of all that was said and is still true. The database is one that loses answers."""

    @initialize(grace=st.sampled_from([0.0, 3.0]), lost_grace=st.sampled_from([0.0, 5.0]))
    def begin(self, grace: float, lost_grace: float) -> None:
        self.now = 100.0
        self.grace, self.lost_grace = grace, lost_grace
        self.roster = Roster(1000, grace, lost_grace)
        self.said: list[Said] = []
        self.database: dict[str, bool] = {}

    def leave(self, user: str, instance: str, grace: float) -> None:
        if not any(s.user == user and s.instance == instance for s in self.said) and grace > 0:
            self.said.append(Said(user, instance, until=self.now + grace))

    @rule(connection=connections, instance=instances, user=users, device=devices)
    def start(self, connection: int, instance: str, user: str, device: str | None) -> None:
        self.roster.start(connection, instance, user, device)
        self.said = [
            s
            for s in self.said
            if (s.user, s.instance) != (user, instance) or (s.connection is not None and s.device != device)
        ]
        self.said.append(Said(user, instance, device, connection))

    @rule(instance=instances, user=users, device=devices)
    def end(self, instance: str, user: str, device: str | None) -> None:
        self.roster.end(instance, user, device, self.now)
        kept = [
            s for s in self.said if s.connection is None or (s.user, s.instance, s.device) != (user, instance, device)
        ]
        ended, self.said = len(kept) < len(self.said), kept
        if ended:
            self.leave(user, instance, self.grace)

    @rule(instance=instances, only_leaving=st.booleans())
    def clear(self, instance: str, only_leaving: bool) -> None:
        self.roster.clear(instance, only_leaving=only_leaving)
        self.said = [s for s in self.said if s.instance != instance or (only_leaving and s.connection is not None)]

    @rule(connection=connections)
    def lose(self, connection: int) -> None:
        self.roster.lose(connection, self.now)
        lost = [s for s in self.said if s.connection == connection]
        self.said = [s for s in self.said if s.connection != connection]
        for s in lost:
            self.leave(s.user, s.instance, self.lost_grace)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        deadline = min((s.until for s in self.said), default=math.inf)
        assert self.roster.next_deadline() == deadline
        self.now += seconds
        self.roster.expire(self.now)
        self.said = [s for s in self.said if s.until > self.now]

    @rule(grace=st.sampled_from([0.0, 1.0, 3.0]), lost_grace=st.sampled_from([0.0, 2.0, 5.0]))
    @precondition(lambda self: not any(s.connection is None for s in self.said))
    def configure(self, grace: float, lost_grace: float) -> None:
        self.roster.configure(grace, lost_grace, self.now)
        self.grace, self.lost_grace = grace, lost_grace

    @rule(limit=st.integers(1, 3), outcome=st.sampled_from(["heard", "answer lost", "not heard"]))
    def tell(self, limit: int, outcome: str) -> None:
        changes = self.roster.take(limit)
        assert len({change.user for change in changes}) == len(changes) <= limit
        if outcome != "not heard":
            self.database |= {change.user: change.online for change in changes}
        if outcome == "heard":
            self.roster.confirm(changes)

    @rule()
    def begin_anew(self) -> None:
        self.database.clear()
        self.roster.write_anew()

    @invariant()
    def the_database_will_know(self) -> None:
        online = {s.user for s in self.said}
        while changes := self.roster.take(2):
            self.database |= {change.user: change.online for change in changes}
            self.roster.confirm(changes)
        assert not self.roster.has_changes
        assert {user for user, there in self.database.items() if there} == online
        seen = self.roster.statistics()
        leaving = sum(s.connection is None for s in self.said)
        assert (seen.users, seen.devices, seen.leaving) == (len(online), len(self.said) - leaving, leaving)
        assert seen.places == len(self.said), "nothing is kept of those who are gone"


class RosterUntold(RosterAgainstAModel):
    """The same where the database hears only now and then: what is not told yet is kept, and counted."""

    @rule()
    def be_told_all(self) -> None:
        RosterAgainstAModel.the_database_will_know(self)

    @rule(user=users)
    def come_and_go_while_an_answer_is_lost(self, user: str) -> None:
        self.start(9, "w3", user, None)
        self.tell(3, "answer lost")
        self.clear("w3", only_leaving=False)

    @invariant()
    def the_database_will_know(self) -> None:
        seen = self.roster.statistics()
        assert seen.places >= len(self.said)
        assert seen.users >= len({s.user for s in self.said})


TestRoster = RosterAgainstAModel.TestCase
TestRoster.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestRosterUntold = RosterUntold.TestCase
TestRosterUntold.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_the_limit_counts_devices_those_who_leave_and_those_whose_leaving_is_not_told_yet() -> None:
    roster = Roster(2, 10.0, 10.0)
    roster.start(1, "w", "@a", "P")
    roster.start(1, "w", "@b", "P")
    for user, device in (("@c", "P"), ("@a", "L")):
        with pytest.raises(PresenceRefused, match="2 devices are all"):
            roster.start(1, "w", user, device)
    roster.start(2, "w", "@a", "P")  # what has a place may move
    roster.end("w", "@a", "P", 0.0)
    with pytest.raises(PresenceRefused):
        roster.start(1, "w", "@c", "P")
    roster.start(1, "w", "@a", "L")  # in its own place
    roster.confirm(roster.take(10))
    roster.clear("w")
    with pytest.raises(PresenceRefused):
        roster.start(1, "w", "@c", "P")
    roster.confirm(roster.take(10))
    roster.start(1, "w", "@c", "P")


def test_settings_that_become_shorter_hold_for_those_who_are_leaving_already() -> None:
    roster = Roster(10, 100.0, 200.0)
    roster.start(1, "w", "@a", "P")
    roster.start(2, "w", "@b", "P")
    roster.end("w", "@a", "P", 0.0)
    roster.lose(2, 0.0)
    assert roster.next_deadline() == 100
    roster.configure(5.0, 300.0, 10.0)
    assert roster.next_deadline() == 15
    roster.expire(15.0)
    assert roster.next_deadline() == 200


def user_ip(*values: object, user: str = "@a:b") -> UserIp:
    return UserIp(user, json.dumps(values))


def test_a_sighting_keeps_a_hash_of_the_token_and_is_of_one_place() -> None:
    first = read(user_ip("secret", "10.0.0.1", "x" * 1000, None, 5))
    assert b"secret" not in repr(first).encode()
    assert (first.user, first.ip, first.device, len(first.agent), first.seen) == (
        "@a:b",
        "10.0.0.1",
        None,
        MAX_AGENT,
        5,
    )
    assert read(user_ip("other", "10.0.0.1", "x" * 2000, None, 6)).key == first.key
    others = [user_ip("s", "10.0.0.2", "x", "D", 5), user_ip("s", "10.0.0.2", "D", "x", 5)]
    assert len({first.key, *(read(other).key for other in others)}) == 3
    assert read(user_ip(None, "::1", None, None, 0)).token_sha256 is None


@pytest.mark.parametrize(
    "values",
    [
        (5, "ip", "a", "d", 1),
        ("t", None, "a", "d", 1),
        ("t", "", "a", "d", 1),
        ("t", "i" * 65, "a", "d", 1),
        ("t", "ip", ["a"], "d", 1),
        ("t", "ip", "a", "d\0", 1),
        ("t", "ip", "\ud800", "d", 1),
        ("t", "ip", "a", "d" * 256, 1),
        ("t", "ip", "a", "d", "1"),
        ("t", "ip", "a", "d", True),
        ("t", "ip", "a", "d", 2**63),
        ("t", "ip", "a", "d", 1.5),
    ],
)
def test_what_postgres_cannot_keep_is_refused_without_a_word_of_what_it_was(values: tuple[object, ...]) -> None:
    with pytest.raises(PresenceRefused, match="USER_IP is not kept") as caught:
        read(user_ip(*values))
    assert "t" not in [word.strip("'\"") for word in str(caught.value).split()]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20), st.integers(0, 20))
def test_of_each_place_the_latest_waits_until_it_is_written(seen: list[tuple[int, int]], at: int) -> None:
    waiting = Sightings(10)
    taken = []
    for number, (place, ms) in enumerate(seen):
        if number == at:
            taken = waiting.take(2)
        waiting.add(read(user_ip("t", f"10.0.0.{place}", None, None, ms)))
    waiting.written(taken)
    latest: dict[str, int] = {}
    for place, ms in seen:
        latest[f"10.0.0.{place}"] = max(ms, latest.get(f"10.0.0.{place}", 0))
    assert all(latest[s.ip] == s.seen for s in waiting.take(10))
    written = {(s.ip, s.seen) for s in taken}
    assert {(s.ip, s.seen) for s in waiting.take(10)} | written >= set(latest.items())


def test_places_that_wait_are_bounded() -> None:
    waiting = Sightings(1)
    waiting.add(read(user_ip("t", "10.0.0.1", None, None, 1)))
    waiting.add(read(user_ip("t", "10.0.0.1", None, None, 2)))
    with pytest.raises(PresenceRefused, match="1 wait for Postgres already"):
        waiting.add(read(user_ip("t", "10.0.0.2", None, None, 2)))
