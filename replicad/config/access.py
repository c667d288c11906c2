"""The access file: which clients there are, how each proves who it is, and what it may do.

docs/access.md is the reference of the file. The file is checked as a whole. What connects the clients to connections is
in `replicad.daemon.access`.
"""

from __future__ import annotations

import fnmatch
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote

from replicad.config.declaring import WHOLE, Key, meant, not_known, parse_toml, read_toml
from replicad.config.secrets import refuse_writable_by_others
from replicad.errors import UsageError

LIST = "list"  # the right to know that a name exists; every other right on the name gives it too
READ = "read"  # the only right that a rule can give on a part
ANY = "*"
MAX_SECRETS = 2  # the present one and the next one, while clients change over
MOST_FAULTS = 20  # of a file, in one message: looking for the names that were meant takes a millisecond for each
MAX_DECISIONS = 4096  # that a client's table of decisions keeps: names come from clients
LONGEST_KEPT = 128  # characters of a name whose decision is kept; over HTTP a name may have a hundred times more
_KEYS = ("token_sha256", "certificate", "from", "allow", "deny", "instances", "connections", "catchups")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Part = tuple[str, str]
"""A part of a stream of changes: a filter column of it, and one value, as the text of the column."""


def parse_part(text: str) -> Part:
    """The part that is written as `column=value`, with blanks and `%` as in a URL. Raises ValueError."""
    column, equals, value = text.partition("=")
    try:
        found = unquote(column, errors="strict"), unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("its escapes with % are no UTF-8") from None
    if not (column and equals):
        raise ValueError("it is written as column=value; blanks and % in it as %20 and %25")
    if "\0" in "".join(found):
        raise ValueError("no text of Postgres has the character U+0000")
    return found


def part_text(part: Part) -> str:
    """The text that `parse_part` reads."""
    return "=".join(quote(each, safe="") for each in part)


@dataclass(frozen=True, slots=True)
class Verbs:
    """The verbs that the commands of the daemon declare: those with the name of a stream or tube, and those without."""

    named: frozenset[str]
    plain: frozenset[str]

    def __post_init__(self) -> None:
        both = self.named & self.plain
        assert not both, f"{sorted(both)} are declared with and without a name"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of `allow` or `deny`: `read orders*`, `relay`, or `*` for everything. `verb` may be `*`.

    `pattern` None: for everything that the verb can be used on. In a pattern `*` stands for any characters and `?` for
    one. Upper and lower case differ. `part`: the line allows no more than this part of the streams.
    """

    verb: str
    pattern: str | None = None
    part: Part | None = None

    def covers(self, verb: str, name: str | None) -> bool:
        """Whether the line is about this verb and name. `name` None: the verb takes none."""
        if self.verb not in (ANY, verb):
            return False
        if name is None or self.pattern is None:  # `relay` is about no name, and `*` about all
            return self.pattern is None and (name is None or self.verb == ANY)
        return _glob(self.pattern)(name) is not None  # the decision is kept, so that this is rarely asked

    def __str__(self) -> str:
        words = (self.verb, self.pattern, None if self.part is None else part_text(self.part))
        return " ".join(filter(None, words))


def _glob(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the daemon: how it proves who it is, and what it may do.

    `digests` are the SHA-256 of its secrets. Without `networks` it may connect from everywhere.
    """

    name: str
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    certificates: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    instances: tuple[str, ...] = ()
    connections: int | None = None
    catchups: int | None = None
    _decided: dict[tuple[str, str | None], bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def may(self, verb: str, name: str | None = None) -> bool:
        """Whether the client may do this. `name` is that of a stream or tube; None for a verb that takes none.

        `deny` goes before `allow`. Whoever may do anything else with a name may `list` it; to deny `list` denies all.
        Who may read a part of a stream (`parts`) may not `read` it.
        """
        if name is not None and len(name) > LONGEST_KEPT:
            return self._decide(verb, name)
        key = (verb, name)
        found = self._decided.get(key)
        if found is None:
            if len(self._decided) >= MAX_DECISIONS:
                self._decided.clear()
            found = self._decided[key] = self._decide(verb, name)
        return found

    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts of a stream that the client may read, if it may not read the whole stream."""
        if self.denied_by(READ, name) is not None:
            return ()
        found = (rule.part for rule in self.allow if rule.part is not None and rule.covers(READ, name))
        return tuple(dict.fromkeys(found))

    @property
    def lists_everything(self) -> bool:
        """Whether it may list each stream and tube that there is, was, or may come."""
        denied = {rule.verb for rule in self.deny}
        every = {rule.verb for rule in self.allow if rule.pattern == ANY or rule == Rule(ANY)}
        return denied.isdisjoint((LIST, ANY)) and bool(every - denied)

    def may_somewhere(self, verb: str) -> bool:
        """Whether a line of `allow` is about this verb."""
        return any(rule.verb in (ANY, verb) for rule in self.allow)

    def _decide(self, verb: str, name: str | None) -> bool:
        if self.denied_by(verb, name) is not None:
            return False
        if any(rule.part is None and rule.covers(verb, name) for rule in self.allow):
            return True
        if verb != LIST or name is None:
            return False
        others = {rule.verb for rule in self.allow if rule.covers(rule.verb, name)}
        return any(self.denied_by(other, name) is None for other in others)

    def denied_by(self, verb: str, name: str | None) -> Rule | None:
        """The line of `deny` that forbids it, if there is one.

        What may not be listed does not exist for the client, so nothing may be done with it either.
        """
        return next(
            (rule for rule in self.deny if rule.covers(verb, name) or (name is not None and rule.covers(LIST, name))),
            None,
        )

    def speaks_for(self, instance: str) -> bool:
        """Whether the client may acknowledge rows and report users as this instance.

        Without `instances` in the file: its own name, and names that begin with it and a `-`. A client with `allow =
        ["*"]`: every instance.
        """
        if self.instances:
            return any(_glob(pattern)(instance) is not None for pattern in self.instances)
        return Rule(ANY) in self.allow or instance == self.name or instance.startswith(f"{self.name}-")

    def is_from(self, address: str) -> bool:
        """Whether the client may connect from this IP address."""
        if not self.networks:
            return True
        found = parse_ip(address)
        return found is not None and any(found in network for network in self.networks)

    def has_secret(self, secret: str) -> bool:
        """Whether this is a secret of the client. Takes the same time for every secret of the same length."""
        given = sha256(secret.encode()).digest()
        return sum(hmac.compare_digest(given, digest) for digest in self.digests) > 0


ALL_RIGHTS = (Rule(ANY),)


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address; an IPv4 address inside an IPv6 one as IPv4. None for any other text."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


@dataclass(frozen=True, slots=True)
class AccessFile:
    """The clients of an access file, by name."""

    clients: Mapping[str, Client]

    def by_certificate(self, names: Collection[str]) -> Client | None:
        """The client whose certificate has any of these names (SAN). No two clients have the same."""
        return next((client for client in self.clients.values() if not client.certificates.isdisjoint(names)), None)


def parse_name(text: str) -> str:
    """Check the name of a client. Raises UsageError."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is not the name of a client: 1 to 64 letters, digits, - and _")
    return text


