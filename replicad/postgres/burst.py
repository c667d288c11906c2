"""Statements that are sent to Postgres in one message and answered together.

The driver sends a statement, waits for the answer in a task of asyncio, and is then asked for the next one. For short
statements that takes several times as long as Postgres needs. Here prepared statements are sent one after another, each
with its own Sync: each is a transaction of its own, takes its own snapshot, begins when the one before it has ended,
and fails alone. Their order on the server is the same as if each had waited for the answer to the one before.

`Prepared` and `Answers` do no I/O. `StandIn` takes the place of the driver's protocol on its transport until all
statements are answered. The messages are in the manual of Postgres: Message Formats. Values go as text, but for bytea
in results.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import trio

from replicad.errors import DatabaseError

MOST_PREPARED: Final = 256  # statements that a connection keeps prepared for bursts, as many as the driver keeps

_HEAD: Final = struct.Struct("!ci")  # the kind of a message, and its length with these four bytes
_SIZE: Final = struct.Struct("!i")
_SHORT: Final = struct.Struct("!h")
_SYNC: Final = b"S\0\0\0\x04"
_EXECUTE: Final = b"E\0\0\0\x09\0\0\0\0\0"  # the unnamed portal, all rows
_NULL: Final = b"\xff\xff\xff\xff"
_BYTEA: Final = 17


def _numbers(data: bytes) -> list[int | None]:
    inner = data[1:-1]
    return [None if word == b"NULL" else int(word) for word in inner.split(b",")] if inner else []


_DECODERS: Final[Mapping[int, Callable[[bytes], Any]]] = {  # by the oid of the type
    16: b"t".__eq__,  # boolean
    _BYTEA: bytes,
    **dict.fromkeys((20, 21, 23, 26), int),  # bigint, smallint, integer, oid
    **dict.fromkeys((700, 701), float),
    **dict.fromkeys((19, 25, 114, 1042, 1043, 3802), bytes.decode),  # name, text, json, char(n), varchar, jsonb
    **dict.fromkeys((1005, 1007, 1016, 1028), _numbers),  # arrays of smallint, integer, bigint, oid
}


class Prepared:
    """A prepared statement, by its name on the server."""

    __slots__ = ("_bind", "_decoders", "_formats", "_kept", "_last", "columns")

    def __init__(self, name: str, columns: Sequence[tuple[str, int]], kept: object = None) -> None:
        """`columns`: the name and the oid of the type of each. `kept`: the driver's object, which keeps it prepared.

        Raises LookupError for a type that is not known here.
        """
        self.columns = tuple(column for column, _ in columns)
        self._decoders = tuple(_DECODERS[oid] for _, oid in columns)
        self._bind = b"\0" + name.encode() + b"\0\0\0"  # the unnamed portal; parameters as text
        formats = b"".join(_SHORT.pack(oid == _BYTEA) for _, oid in columns)
        self._formats = _SHORT.pack(len(columns)) + formats
        self._kept = kept
        self._last: tuple[Sequence[object] | None, bytes] = (None, b"")

    def call(self, args: Sequence[object]) -> bytes:
        """The messages that run it, kept for the same object `args`: a poll repeats it, and never changes it."""
        if args is self._last[0]:
            return self._last[1]
        parts = [self._bind, _SHORT.pack(len(args))]
        for value in args:
            if value is None:
                parts.append(_NULL)
            else:
                text = as_text(value).encode()
                parts += (_SIZE.pack(len(text)), text)
        body = b"".join([*parts, self._formats])
        message = b"".join([_HEAD.pack(b"B", len(body) + 4), body, _EXECUTE, _SYNC])
        self._last = (args, message)
        return message

    def row(self, data: bytes) -> dict[str, Any]:
        """The row of a DataRow, without its head."""
        at = 2
        values: list[Any] = []
        for decode in self._decoders:
            (size,) = _SIZE.unpack_from(data, at)
            at += 4
            if size < 0:
                values.append(None)
            else:
                values.append(decode(data[at : at + size]))
                at += size
        return dict(zip(self.columns, values, strict=True))


def as_text(value: object) -> str:
    """A value as Postgres reads it: a text, number, boolean, time, bytes, or a list of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "{" + ",".join(map(_element, value)) + "}"
    raise TypeError(f"no text for Postgres of a {type(value).__name__}")


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    text = as_text(value)
    if isinstance(value, int | float):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Answers:
    """Takes the bytes that answer a burst. `found` has, for each statement that is answered, its rows, or the fields of
    the ERROR. `fatal`: the fields of an error with which the server has ended the session.
    """

    def __init__(self, statements: Sequence[Prepared]) -> None:
        self.found: list[list[dict[str, Any]] | dict[str, str]] = []
        self.fatal: dict[str, str] | None = None
        self.in_transaction = False  # after the last answer; then the session is not as it was
        self._statements = statements
        self._rows: list[dict[str, Any]] = []
        self._error: dict[str, str] | None = None
        self._rest = b""

    @property
    def complete(self) -> bool:
        """Whether every statement is answered."""
        return len(self.found) == len(self._statements)

    def feed(self, data: bytes) -> None:
        """Take bytes. Raises DatabaseError for an answer that no statement of ours can have."""
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            kind, size = _HEAD.unpack_from(data, at)
            if end - at <= size:
                break
            self._take(kind, data[at + 5 : at + 1 + size])
            at += 1 + size
        self._rest = data[at:]

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == b"D" and not self.complete:
            self._rows.append(self._statements[len(self.found)].row(body))
        elif kind == b"Z" and not self.complete:
            self.found.append(self._rows if self._error is None else self._error)
            self.in_transaction = body != b"I"
            self._rows, self._error = [], None
        elif kind == b"E":
            self._error = {part[:1].decode(): part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
            if self._error.get("V") in ("FATAL", "PANIC"):
                self.fatal = self._error
        elif kind not in b"2CsIANS":  # bound; complete, suspended, empty; what may come at any time
            raise DatabaseError(f"Postgres answered a burst of statements by a message of the kind {kind!r}.")


class StandIn(asyncio.Protocol):
    """In place of the driver's protocol, until `done`: then all is answered, or `lost`, the connection has ended."""

    def __init__(self, protocol: Any, answers: Answers) -> None:
        self.done = trio.Event()
        self.lost: BaseException | None = None
        self._protocol = protocol
        self._answers = answers

    def data_received(self, data: bytes) -> None:
        """Bytes from the server."""
        try:
            self._answers.feed(data)
        except Exception as error:  # noqa: BLE001 - raised by the task that waits
            self.lost = error
        if self.lost is not None or self._answers.complete:
            self.done.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended. The driver is to know as well."""
        self.lost = exc or ConnectionResetError("the server has closed the connection")
        self._protocol.connection_lost(exc)
        self.done.set()

    def pause_writing(self) -> None:
        """For the driver's next statement."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """For the driver's next statement."""
        self._protocol.resume_writing()
