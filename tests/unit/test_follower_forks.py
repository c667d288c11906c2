"""A follower against a model of a server whose history forks: backups are put back, ids are given out again.

The model keeps the list of generations as the database does, and a session goes over to a new generation some time
after the fork. Until then it is silent, or (`mixes`) it sends rows of the new history under positions of the old one;
then no backup is put back that has more of the old history than what was mixed. The claim: whoever discards
what each Reset names holds, up to the token, exactly the rows of the present history. It holds at every moment, for
every token that is kept and resumed with later, and at the end for all rows.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.client.events import Reset, RowBatch
from replicad.client.follower import Follower
from replicad.client.refusals import refusal
from replicad.errors import BadToken, TokenForked, forked_text
from replicad.protocol.command import Command
from replicad.protocol.commands import Error, Server
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import Vector
from replicad.protocol.words import Side
from replicad.streams.commands import Position, Rdata, Writers
from tests.lengths import examples
from tests.vocabulary import EVERY

ALL = "+"
NAME = "events"
FLOOR = Vector(0)
Held = dict[tuple[int, str], list[str]]


@dataclass
class Database:
    """One stream: what was written, who writes, which generations there were. A deep copy is a backup."""

    facts: Held = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    last: int = 0
    noted: Vector = FLOOR
    generations: list[tuple[str, Vector]] = field(default_factory=lambda: [("00000000", FLOOR)])

    @property
    def epoch(self) -> str:
        return self.generations[-1][0]

    def shared(self, epoch: str) -> Vector | None:
        """Up to where the present history is that of another generation; None where that is not known."""
        known = [number for number, (one, _) in enumerate(self.generations) if one == epoch]
        if not known:
            return None
        later = [began for _, began in self.generations[known[0] + 1 :]]
        return least(Vector(1 << 60), *later)

    def fork(self, began: Vector, chance: random.Random) -> None:
        self.generations.append((f"{chance.getrandbits(32):08x}", began))
        self.noted = began


def least(*vectors: Vector) -> Vector:
    numbers = {number for vector in vectors for number in vector.ahead}
    return Vector(
        min(vector.minimum for vector in vectors),
        {number: min(vector.at(number) for vector in vectors) for number in numbers},
    )


class Stream:
    """The database, its backups, and what befalls them."""

    def __init__(self, chance: random.Random, kind: str) -> None:
        self.chance = chance
        self.linear = kind == "linear"
        self.crowded = kind == "crowded"
        self.retires = kind == "retiring"
        self.mixes = chance.random() < 0.5
        self.now = Database()
        if self.crowded:
            self.now.numbers[ALL] = 1
        self.backups = [copy.deepcopy(self.now)]
        self.rows = 0  # no two rows are the same, whatever their ids
        self.every: dict[str, int] = {}  # the number of every writer that there was in any history

    def listed(self) -> dict[str, int]:
        if self.crowded:
            return {ALL: 1}
        return {name: number for name, number in self.now.numbers.items() if name not in self.now.retired}

    def write(self) -> None:
        now, chance = self.now, self.chance
        if not now.numbers or now.numbers.keys() == {ALL} or chance.random() < 0.15:
            now.numbers[f"w{len(self.every)}"] = self.every[f"w{len(self.every)}"] = len(now.numbers) + 1
        writer = chance.choice([name for name in now.numbers if name != ALL])
        now.retired.discard(writer)
        now.last += chance.randint(1, 3)
        if chance.random() < 0.8:
            self.rows += 1
            now.facts[now.last, writer] = [f"[{self.rows},{part}]" for part in range(chance.choice([1, 1, 2]))]

    def note(self) -> None:
        now, chance = self.now, self.chance
        minimum = chance.randint(now.noted.minimum, now.last)
        ahead = {} if self.crowded else {n: chance.randint(minimum, now.last) for n in now.numbers.values()}
        before = {number: at for number, at in now.noted.ahead.items() if at > ahead.get(number, minimum)}
        now.noted = Vector(minimum, {**ahead, **before})

    def befall(self) -> None:
        now, chance = self.now, self.chance
        doing = chance.random()
        if doing < 0.35:
            self.note()
        elif doing < 0.55:
            self.backups.append(copy.deepcopy(now))
        elif doing < 0.65:
            now.fork(now.noted, chance)  # a restart of Postgres
        elif doing < 0.9:
            number = chance.randrange(max(0, len(self.backups) - 3) if chance.random() < 0.8 else 0, len(self.backups))
            self.now = copy.deepcopy(self.backups[number])
            if self.mixes:
                del self.backups[number + 1 :]
            self.now.fork(self.now.noted, chance)
        elif doing < 0.95:
            now.facts.clear()
            now.last = 0
            now.fork(FLOOR, chance)
            if self.mixes:
                self.backups = [copy.deepcopy(now)]
        elif self.retires and len(self.listed()) > 1:
            now.retired.add(chance.choice(list(self.listed())))


class Session:
    """The server's end of one connection."""

    def __init__(self, stream: Stream, token: str | None) -> None:
        """Raises BadToken."""
        self.stream = stream
        self.connection = ProtocolConnection(Side.SERVER, EVERY, now=0)
        self.out = bytearray(self.connection.send(Server("model"), 0))
        begin = self._begin(token)
        self.epoch = stream.now.epoch
        self.known = stream.now.last
        self.others = begin.minimum  # where writers stand that are not listed
        if stream.linear:
            self.sent = {"*": begin.minimum}
        else:
            lowest = min((begin.at(number) for number in stream.listed().values()), default=0)
            stream.now.retired -= {by for token, by in stream.now.facts if begin.minimum < token <= lowest}
            self.sent = {writer: begin.at(number) for writer, number in stream.listed().items()}
        self._introduce()

    def _begin(self, token: str | None) -> Vector:
        if token in (None, "EARLIEST"):
            return FLOOR
        now, had = self.stream.now, Vector.parse(token or "")
        shared = now.shared(had.epoch or now.epoch)
        if shared is None:
            raise BadToken("begin again")
        rewind = least(had, shared)
        if had.minimum > shared.minimum or any(at > shared.at(number) for number, at in had.ahead.items()):
            new = Vector(rewind.minimum, rewind.ahead, now.epoch)
            text = Error(f"bad_token: {forked_text(NAME, str(shared), str(new))}").text
            raise refusal(text)
        return had

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.out += self.connection.send(command, 0)

    def _introduce(self) -> None:
        numbers = self.stream.now.numbers
        named = {} if self.stream.linear else {name: numbers[name] for name in self.sent if name in numbers}
        self.send(Writers(NAME, self.epoch, tuple(named.items())))
        for writer, at in self.sent.items():
            self.send(Position(NAME, writer, at, at))

    def _adopt(self) -> None:
        """Go over to the present generation: POSITIONs that go back, WRITERS, POSITIONs."""
        now = self.stream.now
        shared = now.shared(self.epoch) or FLOOR
        back = {}
        for writer, at in self.sent.items():
            position = shared.minimum if writer in ("*", ALL) else shared.at(now.numbers.get(writer, 1 << 30))
            back[writer] = min(at, position)
        lowest = min(back.values(), default=self.others)
        if not self.stream.linear and any(back[name] == lowest for name in back.keys() - now.numbers.keys()):
            back = dict.fromkeys(back, lowest)  # one that goes held the token down: the others go back to it
        self.send(*(Position(NAME, name, self.sent[name], at) for name, at in back.items() if at < self.sent[name]))
        self.others = min([self.others, *back.values()])
        if not self.stream.linear:
            back = {name: at for name, at in back.items() if name in now.numbers}
            back |= {name: self.others for name in self.stream.listed() if name not in back}
        self.sent = back
        self.epoch = now.epoch
        self._introduce()

    def pump(self, *, at_once: bool = False) -> None:
        """Go over to another generation, list writers, or send what comes next of some writer."""
        now, chance = self.stream.now, self.stream.chance
        if self.epoch != now.epoch:
            if at_once or chance.random() < 0.5:
                self._adopt()
            elif self.sent and self.stream.mixes:
                self._send_next(chance.choice(list(self.sent)), self.known)
            return
        self.known = now.last
        if not self.stream.linear:
            self._relist()
        if self.sent:
            self._send_next(chance.choice(list(self.sent)), now.last)

    def _relist(self) -> None:
        listed = self.stream.listed()
        lowest = min((at for name, at in self.sent.items() if name in listed), default=1 << 60)
        gone = {name for name in self.sent if name not in listed and self.sent[name] >= lowest}
        new = listed.keys() - self.sent.keys()
        if new or (gone and len(gone) < len(self.sent)):
            self.sent = {name: at for name, at in self.sent.items() if name not in gone}
            self.sent |= dict.fromkeys(new, min([self.others, *self.sent.values()]))
            self._introduce()

    def _send_next(self, writer: str, upto: int) -> None:
        chance, at = self.stream.chance, self.sent[writer]
        target = chance.randint(at, max(at, upto))
        lowest = min({**self.sent, writer: target}.values())  # up to there also those who are not listed
        for (token, by), rows in sorted(self.stream.now.facts.items()):
            if at < token <= target and writer in ("*", by):
                self.sent[writer] = token
            elif not (self.others < token <= lowest and by not in self.sent and writer != "*"):
                continue
            for row in rows[:-1]:
                self.send(Rdata(NAME, by, None, row))
            self.send(Rdata(NAME, by, token, rows[-1]))
        self.others = max(self.others, lowest)
        if target > at and chance.random() < 0.6:
            self.send(Position(NAME, writer, self.sent[writer], target))
            self.sent[writer] = target


