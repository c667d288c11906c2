"""What a store of the sender must do, said of the one in Postgres and of the one that other tests use in its place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from replicad.errors import DatabaseError, SenderRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, quote_ident
from replicad.sender.items import (
    START,
    Aside,
    DestinationState,
    Edu,
    Order,
    Pdu,
    Transaction,
    WantedItems,
    make_transaction,
)
from replicad.sender.store import Entry, FactBatch, Recorded, Restart, SenderStore, open_store
from replicad.streams.registry import Registry

from ..federation_fakes import MemoryStore

ALL = WantedItems(pdus=True, edus=True, transaction=True, collapse=False)
SCHEMA = 'odd "schema'
AnyStore = SenderStore | MemoryStore
NEXT_GENERATION = """INSERT INTO replicad.stream_generation SELECT stream, number + 1, 'bbbb', $2::bigint, '{}', '{}',
    'noted', clock_timestamp(), incarnation, relation, sequence, file
    FROM replicad.stream_generation WHERE stream = $1"""
GENERATIONS = "SELECT id FROM replicad.stream_generation WHERE stream = $1"


@pytest.fixture
async def real(database: Database) -> AsyncIterator[SenderStore]:
    await schema.install(database, "federation", SCHEMA)
    async with open_store(database, SCHEMA, "s1", ["s1"], ["facts", "to_device"]) as store:
        await store.begin("facts", 0)
        await store.begin("to_device", 0)
        yield store


@pytest.fixture(params=["postgres", "memory"])
async def store(request: pytest.FixtureRequest, real: SenderStore) -> AnyStore:
    return real if request.param == "postgres" else MemoryStore()


def fact(token: int, part: int = 0, room: str | None = None, body: str | None = None) -> Pdu:
    return Pdu(Order(token, part), room, body or f'{{"n": {token}.{part}}}')


async def record(store: AnyStore, upto: int, *facts: tuple[Pdu, Sequence[str]]) -> None:
    recording = FactBatch()
    for pdu, names in facts:
        recording.add(pdu, names)
        recording.newcomers.extend(names)
    await store.record("facts", upto, recording)


async def orders(store: AnyStore, name: str) -> list[Order]:
    page = await store.page(name, ALL, pdus=1000, pdu_bytes=1 << 30, edus=1000)
    return [pdu.order for pdu in page.pdus]


async def standings(store: AnyStore) -> dict[str, DestinationState]:
    return {name: standing async for name, standing in store.standings(lambda _: True)}


async def test_a_fact_stands_there_for_each_of_its_destinations_until_that_one_took_it(store: AnyStore) -> None:
    body = '{"b":1,  "a":2.50, "text":"\\u0000 \\"quoted\\" \\ud83d\\ude00 é"}'
    await record(store, 9, (fact(5, 0, "r", body), ["a", "b"]), (fact(5, 1, None), ["a"]), (fact(9), ["a", "b"]))
    page = await store.page("a", ALL, pdus=2, pdu_bytes=1 << 20, edus=10)
    assert [(pdu.order, pdu.room) for pdu in page.pdus] == [((5, 0), "r"), ((5, 1), None)]
    assert page.pdus[0].body == body, "not byte for byte what came in"
    assert page.more_pdus
    await store.write([Entry("a", Order(5, 1), 1)])
    assert await orders(store, "a") == [(9, 0)]
    assert await orders(store, "b") == [(5, 0), (9, 0)]
    found = await standings(store)
    assert (found["a"].success, found["a"].outstanding) == (Order(5, 1), True)
    assert (found["b"].success, found["b"].outstanding) == (START, True)
    assert (await store.recorded())["facts"].token == 9


async def test_recording_again_changes_nothing(store: AnyStore) -> None:
    for _ in range(2):
        await record(store, 9, (fact(5), ["a"]), (fact(9), ["a"]))
    assert await orders(store, "a") == [(5, 0), (9, 0)]


async def test_a_page_ends_where_the_bytes_do_and_says_that_there_is_more(store: AnyStore) -> None:
    await record(store, 9, *((fact(token, body='"' + "x" * 98 + '"'), ["a"]) for token in range(1, 10)))
    page = await store.page("a", ALL, pdus=50, pdu_bytes=250, edus=10)
    assert [pdu.order.token for pdu in page.pdus] == [1, 2, 3]
    assert page.more_pdus
    page = await store.page("a", ALL, pdus=9, pdu_bytes=1 << 20, edus=10)
    assert (len(page.pdus), page.more_pdus) == (9, False)


async def test_a_transaction_under_way_is_found_again_as_it_was(store: AnyStore) -> None:
    bodies = ['{"b": 1,"a":  2.0}', '{"n":2}']
    await record(store, 7, (fact(5, 0, None, bodies[0]), ["a"]), (fact(6, 0, "r", bodies[1]), ["a"]), (fact(7), ["a"]))
    edus = ['{"z" : 1.00, "a": "\\u0000"}', '{"y":2}']
    made = make_transaction(
        "a", serial=4, ts=1_700_000_000_000, upto=Order(6, 0), pdus=bodies, edus=edus, edu_numbers=[3]
    )
    await store.write([Entry("a", START, 4, made)])
    page = await store.page("a", ALL, pdus=50, pdu_bytes=1 << 20, edus=10)
    assert page.transaction == made
    assert (await standings(store))["a"].serial == 4
    await store.write([Entry("a", made.upto, 4)])
    assert await orders(store, "a") == [(7, 0)]


async def test_a_transaction_with_facts_that_stand_in_for_others_is_found_again_as_it_was(store: AnyStore) -> None:
    await record(store, 5, (fact(5, 0, "r"), ["a"]))
    made = make_transaction("a", serial=1, ts=1, upto=Order(5, 0), pdus=['"end"', '"é"'], substituted=True)
    await store.write([Entry("a", START, 1, made)])
    assert (await store.page("a", ALL, pdus=1, pdu_bytes=1, edus=1)).transaction == made


async def test_a_transaction_of_updates_alone_is_found_again_though_facts_came_meanwhile(store: AnyStore) -> None:
    await record(store, 5, (fact(5), ["a"]))
    made = make_transaction("a", serial=2, ts=1, upto=Order(5, 0), edus=['"typing"'])
    await store.write([Entry("a", Order(5, 0), 2, made)])
    await record(store, 6, (fact(6), ["a"]))
    assert (await store.page("a", ALL, pdus=1, pdu_bytes=1, edus=1)).transaction == made


async def test_what_is_recorded_again_neither_changes_a_transaction_under_way_nor_comes_back_after_it(
    store: AnyStore,
) -> None:
    """After a change of the list of senders a stream is read again from the slowest sender's token on."""
    facts = [(fact(token, room="r"), ["a"]) for token in range(1, 6)]
    await record(store, 5, *facts)
    assert await store.collapse(["a"]) == 4
    made = make_transaction("a", serial=1, ts=1, upto=Order(5, 0), pdus=[facts[4][0].body])
    await store.write([Entry("a", START, 1, made)])
    await record(store, 6, *facts, (fact(6), ["a"]))
    assert (await store.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)).transaction == made
    await store.write([Entry("a", made.upto, 1)])
    await record(store, 6, *facts, (fact(6), ["a"]))
    assert await orders(store, "a") == [(6, 0)]


