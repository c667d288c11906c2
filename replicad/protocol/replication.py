"""The commands of Synapse's TCP replication: all that a Synapse 1.79 client sees or sends (docs/protocol-notes.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from replicad.protocol.tokens import MAX_TOKEN
from replicad.protocol.words import MAX_WORD, Command, Side, bad, integer, json_array, split_tail, split_words

BATCH = "batch"  # in the place of a token: more rows with the same token follow


@dataclass(frozen=True, slots=True)
class Server(Command):
    """SERVER: who is talking; the first line of every connection."""

    NAME = "SERVER"
    SENDER = Side.SERVER
    USAGE = "server_name"
    server_name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*split_words(cls.NAME, rest, cls.USAGE, 1, 1))

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
        stream, instance, token, row = split_tail(cls.NAME, rest, cls.USAGE, 3)
        return cls(stream, instance, None if token == BATCH else integer(cls.NAME, "token", token), row)

    def arguments(self) -> str:
        return f"{self.stream} {self.instance} {BATCH if self.token is None else self.token} {self.row}"


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
        stream, instance, prev, new = split_words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(stream, instance, integer(cls.NAME, "prev_token", prev), integer(cls.NAME, "new_token", new))

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
            raise bad(cls.NAME, f"a name has 1 to {MAX_WORD} characters")
        return cls(rest)

    def arguments(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Replicate(Command):
    """REPLICATE: subscribe. Alone, to every stream from now on, as in Synapse; with arguments, to one (ours).

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
        stream, blank, after = rest.partition(" ")
        split_words(cls.NAME, stream, cls.USAGE, 1, 1)
        words = [stream, *(after.split(" ") if blank else ())]  # a token is longer than other words may be
        linear = len(words) > 1 and words[-1] == "linear"
        if linear:
            words.pop()
        if len(words) > 2 or not all(words) or len(words[-1]) > max(MAX_TOKEN, MAX_WORD):
            raise bad(cls.NAME, f"the form is `{cls.NAME} {cls.USAGE}`")
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
        words = split_words(cls.NAME, rest, cls.USAGE, 4, 5)
        if len(words) == 4:
            words.insert(2, "None")
        instance, user, device, state, last_sync = words
        if state not in ("start", "end"):
            raise bad(cls.NAME, f"state must be start or end, got {state[:40]!r}")
        return cls(
            instance,
            user,
            None if device == "None" else device,
            state == "start",
            integer(cls.NAME, "last_sync_ms", last_sync),
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
        return cls(*split_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.instance_id


@dataclass(frozen=True, slots=True)
class FederationAck(Command):
    """FEDERATION_ACK: federation data up to `token` was delivered by `instance`; which stream's may be said (ours)."""

    NAME = "FEDERATION_ACK"
    SENDER = Side.CLIENT
    USAGE = "instance_name token [stream_name]"
    instance: str
    token: int
    stream: str | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        instance, token, *stream = split_words(cls.NAME, rest, cls.USAGE, 2, 3)
        return cls(instance, integer(cls.NAME, "token", token), *stream)

    def arguments(self) -> str:
        return f"{self.instance} {self.token}" if self.stream is None else f"{self.instance} {self.token} {self.stream}"


@dataclass(frozen=True, slots=True)
class RemoteServerUp(Command):
    """REMOTE_SERVER_UP: a remote server may be back; passed on to every other connection."""

    NAME = "REMOTE_SERVER_UP"
    SENDER = Side.BOTH
    USAGE = "server_name"
    server_name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*split_words(cls.NAME, rest, cls.USAGE, 1, 1))

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
        user, data = split_tail(cls.NAME, rest, cls.USAGE, 1)
        json_array(cls.NAME, data, 5)
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
        json_array(cls.NAME, rest, 3)
        return cls(rest)

    def arguments(self) -> str:
        return self.data
