"""Every command of the protocol: one frozen dataclass each, which parses and renders its own line.

This file knows how a line is written and which side may send it. Whether it is allowed *now* is
the business of `states`, and what it means is the business of the server and the clients.

The first thirteen are those of Synapse's TCP replication (seed 001); a Synapse 1.79 client sees nothing else.
The others are ours: AUTH, DOORBELL and the conversation about tubes. `protocol.md` describes them all.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.protocol.tokens import MAX_WRITERS_IN_TOKEN, Cursor

MAX_WORD = 1024  # characters in a name of anything; far above any real one, far below a line
MAX_INTEGER = (1 << 63) - 1  # ids are Postgres' bigint


class Side(enum.Flag):
    """Who may send a command."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
    BOTH = SERVER | CLIENT


def _bad(command: str, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{command}: {what}")


def _integer(command: str, what: str, text: str) -> int:
    """A bigint in decimal. Stricter than int(): no underscores, blanks or other scripts' digits."""
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not -MAX_INTEGER - 1 <= int(text) <= MAX_INTEGER:
        raise _bad(command, f"{what} must be a whole number of 64 bits, got {text[:40]!r}")
    return int(text)


def _seconds(command: str, what: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        raise _bad(command, f"{what} must be seconds such as 30 or 0.5, got {text[:40]!r}")
    return float(text)


def _words(command: str, rest: str, usage: str, least: int, most: int) -> list[str]:
    """Split into between `least` and `most` words; no word may be empty or absurdly long."""
    words = rest.split(" ") if rest else []
    if not least <= len(words) <= most or any(not word or len(word) > MAX_WORD for word in words):
        raise _bad(command, f"the form is `{command} {usage}`".rstrip())
    return words


def _tail(command: str, rest: str, usage: str, words: int) -> list[str]:
    """`words` words and then free text, which may hold blanks and must not be empty."""
    parts = rest.split(" ", words)
    if len(parts) != words + 1 or any(not part for part in parts) or any(len(p) > MAX_WORD for p in parts[:words]):
        raise _bad(command, f"the form is `{command} {usage}`")
    return parts


def _options(command: str, words: list[str], known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """`key=value` words; unknown and repeated keys are refused with the list of those that exist."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known or key in found:
            raise _bad(command, f"unknown or repeated option {word[:80]!r}; there are {', '.join(f'{k}=' for k in known)}")
        found[key] = known[key](value)
    return found


def _json(command: str, text: str, size: int) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(command, f"not valid JSON: {error}") from None
    if not isinstance(value, list) or len(value) != size:
        raise _bad(command, f"expected a JSON array of {size} values")
    return value


def _number(value: float) -> str:
    return f"{value:f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Command:
    """What all commands have: a NAME, the side that may send it, `parse` and `render`."""

    NAME: ClassVar[str]
    SENDER: ClassVar[Side]
    USAGE: ClassVar[str] = ""

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Build the command from what follows its name on the line.

        Raises:
            RemoteProtocolError: the arguments are not of this command's form.
        """
        _words(cls.NAME, rest, cls.USAGE, 0, 0)
        return cls()

    def arguments(self) -> str:
        """What follows the name on the line, empty where nothing does."""
        return ""

    def render(self) -> str:
        """The line without its end.

        Raises:
            LocalProtocolError: an argument would break the line.
        """
        arguments = self.arguments()
        line = f"{self.NAME} {arguments}" if arguments else self.NAME
        if "\n" in line or "\r" in line or "\0" in line:
            raise LocalProtocolError(f"{self.NAME} would contain a line end or a NUL: {line[:80]!r}")
        return line


# --- the commands of seed 001 ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server(Command):
    """SERVER: who is talking; the first line of every connection."""

    NAME = "SERVER"
    SENDER = Side.SERVER
    USAGE = "server_name"
    server_name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.server_name


@dataclass(frozen=True, slots=True)
class Rdata(Command):
    """RDATA: one row of a stream. `token` is None for `batch`: more rows with the same token follow."""

    NAME = "RDATA"
    SENDER = Side.SERVER
    USAGE = "stream_name instance_name token row_json"
    stream: str
    instance: str
    token: int | None
    row: str  # JSON text, kept as it came

    @classmethod
    def parse(cls, rest: str) -> Self:
        stream, instance, token, row = _tail(cls.NAME, rest, cls.USAGE, 3)
        return cls(stream, instance, None if token == "batch" else _integer(cls.NAME, "token", token), row)

    def arguments(self) -> str:
        return f"{self.stream} {self.instance} {'batch' if self.token is None else self.token} {self.row}"


@dataclass(frozen=True, slots=True)
class Position(Command):
    """POSITION: a writer's position; `prev` is the last one told, `new` where it stands now."""

    NAME = "POSITION"
    SENDER = Side.SERVER
    USAGE = "stream_name instance_name prev_token new_token"
    stream: str
    instance: str
    prev: int
    new: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        stream, instance, prev, new = _words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(stream, instance, _integer(cls.NAME, "prev_token", prev), _integer(cls.NAME, "new_token", new))

    def arguments(self) -> str:
        return f"{self.stream} {self.instance} {self.prev} {self.new}"


@dataclass(frozen=True, slots=True)
class Error(Command):
    """ERROR: `code: text` from replicad, free text from others. The text may be anything, even nothing."""

    NAME = "ERROR"
    SENDER = Side.BOTH
    USAGE = "text"
    text: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(rest)

    def arguments(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ping(Command):
    """PING: still here. The text is, by habit, the sender's time in milliseconds."""

    NAME = "PING"
    SENDER = Side.BOTH
    USAGE = "text"
    text: str = ""

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(rest)

    def arguments(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Name(Command):
    """NAME: what the client wants to be called in logs and lists."""

    NAME = "NAME"
    SENDER = Side.CLIENT
    USAGE = "text"
    text: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        if not rest or len(rest) > MAX_WORD:
            raise _bad(cls.NAME, f"a name has 1 to {MAX_WORD} characters")
        return cls(rest)

    def arguments(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Replicate(Command):
    """REPLICATE: subscribe. Alone, to every stream from now on (seed 001); with arguments, to one (ours).

    `token` is None where none was given, `NOW`, `EARLIEST`, or a position as `tokens.Vector` renders it.
    """

    NAME = "REPLICATE"
    SENDER = Side.CLIENT
    USAGE = "[stream_name [token|NOW|EARLIEST] [linear]]"
    stream: str | None = None
    token: str | None = None
    linear: bool = False

    @classmethod
    def parse(cls, rest: str) -> Self:
        if not rest.strip(" "):  # Synapse sends `REPLICATE ` with a blank
            return cls()
        words = _words(cls.NAME, rest, cls.USAGE, 1, 3)
        linear = len(words) > 1 and words[-1] == "linear"
        if linear:
            words.pop()
        if len(words) > 2:
            raise _bad(cls.NAME, f"the form is `{cls.NAME} {cls.USAGE}`")
        return cls(words[0], words[1] if len(words) == 2 else None, linear)

    def arguments(self) -> str:
        parts = [self.stream, self.token, "linear" if self.linear else None]
        return " ".join(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class UserSync(Command):
    """USER_SYNC: a user started or stopped syncing on a device of an instance. `device_id` None is `None` on the wire.

    Versions before device ids send four arguments; they parse to a device of None.
    """

    NAME = "USER_SYNC"
    SENDER = Side.CLIENT
    USAGE = "instance_id user_id device_id start|end last_sync_ms"
    instance_id: str
    user_id: str
    device_id: str | None
    syncing: bool
    last_sync_ms: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        words = _words(cls.NAME, rest, cls.USAGE, 4, 5)
        if len(words) == 4:
            words.insert(2, "None")
        instance, user, device, state, last_sync = words
        if state not in ("start", "end"):
            raise _bad(cls.NAME, f"state must be start or end, got {state[:40]!r}")
        return cls(
            instance,
            user,
            None if device == "None" else device,
            state == "start",
            _integer(cls.NAME, "last_sync_ms", last_sync),
        )

    def arguments(self) -> str:
        state = "start" if self.syncing else "end"
        return f"{self.instance_id} {self.user_id} {self.device_id} {state} {self.last_sync_ms}"


@dataclass(frozen=True, slots=True)
class ClearUserSync(Command):
    """CLEAR_USER_SYNC: forget all that an instance said with USER_SYNC; it is shutting down."""

    NAME = "CLEAR_USER_SYNC"
    SENDER = Side.CLIENT
    USAGE = "instance_id"
    instance_id: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.instance_id


@dataclass(frozen=True, slots=True)
class FederationAck(Command):
    """FEDERATION_ACK: federation data up to `token` was delivered by `instance`."""

    NAME = "FEDERATION_ACK"
    SENDER = Side.CLIENT
    USAGE = "instance_name token"
    instance: str
    token: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        instance, token = _words(cls.NAME, rest, cls.USAGE, 2, 2)
        return cls(instance, _integer(cls.NAME, "token", token))

    def arguments(self) -> str:
        return f"{self.instance} {self.token}"


@dataclass(frozen=True, slots=True)
class RemoteServerUp(Command):
    """REMOTE_SERVER_UP: a remote server may be back; passed on to every other connection."""

    NAME = "REMOTE_SERVER_UP"
    SENDER = Side.BOTH
    USAGE = "server_name"
    server_name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.server_name


@dataclass(frozen=True, slots=True)
class UserIp(Command):
    """USER_IP: a user was seen; `data` is the JSON array [access_token, ip, user_agent, device_id, last_seen]."""

    NAME = "USER_IP"
    SENDER = Side.CLIENT
    USAGE = "user_id [access_token, ip, user_agent, device_id, last_seen]"
    user_id: str
    data: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        user, data = _tail(cls.NAME, rest, cls.USAGE, 1)
        _json(cls.NAME, data, 5)
        return cls(user, data)

    def arguments(self) -> str:
        return f"{self.user_id} {self.data}"


@dataclass(frozen=True, slots=True)
class LockReleased(Command):
    """LOCK_RELEASED: `data` is the JSON array [instance_name, lock_name, lock_key]; passed on to the others."""

    NAME = "LOCK_RELEASED"
    SENDER = Side.BOTH
    USAGE = "[instance_name, lock_name, lock_key]"
    data: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        _json(cls.NAME, rest, 3)
        return cls(rest)

    def arguments(self) -> str:
        return self.data


# --- ours: access and latency ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Auth(Command):
    """AUTH: the shared secret of a daemon that asks for one; the client's first line."""

    NAME = "AUTH"
    SENDER = Side.CLIENT
    USAGE = "token"
    token: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.token

    def __repr__(self) -> str:  # a secret must never reach a log
        return "Auth(token=...)"


@dataclass(frozen=True, slots=True)
class Writers(Command):
    """WRITERS: a stream's epoch and the small numbers of its writers, which vector tokens are made of.

    Sent before the POSITIONs that answer `REPLICATE stream ...`, and again when a writer joins; never to a
    client that subscribed with REPLICATE alone.
    """

    NAME = "WRITERS"
    SENDER = Side.SERVER
    USAGE = "stream_name epoch instance_name=number ..."
    stream: str
    epoch: str
    numbers: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, rest: str) -> Self:
        stream, epoch, *pairs = _words(cls.NAME, rest, cls.USAGE, 2, 2 + MAX_WRITERS_IN_TOKEN)
        split = [pair.rpartition("=") for pair in pairs]
        return cls(stream, epoch, tuple((name, _integer(cls.NAME, "number", number)) for name, _, number in split))

    def arguments(self) -> str:
        return " ".join([self.stream, self.epoch, *(f"{name}={number}" for name, number in self.numbers)])


@dataclass(frozen=True, slots=True)
class Doorbell(Command):
    """DOORBELL: a writer has just committed; look now instead of at the next poll. A hint, nothing more."""

    NAME = "DOORBELL"
    SENDER = Side.CLIENT


# --- ours: tubes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of a tube: the shards s with `s % partitions == partition`. `0/2` on the wire."""

    partition: int
    partitions: int

    @classmethod
    def parse(cls, command: str, text: str) -> Self:
        """Read `partition/partitions`, the first counted from 0.

        Raises:
            RemoteProtocolError: not of that form, or outside of 0 <= partition < partitions <= 32768.
        """
        if not re.fullmatch(r"[0-9]{1,5}/[0-9]{1,5}", text):
            raise _bad(command, f"a partition is written like 0/2 (the first of two), got {text[:40]!r}")
        partition, partitions = map(int, text.split("/"))
        if not 0 <= partition < partitions <= 32768:
            raise _bad(command, f"partition {text} is out of range: 0 <= partition < partitions <= 32768")
        return cls(partition, partitions)

    def covers(self, other: Part) -> bool:
        """Whether every shard of `other` is one of ours."""
        return other.partitions % self.partitions == 0 and other.partition % self.partitions == self.partition

    def __str__(self) -> str:
        return f"{self.partition}/{self.partitions}"


@dataclass(frozen=True, slots=True)
class Tube(Command):
    """TUBE: from a client, asks for a tube (`TUBE name`); from the server, `TUBE name partitions`."""

    NAME = "TUBE"
    SENDER = Side.BOTH
    USAGE = "tube [partitions]"
    tube: str
    partitions: int | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        words = _words(cls.NAME, rest, cls.USAGE, 1, 2)
        return cls(words[0], _integer(cls.NAME, "partitions", words[1]) if len(words) == 2 else None)

    def arguments(self) -> str:
        return self.tube if self.partitions is None else f"{self.tube} {self.partitions}"


@dataclass(frozen=True, slots=True)
class Claim(Command):
    """CLAIM: asks for the lease of a partition. `0/1` is the whole tube, whatever its number of partitions.

    `ttl` is how long the lease lasts without a word from its holder; `wait` how long to wait for one that
    another holds; `holder` an identity that survives a reconnect (default: the connection's name and number).
    Answered by LEASE, or ERROR lease_held.
    """

    NAME = "CLAIM"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions [ttl=seconds] [wait=seconds] [holder=word]"
    tube: str
    part: Part
    ttl: float | None = None
    wait: float | None = None
    holder: str | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, *more = _words(cls.NAME, rest, cls.USAGE, 2, 5)
        options = _options(
            cls.NAME,
            more,
            {
                "ttl": lambda text: _seconds(cls.NAME, "ttl", text),
                "wait": lambda text: _seconds(cls.NAME, "wait", text),
                "holder": str,
            },
        )
        return cls(tube, Part.parse(cls.NAME, part), **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part}"
        if self.ttl is not None:
            text += f" ttl={_number(self.ttl)}"
        if self.wait is not None:
            text += f" wait={_number(self.wait)}"
        if self.holder is not None:
            text += f" holder={self.holder}"
        return text


@dataclass(frozen=True, slots=True)
class _Leased(Command):
    """Common to what names a lease: tube, partition, term."""

    tube: str
    part: Part
    term: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term = _words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "term", term))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.term}"


@dataclass(frozen=True, slots=True)
class Renew(_Leased):
    """RENEW: the holder is alive. Every PODS, PLAN and ACK renews as well. Answered by LEASE."""

    NAME = "RENEW"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term"


@dataclass(frozen=True, slots=True)
class Release(_Leased):
    """RELEASE: the holder is done; from a client a request, from the server its confirmation."""

    NAME = "RELEASE"
    SENDER = Side.BOTH
    USAGE = "tube partition/partitions term"


@dataclass(frozen=True, slots=True)
class Lease(Command):
    """LEASE: the holder has the partition under `term`, for `ttl` seconds since it asked."""

    NAME = "LEASE"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions term ttl"
    tube: str
    part: Part
    term: int
    ttl: float

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, ttl = _words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(
            tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "term", term), _seconds(cls.NAME, "ttl", ttl)
        )

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.term} {_number(self.ttl)}"


@dataclass(frozen=True, slots=True)
class Pods(Command):
    """PODS: asks for the pods of a partition under a lease that covers it. Answered by RDATA lines and CURSOR.

    Without `upto`: what lies behind `after` (default: the start), regular pods by seq and then backfill pods
    by seq, at most `limit` pods and `backfill` backfill pods among them (0 leaves backfill out), and about
    `ids` ids (at least one pod); with nothing there it waits up to `wait` seconds. `upto`: exactly the pods of
    (after, upto], for a replay. `plan=1`: the CURSOR alone, no rows.
    """

    NAME = "PODS"
    SENDER = Side.CLIENT
    USAGE = (
        "tube partition/partitions term [after=r.b] [upto=r.b] [limit=pods] [ids=ids] [backfill=pods] "
        "[wait=seconds] [plan=1]"
    )
    tube: str
    part: Part
    term: int
    after: Cursor = Cursor(0, 0)
    upto: Cursor | None = None
    limit: int | None = None
    ids: int | None = None
    backfill: int | None = None
    wait: float | None = None
    plan: bool = False

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, *more = _words(cls.NAME, rest, cls.USAGE, 3, 10)

        def count(what: str) -> Callable[[str], int]:
            def read(text: str) -> int:
                value = _integer(cls.NAME, what, text)
                if value < 0:
                    raise _bad(cls.NAME, f"{what} must not be negative")
                return value

            return read

        options = _options(
            cls.NAME,
            more,
            {
                "after": lambda text: Cursor.parse(text),
                "upto": lambda text: Cursor.parse(text),
                "limit": count("limit"),
                "ids": count("ids"),
                "backfill": count("backfill"),
                "wait": lambda text: _seconds(cls.NAME, "wait", text),
                "plan": lambda text: text == "1",
            },
        )
        if "upto" in options and len(options.keys() & {"limit", "ids", "backfill", "wait", "plan"}):
            raise _bad(cls.NAME, "upto names an exact range; limit, ids, backfill, wait and plan do not go with it")
        return cls(tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "term", term), **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part} {self.term}"
        if self.after != Cursor(0, 0):
            text += f" after={self.after}"
        for key in ("upto", "limit", "ids", "backfill"):
            if (value := getattr(self, key)) is not None:
                text += f" {key}={value}"
        if self.wait is not None:
            text += f" wait={_number(self.wait)}"
        return text + (" plan=1" if self.plan else "")


