"""Clients with less than all rights: what they are refused, what they do not learn, and how they prove who they are."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from replicad.daemon.access import SLOTS, AccessControl, Guesses, GuessPace, verbs_of
from replicad.daemon.relay import Relay
from replicad.daemon.session import Relaying
from replicad.daemon.troubles import Troubles
from replicad.errors import UsageError
from replicad.protocol.connection import CloseReason
from tests.vocabulary import EVERY

from .conftest import Client, Desk, Streams, open_streams, settle
from .test_poller_and_relay import Bus

SECRET = "a-secret-of-enough-characters"
WRONG = "ERROR not_authorised: the token is wrong; ask the operator of this server for it"


@pytest.fixture(autouse=True)
def slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key by chance two names share a slot, and their pauses, in one of 256 runs."""
    monkeypatch.setattr("replicad.daemon.access.secrets.token_bytes", bytes)


def control(tmp_path: Path, text: str, **more: Any) -> AccessControl:
    """An access file with the clients `name = lines`, all with one secret."""
    file = tmp_path / "access.toml"
    file.write_text(text.replace("SECRET", f'token_sha256 = "{sha256(SECRET.encode()).hexdigest()}"'))
    return AccessControl(file=file, verbs=verbs_of(EVERY), **more)


def rewrite(tmp_path: Path, access: AccessControl, text: str) -> list[tuple[str, str, int]]:
    """Use another file; the clients that are others then, with their connections."""
    control(tmp_path, text)
    found = access.read_file()
    changes = [(client, how, access.connections_of(client)) for client, how in access.changes(found).items()]
    access.replace(found)
    return changes


async def enter(streams: Streams | Desk, name: str, peer: str = "10.0.0.1:5000") -> Client:
    client = streams.connect(peer)
    assert await client.say(f"AUTH {name}.{SECRET}", "NAME me") == []
    return client


BILLING = """
[client.billing]
SECRET
allow = ["read orders*", "list payroll"]
deny = ["read orders_secret"]
"""


async def test_a_refusal_names_the_right_and_leaves_the_connection(
    tmp_path: Path, autojump_clock: MockClock, logs: list[Any]
) -> None:
    async with open_streams("orders", "payroll", "secret") as streams:
        streams.desk.access = control(tmp_path, BILLING)
        client = await enter(streams, "billing")
        assert await client.say("TAKEN payroll") == [
            "ERROR forbidden: client billing may not read stream payroll; "
            'the operator can add "read payroll" to [client.billing]'
        ]
        assert await client.say("FEDERATION_ACK billing 0 orders") == [
            "ERROR forbidden: client billing may not ack stream orders; "
            'the operator can add "ack orders" to [client.billing]'
        ]
        assert await client.say("FEDERATION_ACK other 0 orders") == [
            "ERROR forbidden: client billing may not speak for instance other; "
            "the operator can add it to `instances` of [client.billing]"
        ]
        assert await client.say("DOORBELL") == [
            'ERROR forbidden: client billing may not doorbell; the operator can add "doorbell" to [client.billing]'
        ]
        assert await client.say("STREAMS") == ["STREAMS orders payroll"]
        assert (await client.say("REPLICATE orders NOW"))[0].startswith("WRITERS orders ")
        assert client.reason is None
    refused = [entry for entry in logs if entry["event"] == "access_refused"]
    assert {(e["client"], e["peer"], e["verb"], e["object"]) for e in refused} == {
        ("billing", "10.0.0.1:5000", "read", "payroll"),
        ("billing", "10.0.0.1:5000", "ack", "orders"),
        ("billing", "10.0.0.1:5000", "ack", "other"),
        ("billing", "10.0.0.1:5000", "doorbell", None),
    }
    known = [entry for entry in logs if entry["event"] == "client_known"]
    assert [(e["client"], e["peer"], e["by"]) for e in known] == [("billing", "10.0.0.1:5000", "token")]


LINES = ["TAKEN {}", "REPLICATE {}", "REPLICATE {} NOW", "REPLICATE {} x!1", "FEDERATION_ACK billing 1 {}"]


@pytest.mark.parametrize("line", LINES)
async def test_a_name_that_may_not_be_known_gets_word_for_word_what_an_unknown_one_gets(
    tmp_path: Path, autojump_clock: MockClock, line: str
) -> None:
    async with open_streams("orders", "hidden") as streams:
        streams.desk.access = control(tmp_path, BILLING)
        client = await enter(streams, "billing")
        began = trio.current_time()
        (unknown,) = await client.say(line.format("absent"))
        took = trio.current_time() - began
        began = trio.current_time()
        (hidden,) = await client.say(line.format("hidden"))
        assert trio.current_time() - began == took
        assert unknown.replace("absent", "hidden") == hidden
        assert "unknown_stream" in hidden or "not served" in hidden
        streams.store.change("hidden", fault="broken")
        await settle(2)
        assert await client.say(line.format("hidden")) == [hidden], "also when it is in trouble"