async def test_a_transaction_under_way_keeps_its_bodies_where_a_fact_is_recorded_with_another(
    real: SenderStore,
) -> None:
    """The application's routing may have changed together with the list of senders."""
    await record(real, 2, (fact(1, body='"old"'), ["a"]), (fact(2, body='"old"'), ["a"]))
    made = make_transaction("a", serial=1, ts=1, upto=Order(1, 0), pdus=['"old"'])
    await real.write([Entry("a", START, 1, made)])
    await record(real, 2, (fact(1, body='"new"'), ["a"]), (fact(2, body='"new"'), ["a"]))
    await real.write([Entry("a", START, 1, made, failures=1, retry_in=1.0)])
    found = (await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)).transaction
    assert found is not None
    assert (found.id, found.pdus, found.upto) == (made.id, made.pdus, made.upto)
    await real.write([Entry("a", made.upto, 1)])
    page = await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)
    assert [pdu.body for pdu in page.pdus] == ['"new"']


async def test_what_is_refused_is_parked_when_what_follows_it_is_taken_and_found_again_until_then(
    store: AnyStore,
) -> None:
    await record(store, 5, *((fact(token, room="r"), ["a", "b"]) for token in range(1, 6)))
    await store.record_edus("to_device", 1, [("a", Edu('"u1"', "k")), ("a", Edu('"u2"'))])
    page = await store.page("a", ALL, pdus=9, pdu_bytes=999, edus=9)
    numbers = [edu.number or 0 for edu in page.edus]
    earlier = (Aside(Order(1, 0), (7,), "status 422"),)
    first = replace(make_transaction("a", serial=1, ts=1, upto=Order(2, 0), pdus=["1", '"é"']), aside=earlier)
    aside = (Aside(Order(2, 0), (), "status 400"), Aside(Order(2, 0), (numbers[0],), "status 413"))
    after = await store.page("a", replace(ALL, after=Order(2, 0)), pdus=1, pdu_bytes=999, edus=9)
    assert ([pdu.order for pdu in after.pdus], after.more_pdus) == ([(3, 0)], True)
    made = replace(
        make_transaction("a", serial=2, ts=2, upto=Order(3, 0), pdus=[after.pdus[0].body]), aside=aside, refused=first
    )
    await store.write([Entry("a", START, 2, made)])
    found = (await store.page("a", ALL, pdus=9, pdu_bytes=999, edus=9)).transaction
    assert found is not None
    assert replace(found, substituted=False) == made
    await store.write([Entry("a", made.upto, 2, parked=aside)])
    assert await orders(store, "a") == [(4, 0), (5, 0)]
    assert len(await orders(store, "b")) == 5
    page = await store.page("a", ALL, pdus=9, pdu_bytes=999, edus=9)
    assert [edu.number for edu in page.edus] == numbers[1:]
    assert await parked(store, "a") == [
        ('{"n": 1.0}', "status 400"), ('{"n": 2.0}', "status 400"), ('"u1"', "status 413")
    ]  # fmt: skip


