"""Changes of a table as typed values: the JSON of a stream of changes, in the Arrow types of the table's columns.

`ChangedRows` makes the record batches of `spark.readStream.format("replicad").option("changes", True)`; histories use
the values too. Numbers of JSON are kept as they were written (`ExactNumber`), since a float would round a numeric.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Self

import pyarrow as pa

from replicad.client.changes import ChangeOp
from replicad.errors import DataLoss, DownstreamError, UsageError
from replicad.spark.columns import ColumnForms

OPS = {op.value[0]: op.value for op in ChangeOp}
SCHEMA_OP = "s"
KEY, ROW, OLD = "key", "row", "old"
PLAIN = (
    ("token", pa.int64()), ("op", pa.string()), ("xid", pa.int64()), ("at", pa.timestamp("us", tz="UTC")),
    ("unchanged", pa.list_(pa.field("element", pa.string()))),
)  # fmt: skip
COLUMNS = ("token", "op", KEY, ROW, OLD, "unchanged", "xid", "at")
NO_CHANGES = (
    "has no changes of a table: it was added without --changes (replicad streams add NAME --table TABLE --changes)"
)


class ExactNumber(str):
    """A number of JSON as it was written."""


def parse_change(line: str, stream: str) -> dict[str, Any]:
    """A line of a stream of changes.

    Raises:
        UsageError: the stream has other rows.
    """
    found = json.loads(line, parse_float=ExactNumber, parse_int=ExactNumber)
    if not isinstance(found, dict) or not {"op", "schema", "at"} <= found.keys():
        raise UsageError(f"stream {stream} {NO_CHANGES}")
    return found


def as_json(value: Any) -> str:
    """The text of a value of JSON, with numbers as they were written."""
    if isinstance(value, ExactNumber):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_json, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(name)}: {as_json(one)}' for name, one in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def typed_value(value: Any, kind: pa.DataType, *, is_json: bool = False) -> Any:  # noqa: PLR0911, PLR0912 - one for each kind
    """A value of a change for a column of this type. `is_json`: a text is the text of a value of JSON.

    Raises:
        ValueError, ArithmeticError, TypeError: the column cannot have it.
    """
    if value is None:
        return None
    if pa.types.is_string(kind):
        plain = isinstance(value, ExactNumber) or (isinstance(value, str) and not is_json)
        return str(value) if plain else as_json(value)
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise ValueError(value)
        return [typed_value(one, kind.value_type) for one in value]
    if isinstance(value, (list, dict)):
        raise ValueError(value)  # noqa: TRY004 - the value does not fit; no caller is wrong
    if pa.types.is_boolean(kind):
        if value not in (True, False):
            raise ValueError(value)
        return value
    if pa.types.is_integer(kind):
        number = int(value)
        if number.bit_length() >= kind.bit_width and number != -(1 << (kind.bit_width - 1)):
            raise ValueError(value)
        return number
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_binary(kind):
        if not value.startswith("\\x"):
            raise ValueError(value)
        return bytes.fromhex(value.removeprefix("\\x"))
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind)
    at = datetime.fromisoformat(value)
    if kind.tz is not None:
        return at.astimezone(UTC)
    if at.tzinfo is not None:
        raise ValueError(value)
    return at


def _decimal(value: Any, kind: pa.DataType) -> Decimal:
    number = Decimal(value)
    if not number.is_finite():
        raise ValueError(value)
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    if -exponent > kind.scale or len(digits) + exponent > kind.precision - kind.scale:
        raise ValueError(value)
    return number


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The columns of a query on the changes of a table: `key`, `row` and `old` have the columns of the table.

    A column of the table that is not in them is left out; a column that a change does not have is NULL. `json`: the
    columns of the types json and jsonb, of which a text is not the value itself.
    """

    stream: str
    schema: pa.Schema
    json: frozenset[str] = frozenset()

    @classmethod
    def described(cls, stream: str, description: dict[str, Any]) -> Self:
        """The columns that a description of the table says (op s)."""
        forms = ColumnForms()
        kinds = {column["name"]: forms.column(column["name"], column["type"]).kind for column in description["columns"]}
        row = pa.struct([pa.field(name, kind) for name, kind in kinds.items()])
        key = pa.struct([pa.field(name, kinds[name]) for name in description["key"]])
        types = dict(PLAIN) | {KEY: key, ROW: row, OLD: row}
        json = {column["name"] for column in description["columns"] if column["type"] in ("json", "jsonb")}
        return cls(stream, pa.schema([(name, types[name]) for name in COLUMNS]), frozenset(json))

    def check(self) -> Self:
        """Raises UsageError where a column cannot be filled."""
        for name, kind in PLAIN:
            if self.schema.field(name).type != kind:
                raise UsageError(f"column {name} of changes is {kind}, and {self.schema.field(name).type} is asked for")
        for place in (KEY, ROW, OLD):
            struct = self.schema.field(place).type
            if not pa.types.is_struct(struct):
                raise UsageError(f"column {place} of changes has the columns of the table: give a struct, not {struct}")
            for field in struct:
                kind = field.type.value_type if pa.types.is_list(field.type) else field.type
                if pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_duration(kind):
                    raise UsageError(
                        f"{place}.{field.name}: changes have no values of type {field.type}; string has every value"
                    )
        return self

    def batch(self, lines: Iterable[tuple[int, str]]) -> pa.RecordBatch:
        """Changes as a record batch: lines with their tokens. Descriptions are left out.

        Raises:
            DownstreamError: a value does not fit its column; the message names the change, and the remedy.
        """
        made: list[list[Any]] = [[] for _ in COLUMNS]
        names = [field.name for field in self.schema.field(ROW).type]
        for token, line in lines:
            change = parse_change(line, self.stream)
            if change["op"] == SCHEMA_OP:
                continue
            row = change.get(ROW)
            values = (
                token,
                OPS[change["op"]],
                self._key(token, change),
                self._struct(token, ROW, row),
                self._struct(token, OLD, change.get(OLD)),
                [name for name in names if name not in row] if change["op"] == "u" and row is not None else None,
                int(change["xid"]),
                datetime.fromisoformat(change["at"]).astimezone(UTC),
            )
            for column, value in zip(made, values, strict=True):
                column.append(value)
        arrays = [pa.array(column, field.type) for column, field in zip(made, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _key(self, token: int, change: dict[str, Any]) -> dict[str, Any] | None:
        if KEY not in change:
            return None
        names = [field.name for field in self.schema.field(KEY).type]
        values = change[KEY] if len(names) > 1 else [change[KEY]]
        if not isinstance(values, list) or len(values) != len(names):
            raise DataLoss(
                f"stream {self.stream}, change {token}: its key {as_json(change[KEY])} is not one of {names}"
            )
        return self._struct(token, KEY, dict(zip(names, values, strict=True)))

    def _struct(self, token: int, place: str, values: dict[str, Any] | None) -> dict[str, Any] | None:
        if values is None:
            return None
        made = {}
        for field in self.schema.field(place).type:
            value = values.get(field.name)
            try:
                made[field.name] = typed_value(value, field.type, is_json=field.name in self.json)
            except (ValueError, ArithmeticError, TypeError, AttributeError) as error:
                raise DownstreamError(
                    f"stream {self.stream}, change {token}: {place}.{field.name} is {as_json(value)[:200]}, which "
                    f"{field.type} cannot hold; read the column as a string, in a schema of your own: .schema(...)"
                ) from error
        return made


def described_columns(rows: Sequence[str], stream: str) -> dict[str, Any] | None:
    """The last description of columns among these lines of a stream of changes."""
    found = None
    for line in rows:
        change = parse_change(line, stream)
        if change["op"] == SCHEMA_OP:
            found = change[ROW]
    return found