async def test_plain_replicate_has_the_streams_that_may_be_read_also_later_ones(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_streams("orders", "payroll", "orders_secret") as streams:
        streams.desk.access = control(tmp_path, BILLING)
        client = await enter(streams, "billing")
        assert await client.say("REPLICATE") == ["POSITION orders master 0 0"]
        for name in ("orders2", "payroll2"):
            streams.store.add(name)
        await settle(2)
        for name in ("orders2", "payroll2"):
            streams.positions.tell(name, 0)
        await settle(3)
        for name in ("payroll", "payroll2", "orders", "orders2", "orders_secret"):
            await streams.write(name, 1)
        found = await client.lines()
        assert sorted(found) == [
            "POSITION orders2 master 0 0", "RDATA orders master 1 1", "RDATA orders2 master 1 1"
        ]  # fmt: skip
        assert await client.say("REPLICATE") == ["POSITION orders master 1 1", "POSITION orders2 master 1 1"]


async def test_a_trouble_of_a_stream_that_may_not_be_read_is_not_reported(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_streams("orders", "payroll") as streams:
        streams.desk.access = control(tmp_path, BILLING)
        for name in ("orders", "payroll"):
            streams.store.change(name, fault="its table is gone")
        await settle(2)
        client = await enter(streams, "billing")
        (waits,) = [line for line in await client.say("REPLICATE") if "ERROR" in line]
        assert waits.startswith("ERROR stream_waits: stream orders ")


async def test_relays_go_only_from_and_to_clients_with_the_right(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(
        tmp_path,
        '[client.may]\nSECRET\nallow = ["relay"]\n[client.may_too]\ncertificate = "x"\nallow = ["*"]\n'
        '[client.not]\ncertificate = "y"\nallow = ["read *"]',
    )
    await desk.open(Relaying(desk.hub, Relay(Bus(), "replicad", EVERY, desk.troubles)))
    sender, receiver = await enter(desk, "may"), desk.connect("10.0.0.2:1", ["x"])
    other, unknown = desk.connect("10.0.0.2:2", ["y"]), desk.connect("10.0.0.2:3")
    assert await sender.say("REMOTE_SERVER_UP there") == []
    assert await receiver.lines() == ["REMOTE_SERVER_UP there"]
    assert await other.lines() == await unknown.lines() == []
    (refused,) = await other.say("REMOTE_SERVER_UP there")
    assert refused.startswith("ERROR forbidden: client not may not relay; ")
    assert await receiver.lines() == []


# --- who it is ---


@pytest.mark.parametrize(
    ("word", "peer"),
    [("billing.x", "10.1.0.1:1"), ("other." + SECRET, "10.1.0.1:1"), (SECRET, "10.1.0.1:1"), (".", "10.1.0.1:1"),
     ("billing", "10.1.0.1:1"), (f"billing.{SECRET}", "10.2.0.1:1"), (f"billing.{SECRET}.", "10.1.0.1:1")],
)  # fmt: skip
async def test_whatever_is_wrong_gets_one_text_and_the_end(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, word: str, peer: str
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.billing]\nSECRET\nfrom = "10.1.0.0/16"')
    await desk.open()
    client = desk.connect(peer)
    assert await client.say(f"AUTH {word}") == [WRONG]
    await client.leave()
    assert client.reason is CloseReason.NOT_AUTHORISED
    right = desk.connect("10.1.0.1:1")
    assert await right.say(f"AUTH billing.{SECRET}", f"AUTH billing.{SECRET}") == []
    assert right.reason is None
    assert await right.say("AUTH billing.x") == [WRONG]


async def test_a_client_with_a_certificate_needs_no_auth_and_cannot_become_another(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, logs: list[Any]
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.a]\ncertificate = "spiffe://corp/a"\n[client.b]\nSECRET')
    await desk.open()
    first = desk.connect("h:1", ["spiffe://corp/a"])
    assert await first.say("PING 5", "NAME checker") == []
    known = [e for e in logs if e["event"] == "client_known"]
    assert known == [], "a health check comes every few seconds and asks for nothing"
    await first.say("STREAMS", "STREAMS")
    assert [(e["client"], e["by"]) for e in logs if e["event"] == "client_known"] == [("a", "certificate")]
    assert await desk.connect("h:1", ["spiffe://corp/a"]).say(f"AUTH b.{SECRET}") == [WRONG]
    assert await desk.connect("h:2", ["spiffe://corp/x"]).say(f"AUTH b.{SECRET}") == []


async def test_the_connections_of_a_client_are_bounded(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.a]\nSECRET\nconnections = 2\n[client.b]\ncertificate = "b"')
    await desk.open()
    first, _ = await enter(desk, "a"), await enter(desk, "a")
    third = desk.connect("h:1")
    (refused,) = await third.say(f"AUTH a.{SECRET}")
    assert refused.startswith("ERROR too_many_connections: client a has 2 connections already; ")
    await third.leave()
    assert third.reason is CloseReason.TOO_MANY_CONNECTIONS
    assert await desk.connect("h:1", ["b"]).lines() == []
    await first.leave()
    await enter(desk, "a")


async def test_beside_an_access_file_the_one_token_has_all_rights(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_streams("orders", "payroll") as streams:
        streams.desk.access = control(tmp_path, BILLING, token="a.bare-token-of-old")
        client = streams.connect()
        assert await client.say("AUTH a.bare-token-of-old", "STREAMS") == ["STREAMS orders payroll"]


# --- the file is read again ---


async def test_rights_that_are_withdrawn_end_subscriptions_and_new_ones_begin_them(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_streams("a", "b", "c") as streams:
        text = "[client.x]\nSECRET\nallow = [{}]"
        streams.desk.access = control(tmp_path, text.format('"read a", "read b"'))
        every, one = await enter(streams, "x"), await enter(streams, "x")
        await every.say("REPLICATE")
        await one.say("REPLICATE a NOW", "REPLICATE b NOW")
        changes = rewrite(tmp_path, streams.desk.access, text.format('"read b", "read c", "list a"'))
        gone = "ERROR forbidden: the operator has withdrawn the right to read stream a; its subscription has ended"
        assert await one.lines() == [gone]
        assert await every.lines() == [gone, "POSITION c master 0 0"]
        for name in ("a", "b", "c"):
            await streams.write(name, 1)
        assert await one.lines() == ["RDATA b master 1 1"]
        assert await every.lines() == ["RDATA b master 1 1", "RDATA c master 1 1"]
        (refused,) = await one.say("REPLICATE a NOW")
        assert refused.startswith("ERROR forbidden: client x may not read stream a; ")
        changes += rewrite(tmp_path, streams.desk.access, text.format('"read *"'))
        assert await every.lines() == ["POSITION a master 1 1"]
        assert (await one.say("REPLICATE a NOW"))[-1] == "POSITION a master 1 1"
        assert every.reason is one.reason is None
    assert changes == [("x", "changed", 2)] * 2


async def test_a_client_that_is_removed_or_whose_proof_is_withdrawn_is_disconnected(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    desk = Desk(nursery, Troubles())
    two = f"""token_sha256 = ["{sha256(b"other").hexdigest()}", "{sha256(SECRET.encode()).hexdigest()}"]"""
    desk.access = control(tmp_path, f'[client.a]\n{two}\n[client.b]\ncertificate = "b"\n[client.c]\ncertificate = "c"')
    await desk.open()
    old, new = await enter(desk, "a"), desk.connect("h:1")
    assert await new.say("AUTH a.other") == []
    by_name, removed, unknown = desk.connect("h:2", ["b"]), desk.connect("h:3", ["c"]), desk.connect("h:4")
    await settle()
    rewrite(
        tmp_path, desk.access,
        f'[client.a]\ntoken_sha256 = "{sha256(b"other").hexdigest()}"\n[client.b]\ncertificate = ["b", "bb"]',
    )  # fmt: skip
    text = "ERROR not_authorised: the operator has withdrawn the access of this client"
    assert await old.lines() == await removed.lines() == [text]
    assert await new.lines() == await by_name.lines() == await unknown.lines() == []
    assert new.reason is by_name.reason is unknown.reason is None
    rewrite(tmp_path, desk.access, '[client.b]\ncertificate = "b"\nfrom = "10.0.0.0/8"')
    assert await new.lines() == await by_name.lines() == [text]


async def test_a_broken_file_changes_nothing_and_is_a_trouble_until_it_is_mended(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock, logs: list[Any]
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.a]\nSECRET\nallow = ["relay"]', troubles=desk.troubles)
    await desk.open()
    client = await enter(desk, "a")
    (tmp_path / "access.toml").write_text('[client.a]\nallow = ["raed x"]')
    with pytest.raises(UsageError) as caught:
        desk.access.read_file()
    desk.access.keep(caught.value)
    assert "did you mean read?" in (desk.troubles.why("service", "access") or "")
    assert [e["log_level"] for e in logs if e["event"] == "access_unchanged"] == ["error"]
    assert client.session.access.may("relay")
    rewrite(tmp_path, desk.access, "[client.a]\nSECRET")
    assert desk.troubles.why("service", "access") is None
    assert not client.session.access.may("relay")
    assert client.reason is None


async def test_the_catch_ups_of_a_client_are_bounded_over_all_its_connections(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    access = control(tmp_path, "[client.a]\nSECRET\ncatchups = 2\n[client.b]\ncertificate = 'b'")
    desk = Desk(nursery, Troubles())
    desk.access = access
    await desk.open()
    clients = [await enter(desk, "a") for _ in range(5)]
    running = most = 0

    async def catch_up(client: Client) -> None:
        nonlocal running, most
        async with client.session.access.catching_up():
            running += 1
            most = max(most, running)
            await trio.sleep(1)
            running -= 1

    began = trio.current_time()
    async with trio.open_nursery() as catching_up:
        for client in clients:
            catching_up.start_soon(catch_up, client)
        catching_up.start_soon(catch_up, desk.connect("h:1", ["b"]))
    assert most == 3, "two of a, and one of b"
    assert trio.current_time() - began == pytest.approx(3)


# --- guesses ---


async def test_guesses_are_slowed_down_and_other_addresses_and_clients_are_not(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.a]\nSECRET\n[client.b]\ncertificate = "b"')
    await desk.open()
    began = trio.current_time()
    guesses = 0

    async def guess(peer: str) -> None:
        nonlocal guesses
        while trio.current_time() < began + 40:
            client = desk.connect(peer)
            guesses += WRONG in [*await client.say(f"AUTH a.{guesses}x"), *await client.lines(9)]
            await client.leave()
            await trio.sleep(0.2)  # tries that are refused at once take no time

    async with trio.open_nursery() as guessers:
        for number in range(2):
            guessers.start_soon(guess, f"10.0.0.9:{number}")
        await trio.sleep(30)
        before = trio.current_time()
        client = desk.connect("10.0.0.8:1")
        await client.say(f"AUTH a.{SECRET}")
        assert client.session.access.name == "a"
        assert trio.current_time() - before < 0.5, "another address"
    assert 6 <= guesses <= 11, "five in the first eight seconds, then one in eight"


async def test_the_pauses_do_not_tell_which_clients_there_are(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    desk = Desk(nursery, Troubles())
    desk.access = control(tmp_path, '[client.a]\nSECRET\n[client.b]\ncertificate = "b"')
    await desk.open()

    async def pauses(peer: str, name: str) -> list[float]:
        found = []
        for number in range(8):
            client, began = desk.connect(f"{peer}:{number}"), trio.current_time()
            assert WRONG in [*await client.say(f"AUTH {name}.wrong"), *await client.lines(9)]
            found.append(round(trio.current_time() - began, 2))
            await client.leave()
        return found

    known = await pauses("10.0.0.1", "a")
    assert known[-1] > 7
    for number, name in enumerate(("b", "absent", "x" * 900, "", "\u0663", "bb")):
        assert await pauses(f"10.0.1.{number}", name) == known, name
    assert (await pauses("10.0.0.1", "absent2")) == known, "also beside guesses under another name"


def test_one_address_fills_neither_the_table_nor_forgets_its_pauses() -> None:
    guesses = Guesses(GuessPace(), lambda: 0.0)
    for name in ("billing", *(f"name{number}" for number in range(5000))):
        guesses.reserve("10.0.0.1", name)
    assert len(guesses) <= SLOTS
    assert guesses.reserve("10.0.0.1", "billing") != 0
    assert guesses.reserve("10.0.0.2", "billing") == 0


def test_the_table_of_addresses_is_bounded_and_forgets_the_oldest_first() -> None:
    now = [0.0]
    guesses = Guesses(GuessPace(addresses=100), lambda: now[0])
    for number in range(1000):
        assert guesses.reserve(f"10.0.{number // 250}.{number % 250}", "a") == 0
    assert len(guesses) == 100
    assert guesses.reserve("10.0.3.249", "a") == 0.25
    assert guesses.reserve("10.0.3.249", "b") == 0, "another client"
    assert guesses.reserve("10.0.0.0", "a") == 0, "forgotten"


def test_a_right_secret_ends_the_pauses_and_addresses_of_one_machine_count_as_one() -> None:
    now = [0.0]
    guesses = Guesses(GuessPace(), lambda: now[0])
    waits = [guesses.reserve(f"2001:db8:0:1::{number}", "a") for number in range(7)]
    assert waits == [0, 0.25, 0.75, 1.75, 3.75, 7.75, None]
    guesses.succeeded("2001:db8:0:1::ffff", "a")
    assert guesses.reserve("2001:db8:0:1::1", "a") == 0
    assert guesses.reserve("2001:db8:0:2::1", "a") == 0
