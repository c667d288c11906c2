"""Takes secrets out of text that people or logs will see. Knows how secrets are written, not where they come from."""

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
    # the line that carries the daemon's token
    (re.compile(r"(?P<keep>\bAUTH )\S+"), rf"\g<keep>{MASK}"),
)


def mask_secrets(text: str) -> str:
    """The text with every password and token in it replaced by `***`; text without any comes back as it was."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
