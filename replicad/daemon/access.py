"""Which client each connection belongs to, and what it may do now.

`replicad.config.access` reads the access file and decides. This file knows the connections: it checks secrets and the
names of certificates, counts the connections of each client, and gives new rights to them when the file is read again.
Without an access file there is one client with all rights.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Protocol

import structlog
import trio

from replicad.config.access import (
    ALL_RIGHTS,
    LIST,
    READ,
    AccessFile,
    Client,
    Part,
    Rule,
    Verbs,
    parse_ip,
    part_text,
    read_access,
)
from replicad.config.browser_tokens import BrowserKeys, Claims, verify
from replicad.daemon.service import Feature, HangUp
from replicad.daemon.troubles import Troubles
from replicad.errors import Forbidden, NotAuthorised, ReplicadError
from replicad.protocol.command import Command
from replicad.protocol.connection import CloseReason

# Delays clients that guess secrets. It counts wrong guesses by address and by the name of the client in the guess.
#
# Existing and missing names are delayed alike, so the pauses do not reveal them. For each address there are SLOTS for
# names, so that one address can fill neither the table nor have a pause forgotten by guessing under other names. A
# wrong secret doubles the pause before the next try of the same address for the same client. The tries of several
# connections wait for each other, and a right secret waits too: so a guesser learns nothing from a quick answer. A
# right secret ends the pauses of its client at that address, and of no other.


SLOTS = 256  # for names of one address; two names in one slot are delayed together


@dataclass(frozen=True, slots=True)
class GuessPace:
    """The pauses in seconds, and the bound of the table."""

    first: float = 0.25  # after the first wrong secret; doubles up to `longest`
    longest: float = 8.0
    patience: float = 8.0  # a try that would have to wait for longer is refused at once
    addresses: int = 10_000  # in the table, about 200 bytes each; one more removes the one whose last guess is oldest


@dataclass(slots=True)
class _Known:
    wrong: int
    next_try: float


class Guesses:
    """The table of wrong guesses. `now` is a monotonic clock."""

    def __init__(self, pace: GuessPace = GuessPace(), now: Callable[[], float] = trio.current_time) -> None:
        self._pace = pace
        self._now = now
        self._key = secrets.token_bytes(16)  # no client can choose a name that shares the slot of another
        self._known: OrderedDict[tuple[str, int], _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def reserve(self, address: str, client: str) -> float | None:
        """Reserve the next try: how many seconds it has to wait. None: too many tries wait already; refuse it.

        The try counts as wrong until `succeeded` is called.
        """
        key = (_place(address), self._slot(client))
        known = self._known.pop(key, None) or _Known(0, 0.0)
        self._known[key] = known
        if len(self._known) > self._pace.addresses:
            self._known.popitem(last=False)
        now = self._now()
        start = max(now, known.next_try)
        if start - now > self._pace.patience:
            return None
        known.next_try = start + min(self._pace.first * 2.0 ** min(known.wrong, 30), self._pace.longest)
        known.wrong += 1
        return start - now

    def succeeded(self, address: str, client: str) -> None:
        """Forget the wrong guesses: who knows the secret has nothing more to guess."""
        self._known.pop((_place(address), self._slot(client)), None)

    def _slot(self, client: str) -> int:
        found = blake2b(client.encode("utf-8", "surrogateescape"), digest_size=8, key=self._key).digest()
        return int.from_bytes(found) % SLOTS


def _place(address: str) -> str:
    """The address, or the network of 64 bits of an IPv6 address: one machine may have all addresses in it."""
    found = parse_ip(address)
    if found is None:
        return address
    return str(found) if found.version == 4 else found.exploded[:19]


PLACE = ("service", "access", "file")  # under which a broken access file is reported
SHOWN = 80  # characters of a name in a message
SHOWN_PARTS = 5  # of a stream, in a message
MAX_NOTED = 100  # refusals of one connection that are logged, each (verb, object) once
NO_VERBS = Verbs(frozenset(), frozenset())
WRONG = "the token is wrong; ask the operator of this server for it"  # whatever the reason is
BROWSER = "browser:"  # begins the names of browsers; no client of the access file has a colon in its name
BROWSERS = 20  # connections of one `sub` at a time; a browser opens six to one host
NO_BROWSERS = "this server takes no browser tokens; the operator can name a file of keys with --browser-key"
EXPIRED = "access_expired: the browser token has expired; connect again with a new one"
WITHDRAWN = "not_authorised: the operator has withdrawn the access of this client"
log = structlog.get_logger()


def verbs_of(kinds: Iterable[type[Command]], features: Collection[Feature] = ()) -> Verbs:
    """The verbs that the commands declare, and others that features ask for."""
    declared = [kind for kind in kinds if kind.VERB is not None]
    named = frozenset(kind.VERB or "" for kind in declared if kind.OBJECT is not None)
    plain = frozenset(kind.VERB or "" for kind in declared) - named
    return Verbs(
        named.union(*(feature.named_verbs for feature in features)), plain.union(*(each.verbs for each in features))
    )


def names_of(stream: trio.abc.Stream) -> frozenset[str]:
    """The URIs and DNS names in the certificate (subjectAltName) that the client of a TLS connection has proved."""
    if not isinstance(stream, trio.SSLStream):
        return frozenset()
    found = stream.getpeercert() or {}
    return frozenset(
        name.lower() if kind == "DNS" else name
        for kind, name in found.get("subjectAltName", ())
        if kind in ("URI", "DNS")
    )


def access_by_token(token: str | None, peer: str) -> ClientAccess:
    """The access of a connection where there is no access file. Without a token every client has all rights."""
    return (AccessControl(token=token) if token is not None else OPEN).enter(peer)


class AccessControl:
    """The clients of a daemon and their connections."""

    def __init__(
        self,
        *,
        token: str | None = None,
        file: Path | None = None,
        certified: bool = False,
        verbs: Verbs = NO_VERBS,
        troubles: Troubles | None = None,
        guesses: Guesses | None = None,
        browsers: Callable[[], BrowserKeys] | None = None,
    ) -> None:
        """`token`: the secret of a client with all rights. `file`: the access file. Without both every client has all
        rights. `certified`: TLS has an authority for certificates of clients. `browsers` reads the keys of tokens of
        browsers.

        Raises:
            UsageError: the file cannot be used.
        """
        self._token = token
        self._file = file
        self._certified = certified
        self._verbs = verbs
        self._troubles = troubles or Troubles()
        self.guesses = guesses or Guesses()
        self.known = AccessFile({}) if file is None else read_access(file, verbs)
        self._read_browsers = browsers
        self._browsers = None if browsers is None else browsers()
        self._all = Client("", allow=ALL_RIGHTS)
        self._connected: dict[str, set[ClientAccess]] = {}
        self._catchups: dict[str, trio.CapacityLimiter] = {}
        self._everybody: ClientAccess | None = None  # which all connections share
        if self.open_to_all:
            self._everybody = ClientAccess(self, "", frozenset())
            self._everybody.client = self._all

    @property
    def open_to_all(self) -> bool:
        """Whether every client has all rights. It may need a certificate to connect."""
        return self._token is None and self._file is None

    @property
    def public(self) -> bool:
        """Whether everybody may read: no client has to prove who it is, neither by a secret nor by a certificate."""
        return self.open_to_all and not self._certified

    @property
    def limits_rights(self) -> bool:
        """Whether there is an access file, so that a client may have less than all rights."""
        return self._file is not None

    def enter(self, peer: str, certificate: Collection[str] = ()) -> ClientAccess:
        """A connection from `peer` (`address:port`). `certificate`: the names in the checked certificate of its TLS."""
        return self._everybody or ClientAccess(self, peer, frozenset(certificate))

    def read_file(self) -> AccessFile | None:
        """Read the access file again, for `replace`. None: there is none. Raises UsageError."""
        return None if self._file is None else read_access(self._file, self._verbs)

    def read_browsers(self) -> BrowserKeys | None:
        """Read the keys of browser tokens again, for `replace`. None: browsers send none. Raises UsageError."""
        return None if self._read_browsers is None else self._read_browsers()

    def keep(self, error: Exception) -> None:
        """Report that a file could not be read again, so that everything stays as it is."""
        known = isinstance(error, ReplicadError)
        why = str(error) if known else f"unexpected {type(error).__name__}: {error}"
        code = error.code if isinstance(error, ReplicadError) else type(error).__name__
        fields = {"error": why, "remedy": "mend the file and send SIGHUP again"}
        log.error("access_unchanged", **fields, **({} if known else {"exc_info": error}))
        self._troubles.begin(*PLACE, f"reading it again failed, so nothing was changed: {why}", code=code)

    def changes(self, found: AccessFile | None) -> dict[str, str]:
        """The clients that are others in a file that was read again: `added`, `changed` or `removed`. For a thread."""
        before = self.known.clients
        now = before if found is None else found.clients
        return {
            name: "removed" if name not in now else "changed" if name in before else "added"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        }

    def connections_of(self, name: str) -> int:
        """How many connections a client has."""
        return len(self._connected.get(name, ()))

    def replace(self, found: AccessFile | None, browsers: BrowserKeys | None = None) -> None:
        """Use the newly read rights, keys and certificates from now on, also for the open connections."""
        self._troubles.end(*PLACE)
        self._browsers = browsers
        self.known = found or self.known
        now = self.known.clients
        for name, connections in list(self._connected.items()):
            for connection in list(connections):
                connection.renew(self._of_browser(connection) if name.startswith(BROWSER) else now.get(name))

    def _of_browser(self, connection: ClientAccess) -> Client | None:
        """The client of a browser's connection; None if the key of its token was removed."""
        kept = frozenset[bytes]() if self._browsers is None else self._browsers.digests
        client = connection.client
        return client if client is not None and kept.issuperset(client.digests) else None

    def guessed_name(self, word: str) -> str:
        """Under which name a word that may be wrong is counted, whether there is such a client or not.

        A word that is not NAME.SECRET can only be the daemon's one token; guesses of that count together.
        """
        name, dot, _ = word.partition(".")
        return name if dot and self._file is not None else ""

    def find(self, word: str, address: str) -> Client | None:
        """The client whose secret this is. `word` is `NAME.SECRET`, or the daemon's one token."""
        name, _, secret = word.partition(".")
        client = self.known.clients.get(name)
        nobody = Client("", (b"\0" * 32,))
        right = (client or nobody).has_secret(secret)  # takes the same time for an unknown name
        if right and client is not None and client.is_from(address):
            return client
        if self._token is not None and hmac.compare_digest(word.encode(), self._token.encode()):
            return self._all
        return None

    def claims_of(self, token: str, now: float) -> Claims:
        """What the token of a browser says. Raises NotAuthorised."""
        if self._browsers is None or self.open_to_all:
            raise NotAuthorised(NO_BROWSERS)
        return verify(token, self._browsers, now)

    def find_by_certificate(self, names: Collection[str], address: str) -> Client | None:
        """The client with one of these names in the access file."""
        client = self.known.by_certificate(names)
        return client if client is not None and client.is_from(address) else None

    def count(self, connection: ClientAccess, client: Client) -> None:
        """Count a connection of a client. Raises HangUp if it has its number of connections already."""
        if not client.name:
            return
        others = self._connected.setdefault(client.name, set())
        if client.connections is not None and len(others) >= client.connections:
            raise HangUp(
                CloseReason.TOO_MANY_CONNECTIONS,
                f"too_many_connections: client {client.name} has {client.connections} connections already; "
                "close one, or ask the operator for more",
            )
        others.add(connection)

    def catching_up(self, client: Client) -> AbstractAsyncContextManager[object]:
        """Bounds how many catch-ups of a client run at a time, over all of its connections."""
        if client.catchups is None:
            return nullcontext()
        limiter = self._catchups.setdefault(client.name, trio.CapacityLimiter(client.catchups))
        limiter.total_tokens = client.catchups
        return limiter

    def leave(self, connection: ClientAccess, client: Client) -> None:
        """The connection has ended."""
        others = self._connected.get(client.name)
        if others is not None:
            others.discard(connection)
            if not others:
                del self._connected[client.name]


