"""Which TLS handshake gives way."""

from __future__ import annotations

from replicad.daemon.hub import ALONE, WORKED_ON, Stage, Underway


def test_those_without_a_hello_give_way_first_and_those_that_wait_for_the_server_last() -> None:
    underway = Underway(100)
    cut: list[str] = []
    for name in ("worked on", "answered later", "answered", "silent", "silent, newer"):
        underway.hold(name, lambda name=name: cut.append(name))  # type: ignore[misc]
    underway.move("worked on", Stage.SERVER)
    for name in ("answered", "answered later"):
        underway.move(name, Stage.SERVER)
        underway.move(name, Stage.CLIENT)
    while underway.cut_one():
        pass
    assert cut == ["silent", "silent, newer", "answered", "answered later", "worked on"]
    assert (len(underway), underway.cut) == (0, 5)


def test_one_too_many_costs_one_without_a_hello_but_not_itself() -> None:
    underway = Underway(2)
    cut: list[str] = []
    for name in ("answered", "silent", "next", "last"):
        underway.hold(name, lambda name=name: cut.append(name))  # type: ignore[misc]
        if name in ("answered", "next"):
            underway.move(name, Stage.CLIENT)
    assert cut == ["silent", "answered"]
    underway.move("silent", Stage.CLIENT)
    underway.leave("silent")
    assert len(underway) == 2, "one that was cut stays away"


def test_an_address_with_many_gives_way_before_one_with_few() -> None:
    underway = Underway(6)
    cut: list[str] = []
    for name, address in (("polite", "here"), *((f"flood {number}", "there") for number in range(9))):
        underway.hold(name, lambda name=name: cut.append(name), address, Stage.SERVER)  # type: ignore[misc]
        underway.move(name, Stage.CLIENT)
    assert cut == [f"flood {number}" for number in range(4)]
    underway.leave("polite")
    assert len(underway) == 5


def test_of_many_addresses_those_without_a_hello_give_way_first() -> None:
    underway = Underway(100)
    cut: list[str] = []
    for name, stage in (("answered", Stage.CLIENT), ("worked on", Stage.SERVER), ("silent", Stage.HELLO)):
        underway.hold(name, lambda name=name: cut.append(name), name, stage)  # type: ignore[misc]
    while underway.cut_one():
        pass
    assert cut == ["silent", "answered", "worked on"]


def test_it_is_ready_while_few_wait_for_the_server() -> None:
    underway = Underway(100)
    for number in range(WORKED_ON):
        assert underway.ready("")
        underway.hold(number, lambda: None)
        underway.move(number, Stage.SERVER)
    assert not underway.ready("")
    underway.move(0, Stage.CLIENT)
    assert underway.ready("")


def test_the_only_one_of_its_address_need_not_wait_behind_a_crowd() -> None:
    underway = Underway(100)
    for number in range(20):
        underway.hold(number, lambda: None, "there", Stage.SERVER)
        underway.move(number, Stage.CLIENT)
    underway.hold("worked on", lambda: None, "there", Stage.SERVER)
    assert not underway.ready("there")
    assert underway.ready("here")
    assert underway.may_jump("here")
    underway.hold("polite", lambda: None, "here", Stage.SERVER)
    assert not underway.ready("here"), "the second one of an address waits as all do"


def test_a_crowd_of_addresses_with_one_each_is_not_answered_all_at_once() -> None:
    underway = Underway(100)
    for number in range(WORKED_ON + ALONE):
        assert underway.ready(f"address {number}")
        underway.hold(number, lambda: None, f"address {number}", Stage.SERVER)
    assert not underway.ready("another")
    underway.move(0, Stage.CLIENT)
    assert underway.ready("another")