async def parked(store: AnyStore, name: str) -> list[tuple[str, str]]:
    if isinstance(store, MemoryStore):
        return store.shelves[name].parked
    table = f"{quote_ident(store._schema)}.federation_parked"
    rows = await store._db.fetch(f"SELECT body::text, reason FROM {table} WHERE destination = $1 ORDER BY id", name)
    return [(row["body"], row["reason"]) for row in rows]


async def test_back_off_is_found_again_less_the_time_that_passed(store: AnyStore) -> None:
    await store.write([Entry("a", START, 3, failures=4, retry_in=100.0, catching_up=True, error="status 503")])
    found = (await standings(store))["a"]
    assert (found.failures, found.catching_up, found.outstanding) == (4, True, False)
    assert found.retry_in is not None
    assert 90 < found.retry_in <= 100
    await store.write([Entry("a", START, 3, failures=4, retry_in=0.0)])
    assert (await standings(store))["a"].retry_in == 0


async def test_collapse_leaves_the_latest_of_each_room_and_what_is_under_way(store: AnyStore) -> None:
    rooms = ["r", "s", "r", None, "r", None, "s"]
    facts = [(fact(token, 0, room), ["a", "b"]) for token, room in enumerate(rooms, 1)]
    await record(store, 7, *facts, (fact(7, 1, "s"), ["a"]))
    made = make_transaction("a", serial=1, ts=1, upto=Order(1, 0), pdus=[facts[0][0].body])
    await store.write([Entry("a", START, 1, made)])
    assert await store.collapse(["a"]) == 3
    await store.write([Entry("a", START, 1)])
    assert await orders(store, "a") == [(1, 0), (4, 0), (5, 0), (6, 0), (7, 1)]
    assert len(await orders(store, "b")) == 7
    assert await store.collapse(["b", "a"]) == 3 + 1


async def test_a_keyed_update_replaces_the_one_that_waits_but_not_the_one_under_way(store: AnyStore) -> None:
    def edu(body: str, key: str | None = None) -> tuple[str, Edu]:
        return "a", Edu(body, key)

    await store.record_edus("to_device", 3, [edu('"k1"', "k"), edu('"x"'), edu('"k2"', "k"), ("b", Edu('"k9"', "k"))])
    page = await store.page("a", ALL, pdus=1, pdu_bytes=1, edus=10)
    assert [found.body for found in page.edus] == ['"x"', '"k2"']
    numbers = tuple(found.number for found in page.edus if found.number is not None)
    await store.record_edus("to_device", 4, [edu('"k3"', "k"), edu('"x"')])
    await store.write([Entry("a", START, 1, done_edus=numbers)])
    page = await store.page("a", ALL, pdus=1, pdu_bytes=1, edus=1)
    assert [found.body for found in page.edus] == ['"k3"']
    assert page.more_edus
    assert (await standings(store))["b"].outstanding
    assert (await store.recorded())["to_device"].token == 4


