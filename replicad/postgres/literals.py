"""SQL text from values, for the statements that take no parameters (COPY, identifiers in DDL).

Everything else uses real parameters. Only the types that our own queries need are rendered; anything else is
refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta

_PLACEHOLDER = re.compile(r"\$([1-9][0-9]?)(?![0-9])")


def quote_ident(name: str) -> str:
    """The identifier in double quotes, safe in any statement. Raises ValueError for an empty name or a NUL."""
    if not name or "\x00" in name:
        raise ValueError("an identifier is empty or contains a NUL character")
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: object) -> str:  # noqa: PLR0911 - one return per type
    """A constant of type bool, int, float, str, None, or a list of int or of str, as SQL text in parentheses or quotes.

    Integers have the type bigint, lists bigint[] or text[]. Raises ValueError for text with a NUL and TypeError for
    any other type.
    """
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return f"('{value}'::bigint)"
    if isinstance(value, float):
        return f"('{value!r}'::float8)"
    if isinstance(value, str):
        return _quote_text(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return "('{" + ",".join(map(str, value)) + "}'::bigint[])"
        if all(isinstance(item, str) for item in value):
            return "(ARRAY[" + ",".join(_quote_text(item) for item in value) + "]::text[])"
    raise TypeError(f"cannot write a {type(value).__name__} as an SQL constant")


def quote_argument(value: object) -> str:
    """A constant without a type, as an argument of a function whose signature says the type.

    Takes bool, int, float, str, timedelta, None, or a list of int or of str. Raises as `quote_literal`.
    """
    if value is None:
        return "NULL"
    if isinstance(value, timedelta):
        return f"'{value.total_seconds():.6f} seconds'"
    if isinstance(value, bool | int | float | str):
        return _quote_text(str(value))
    if isinstance(value, list | tuple) and all(type(item) in {int, str} for item in value):
        return _quote_text("{" + ",".join(map(_element, value)) + "}")
    raise TypeError(f"cannot write a {type(value).__name__} as an SQL constant")


def _element(value: int | str) -> str:
    """As an array's text has it."""
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quote_text(value: str) -> str:
    if "\x00" in value:
        raise ValueError("Postgres text cannot contain a NUL character")
    escaped = value.replace("'", "''")
    if "\\" in escaped:  # E'' means the same whatever standard_conforming_strings says
        return "E'" + escaped.replace("\\", "\\\\") + "'"
    return "'" + escaped + "'"


def fill(query: str, args: Sequence[object], quote: Callable[[object], str] = quote_literal) -> str:
    """The query with `$1`, `$2`, ... replaced by constants. The query must not contain `$n` inside its own strings.

    Without arguments the query stays as it is. Raises IndexError for a placeholder without an argument and ValueError
    for an argument without a placeholder.
    """
    if not args:
        return query
    used: set[int] = set()

    def constant(match: re.Match[str]) -> str:
        number = int(match.group(1))
        used.add(number)
        return quote(args[number - 1])

    filled = _PLACEHOLDER.sub(constant, query)
    if len(used) != len(args):
        raise ValueError(f"{len(args)} arguments for {len(used)} placeholders")
    return filled
