"""When a follower goes over from TCP to Redis, and what it gets: nothing is missing, in whatever order lines come."""

from __future__ import annotations

import random

import pytest

from replicad.client.events import Reset, RowBatch
from replicad.client.follower import Follower
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.words import Side
from replicad.redis import messages
from replicad.redis.following import MAX_KEPT, Junction, Missed
from replicad.redis.messages import MISSED, PublishedState
from tests.vocabulary import EVERY

EPOCH = "7c1fd2a90b31"
WRITERS = {"w1": 1, "w2": 2}
SUBSCRIBED = [b"SERVER x", f"WRITERS events {EPOCH} w1=1 w2=2".encode()]


def sync(w1: int, w2: int, numbers: dict[str, int] = WRITERS, epoch: str = EPOCH) -> list[bytes]:
    """What a publisher says that has published up to there."""
    return own(PublishedState("events", epoch, numbers, {"w1": w1, "w2": w2, "w3": 0}).sync())


def own(step: messages.Step) -> list[bytes]:
    """The lines of a step on the channel of the stream."""
    pairs = zip(step[::2], step[1::2], strict=True)
    return [
        line if isinstance(line, bytes) else str(line).encode() for where, line in pairs if where != messages.COMMON
    ]


def position(writer: str, prev: int, new: int) -> bytes:
    return f"POSITION events {writer} {prev} {new}".encode()


def row(writer: str, token: int | str, row: int = 0) -> bytes:
    return f"RDATA events {writer} {token} {row}".encode()


def junction(*lines: bytes, request: bytes = b"REPLICATE events 0") -> Junction:
    """A follower that has got these lines by TCP."""
    made = Junction()
    made.from_follower(b"NAME f")
    made.from_follower(request)
    assert made.from_daemon([*SUBSCRIBED, *lines]) == [*SUBSCRIBED, *lines]
    return made


def by_redis(made: Junction, *lines: bytes) -> list[bytes]:
    return [one for line in lines for one in made.from_redis("events", line, 0.0)] + made.try_join()


def test_a_follower_joins_when_it_has_everything_up_to_a_sync_and_gets_what_came_after_it() -> None:
    made = junction(position("w1", 4, 4), position("w2", 3, 3))
    assert by_redis(made, row("w1", 5), *sync(5, 4), position("w1", 5, 5), row("w1", 6), row("w1", 7)) == []
    assert made.needs_tcp
    made.from_daemon([row("w1", 5), row("w1", "batch")])
    assert made.try_join() == []  # row 4 of w2 is missing
    made.from_daemon([row("w2", 4)])
    assert made.try_join() == []  # within a batch
    assert made.from_daemon([row("w1", 6)]) == [row("w1", 6)]
    assert made.try_join() == [row("w1", 6), row("w1", 7)]  # the first is a repeat, which a follower drops
    assert made.joined == ["events"]
    assert not made.needs_tcp
    assert made.from_daemon([row("w1", 7), b"PING 1"]) == [b"PING 1"]
    assert by_redis(made, position("w1", 7, 9), row("w2", 5)) == [position("w1", 7, 9), row("w2", 5)]
    assert by_redis(made, *sync(9, 5)) == [b"PING"]


@pytest.mark.parametrize(
    "lines",
    [
        [position("w1", 5, 5)],  # a gap
        [row("w3", 5)],
        [position("w3", 5, 5)],
        sync(4, 3, {**WRITERS, "w3": 3}),
        sync(4, 3, epoch="0"),
        sync(5, 3),
        [MISSED],
        [position("w1", 4, 2)],
        [row("w1", "batch"), position("w1", 4, 4)],  # another publisher has begun within a batch
    ],
    ids=str,
)
def test_whatever_does_not_go_on_where_the_follower_is_ends_the_connection(lines: list[bytes]) -> None:
    made = junction(position("w1", 4, 4), position("w2", 3, 3))
    by_redis(made, *sync(4, 3))
    assert made.joined
    with pytest.raises(Missed):
        by_redis(made, *lines)


@pytest.mark.parametrize(
    ("request_line", "also"),
    [
        (b"REPLICATE", b""),
        (b"REPLICATE events 0 linear", b""),
        (b"REPLICATE events 0", b"TAKEN events"),
        (b"REPLICATE events 0", b"CLAIM a 1/1"),
    ],
)
def test_who_needs_more_than_rows_stays_on_tcp(request_line: bytes, also: bytes) -> None:
    made = junction(position("w1", 4, 4), position("w2", 3, 3), request=request_line)
    if also:
        made.from_follower(also)
    by_redis(made, *sync(4, 3))
    assert not made.joined
    assert made.needs_tcp