def random_steps(chance: Random) -> list[tuple[str, Any]]:
    steps = [
        ("fact", (chance.choice(["r", "s", None]), chance.randint(1, 3))),
        ("edu", chance.choice(["k", None])),
        ("begin", chance.randint(1, 4)),
        ("done", chance.random() < 0.6),
        ("collapse", None),
    ]
    return [chance.choice(steps) for _ in range(3)]


@pytest.mark.parametrize("seed", range(3))
async def test_both_stores_agree_on_whatever_is_done_to_them(real: SenderStore, seed: int) -> None:
    chance, fake, name = Random(seed), MemoryStore(), "a"
    stores: tuple[AnyStore, AnyStore] = (real, fake)
    serial = 0
    entry = Entry(name, START, 0)
    steps = [step for _ in range(40) for step in random_steps(chance)]
    for token, (kind, argument) in enumerate(steps, 1):
        if kind == "fact":
            room, parts = argument
            for store in stores:
                await record(store, token, *((fact(token, part, room), [name]) for part in range(parts)))
        elif kind == "edu":
            for store in stores:
                await store.record_edus("to_device", token, [(name, Edu(str(token), argument))])
        elif kind == "begin" and entry.transaction is None:
            serial += 1
            for store in stores:
                page = await store.page(name, replace(ALL, transaction=False), pdus=argument, pdu_bytes=1 << 20, edus=1)
                made = make_transaction(
                    name,
                    serial=serial,
                    ts=serial,
                    upto=page.pdus[-1].order if page.pdus else entry.success,
                    pdus=[pdu.body for pdu in page.pdus],
                    edus=[edu.body for edu in page.edus],
                    edu_numbers=[edu.number for edu in page.edus if edu.number is not None],
                )
                await store.write([Entry(name, entry.success, serial, made)])
            entry = Entry(name, entry.success, serial, made)
        elif kind == "done" and entry.transaction is not None:
            entry = Entry(name, entry.transaction.upto if argument else entry.success, serial)
            for store in stores:
                under_way = (await store.page(name, ALL, pdus=1, pdu_bytes=1, edus=1)).transaction
                assert under_way is not None
                await store.write([replace(entry, done_edus=under_way.edu_numbers if argument else ())])
        elif kind == "collapse":
            assert await real.collapse([name]) == await fake.collapse([name])
        assert await contents(real, name) == await contents(fake, name), (kind, argument)
    assert serial > 5


async def contents(store: AnyStore, name: str) -> object:
    """All that can be seen of a destination, but the numbers of updates, which the stores choose."""
    found = (await standings(store)).get(name, DestinationState())
    page = await store.page(name, ALL, pdus=1000, pdu_bytes=1 << 30, edus=1000)
    made: Transaction | None = page.transaction and replace(page.transaction, edu_numbers=())
    rest = await store.page(name, replace(ALL, transaction=False), pdus=3, pdu_bytes=40, edus=2)
    return (
        found,
        made,
        [(pdu.order, pdu.room, pdu.body) for pdu in rest.pdus],
        [edu.body for edu in rest.edus],
        rest.more_pdus,
        rest.more_edus,
    )


# --- what only Postgres has ---


async def test_facts_that_nobody_waits_for_are_swept_as_far_as_all_senders_have_recorded(
    real: SenderStore, database: Database
) -> None:
    await record(real, 3, (fact(1), ["a"]), (fact(2), ["a", "b"]), (fact(3), ["b"]))
    await real.write([Entry("a", Order(2, 0), 1)])
    assert await real.sweep("facts") == 1
    await real.write([Entry("b", Order(3, 0), 1)])
    prefix = f"{quote_ident(real._schema)}.federation_"
    await database.execute(f"INSERT INTO {prefix}sender VALUES ('facts', 's2', 'facts', 2, '{{s1}}', NULL)")
    assert await real.sweep("facts") == 1, "a fact that a slower sender has yet to record was removed, or none"
    await database.execute(f"UPDATE {prefix}sender SET token = 3")
    assert await real.sweep("facts") == 1


