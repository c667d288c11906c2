"""Senders of several streams of facts on one database, in turn and side by side."""

from __future__ import annotations

import pytest

from replicad.postgres.bridge import Database
from replicad.sender.items import START, Edu, Order, Pdu, make_transaction
from replicad.sender.store import Entry, FactBatch, SenderStore, open_store
from replicad.streams.registry import Registry
from tests.daemons import Daemon

from ..federation_receiver import Receiver, Reply
from .test_sender import (  # noqa: F401 - its fixtures
    StartSender,
    expect_soon,
    fact,
    facts,
    numbers,
    paces,
    receiver,
    start_sender,
    write,
)
from .test_sender_store import ALL


@pytest.fixture
async def two(facts: Database, daemon: Daemon) -> Database:  # noqa: F811
    """A second stream of facts, `more`."""
    await facts.execute("CREATE TABLE more (id bigserial PRIMARY KEY, body json)")
    await Registry(facts).add("more", "public.more", "id", row="body")
    await daemon.publisher.find("more")
    return facts


async def test_the_facts_of_a_second_stream_are_delivered_though_those_of_the_first_were_under_the_same_ids(
    two: Database,
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    async with start_sender(updates=()):
        await write(two, "facts", *(fact(number, "a") for number in range(10)))
        await receiver.expect(lambda: receiver.counts["a"] == 10)
    async with start_sender(facts="more", updates=()):
        await write(two, "more", *(fact(100 + number, "a") for number in range(15)))
        await receiver.expect(lambda: receiver.counts["a"] == 25)
    await write(two, "facts", fact(10, "a"))
    async with start_sender(updates=()):
        await receiver.expect(lambda: receiver.counts["a"] == 26)
    assert numbers(receiver, "a") == [*range(10), *range(100, 115), 10]


async def test_what_is_outstanding_of_one_stream_never_gets_the_bodies_or_the_receivers_of_another(
    two: Database,
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    receiver.behave = lambda _: Reply(503)
    async with start_sender(updates=()):
        await write(two, "facts", *(fact(number, "a", "b") for number in range(5)))
        await receiver.expect(lambda: {request.destination for request in receiver.requests} == {"a", "b"})
    async with start_sender(facts="more", updates=()):
        await write(two, "more", *(fact(100 + number, "b", "c") for number in range(5)))
        await receiver.expect(lambda: any(request.destination == "c" for request in receiver.requests))
    receiver.behave = lambda _: Reply()
    async with start_sender(updates=()), start_sender(facts="more", updates=()):
        await receiver.expect(lambda: [receiver.counts[name] for name in "abc"] == [5, 10, 5])
    assert numbers(receiver, "a") == [*range(5)]
    assert sorted(numbers(receiver, "b")) == [*range(5), *range(100, 105)]
    assert [number for number in numbers(receiver, "b") if number < 100] == [*range(5)]
    assert numbers(receiver, "c") == [*range(100, 105)]


async def test_senders_of_two_streams_share_a_name_destinations_and_a_stream_of_updates(
    two: Database,
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    """Each delivers the updates to its own receivers, and is divided into senders of its own."""
    names = [f"d{number}" for number in range(8)]
    async with (
        start_sender(),
        start_sender(facts="more", sender_name="sender", senders=("sender", "s2")),
        start_sender(facts="more", sender_name="s2", senders=("sender", "s2")),
    ):
        await write(two, "facts", *(fact(number, *names) for number in range(5)))
        await write(two, "more", *(fact(100 + number, *names) for number in range(5)))
        await write(two, "typing", {"destinations": names, "edu": {"to": "device"}})
        await receiver.expect(lambda: all(receiver.counts[name] == 10 for name in names))
        await receiver.expect(lambda: all(len(receiver.updates(name)) == 2 for name in names))
    for name in names:
        assert [number for number in numbers(receiver, name) if number < 100] == [*range(5)]
        assert [number for number in numbers(receiver, name) if number >= 100] == [*range(100, 105)]


async def test_a_stream_is_acknowledged_up_to_where_every_sender_of_that_name_has_recorded_it(
    two: Database,
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    async def acknowledged() -> int | None:
        found: int | None = await two.fetch_value("SELECT replicad.stream_acked('typing')")
        return found

    async with start_sender(), start_sender(facts="more"):
        await write(two, "typing", {"destinations": ["a"], "edu": 1})

        async def by_both() -> bool:
            return await acknowledged() == 1

        await expect_soon(by_both)
        await receiver.expect(lambda: len(receiver.updates("a")) == 2)
    async with start_sender(facts="more"):
        await write(two, "typing", {"destinations": ["a"], "edu": 2})
        await receiver.expect(lambda: len(receiver.updates("a")) == 3)
        await write(two, "more", fact(1, "a"))  # its ack is sent after those of before
        await receiver.expect(lambda: receiver.counts["a"] == 1)

        async def said() -> bool:
            return await two.fetch_value("SELECT replicad.stream_acked('more')") == 1

        await expect_soon(said)
        assert await acknowledged() == 1, "the other sender has yet to read the second update"


async def left(store: SenderStore, name: str) -> list[Order]:
    page = await store.page(name, ALL, pdus=10, pdu_bytes=1000, edus=10)
    return [pdu.order for pdu in page.pdus]


async def test_two_streams_in_one_store_touch_nothing_of_each_other(database: Database) -> None:
    async with (
        open_store(database, "replicad", "s", ["s"], ["facts"]) as one,
        open_store(database, "replicad", "s", ["s"], ["more", "typing"]) as other,
    ):
        for store, stream, body in ((one, "facts", "1"), (other, "more", "2")):
            await store.begin(stream, 0)
            recording = FactBatch(newcomers=["a"])
            recording.add(fact_of(5, body), ["a"])
            await store.record(stream, 5, recording)
        await other.begin("typing", 0)
        await other.record_edus("typing", 1, [("a", Edu("3", "k"))])
        made = make_transaction("a", serial=1, ts=1, upto=Order(5, 0), pdus=["1"])
        await one.write([Entry("a", START, 1, made)])
        page = await other.page("a", ALL, pdus=10, pdu_bytes=1000, edus=10)
        assert ([pdu.body for pdu in page.pdus], [edu.body for edu in page.edus]) == (["2"], ["3"])
        await other.write([Entry("a", Order(5, 0), 1, done_edus=(page.edus[0].number or 0,))])
        assert await other.sweep("more") == 1
        assert (await one.page("a", ALL, pdus=10, pdu_bytes=1000, edus=10)).transaction == made
        assert await other.rewind("more", 0, ["a"]) == 0
        await one.write([Entry("a", START, 1)])
        assert await left(one, "a") == [(5, 0)]


def fact_of(token: int, body: str) -> Pdu:
    return Pdu(Order(token, 0), None, body)
