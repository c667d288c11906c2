"""The engine on a clock that jumps, with a store in memory and a transport that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from replicad.retry import Backoff
from replicad.sender.engine import Engine
from replicad.sender.items import Edu, Order, Pdu, Transaction
from replicad.sender.settings import GIVEN_UP, Terms
from replicad.sender.store import FactBatch
from replicad.sender.transport import SendResult

from ..federation_fakes import Answer, MemoryStore, ScriptedTransport

TAKEN = SendResult(True, "status 200")
DOWN = SendResult(False, "status 503")
HOUR = 3600.0
DAY = 24 * HOUR


async def always(_destination: str, _transaction: Transaction) -> SendResult:
    return TAKEN


class World:
    """A sender's engine with facts coming in; it can be killed and started again."""

    def __init__(self, answer: Answer, **terms: object) -> None:
        self.store = MemoryStore()
        self.transport = ScriptedTransport(answer)
        self.terms = Terms(**terms)  # type: ignore[arg-type]
        self.latest = None
        self.token = 0
        self.engine: Engine

    @asynccontextmanager
    async def running(self, workers: int = 8, probers: int = 4, memory: int = 64 << 20) -> AsyncIterator[Engine]:
        """An engine on what the store has; killed at the end of the block."""
        self.engine = Engine(
            self.store,
            self.transport,
            self.terms,
            memory=memory,
            workers=workers,
            probers=probers,
            latest=self.latest,
            now_ms=lambda: int(trio.current_time() * 1000),
            chance=Random(0).random,
        )
        async for name, standing in self.store.standings(lambda _: True):
            self.engine.meet(name, standing)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine.run)
            yield self.engine
            nursery.cancel_scope.cancel()

    async def fact(self, *names: str, room: str | None = None) -> str:
        """A fact for destinations, recorded and accepted; returns its body."""
        self.token += 1
        pdu = Pdu(Order(self.token, 0), room, f'"f{self.token}"')
        recording = FactBatch()
        recording.add(pdu, names)
        await self.store.record("facts", self.token, recording)
        self.engine.accept([(pdu, names)])
        return pdu.body


@pytest.fixture
def jumping(autojump_clock: MockClock) -> MockClock:
    """Time passes at once when nobody has anything to do."""
    return autojump_clock


async def test_every_live_destination_gets_everything_in_order_while_one_in_ten_is_dead(jumping: MockClock) -> None:
    names = [f"{number}.example" for number in range(300)]
    dead = set(names[::10])
    live = [name for name in names if name not in dead]

    async def answer(destination: str, _transaction: Transaction) -> SendResult:
        await trio.sleep(60 if destination in dead else 0.05)
        return DOWN if destination in dead else TAKEN

    world = World(answer)
    async with world.running(workers=16, probers=16) as engine:
        bodies = []
        latency = 0.0
        for _ in range(8):
            bodies.append(await world.fact(*names))
            began = trio.current_time()
            while any(world.transport.facts[name] < len(bodies) for name in live):
                await trio.sleep(0.05)
            if len(bodies) > 1:  # all are new at the first fact, and nobody knows who is dead
                latency = max(latency, trio.current_time() - began)
        assert all(world.transport.bodies(name) == bodies for name in live)
        assert latency < 1.5  # 270 destinations, 16 at a time, 0.05 s each: 0.85 s
        assert engine.statistics().memory <= 8 * 300, "not only what is new was kept, and that once"
        assert engine.statistics().backing_off + engine.statistics().in_flight == len(dead)


async def test_after_three_days_of_503_a_destination_is_caught_up_with_and_the_others_saw_nothing(
    jumping: MockClock,
) -> None:
    async def answer(destination: str, _transaction: Transaction) -> SendResult:
        return DOWN if destination == "sick.example" and trio.current_time() < 3 * DAY else TAKEN

    world = World(answer)
    expected: list[str] = []
    async with world.running() as engine:
        first = [await world.fact("well.example", "sick.example", room=f"r{n % 7}") for n in range(3)]
        while trio.current_time() < 3 * DAY:
            expected.append(await world.fact("well.example", "sick.example", room=f"r{len(expected) % 7}"))
            engine.accept_edu(Edu('"typing"', "k"), ["sick.example"])
            await trio.sleep(600)
            assert world.transport.bodies("well.example")[-1] == expected[-1]
        assert engine.statistics().catching_up == 1
        assert engine.statistics().memory == 0
        assert world.transport.bodies("sick.example") == []
        await trio.sleep(7 * HOUR)
        assert engine.statistics().catching_up == 0
    attempts = world.transport.attempts["sick.example"]
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert max(pauses) <= world.terms.backoff.cap
    assert len(attempts) < 40
    got = world.transport.bodies("sick.example")
    repeated = next(iter(world.transport.taken["sick.example"].values()))
    assert repeated.pdus[0] == first[0], "the transaction that was under way comes first, as it was"
    assert got == sorted(got, key=lambda body: int(body.strip('"f')))
    assert got[-7:] == expected[-7:], "the latest of each of the seven rooms"
    assert len(got) <= len(repeated.pdus) + 7


