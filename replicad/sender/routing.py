"""Routing: from rows of a stream to facts and updates with their destinations.

The application knows the members of a room, and the form of a fact on the wire. It gives both in the row itself
(`RowRouter`), by a fixed list (`FixedRouter`), in SQL (`SqlRouter`) or in a Python function (`FunctionRouter`). Which
sender serves a destination, and whether a name is valid, is checked later.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple, NoReturn, Protocol, TypeGuard, TypeVar

from replicad.config.declaring import load_object
from replicad.errors import DatabaseError, DatabaseUnavailable, RouteFailed, UsageError
from replicad.postgres.bridge import Database, Row
from replicad.sqlstates import BAD_DATA, means

T = TypeVar("T", bound="Fact | Update")

MAX_KEY = 1000  # bytes of a room or a key; keys are part of an index


class SourceRow(NamedTuple):
    """An unchanged row: its token, its number among the rows with that token (from 0), and its JSON text."""

    token: int
    part: int
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of a row, in the form in which it is sent, with its destinations.

    `body` is a JSON value, or as a str the JSON text of one; None is the row itself. Of the facts of one `room`
    catch-up needs to deliver the latest only; None: this fact is never superseded.
    """

    destinations: Sequence[str]
    room: str | None = None
    body: object = None


@dataclass(frozen=True, slots=True)
class Update:
    """A short-lived update with its destinations. `body` as in `Fact`.

    Of updates with one `key` only the last counts. `droppable`: useless when it is late (typing, presence). It is kept
    in memory only and dropped if there are too many; other updates are stored in Postgres.
    """

    destinations: Sequence[str]
    body: object = None
    key: str | None = None
    droppable: bool = False


class Router(Protocol):
    """Routes rows. There is one result for each row; None for a row without destinations."""

    async def facts(self, rows: Sequence[SourceRow]) -> list[Fact | None]:
        """Route rows of the stream of facts. Raises RouteFailed for a row that cannot be routed."""

    async def updates(self, stream: str, rows: Sequence[SourceRow]) -> list[Update | None]:
        """Route rows of a stream of updates. Raises RouteFailed for a row that cannot be routed."""


class RowRouter(Router):
    """For rows that name their destinations: `{"destinations": [...], "room": ..., "pdu": ...}` and `{"destinations":
    [...], "edu": ..., "key": ..., "droppable": ...}`. Without `pdu` or `edu` the whole row is sent.
    """

    async def facts(self, rows: Sequence[SourceRow]) -> list[Fact | None]:
        """See Router."""
        return [self._fact(row) for row in rows]

    async def updates(self, stream: str, rows: Sequence[SourceRow]) -> list[Update | None]:  # noqa: ARG002
        """See Router."""
        return [self._update(row) for row in rows]

    @staticmethod
    def _fact(row: SourceRow) -> Fact | None:
        found = _object(row)
        destinations = _names(row, found.get("destinations"))
        room = _text(row, "room", found.get("room"))
        return Fact(destinations, room, _body(row, found, "pdu")) if destinations else None

    @staticmethod
    def _update(row: SourceRow) -> Update | None:
        found = _object(row)
        destinations = _names(row, found.get("destinations"))
        key, droppable = _text(row, "key", found.get("key")), found.get("droppable", False)
        if not isinstance(droppable, bool):
            _fail(row, "its droppable is neither true nor false")
        return Update(destinations, _body(row, found, "edu"), key, droppable) if destinations else None


class FixedRouter(RowRouter):
    """Sends every row, unchanged, to the same destinations. If a row is an object with a `room`, that is its room."""

    def __init__(self, destinations: Sequence[str]) -> None:
        self._destinations = tuple(destinations)

    async def facts(self, rows: Sequence[SourceRow]) -> list[Fact | None]:
        """See Router."""
        return [Fact(self._destinations, self._room(row)) for row in rows]

    async def updates(self, stream: str, rows: Sequence[SourceRow]) -> list[Update | None]:  # noqa: ARG002
        """See Router."""
        return [Update(self._destinations, droppable=False) for _ in rows]

    @staticmethod
    def _room(row: SourceRow) -> str | None:
        found = _value(row)
        return _text(row, "room", found.get("room")) if isinstance(found, dict) else None


