"""Where the sender may connect to: addresses of every kind, and what an operator has named."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.sender.settings import Address, AllowedHosts, glob, is_public

SPECIAL = {
    4: "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.2.0/24 192.168.0.0/16 "
    "198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32 161.26.0.0/16 166.8.0.0/14 "
    "192.88.99.0/24 192.0.0.0/24",
    6: "::/127 fc00::/7 fe80::/10 fec0::/10 ff00::/8 100::/64 2001:db8::/32 2001::/32 3fff::/20 64:ff9b:1::/48",
}
V4 = [IPv4Network(text) for text in SPECIAL[4].split()]
V6 = [IPv6Network(text) for text in SPECIAL[6].split()]
FORMS = {
    "mapped": lambda inner: IPv6Address((0xFFFF << 32) | int(inner)),
    "6to4": lambda inner: IPv6Address((0x2002 << 112) | (int(inner) << 80)),
    "nat64": lambda inner: IPv6Address((0x0064FF9B << 96) | int(inner)),
    "isatap": lambda inner: IPv6Address((0x2A00 << 112) | (0x5EFE << 32) | int(inner)),
    "isatap, global": lambda inner: IPv6Address((0x2A00 << 112) | (0x02005EFE << 32) | int(inner)),
    "teredo": lambda inner: IPv6Address((0x20010000 << 96) | (int(inner) ^ 0xFFFFFFFF)),
    "translated": lambda inner: IPv6Address((0xFFFF << 48) | int(inner)),
    "compatible": lambda inner: IPv6Address(int(inner)),
}

v4 = st.one_of(st.sampled_from(V4).flatmap(lambda network: st.ip_addresses(network=network)), st.ip_addresses(v=4))
v6 = st.one_of(st.sampled_from(V6).flatmap(lambda network: st.ip_addresses(network=network)), st.ip_addresses(v=6))


@given(v4)
def test_no_address_of_a_special_network_is_public_and_others_are(address: IPv4Address) -> None:
    if any(address in network for network in V4):
        assert not is_public(address)
    else:
        assert is_public(address)


@given(v6)
def test_no_ipv6_address_outside_what_is_assigned_is_public(address: IPv6Address) -> None:
    if any(address in network for network in V6):
        assert not is_public(address)
    if is_public(address):
        assert address in IPv6Network("2000::/3") or address.ipv4_mapped or address in IPv6Network("64:ff9b::/96")


@given(v4, st.sampled_from(sorted(FORMS)))
def test_an_address_in_the_clothes_of_another_is_as_public_as_itself(inner: IPv4Address, form: str) -> None:
    expected = is_public(inner) and form not in ("compatible", "teredo", "translated")
    assert is_public(FORMS[form](inner)) == expected


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("64:ff9b::a83f:8110", False),
        ("64:ff9b:1::a83f:8110", False),
        ("2002:a83f:8110::1", False),
        ("2001:0:a83f:8110::57c0:7eef", False),
        ("2a00::5efe:a83f:8110", False),
        ("100.100.100.200", False),
        ("192.0.0.192", False),
        ("169.254.170.2", False),
        ("fd20:ce::254", False),
        ("fd00:c1::a9fe:a9fe", False),
        ("168.63.129.17", True),
        ("169.254.169.254", False),
        ("::ffff:169.254.169.254", False),
        ("fd00:ec2::254", False),
        ("fe80::1%2", False),
        ("::1", False),
        ("93.184.215.14", True),
        ("2606:4700:4700::1111", True),
        ("::ffff:93.184.215.14", True),
    ],
)
def test_well_known_addresses(text: str, public: bool) -> None:
    assert is_public(ip_address(text)) == public


@given(v4, st.integers(0, 32), st.one_of(v4, v6))
def test_a_network_holds_its_addresses_mapped_ones_too_and_no_others(
    start: IPv4Address, bits: int, other: Address
) -> None:
    network = IPv4Network((int(start), bits), strict=False)
    places = AllowedHosts([str(network)])
    assert places.hold(start)
    assert places.hold(FORMS["mapped"](start))
    inner = other.ipv4_mapped or other if isinstance(other, IPv6Address) else other
    assert places.hold(other) == (inner in network)


def test_hosts_are_named_by_glob_by_address_and_by_network() -> None:
    places = AllowedHosts(["*.internal", "LOCALHOST", "10.0.0.0/8", "::1", "fe80::/10"])
    for host in ("a.internal", "A.b.INTERNAL", "localhost", "10.1.2.3", "::1", "::ffff:10.1.2.3", "fe80::1%2"):
        assert places.name(host), host
    for host in ("internal", "a.internal.example", "localhost.example", "11.0.0.1", "::2", "10.1.2.3.example", ""):
        assert not places.name(host), host
    assert not places.hold(ip_address("127.0.0.1")), "a name names no address"


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/33", "a/b", "", "[::1]", "a b", "http://a"])
def test_what_is_neither_a_network_nor_a_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="give networks"):
        AllowedHosts([entry])


def test_only_the_star_and_the_question_mark_have_a_meaning_in_a_glob() -> None:
    assert glob("a*.[x].?").fullmatch("a/b\nc.[X].y")
    assert not glob("a.example").fullmatch("axexample")
    assert not glob("*.example").fullmatch("a.example.org")
