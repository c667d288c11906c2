"""The types of columns: in Postgres, in Arrow, and which type can hold the values of another type.

`ColumnType` distinguishes types by the text of format_type(). A value may become another type if every value has one
form in it (`integer` in `bigint`, `numeric(8,2)` in `numeric`); every value has one form in `text`. A change that
could round or cut off a value is refused. JSON in a text is read as JSON: Postgres refuses other texts, row by row.

`Column` has the SQL expression and the Arrow type of a column. The type in Postgres decides, not the driver's value:
the driver gives money as its number of cents, and a date of `infinity` as some day. Types that Arrow does not have come
as their text. docs/types.md shows what each downstream gets.

`widens` decides which Arrow type holds every value of another type: files are written anew when a column gets a wider
type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from replicad.spark.database import literal, quote

COLUMNS: Final = """
WITH RECURSIVE typed (place, number, name, type, modifier) AS (
  SELECT r.place, a.attnum, a.attname, a.atttypid, a.atttypmod
  FROM ROWS FROM (pg_catalog.unnest(ARRAY[{tables}]::text[])) WITH ORDINALITY AS r(tbl, place)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = r.tbl::pg_catalog.regclass
  WHERE a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
  SELECT d.place, d.number, d.name, t.typbasetype, t.typtypmod
  FROM typed d JOIN pg_catalog.pg_type t ON t.oid = d.type WHERE t.typtype = 'd')
SELECT d.name::text, pg_catalog.format_type(d.type, d.modifier), d.place
FROM typed d JOIN pg_catalog.pg_type t ON t.oid = d.type WHERE t.typtype <> 'd' ORDER BY d.place, d.number
"""
"""Names and types of the columns of {tables}, quoted literals with commas, and the number of their table, from 1. In
place of a domain comes what it is made of.
"""

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
    @functools.lru_cache(maxsize=1024)  # the same few for each batch
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


_ARROW_DIGITS = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_WIDER = {
    pa.int64(): (pa.int16(), pa.int32()),
    pa.int32(): (pa.int16(),),
    pa.float64(): (pa.int16(), pa.int32(), pa.float32()),
    pa.float32(): (pa.int16(),),
}


def widens(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether a cast from `before` to `after` changes no value, and gives the text that Postgres would give."""
    if pa.types.is_list(before) and pa.types.is_list(after):
        return widens(before.value_type, after.value_type)
    digits, decimal = _ARROW_DIGITS.get(before), pa.types.is_decimal(before)
    if pa.types.is_decimal(after):
        whole = after.precision - after.scale
        if decimal:
            return bool(after.scale >= before.scale and whole >= before.precision - before.scale)
        return digits is not None and bool(whole >= digits)
    if pa.types.is_string(after):
        return bool(decimal) or digits is not None
    if pa.types.is_timestamp(after):
        return bool(before == pa.date32() and after.tz is None)
    return before in _WIDER.get(after, ())


def grows(before: pa.Schema, after: pa.Schema, added: Collection[str], widened: Collection[str]) -> bool:
    """Whether the only differences are columns of `added`, and wider types of columns of `widened`; and there are some.

    The order of the columns counts.
    """
    new = [name for name in after.names if name not in before.names]
    kept = [field for field in after if field.name not in new]
    if before == after or [field.name for field in kept] != before.names or not set(new) <= set(added):
        return False
    return all(
        field.type == before.field(field.name).type
        or (field.name in widened and widens(before.field(field.name).type, field.type))
        for field in kept
    )


def remedy(before: pa.DataType, after: pa.DataType) -> str:
    """What a user may set so that a column keeps its type, as the beginning of a sentence; empty for nothing."""
    if pa.types.is_string(before) and pa.types.is_decimal(after):
        return 'set [enrich] numeric = "text", or '
    return ""


MOST_DIGITS = 38  # of a decimal in Spark, Delta and Arrow's decimal128
DECIMAL, TEXT, FLOAT = "decimal", "text", "float"
NUMERIC_FORMS = {
    DECIMAL: f"a decimal if the column declares up to {MOST_DIGITS} digits, else its exact text; in an index a number",
    TEXT: "its exact text",
    FLOAT: "a double, which may be rounded",
}
PARK, NULL, LIMITS = "park", "null", "limits"
RANGE_FORMS = {
    PARK: "its row is parked, with the reason",
    NULL: "it becomes NULL",
    LIMITS: "it becomes the first or the last day of the years 1 to 9999",
}