class FunctionRouter:
    """Calls a function of the user with (stream, token, decoded row); it returns a `Fact`, an `Update` or None."""

    def __init__(self, function: Callable[[str, int, Any], object], facts: str) -> None:
        """`facts` is the name of the stream of facts."""
        self._function = function
        self._facts = facts

    async def facts(self, rows: Sequence[SourceRow]) -> list[Fact | None]:
        """See Router."""
        return [self._call(self._facts, row, Fact) for row in rows]

    async def updates(self, stream: str, rows: Sequence[SourceRow]) -> list[Update | None]:
        """See Router."""
        return [self._call(stream, row, Update) for row in rows]

    def _call(self, stream: str, row: SourceRow, kind: type[T]) -> T | None:
        try:
            found = self._function(stream, row.token, _value(row))
        except Exception as error:
            raise RouteFailed(f"routing the row with token {row.token} raised {error!r}") from error
        if found is not None and not isinstance(found, kind):
            _fail(row, f"the routing function returned {type(found).__name__} where {kind.__name__} or None belongs")
        if found is None:
            return None
        _text(row, "room", found.room) if isinstance(found, Fact) else _text(row, "key", found.key)
        return replace(found, destinations=_names(row, found.destinations))


class SqlRouter:
    """A query of the user's for many rows at once: `$1` are their tokens (bigint[]), `$2` the rows (jsonb[]).

    It returns `n` (the place in the arrays, from 1: WITH ORDINALITY) and `destinations` (text[]), and for facts, where
    wanted, `room` and `pdu`, for updates `edu`, `key` and `droppable`. Rows that it leaves out have no destinations.
    """

    def __init__(self, db: Database, facts: str | None, updates: str | None) -> None:
        """Takes queries, or None for rows that name their destinations."""
        self._db = db
        self._facts = facts
        self._updates = updates
        self._rows = RowRouter()

    async def check(self) -> None:
        """Run the queries on no rows. Raises UsageError with the message of Postgres if a query is wrong."""
        for name, sql in (("--route-sql", self._facts), ("--update-route-sql", self._updates)):
            if sql is not None:
                await check_query(self._db, name, sql, "n::integer, destinations::text[]", [], [])

    async def facts(self, rows: Sequence[SourceRow]) -> list[Fact | None]:
        """See Router."""
        if self._facts is None:
            return await self._rows.facts(rows)
        routed: list[Fact | None] = [None] * len(rows)
        for place, found in await self._run(self._facts, rows):
            destinations = _names(rows[place], found["destinations"])
            if destinations:
                routed[place] = Fact(destinations, _text(rows[place], "room", found.get("room")), found.get("pdu"))
        return routed

    async def updates(self, stream: str, rows: Sequence[SourceRow]) -> list[Update | None]:
        """See Router."""
        if self._updates is None:
            return await self._rows.updates(stream, rows)
        routed: list[Update | None] = [None] * len(rows)
        for place, found in await self._run(self._updates, rows):
            destinations = _names(rows[place], found["destinations"])
            if destinations:
                key = _text(rows[place], "key", found.get("key"))
                routed[place] = Update(destinations, found.get("edu"), key, bool(found.get("droppable")))
        return routed

    async def _run(self, sql: str, rows: Sequence[SourceRow]) -> list[tuple[int, Row]]:
        try:
            found = await self._db.fetch(sql, [row.token for row in rows], [row.text for row in rows])
        except DatabaseError as error:
            if means(error.sqlstate, BAD_DATA):
                raise RouteFailed(f"a routing query failed on rows from token {rows[0].token} on: {error}") from error
            raise
        for row in found:
            if not isinstance(row["n"], int) or not 1 <= row["n"] <= len(rows):
                raise RouteFailed(f"a routing query returned n = {row['n']!r} for {len(rows)} rows; it counts from 1")
        return [(row["n"] - 1, row) for row in found]


