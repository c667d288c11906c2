"""The small parts of the sender: when, who, where to, and what can be set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from replicad.cli.app import run
from replicad.errors import RouteFailed
from replicad.retry import Backoff
from replicad.sender.engine import Agenda, StateWriter, stand_in
from replicad.sender.items import START, Order, OutstandingPage, Pdu, make_transaction
from replicad.sender.routing import Fact, FixedRouter, FunctionRouter, RowRouter, SourceRow, Update, body_text
from replicad.sender.sender import owner, ownership
from replicad.sender.store import Entry

# --- when ---


@given(
    first=st.floats(0.01, 100),
    most=st.floats(100, 1e6),
    jitter=st.floats(0, 0.9),
    failures=st.integers(1, 10_000),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_pause_grows_to_the_cap_and_never_beyond(
    first: float, most: float, jitter: float, failures: int, chance: float
) -> None:
    backoff = Backoff(first, most, jitter=jitter)
    interval = backoff.whole(failures - 1)
    assert first <= interval <= most
    assert backoff.whole(failures) == pytest.approx(min(most, 2 * interval))
    assert interval * (1 - jitter) * 0.999 <= backoff.delay(failures - 1, chance) <= most


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.floats(0, 100))), max_size=200))
def test_an_agenda_is_a_time_per_name(steps: list[tuple[str, float | None]]) -> None:
    agenda, model = Agenda(), dict[str, float]()
    for number, (name, at) in enumerate(steps):
        if at is None:
            agenda.drop(name)
            model.pop(name, None)
        else:
            agenda.put(name, at)
            model[name] = at
        assert agenda.next_time() == min(model.values(), default=None)
        assert len(agenda) == len(model)
        if number % 7 == 0:
            due = agenda.pop_due(50.0)
            assert sorted(due) == sorted(name for name, at in model.items() if at <= 50.0)
            assert [model[name] for name in due] == sorted(model[name] for name in due)
            model = {name: at for name, at in model.items() if at > 50.0}


def test_an_agenda_does_not_grow_with_what_is_put_again_and_again() -> None:
    agenda = Agenda()
    for number in range(100_000):
        agenda.put(str(number % 100), float(number))
    assert len(agenda._heap) < 500


# --- who ---


@given(st.sets(st.text("abcdef123", min_size=1, max_size=5), min_size=2, max_size=6), st.text(max_size=20))
def test_a_destination_stays_with_its_sender_unless_that_one_goes(senders: set[str], destination: str) -> None:
    mine = owner(sorted(senders), destination)
    assert owner(sorted(senders, reverse=True), destination) == mine
    for gone in senders - {mine}:
        assert owner(sorted(senders - {gone}), destination) == mine
    assert [name for name in senders if ownership(name, sorted(senders))(destination)] == [mine]


def test_senders_share_evenly_and_a_new_one_takes_only_its_part() -> None:
    names = [f"host{number}.example" for number in range(4000)]
    three, four = ["s1", "s2", "s3"], ["s1", "s2", "s3", "s4"]
    shares = Counter(owner(four, name) for name in names)
    assert max(shares.values()) - min(shares.values()) < 200
    moved = [name for name in names if owner(three, name) != owner(four, name)]
    assert {owner(four, name) for name in moved} == {"s4"}


def test_the_owner_of_a_destination_is_the_same_in_every_version() -> None:
    names = ["matrix.org", "a.example", "b.example", "https://shop.example/hook"]
    assert [owner(["s1", "s2", "s3"], name) for name in names] == OWNERS


OWNERS = ["s3", "s3", "s2", "s3"]


# --- what is written down ---


class SlowStore:
    """Remembers what was written; a write ends when it is let go."""

    def __init__(self) -> None:
        self.written: list[list[Entry]] = []
        self.gate = trio.Event()

    async def write(self, entries: list[Entry]) -> None:
        self.written.append(list(entries))
        await self.gate.wait()


async def test_entries_that_come_while_one_is_written_share_the_next_write_and_the_last_word_counts() -> None:
    store = SlowStore()
    states = StateWriter(store)
    done: list[str] = []

    async def write(name: str) -> None:
        await states.write(Entry(name, START, 1))
        done.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(states.run)
        nursery.start_soon(write, "a")
        await wait_all_tasks_blocked()
        for serial in range(5):
            states.post(Entry("b", START, serial, done_edus=(serial,)))
        nursery.start_soon(write, "c")
        nursery.start_soon(states.settle, "b")
        await wait_all_tasks_blocked()
        assert done == []
        store.gate.set()
        await states.drain()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert done == ["a", "c"]
    assert [[entry.name for entry in batch] for batch in store.written] == [["a"], ["b", "c"]]
    assert (store.written[1][0].serial, store.written[1][0].done_edus) == (4, (0, 1, 2, 3, 4))


@given(
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
)
def test_an_id_belongs_to_its_content(pdus: list[str], edus: list[str], others: list[str], more: list[str]) -> None:
    def made(pdus: list[str], edus: list[str]) -> str:
        return make_transaction("a", serial=1, ts=1, upto=Order(1, 0), pdus=pdus, edus=edus).id

    assert (made(pdus, edus) == made(others, more)) == ((pdus, edus) == (others, more))


# --- where to ---


def row(value: object) -> SourceRow:
    return SourceRow(7, 0, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ({"destinations": ["a", "b", "a"], "room": "r", "pdu": 1}, Fact(("a", "b"), "r", 1)),
        ({"destinations": ["a"]}, Fact(("a",), None, None)),
        ({"destinations": ["a"], "pdu": "a string"}, Fact(("a",), None, '"a string"')),
        ({"destinations": []}, None),
        ({"destinations": None}, None),
        ({}, None),
        (["not", "an object"], None),
    ],
)
async def test_rows_say_where_they_go(value: object, fact: Fact | None) -> None:
    assert await RowRouter().facts([row(value)]) == [fact]


async def test_updates_say_whether_they_may_be_dropped_and_are_kept_where_they_do_not() -> None:
    values = [{"destinations": ["a"], "edu": {"e": 1}, "key": "k", "droppable": True}, {"destinations": ["a"]}]
    values += [{"destinations": ["a"], "edu": text} for text in ("é", "7", "[1]")]
    first, second, *strings = await RowRouter().updates("typing", [row(value) for value in values])
    assert [body_text(row("0"), update and update.body) for update in strings] == ['"é"', '"7"', '"[1]"']
    assert first == Update(("a",), {"e": 1}, "k", True)
    assert second == Update(("a",))
    assert second.droppable is False


@pytest.mark.parametrize(
    "value",
    [
        '{"destinations": ["a"',
        {"destinations": "a"},
        {"destinations": 5},
        {"destinations": [5]},
        {"destinations": ["a\0"]},
        {"destinations": ["a\ud800"]},
        {"destinations": ["a"], "room": 5},
        {"destinations": ["a"], "room": "é" * 501},
        "[" * 100_000,
        {"destinations": [["a"]]},
        {"destinations": [{"a": 1}]},
        {"destinations": {"a": 1}},
        '{"destinations": ["a", 0.12345678901234567890123]}',
        {"destinations": ["a"], "pdu": None},
    ],
    ids=range(14),
)
async def test_a_row_that_makes_no_sense_is_named_by_its_token(value: object) -> None:
    with pytest.raises(RouteFailed, match="token 7"):
        await RowRouter().facts([row(value)])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["destinations", "room", "pdu", "edu", "key", "droppable"]), VALUES))
def test_no_row_raises_anything_but_that_it_cannot_be_routed(value: dict[str, object]) -> None:
    router, one = RowRouter(), row(json.dumps(value))
    for route in (router.facts([one]), router.updates("typing", [one])):
        with suppress(RouteFailed):
            trio.run(_result, route)


async def _result(waited: Coroutine[Any, Any, object]) -> object:
    return await waited


@pytest.mark.parametrize(
    "text",
    ["1234567890123456.789", "0.12345678901234567890123", "0.1e-999999", "1e400", "1e-9999999999999999999999"],
)
async def test_numbers_keep_all_their_digits(text: str) -> None:
    for body in (text, f'{{"a":[{text},"{text}"]}}'):
        [fact] = await RowRouter().facts([row(f'{{"destinations": ["a"], "pdu": {body}}}')])
        assert fact is not None
        assert body_text(row("0"), fact.body) == body


async def test_a_list_of_destinations_keeps_the_rooms_that_rows_have() -> None:
    found = await FixedRouter(["a", "b"]).facts([row({"room": "r"}), row([1])])
    assert found == [Fact(("a", "b"), "r"), Fact(("a", "b"), None)]


async def test_a_function_routes_and_what_it_raises_or_returns_wrongly_is_said() -> None:
    def function(stream: str, token: int, value: Any) -> object:
        assert (stream, token) == ("facts", 7)
        if value == "raise":
            raise KeyError("oops")
        return {"fact": Fact(["a", "a"], "r"), "none": None, "update": Update(["a"]), "text": Fact("abc")}[value]

    router = FunctionRouter(function, "facts")
    assert await router.facts([row('"fact"'), row('"none"')]) == [Fact(("a",), "r"), None]
    for value, said in (("raise", "KeyError.*oops"), ("update", "returned Update"), ("text", "no list")):
        with pytest.raises(RouteFailed, match=said):
            await router.facts([row(json.dumps(value))])


def test_a_body_is_the_row_or_json_text_or_a_value() -> None:
    assert body_text(row('{"a":  1}'), None) == '{"a":  1}'
    assert body_text(row("1"), '{"b":  2.0}') == '{"b":  2.0}'
    assert body_text(row("1"), {"é": [1, None]}) == '{"é":[1,null]}'
    for bad in ("{", "NaN", '{"a": Infinity}', float("nan"), object(), "\ud800", {"a": "\ud800"}):
        with pytest.raises(RouteFailed, match="token 7"):
            body_text(row("1"), bad)


async def test_of_a_rooms_many_latest_facts_the_last_that_fit_stand_in() -> None:
    class Application:
        async def latest(self, destination: str, rooms: object) -> dict[str, list[str]]:
            assert rooms == ["r", "s"]
            return {"r": [str(number) for number in range(100)], "elsewhere": ["1"]}

    pdus = (Pdu(Order(1, 0), "r", "a"), Pdu(Order(2, 0), None, "b"), Pdu(Order(3, 0), "s", "c"))
    page = await stand_in(OutstandingPage(pdus=pdus, more_pdus=True), "d", Application(), 50)
    assert [pdu.body for pdu in page.pdus] == [*map(str, range(50, 100)), "b", "c"]
    assert {pdu.order for pdu in page.pdus if pdu.substituted} == {Order(1, 0)}
    assert page.more_pdus


# --- what can be set ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--retry-first 1s", "--facts names no stream"),
        ("--facts f --form matrix", "--form matrix needs --origin"),
        ("--facts f --origin us.example", "--origin is for --form matrix only"),
        ("--facts f --form webhook --sign hmac", "REPLICAD_FEDERATION_SECRET"),
        (
            "--facts f --form webhook --allow-private 10.0.0.1/8",
            "--allow-private: '10.0.0.1/8' is not valid; give networks",
        ),
        ("--facts f --form webhook --allow-http http://a", "--allow-http: 'http://a' is not valid; give networks"),
        ("--facts f --form webhook --url http://x/{nonsense}{destination}", "nothing else in braces"),
        ("--facts f --form webhook --url http://x/", "needs {destination}"),
        ("--facts f --form webhook --url x/{destination}", "neither http:// nor https://"),
        ("--facts f --form webhook --retry-first 1h --retry-max 1m", "--retry-first 3600 is above --retry-max 60"),
        ("--facts f --form webhook --senders x,y", "does not name this sender"),
        ("--facts f --form webhook --updates f", "something twice"),
        ("--facts f --form webhook --destinations http://a/ --route a:b", "--destinations and --route are given"),
        ("--facts f --form webhook --destination-ca nowhere", "--destination-ca nowhere cannot be used"),
        ("--facts f --form webhook --from soon --database postgresql://x/x", "--from: 'soon' does not fit"),
        (
            "--facts f --from 9223372036854775808 --database postgresql://x/x",
            "--from: '9223372036854775808' does not fit",
        ),
        ("--facts f --form webhook --from g=5 --database postgresql://x/x", "--from names g"),
        ("--facts f --form webhook --concurrency 0", "--concurrency: 0 is out of range"),
    ],
)
def test_a_mistake_in_the_settings_is_one_sentence(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sender", *options.split()]) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert len(stderr.splitlines()) == 1
