"""Decides which hosts and addresses the sender may send to. Pure: it resolves no name and connects to nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_UNICAST = IPv6Network("2000::/3")  # all that IANA has assigned for the public internet
# Routed like public addresses, and answered inside of a cloud by its own services: metadata, credentials, agents.
_OF_CLOUDS = (
    IPv4Network("168.63.129.16/32"),  # Azure: WireServer, DNS
    IPv4Network("161.26.0.0/16"),  # IBM: services of the infrastructure
    IPv4Network("166.8.0.0/14"),  # IBM: service endpoints
)
# Reserved, and not known so to every Python. In 192.0.0.0/24 a cloud had its metadata, too.
_RESERVED = (IPv6Network("3fff::/20"), IPv4Network("192.88.99.0/24"), IPv4Network("192.0.0.0/24"))
_TEREDO = IPv6Network("2001::/32")  # reaches an IPv4 address that is hidden in it, through somebody's relay
_ISATAP = (0x5EFE, 0x02005EFE)  # RFC 5214: before the IPv4 address in the last 32 bits
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_HOST = re.compile(r"[A-Za-z0-9_.:*?-]{1,255}")


def glob(pattern: str) -> re.Pattern[str]:
    """A pattern of names: `*` is any text, `?` any character. ASCII letters match in both cases."""
    text = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)
    return re.compile(text, re.DOTALL | re.IGNORECASE)


class AllowedHosts:
    """Addresses, networks (`10.0.0.0/8`) and globs of host names (`*.internal`) that an operator has named.

    Raises ValueError for an entry that is none of these.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[Network] = []
        self._names: list[re.Pattern[str]] = []
        for entry in entries:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                if not _HOST.fullmatch(entry):
                    raise ValueError(
                        "give networks such as 10.0.0.0/8, addresses, and names of hosts such as *.internal"
                    ) from None
                self._names.append(glob(entry))

    def name(self, host: str) -> bool:
        """Whether a host is named, as it stands in a URL without brackets: a name or an address."""
        if any(pattern.fullmatch(host) for pattern in self._names):
            return True
        try:
            return self.hold(ip_address(host))
        except ValueError:
            return False

    def hold(self, address: Address) -> bool:
        """Whether an address lies in a network that is named. A mapped address lies where its IPv4 address does."""
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return any(address in network or (mapped is not None and mapped in network) for network in self._networks)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet: neither private, loopback nor link-local, nor reserved.

    For an IPv6 address that stands for an IPv4 address (mapped, 6to4, NAT64, ISATAP) the IPv4 address decides; an
    address that hides it (Teredo) is not public. The registries of RFC 6890 list the reserved addresses. Addresses of
    the clouds' own services are not public either, whatever the registries contain.
    """
    inner = _stands_for(address)
    if inner is not None and not is_public(inner):
        return False
    if inner is not None and not _is_isatap(address):
        return True
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address in _TEREDO):
        return False
    if any(address in network for network in (*_OF_CLOUDS, *_RESERVED)):
        return False
    return address.is_global and not address.is_multicast


def _stands_for(address: Address) -> IPv4Address | None:
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64 or _is_isatap(address):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def _is_isatap(address: Address) -> bool:
    return isinstance(address, IPv6Address) and (int(address) >> 32) & 0xFFFFFFFF in _ISATAP
