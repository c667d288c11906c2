"""Any interleaving of writers, horizons, rows that cannot be read, subscribers that come and go: no gap, no repeat.

Subscribers keep a token as a client does, leave at any moment, and come back with it. In the end each of them has every
row above the token that it began with, once, and each writer's rows in ascending order.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicad.daemon.journal import JournalLimits
from replicad.protocol.tokens import Vector
from replicad.streams.serving.catchups import CatchupLimits, PieceSizes
from replicad.streams.serving.intervals import StreamIntervals
from tests.lengths import examples

from .conftest import Client, Streams, on_a_jumping_clock, open_streams, settle

WRITERS = ("a", "b", "c", "d")


class Subscriber:
    """A client that follows `s` and remembers how far it is, writer by writer."""

    def __init__(self, *, linear: bool) -> None:
        self.linear = linear
        self.client: Client | None = None
        self.rows: list[tuple[str, int]] = []
        self._numbers: dict[str, int] = {}
        self._at: dict[str, int] = {}

    def token(self) -> str:
        if not self._at:
            return "0"
        minimum = min(self._at.values())
        if self.linear:
            return str(minimum)
        return str(Vector(minimum, {self._numbers[name]: at for name, at in self._at.items()}))

    async def come(self, streams: Streams) -> None:
        if self.client is None:
            self.client = streams.connect()
        await self.listen()  # a subscription may have ended: the next one begins behind what it brought
        self._take(await self.client.say(f"REPLICATE s {self.token()}{' linear' if self.linear else ''}"))

    async def listen(self) -> None:
        if self.client is not None:
            self._take(await self.client.lines())

    async def leave(self) -> None:
        if self.client is not None:
            await self.listen()
            await self.client.leave()
            self.client = None

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            word, *rest = line.split(" ")
            if word == "WRITERS":
                self._numbers |= {name: int(number) for name, _, number in (pair.partition("=") for pair in rest[2:])}
            elif word == "POSITION":
                self._at["*" if self.linear else rest[1]] = int(rest[3])
            elif word == "RDATA":
                self.rows.append((rest[1], int(rest[2])))
                self._at["*" if self.linear else rest[1]] = int(rest[2])
            else:
                assert line.startswith(("ERROR row_unreadable", "ERROR stream_refused: stream s is subscribed")), line


class Database:
    """Rows get ids in order and are committed in any order; nothing is published that may still change."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.last = 0
        self.open: dict[int, str] = {}

    def begin(self, writer: str) -> None:
        self.last += 1
        self.open[self.last] = writer

    def commit(self, which: int) -> None:
        if self.open:
            id = sorted(self.open)[which % len(self.open)]
            self.streams.store.insert("s", id, writer=self.open.pop(id))

    def publish(self) -> None:
        lowest = {
            writer: min((id for id, w in self.open.items() if w == writer), default=self.last + 1) - 1
            for writer in WRITERS
        }
        self.streams.positions.tell("s", min(lowest.values()), **lowest)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(range(4))),
        st.tuples(st.just("begin"), st.sampled_from(range(4))),
        st.tuples(
            st.sampled_from(["commit", "commit", "publish", "publish", "come", "leave", "listen"]), st.integers(0, 5)
        ),
        st.tuples(st.sampled_from(["poison", "mend"]), st.integers(0, 5)),
    ),
    min_size=20,
    max_size=60,
)


async def _live(plan: list[tuple[str, int]], seal: float) -> None:
    limits = JournalLimits(max_bytes=120, max_chunks=4)  # so small that who lags must catch up from Postgres
    small = CatchupLimits(sizes=PieceSizes(20, 40, 600))  # some pieces have one row, others have several
    async with open_streams(
        "s", by_writer=True, limits=limits, pace=StreamIntervals(ahead=1.0, seal=seal), catchups=small
    ) as streams:
        database = Database(streams)
        poison = streams.store.tables["s"].poison
        subscribers = [Subscriber(linear=number % 3 == 2) for number in range(6)]
        for one in subscribers[:3]:
            await one.come(streams)
        for step, number in plan:
            one = subscribers[number]
            match step:
                case "begin":
                    database.begin(WRITERS[number])
                case "commit":
                    database.commit(number)
                case "publish":
                    database.publish()
                case "come":
                    await one.come(streams)
                case "leave":
                    await one.leave()
                case "listen":
                    await one.listen()
                case "poison":
                    poison.add(database.last + number // 2)
                case "mend":
                    poison.clear()
        poison.clear()
        while database.open:
            database.commit(0)
        database.publish()
        await settle(10)
        for one in subscribers:
            await one.leave()
            await one.come(streams)
        written = sorted((writer, id) for id, writer, _ in streams.store.tables["s"].rows)
        for one in subscribers:
            assert sorted(one.rows) == written
            by_writer = defaultdict(list)
            for writer, id in one.rows:
                by_writer[writer].append(id)
            assert all(ids == sorted(ids) for ids in by_writer.values())
        assert streams.troubles.current() == []


@given(steps, st.sampled_from([0.0, 0.1]))
@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
def test_every_subscriber_gets_every_row_once_and_in_order_whatever_happens(
    plan: list[tuple[str, int]], seal: float
) -> None:
    on_a_jumping_clock(_live, plan, seal)
