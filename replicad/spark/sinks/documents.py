"""Rows as the JSON documents of a search index.

    numeric        a number with all its digits; `null` for what is not finite
    json, jsonb    what it is, in place: an object, a list or a plain value
    dates, times   ISO 8601; binary values: base64; numbers that are not finite: `null`

An index takes the type of a field from the first document. So a number of a column that may have decimals, or more
digits than a long, is always written with a point: otherwise the first 5 would make a field of longs, which refuses
larger numbers and cuts off decimals.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from replicad.errors import RowRefused
from replicad.spark.column_types import ColumnType

_DIGITS_OF_LONG = 18
Encode = Callable[[Any], str]


def documents_of(rows: pa.Table, types: Mapping[str, str], names: Mapping[str, str], *, objects: bool) -> Iterator[str]:
    """The rows as JSON texts of one line each. `types`: the types of columns in Postgres, where they are known.

    `names` has other names for some columns. `objects`: JSON in a column becomes a part of the document, not a text.

    Raises:
        RowRefused: a text of such a column is not JSON.
    """
    keys = [json.dumps(names.get(name, name), ensure_ascii=False) for name in rows.schema.names]
    columns = []
    for field in rows.schema:
        encode = _encoder(field, ColumnType.parse(types.get(field.name, "")), objects=objects)
        columns.append([encode(value) for value in rows.column(field.name).to_pylist()])
    for values in zip(*columns, strict=True):
        yield "{" + ",".join(f"{key}:{value}" for key, value in zip(keys, values, strict=True)) + "}"


def _encoder(field: pa.Field, known: ColumnType, *, objects: bool) -> Encode:
    if pa.types.is_decimal(field.type):
        return _whole if field.type.scale == 0 and field.type.precision <= _DIGITS_OF_LONG else _decimal
    if pa.types.is_string(field.type) and not known.is_list:
        if known.name == "numeric":
            return _number
        if known.name in ("json", "jsonb") and objects:
            return _json
    for applies, encode in _ENCODERS:
        if applies(field.type):
            return encode
    return _value


def _integer(value: int | None) -> str:
    return "null" if value is None else str(value)


def _float(value: float | None) -> str:
    return "null" if value is None or not math.isfinite(value) else repr(value)


def _time(value: datetime.date | None) -> str:  # datetimes are dates
    return "null" if value is None else f'"{value.isoformat()}"'


def _whole(value: Decimal | None) -> str:
    return "null" if value is None else f"{value:f}"


def _decimal(value: Decimal | None) -> str:
    return _number(None if value is None else f"{value:f}")


def _number(text: str | None) -> str:
    """A number from the text of a numeric."""
    if text is None or text in ("NaN", "Infinity", "-Infinity"):
        return "null"
    return text if "." in text else f"{text}.0"


def _json(text: str | None) -> str:
    if text is None:
        return "null"
    try:
        _CHECK.decode(text)
    except (ValueError, RecursionError) as error:
        raise RowRefused(f"a value of a json column is not JSON: {str(error)[:200]}") from error
    return text.replace("\n", " ").replace("\r", " ")  # which stand between values only; a document is one line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


_CHECK = json.JSONDecoder(parse_constant=_refuse, parse_int=len, parse_float=len)  # numbers stay text


def _value(value: Any) -> str:
    return as_json(_finite(value))


def _plain(value: object) -> object:
    """A value that JSON does not have."""
    if isinstance(value, datetime.date):  # datetimes are dates
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


as_json = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False).encode  # quick with a text

# One encoder for each common type: asking json for one number after the other takes three times as long.
_ENCODERS: tuple[tuple[Callable[[pa.DataType], bool], Encode], ...] = (
    (pa.types.is_integer, _integer),
    (pa.types.is_boolean, {None: "null", False: "false", True: "true"}.__getitem__),
    (pa.types.is_floating, _float),
    (pa.types.is_string, as_json),
    (pa.types.is_date, _time),
    (pa.types.is_timestamp, _time),
)
