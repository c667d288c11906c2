"""A row as JSON, made of its line of RDATA: `{"instance":"master","token":54,"row":...}`. The row stays as it is."""

from __future__ import annotations

import json
from functools import lru_cache


def row_json(line: bytes) -> bytes:
    """The JSON of a line of RDATA, on one line. `token` is null if more rows with the same token follow (`batch`)."""
    _, _, instance, token, row = line.split(b" ", 4)
    if b"\r" in row:
        row = row.replace(b"\r", b" ")  # between the words of the JSON: in a string it would be an escape
    return b"".join((_opening(instance), b"null" if token == b"batch" else token, b',"row":', row.rstrip(b"\n"), b"}"))


@lru_cache(maxsize=1024)
def _opening(instance: bytes) -> bytes:
    return b'{"instance":%s,"token":' % json.dumps(instance.decode(), ensure_ascii=False).encode()
