"""The settings of a sender: defaults, ranges, reasons. replicad.config has the settings of the daemon and Postgres."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import ClassVar

from replicad.config.declaring import (
    PATH,
    amount,
    check_ranges,
    choice,
    count,
    duration,
    matching,
    parsed,
    setting,
)
from replicad.config.secrets import trust
from replicad.errors import UsageError
from replicad.retry import Backoff
from replicad.sender.items import MAX_EDUS, MAX_PDUS

# Decides which hosts and addresses the sender may send to. Pure: it resolves no name and connects to nothing.

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


JITTER = 0.2  # the largest part of a pause that is randomly left off
GIVEN_UP = 28  # failures in a row with the longest pause (a week of them, if it is six hours)


@dataclass(frozen=True, slots=True)
class Terms:
    """The bounds of a destination: counts, bytes and seconds."""

    pdus: int = MAX_PDUS  # in a transaction
    edus: int = MAX_EDUS  # in a transaction
    transaction_bytes: int = 4 << 20  # bodies in a transaction; a larger body is sent alone
    queue_pdus: int = 500  # held in memory; ten transactions, so that a busy destination seldom reads from the store
    queue_edus: int = 200  # held in memory; two transactions
    catch_up_after: float = 3600.0  # back-off in seconds above which catch-up takes over; Synapse's figure
    supersede: bool = True  # False: catch-up delivers every fact, not only the latest of a room
    backoff: Backoff = field(default_factory=lambda: Backoff(5.0, 6 * 3600.0, jitter=JITTER))
    idle: float = 7 * 86400.0  # the longest pause of a destination that is given up and for which nothing new comes

    @property
    def longest(self) -> float:
        """The longest pause of a destination that something new is sent to."""
        return self.backoff.cap

    def catches_up(self, failures: int) -> bool:
        """Whether the pause after so many failures in a row is one for catch-up."""
        return failures > 0 and self.backoff.whole(failures - 1) > self.catch_up_after

    def away(self, failures: int) -> bool:
        """Whether a destination with so many failures in a row is away for long: it is not expected to answer."""
        at_most = failures > 0 and self.backoff.whole(failures - 1) >= self.backoff.cap
        return at_most or self.catches_up(failures)

    def pause(self, failures: int, chance: float, *, at_least: float, idle: bool) -> float:
        """How long to wait after so many failures in a row; `chance` is as for `Backoff.delay`.

        `at_least` is what the destination asks for. `idle`: nothing new has come for it since the last try.
        """
        before = failures - 1 - GIVEN_UP
        if idle and before >= 0 and self.backoff.whole(before) >= self.backoff.cap:
            most = max(self.idle, self.longest)
            return replace(self.backoff, first=most, cap=most).delay(0, chance)
        return min(self.longest, max(self.backoff.delay(failures - 1, chance), at_least))


MATRIX = "matrix"
WEBHOOK = "webhook"
CLOUDEVENTS = "cloudevents"
CLOUDEVENTS_BATCH = "cloudevents-batch"
URLS = {
    MATRIX: "https://{destination}/_matrix/federation/v1/send/{transaction}",
    **dict.fromkeys((WEBHOOK, CLOUDEVENTS, CLOUDEVENTS_BATCH), "{destination}"),
}

SIGNS = ("none", "hmac", "standard", "bearer")

_DAY = 86400.0
_NAME = r"[!-+\--~]{1,200}"  # printable ASCII without the comma; it stands on a line of the protocol
_MODULE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(re.split(r"[,\s]+", text.strip(", \t\r\n")))
    if not all(re.fullmatch(r"[!-+\--~]{1,1024}", name) for name in names):
        raise ValueError("give names separated by commas or blanks")
    return names


def _places(text: str) -> tuple[str, ...]:
    names = _names(text)
    AllowedHosts(names)
    return names


def _sql(text: str) -> str:
    if not text.strip():
        raise ValueError("give a query")
    return text


_NAMES = parsed("names", "names separated by commas or blanks", _names, "NAMES")
_PLACES = parsed("places", "networks, addresses or names, separated by commas or blanks", _places, "PLACES")
_SQL = parsed("query", "a query", _sql, "SQL")


def _time(default: float, text: str, low: float, high: float = 30 * _DAY) -> float:
    return duration(default, text, low, high)


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of rows. `destinations`, `route` and the queries exclude each other; without them, rows name
    destinations.
    """

    GROUP: ClassVar = "Routing"

    destinations: tuple[str, ...] = setting((), "Every row goes to these destinations.", _NAMES)
    route: str | None = setting(
        None,
        "Function of (stream, token, row) that returns a Fact, an Update or None.",
        matching(_MODULE, "a module and a function in it, such as app.federation:route", "MODULE:NAME"),
    )
    route_sql: str | None = setting(
        None,
        "Query that routes facts: $1 bigint[] tokens, $2 jsonb[] rows; returns n, destinations, room, pdu.",
        _SQL,
    )
    update_route_sql: str | None = setting(
        None,
        "Query that routes updates: $1 bigint[] tokens, $2 jsonb[] rows; returns n, destinations, edu, key, droppable.",
        _SQL,
    )
    latest_sql: str | None = setting(
        None,
        "Query for catch-up: $1 text destination, $2 text[] rooms; returns room, pdu: a room's latest facts, where the "
        "destination may have them. Without it, the latest fact that was meant for the destination.",
        _SQL,
    )
    bad_row: str = choice(
        "stop",
        "What to do with a row that cannot be routed: stop there until it is mended, or skip it and log that.",
        "stop",
        "skip",
    )

    def __post_init__(self) -> None:
        given = {
            "--destinations": self.destinations,
            "--route": self.route,
            "--route-sql": self.route_sql or self.update_route_sql,
        }
        given_ways = [name for name, value in given.items() if value]
        if len(given_ways) > 1:
            raise UsageError(f"{' and '.join(given_ways)} are given; give one of them")


