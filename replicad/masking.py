"""Makes text fit for logs and terminals: without secrets, and without characters that a terminal obeys.

Knows how secrets are written, not where they come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_FIELDS = frozenset({"password", "secret", "authorization", "auth_token"})
_DEPTH = 4  # fields are flat or nearly so; deeper values are rendered by repr() and masked as text
_NUMBER_BITS = 256  # of a whole number that is shown; thousands of digits cannot be rendered at all

LONGEST_WORD = 400  # characters without a blank in a message: longer than names, addresses and paths
LONGEST_MESSAGE = 8 << 10  # characters: twenty faults of a file take half of it
LONGEST_TRACEBACK = 64 << 10  # characters in the log: those of nested groups take some 20 KiB

_PATTERNS = (
    # postgresql://user:password@host: greedy up to the last @ before the path, since passwords may hold one unescaped
    (
        re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{0,30}://[^\s:/@]{0,256}:)[^\s/]*(?=@)", re.IGNORECASE),
        rf"\g<keep>{MASK}",
    ),
    # the same where the password has a / that is not escaped
    (
        re.compile(r"(?P<keep>\bpostgres(?:ql)?://[^\s:/@]{0,256}:)[^\s?]*(?=@)", re.IGNORECASE),
        rf"\g<keep>{MASK}",
    ),
    # password=..., sslpassword=..., token=..., secret=... in a URL's query, in libpq's keyword form and in text
    (
        re.compile(r"(?P<keep>\b[a-z_]*(?:password|passwd|token|secret)\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&,;)]+)", re.I),
        rf"\g<keep>{MASK}",
    ),
    # the line that carries the daemon's token; in sentences about it (`AUTH token`) the word stands for the secret
    (
        re.compile(r"(?P<keep>\bAUTH )(?!(?:token|word|NAME\.SECRET)[`'\",.:;)]*(?:\s|$)|\(--)\S+"),
        rf"\g<keep>{MASK}",
    ),
)


def mask_secrets(text: str) -> str:
    """The text with every password and token in it replaced by `***`; text without any comes back as it was."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def bounded(text: str, most: int = LONGEST_MESSAGE) -> str:
    """The text without its middle if it is longer than `most`: a message begins with what failed and ends with the
    remedy. Not much longer than `most`.
    """
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 4
    return f"{text[:head]}... ({len(text) - head - tail:,} characters left out) ...{text[-tail:]}"


def shortened(text: str) -> str:
    """A message of bounded length, whatever input it repeats: of a long word the beginning and the end are left."""
    return bounded(_LONG_WORD.sub(lambda found: bounded(found.group(), LONGEST_WORD), text))


# C0 (but tab and line feed), DEL, C1, line and paragraph separators, what changes the direction of text, and halves of
# characters, which cannot be encoded.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with control characters written as `\u001b`: it cannot move a cursor, nor hide a part of itself, and
    every encoding of Unicode has it.

    JSON text keeps its meaning. Tabs and line feeds stay.
    """
    if text.isprintable():  # as almost always
        return text
    return _OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def mask_value(value: Any, depth: int = _DEPTH, most: int = LONGEST_MESSAGE) -> Any:
    """A copy of the value that JSON, a log and a terminal can have: secrets in its texts are masked, control characters
    and halves of characters are made visible, texts of more than `most` characters lose their middle, and a number that
    JSON does not have becomes a text. Never raises.
    """
    if value is None or isinstance(value, (int, float)):
        return _number(value)
    if depth and isinstance(value, Mapping):
        return {_text(key): mask_field(_text(key), item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [mask_value(item, depth - 1) for item in value]
    return _text(value, most)


def mask_field(name: str, value: Any, depth: int = _DEPTH) -> Any:
    """As `mask_value`. A field with the name of a secret is masked as a whole."""
    most = LONGEST_TRACEBACK if name == "exception" else LONGEST_MESSAGE
    return MASK if name in _SECRET_FIELDS else mask_value(value, depth, most)


def _number(value: float | None) -> object:
    if isinstance(value, int) and value.bit_length() > _NUMBER_BITS:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: object, most: int = LONGEST_MESSAGE) -> str:
    try:
        return bounded(visible(mask_secrets(str(value))), most)  # masked first: half a secret is not found
    except Exception as error:  # noqa: BLE001 - an event is not lost because a value has no text
        return f"a {type(value).__name__} that has no text ({type(error).__name__})"