@dataclass(frozen=True, slots=True)
class CursorAt(Command):
    """CURSOR: ends the answer to PODS: how many pods there were (or would be) and the cursor behind the last."""

    NAME = "CURSOR"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions r.b pods"
    tube: str
    part: Part
    cursor: Cursor
    pods: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, cursor, pods = _words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(tube, Part.parse(cls.NAME, part), Cursor.parse(cursor), _integer(cls.NAME, "pods", pods))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.cursor} {self.pods}"


@dataclass(frozen=True, slots=True)
class Ack(Command):
    """ACK: the downstream has these pods; they leave the tube. By `seqs`, or all of (`after`, `upto`]."""

    NAME = "ACK"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term seq,seq,...|upto=r.b [after=r.b]"
    tube: str
    part: Part
    term: int
    seqs: tuple[int, ...] = ()
    upto: Cursor | None = None
    after: Cursor = Cursor(0, 0)

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, *more = rest.split(" ", 4)
        head = _words(cls.NAME, " ".join((tube, part, term)) if term else "", cls.USAGE, 3, 3) if more else []
        if not head:
            raise _bad(cls.NAME, f"the form is `{cls.NAME} {cls.USAGE}`")
        common = (tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "term", term))
        if "=" not in more[0]:
            if len(more) > 1:
                raise _bad(cls.NAME, f"the form is `{cls.NAME} {cls.USAGE}`")
            return cls(*common, seqs=tuple(_integer(cls.NAME, "seq", text) for text in more[0].split(",")))
        options = _options(cls.NAME, more, {"upto": Cursor.parse, "after": Cursor.parse})
        if "upto" not in options:
            raise _bad(cls.NAME, "after= goes with upto=")
        return cls(*common, **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part} {self.term} "
        if self.upto is None:
            return text + ",".join(map(str, self.seqs))
        return text + f"upto={self.upto}" + (f" after={self.after}" if self.after != Cursor(0, 0) else "")