_SECRET = matching(r"[!-~]{32,1024}", "32 to 1024 printable characters without blanks: openssl rand -hex 32", "SECRET")


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets from which the secrets of destinations are made. A destination could guess a short secret."""

    federation_secret: str | None = setting(
        None, "Secret from which the secret of each destination is made.", _SECRET, secret=True
    )
    federation_secret_previous: str | None = setting(
        None,
        "The previous secret: `sender secret` prints the secrets made from it too.",
        _SECRET,
        secret=True,
    )


@dataclass(frozen=True, slots=True)
class Delivery:
    """The form of requests, their limits, and the certificates of destinations."""

    GROUP: ClassVar = "Delivery"

    form: str = choice(
        WEBHOOK,
        "webhook: POST of JSON, the destination being a URL. matrix: PUT in the form of Matrix federation. "
        "cloudevents: POST of one CloudEvent, cloudevents-batch: of several.",
        WEBHOOK,
        MATRIX,
        CLOUDEVENTS,
        CLOUDEVENTS_BATCH,
    )
    event_source: str = setting(
        "/replicad",
        "The source of CloudEvents, a URI reference. With the id it is unique.",
        matching(r"[!-~]{1,1024}", "a URI reference without blanks", "URI"),
    )
    event_type: str = setting(
        "",
        "The type of CloudEvents of facts. Changes of a table have the operation behind it: TYPE.update. Those of "
        "updates have the type replicad.update. Default: replicad.fact, and replicad.change for changes.",
        matching(r"[!-~]{1,255}", "a type without blanks, such as com.example.order", "TYPE"),
    )
    url: str = setting(
        "",
        "URL of a request, with {destination} and {transaction} in it. Default: that of the form.",
        matching(r"[!-~]{1,1024}", "a URL without blanks", "TEMPLATE"),
    )
    traceparent: str = setting(
        "",
        "Column of facts with a W3C traceparent: the request gets it as a header, and a CloudEvent as an attribute. "
        "Default: none.",
        matching(r"[!-~]{1,255}", "a column without blanks", "COLUMN"),
    )
    origin: str = setting(
        "", "Name of this server in the matrix form; it is never sent anything.", matching(_NAME, "a name", "NAME")
    )
    sign: str = choice(
        "none",
        "hmac signs every request with the secret of its destination, standard does it as Standard Webhooks, bearer "
        "sends the secret as a bearer token.",
        *SIGNS,
    )
    allow_destinations: tuple[str, ...] = setting(
        (),
        "Send only to hosts that match any of these globs, or to such names if the host is fixed. Default: all.",
        _NAMES,
        "GLOBS",
    )
    allow_private: tuple[str, ...] = setting(
        (),
        "Networks, addresses and names (globs) of hosts that may be private, loopback or link-local. Default: none.",
        _PLACES,
    )
    allow_http: tuple[str, ...] = setting(
        (),
        "Networks, addresses and names (globs) of hosts that get secrets and signatures over http too. Default: none.",
        _PLACES,
    )
    destination_ca: Path | None = setting(
        None, "Certificate authorities (PEM) to trust in destinations. Default: the system's.", PATH
    )
    destination_timeout: float = _time(  # a host that is down does not answer; others answer in tenths of a second
        10.0, "A connection to a destination must be made within this time.", 0.01
    )
    request_timeout: float = _time(  # a transaction of 50 facts can be a minute's work for a small server
        60.0, "A destination must have answered a request within this time.", 0.01
    )
    concurrency: int = count(  # each may have a connection open
        128, "Requests at the same time to destinations that answered last time.", 1, 10_000
    )
    probes: int = count(  # each destination that is down costs a time-out; the others must not wait for it
        64, "Requests at the same time, besides, to destinations that did not, or are new.", 1, 10_000
    )
    secrets: Secrets = Secrets()

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.url:
            object.__setattr__(self, "url", URLS[self.form])
        unknown = set(re.findall(r"{([^{}]*)}", self.url)) - {"destination", "transaction"}
        if unknown or "{destination}" not in self.url:
            raise UsageError(
                f"--url {self.url} needs {{destination}}, may have {{transaction}}, and nothing else in braces"
            )
        if not re.match(r"https?://|{destination}", self.url):
            raise UsageError(f"--url {self.url} begins with neither http:// nor https://")
        if self.form == MATRIX and not self.origin:
            raise UsageError("--form matrix needs --origin, the name of this server")
        if self.form != MATRIX and self.origin:
            raise UsageError("--origin is for --form matrix only, and --form webhook is the default: say --form matrix")
        if (self.sign == "none") != (self.secrets.federation_secret is None):
            raise UsageError(
                "--sign hmac, standard and bearer need a secret, and a secret needs one of them: federation_secret in "
                "the file, or REPLICAD_FEDERATION_SECRET"
            )

    def ssl_context(self) -> ssl.SSLContext:
        """The certificates that connections to destinations trust.

        Raises:
            UsageError: the file cannot be read or holds no certificate.
        """
        return trust(self.destination_ca, "--destination-ca")


@dataclass(frozen=True, slots=True)
class SenderBounds:
    """The bounds of queues, transactions and back-off."""

    GROUP: ClassVar = "Bounds"

    pdus: int = count(MAX_PDUS, "Facts in a transaction.", 1, MAX_PDUS)
    edus: int = count(MAX_EDUS, "Updates in a transaction.", 1, MAX_EDUS)
    transaction_bytes: int = amount(
        4 << 20, "Facts and updates in a transaction, unless one alone is larger.", 1024, 1 << 30
    )
    queue: int = count(  # ten transactions: a busy destination seldom needs Postgres
        500, "Facts of one destination in memory; further facts are read from Postgres.", 1, 1_000_000
    )
    update_queue: int = count(  # two transactions
        200, "Droppable updates of one destination in memory; beyond it the oldest are dropped.", 1, 1_000_000
    )
    memory: int = amount(256 << 20, "Facts and updates in memory, of all destinations together.", 1 << 20, 1 << 40)
    retry_first: float = _time(
        5.0, "Pause after the first failure of a destination; each is twice the one before.", 0.01
    )
    retry_max: float = _time(  # four tries a day for a destination that may never come back
        6 * 3600.0, "The longest pause.", 0.01
    )
    retry_idle: float = _time(  # the destination may be absent for good, and each try costs a time-out
        7 * _DAY,
        f"The longest pause of a destination that has failed {GIVEN_UP} times with --retry-max, until something new "
        "comes for it.",
        0.01,
    )
    catch_up_after: float = _time(
        3600.0, "A destination whose pause is longer than this is caught up with: see --catch-up.", 0.0
    )
    catch_up: str = choice(
        "latest", "Which facts of a room are delivered after that: only the latest, or every one.", "latest", "every"
    )
    sweep_interval: float = _time(
        60.0, "Facts that were delivered to all destinations are removed from Postgres this often.", 0.1, _DAY
    )

    def __post_init__(self) -> None:
        check_ranges(self, ("retry_first", "retry_max"))

    def terms(self) -> Terms:
        """The bounds of one destination."""
        return Terms(
            pdus=self.pdus,
            edus=self.edus,
            transaction_bytes=self.transaction_bytes,
            queue_pdus=self.queue,
            queue_edus=self.update_queue,
            catch_up_after=self.catch_up_after,
            supersede=self.catch_up == "latest",
            backoff=Backoff(self.retry_first, self.retry_max, jitter=JITTER),
            idle=self.retry_idle,
        )


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """All settings of a sender, except settings of the daemon and Postgres. `senders` empty: this sender is alone.

    Raises:
        UsageError: something is missing, out of range, or contradicts something else.
    """

    facts: str = setting("", "Stream of facts to deliver.", matching(_NAME, "the name of a stream", "STREAM"))
    updates: tuple[str, ...] = setting((), "Streams of updates to deliver.", _NAMES, "STREAMS")
    sender_name: str = setting("sender", "Name of this sender.", matching(_NAME, "a name without blanks", "NAME"))
    senders: tuple[str, ...] = setting(
        (), "All senders, this one too; they share the destinations. Default: this one alone.", _NAMES
    )
    start: str = choice("now", "Where to begin with a stream of which nothing was recorded yet.", "now", "earliest")
    sender_grace: float = _time(5.0, "On SIGTERM or SIGINT requests under way get this time to end.", 0.0, 600)
    routing: Routing = Routing()
    delivery: Delivery = Delivery()
    bounds: SenderBounds = SenderBounds()

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.facts and not self.updates:
            raise UsageError("--facts names no stream: there is nothing to deliver; `replicad streams list` shows them")
        if not self.senders:
            object.__setattr__(self, "senders", (self.sender_name,))
        if self.sender_name not in self.senders:
            raise UsageError(
                f"--senders {','.join(self.senders)} does not name this sender, {self.sender_name}; see --sender-name"
            )
        if self.delivery.form == CLOUDEVENTS:
            if self.updates:
                raise UsageError("--form cloudevents sends one event at a time; for --updates use cloudevents-batch")
            object.__setattr__(self, "bounds", replace(self.bounds, pdus=1))
        streams = self.streams
        if len(set(self.senders)) < len(self.senders) or len(set(streams)) < len(streams):
            raise UsageError("--senders, or --facts and --updates together, name something twice")

    @property
    def streams(self) -> tuple[str, ...]:
        """All streams that are followed."""
        return (*((self.facts,) if self.facts else ()), *self.updates)