_ARROW = {
    "boolean": pa.bool_(), "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64(), "oid": pa.int64(),
    "real": pa.float32(), "double precision": pa.float64(), "text": pa.string(), "character varying": pa.string(),
    "character": pa.string(), "bytea": pa.binary(), "date": pa.date32(),
    "timestamp without time zone": pa.timestamp("us"), "timestamp with time zone": pa.timestamp("us", tz="UTC"),
}  # fmt: skip
_CASTS = {"oid": "bigint", "money": "numeric"}  # what they are read as
_HELD = {
    "date": "({v} >= '0001-01-01'::date AND {v} < '10000-01-01'::date)",
    "timestamp without time zone": "({v} >= '0001-01-01'::timestamp AND {v} < '10000-01-01'::timestamp)",
    "timestamp with time zone": (
        "({v} >= '0001-01-01 00:00+00'::timestamptz AND {v} < '10000-01-01 00:00+00'::timestamptz)"
    ),
}  # Arrow has no infinity; Python, Spark and the log of Delta have no other years
_LAST = {
    "date": "'9999-12-31'::date",
    "timestamp without time zone": "'9999-12-31 23:59:59.999999'::timestamp",
    "timestamp with time zone": "'9999-12-31 23:59:59.999999+00'::timestamptz",
}
_FIRST = {
    "date": "'0001-01-01'::date",
    "timestamp without time zone": "'0001-01-01'::timestamp",
    "timestamp with time zone": "'0001-01-01 00:00+00'::timestamptz",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the SQL expression that reads it, the Arrow type of that, and the type in Postgres.

    `type` None: the expression changes the values. `unheld` is SQL for a text that says what the expression cannot
    hold; NULL for a value that it holds. Empty: it holds all values.
    """

    expression: str
    kind: pa.DataType
    type: str | None
    unheld: str = ""

    def is_wider(self, other: Column) -> bool:
        """Whether it holds all values of the other one, and has another type."""
        if None in (self.type, other.type) or self.type == other.type:
            return False
        return ColumnType.parse(self.type or "").holds(ColumnType.parse(other.type or ""))


@dataclass(frozen=True, slots=True)
class ColumnForms:
    """The rules for columns. `exact`: values that Arrow could change become their text, for a downstream that casts
    them.

    `numeric` is in NUMERIC_FORMS. `out_of_range` is in RANGE_FORMS: the treatment of dates and times that are infinite
    or not of the years 1 to 9999.
    """

    numeric: str = DECIMAL
    out_of_range: str = PARK
    exact: bool = False

    def column(self, name: str, type: str) -> Column:
        """The column of that name and type (as format_type() writes it)."""
        value, parsed = quote(name), ColumnType.parse(type)
        if parsed.name == "numeric" and not parsed.is_list and self.numeric == FLOAT:
            return Column(f"{value}::float8", pa.float64(), None)
        if parsed.name == "numeric" and not parsed.is_list and self.numeric == DECIMAL and not self.exact:
            return self._decimal(name, parsed, type)
        kind = _ARROW.get(parsed.name)
        if parsed.name in _CASTS and not parsed.is_list:
            read_as = _CASTS[parsed.name]
            return Column(f"{value}::{read_as}" + ("" if kind else "::text"), kind or pa.string(), read_as)
        if kind is None or parsed.name in _CASTS or (self.exact and (parsed.is_list or parsed.name in _HELD)):
            return Column(f"{value}::text", pa.string(), type)
        return self._list(name, parsed.name, kind, type) if parsed.is_list else self._plain(name, parsed, kind, type)

    def _plain(self, name: str, parsed: ColumnType, kind: pa.DataType, type: str) -> Column:
        value = quote(name)
        if parsed.name not in _HELD:
            return Column(value, kind, type)
        held = _HELD[parsed.name].format(v=value)
        unheld = f"CASE WHEN NOT {held} THEN {literal(f'column {name} is ')} || {value}::text END"
        return Column(self._mapped(value, parsed.name), kind, type, unheld if self.out_of_range == PARK else "")

    def _decimal(self, name: str, parsed: ColumnType, type: str) -> Column:
        """A decimal comes as its text too, because the driver has none. It has no NaN, which every numeric may be."""
        digits, scale = parsed.arguments or (0, 0)
        number = f"{quote(name)}::numeric"
        if not (0 < digits <= MOST_DIGITS and 0 <= scale <= digits):
            return Column(f"{number}::text", pa.string(), type)
        held = f"{number} <> 'NaN'"
        unheld = (
            f"CASE WHEN NOT {held} THEN {literal(f'column {name} is NaN')} END" if self.out_of_range == PARK else ""
        )
        return Column(f"CASE WHEN {held} THEN {number}::text END", pa.decimal128(digits, scale), type, unheld)

    def _list(self, name: str, of: str, kind: pa.DataType, type: str) -> Column:
        """A list has one dimension. The number of its first element is not kept."""
        value = quote(name)
        read = f"{value}[:]"  # begins with number 1; Arrow's driver refuses others
        has = literal(f"column {name} has ")
        reasons = [f"WHEN array_ndims({value}) > 1 THEN {has} || array_ndims({value}) || ' dimensions'"]
        if of in _HELD:
            elements = f"unnest({value}) WITH ORDINALITY AS u(e, n)"
            mapped = f"ARRAY(SELECT {self._mapped('e', of)} FROM {elements} ORDER BY n)"
            read = f"CASE WHEN {value} IS NOT NULL THEN {mapped} END"
            if self.out_of_range == PARK:
                some = f"EXISTS (SELECT FROM {elements} WHERE NOT {_HELD[of].format(v='e')})"
                reasons.append(f"WHEN {some} THEN {literal(f'column {name} is ')} || {value}::text")
        read = f"CASE WHEN array_ndims({value}) > 1 THEN NULL ELSE {read} END"
        return Column(read, pa.list_(pa.field("element", kind)), type, f"CASE {' '.join(reasons)} END")

    def _mapped(self, value: str, of: str) -> str:
        held = _HELD[of].format(v=value)
        if self.out_of_range != LIMITS:
            return f"CASE WHEN {held} THEN {value} END"
        return f"CASE WHEN {held} THEN {value} WHEN {value} > {_FIRST[of]} THEN {_LAST[of]} ELSE {_FIRST[of]} END"


def read_types(driver: Any, table: str) -> dict[str, str]:
    """The columns of a table in its order, and their types as format_type() writes them.

    Raises:
        DatabaseError: there is no such table, or it cannot be looked up.
    """
    with driver.cursor() as cursor:
        cursor.execute(COLUMNS.format(tables=literal(table)))
        return {name: type for name, type, _ in cursor.fetchall()}
