"""Origins of web pages, as settings name them: RFC 6454, with the port where it is not the scheme's own."""

from __future__ import annotations

import re

ANY = "*"
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def parse_origins(text: str) -> str:
    """Check `https://a.example.org,http://localhost:3000`, or `*`. Raises ValueError with what to give instead."""
    for one in text.split(","):
        if text != ANY and not _ORIGIN.fullmatch(one):
            raise ValueError(
                "give origins as browsers send them, in lower case, with commas between: "
                "https://shop.example.org,http://localhost:3000; or * alone"
            )
    return text