async def test_a_sweep_looks_at_a_bounded_number_of_facts_that_stay_and_the_next_one_goes_on_behind_them(
    real: SenderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.sender.store.SWEEP", 5)
    monkeypatch.setattr("replicad.sender.store.SWEPT", 20)
    waiting = [(fact(token, part), ["away"]) for token in range(1, 21) for part in range(2)]
    await record(real, 60, *waiting, *((fact(token), ["a"]) for token in range(21, 61)))
    await real.write([Entry("a", Order(60, 0), 1)])
    assert [await real.sweep("facts") for _ in range(3)] == [0, 0, 40]
    await real.write([Entry("away", Order(20, 1), 1)])
    assert sum([await real.sweep("facts") for _ in range(3)]) == 40


async def test_a_rewind_makes_all_behind_the_token_deliverable_again(real: SenderStore) -> None:
    await record(real, 9, (fact(4), ["a", "b"]), (fact(8, body='"old"'), ["a", "b"]), (fact(9), ["b"]))
    made = make_transaction("b", serial=1, ts=1, upto=Order(9, 0), pdus=["1"])
    await real.write([Entry("a", Order(8, 0), 1), Entry("b", Order(4, 0), 1, made)])
    assert await real.rewind("facts", 5, ["a", "b"]) == 2
    found = await standings(real)
    assert (await real.recorded())["facts"].token == 5
    assert Order(5, 0) < found["a"].success < Order(6, 0)
    assert (await real.page("b", ALL, pdus=9, pdu_bytes=99, edus=9)).transaction is None
    with pytest.raises(Restart):  # the result of a request that was under way
        await real.write([Entry("b", Order(8, 0), 1)])
    assert (await standings(real))["b"].success == Order(4, 0)
    real = SenderStore(real._db, real._keeper, real._schema, real._source, real._sender)  # as the next session has it
    await record(real, 8, (fact(8, body='"new"'), ["a", "b"]))
    assert await orders(real, "b") == [(8, 0)]
    page = await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)
    assert [pdu.body for pdu in page.pdus] == ['"new"']


@pytest.mark.parametrize("shared", ["facts", "updates"])
async def test_a_transaction_under_way_that_is_not_all_void_is_repeated_as_it_was_after_a_rewind(
    real: SenderStore, shared: str
) -> None:
    """Its outcome is unknown. In other transactions the destination might get these facts or updates a second time."""
    old = fact(8, body='"old"')
    await record(real, 9, *([(fact(4), ["a"])] if shared == "facts" else []), (old, ["a"]), (fact(9), ["a"]))
    if shared == "updates":
        await real.record_edus("to_device", 1, [("a", Edu('"edu"'))])
    page = await real.page("a", ALL, pdus=2 if shared == "facts" else 1, pdu_bytes=99, edus=9)
    made = make_transaction(
        "a",
        serial=1,
        ts=1,
        upto=Order(8, 0),
        pdus=[pdu.body for pdu in page.pdus],
        edus=[edu.body for edu in page.edus],
        edu_numbers=[edu.number for edu in page.edus if edu.number is not None],
    )
    assert (len(made.pdus), len(made.edus)) == ((2, 0) if shared == "facts" else (1, 1))
    await real.write([Entry("a", Order(3, 0), 1, made)])
    await real.rewind("facts", 5, ["a"])
    real = SenderStore(real._db, real._keeper, real._schema, real._source, real._sender)  # as the next session has it
    await record(real, 8, (fact(6, body='"new"'), ["a"]), (fact(8, body='"new"'), ["a"]))
    found = (await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)).transaction
    assert found is not None
    assert (found.id, found.pdus, found.edus, found.edu_numbers) == (made.id, made.pdus, made.edus, made.edu_numbers)
    assert Order(5, 0) < found.upto < Order(6, 0)
    await real.write([Entry("a", found.upto, 1, done_edus=found.edu_numbers)])
    page = await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)
    assert [pdu.body for pdu in page.pdus] == ['"new"', '"new"']
    assert not page.edus


