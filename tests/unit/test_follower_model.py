"""A follower against a model: any interleaving of streams, writers, batches, cuts and reconnects.

The model is a server that keeps every fact and sends, from whatever token it is asked, what lies behind it. The
claims: each row is handed over once and in its writer's order, all rows of a fact at once, and the token never speaks
of a fact that was not handed over.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.client.events import Gap, Reset, RowBatch
from replicad.client.follower import Follower
from replicad.protocol.command import Command
from replicad.protocol.commands import Server
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import Vector
from replicad.protocol.words import Side
from replicad.streams.commands import Position, Rdata, Writers
from tests.lengths import examples
from tests.vocabulary import EVERY

EPOCH = "0a0b0c0d"


@dataclass
class Fact:
    token: int
    writer: str
    rows: list[str]


@dataclass
class Stream:
    """What was written, in the order of its ids."""

    name: str
    linear: bool
    facts: list[Fact] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    joined_at: dict[str, int] = field(default_factory=dict)
    last: int = 0

    def write(self, chance: random.Random) -> None:
        if not self.numbers or chance.random() < 0.1:
            writer = f"w{len(self.numbers) + 1}"
            self.numbers[writer] = len(self.numbers) + 1
            self.joined_at[writer] = self.last
        writer = chance.choice(list(self.numbers))
        self.last += chance.randint(1, 3)
        if chance.random() < 0.8:  # else a rollback: an id without rows
            rows = [f'["{self.name}",{self.last},{row}]' for row in range(chance.choice([1, 1, 1, 2, 4]))]
            self.facts.append(Fact(self.last, writer, rows))


class Session:
    """The server's end of one connection: what it has sent of each stream, writer by writer."""

    def __init__(self) -> None:
        self.connection = ProtocolConnection(Side.SERVER, EVERY, now=0)
        self.out = bytearray(self.connection.send(Server("model"), 0))
        self.sent: dict[str, dict[str, int]] = {}  # the position told to the client, per stream and writer

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.out += self.connection.send(command, 0)

    def subscribe(self, stream: Stream, token: str | None) -> None:
        begin = Vector(0) if token in (None, "EARLIEST") else Vector.parse(token)
        if stream.linear:
            self.sent[stream.name] = {"*": begin.minimum}
        else:
            self.send(self._writers(stream))
            self.sent[stream.name] = {writer: begin.at(number) for writer, number in stream.numbers.items()}
        for writer, at in self.sent[stream.name].items():
            self.send(Position(stream.name, writer, at, at))

    def _writers(self, stream: Stream) -> Writers:
        return Writers(stream.name, EPOCH, tuple(stream.numbers.items()))

    def pump(self, stream: Stream, chance: random.Random) -> None:
        """Send the next fact of some writer, or an advance without rows, or that a writer joined."""
        sent = self.sent[stream.name]
        new = [] if stream.linear else [writer for writer in stream.numbers if writer not in sent]
        if new:
            self.send(self._writers(stream))
            for writer in new:
                sent[writer] = stream.joined_at[writer]
                self.send(Position(stream.name, writer, sent[writer], sent[writer]))
        if not sent:
            return
        writer = chance.choice(list(sent))
        behind = [fact for fact in stream.facts if fact.token > sent[writer] and writer in ("*", fact.writer)]
        if behind and chance.random() < 0.8:
            fact = behind[0]
            for row in fact.rows[:-1]:
                self.send(Rdata(stream.name, fact.writer, None, row))
            self.send(Rdata(stream.name, fact.writer, fact.token, fact.rows[-1]))
            sent[writer] = fact.token
        else:
            limit = behind[0].token - 1 if behind else stream.last
            new_position = chance.randint(sent[writer], max(limit, sent[writer]))
            self.send(Position(stream.name, writer, sent[writer], new_position))
            sent[writer] = new_position


class Client:
    """A reader that keeps what it was handed, and checks every token that it could resume from."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = {stream.name: stream for stream in streams}
        self.follower = Follower()
        for stream in streams:
            self.follower.want(stream.name, "EARLIEST", linear=stream.linear)
        self.taken: dict[str, list[tuple[int, str, list[str]]]] = defaultdict(list)

    def connect(self) -> Session:
        session = Session()
        self.connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
        self.follower.new_connection()
        for name, stream in self.streams.items():
            session.subscribe(stream, self.follower.token(name))
        return session

    def receive(self, data: bytes) -> None:
        block = self.connection.receive_block(data, 0)
        for event in self.follower.feed(block, self.connection.understand):
            assert not isinstance(event, Gap | Reset)
            if isinstance(event, RowBatch):
                self.taken[event.stream].append((event.token, event.instance, event.rows))
                self.check_token(self.streams[event.stream])

    def check_token(self, stream: Stream) -> None:
        """Whatever the token covers was handed over."""
        token = self.follower.token(stream.name)
        if token == "EARLIEST":
            return
        assert token is not None
        vector = Vector.parse(token)
        had = {taken for taken, _, _ in self.taken[stream.name]}
        for fact in stream.facts:
            upto = vector.minimum if stream.linear else vector.at(stream.numbers[fact.writer])
            assert fact.token > upto or fact.token in had


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32).map(random.Random))
def test_every_row_comes_once_in_order_whatever_is_cut_and_whoever_joins(chance: random.Random) -> None:
    streams = [Stream("events", False), Stream("caches", False), Stream("audit", True)]
    client = Client(streams)
    session = client.connect()
    for _ in range(80):
        doing = chance.random()
        if doing < 0.3:
            chance.choice(streams).write(chance)
        elif doing < 0.6:
            session.pump(chance.choice(streams), chance)
        elif doing < 0.95:
            size = chance.choice([1, 3, 20, 100, 1000])
            client.receive(bytes(session.out[:size]))
            del session.out[:size]
        else:
            session = client.connect()  # whatever was under way is lost
    while any(len(client.taken[stream.name]) < len(stream.facts) for stream in streams):
        for stream in streams:
            session.pump(stream, chance)
        client.receive(bytes(session.out))
        session.out.clear()

    for stream in streams:
        taken = client.taken[stream.name]
        assert Counter(token for token, _, _ in taken) == Counter(fact.token for fact in stream.facts)
        by_token = {fact.token: fact for fact in stream.facts}
        assert all((by_token[token].writer, by_token[token].rows) == (writer, rows) for token, writer, rows in taken)
        for writer in stream.numbers:
            tokens = [token for token, by, _ in taken if stream.linear or by == writer]
            assert tokens == sorted(tokens)
        client.check_token(stream)
    assert client.follower.repeats == client.follower.dropped == 0