async def check_query(db: Database, name: str, sql: str, columns: str, *args: object) -> None:
    """Run a user's query on arguments that match nothing. Raises UsageError if the query or a column of it is wrong."""
    try:
        await db.fetch(f"SELECT {columns} FROM ({sql.rstrip().rstrip(';')}) AS q LIMIT 0", *args)
    except DatabaseUnavailable:
        raise
    except DatabaseError as error:
        raise UsageError(f"{name} is not usable: {error}") from error


def load_function(path: str) -> Callable[[str, int, Any], object]:
    """The function that `module:name` names.

    Raises:
        UsageError: there is no such module, or no such function in it.
    """
    found = load_object(path, "--route")
    if not callable(found):
        raise UsageError(f"--route: {path} is no function")
    function: Callable[[str, int, Any], object] = found
    return function


def body_text(row: SourceRow, body: object) -> str:
    """The JSON text to deliver for a row, on one line. Raises RouteFailed if `body` is not JSON."""
    if body is None:
        return row.text
    try:
        if isinstance(body, str):
            json.loads(body, parse_constant=_refuse_constant)
            text = body
        else:
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if _MARK in text:
            text = _MARKED.sub(r"\1", text)
        text.encode()  # raises for an unpaired surrogate
    except (TypeError, ValueError, RecursionError) as error:
        raise RouteFailed(f"what the row with token {row.token} was turned into is no JSON: {error}") from error
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _fail(row: SourceRow, what: str) -> NoReturn:
    raise RouteFailed(f"the row with token {row.token} cannot be routed: {what}")


def _value(row: SourceRow, parse_float: Callable[[str], Any] | None = None) -> Any:
    try:
        return json.loads(row.text, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise RouteFailed(f"the row with token {row.token} is no JSON: {error}") from error


def _object(row: SourceRow) -> dict[str, Any]:
    found = _value(row, parse_float=_number)
    return found if isinstance(found, dict) else {}  # without destinations


def _body(row: SourceRow, found: dict[str, Any], name: str) -> object:
    """The body that a row has under `name`; None: the whole row. A null is refused: no application means the whole row,
    with the names of all destinations, by it. Of a `Fact`, a str is JSON text; in a row it is a string like others.
    """
    if name not in found:
        return None
    value = found[name]
    if value is None:
        _fail(row, f"its {name} is null; leave {name} out to have the whole row sent")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value


class _Number(str):
    """A number that a float would change. It becomes a text that begins with _MARK, and `body_text` takes that away."""

    __slots__ = ()


_MARK = secrets.token_hex(16)  # no row has this text
_MARKED = re.compile(rf'"{_MARK}([^"]*)"')


def _number(text: str) -> float | _Number:
    found = float(text)
    try:
        exact = isfinite(found) and (repr(found) == text or Decimal(repr(found)) == Decimal(text))
    except ArithmeticError:  # its exponent has a score of digits
        exact = False
    return found if exact else _Number(_MARK + text)


def _names(row: SourceRow, found: object) -> tuple[str, ...]:
    """Names of destinations, each once, in their order."""
    if found is None:
        return ()
    if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
        _fail(row, "its destinations are no list")
    names = tuple(found)
    if not all(map(_is_text, names)):
        _fail(row, "not every destination is a text")
    return tuple(dict.fromkeys(names))


def _is_text(found: object) -> TypeGuard[str]:
    """Whether Postgres can store it as text: no NUL, no unpaired surrogate."""
    if not isinstance(found, str) or isinstance(found, _Number) or "\0" in found:
        return False
    return found.isascii() or not any("\ud800" <= char <= "\udfff" for char in found)


def _text(row: SourceRow, what: str, found: object) -> str | None:
    if found is None:
        return None
    if not _is_text(found):
        _fail(row, f"its {what} is no text")
    if len(found.encode()) > MAX_KEY:
        _fail(row, f"its {what} has more than {MAX_KEY} bytes")
    return found