@pytest.mark.parametrize("after", ["a fact", "a fact that is sent again"])
async def test_a_trial_of_an_update_outlives_a_fork_and_what_was_refused_before_it_is_neither_lost_nor_parked(
    real: SenderStore, database: Database, after: str
) -> None:
    """The destination may have taken the update. In another transaction it would get it a second time."""
    void = fact(8, body='"void"')
    await record(real, 9, (fact(2, body='"refused"'), ["a"]), (void, ["a"]), (fact(9), ["b"]))
    if after == "a fact that is sent again":
        await real.park([("a", fact(1, body='"again"'), "status 400")])
        await database.execute(f"UPDATE {quote_ident(real._schema)}.federation_parked SET wanted = true")
        await real.replay(["a"])
    await real.record_edus("to_device", 1, [("a", Edu('"edu"'))])
    page = await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)
    edu, refused = page.edus[0], [pdu.order for pdu in page.pdus]
    assert edu.number is not None
    made = make_transaction("a", serial=5, ts=1, upto=refused[-1], edus=[edu.body], edu_numbers=[edu.number])
    first = make_transaction("a", serial=2, ts=1, upto=refused[0], pdus=['"refused"'])
    trial = replace(made, aside=tuple(Aside(order, (), "status 400") for order in refused), refused=first)
    await real.write([Entry("a", Order(1, 0), 5, trial)])
    await real.fork("facts", 5)
    real = SenderStore(real._db, real._keeper, real._schema, real._source, real._sender)  # as the next session has it
    found = (await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)).transaction
    assert found is not None, "the trial was dropped, and the update is sent a second time"
    assert (found.id, found.edus, found.edu_numbers) == (made.id, made.edus, made.edu_numbers)
    await record(real, 8, (fact(8, body='"new"'), ["a"]))
    await real.write([Entry("a", found.upto, 5, done_edus=found.edu_numbers, parked=found.aside)])
    page = await real.page("a", ALL, pdus=9, pdu_bytes=99, edus=9)
    assert ([pdu.body for pdu in page.pdus], page.edus) == (['"refused"', '"new"'], ())
    parked = await database.fetch(f"SELECT body::text, wanted FROM {quote_ident(real._schema)}.federation_parked")
    assert [tuple(row) for row in parked] == ([('"again"', True)] if "again" in after else [])


async def test_after_a_fork_no_sender_of_the_source_gets_the_facts_of_another_under_ids_that_came_again(
    database: Database,
) -> None:
    """One of two senders notices a fork first. What the other has recorded under these ids is void as well."""
    two = ["s1", "s2"]
    async with open_store(database, "replicad", "s1", two, ["facts"]) as one:
        async with open_store(database, "replicad", "s2", two, ["facts"]) as other:
            await one.begin("facts", 0)
            for store, name in ((one, "a"), (other, "b")):
                await record(store, 7, (fact(3, body='"shared"'), [name]), (fact(6, body='"void"'), [name]))
            await one.park([("no name", fact(6, body='"parked"'), "why")])
            await one.park([("a", fact(1, body='"again"'), "why")])
            await database.execute("UPDATE replicad.federation_parked SET wanted = true WHERE destination = 'a'")
            await one.replay(["a"])
            assert await one.fork("facts", 4) == 3
            with pytest.raises(DatabaseError):  # it would store what it has in memory
                await record(other, 8, (fact(8, body='"void"'), ["b"]))
        again = SenderStore(one._db, one._keeper, one._schema, one._source, one._sender)  # as the next session has it
        await record(again, 7, (fact(6, body='"new"'), ["a"]))
        await again.park([("no name", fact(6, body='"parked, new"'), "why")])
        assert [await orders(again, name) for name in "ab"] == [[(3, 0), (6, 0)], [(3, 0)]]
        parked = await database.fetch("SELECT destination, body::text, wanted FROM replicad.federation_parked")
        assert sorted(tuple(row) for row in parked) == [
            ("a", '"again"', True),
            ("no name", '"parked"', False),
            ("no name", '"parked, new"', False),
        ]
    async with open_store(database, "replicad", "s2", two, ["facts"]) as other:
        assert (await other.recorded())["facts"].token == 4


async def test_the_first_sender_that_follows_a_generation_speaks_for_all_of_its_source(database: Database) -> None:
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, body json)")
    await Registry(database).add("facts", "public.facts", "id", row="body")
    number = await database.fetch_value("SELECT number FROM replicad.stream WHERE name = 'facts'")
    two = ["s1", "s2"]
    async with open_store(database, "replicad", "s1", two, ["facts"]) as one:
        async with open_store(database, "replicad", "s2", two, ["facts"]) as other:
            await one.begin("facts", 0)
            (first,) = [row["id"] for row in await database.fetch(GENERATIONS, number)]
            await one.follow("facts", first)
            await other.follow("facts", first)  # nothing changes: no session ends
            await record(one, 4, (fact(4), ["a"]))
            await record(other, 9, (fact(4), ["b"]), (fact(9), ["b"]))
            await database.execute(NEXT_GENERATION, number, 5)
            with pytest.raises(Restart):
                await one.follow("facts", "bbbb")
            with pytest.raises(DatabaseError):
                await other.sweep("facts")
        again = SenderStore(one._db, one._keeper, one._schema, one._source, one._sender)
        assert await orders(again, "a") == [(4, 0)]
        assert await orders(again, "b") == [(4, 0)]
        await again.follow("facts", "bbbb")
    async with open_store(database, "replicad", "s2", two, ["facts"]) as other:
        assert (await other.recorded())["facts"] == Recorded(5, "bbbb")