class Client:
    """Keeps rows as it is told, and now and then ends and begins again from a token that it kept."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.held: Held = {}
        self.forks = 0
        self._begin("EARLIEST")

    def _begin(self, token: str | None) -> None:
        self.follower = Follower()
        self.follower.want(NAME, token, linear=self.stream.linear)
        self.session = self._connect()

    def restart(self) -> None:
        """Rows and token were kept together; rows above the token are not used."""
        token = self.follower.token(NAME)
        if token == "EARLIEST":
            self.held = {}
        else:
            at, every = Vector.parse(token or ""), self.stream.every
            self.held = {key: rows for key, rows in self.held.items() if key[0] <= at.at(every[key[1]])}
        self._begin(token)

    def _connect(self) -> Session:
        while True:
            self.follower.new_connection()
            self.connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
            try:
                return Session(self.stream, self.follower.token(NAME))
            except TokenForked as error:
                self.forks += 1
                resets = self.follower.rewind(NAME, error.rewind)
                assert resets
                for reset in resets:
                    self._obey(reset)
            except BadToken:
                self.follower.want(NAME, "EARLIEST", linear=self.stream.linear)
                self._obey(Reset(NAME, None, None, "bad_token"))
            self.check()

    def _obey(self, reset: Reset) -> None:
        for token, writer in list(self.held):
            if reset.instance in (None, "*", writer) and (reset.token is None or token > reset.token):
                del self.held[token, writer]

    def reconnect(self) -> None:
        self.session = self._connect()

    def receive(self, size: int | None = None) -> None:
        data = bytes(self.session.out[:size])
        del self.session.out[:size]
        voided = False
        for event in self.follower.feed(self.connection.receive_block(data, 0), self.connection.understand):
            if isinstance(event, Reset):
                self._obey(event)
                voided = True  # of several that come together the last one makes it whole
                continue
            if isinstance(event, RowBatch):
                key = event.token, event.instance
                if not self.stream.retires:
                    assert key not in self.held, "handed over twice"
                self.held[key] = event.rows
            self.check()
        if voided:
            self.check()
        if self.follower.gap is not None:
            self.reconnect()

    def check(self) -> None:
        """Up to the token, as far as its generation is the present history, exactly the present rows are held."""
        token = self.follower.token(NAME)
        if token in (None, "EARLIEST"):
            return
        vector = Vector.parse(token or "")
        now = self.stream.now
        shared = now.shared(vector.epoch or "")
        if shared is None:
            return
        for number in (now.numbers.get(writer, 1 << 30) for writer in {by for _, by in {**now.facts, **self.held}}):
            upto = shared.minimum if self.stream.linear else shared.at(number)
            upto = min(upto, vector.at(number))
            names = {name for name, other in now.numbers.items() if other == number}
            there = {key: rows for key, rows in now.facts.items() if key[1] in names and key[0] <= upto}
            had = {key: rows for key, rows in self.held.items() if key[1] in names and key[0] <= upto}
            assert had == there


def run(chance: random.Random, kind: str) -> Client:
    stream = Stream(chance, kind)
    client = Client(stream)
    for _ in range(120):
        doing = chance.random()
        if doing < 0.25:
            stream.write()
        elif doing < 0.35:
            stream.befall()
        elif doing < 0.65:
            client.session.pump()
        elif doing < 0.92:
            client.receive(chance.choice([1, 20, 100, 1000, None]))
        elif doing < 0.98:
            client.reconnect()
        else:
            client.restart()
    for _ in range(10_000):
        client.session.pump(at_once=True)
        client.receive()
        if client.held == stream.now.facts and client.session.epoch == stream.now.epoch and not client.session.out:
            break
    assert client.held == stream.now.facts
    return client


@settings(max_examples=examples(250), deadline=None)
@given(st.integers(0, 1 << 32).map(random.Random), st.sampled_from(["linear", "listed", "crowded", "retiring"]))
def test_after_any_forks_exactly_the_present_rows_are_held(chance: random.Random, kind: str) -> None:
    run(chance, kind)


def test_the_model_sees_tokens_that_are_rewound() -> None:
    assert sum(run(random.Random(seed), "listed").forks for seed in range(20)) > 5