@dataclass(frozen=True, slots=True)
class Acked(Command):
    """ACKED: how many pods an ACK removed; fewer than asked for means that some were gone already."""

    NAME = "ACKED"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions pods"
    tube: str
    part: Part
    pods: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, pods = _words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "pods", pods))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.pods}"


@dataclass(frozen=True, slots=True)
class Park(Command):
    """PARK: an id (or, with no id, a whole pod) keeps failing: take it out of its pod and keep it aside with the error."""

    NAME = "PARK"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term seq id,id,...|* tries error text"
    tube: str
    part: Part
    term: int
    seq: int
    ids: tuple[int, ...]  # empty: the whole pod
    tries: int
    error: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, seq, ids, tries, error = _tail(cls.NAME, rest, cls.USAGE, 6)
        return cls(
            tube,
            Part.parse(cls.NAME, part),
            _integer(cls.NAME, "term", term),
            _integer(cls.NAME, "seq", seq),
            () if ids == "*" else tuple(_integer(cls.NAME, "id", text) for text in ids.split(",")),
            _integer(cls.NAME, "tries", tries),
            error,
        )

    def arguments(self) -> str:
        ids = ",".join(map(str, self.ids)) or "*"
        return f"{self.tube} {self.part} {self.term} {self.seq} {ids} {self.tries} {self.error}"


