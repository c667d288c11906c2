"""Turns by address, against a plain model; and what counts as one address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicad.daemon.fairness import ByAddress, address_of, network_of

ADDRESSES = st.sampled_from("abcd")


class Turns(RuleBasedStateMachine):
    """The model: things by address, the oldest first, and the addresses in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.real: ByAddress[int] = ByAddress()
        self.model: dict[str, list[int]] = {}
        self.taken: dict[str, int] = {}  # since the address had none
        self.numbers: Iterator[int] = count()

    def remove(self, address: str, thing: int) -> None:
        self.model[address].remove(thing)
        if not self.model[address]:
            del self.model[address]
            self.taken.pop(address, None)

    @rule(address=ADDRESSES)
    def add(self, address: str) -> None:
        thing = next(self.numbers)
        self.real.add(thing, address)
        self.model.setdefault(address, []).append(thing)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_any(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.model)))
        thing = data.draw(st.sampled_from(self.model[address]))
        self.real.remove(thing)
        assert thing not in self.real
        self.remove(address, thing)

    @precondition(lambda self: self.model)
    @rule(newest=st.sampled_from([True, False, None]))
    def take(self, newest: bool | None) -> None:
        address, things = next(iter(self.model.items()))
        assert (self.real.turn(), self.real.first()) == (address, things[0])
        number = self.taken.get(address, 0)
        thing = things[-1] if newest or (newest is None and number % 2) else things[0]
        assert self.real.take(newest=newest) == thing
        self.taken[address] = number + (newest is None)
        self.remove(address, thing)
        if address in self.model:
            self.model[address] = self.model.pop(address)

    @invariant()
    def the_address_with_the_most_and_its_oldest_are_known(self) -> None:
        assert len(self.real) == sum(map(len, self.model.values()))
        number, address = self.real.most()
        assert number == max(map(len, self.model.values()), default=0)
        assert number == len(self.model.get(address, ()))
        for known in "abcd":
            assert self.real.oldest(known) == next(iter(self.model.get(known, ())), None)


TestTurns = Turns.TestCase


class Peer:
    """A socket with an address of our choice at the other end."""

    def __init__(self, *name: object) -> None:
        self.name = name

    def getpeername(self) -> tuple[object, ...]:
        return self.name


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%2", "fe80::2", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_an_ipv6_network_of_one_site_is_one_address(one: str, other: str, same: bool) -> None:
    assert (address_of(Peer(one, 1)) == address_of(Peer(other, 2))) is same  # type: ignore[arg-type]


def test_a_pair_of_sockets_has_no_address() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert address_of(ours) == ""


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("2001:db8:1:2::7", "20010db800010002"),
        ("fe80::1%eth0", "fe80000000000000"),
        ("no:address", "no:address"),
        ("", ""),
    ],
)
def test_an_address_of_ipv6_counts_by_its_network_and_what_is_none_as_it_is(host: str, network: str) -> None:
    assert network_of(host) == network
