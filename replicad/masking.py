"""Makes text fit for logs and terminals: without secrets, and without characters that a terminal obeys.

Knows how secrets are written, not where they come from.
"""

from __future__ import annotations

import re

MASK = "***"

_PATTERNS = (
    # postgresql://user:password@host: greedy up to the last @ before the path, since passwords may hold one unescaped
    (
        re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{0,30}://[^\s:/@]{0,256}:)[^\s/]*(?=@)", re.IGNORECASE),
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


# C0 (but tab and line feed), DEL, C1, line and paragraph separators, and what changes the direction of text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with control characters written as `\u001b`: it cannot move a cursor, nor hide a part of itself.

    JSON text keeps its meaning. Tabs and line feeds stay.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
