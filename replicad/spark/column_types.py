"""Which column of Postgres can hold the values of which other one without changing them.

Types are told apart by the text of format_type(). A value may become another type where every value has exactly one
form in it (`integer` in `bigint`, `numeric(8,2)` in `numeric`), and everything has one in `text`. What could be rounded
or cut off is refused. JSON in a text is read as JSON: what is none is refused by Postgres, row by row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = """
WITH RECURSIVE typed (number, name, type, modifier) AS (
  SELECT a.attnum, a.attname, a.atttypid, a.atttypmod FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = {table}::pg_catalog.regclass AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
  SELECT d.number, d.name, t.typbasetype, t.typtypmod FROM typed d JOIN pg_catalog.pg_type t ON t.oid = d.type
  WHERE t.typtype = 'd')
SELECT d.name::text, pg_catalog.format_type(d.type, d.modifier)
FROM typed d JOIN pg_catalog.pg_type t ON t.oid = d.type WHERE t.typtype <> 'd' ORDER BY d.number
"""
"""Names and types of the columns of {table}, a quoted literal. In place of a domain comes what it is made of."""

_DIGITS = {"smallint": 5, "integer": 10, "bigint": 19}
_TEXTS = {"text", "character varying", "citext"}
_JSON = {"json", "jsonb", "character", *_TEXTS}
_TAKES = {
    "real": {"smallint"},
    "double precision": {"smallint", "integer", "real"},
    "json": _JSON,
    "jsonb": _JSON,
    "timestamp without time zone": {"date"},
}  # beside themselves; with any arguments
_LENGTHS = {
    "character varying", "bit varying", "interval", "time without time zone", "time with time zone",
    "timestamp without time zone", "timestamp with time zone",
}  # fmt: skip
_UNBOUNDED = {"numeric", *_LENGTHS}  # without arguments they hold every value of the type


@dataclass(frozen=True, slots=True)
class ColumnType:
    """As format_type() writes it: `numeric(8,2)[]` has the name `numeric`, the arguments (8, 2), and is a list."""

    name: str
    arguments: tuple[int, ...] = ()
    is_list: bool = False

    @classmethod
    def parse(cls, text: str) -> ColumnType:
        """From the text of format_type()."""
        plain = text.removesuffix("[]")
        found = None if plain.startswith('"') else re.search(r"\((-?\d+(?:,-?\d+)*)\)", plain)
        if found is None:
            return cls(plain, (), plain != text)
        name = plain[: found.start()] + plain[found.end() :]
        return cls(name, tuple(int(number) for number in found[1].split(",")), plain != text)

    def holds(self, source: ColumnType) -> bool:
        """Whether a column of this type holds every value of `source`, unchanged or as its one form in this type."""
        if self.name in _TEXTS and not self.arguments and not self.is_list:
            return True
        if self.is_list != source.is_list:
            return False
        return self._has_room_for(source.arguments) if self.name == source.name else self._takes(source)

    def _has_room_for(self, arguments: tuple[int, ...]) -> bool:
        """Whether it holds every value of the same type with these arguments."""
        if self.arguments == arguments or (not self.arguments and self.name in _UNBOUNDED):
            return True
        if not self.arguments or not arguments:
            return False
        if self.name == "numeric":
            (digits, scale), (theirs, their_scale) = self.arguments, arguments
            return scale >= their_scale and digits - scale >= theirs - their_scale
        return self.name in _LENGTHS and self.arguments >= arguments

    def _takes(self, source: ColumnType) -> bool:
        """Whether it holds every value of a type with another name."""
        digits = _DIGITS.get(source.name)
        if self.name == "numeric" and digits is not None:
            return not self.arguments or self.arguments[0] - self.arguments[1] >= digits
        if self.name in _DIGITS:
            return digits is not None and digits < _DIGITS[self.name]
        if self.name == "character varying":
            return source.name == "character" and self.arguments >= source.arguments
        return source.name in _TAKES.get(self.name, ())
