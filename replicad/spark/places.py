"""Whether a text is a path of this machine's file system or a URI, which Hadoop and others read."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(text: str) -> Path | None:
    """The path, also of a `file:` URI; None: a URI of another file system."""
    found = _URI.match(text)
    if found is None:
        return Path(text).expanduser()
    if found[1].lower() != "file":
        return None
    return Path(unquote(urlsplit(text).path))


def place_of(text: str) -> Path | str:
    """The path, or the URI as it was written: `Path` makes one slash of two."""
    local = local_path(text)
    return re.sub(r"^([A-Za-z0-9+.-]+):/(?!/)", r"\1://", text) if local is None else local


def below(folder: Path, text: str) -> str:
    """A path relative to `folder`, as text; a URI stays as it is."""
    return text if _URI.match(text) else str(folder / Path(text).expanduser())