def read_access(path: Path, verbs: Verbs, where: str = "--access-file") -> AccessFile:
    """Read and check an access file. `where` begins the message of an error.

    Raises:
        UsageError: with the line or key, the mistake, and what to do. Up to MOST_FAULTS faults are in the message.
    """
    refuse_writable_by_others(path, where)
    return _checked(read_toml(path, f"{where}: "), verbs, f"{where}: {path}")


def parse_access(text: str, verbs: Verbs, where: str) -> AccessFile:
    """`read_access` for the text of a file."""
    return _checked(parse_toml(text.encode(), where), verbs, where)


def _checked(found: Mapping[str, Any], verbs: Verbs, where: str) -> AccessFile:
    reader = _Reader(verbs)
    clients: dict[str, Client] = {}
    with suppress(_TooManyFaults):
        clients = reader.read(found)
    if reader.faults:
        raise UsageError("\n".join(f"{where}: {fault}" for fault in reader.faults))
    return AccessFile(MappingProxyType(clients))


class _TooManyFaults(Exception):
    """The rest of the file is not looked at."""


class _Reader:
    """Checks the values of a file and collects the faults, so that the operator sees many of them at once."""

    def __init__(self, verbs: Verbs) -> None:
        self.faults: list[str] = []
        self._verbs = verbs
        self._key = ""  # of the value that is being read

    def read(self, found: Mapping[str, Any]) -> dict[str, Client]:
        self._unknown(found, ("client",), "")
        tables = found.get("client", {})
        if not isinstance(tables, dict) or not tables:
            self._fault("client", "there is no client; write a table such as [client.billing]")
            return {}
        clients = {name: self._client(name, table) for name, table in tables.items()}
        self._twice("token_sha256", ((client.name, each) for client in clients.values() for each in client.digests))
        self._twice("certificate", ((client.name, each) for client in clients.values() for each in client.certificates))
        return clients

    def _client(self, name: str, table: Any) -> Client:
        self._key = f"[client.{name}]"
        if not _NAME.fullmatch(name):
            self._fault(self._key, "a client's name has 1 to 64 letters, digits, - and _")
        if not isinstance(table, dict):
            self._fault(self._key, "this must be a table with keys such as allow")
            return Client(name)
        self._unknown(table, _KEYS, f"{self._key} ")
        client = Client(
            name=name,
            digests=self._digests(table),
            certificates=frozenset(self._texts(table, "certificate", _certificate)),
            networks=tuple(self._texts(table, "from", _network)),
            allow=tuple(self._texts(table, "allow", self._rule)),
            deny=tuple(self._texts(table, "deny", self._whole_rule)),
            instances=tuple(self._texts(table, "instances", _instance)),
            connections=self._number(table, "connections"),
            catchups=self._number(table, "catchups"),
        )
        if not client.digests and not client.certificates and not {"token_sha256", "certificate"} & table.keys():
            self._fault(
                self._key,
                f"the client cannot prove who it is; add token_sha256 (`replicad access token {name}` makes a "
                "secret) or certificate",
            )
        return client

    def _digests(self, table: Mapping[str, Any]) -> tuple[bytes, ...]:
        found = tuple(self._texts(table, "token_sha256", _digest))
        if len(found) > MAX_SECRETS:
            self._fault(
                f"{self._key} token_sha256",
                f"there are {len(found)} secrets; at most {MAX_SECRETS}: the present one and the next one",
            )
        return found

    def _texts(self, table: Mapping[str, Any], key: str, parse: Callable[[str], Any]) -> list[Any]:
        """A text or an array of texts, each parsed. `parse` raises ValueError with what to do."""
        value = table.get(key, [])
        texts = [value] if isinstance(value, str) else value
        where = f"{self._key} {key}"
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            self._fault(where, 'this must be a text or an array of texts, such as ["a", "b"]')
            return []
        if not texts and key in table:
            self._fault(where, "the array is empty; add a text, or remove the key")
        parsed = []
        for text in texts:
            try:
                parsed.append(parse(text))
            except ValueError as error:
                shown = "the value" if key == "token_sha256" else repr(text[:100])
                self._fault(where, f"{shown} is not valid; {error}")
        return parsed

    def _number(self, table: Mapping[str, Any], key: str) -> int | None:
        if key not in table:
            return None
        try:
            found: int = Key(key, WHOLE, minimum=1, maximum=1_000_000).take(table[key], f"{self._key} {key}")
        except UsageError as error:
            self._add(str(error))
            return None
        return found

    def _rule(self, text: str) -> Rule:
        verb, *pattern = text.split(" ")
        known = sorted(self._verbs.named | self._verbs.plain)
        if verb != ANY and verb not in known:
            raise ValueError(meant(verb, known, f"the verbs are {', '.join(known)} and *"))
        if verb in self._verbs.plain and pattern:
            raise ValueError(f"{verb} takes no name; write {verb!r}")
        if verb in self._verbs.named and not pattern:
            raise ValueError(f"name the streams or tubes: '{verb} orders*', or '{verb} *' for all")
        if len(pattern) > 1 + (verb == READ) or "" in pattern:
            raise ValueError(
                "write one verb, one blank and one pattern, such as 'read orders*'; behind the pattern of `read` there "
                "may be a part of the streams, such as 'read orders customer_id=42'"
            )
        return Rule(verb, pattern[0] if pattern else None, parse_part(pattern[1]) if len(pattern) > 1 else None)

    def _whole_rule(self, text: str) -> Rule:
        rule = self._rule(text)
        if rule.part is not None:
            raise ValueError("`deny` is about whole streams; let `allow` name the parts that the client may read")
        return rule

    def _unknown(self, table: Mapping[str, Any], known: Collection[str], where: str) -> None:
        for key in table:
            if key not in known:
                self._add(not_known(f"{where}{key}"[:200], key, known))

    def _twice(self, key: str, found: Iterable[tuple[str, Any]]) -> None:
        """A fault for each value that two clients have, or one client has twice."""
        owners: dict[Any, str] = {}
        for name, value in found:
            if value in owners:
                self._fault(f"[client.{name}] {key}", f"[client.{owners[value]}] has the same; give each its own")
            owners[value] = name

    def _fault(self, where: str, what: str) -> None:
        """Note a fault. Raises _TooManyFaults."""
        self._add(f"{where[:200]}: {what}")

    def _add(self, sentence: str) -> None:
        self.faults.append(sentence)
        if len(self.faults) >= MOST_FAULTS:
            self.faults.append("the rest of the file was not looked at")
            raise _TooManyFaults


def _digest(text: str) -> bytes:
    if not _DIGEST.fullmatch(text.lower()):
        raise ValueError("give the 64 hexadecimal digits that `replicad access token` prints, not the secret itself")
    return bytes.fromhex(text)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{error}; give an address or a network such as 10.1.0.0/16") from None


def _certificate(text: str) -> str:
    if not re.fullmatch(r"[!-~]{1,1024}", text):
        raise ValueError("give the URI or the DNS name of the certificate (subjectAltName)")
    return text if ":" in text else text.lower()


def _instance(text: str) -> str:
    if not re.fullmatch(r"\S{1,1024}", text):
        raise ValueError("give the name of an instance, or a pattern such as billing-*")
    return text
