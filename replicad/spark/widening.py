"""Which Arrow type holds every value of another one: files are written anew when a column gets a wider type."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

_DIGITS = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
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
    digits, decimal = _DIGITS.get(before), pa.types.is_decimal(before)
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