async def test_a_generation_that_the_database_does_not_know_is_not_followed(database: Database) -> None:
    """The daemon has not noticed yet that the database was restored. Nothing of what it says is written down."""
    for name in ("facts", "updates"):
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, body json)")
        await Registry(database).add(name, f"public.{name}", "id", row="body")
    async with open_store(database, "replicad", "s1", ["s1"], ["facts", "updates"]) as store:
        epochs = dict(
            await database.fetch(
                "SELECT s.name, g.id FROM replicad.stream_generation g JOIN replicad.stream s ON s.number = g.stream"
            )
        )
        for name, epoch in epochs.items():
            await store.begin(name, 4)
            await store.follow(name, epoch)
        known = {name: Recorded(4, epoch, 4) for name, epoch in epochs.items()}
        assert await store.recorded() == known
        for name in known:
            with pytest.raises(DatabaseError, match=f"generation cccc of stream {name} is not in this database"):
                await store.follow(name, "cccc")
        assert await store.recorded() == known


async def test_destinations_that_got_further_than_the_lowest_token_go_back_in_a_generation_that_shares_less(
    database: Database,
) -> None:
    """After a change of the list the slowest sender's token counts. The server finds nothing void above it."""
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, body json)")
    await Registry(database).add("facts", "public.facts", "id", row="body")
    number = await database.fetch_value("SELECT number FROM replicad.stream WHERE name = 'facts'")
    async with open_store(database, "replicad", "s1", ["s1", "s2"], ["facts"]) as one:
        await one.begin("facts", 0)
        await one.follow("facts", await database.fetch_value(GENERATIONS, number))
        await record(one, 3, (fact(3), ["a"]))
        await one.write([Entry("a", Order(3, 0), 1)])
    await database.execute(NEXT_GENERATION, number, 0)
    async with open_store(database, "replicad", "s1", ["s1"], ["facts"]) as one:
        assert (await one.recorded())["facts"].token == 0
        with pytest.raises(Restart):
            await one.follow("facts", "bbbb")
        again = SenderStore(one._db, one._keeper, one._schema, one._source, one._sender)
        await record(again, 3, (fact(3, body='"new"'), ["a"]))
        assert await orders(again, "a") == [(3, 0)]


async def test_a_name_runs_once_and_is_free_again_when_its_connection_is_gone(
    real: SenderStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.sender.store.PATIENCE", 0.2)
    said: list[str] = []
    with trio.move_on_after(1.0) as scope:
        async with open_store(database, SCHEMA, "s1", ["s1"], ["facts"], standing_by=said.append):
            pass
    assert scope.cancelled_caught, "two of one name"
    assert said == ["a sender named s1 is running on this database already"]
    with pytest.raises(SenderRefused, match="s1 is running and shares the destinations among s1, not among s1, s2"):
        async with open_store(database, SCHEMA, "s2", ["s1", "s2"], ["facts"]):
            pass
    pid = await real._keeper.fetch_value("SELECT pg_backend_pid()")
    await database.execute("SELECT pg_terminate_backend($1, 5000)", pid)
    async with open_store(database, SCHEMA, "s1", ["s1"], ["facts"]) as again:
        assert (await again.recorded())["facts"].token == 0
        with pytest.raises(DatabaseError):
            await record(real, 99, (fact(99), ["a"]))
        assert (await again.recorded())["facts"].token == 0, "who lost the name has written all the same"


async def test_when_the_list_of_senders_changes_all_go_on_behind_the_slowest_in_the_first_generation(
    database: Database,
) -> None:
    await schema.install(database, "stream", SCHEMA)
    await schema.install(database, "federation", SCHEMA)
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY)")
    first = (await Registry(database, SCHEMA).add("facts", "facts", "id")).stream
    second = await Registry(database, SCHEMA).fork(first, "restored")
    for name, token, epoch in (("a", 50, second.epoch), ("b", 70, first.epoch)):
        async with open_store(database, SCHEMA, name, ["a", "b"], ["facts"]) as store:
            assert (await store.recorded())["facts"] in (Recorded(None), Recorded(10, second.epoch))
            await store.begin("facts", 10)
            await store.record("facts", token, FactBatch())
            await store.follow("facts", epoch)
    async with open_store(database, SCHEMA, "c", ["c", "a"], ["facts"]) as store:
        assert (await store.recorded())["facts"] == Recorded(50, first.epoch)
        async with open_store(database, SCHEMA, "a", ["a", "c"], ["facts"]) as other:
            assert (await other.recorded())["facts"] == Recorded(50, first.epoch)
            await other.record("facts", 80, FactBatch())
    async with open_store(database, SCHEMA, "a", ["a", "c"], ["facts", "more"]) as store:
        assert await store.recorded() == {"facts": Recorded(80, first.epoch), "more": Recorded(None)}