def test_what_is_kept_before_a_follower_joins_is_bounded_and_the_next_sync_is_taken() -> None:
    made = junction(position("w1", 4, 4), position("w2", 3, 3))
    by_redis(made, *sync(5, 3), row("w1", 6), b"RDATA events w1 7 " + b"x" * MAX_KEPT)
    made.from_daemon([row("w1", 5)])
    assert made.try_join() == []
    made.from_daemon([row("w1", 6), row("w1", 7)])
    by_redis(made, *sync(7, 3))
    assert made.joined


class World:
    """One history that grows. It is published to Redis with lost and repeated messages, and sent by TCP on request."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.history: list[RowBatch] = []
        self.published = PublishedState("events", EPOCH, WRITERS, {"w1": 0, "w2": 0})
        self.follower = Follower()
        self.follower.want("events", f"{EPOCH}!0")
        self.understand = ProtocolConnection(Side.CLIENT, EVERY, now=0.0).understand
        self.understand(b"SERVER x")
        self.got: list[RowBatch] = []
        self.joins = self.misses = 0
        self.connect()

    def connect(self) -> None:
        self.follower.new_connection()
        self.junction = Junction()
        self.junction.from_follower(f"REPLICATE events {self.follower.token('events')}".encode())
        have = {name: max([one.token for one in self.got if one.instance == name], default=0) for name in WRITERS}
        self.tcp = [SUBSCRIBED[1], *(position(name, at, at) for name, at in have.items())]
        self.tcp_at = 0
        self.have = have

    def write(self) -> list[bytes]:
        """A transaction; what Redis says then."""
        rows = [str(n) for n in range(self.chance.choice((1, 2, 7)))]
        self.history.append(RowBatch("events", self.chance.choice(list(WRITERS)), len(self.history) + 1, rows))
        said: list[list[bytes]] = [own(step) for step in self.published.rows(self.history[-1:])]
        if self.chance.random() < 0.05:  # the next publisher goes on from an earlier token
            back = max(0, len(self.history) - 5)
            before = self.history[:back]
            for name in WRITERS:
                self.published.positions[name] = max([one.token for one in before if one.instance == name], default=0)
            said += [own(self.published.sync()), *map(own, self.published.rows(self.history[back:]))]
        said += [own(self.published.sync())] if self.chance.random() < 0.2 else []
        if self.chance.random() < 0.07:  # some steps are lost, perhaps in the middle of a batch
            begin = self.chance.randrange(len(said))
            del said[begin : begin + self.chance.randint(1, len(said))]
        return [line for step in said for line in step]

    def receive(self, lines: list[bytes]) -> None:
        for event in self.follower.feed(b"\n".join(lines) + b"\n", self.understand):
            assert not isinstance(event, Reset)
            if isinstance(event, RowBatch):
                self.got.append(event)
        assert self.follower.gap is None

    def by_tcp(self, most: int) -> None:
        """The daemon sends some rows."""
        while self.tcp_at < len(self.history) and len(self.tcp) < most:
            one = self.history[self.tcp_at]
            self.tcp_at += 1
            if one.token > self.have[one.instance]:
                self.tcp += [row(one.instance, "batch", n) for n in range(len(one.rows) - 1)]
                self.tcp.append(row(one.instance, one.token, len(one.rows) - 1))
        lines, self.tcp = self.tcp[:most], self.tcp[most:]
        self.receive(self.junction.from_daemon(lines))

    def step(self, said: list[bytes], most: int) -> None:
        try:
            before = self.junction.joined
            if self.junction.needs_tcp:
                self.by_tcp(most)
            for line in said:
                self.receive(self.junction.from_redis("events", line, 0.0))
            self.receive(self.junction.try_join())
            self.joins += self.junction.joined != before
        except Missed:
            self.misses += 1
            self.connect()


def test_with_lost_and_repeated_messages_every_row_comes_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LINES", 3)
    joins = misses = 0
    for seed in range(20):
        world = World(seed)
        for _ in range(120):
            world.step(world.write(), most=world.chance.choice((0, 2, 6, 9)))
        for _ in range(4):
            world.step(own(world.published.sync()), most=1000)
        for name in WRITERS:
            assert [one for one in world.got if one.instance == name] == [
                one for one in world.history if one.instance == name
            ], seed
        joins += world.joins
        misses += world.misses
    assert joins > 20
    assert misses > 20
