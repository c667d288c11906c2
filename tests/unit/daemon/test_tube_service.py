"""Tubes over books in memory: claims, waits, leases that are kept, cursors that are refused, a tube that is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
from trio.testing import MockClock

from replicad.daemon.figures import Delays
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, LeaseHeld, LeaseLost, StreamRefused
from replicad.positions.horizon import LockSource, Reading
from replicad.postgres.bridge import Sink
from replicad.protocol.tokens import Cursor
from replicad.tubes.bulk import BlockSink, RenewLease, Want
from replicad.tubes.commands import CursorAt, Lease, Part, PartitionShare
from replicad.tubes.history import TubeGeneration, Unknown
from replicad.tubes.leases import LeaseHolder, LeaseView
from replicad.tubes.pods import PodReadBounds, Span, TubeInfo
from replicad.tubes.serving.requests import Books
from replicad.tubes.serving.service import TubeService
from replicad.tubes.serving.waiting import TubeIntervals

from .conftest import Client, Desk, settle
from .memory_streams import MemoryPositions

TUBE = TubeInfo("t", 1, 10, 11)


@dataclass
class MemoryBooks:
    """One tube or more with pods (seq, shard); leases without expiry. `fails[method]` is raised."""

    infos: dict[str, TubeInfo] = field(default_factory=lambda: {"t": TUBE})
    pods_of: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"t": []})
    held: dict[int, Lease] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)  # statements, by what they are for
    renewals: int = 0
    reports: dict[str, str] = field(default_factory=dict)
    attempts: dict[tuple[str, Part], str] = field(default_factory=dict)  # notes, by partition
    parked: list[tuple[int, Sequence[int], int, str]] = field(default_factory=list)
    untouched_tables: dict[str, str] = field(default_factory=dict)
    fails: dict[str, Exception] = field(default_factory=dict)
    slow: float = 0.0  # seconds that a look at what came takes
    silent: float = 0.0  # seconds for which all leases were not renewed
    backfilled: list[list[str]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    generations: int = 1
    notes: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    reported: list[tuple[str, str, int]] = field(default_factory=list)
    few: bool = False  # pods are few and small, so that they come with the plan
    delays: dict[str, Delays] = field(default_factory=dict)

    async def _answer(self, what: str) -> None:
        await trio.lowlevel.checkpoint()
        self.asked[what] += 1
        if what in self.fails:
            raise self.fails[what]

    def _fence(self, tube: str, term: int) -> None:
        if term not in self.held or self.held[term].tube != tube:
            raise LeaseLost(f"no lease has term {term}")

    def _between(self, tube: str, part: Part, after: int, upto: int) -> list[int]:
        pods = sorted(self.pods_of[tube])
        return [seq for seq, shard in pods if after < seq <= upto and shard % part.partitions == part.partition]

    # --- leases ---

    async def look(self) -> list[LeaseView]:
        await self._answer("look")
        return [
            LeaseView(one.tube, term, 1, one.ttl, self.silent, f"w1 c{0:032x}", one.part.partition, one.part.partitions)
            for term, one in self.held.items()
        ]

    async def claim(self, tube: str, part: Part, holder: LeaseHolder, ttl: float, expired: Sequence[int]) -> Lease:
        await self._answer("claim")
        if any((lease.tube, lease.part) == (tube, part) for lease in self.held.values()):
            raise LeaseHeld(f"{part} of {tube} is held")
        term = len(self.held) + 1
        self.held[term] = Lease(tube, part, term, ttl)
        return replace(self.held[term], generation=f"g{self.generations}")

    async def let_go(self, holders: Sequence[LeaseHolder]) -> None:
        await self._answer("let_go")

    async def holder_of(self, tube: str, term: int) -> str | None:
        return None

    async def renew(self, tube: str, part: Part, term: int) -> Lease:
        await self._answer("renew")
        self._fence(tube, term)
        self.renewals += 1
        return self.held[term]

    async def keep(self, tube: str, terms: Sequence[int], client: str = "") -> list[Lease]:
        await self._answer("renew")
        kept = [self.held[term] for term in terms if term in self.held]
        self.renewals += len(kept)
        return kept

    async def release(self, tube: str, part: Part, term: int) -> bool:
        lease = self.held.get(term)
        if lease is None or (lease.tube, lease.part) != (tube, part):
            return False
        del self.held[term]
        return True

    # --- pods ---

    async def tubes(self) -> list[TubeInfo]:
        await self._answer("tubes")
        return list(self.infos.values())

    async def shards_between(self, tube: str, after: int, upto: int) -> dict[int, int]:
        await trio.sleep(self.slow)
        await self._answer("shards_between")
        return {shard: seq for seq, shard in sorted(self.pods_of[tube]) if after < seq <= upto}

    async def plan(self, tube: str, part: Part, term: int, after: Cursor, bounds: PodReadBounds) -> CursorAt:
        await self._answer("plan")
        self._fence(tube, term)
        self.limits.append(bounds.limit)
        found = self._between(tube, part, after.regular, bounds.position)[: bounds.limit]
        return CursorAt(tube, part, Cursor(found[-1], after.backfill) if found else after, len(found))

    async def short(
        self, tube: str, part: Part, term: int, after: Cursor, bounds: PodReadBounds
    ) -> tuple[CursorAt, bytes] | None:
        await self._answer("short")
        if not self.few or not (lease := self.held.get(term)) or lease.tube != tube:
            return None
        at = await self.plan(tube, part, term, after, bounds)
        read: list[bytes] = []

        async def keep(lines: bytes) -> None:
            read.append(lines)

        await self.lines(tube, part, term, Span(after, at.cursor), sink=keep, renew=trio.lowlevel.checkpoint)
        return at, b"".join(read)

    async def lines(self, tube: str, part: Part, term: int, span: Span, *, sink: Sink, renew: RenewLease) -> int:
        await self._answer("lines")
        self._fence(tube, term)
        seqs = self._between(tube, part, span.after.regular, span.upto.regular)
        await sink(b"".join(b"RDATA tube:%s %s %d []\n" % (tube.encode(), str(part).encode(), seq) for seq in seqs))
        return len(seqs)

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int:
        await self._answer("ack")
        self._fence(tube, term)
        before = len(self.pods_of[tube])
        self.pods_of[tube] = [pod for pod in self.pods_of[tube] if pod[0] not in seqs]
        return before - len(self.pods_of[tube])

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int:
        return await self.ack(tube, part, term, self._between(tube, part, after.regular, upto.regular))

    async def park(
        self, tube: str, part: Part, term: int, *, seq: int, ids: Sequence[int], tries: int, error: str
    ) -> int:
        self._fence(tube, term)
        self.parked.append((seq, ids, tries, error))
        return len(ids)

    async def attempt(self, tube: str, part: Part, term: int, note: str) -> str:
        await self._answer("attempt")
        self._fence(tube, term)
        before = self.attempts.get((tube, part), "")
        if note:
            self.attempts[tube, part] = note
        return before

    async def tables_of(self, tube: str, shards: Sequence[int]) -> dict[str, dict[str, object]]:
        await self._answer("tables_of")
        return {
            str(shard): {"table": "public.cities", "key": ["id"], "attached": True} for shard in shards if shard < 5
        }

    async def share(self, tube: str, worker: str, ttl: float, expired: Sequence[int]) -> PartitionShare:
        await self._answer("share")
        return PartitionShare(tube, partitions=1, most=1, free=1, workers=1)

    async def report(self, tube: str, reporter: str, counts: str) -> None:
        self.reports[reporter] = counts

    # --- the rest ---

    async def send(self, want: Want, sink: BlockSink, renew: RenewLease) -> int:
        await renew()
        await sink(b"ARROW of %d\n" % want.upto.regular)
        return 1

    async def run(self, tubes: Sequence[TubeInfo], nursery: trio.Nursery) -> None:
        await self._answer("backfills")
        self.backfilled.append([info.name for info in tubes])

    async def present(self, fork: str | None = None) -> TubeGeneration:
        await self._answer("present")
        return TubeGeneration(self.generations, f"g{self.generations}", "restarted")

    async def note(self, generation: str, positions: Mapping[str, int]) -> None:
        await self._answer("note")
        self.notes.append((generation, dict(positions)))

    async def seen(self, tube: str, generation: str, seq: int) -> Unknown:
        await self._answer("seen")
        self.reported.append((tube, generation, seq))
        return Unknown("same", seq, mended=seq, generation=f"g{self.generations}")

    async def check_triggers(self) -> None:
        await self._answer("check_triggers")

    async def missing(self) -> dict[str, str]:
        await self._answer("missing")
        return {}

    async def untouched(self) -> Mapping[str, str]:
        await self._answer("untouched")
        return self.untouched_tables


class World:
    """The service, its books, its positions."""

    def __init__(self, desk: Desk, books: MemoryBooks, pace: TubeIntervals) -> None:
        self.desk, self.books, self.troubles = desk, books, desk.troubles
        self.positions = MemoryPositions()
        every = Books(books, books, books, books, books.untouched, books)
        self.service = TubeService(every, desk.settings.limits, self.positions, troubles=desk.troubles, pace=pace)

    def put(self, *pods: tuple[int, int], tube: str = "t") -> None:
        """Commit pods (seq, shard) and publish the position."""
        self.books.pods_of[tube] += pods
        self.positions.tell(f"tube:{tube}", max(seq for seq, _ in pods))

    async def claimed(self, part: str = "0/1", ttl: str = "") -> Client:
        """A client that has the lease of a partition; its term is 1, or the next."""
        client = self.desk.connect()
        [line] = await client.say(f"CLAIM t {part}{ttl}")
        assert line.startswith(f"LEASE t {part} "), line
        return client

    def why(self, tube: str = "t") -> str:
        return self.troubles.why("tube", tube) or ""


@asynccontextmanager
async def open_tubes(books: MemoryBooks | None = None, pace: TubeIntervals = TubeIntervals()) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(Desk(nursery, Troubles(), max_pending=5), books or MemoryBooks(), pace)
        await world.desk.open(world.service)
        world.positions.tell("tube:t", 0)
        yield world
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("few", [False, True])
async def test_a_worker_claims_reads_acks_parks_reports_and_releases(few: bool, autojump_clock: MockClock) -> None:
    async with open_tubes(MemoryBooks(few=few)) as world:
        client = world.desk.connect()
        assert await client.say("TUBE t") == ["TUBE t 1"]
        assert await client.say("CLAIM t 0/1 ttl=20 holder=me") == ["LEASE t 0/1 1 20"]
        world.put((1, 0), (2, 0), (3, 0), (4, 0))
        assert await client.say("PODS t 0/1 1 limit=3") == [
            "RDATA tube:t 0/1 1 []",
            "RDATA tube:t 0/1 2 []",
            "RDATA tube:t 0/1 3 []",
            "CURSOR t 0/1 3.0 3",
        ]
        assert await client.say("PODS t 0/1 1 after=3.0 limit=999999999") == [
            "RDATA tube:t 0/1 4 []",
            "CURSOR t 0/1 4.0 1",
        ]
        assert world.books.limits == [3, 100_000]
        assert world.books.asked["short"] == 2
        assert await client.say("PODS t 0/1 1 after=1.0 upto=3.0 encoding=arrow") == [
            "ARROW of 3",
            "CURSOR t 0/1 3.0 1",
        ]
        assert await client.say("PODS t 0/1 1 plan=1") == ["CURSOR t 0/1 4.0 4"]
        assert await client.say("ACK t 0/1 1 1") == ["ACKED t 0/1 1"]
        assert await client.say("ACK t 0/1 1 after=0.0 upto=3.0") == ["ACKED t 0/1 2"]
        assert (await client.say("PARK t 0/1 1 4 7,8 3 no use"))[0] == "PARKED t 0/1 2"
        assert world.books.parked == [(4, (7, 8), 3, "no use")]
        assert (await client.say('REPORT t me {"done":1}'))[0].startswith("REPORT t me")
        assert (await client.say("RENEW t 0/1 1"))[0] == "LEASE t 0/1 1 20"
        assert await client.say("RELEASE t 0/1 1") == ["RELEASE t 0/1 1"]
        assert (await client.say("PODS t 0/1 1"))[0].startswith("ERROR lease_lost")
        assert world.service.summary() == {"tubes": ["t"]}


@pytest.mark.parametrize("few", [False, True])
async def test_who_waits_is_woken_by_pods_of_its_own_partition_and_keeps_its_lease_meanwhile(
    few: bool, autojump_clock: MockClock
) -> None:
    async with open_tubes(MemoryBooks(infos={"t": replace(TUBE, partitions=2)}, few=few)) as world:
        even, odd = await world.claimed("0/2", " ttl=9"), await world.claimed("1/2", " ttl=9")
        began = trio.current_time()
        await even.say("PODS t 0/2 1 wait=60")
        await odd.say("PODS t 1/2 2 wait=30")
        plans = len(world.books.limits)
        await settle(10)
        assert len(world.books.limits) == plans, "nobody asks for pods while nothing comes"
        assert world.books.renewals >= 4
        world.put((1, 4))
        assert await even.lines() == ["RDATA tube:t 0/2 1 []", "CURSOR t 0/2 1.0 1"]
        assert len(world.books.limits) == plans + 1, "the other was not woken"
        assert await odd.lines(40) == ["CURSOR t 1/2 0.0 0"]
        assert trio.current_time() >= began + 30
        del world.books.held[1]
        assert (await even.say("PODS t 0/2 1 after=1.0 wait=60"))[0].startswith("ERROR lease_lost")


@pytest.mark.parametrize("ready", [False, True])
async def test_who_has_read_to_the_end_is_woken_without_a_query_of_its_own_and_misses_nothing_between(
    ready: bool, autojump_clock: MockClock
) -> None:
    async with open_tubes(MemoryBooks(infos={"t": replace(TUBE, partitions=2)}, few=True)) as world:
        asked = world.books.asked
        client, other = await world.claimed("0/2"), await world.claimed("1/2")

        async def ask(after: int) -> list[str]:
            """What is answered until something comes; nothing if the request waits."""
            lines = await client.say(f"PODS t 0/2 1 after={after}.0 wait=60" + " ready=1" * ready)
            return [line for line in lines if line != f"CURSOR t 0/2 {after}.0 0"]

        async def comes(after: int) -> list[str]:
            lines = await client.lines()
            return await ask(after) if lines == ["READY t 0/2"] else lines

        world.put((1, 0))
        assert (await ask(0))[-1] == "CURSOR t 0/2 1.0 1"
        assert await ask(1) == []
        assert asked["short"] == 1
        world.put((2, 0))
        assert (await comes(1))[-1] == "CURSOR t 0/2 2.0 1"
        assert asked["short"] == 2
        await other.say("PODS t 1/2 2 wait=60")
        before = asked["shards_between"]
        world.put((3, 0))
        await settle(0.1)
        assert asked["shards_between"] == before + 1, "pod 3 was looked at for the other one"
        came = await ask(2)
        assert (came if came[-1] != "READY t 0/2" else await ask(2))[-1] == "CURSOR t 0/2 3.0 1"
        del world.books.held[1]
        assert await ask(3) == []
        if not ready:
            assert (await client.lines(1.5))[0].startswith("ERROR lease_lost")


async def test_a_look_that_fails_or_takes_too_long_wakes_all_who_wait(autojump_clock: MockClock) -> None:
    async with open_tubes(pace=TubeIntervals(waking=1.0)) as world:
        client = await world.claimed("1/2")
        for slow, fails in ((5.0, {}), (0.0, {"shards_between": DatabaseError("locked")})):
            plans = len(world.books.limits)
            await client.say("PODS t 1/2 1 wait=60")
            world.books.slow, world.books.fails = slow, fails
            world.put((plans + 1, 0))
            await settle(2)
            assert len(world.books.limits) == plans + 2, "woken, though no pod is its own"
            assert world.why() != ""
            world.books.slow, world.books.fails = 0.0, {}
            await settle(3)
            assert world.why() == ""
            await client.lines(70)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ("TUBE nothing", "ERROR unknown_tube: there is no tube 'nothing'; the tubes are: t"),
        ("CLAIM t 0/2 ttl=999999", "ERROR tube_refused: ttl=999999 is out of range"),
        ("CLAIM t 0/2 wait=999999", "ERROR tube_refused: wait=999999 is too long"),
        ("CLAIM t 0/1 wait=1", "ERROR lease_held"),
        ("PODS t 0/1 1 after=9.0", "ERROR cursor_ahead: cursor 9.0 lies beyond the position 3 of tube t"),
        ("PODS t 0/1 1 upto=0.9", "ERROR cursor_ahead"),
        ("ACK t 0/1 1 after=0.0 upto=9.0", "ERROR cursor_ahead"),
        ("ACK t 0/1 7 1", "ERROR lease_lost"),
        ("RENEW t 0/1 7", "ERROR lease_lost"),
        ("REPORT nothing me {}", "ERROR unknown_tube"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_the_connection_stays(
    request_: str, answer: str, autojump_clock: MockClock
) -> None:
    async with open_tubes() as world:
        client = await world.claimed()
        world.put((3, 0))
        lines = await client.say(request_) + await client.lines(2)
        assert lines[0].startswith(answer)
        assert await client.say("TUBE t") == ["TUBE t 1"]


async def test_a_broken_tube_is_its_own_trouble_and_is_used_again_when_it_is_mended(autojump_clock: MockClock) -> None:
    books = MemoryBooks(infos={"t": TUBE, "u": TubeInfo("u", 1, 20, 21)}, pods_of={"t": [], "u": []})
    async with open_tubes(books) as world:
        world.positions.tell("tube:u", 0)
        client, other = await world.claimed(), world.desk.connect()
        await client.say("PODS t 0/1 1 wait=60")
        books.infos["t"] = replace(TUBE, table_oid=None, fault="its table is gone; create it again")
        await settle(2)
        assert (await client.lines(3))[0].startswith("ERROR tube_refused: tube t cannot be served: its table is gone")
        assert "its table is gone" in world.why()
        assert "tube:t" not in world.positions.listeners
        for request in ("CLAIM t 0/2", "ACK t 0/1 1 1", "PARK t 0/1 1 1 * 1 x", "PODS t 0/1 1"):
            assert (await client.say(request))[0].startswith("ERROR tube_refused")
        assert (await other.say("CLAIM u 0/1"))[0] == "LEASE u 0/1 2 30"
        assert books.backfilled[-1] == ["u"]
        books.infos["t"] = TubeInfo("t", 1, 12, 13)
        await settle(2)
        assert world.why() == ""
        assert world.positions.sources["tube:t"] == LockSource(12, 13, own_deletes=True, id_column="seq")
        books.infos["t"] = replace(books.infos["t"], fault="broken just now")
        books.fails["ack"] = DatabaseError("no such table")
        assert "broken just now" in (await client.say("ACK t 0/1 1 1"))[0]
        del books.infos["t"]
        await settle(2)
        assert world.why() == ""
        assert list(world.service.tubes) == ["u"]


async def test_errors_of_the_database_are_answered_as_they_are_where_the_tube_is_well(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes() as world:
        client = await world.claimed()
        world.books.fails["short"] = DatabaseError("made for another version")
        assert (await client.say("PODS t 0/1 1"))[0] == "CURSOR t 0/1 0.0 0"
        for what, error in (("plan", DatabaseError("odd")), ("short", DatabaseUnavailable("away"))):
            world.books.fails[what] = error
            assert (await client.say("PODS t 0/1 1"))[0] == f"ERROR {error.code}: {error}"
        world.books.fails.clear()
        assert (await client.say("PODS t 0/1 1"))[0] == "CURSOR t 0/1 0.0 0"


async def test_a_tube_that_was_dropped_and_made_again_is_served_before_the_next_look(autojump_clock: MockClock) -> None:
    async with open_tubes(pace=replace(TubeIntervals(), look=1000.0)) as world:
        client = world.desk.connect()
        world.positions.say("tube:t", Reading(position=0, refused=StreamRefused("its table was dropped")))
        assert (await client.say("CLAIM t 0/1"))[0].startswith("ERROR tube_refused: tube t cannot be served: its table")
        world.books.infos["t"] = replace(TUBE, table_oid=4711)
        assert await client.say("CLAIM t 0/1 ttl=20") == ["LEASE t 0/1 1 20"]


async def test_a_position_that_is_refused_is_a_trouble_and_ends_the_wait(autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        client = await world.claimed()
        await client.say("PODS t 0/1 1 wait=60")
        world.positions.say("tube:t", Reading(position=0, refused=StreamRefused("the sequence has a cache")))
        assert "the sequence has a cache" in (await client.lines(3))[0]
        assert "the sequence has a cache" in world.why()
        world.positions.tell("tube:t", 0)
        assert world.why() == ""


async def test_each_look_fails_alone_and_tables_without_triggers_are_shown(autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        world.books.fails = {"tubes": ValueError("x"), "look": OSError("y"), "backfills": DatabaseError("z")}
        world.books.untouched_tables = {"t": "table public.x has no trigger"}
        await settle(3)
        causes = {trouble.place.cause for trouble in world.troubles.of("service", "tubes")}
        assert causes == {"tubes", "leases", "backfills"}
        assert "has no trigger" in world.why()
        world.books.fails.clear()
        world.books.untouched_tables.clear()
        await settle(3)
        assert world.troubles.current() == []


async def test_without_a_tube_nothing_is_asked_but_whether_there_is_one(autojump_clock: MockClock) -> None:
    async with open_tubes(MemoryBooks(infos={})) as world:
        await settle(20)
        assert set(world.books.asked) - {"backfills"} == {"tubes"}
        world.books.infos["t"] = TUBE
        await settle(3)
        assert world.books.asked["untouched"]
        assert world.books.asked["look"]


async def test_when_history_forks_waiting_requests_are_woken_and_what_was_served_is_reported(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes() as world:
        client = await world.claimed(ttl=" ttl=300")
        world.put((1, 0), (2, 0))
        assert (await client.say("PODS t 0/1 1"))[-1] == "CURSOR t 0/1 2.0 2"
        await settle(2)
        assert world.books.notes == [("g1", {"t": 2})]
        assert await client.say("PODS t 0/1 1 after=2.0 wait=200") == []
        world.books.held.clear()  # the lease is void, and no position moves
        world.books.generations = 2
        world.positions.tell("tube:t", 2)
        await settle(3)
        [line] = await client.lines()
        assert line.startswith("ERROR lease_lost")
        assert world.books.reported == [("t", "g1", 2)]
        world.positions.tell("tube:t", 90)
        await settle(2)
        assert world.books.notes[-1] == ("g2", {"t": 90})


async def test_after_a_fork_no_position_of_the_earlier_history_is_used(autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        world.put((1, 0), (2, 0))
        await settle(2)
        world.books.generations = 2
        await settle(3)
        client = await world.claimed()
        assert await client.say("PODS t 0/1 1") == []  # the first position of this generation is waited for
        world.positions.tell("tube:t", 1)
        assert (await client.lines())[-1] == "CURSOR t 0/1 1.0 1"


async def test_the_first_position_of_a_new_tube_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        world.books.infos["u"] = TubeInfo("u", 1, 20, 21)
        world.books.pods_of["u"] = [(5, 0)]
        client = world.desk.connect()
        await client.say("CLAIM u 0/1")
        assert await client.say("PODS u 0/1 1") == []
        world.positions.tell("tube:u", 5)
        assert (await client.lines())[-1] == "CURSOR u 0/1 5.0 1"


async def test_a_client_with_too_many_requests_in_the_queue_is_cut_off(autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        client = await world.claimed()
        await client.say("PODS t 0/1 1 wait=60")
        lines = await client.say(*["TUBE t"] * 6)
        assert lines[-1].startswith("ERROR too_many_requests: more than 5 requests wait")


async def test_a_lease_whose_holder_is_silent_is_a_trouble_until_it_is_renewed_or_over(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes() as world:
        client = await world.claimed("0/1", " ttl=20")
        world.books.silent = 19.9
        await settle(3)
        assert world.why() == ""
        world.books.silent = 20.0
        await settle(3)
        assert "partition 0/1: w1 has not renewed its lease of 20 s" in world.why()
        assert [one.code for one in world.troubles.current()] == ["lease_expired"]
        assert world.service.fault("t") is None, "the tube is served: another worker may claim"
        world.books.silent = 0.0
        await settle(3)
        assert world.why() == ""
        world.books.silent = 21.0
        await settle(3)
        assert world.why() != ""
        await client.say("RELEASE t 0/1 1")
        await settle(3)
        assert world.why() == ""