@pytest.mark.parametrize("statistics", ["none", "of now"])
async def test_what_concerns_one_destination_goes_by_the_index_whatever_the_others_have_outstanding(
    real: SenderStore, database: Database, statistics: str
) -> None:
    prefix = f"{quote_ident(real._schema)}.federation_"
    rooms, edus = f"{prefix}destination_room", f"{prefix}edu"
    await database.execute(
        f"INSERT INTO {rooms} SELECT 'facts', 'd' || i % 50, i, 0, 'r' FROM generate_series(1, 20000) i;"
        f" INSERT INTO {edus} (id, destination, body, source)"
        f" SELECT i, 'd' || i % 50, '{{}}', 'facts' FROM generate_series(1, 20000) i;"
        f" INSERT INTO {prefix}fact SELECT 'facts', i * 3000, 0, '{{}}' FROM generate_series(1, 7) i;"
        f" UPDATE {prefix}sender SET token = 30000"
    )
    if statistics == "of now":
        await database.execute(f"ANALYZE {rooms}, {edus}")
    keeper, scans = real._keeper, "SELECT pg_stat_get_xact_numscans($1::text::regclass)"
    read = "SELECT sum(pg_stat_get_xact_tuples_fetched(t::regclass)) FROM unnest($1::text[]) t"
    async with keeper.transaction():
        before = await keeper.fetch_value(scans, rooms)
        await real.write([Entry(f"d{number}", Order(100, 0), 1, done_edus=(number,)) for number in range(20)])
        assert await keeper.fetch_value(read, [rooms, edus]) < 100, "rows of others were read"
        await real.collapse(["d1", "d2"])
        for call in (
            "facts($1, 'd3', 50, 1000, 0, 0)",
            "transaction($1, 'd3')",
            "standing($1, NULL, 100)",
            "edus($1, 'd3', 5)",
        ):
            await keeper.fetch(f"SELECT * FROM {prefix}source_{call}", "facts")
        assert await real.sweep("facts") == 1
        looks = await keeper.fetch_value(scans, f"{prefix}destination_room_order")
        assert looks == 7, "the sweep does not look up each of the seven facts"
        assert await keeper.fetch_value(scans, rooms) == before, "the whole table was read"


async def test_many_destinations_are_met_page_by_page(real: SenderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicad.sender.store._STANDINGS", 7)
    names = [f"{number}.example" for number in range(50)]
    await record(real, 1, (fact(1), names))
    mine = {name async for name, _ in real.standings(lambda name: name.startswith("4"))}
    assert mine == {name for name in names if name.startswith("4")}


async def test_a_body_that_is_no_json_is_refused_whole(real: SenderStore) -> None:
    with pytest.raises(DatabaseError):
        await record(real, 2, (fact(1), ["a"]), (fact(2, body="{broken"), ["a"]))
    assert await orders(real, "a") == []
    assert (await real.recorded())["facts"].token == 0


async def test_installing_twice_keeps_everything_and_removing_leaves_nothing(database: Database) -> None:
    await schema.install(database, "federation", SCHEMA)
    await database.execute(schema.script("federation", SCHEMA, "up"))
    objects = "SELECT count(*) FROM pg_class WHERE relnamespace::regnamespace::text = $1"
    assert await database.fetch_value(objects, json.dumps(SCHEMA).replace('\\"', '""'))
    assert await schema.uninstall(database, "federation", SCHEMA)
    assert await database.fetch_value("SELECT to_regnamespace($1) IS NULL", '"odd ""schema"')