async def test_with_every_fact_wanted_catch_up_skips_none(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN if trio.current_time() < DAY else TAKEN

    world = World(answer, supersede=False)
    async with world.running():
        bodies = [await world.fact("a.example", room="r") for _ in range(400)]
        await trio.sleep(2 * DAY)
    assert world.transport.bodies("a.example") == bodies
    assert all(len(made.pdus) <= 50 for made in world.transport.taken["a.example"].values())


async def test_in_catch_up_a_rooms_latest_facts_stand_in_where_the_application_says_so(jumping: MockClock) -> None:
    class Application:
        async def latest(self, destination: str, rooms: object) -> dict[str, list[str]]:
            assert destination == "a.example"
            return {"public": ['"end1"', '"end2"']}

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN if trio.current_time() < DAY else TAKEN

    world = World(answer)
    world.latest = Application()  # type: ignore[assignment]
    async with world.running():
        pending = await world.fact("a.example", room="public")
        await wait_all_tasks_blocked()
        await world.fact("a.example", room="public")
        last = await world.fact("a.example", room="partial state")
        await trio.sleep(2 * DAY)
    assert world.transport.bodies("a.example") == [pending, '"end1"', '"end2"', last]


async def test_a_server_that_is_up_again_is_sent_to_at_once(jumping: MockClock) -> None:
    down = True

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN if down else TAKEN

    world = World(answer)
    async with world.running() as engine:
        body = await world.fact("a.example")
        await trio.sleep(12 * HOUR)
        down = False
        before = trio.current_time()
        engine.wake("a.example")
        engine.wake("nobody.example")
        await wait_all_tasks_blocked()
        assert world.transport.bodies("a.example") == [body]
        assert trio.current_time() == before


async def test_destinations_that_are_away_for_long_take_no_probes_of_those_that_are_new_or_failed_once(
    jumping: MockClock,
) -> None:
    """A sender starts after a night: many that are down are due at once, and each try of them takes a minute."""
    dead = [f"dead{number}.example" for number in range(40)]

    async def answer(destination: str, transaction: Transaction) -> SendResult:
        if destination in dead:
            await trio.sleep(60)
            return DOWN
        return DOWN if destination == "hiccup.example" and transaction.serial == 1 and not failed_before() else TAKEN

    def failed_before() -> bool:
        return len(world.transport.attempts["hiccup.example"]) > 1

    world = World(answer)
    async with world.running(probers=4):
        await world.fact(*dead)
        await trio.sleep(2 * DAY)
    await trio.sleep(8 * HOUR)
    async with world.running(probers=4) as engine:
        await trio.sleep(1)
        began = trio.current_time()
        await world.fact("new.example", "hiccup.example")
        await trio.sleep(10)
        assert world.transport.bodies("new.example") == world.transport.bodies("hiccup.example") == ['"f2"']
        assert world.transport.attempts["new.example"] == [began]
        assert engine.statistics().waiting > 30, "the dead are due, and wait for their own probes"
        engine.wake(dead[-1])  # it waits behind the others that are away
        await wait_all_tasks_blocked()
        assert dead[-1] in world.transport.in_flight
        await trio.sleep(DAY)
    assert all(len(world.transport.attempts[name]) > 4 for name in dead), "none of them is forgotten"


async def test_a_destination_that_is_given_up_is_tried_seldom_until_something_new_comes_for_it(
    jumping: MockClock,
) -> None:
    back = False

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return TAKEN if back else DOWN

    world = World(answer)
    attempts = world.transport.attempts["gone.example"]
    longest = world.terms.longest
    async with world.running() as engine:
        bodies = [await world.fact("gone.example")]
        await trio.sleep(30 * DAY)
        tries = len(attempts)
        pauses = [later - earlier for earlier, later in pairwise(attempts)]
        assert sum(pause > longest / 2 for pause in pauses) > GIVEN_UP
        assert max(pauses[: GIVEN_UP + 10]) <= longest
        assert 0.7 * world.terms.idle < pauses[-1] <= world.terms.idle
        bodies.append(await world.fact("gone.example"))
        await trio.sleep(longest + 1)
        assert len(attempts) == tries + 1, "somebody sends to it: it is tried as others are"
        back = True
        engine.expect_edus(["gone.example"])
        await trio.sleep(longest + 1)
    assert world.transport.bodies("gone.example") == bodies


async def test_what_is_superseded_is_not_removed_under_a_transaction_that_is_made_of_it(jumping: MockClock) -> None:
    """A transaction is stored by the places of its facts: if one of them went before, its repeat would differ."""
    down, removing = True, trio.Event()
    names: list[Sequence[str]] = []

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        await trio.sleep(0.5)
        return DOWN if down else TAKEN

    async def collapse(some: Sequence[str]) -> int:
        names.append(some)
        removing.set()
        await trio.sleep(100)
        return 0

    world = World(answer)
    async with world.running() as engine:
        await world.fact("a.example", room="r")
        await trio.sleep(12 * HOUR)
        world.store.collapse = collapse  # type: ignore[method-assign]
        tries = len(world.transport.attempts["a.example"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.collapse)
            await removing.wait()
            down = False
            for _ in range(2):
                engine.wake("a.example")
                await trio.sleep(49)
            assert len(world.transport.attempts["a.example"]) == tries, "it waits until that is done"
        await trio.sleep(0.2)
        assert world.transport.in_flight == {"a.example"}
        await engine.collapse()
        assert names == [["a.example"]], "not while its facts are on the way"


async def test_a_destination_is_not_tried_for_ever_because_of_updates_that_may_be_dropped(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN

    world = World(answer)
    async with world.running() as engine:
        engine.accept_edu(Edu('"typing"', "k"), ["gone.example"])
        await trio.sleep(DAY)
        tries = len(world.transport.attempts["gone.example"])
        await trio.sleep(30 * DAY)
        assert 5 < tries == len(world.transport.attempts["gone.example"])
        assert engine.statistics().dropped_updates == 1
    entry = world.store.shelves["gone.example"].entry
    assert entry is not None
    assert entry.transaction is None
    assert entry.failures == tries


async def test_a_transaction_whose_answer_was_lost_is_repeated_under_its_id_over_kills(jumping: MockClock) -> None:
    chance = Random(7)

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        await trio.sleep(chance.random())
        return TAKEN

    world = World(answer, backoff=Backoff(first=0.1, cap=1.0, jitter=0.2), pdus=3, queue_pdus=4)
    bodies: list[str] = []
    lost = 0
    for _ in range(60):
        async with world.running():
            for _ in range(chance.randrange(5)):
                bodies.append(await world.fact("a.example", "b.example"))
            await trio.sleep(chance.random() * 2)
        # The request was on its way when the sender was killed: it arrived all the same.
        for name in ("a.example", "b.example"):
            entry = world.store.shelves[name].entry
            if entry is not None and entry.transaction is not None:
                lost += 1
                world.transport.taken[name].setdefault(entry.transaction.id, entry.transaction)
        world.transport.in_flight.clear()
    async with world.running():
        await trio.sleep(60)
    assert lost > 20
    assert world.transport.bodies("a.example") == world.transport.bodies("b.example") == bodies


async def test_back_off_goes_on_where_it_was_after_a_kill(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN

    world = World(answer)
    async with world.running():
        await world.fact("a.example")
        await trio.sleep(HOUR)
    before = len(world.transport.attempts["a.example"])
    retry_at = world.store.shelves["a.example"].standing(trio.current_time()).retry_in
    assert retry_at is not None
    assert retry_at > 60
    async with world.running() as engine:
        await trio.sleep(retry_at - 1)
        assert engine.statistics().backing_off == 1
        assert len(world.transport.attempts["a.example"]) == before
        await trio.sleep(2)
        assert len(world.transport.attempts["a.example"]) == before + 1


REFUSED = SendResult(False, "status 400", refused=True)


@pytest.mark.parametrize("supersede", [True, False])
async def test_what_a_destination_refuses_is_parked_with_the_reason_and_all_else_arrives_in_order(
    jumping: MockClock, supersede: bool
) -> None:
    bad = {'"f7"', '"f8"', '"f20"', '"f40"', '"d3"'}

    async def answer(_destination: str, made: Transaction) -> SendResult:
        return REFUSED if bad & {*made.pdus, *made.edus} else TAKEN

    world = World(answer, supersede=supersede)
    kept = [Edu(f'"d{number}"') for number in range(10)]
    with capture_logs() as events:
        async with world.running() as engine:
            await world.store.record_edus("to_device", 1, [("a.example", edu) for edu in kept])
            engine.expect_edus(["a.example"])
            bodies = [await world.fact("a.example") for _ in range(40)]
            await trio.sleep(DAY)  # the last one is alone, and nothing shows whether others would be accepted
            assert engine.statistics().parked == 4
            bodies.append(await world.fact("a.example"))
            await trio.sleep(DAY)
            assert engine.statistics().parked == len(bad)
            assert not engine.statistics().backing_off
    assert world.transport.bodies("a.example") == [body for body in bodies if body not in bad]
    got = [body for made in world.transport.taken["a.example"].values() for body in made.edus]
    assert got == [edu.body for edu in kept if edu.body not in bad]
    assert sorted(world.store.shelves["a.example"].parked) == sorted((body, "status 400") for body in bad)
    said = [event for event in events if event["event"] == "parked"]
    assert {(event["destination"], event["reason"], event["log_level"]) for event in said} == {
        ("a.example", "status 400", "error")
    }
    assert sum(event["items"] for event in said) == len(bad)


async def test_a_proxy_that_refuses_everything_for_a_morning_costs_nothing(jumping: MockClock) -> None:
    async def answer(_destination: str, _made: Transaction) -> SendResult:
        return REFUSED if HOUR < trio.current_time() < 7 * HOUR else TAKEN

    world = World(answer, supersede=False)
    bodies = []
    async with world.running():
        while trio.current_time() < 8 * HOUR:
            bodies.append(await world.fact("a.example", room="r"))
            await trio.sleep(97)
    async with world.running() as engine:
        await trio.sleep(DAY)
        assert engine.statistics().parked == 0
    assert world.transport.bodies("a.example") == bodies
    assert not world.store.shelves["a.example"].parked
    assert len(world.transport.attempts["a.example"]) < 1000


async def test_a_transaction_that_is_too_large_is_split_at_once(jumping: MockClock) -> None:
    async def answer(_destination: str, made: Transaction) -> SendResult:
        return SendResult(False, "status 413", refused=True) if len(made.pdus) > 7 else TAKEN

    world = World(answer)
    async with world.running():
        bodies = [await world.fact("a.example") for _ in range(100)]
        await trio.sleep(1)
        assert world.transport.bodies("a.example") == bodies


async def test_what_may_have_been_taken_is_never_sent_again_in_pieces(jumping: MockClock) -> None:
    """The answer is lost; then a proxy refuses the same request, and accepts what follows it."""
    first: list[str] = []

    async def answer(_destination: str, made: Transaction) -> SendResult:
        if not first:
            first.extend(made.pdus)
            world.transport.taken["a.example"][made.id] = made
            return DOWN
        return REFUSED if '"f1"' in made.pdus else TAKEN

    world = World(answer)
    async with world.running():
        before = [await world.fact("a.example") for _ in range(3)]
        await trio.sleep(1)
        after = [await world.fact("a.example") for _ in range(3)]
        await trio.sleep(DAY)
    assert world.transport.bodies("a.example") == [*before, *after]
    assert first[:1] == before[:1]
    assert [body for body, _ in world.store.shelves["a.example"].parked] == first, "it is parked whole"


async def test_with_kills_and_lost_answers_each_fact_is_taken_or_parked_and_none_twice(jumping: MockClock) -> None:
    chance = Random(5)
    bad: set[str] = set()
    lost = 0.1

    async def answer(_destination: str, made: Transaction) -> SendResult:
        await trio.sleep(chance.random())
        if chance.random() < lost:
            return DOWN
        return REFUSED if bad & {*made.pdus} else TAKEN

    world = World(answer, backoff=Backoff(first=0.1, cap=1.0, jitter=0.2), catch_up_after=0.5, pdus=9, supersede=False)
    bodies: list[str] = []
    for _ in range(60):
        async with world.running():
            for _ in range(chance.randrange(8)):
                bodies.append(await world.fact("a.example"))
                if chance.random() < 0.2:
                    bad.add(bodies[-1])
            await trio.sleep(chance.random() * 20)
        world.transport.in_flight.clear()
    async with world.running():
        await trio.sleep(HOUR)
        lost = 0.0  # after so many failures one more means a pause of a week
        bodies.append(await world.fact("a.example"))
        await trio.sleep(HOUR)
    parked = [body for body, _ in world.store.shelves["a.example"].parked]
    taken = world.transport.bodies("a.example")
    assert len(bad) > 20
    assert bad <= {*parked}
    assert taken == [body for body in bodies if body in taken], "out of order"
    assert sorted([*taken, *parked]) == sorted(bodies), "lost, or twice"


async def test_what_the_settings_forbid_is_kept_and_tried_after_the_longest_pause_or_when_it_is_reported_up(
    jumping: MockClock,
) -> None:
    forbidden = True

    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return SendResult(False, "10.0.0.1", forbidden=True) if forbidden else TAKEN

    world = World(answer)
    cap = world.terms.backoff.cap
    with capture_logs() as events:
        async with world.running() as engine:
            bodies = [await world.fact("a.example")]
            await trio.sleep(2.5 * cap)
            attempts = world.transport.attempts["a.example"]
            assert [round(later - earlier) for earlier, later in pairwise(attempts)] == [cap, cap]
            assert engine.statistics().failures == 3
            forbidden = False
            engine.wake("a.example")
            await trio.sleep(1)
    assert world.transport.bodies("a.example") == bodies
    said = [event for event in events if event["event"] == "destination_forbidden"]
    assert [event["failures"] for event in said] == [1, 2, 3]
    assert {(event["destination"], event["reason"], event["retry_in"]) for event in said} == {
        ("a.example", "10.0.0.1", cap)
    }


async def test_updates_that_must_not_be_lost_survive_kills_and_an_outage(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        return DOWN if trio.current_time() < DAY else TAKEN

    world = World(answer)
    kept = [Edu(f'"d{number}"') for number in range(250)]
    async with world.running() as engine:
        await world.store.record_edus("to_device", 1, [("a.example", edu) for edu in kept])
        engine.expect_edus(["a.example"])
        engine.accept_edu(Edu('"typing"', "k"), ["a.example"])
        await trio.sleep(HOUR)
    async with world.running():
        await trio.sleep(2 * DAY)
    made = world.transport.taken["a.example"].values()
    got = [body for transaction in made for body in transaction.edus]
    assert [body for body in got if body != '"typing"'] == [edu.body for edu in kept]
    assert all(len(transaction.edus) <= 100 for transaction in made)


async def test_a_thousand_destinations_share_a_few_writes(jumping: MockClock) -> None:
    world = World(always)
    async with world.running(workers=1000, probers=1000):
        await world.fact(*(f"{number}.example" for number in range(1000)))
        await wait_all_tasks_blocked()
    assert len(world.transport.taken) == 1000
    assert world.store.writes <= 6


async def test_a_full_memory_delays_nothing_and_loses_nothing(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        await trio.sleep(1)
        return TAKEN

    world = World(answer)
    async with world.running(memory=2000) as engine:
        bodies = []
        for _ in range(500):
            bodies.append(await world.fact("a.example", "b.example"))
            assert engine.statistics().memory <= 2000 + 2 * 4 * 50 * 300
        await trio.sleep(100)
    assert world.transport.bodies("a.example") == world.transport.bodies("b.example") == bodies


async def test_closing_lets_what_is_under_way_end_and_writes_it_down(jumping: MockClock) -> None:
    async def answer(_destination: str, _transaction: Transaction) -> SendResult:
        await trio.sleep(3)
        return TAKEN

    world = World(answer, pdus=1)
    async with world.running() as engine:
        first = await world.fact("a.example")
        await world.fact("a.example", "b.example")
        await trio.sleep(1)
        engine.close()
        await world.fact("c.example")
        await trio.sleep(60)
    assert world.transport.bodies("a.example") == [first]
    shelf = world.store.shelves["a.example"]
    assert shelf.entry is not None
    assert (shelf.entry.success, shelf.entry.transaction) == (Order(1, 0), None)
    assert list(shelf.facts) == [Order(2, 0)]
    assert "c.example" not in world.transport.taken