@dataclass(frozen=True, slots=True)
class Parked(Command):
    """PARKED: how many ids a PARK put aside."""

    NAME = "PARKED"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions ids"
    tube: str
    part: Part
    ids: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, ids = _words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), _integer(cls.NAME, "ids", ids))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.ids}"


COMMANDS: dict[str, type[Command]] = {
    kind.NAME: kind
    for kind in (
        Server, Rdata, Position, Error, Ping, Name, Replicate, UserSync, ClearUserSync, FederationAck,
        RemoteServerUp, UserIp, LockReleased,
        Auth, Writers, Doorbell,
        Tube, Claim, Renew, Release, Lease, Pods, CursorAt, Ack, Acked, Park, Parked,
    )
}  # fmt: skip


def parse(line: str, sender: Side) -> Command:
    """Turn one line (without its end) into a command, as sent by `sender`.

    Raises:
        RemoteProtocolError: unknown command, not that side's command, or wrong arguments.
    """
    name, _, rest = line.partition(" ")
    kind = COMMANDS.get(name)
    if kind is None:
        known = ", ".join(n for n, k in COMMANDS.items() if k.SENDER & sender)
        raise RemoteProtocolError(f"unknown command {name[:40]!r}; there are {known}")
    if not kind.SENDER & sender:
        raise RemoteProtocolError(f"{name} is not a {'client' if sender is Side.CLIENT else 'server'}'s command")
    return kind.parse(rest)