class Revocable(Protocol):
    """A session, or one request over HTTP."""

    @property
    def log(self) -> Any:
        """A logger bound to the client's fields."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon."""


class ClientAccess:
    """The client at the other end of one connection, and what it may do.

    From the moment when the client is known, its access can be withdrawn, whether or not there is a session yet: what
    begins afterwards is refused.
    """

    __slots__ = (
        "_address", "_certificate", "_control", "_digest", "_how", "_noted", "_on_change", "_session", "_withdrawn",
        "client",
    )  # fmt: skip

    def __init__(self, control: AccessControl, peer: str, certificate: frozenset[str]) -> None:
        self.client: Client | None = None  # None: not known yet
        self._control = control
        self._address = peer.rpartition(":")[0].strip("[]")
        self._certificate = certificate
        self._digest: bytes | None = None  # of the secret by which the client is known; None: by its certificate
        self._how = ""  # token or certificate
        self._session: Revocable | None = None
        self._on_change: list[Callable[[], None]] | None = None
        self._noted: set[tuple[str, str | None]] | None = None
        self._withdrawn = False

    # --- for the session ---

    @property
    def wants_auth(self) -> bool:
        """Whether the client must send AUTH before anything else."""
        return self.client is None and self._by_certificate() is None

    def begin(self, session: Revocable) -> None:
        """From now on `session` is closed when the access is withdrawn. Call it again for a session that replaces it.

        Raises:
            HangUp: the access was withdrawn already, or a client known by its certificate has too many connections.
        """
        if self._control.open_to_all:
            return
        if self._withdrawn:
            raise HangUp(CloseReason.NOT_AUTHORISED, WITHDRAWN)
        self._session, self._on_change = session, None
        client = self._by_certificate()
        if self.client is None and client is not None:
            self._enter(client, "certificate")

    async def authenticate(self, word: str) -> None:
        """Check the word of an AUTH, after the pause that earlier wrong words have earned.

        Raises:
            NotAuthorised: it is wrong; the text is the same for every reason.
            HangUp: the client has too many connections, or too many tries of this address wait.
        """
        if self._control.open_to_all:
            return
        guessed = self._control.guessed_name(word)
        pause = self._control.guesses.reserve(self._address, guessed)
        if pause is None:  # the word was not looked at
            raise HangUp(
                CloseReason.TOO_MANY_REQUESTS, "too_many_guesses: wrong tokens came from this address; try again later"
            )
        if pause:
            await trio.sleep(pause)
        client = self._control.find(word, self._address)
        if client is None or (self.client is not None and self.client.name != client.name):
            raise NotAuthorised(WRONG)
        self._control.guesses.succeeded(self._address, guessed)
        if self.client is None:
            self._digest = sha256(word.partition(".")[2].encode()).digest()
            self._enter(client, "token")

    def accept_browser(self, token: str, now: float) -> float:
        """Take the token of a browser (docs/access.md), in place of a secret. `now`, and when it expires: seconds
        since 1970.

        Raises:
            NotAuthorised: it is not valid.
            HangUp: its `sub` has too many connections.
        """
        claims = self._control.claims_of(token, now)
        self._digest = claims.key
        rules = tuple(Rule(READ, pattern, claims.part) for pattern in claims.streams)
        self._enter(Client(BROWSER + claims.subject, (claims.key,), allow=rules, connections=BROWSERS), "browser token")
        return claims.expires

    def expire(self) -> None:
        """The token of the browser has expired: its session ends, and nothing begins any more."""
        self._withdraw(CloseReason.ACCESS_EXPIRED, EXPIRED)

    def note_use(self) -> None:
        """Log who the client is. Called when it first asks for something: a health check asks for nothing, and comes
        every few seconds.
        """
        if self.name and self._session is not None:
            self._session.log.info("client_known", by=self._how)

    def end(self) -> None:
        """The session has ended."""
        self._session = self._on_change = None
        if self.client is not None:
            self._control.leave(self, self.client)

    def _enter(self, client: Client, how: str) -> None:
        self._control.count(self, client)
        self.client = client
        self._how = how

    def _by_certificate(self) -> Client | None:
        return self._control.find_by_certificate(self._certificate, self._address) if self._certificate else None

    # --- for dispatch and services ---

    @property
    def name(self) -> str:
        """The client's name in the access file; empty if it is in none."""
        return "" if self.client is None else self.client.name

    @property
    def limited(self) -> bool:
        """Whether the client has less than all rights: the rights of an access file, or of a browser's token."""
        if self.client is not None and self.client.name.startswith(BROWSER):
            return True
        return self._control.limits_rights and (self.client is None or bool(self.client.name))

    def may(self, verb: str, name: str | None = None) -> bool:
        """Whether the client may do this to the stream or tube (None: the verb takes no name)."""
        return self.client is not None and self.client.may(verb, name)

    def may_somewhere(self, verb: str) -> bool:
        """Whether there may be a stream or tube to which the client may do this."""
        return self.client is not None and self.client.may_somewhere(verb)

    def lists(self, name: str) -> bool:
        """Whether the client may know that there is a stream or tube of that name."""
        return self.may(LIST, name)

    @property
    def lists_everything(self) -> bool:
        """Whether the client may list each stream and tube that there is, was, or may come."""
        return not self.limited or (self.client is not None and self.client.lists_everything)

    def check(self, command: Command) -> bool:
        """Whether the command may be answered. False: the client may not know the stream or tube that it names.

        Raises:
            Forbidden: the client may know the name and may not do that.
        """
        kind = type(command)
        if kind.VERB is None or not self.limited:
            return True
        if kind.SPEAKER is not None:
            self._check_speaker(kind.VERB, getattr(command, kind.SPEAKER))
        if kind.OBJECT is None:
            if kind.VERB != LIST and not self.may(kind.VERB):
                raise self._forbidden(kind.VERB, None, None)
            return True
        name = getattr(command, kind.OBJECT)
        if name is not None and kind.VERB == READ and self._parts(name):
            return True  # the service asks `part_of`
        return name is None or self.require(kind.VERB, kind.OBJECT, name)

    def part_of(self, stream: str, asked: Part | None) -> Part | None:
        """The part of a stream that a client gets which asks for `asked` (None: for the stream); None: the whole.

        A client that may read one part only gets that one without asking for it.

        Raises:
            Forbidden: the client may not read that.
        """
        if not self.limited or self.may(READ, stream):
            return asked
        parts = self._parts(stream)
        if asked in parts:
            return asked
        if not parts:
            raise self._forbidden(READ, "stream", stream)
        if asked is None and len(parts) == 1:
            return parts[0]
        self._note(READ, stream)
        known = ", ".join(map(part_text, parts[:SHOWN_PARTS])) + (", ..." if len(parts) > SHOWN_PARTS else "")
        only = f"client {self.name} may read no more of stream {stream[:SHOWN]} than the part where {known}"
        if asked is None:
            raise Forbidden(f"{only}; name one of them: REPLICATE {stream[:SHOWN]} NOW where={part_text(parts[0])}")
        raise Forbidden(f"{only}, and not where={part_text(asked)[:SHOWN]}; ask for your part, or name none")

    def may_read_part(self, stream: str, part: Part) -> bool:
        """Whether the client may read this part of the stream."""
        return self.may(READ, stream) or part in self._parts(stream)

    def may_read_some(self, stream: str) -> bool:
        """Whether the client may read the stream or a part of it."""
        return self.may(READ, stream) or bool(self._parts(stream))

    def _parts(self, stream: str) -> tuple[Part, ...]:
        return () if self.client is None or self.client.may(READ, stream) else self.client.parts(stream)

    def require_plain(self, verb: str) -> None:
        """Raise Forbidden if the client may not use a verb that takes no name."""
        if self.limited and not self.may(verb):
            raise self._forbidden(verb, None, None)

    def require(self, verb: str, what: str, name: str) -> bool:
        """`check` for one name. `what` is `stream` or `tube`."""
        if self.may(verb, name):
            return True
        refused = self._forbidden(verb, what, name)
        if self.lists(name):
            raise refused
        return False

    def catching_up(self) -> AbstractAsyncContextManager[object]:
        """Bounds how many catch-ups of the client run at a time."""
        return nullcontext() if self.client is None else self._control.catching_up(self.client)

    def on_change(self, call: Callable[[], None]) -> None:
        """Call `call` when the client's rights have changed."""
        if self.limited:
            self._on_change = [*(self._on_change or ()), call]

    def _check_speaker(self, verb: str, instance: str) -> None:
        if self.client is None or not self.client.speaks_for(instance):
            self._note(verb, instance)
            raise Forbidden(
                f"client {self.name} may not speak for instance {instance[:SHOWN]}; the operator can add it to "
                f"`instances` of [client.{self.name}]"
            )

    def _forbidden(self, verb: str, what: str | None, name: str | None) -> Forbidden:
        self._note(verb, name)
        wanted = verb if name is None else f"{verb} {name[:SHOWN]}"
        of = verb if name is None else f"{verb} {what} {name[:SHOWN]}"
        denied = None if self.client is None else self.client.denied_by(verb, name)
        remedy = f'add "{wanted}" to' if denied is None else f'take "{denied}" out of `deny` of'
        return Forbidden(f"client {self.name} may not {of}; the operator can {remedy} [client.{self.name}]")

    def _note(self, verb: str, name: str | None) -> None:
        """Log a refusal, each only once for a connection."""
        noted = self._noted = self._noted or set()
        if self._session is not None and (verb, name) not in noted and len(noted) < MAX_NOTED:
            noted.add((verb, name))
            self._session.log.warning("access_refused", verb=verb, object=name)

    # --- for the control ---

    def renew(self, client: Client | None) -> None:
        """Take over the client's entry of a file that was read again. None: it is no longer in it."""
        if self._withdrawn:
            return
        if client is None or not client.is_from(self._address) or not self._proves(client):
            self._withdraw(CloseReason.NOT_AUTHORISED, WITHDRAWN)
            return
        before, self.client = self.client, client
        if before != client:
            for call in list(self._on_change or ()):
                call()

    def _withdraw(self, reason: CloseReason, text: str) -> None:
        self._withdrawn = True
        self.client = self.client and replace(self.client, allow=())
        if self._session is not None:
            self._session.hang_up(reason, text)

    def _proves(self, client: Client) -> bool:
        if self._digest is None:
            return not client.certificates.isdisjoint(self._certificate)
        return self._digest in client.digests


OPEN = AccessControl()
"""Every client has all rights."""
